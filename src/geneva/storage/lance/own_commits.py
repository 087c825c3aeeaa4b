"""What the running jobs of this process have committed: the store need not be asked for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from geneva.model.tables import TableRef

_OWN: dict[str, set[tuple[str, int]]] = {}
"""Tables and versions, by job."""
_LOCK = threading.Lock()


def note_own_commit(uri: str, version: int, job_id: str) -> None:
    """Remember that a job of this process made a version of a table."""
    if job_id:
        with _LOCK:
            _OWN.setdefault(job_id, set()).add((uri, int(version)))


def forget_own_commits(job_id: str) -> None:
    """Forget a job that has ended: another one may have its id, on other tables in their places."""
    with _LOCK:
        _OWN.pop(job_id, None)


def is_own_commit(ref: TableRef, version: int, job_id: str) -> bool:
    """Whether a version is known to be of a job; False where nobody remembers."""
    return are_own_commits(ref, (version,), job_id)


def are_own_commits(ref: TableRef, versions: Iterable[int], job_id: str) -> bool:
    """Whether all of some versions are known to be of a job."""
    with _LOCK:
        own = _OWN.get(job_id, set())
        return all((ref.uri, int(version)) in own for version in versions)

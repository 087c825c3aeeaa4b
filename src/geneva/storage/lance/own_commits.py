"""What this process has committed lately, and for which job: the store need not be asked for it."""

from __future__ import annotations

from collections.abc import Iterable

from geneva.model.tables import TableRef

_OWN: dict[tuple[str, int, str], None] = {}
"""Tables, versions and jobs, in the order of the commits."""
_MAX_OWN = 1_024


def note_own_commit(uri: str, version: int, job_id: str) -> None:
    """Remember that a job of this process made a version of a table."""
    if job_id:
        _OWN[uri, int(version), job_id] = None
    while len(_OWN) > _MAX_OWN:
        del _OWN[next(iter(_OWN))]


def is_own_commit(ref: TableRef, version: int, job_id: str) -> bool:
    """Whether a version is known to be of a job; False where nobody remembers."""
    return (ref.uri, int(version), job_id) in _OWN


def are_own_commits(ref: TableRef, versions: Iterable[int], job_id: str) -> bool:
    """Whether all of some versions are known to be of a job."""
    return all(is_own_commit(ref, version, job_id) for version in versions)

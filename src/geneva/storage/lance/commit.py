"""Committing to a table that others commit to as well: one retry loop for all."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from lance.commit import CommitConflictError

from geneva.storage.lance.damage import is_file_gone

Result = TypeVar("Result")

_FIRST_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 1.0
_CONFLICT_SIGNS = (
    "commit conflict",
    "incompatible transaction",
    "fragment being replaced not found",
    "no changes were made",
)
"""Parts of the messages of conflicts that Lance raises as a plain OSError or RuntimeError."""


def is_conflict(error: BaseException) -> bool:
    """Whether a commit was refused because of what others committed."""
    text = str(error).lower()
    return isinstance(error, CommitConflictError) or any(sign in text for sign in _CONFLICT_SIGNS)


def retry_conflicts(
    attempt: Callable[[], Result], max_retries: int, exhausted: Exception | None = None
) -> Result:
    """Call `attempt` again, up to `max_retries` times, as long as it ends in a conflict.

    Each call has to look at the table anew. So a file that is gone is a conflict, too: of a version
    that somebody has cleaned up. Not if it is gone once more: then the table is broken. When the
    retries are used up, `exhausted` is raised in place of the last conflict. Any other error is
    raised as it is.
    """
    gone = set[str]()
    for retries in range(max_retries + 1):
        try:
            return attempt()
        except (OSError, RuntimeError, ValueError) as error:  # LanceDB's own calls raise any
            if is_file_gone(error) and str(error) not in gone:
                gone.add(str(error))
            elif isinstance(error, ValueError) or not is_conflict(error):
                raise
            conflict = error
        if retries < max_retries:
            time.sleep(pause_seconds(retries))
    raise conflict if exhausted is None else exhausted from conflict


def pause_seconds(retries: int) -> float:
    """How long to wait after a conflict: exponential, with full jitter, so that writers part."""
    longest = min(_MAX_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(retries, 16))
    return random.uniform(0, longest)

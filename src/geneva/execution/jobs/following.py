"""Following an earlier job of the same work: wait until it is over, instead of doing it twice.

Which job is earlier is decided by the order of commits to the job history. So there is a first one
among any number of jobs that start at once, and nobody waits for somebody who waits for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from geneva.errors import JobCancelledError, JobNotFoundError, JobTimeoutError
from geneva.execution.jobs.heartbeat import is_inside
from geneva.storage.jobs.history import JobHistory
from geneva.storage.jobs.records import JobRecord

_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a job waits for others."""

    job_id: str
    cancelled: threading.Event
    timeout: float | None = None
    """Seconds; None: until the others are over."""


def wait_for(
    earlier: Sequence[str],
    history: JobHistory,
    patience: Patience,
    on_wait: Callable[[JobRecord], None],
) -> list[JobRecord]:
    """Wait until the jobs are over, well or not, or lost; return those that were waited for.

    `on_wait` is told of each of them when its turn comes. A job that the calling code is part
    of can't end before this does: it is not waited for.
    """
    started = time.monotonic()
    followed: list[JobRecord] = []
    for job_id in earlier:
        job = _look(history, job_id)
        if job is None or job.status.is_final or is_inside(job_id):
            continue
        on_wait(job)
        pause = _FIRST_PAUSE_SECONDS
        while job is not None and not job.status.is_final:
            _check_stop(job_id, patience, started)
            patience.cancelled.wait(pause)
            pause = min(_MAX_PAUSE_SECONDS, 1.5 * pause)
            followed_as, job = job, _look(history, job_id)
        followed.append(job or followed_as)
    return followed


def _look(history: JobHistory, job_id: str) -> JobRecord | None:
    try:
        return history.job(job_id)
    except JobNotFoundError:
        return None


def _check_stop(other: str, patience: Patience, started: float) -> None:
    if patience.cancelled.is_set():
        raise JobCancelledError(
            f"Job {patience.job_id} was cancelled while it waited for job {other}, which does the "
            "same. That one goes on."
        )
    limit = patience.timeout
    if limit is not None and time.monotonic() - started > limit:
        raise JobTimeoutError(
            f"Job {patience.job_id} did not begin within {limit:g} s: job {other} does the same, "
            "and is not done yet. That one goes on; run this again when it is over."
        )

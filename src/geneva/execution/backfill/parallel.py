"""Several pieces of work on one table at the same time: the columns of a view."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

from geneva.errors import JobCancelledError, UnreadableFragmentsError
from geneva.execution.backfill.driver import JobControl, run_backfill
from geneva.execution.backfill.failures import all_unreadable
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.jobs.progress import JobProgress


def run_side_by_side(
    works: Sequence[PreparedBackfill], control: JobControl, total: int
) -> JobProgress:
    """Run all of them as one job. When one fails the others stop, and its error is raised.

    They fill different columns, so that their commits don't get in each other's way. A limit on
    concurrency is for the job: then they run one after the other.
    """
    sums = Sums(len(works), total, control)
    stop = _Stop(control.cancelled)
    runs = [
        partial(
            run_backfill,
            work,
            replace(control, listeners=(partial(sums.take, i),), cancelled=stop),
        )
        for i, work in enumerate(works)
    ]
    if len(works) < 2 or any(work.request.options.concurrency is not None for work in works):
        unreadable: list[UnreadableFragmentsError] = []
        for run in runs:
            try:
                run()
            except UnreadableFragmentsError as failed:
                unreadable.append(failed)
        if unreadable:
            raise all_unreadable(unreadable)
        return sums.now()
    with ThreadPoolExecutor(len(works), thread_name_prefix="geneva-column") as threads:
        futures = [threads.submit(run) for run in runs]
        try:
            for future in futures:
                future.add_done_callback(stop.on_failure)
            wait(futures)
        except BaseException:
            # Ctrl-C arrives here; the threads see the flag.
            stop.set()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    unread = [error for error in errors if isinstance(error, UnreadableFragmentsError)]
    if unread and len(unread) == len(errors):
        raise all_unreadable(unread)
    if errors:
        raise next((e for e in errors if e not in unread and not stop.explains(e)), errors[0])
    return sums.now()


class _Stop(threading.Event):
    """Set when the job is cancelled, or when this is."""

    def __init__(self, cancelled: threading.Event) -> None:
        super().__init__()
        self._cancelled = cancelled

    def is_set(self) -> bool:
        """Whether to stop, for either reason."""
        return super().is_set() or self._cancelled.is_set()

    def on_failure(self, done: Future[JobProgress]) -> None:
        """Stop the others when one has failed, but for fragments that can't be read."""
        failure = done.exception()
        if failure is not None and not isinstance(failure, UnreadableFragmentsError):
            self.set()

    def explains(self, error: BaseException) -> bool:
        """Whether an error only says that this was set."""
        return isinstance(error, JobCancelledError) and not self._cancelled.is_set()


class Sums:
    """Adds up the progress of several runs, for those who follow the job."""

    def __init__(self, count: int, total: int, control: JobControl) -> None:
        self._parts = [JobProgress(total=0)] * count
        self._total, self._control = total, control
        self._lock = threading.Lock()

    def take(self, place: int, progress: JobProgress) -> None:
        """Note how far one of the runs is."""
        with self._lock:
            self._parts[place] = progress
            whole = self.now()
            for listener in self._control.listeners:
                listener(whole)

    def now(self) -> JobProgress:
        """How far all of them are together."""
        whole = JobProgress(total=self._total)
        for part in self._parts:
            whole = whole.plus(part)
        return whole

"""Several pieces of work on one table at the same time: the columns of a view."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from geneva.errors import UnreadableFragmentsError
from geneva.execution.backfill.control import JobControl
from geneva.execution.backfill.driver import run_backfills
from geneva.execution.backfill.failures import all_unreadable
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.jobs.progress import JobProgress


def run_side_by_side(
    works: Sequence[PreparedBackfill],
    control: JobControl,
    total: int,
    pins: Sequence[Callable[[], None]] = (),
) -> JobProgress:
    """Run all of them as one job. When one fails the others stop, and its error is raised.

    They fill different columns, so that their commits don't get in each other's way. A limit on
    concurrency is for the job: then they run one after the other. `pins` wait until versions that
    are read can't be cleaned up.
    """
    sums = Sums(len(works), total, control)
    runs = [
        (work, replace(control, listeners=(partial(sums.take, place),)))
        for place, work in enumerate(works)
    ]
    if all(work.request.options.concurrency is None for work in works):
        run_backfills(runs, pins=pins)
        return sums.now()
    unreadable: list[UnreadableFragmentsError] = []
    for run in runs:
        try:
            run_backfills([run], pins=pins)
        except UnreadableFragmentsError as failed:
            unreadable.append(failed)
    if unreadable:
        raise all_unreadable(unreadable)
    return sums.now()


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

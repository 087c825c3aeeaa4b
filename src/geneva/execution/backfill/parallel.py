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
from geneva.planning.backfill import BackfillPlan, distinct_rows


def run_side_by_side(
    works: Sequence[PreparedBackfill],
    control: JobControl,
    pins: Sequence[Callable[[], None]] = (),
) -> JobProgress:
    """Run all of them as one job. When one fails the others stop, and its error is raised.

    They fill different columns, so that their commits don't get in each other's way. A limit on
    concurrency is for the job: then they run one after the other. `pins` wait until versions that
    are read can't be cleaned up.
    """
    sums = Sums([work.plan for work in works], control)
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
    """The progress of several runs as one, in rows of the table, for those who follow the job.

    A row that several columns get a new value in is one row: each of them is a part of it.
    """

    def __init__(self, plans: Sequence[BackfillPlan], control: JobControl) -> None:
        self._plans = [*plans]
        self._parts = [_not_begun(plan) for plan in plans]
        self._rows = distinct_rows(plans)
        self._control = control
        self._lock = threading.Lock()

    def take(self, place: int, progress: JobProgress) -> None:
        """Note how far one of the runs is."""
        with self._lock:
            self._parts[place] = progress
            self._show()

    def replanned(self, place: int, plan: BackfillPlan) -> None:
        """Put another plan in the place of one whose run has not begun."""
        with self._lock:
            self._plans[place], self._parts[place] = plan, _not_begun(plan)
            self._rows = distinct_rows(self._plans)
            self._show()

    def _show(self) -> None:
        whole = self.now()
        for listener in self._control.listeners:
            listener(whole)

    def now(self) -> JobProgress:
        """How far all of them are together."""
        whole = JobProgress(total=sum(part.total for part in self._parts))
        for part in self._parts:
            whole = whole.plus(part)
        values = sum(plan.rows_to_compute for plan in self._plans)
        called = sum(part.udf_rows > 0 for part in self._parts)
        return replace(whole.in_rows(self._rows, values), functions=called)


def _not_begun(plan: BackfillPlan) -> JobProgress:
    return JobProgress(total=plan.rows_to_compute)

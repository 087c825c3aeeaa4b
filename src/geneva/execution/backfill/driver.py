"""Running plans in rounds until what was asked for is in the table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack

import pyarrow as pa

from geneva.errors import BudgetExceededError, TableChangedError, UnreadableFragmentsError
from geneva.execution.backfill.control import JobControl, JobState
from geneva.execution.backfill.failures import all_unreadable, unreadable_fragments
from geneva.execution.backfill.prepare import PreparedBackfill, Reading
from geneva.execution.backfill.rounds import Round, RoundOutcome, run_rounds, share_reads
from geneva.execution.jobs.progress import JobProgress
from geneva.model.computation import Udf
from geneva.model.tables import Reason
from geneva.render.plain import plain
from geneva.render.text import count
from geneva.storage.checkpoints.pins import pinning

_LOG = logging.getLogger("geneva")
_FEW_ROWS = 10
"""So many rows may be NULL by chance."""


def run_backfill(
    prepared: PreparedBackfill,
    control: JobControl,
    before_round: Callable[[], Reading | None] = lambda: None,
) -> JobProgress:
    """Carry a plan out, round after round, until what was asked for is in the table.

    `before_round` is called before a plan is made again, for what has to be brought up to date
    first. It says on which version that is so.
    """
    (progress,) = run_backfills([(prepared, control)], before_round)
    return progress


def run_backfills(
    works: Sequence[tuple[PreparedBackfill, JobControl]],
    before_round: Callable[[], Reading | None] = lambda: None,
    pins: Sequence[Callable[[], None]] = (),
) -> list[JobProgress]:
    """Carry several plans for one table out at once. When one fails, the others stop.

    They fill different columns, so that their commits don't get in each other's way. `pins` wait
    until versions of other tables that are read can't be cleaned up.
    """
    runs = [_Backfill(prepared, control) for prepared, control in works]
    active = runs
    while active:
        rounds = [run.next_round() for run in active]
        share_reads(rounds)
        with ExitStack() as held:
            # Most often one version for all of them.
            versions = {run.version: run for run in active}.values()
            waits = [held.enter_context(_pinning(run.planned, run.control)) for run in versions]
            try:
                outcomes = run_rounds(rounds, [*pins, *waits])
            except BudgetExceededError:
                for run, ended in zip(active, rounds, strict=True):
                    if ended.is_overspent:
                        _commit_results(run.planned, run.control, run.state)
                raise
        done = list(zip(active, outcomes, strict=True))
        active = [run for run, outcome in done if run.goes_on(outcome, before_round)]
    unreadable = [run.unreadable() for run in runs if run.state.unreadable]
    if unreadable:
        raise all_unreadable(unreadable)
    for run in runs:
        run.warn_of_nothing()
    return [run.state.ledger.progress for run in runs]


def _pinning(
    planned: PreparedBackfill, control: JobControl
) -> AbstractContextManager[Callable[[], None]]:
    """Keep the version of a plan from being cleaned up."""
    dataset, job_id = planned.dataset, control.job_id
    return pinning(dataset, job_id, control.is_running, behind=control.behind)


class _Backfill:
    """A plan over its rounds.

    A round that meets changes made by others may leave fragments over, or make some of its own
    results stale; the next one plans again on the latest version, and does just these rows.

    The job owes the rows that were to be computed when it began. It has paid when it has committed
    as many, or after a round all of whose files are in the table: what is left then came or changed
    since. The job follows it for some more rounds, and leaves it to the next one when others are
    faster. Each round before that brings it nearer to what it owes, or counts as a retry.
    """

    def __init__(self, prepared: PreparedBackfill, control: JobControl) -> None:
        self._prepared, self.control = prepared, control
        self.planned = prepared
        self.state = JobState.begin(prepared, control)
        self._is_paid = self._lossy = False
        self._retries = control.max_conflict_retries

    @property
    def version(self) -> int:
        """The version of the table that it is planned on."""
        return self.planned.snapshot.version

    def next_round(self) -> Round:
        """A pass over what is planned by now."""
        return Round(self.planned, self.control, self.state, in_haste=self._lossy)

    def goes_on(self, outcome: RoundOutcome, before_round: Callable[[], Reading | None]) -> bool:
        """Whether another round follows; then it is planned."""
        prepared, state = self._prepared, self.state
        if not prepared.request.follows_table:
            if state.lost_files:
                raise _files_deleted(prepared, state.lost_files)
            return False
        if not outcome.table_changed:
            return False
        self._lossy = outcome.lost + outcome.deleted > 0
        owed = prepared.plan.rows_to_compute
        paid = not self._lossy or state.ledger.progress.committed >= owed
        # Of a file of receipts alone no row is owed: what is deleted has to be there in the end.
        self._is_paid = not outcome.deleted and (self._is_paid or paid)
        if self._is_paid or outcome.deleted or not outcome.landed:
            self._retries -= 1
        at = before_round()
        planned = self.planned.again(frozenset(state.files), frozenset(state.lost_files), at)
        state.unreadable.update(planned.plan.unreadable)
        self.planned = planned = planned.without(state.unreadable)
        state.ledger.replanned(planned.plan.rows_to_compute)
        if not planned.plan.fragments:
            return False
        if self._retries < 0:
            if not self._is_paid:
                raise _kept_changing(planned, self.control, state.lost_files)
            state.ledger.left_over(planned.plan.rows_to_compute)
            return False
        return True

    def warn_of_nothing(self) -> None:
        """Say that a function returned NULL for every row, where that is most likely a mistake.

        Not of a few rows, nor of some that were asked for, nor where others have their values
        already: these may well be NULL.
        """
        plan, ledger = self._prepared.plan, self.state.ledger
        computation, rows = self._prepared.computation, ledger.rows_all_null
        program, types = computation.program, [output.type for output in computation.outputs]
        is_column = not plan.shown.makes_rows and computation.partition_rows is None
        if not isinstance(program, Udf) or not is_column or all(map(pa.types.is_null, types)):
            return
        if rows < _FEW_ROWS or plan.right_rows or self._prepared.request.selects_rows:
            return
        ledger.all_null(rows)
        _LOG.warning(
            "%s: function %r returned NULL for all of the %s that it was called for. If that is "
            "not meant, look for a missing `return`.",
            *(plain(plan.shown.place), plain(program.name), count(rows, "row")),
        )

    def unreadable(self) -> UnreadableFragmentsError:
        """What it ends with, when it has done all the rest."""
        return unreadable_fragments(self._prepared.plan, self.state.unreadable)


def _commit_results(planned: PreparedBackfill, control: JobControl, state: JobState) -> None:
    """Publish what is computed of fragments that are not done, where no more may be computed."""
    found = planned.again(frozenset(state.files), frozenset(state.lost_files))
    left = found.without(state.unreadable).without_calls()
    if left.plan.fragments:
        with _pinning(left, control) as wait_for_pin:
            run_rounds([Round(left, control, state)], [wait_for_pin])


def _files_deleted(prepared: PreparedBackfill, lost_files: Collection[str]) -> TableChangedError:
    named = ", ".join(sorted(lost_files)[:5])
    return TableChangedError(
        f"Data files that the backfill of {prepared.plan.column!r} wrote for table "
        f"{prepared.ref.name!r} were deleted meanwhile (a clean-up with delete_unverified=True?): "
        f"{named}. Run it again, without num_frags and read_version: their rows are computed again."
    )


def _kept_changing(
    prepared: PreparedBackfill, control: JobControl, deleted: Collection[str]
) -> TableChangedError:
    every = prepared.plan.fragments
    left = [f for f in every if f.reason is not Reason.NEW] or every
    named = ", ".join(f"{f.fragment_id} ({f.reason.value})" for f in left[:5])
    met = "nothing could be committed"
    if deleted:
        met = "its data files were deleted (a clean-up with delete_unverified=True?), or " + met
    return TableChangedError(
        f"Table {prepared.ref.name!r} kept changing under the backfill of {prepared.plan.column!r} "
        f"through {control.max_conflict_retries + 1} rounds in which {met}. "
        f"Fragments left over: {named}. What was computed is kept; run the backfill again when the "
        "table is calmer. "
        "(GENEVA_VERSION_CONFLICT_MAX_RETRIES sets the number of rounds.)"
    )

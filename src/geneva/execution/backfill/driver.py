"""Running a plan in rounds: tasks out, reports in, files committed, until nothing is left."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from geneva.errors import (
    BudgetExceededError,
    GenevaError,
    JobCancelledError,
    JobTimeoutError,
    TableChangedError,
)
from geneva.execution.backfill.committer import Commit, Committer, MakeCommitter, TableCommitter
from geneva.execution.backfill.dispatch import Dispatcher, JobRunner
from geneva.execution.backfill.failures import (
    error_of,
    error_records,
    too_many_failed,
    unreadable_fragments,
)
from geneva.execution.backfill.ledger import Ledger
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.backfill.tasks import TaskQueue
from geneva.execution.jobs.progress import JobProgress, ProgressListener
from geneva.execution.runner import Runner
from geneva.execution.worker.task import PartResult, RowFailure, TaskReport
from geneva.model.computation import MakePermit, permit_any
from geneva.model.rows import RowRange
from geneva.model.tables import Reason
from geneva.planning.backfill import Action, FragmentPlan
from geneva.storage.checkpoints.pins import pinned
from geneva.storage.checkpoints.staging import open_checkpoints
from geneva.storage.checkpoints.store import CheckpointKey, index_keys
from geneva.storage.columns.staged_files import StagedFile
from geneva.storage.jobs.failures import ErrorRecord
from geneva.udf.policy import Limits

_POLL_CHECKPOINTS_SECONDS = 2.0
"""How often to look at the checkpoints of running tasks, when nobody watches."""
_POLL_COST_RATIO = 50
"""Looking at them may take a fiftieth of the time, whoever watches."""


@dataclass(frozen=True, slots=True)
class JobControl:
    """What the driver needs to know of the world around it."""

    job_id: str
    make_runner: Callable[[], Runner]
    """Called when there is something to run, and not before: it may start Spark."""
    make_committer: MakeCommitter = TableCommitter
    """Makes what publishes the results; tests put their own in its place."""
    listeners: tuple[ProgressListener, ...] = ()
    cancelled: threading.Event = field(default_factory=threading.Event)
    max_conflict_retries: int = 10
    shared_uri: str = ""
    """The folder of the records that all workers of the database share, for limits on calls."""
    watch_checkpoints: bool = False
    """Look at the checkpoints of running tasks often, for somebody who watches."""
    is_running: Callable[[str], bool] = lambda job_id: True
    """Whether a job of that id still runs; versions that dead ones pinned are released."""
    record_errors: Callable[[Sequence[ErrorRecord]], None] = lambda records: None
    """Keeps what is known of rows that failed."""
    record_output: Callable[[str, str, bool], None] = lambda task, text, shown: None
    """Keeps what a task printed: which one, the text, and whether it was seen already."""
    permit: MakePermit = permit_any
    """Lets a function run, or refuses it. Asked in every round: a column may have changed."""


def run_backfill(
    prepared: PreparedBackfill,
    control: JobControl,
    before_round: Callable[[], None] = lambda: None,
) -> JobProgress:
    """Carry a plan out, round after round, until what was asked for is in the table.

    A round that meets changes made by others may leave fragments over, or make some of its own
    results stale; the next one plans again on the latest version, and does just these rows.
    `before_round` is called before that, for what has to be brought up to date first.

    The job owes the rows that were to be computed when it began. It has paid when it has committed
    as many, or after a round all of whose files are in the table: what is left then came or changed
    since. The job follows it for some more rounds, and leaves it to the next one when others are
    faster. Each round before that brings it nearer to what it owes, or counts as a retry.
    """
    state = JobState.begin(prepared, control)
    planned, is_paid, retries = prepared, False, control.max_conflict_retries
    lossy = False
    while True:
        with pinned(planned.dataset, control.job_id, control.is_running):
            try:
                outcome = Round(planned, control, state, in_haste=lossy).run()
            except BudgetExceededError:
                _commit_results(planned, control, state)
                raise
        if not outcome.table_changed or not prepared.request.follows_table:
            break
        lossy = outcome.lost > 0
        owed = prepared.plan.rows_to_compute
        is_paid = is_paid or not lossy or state.ledger.progress.committed >= owed
        if is_paid or not outcome.landed:
            retries -= 1
        before_round()
        planned = planned.again(frozenset(state.files))
        state.unreadable.update(planned.plan.unreadable)
        planned = planned.without(state.unreadable)
        state.ledger.replanned(planned.plan.rows_to_compute)
        if not planned.plan.fragments:
            break
        if retries < 0:
            if not is_paid:
                raise _kept_changing(planned, control)
            state.ledger.left_over(planned.plan.rows_to_compute)
            break
    if state.unreadable:
        raise unreadable_fragments(prepared.plan, state.unreadable)
    return state.ledger.progress


def _commit_results(planned: PreparedBackfill, control: JobControl, state: JobState) -> None:
    """Publish what is computed of fragments that are not done, where no more may be computed."""
    left = planned.again(frozenset(state.files)).without(state.unreadable).without_calls()
    if left.plan.fragments:
        with pinned(left.dataset, control.job_id, control.is_running):
            Round(left, control, state).run()


def _kept_changing(prepared: PreparedBackfill, control: JobControl) -> TableChangedError:
    left = [f for f in prepared.plan.fragments if f.reason is not Reason.NEW]
    named = ", ".join(f"{f.fragment_id} ({f.reason.value})" for f in left[:5])
    return TableChangedError(
        f"Table {prepared.ref.name!r} kept changing under the backfill of {prepared.plan.column!r} "
        f"through {control.max_conflict_retries + 1} rounds in which nothing could be committed. "
        f"Fragments left over: {named}. What was computed is kept; run the backfill again when the "
        "table is calmer. "
        "(GENEVA_VERSION_CONFLICT_MAX_RETRIES sets the number of rounds.)"
    )


@dataclass(frozen=True, slots=True)
class JobState:
    """What the rounds of a job share."""

    ledger: Ledger
    committer: Committer
    job_runner: JobRunner
    files: set[str] = field(default_factory=set)
    """Data files that the job has made so far, committed or not."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Fragments that can't be read, and why."""

    @classmethod
    def begin(cls, prepared: PreparedBackfill, control: JobControl) -> JobState:
        """The state before the first round."""
        plan = prepared.plan
        progress = JobProgress(
            total=plan.rows_to_compute,
            fragments=len(plan.fragments),
            skipped_fragments=plan.right_fragments,
            skipped_rows=plan.right_rows,
        )
        return cls(
            ledger=Ledger(progress, control.listeners),
            committer=control.make_committer(control.job_id, control.max_conflict_retries),
            job_runner=JobRunner(control.make_runner),
            unreadable=dict(plan.unreadable),
        )


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What became of the files of a round."""

    landed: int
    lost: int
    """Files that no longer fit the table. Their results are kept for the next plan."""
    table_changed: bool
    """Whether others changed the table meanwhile."""


class Round:
    """One pass over a plan."""

    def __init__(
        self,
        prepared: PreparedBackfill,
        control: JobControl,
        state: JobState,
        *,
        in_haste: bool = False,
    ) -> None:
        """Nothing is run yet. `in_haste`: each fragment is computed and committed by itself.

        Others rewrite fragments faster than whole groups of them are computed.
        """
        self._in_haste = in_haste
        self._prepared, self._control, self._state = prepared, control, state
        self._ledger, self._committer = state.ledger, state.committer
        self._plans = {plan.fragment_id: plan for plan in prepared.plan.fragments}
        permit = control.permit(prepared.ref, prepared.computation)
        self._work = prepared.column_work(control.job_id, permit, control.shared_uri)
        self._tasks = TaskQueue(prepared, self._work, one_by_one=in_haste)
        self._dispatcher = Dispatcher(prepared, self._tasks, state.ledger, state.job_runner)
        self._polled, self._poll_cost = time.monotonic(), 0.0
        self._landed = self._lost = 0
        self._unmatched: Counter[int] = Counter()
        """Per fragment, the rows whose key is not in the source."""
        self._table_changed = False
        self._overspent: BudgetExceededError | None = None

    def run(self) -> RoundOutcome:
        """Run the plan once."""
        self._ledger.round_began()
        for plan in self._plans.values():
            if plan.action is Action.REUSE:
                self._committer.add(self._prepared.staged[plan.fragment_id])
                self._ledger.reused_file(plan.compute.count)
        try:
            self._run_tasks()
        except BaseException:
            # Finished fragments are worth keeping whatever went wrong with the others.
            for report in [*self._dispatcher.finished()]:
                with suppress(GenevaError, OSError):  # the job has its error already
                    self._book(report)
            self._dispatcher.stop()
            with suppress(OSError, TableChangedError):
                self._commit(flush=True)
            raise
        self._commit(flush=True)
        return RoundOutcome(self._landed, self._lost, self._table_changed)

    def _run_tasks(self) -> None:
        self._commit()
        while self._dispatcher.is_busy:
            self._check_stop()
            if self._overspent is None:
                self._dispatcher.fill()
            elif not self._dispatcher.is_running:
                raise self._overspent
            reported = False
            for report in self._dispatcher.reports():
                reported = True
                self._book(report)
            if not reported and self._should_poll():
                self._poll_running_tasks()
            self._commit(flush=self._in_haste)
        if self._overspent is not None:
            raise self._overspent

    def _check_stop(self) -> None:
        if self._control.cancelled.is_set():
            raise JobCancelledError(
                f"Job {self._control.job_id} was cancelled. Finished fragments are committed; "
                "running the backfill again goes on from there."
            )
        limit = self._prepared.request.options.timeout
        if limit is not None and self._ledger.seconds > limit:
            raise JobTimeoutError(
                f"Job {self._control.job_id} did not finish within {limit:g} s. Finished fragments "
                "are committed; running the backfill again goes on from there."
            )

    def _should_poll(self) -> bool:
        """Whether to look at the checkpoints of running tasks."""
        pause = 0.0 if self._control.watch_checkpoints else _POLL_CHECKPOINTS_SECONDS
        # The more checkpoints there are, the longer it takes.
        pause = max(pause, _POLL_COST_RATIO * self._poll_cost)
        return time.monotonic() - self._polled >= pause

    def _poll_running_tasks(self) -> None:
        started = time.monotonic()
        rows = running_rows(self._prepared, without=self._tasks.partly_done())
        self._ledger.show_running(rows)
        self._polled = time.monotonic()
        self._poll_cost = self._polled - started

    # ------------------------------------------------------------------------------- reports in

    def _book(self, report: TaskReport) -> None:
        """Book what a task did; raise what ends the job."""
        self._ledger.reported(report)
        for result in report.results:
            self._unmatched[result.fragment_id] += result.rows_unmatched
        self._record_output(report)
        for fragment_ids in report.recorded:
            self._add_checkpoint(fragment_ids[0], None, fragment_ids)
        assembled = [r for r in report.results if self._tasks.is_assembled(r)]
        computed = [r for r in report.results if not self._tasks.is_assembled(r)]
        self._record_errors((r.fragment_id, row) for r in computed for row in r.failures)
        if failed := sum(r.rows_failed for r in computed):
            self._ledger.failed(failed)
        if computed:
            self._ledger.computed(*computed, calls=self._calls(computed))
        if assembled:
            self._ledger.assembled(calls=self._calls(assembled))
        self._book_files(report.results)
        for part in report.unreadable:
            if not self._tasks.try_again(part):
                self._state.unreadable[part.fragment_id] = part.reason
        if report.failure is not None:
            fragment_id = report.failure.fragment_id
            self._record_errors((fragment_id, row) for row in report.failure.failures)
            error = error_of(report.failure)
            if not isinstance(error, BudgetExceededError):
                raise error
            # What others compute by now is paid for. They end by themselves, and soon.
            self._overspent = error
        self._check_failed()

    def _calls(self, results: Iterable[PartResult]) -> int:
        """Rows of some parts that the UDF was called for."""
        if not self._work.computation.runs_user_code:
            return 0
        return sum(result.rows_run for result in results)

    def _book_files(self, results: Iterable[PartResult]) -> None:
        """Hand checkpoints and staged files to the committer; go on with shared fragments."""
        rows_staged = 0
        for result in results:
            for rows in result.checkpoints:
                self._add_checkpoint(result.fragment_id, rows)
            if result.staged_path is None:
                self._tasks.range_done(result)
                continue
            plan = self._plans[result.fragment_id]
            staged = self._prepared.staged_file(plan, result.staged_path, result.staged_bytes)
            self._committer.add(staged)
            rows_staged += plan.compute.count
        if rows_staged:
            self._ledger.staged(rows_staged)

    def _record_output(self, report: TaskReport) -> None:
        if not report.output:
            return
        computed = [
            f"{part.fragment_id}, rows [{part.rows.start}, {part.rows.end})"
            for part in report.results
        ]
        failed = [f"{report.failure.fragment_id}, failed"] if report.failure is not None else []
        first, *more = [*computed, *failed] or ["unknown"]
        others = f" and {len(more)} more" if more else ""
        task = f"{self._prepared.plan.column}, fragment {first}{others}"
        self._control.record_output(task, report.output, report.output_shown)

    def _add_checkpoint(
        self, fragment_id: int, rows: RowRange | None, shared_by: Sequence[int] = ()
    ) -> None:
        key = CheckpointKey(self._prepared.prefixes[fragment_id], fragment_id, rows)
        self._committer.add_checkpoint(key, shared_by)

    def _record_errors(self, failed: Iterable[tuple[int, RowFailure]]) -> None:
        if not Limits.from_json(self._prepared.computation.error_policy).store_errors:
            return
        if records := error_records(self._control.job_id, self._prepared.plan, failed):
            self._control.record_errors(records)

    def _check_failed(self) -> None:
        limit, progress = self._work.max_failed, self._ledger.progress
        if limit is not None and progress.failed_rows > limit:
            raise too_many_failed(
                self._prepared.plan, failed=progress.failed_rows, total=progress.total, limit=limit
            )

    # ---------------------------------------------------------------------------------- commits

    def _commit(self, *, flush: bool = False) -> None:
        """Publish what is ready; with `flush` everything."""
        while (done := self._committer.commit_next(self._prepared, flush=flush)) is not None:
            self._book_commit(done)

    def _book_commit(self, commit: Commit) -> None:
        outcome = commit.outcome
        self._table_changed = self._table_changed or outcome.moved_on
        lost = [file for file, _ in outcome.lost]
        self._landed += len(outcome.landed)
        self._lost += len(lost)
        self._state.files.update(file.path for file in (*outcome.landed, *lost))
        self._ledger.committed(
            files=len(outcome.landed),
            rows=self._computed_rows(outcome.landed),
            lost_rows=self._computed_rows(lost),
            unmatched=sum(self._unmatched[file.fragment_id] for file in outcome.landed),
            seconds=commit.seconds,
        )

    def _computed_rows(self, files: Iterable[StagedFile]) -> int:
        return sum(self._plans[file.fragment_id].compute.count for file in files)


def running_rows(prepared: PreparedBackfill, *, without: set[int]) -> int:
    """Rows that running tasks have checkpointed, fragments in `without` aside."""
    plans = {
        (prepared.prefixes[plan.fragment_id], plan.fragment_id): plan
        for plan in prepared.plan.fragments
        if plan.fragment_id not in without
    }
    keys = index_keys(open_checkpoints(prepared.ref).list_keys("udf-"))
    return sum(_checkpointed(plan, keys.get(place, ())) for place, plan in plans.items())


def _checkpointed(plan: FragmentPlan, keys: Iterable[CheckpointKey]) -> int:
    """New values of a fragment that are in these checkpoints."""
    ranges = (key.rows for key in keys if key.rows is not None)
    return sum(plan.compute.slice(r).count for r in ranges if r.end <= plan.physical_rows)

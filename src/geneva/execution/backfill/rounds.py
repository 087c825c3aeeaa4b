"""One pass over a plan: tasks out, reports in, files committed. Several of them run at once."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from geneva.errors import (
    BudgetExceededError,
    GenevaError,
    JobCancelledError,
    JobTimeoutError,
)
from geneva.execution.backfill.committer import Commit
from geneva.execution.backfill.control import JobControl, JobState
from geneva.execution.backfill.dispatch import Dispatcher
from geneva.execution.backfill.failures import (
    budget_spent,
    error_of,
    error_records,
    too_many_failed,
)
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.backfill.saved import SavedRows
from geneva.execution.backfill.speeds import SPEEDS
from geneva.execution.backfill.tasks import TaskQueue
from geneva.execution.worker.task import PartResult, RowFailure, Task, TaskReport
from geneva.model.computation import Computation
from geneva.model.rows import RowRange
from geneva.model.tables import TableRef
from geneva.planning.backfill import Action, FragmentPlan
from geneva.planning.sharing import gains_by_sharing, shared_reads
from geneva.render.text import count, one_line
from geneva.storage.checkpoints.cleanup import delete_keys
from geneva.storage.checkpoints.staging import open_checkpoints
from geneva.storage.checkpoints.store import CheckpointKey
from geneva.storage.columns.lost_files import missing_files
from geneva.storage.columns.staged_files import StagedFile
from geneva.storage.lance.dataset import is_dropped, open_dataset, read_snapshot
from geneva.udf.policy import Limits

_LOG = logging.getLogger("geneva")
_POLL_CHECKPOINTS_SECONDS = 2.0
"""How often to look at the checkpoints of running tasks, when nobody watches ..."""
_WATCHED_POLL_SECONDS = 1.0
"""... and when somebody does."""
_POLL_COST_RATIO = 50
"""Looking at them may take a fiftieth of the time, whoever watches."""
_WAIT_SECONDS = 0.5
"""How long to wait for a report before looking at other things."""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What became of the files of a round."""

    landed: int
    lost: int
    """Files that no longer fit the table. Their results are kept for the next plan."""
    deleted: int
    """Files of the job that somebody has deleted, before they were committed or after it."""
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
        shared = control.shared_uri
        self._work = prepared.column_work(control.job_id, permit, shared, control.hidden)
        expected = SPEEDS.of(prepared.computation)
        self._tasks = TaskQueue(prepared, self._work, one_by_one=in_haste, expected_speed=expected)
        self._dispatcher = Dispatcher(prepared, self._tasks, state.ledger, state.job_runner)
        self._saved = SavedRows(prepared)
        self._committed_before = state.ledger.progress.committed
        self._polled, self._poll_cost = time.monotonic(), 0.0
        self._landed = self._lost = self._deleted = 0
        self._unmatched: Counter[int] = Counter()
        """Per fragment, the rows whose key is not in the source."""
        self._table_changed = False
        self._overspent: BudgetExceededError | None = None
        self._riders: dict[str, Round] = {}
        """The rounds of other columns that tasks of this one take along, by computation."""

    @property
    def computation(self) -> Computation:
        """What it computes."""
        return self._work.computation

    @property
    def source(self) -> tuple[TableRef, int] | None:
        """The version of another table whose rows it is computed from, one by one."""
        source = self.computation.source
        if source is None or source.keyed is not None:  # of which no values are read
            return None
        return source.ref, source.version

    @property
    def task_size(self) -> int | None:
        """Rows of a task, where somebody asked for that."""
        return self._work.sizes.task_size

    @property
    def may_share_reads(self) -> bool:
        """Whether its tasks may do other columns, too: not where each call or row is counted."""
        counted = self._work.max_cost is not None or self._work.bounds_lost_rows
        return self.source is not None and not counted and not self._in_haste

    @property
    def fragments(self) -> Sequence[FragmentPlan]:
        """What it does."""
        return self._prepared.plan.fragments

    @property
    def is_busy(self) -> bool:
        """Whether something runs, or can be run."""
        return self._dispatcher.is_busy

    @property
    def running(self) -> Collection[Future[list[str]]]:
        """What runs."""
        return self._dispatcher.running

    @property
    def patience(self) -> float:
        """How long to wait for a report before looking at other things."""
        awaited = self._dispatcher.patience
        return _WAIT_SECONDS if awaited is None else min(awaited, _WAIT_SECONDS)

    @property
    def is_overspent(self) -> bool:
        """Whether its calls have cost what they may."""
        return self._overspent is not None

    def take_along(self, other: Round, fragment_ids: Collection[int]) -> None:
        """Let tasks for some fragments do the same of another column, from the same read."""
        self._tasks.take_along(other._tasks, fragment_ids)
        self._riders[other._work.computation.id] = other

    def begin(self) -> None:
        """Take what needs no task, to be published with the first results."""
        self._ledger.round_began()
        self._show_saved()
        for plan in self._plans.values():
            if plan.action is Action.REUSE:
                self._committer.add(self._prepared.staged[plan.fragment_id])
                self._ledger.reused_file(plan.compute.count)

    def hand_out(self) -> None:
        """Keep the slots busy; raise what ends the job."""
        if not self.is_busy:
            return
        self._check_stop()
        if self._overspent is None:
            self._dispatcher.fill()
        elif not self.running:
            raise self._overspent

    def hear(self) -> None:
        """Book what tasks have done by now, and publish it when that is due."""
        for task, report in self._dispatcher.reports():
            self._book_all(task, report)
        if self.is_busy and self._should_poll():
            self._look_at_checkpoints()

    def settle(self) -> None:
        """Publish what is due."""
        self._commit(flush=self._in_haste)

    def end(self) -> RoundOutcome:
        """Publish everything, and say what became of it."""
        if self._overspent is not None:
            raise self._overspent
        self._commit(flush=True)
        SPEEDS.note(self.computation, self._ledger.rows_per_second)
        self._look_for_deleted()
        changed = self._table_changed or self._deleted > 0
        return RoundOutcome(self._landed, self._lost, self._deleted, changed)

    def abandon(self) -> None:
        """Let no task go on, and book what they have finished by then."""
        try:
            self._dispatcher.stop()
        finally:
            for task, report in [*self._dispatcher.finished()]:
                _whatever_comes(partial(self._book_all, task, report))
            self._look_at_checkpoints()

    def keep(self) -> None:
        """Publish what is finished, after something went wrong with the rest."""
        self._commit(flush=True)

    def _check_stop(self) -> None:
        if self._control.cancelled.is_set():
            raise JobCancelledError(f"Job {self._control.job_id} was cancelled. {self._kept()}")
        limit = self._prepared.request.options.timeout
        if limit is not None and self._ledger.seconds > limit:
            raise JobTimeoutError(
                f"Job {self._control.job_id} did not finish within {limit:g} s. {self._kept()}"
            )

    def _kept(self) -> str:
        """What a job that is stopped leaves behind, in words."""
        now = self._ledger.progress
        return (
            f"{now.checkpointed:,} of {count(now.total, 'row')} were saved by then, finished "
            "fragments are in the table, and the same again computes only the rest."
        )

    def _should_poll(self) -> bool:
        """Whether to look at the checkpoints of running tasks."""
        watched = self._control.watch_checkpoints
        pause = _WATCHED_POLL_SECONDS if watched else _POLL_CHECKPOINTS_SECONDS
        # The more checkpoints there are, the longer it takes.
        pause = max(pause, _POLL_COST_RATIO * self._poll_cost)
        return time.monotonic() - self._polled >= pause

    def _look_at_checkpoints(self) -> None:
        """Count what tasks have saved that have not reported it."""
        started = time.monotonic()
        with suppress(OSError):  # only a number depends on it
            self._saved.look()
        self._show_saved()
        self._polled = time.monotonic()
        self._poll_cost = self._polled - started

    def _show_saved(self) -> None:
        self._ledger.saved(self._committed_before + self._saved.count)

    # ------------------------------------------------------------------------------- reports in

    def _book_all(self, task: Task, report: TaskReport) -> None:
        """Book what a task did, and what it did of other columns."""
        rounds: list[tuple[Round, TaskReport]] = [(self, report)]
        for rider, own in zip(task.riders, report.riders, strict=True):
            other = self._riders[rider.work.computation.id]
            if not gains_by_sharing(report.timings.read, own.timings.udf):
                self._tasks.let_go(other._tasks)
            if own.parts_left:
                other._tasks.put_back(rider.parts[-own.parts_left :])
            rounds.append((other, own))
        errors: list[Exception] = []
        for booking, own in rounds:
            try:
                booking._book(own)
            except Exception as error:  # noqa: BLE001  raised when the others' work is booked
                errors.append(error)
        if errors:
            raise errors[0]

    def _book(self, report: TaskReport) -> None:
        """Book what a task did; raise what ends the job."""
        self._ledger.reported(report)
        for result in report.results:
            self._unmatched[result.fragment_id] += result.rows_unmatched
            self._saved.add(result.fragment_id, [result.rows])
        self._show_saved()
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
            assert self._work.max_cost is not None
            self._overspent = budget_spent(self._prepared.plan, self._work.max_cost)
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
        task = f"{self._prepared.plan.shown.name}, fragment {first}{others}"
        self._control.record_output(task, report.output, report.output_shown)

    def _add_checkpoint(
        self, fragment_id: int, rows: RowRange | None, shared_by: Sequence[int] = ()
    ) -> None:
        key = CheckpointKey(self._prepared.prefixes[fragment_id], fragment_id, rows)
        self._committer.add_checkpoint(key, shared_by)

    def _record_errors(self, failed: Iterable[tuple[int, RowFailure]]) -> None:
        if not Limits.from_json(self._prepared.computation.error_policy).store_errors:
            return
        own, job_id = self._prepared, self._control.job_id
        if records := error_records(job_id, own.ref.uri, own.computation, own.plan, failed):
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
        if commit.unneeded:
            store = open_checkpoints(self._prepared.ref)
            self._control.behind(partial(delete_keys, store, commit.unneeded))
        self._table_changed = self._table_changed or outcome.moved_on
        lost = [file for file, _ in outcome.lost]
        self._landed += len(outcome.landed)
        self._state.landed.update(
            (file.path, self._plans[file.fragment_id].compute.count) for file in outcome.landed
        )
        self._lost += len(lost)
        self._deleted += len(outcome.deleted)
        self._state.lost_files.update(file.path for file in outcome.deleted)
        self._state.files.update(file.path for file in (*outcome.landed, *lost))
        self._ledger.committed(
            files=len(outcome.landed),
            rows=self._computed_rows(outcome.landed),
            lost_rows=self._computed_rows((*lost, *outcome.deleted)),
            unmatched=sum(self._unmatched[file.fragment_id] for file in outcome.landed),
            seconds=commit.seconds,
        )

    def _look_for_deleted(self) -> None:
        """Note files that somebody has deleted since the job has committed them."""
        own = self._prepared
        landed = self._state.landed
        paths = missing_files(own.ref, landed, own.dataset)
        if not paths or is_dropped(own.dataset, own.snapshot.version):  # with the whole table
            return
        # Others were replaced since, by a compaction, say: a clean-up may delete those.
        latest = read_snapshot(open_dataset(own.ref), own.ref)
        paths &= {file.path for fragment in latest.fragments for file in fragment.files}
        if not paths:
            return
        _LOG.warning(
            "Job %s: data files of column %r of table %r were deleted when they were in the table, "
            "or about to be (a clean-up with delete_unverified=True?): %s. Their rows are to be "
            "computed again.",
            *(self._control.job_id, own.plan.column, own.ref.name, ", ".join(sorted(paths)[:5])),
        )
        self._deleted += len(paths)
        self._state.files.difference_update(paths)
        self._state.lost_files.update(paths)
        self._ledger.deleted(files=len(paths), rows=sum(landed.pop(path) for path in paths))

    def _computed_rows(self, files: Iterable[StagedFile]) -> int:
        return sum(self._plans[file.fragment_id].compute.count for file in files)


def run_rounds(
    rounds: Sequence[Round], pins: Sequence[Callable[[], None]] = ()
) -> list[RoundOutcome]:
    """Run several rounds at once, to the end. When one fails, the others stop.

    Finished fragments are worth keeping whatever went wrong with the others. `pins` wait until the
    versions that are read can't be cleaned up: it takes Spark as long to start a task.
    """
    try:
        for each in rounds:
            each.begin()
        while any(each.is_busy for each in rounds):
            for each in rounds:
                each.hand_out()
            for wait_for_pin in pins:
                wait_for_pin()
            running = [future for each in rounds for future in each.running]
            patience = min((each.patience for each in rounds), default=_WAIT_SECONDS)
            wait(running, timeout=patience, return_when=FIRST_COMPLETED)
            for each in rounds:
                each.hear()
            for each in rounds:
                each.settle()
        for wait_for_pin in pins:
            wait_for_pin()
        return [each.end() for each in rounds]
    except BaseException:
        for each in rounds:
            _whatever_comes(each.abandon)
        for each in rounds:
            _whatever_comes(each.keep)
        raise


def _whatever_comes(end: Callable[[], None]) -> None:
    """Do what ends a round of a job that has its error already, and hide that by no other."""
    try:
        end()
    except Exception as error:  # noqa: BLE001  of any kind: that of the job is raised
        # Where a function fails on one row, it often does on the next.
        level = logging.DEBUG if isinstance(error, GenevaError) else logging.WARNING
        _LOG.log(level, "What is finished of a failed job may not be kept: %s", one_line(error))


def share_reads(rounds: Sequence[Round]) -> None:
    """Let rounds of columns that are made from the same rows of a source share their tasks."""
    for sharing in _sharing(rounds):
        columns = [each.fragments for each in sharing]
        together: dict[tuple[int, int], list[int]] = {}
        for fragment_id, groups in shared_reads(columns).items():
            for lead, *riders in groups:
                for rider in riders:
                    together.setdefault((lead, rider), []).append(fragment_id)
        for (lead, rider), fragment_ids in together.items():
            sharing[lead].take_along(sharing[rider], frozenset(fragment_ids))


def _sharing(rounds: Sequence[Round]) -> Iterator[list[Round]]:
    """Rounds whose columns may be computed in one task, those of functions first."""
    able = [each for each in rounds if each.may_share_reads]
    carried = [each for each in able if not each.computation.runs_user_code]
    groups: dict[tuple[object, ...], list[Round]] = {}
    for each in able:
        if each.computation.runs_user_code:
            key = (each.source, each.computation.resources, each.task_size)
            groups.setdefault(key, []).append(each)
    for (source, *_), own in groups.items():
        # Carrying takes no time to speak of: it goes with the first.
        yield own + [each for each in carried if each.source == source]
        carried = [each for each in carried if each.source != source]

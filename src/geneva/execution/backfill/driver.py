"""Running a plan: tasks out, reports in, fragments committed in groups, until nothing is left."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain

from geneva.errors import (
    GenevaError,
    InvalidUDFError,
    JobCancelledError,
    JobTimeoutError,
    TableChangedError,
    TooManyFailedRowsError,
    UDFExecutionError,
    UDFIntegrityError,
    UDFOutputError,
    UDFTimeoutError,
    WorkerDied,
    WorkerLostError,
)
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.jobs.progress import JobProgress, ProgressListener
from geneva.execution.jobs.tracing import span
from geneva.execution.runner import InProcessRunner, Runner
from geneva.execution.worker.poison_rows import Suspect, read_suspects
from geneva.execution.worker.run import run_task
from geneva.execution.worker.task import (
    PartFailure,
    PartResult,
    PartWork,
    RowFailure,
    Task,
    TaskReport,
)
from geneva.model.addresses import row_address
from geneva.model.rows import RowRange
from geneva.model.tables import Reason
from geneva.planning.backfill import Action, FragmentPlan
from geneva.planning.sizing import WorkQueue
from geneva.storage.checkpoints.cleanup import delete_keys
from geneva.storage.checkpoints.pins import pinned
from geneva.storage.checkpoints.staging import open_checkpoints, record_staged
from geneva.storage.checkpoints.store import CheckpointKey, index_keys
from geneva.storage.columns.publish import CommitOutcome, commit_columns
from geneva.storage.columns.staged_files import StagedFile
from geneva.storage.jobs.failures import ErrorRecord
from geneva.udf.policy import Limits

_POLL_SECONDS = 0.5
_LOOK_SECONDS = 2.0
"""How often to look into running tasks, through the checkpoint store, when nobody watches."""
_JOBS_IN_FLIGHT = 16
"""Spark jobs at once; on a large cluster each of them carries several tasks."""


_MOST_LOST = 50
"""Submissions whose workers died, each of them four times, before a job is given up."""


@dataclass(frozen=True, slots=True)
class JobControl:
    """What the driver needs to know of the world around it."""

    job_id: str
    make_runner: Callable[[], Runner]
    """Called when there is something to run, and not before: it may start Spark."""
    listeners: tuple[ProgressListener, ...] = ()
    cancelled: threading.Event = field(default_factory=threading.Event)
    max_conflict_retries: int = 10
    watch_checkpoints: bool = False
    """Look into running tasks through the checkpoint store, for somebody who watches."""
    is_running: Callable[[str], bool] = lambda job_id: True
    """Whether a job of that id still runs; versions that dead ones pinned are released."""
    record_errors: Callable[[Sequence[ErrorRecord]], None] = lambda records: None
    """Keeps what is known of rows that failed."""


def run_backfill(
    prepared: PreparedBackfill,
    control: JobControl,
    before_round: Callable[[], None] = lambda: None,
) -> JobProgress:
    """Carry a plan out, round after round, until what was asked for is in the table.

    A round that meets changes made by others may leave fragments over, or make some of its own
    results stale; the next one plans again on the latest version. `before_round` is called before
    that, for what has to be brought up to date first.
    """
    run = _BackfillRun(prepared, control)
    for _ in range(control.max_conflict_retries + 1):
        with pinned(run.prepared.dataset, control.job_id, control.is_running):
            moved_on = run.round()
        if not moved_on or not prepared.request.follows_table:
            return run.progress
        before_round()
        run.replan()
        left = [f for f in run.prepared.plan.fragments if f.reason is not Reason.NEW]
        if run.prepared.plan.is_empty:
            return run.progress
    if not left or _is_only_new(prepared, run):
        # Somebody appends faster than rounds go; the rows that were there at the start are done.
        run.leave_rest()
        return run.progress
    named = ", ".join(f"{f.fragment_id} ({f.reason.value})" for f in left[:5])
    raise TableChangedError(
        f"Table {prepared.ref.name!r} kept changing under the backfill of {prepared.plan.column!r} "
        f"through {control.max_conflict_retries + 1} rounds. Fragments left over: {named}. What "
        "was computed is kept; run the backfill again when the table is calmer. "
        "(GENEVA_VERSION_CONFLICT_MAX_RETRIES sets the number of rounds.)"
    )


_NEVER_COMPUTED = (Reason.NEW, Reason.PARTIAL, Reason.NULL)


def _is_only_new(began: PreparedBackfill, run: _BackfillRun) -> bool:
    """Whether what is left came after the job began, as far as numbers tell.

    A compaction may have put new rows into one fragment with old ones, so that the fragment is not
    new. What was owed is committed, nothing is stale, and no more is left than the table grew by.
    """
    plan = run.prepared.plan
    return (
        run.progress.committed >= began.plan.rows_to_compute
        and all(fragment.reason in _NEVER_COMPUTED for fragment in plan.fragments)
        and plan.rows_to_compute <= plan.total_rows - began.plan.total_rows
    )


@dataclass(slots=True)
class _Split:
    """A fragment that several tasks share."""

    plan: FragmentPlan
    rows_done: int = 0
    checkpoints: list[RowRange] = field(default_factory=list)


class _BackfillRun:
    """The state of one running backfill."""

    def __init__(self, prepared: PreparedBackfill, control: JobControl) -> None:
        self.prepared, self._control = prepared, control
        self.progress = JobProgress(
            total=prepared.plan.rows_to_compute, fragments=len(prepared.plan.fragments)
        )
        self._started = self._looked = time.monotonic()
        self._runner: Runner | None = None
        self._speed: float | None = None
        self._files: set[str] = set()
        self._leftovers: dict[int, set[str]] = {}

    def replan(self) -> None:
        """Plan what is left, on the latest version."""
        self.prepared = self.prepared.again(frozenset(self._files))
        if isinstance(self._runner, InProcessRunner):
            self._runner = None
        waiting = self.prepared.plan.rows_to_compute
        self._note(total=self.progress.committed + waiting)

    def leave_rest(self) -> None:
        """Note that what is planned now is left to the next job."""
        self._note(rows_left=self.prepared.plan.rows_to_compute)

    def round(self) -> bool:
        """Run the plan once; return whether the table moved on under it."""
        plan = self.prepared.plan
        self._plans = {f.fragment_id: f for f in plan.fragments}
        self._work = self.prepared.column_work(self._control.job_id)
        self._queue = WorkQueue(plan.fragments, self._work.sizes.task_size)
        self._assemblies: deque[PartWork] = deque()
        self._splits: dict[int, _Split] = {}
        self._ready: list[StagedFile] = []
        self._in_flight: dict[Future[list[str]], list[Task]] = {}
        self._lost: dict[tuple[int, int], tuple[Suspect | None, ...]] = {}
        self._moved_on = False
        self._note(rounds=self.progress.rounds + 1)
        for fragment in plan.fragments:
            if fragment.action is Action.REUSE:
                self._reuse(fragment)
        try:
            self._run_tasks()
        except BaseException:
            self._stop()
            # Finished fragments are worth keeping whatever went wrong with the others.
            with suppress(OSError, TableChangedError):
                self._commit(least=1)
            raise
        self._commit(least=1)
        return self._moved_on

    def _reuse(self, fragment: FragmentPlan) -> None:
        rows = fragment.compute.count
        self._ready.append(self.prepared.staged[fragment.fragment_id])
        self._note(
            checkpointed=self.progress.checkpointed + rows,
            ready_to_commit=self.progress.ready_to_commit + rows,
            reused_rows=self.progress.reused_rows + rows,
        )

    def _run_tasks(self) -> None:
        self._commit(least=self.prepared.request.options.commit_granularity)
        while self._queue or self._assemblies or self._in_flight:
            self._check_stop()
            self._fill()
            done, _ = wait(self._in_flight, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                tasks = self._in_flight.pop(future)
                if isinstance(future.exception(), WorkerLostError):
                    self._try_again(tasks, future)
                    continue
                for text in future.result():
                    self._take(TaskReport.from_json(text))
            if not done and self._is_time_to_look():
                self._look_inside()
            self._commit(least=self.prepared.request.options.commit_granularity)

    def _check_stop(self) -> None:
        if self._control.cancelled.is_set():
            raise JobCancelledError(
                f"Job {self._control.job_id} was cancelled. Finished fragments are committed; "
                "running the backfill again goes on from there."
            )
        limit = self.prepared.request.options.timeout
        if limit is not None and time.monotonic() - self._started > limit:
            raise JobTimeoutError(
                f"Job {self._control.job_id} did not finish within {limit:g} s. Finished fragments "
                "are committed; running the backfill again goes on from there."
            )

    def _fill(self) -> None:
        """Keep every slot busy, with one task waiting behind them to bridge the gaps."""
        runner = self._get_runner()
        asked = self.prepared.request.options.concurrency
        slots = max(1, min(asked, runner.slots) if asked else runner.slots)
        per_job = max(1, slots // _JOBS_IN_FLIGHT)
        limit = slots if asked else slots + 1
        while (self._queue or self._assemblies) and self._running() < limit:
            tasks: list[Task] = []
            while len(tasks) < per_job and (parts := self._next_parts(slots)):
                tasks.append(Task(self._work, parts))
            self._submit(tasks)

    def _running(self) -> int:
        return sum(map(len, self._in_flight.values()))

    def _submit(self, tasks: list[Task]) -> None:
        resources = self.prepared.computation.resources
        self._in_flight[self._get_runner().submit(run_task, tasks, resources)] = tasks
        self._note(tasks=self.progress.tasks + len(tasks))

    def _try_again(self, tasks: list[Task], lost: Future[list[str]]) -> None:
        """Go on with tasks whose workers died, as long as the dead tell more about the cause."""
        store, job_id = open_checkpoints(self.prepared.ref), self._control.job_id
        told = [(task, read_suspects(store, job_id, task.parts)) for task in tasks]
        self._note(lost_workers=self.progress.lost_workers + 1)
        for task, notes in told:
            first = (task.parts[0].fragment_id, task.parts[0].rows.start)
            few = self.progress.lost_workers <= _MOST_LOST
            if few and any(notes) and self._lost.get(first) != notes:
                self._lost[first] = notes
                break
        else:
            delete_keys(store, store.list_keys(f"attempt-{job_id}-"))
            lost.result()
        self._submit([replace(task, attempt=task.attempt + 1) for task in tasks])

    def _next_parts(self, slots: int) -> tuple[PartWork, ...]:
        if self._assemblies:
            parts = tuple(self._assemblies)
            self._assemblies.clear()
            return parts
        if not self._queue:
            return ()
        taken = self._queue.take(self._queue.share(slots, self._speed))
        for part in taken:
            if not part.whole:
                self._splits.setdefault(part.plan.fragment_id, _Split(part.plan))
        return tuple(self.prepared.part_work(part) for part in taken)

    def _get_runner(self) -> Runner:
        if self._runner is None:
            here = self.prepared.plan.is_small_without_calls
            self._runner = InProcessRunner(1) if here else self._control.make_runner()
        return self._runner

    def _take(self, report: TaskReport) -> None:
        """Book what a task did."""
        rows_run = sum(result.rows_run for result in report.results)
        # Of the rows alone: what a task costs besides them must not make tasks smaller.
        working = report.timings.read + report.timings.udf
        if rows_run and working > 0:
            self._speed = rows_run / working
        self._note(
            timings=self.progress.timings.plus(report.timings),
            retries=self.progress.retries + report.retries,
        )
        for fragment_id in report.recorded:
            self._leave(fragment_id, None)
        failed = [r for r in report.results if r.rows_failed and not self._is_assembled(r)]
        self._record_errors((r.fragment_id, row) for r in failed for row in r.failures)
        self._note(failed_rows=self.progress.failed_rows + sum(r.rows_failed for r in failed))
        for result in report.results:
            self._book(result)
        if report.failure is not None:
            fragment_id = report.failure.fragment_id
            self._record_errors((fragment_id, row) for row in report.failure.failures)
            raise _failure(report.failure)
        self._check_failed()

    def _is_assembled(self, result: PartResult) -> bool:
        """Whether a fragment was put together of ranges that were reported before."""
        return result.fragment_id in self._splits and result.staged_path is not None

    def _record_errors(self, told: Iterable[tuple[int, RowFailure]]) -> None:
        limits = Limits.from_json(self.prepared.computation.error_policy)
        now, plan = datetime.now(UTC), self.prepared.plan
        records = [
            ErrorRecord(
                self._control.job_id,
                plan.table,
                plan.column,
                fragment_id,
                row_address(fragment_id, row.offset),
                row.row_id,
                row.exception_type,
                row.message,
                row.traceback,
                row.attempt,
                row.preview,
                now,
            )
            for fragment_id, row in told
        ]
        if records and limits.store_errors:
            self._control.record_errors(records)

    def _check_failed(self) -> None:
        most, failed = self._work.max_failed, self.progress.failed_rows
        if most is not None and failed > most:
            raise TooManyFailedRowsError(
                f"{failed:,} of {self.progress.total:,} rows failed in column "
                f"{self.prepared.plan.column!r} of table {self.prepared.ref.name!r}, and the UDF's "
                f"limits (max_failed_rows, max_failed_fraction) allow {most:,}. See "
                "table.get_errors(); raise the limits, or fix the function, and run again: what "
                "is computed is kept."
            )

    def _leave(self, fragment_id: int, rows: RowRange | None) -> None:
        key = CheckpointKey(self.prepared.prefixes[fragment_id], fragment_id, rows).path()
        self._leftovers.setdefault(fragment_id, set()).add(key)

    def _prune(self, fragment_ids: list[int]) -> None:
        """Drop the checkpoints of committed fragments, unless somebody sized them on purpose."""
        leftovers = [self._leftovers.pop(fragment_id, set()) for fragment_id in fragment_ids]
        if self._work.sizes.checkpoint_size is None:
            delete_keys(open_checkpoints(self.prepared.ref), chain.from_iterable(leftovers))

    def _book(self, result: PartResult) -> None:
        plan = self._plans[result.fragment_id]
        for rows in result.checkpoints:
            self._leave(result.fragment_id, rows)
        split = self._splits.get(result.fragment_id)
        assembled = split is not None and result.staged_path is not None
        progress = self.progress
        calls = result.rows_run if self._work.computation.runs_user_code else 0
        udf_rows = progress.udf_rows + calls
        if assembled:
            # Its rows were booked when their ranges were; only damaged checkpoints ran again.
            self._note(udf_rows=udf_rows)
        else:
            self._note(
                checkpointed=progress.checkpointed + result.rows_run + result.rows_reused,
                udf_rows=udf_rows,
                reused_rows=progress.reused_rows + result.rows_reused,
            )
        if result.staged_path is not None:
            self._ready.append(self.prepared.staged_file(plan, result.staged_path))
            self._note(ready_to_commit=self.progress.ready_to_commit + plan.compute.count)
        elif split is not None:
            split.rows_done += len(result.rows)
            split.checkpoints.extend(result.checkpoints)
            if split.rows_done == plan.physical_rows:
                self._assemblies.append(self.prepared.assembly_work(plan, split.checkpoints))

    def _commit(self, *, least: int) -> None:
        """Publish what is ready, in groups."""
        size = self.prepared.request.options.commit_granularity
        while len(self._ready) >= max(least, 1):
            # Lance publishes files of the same fields together.
            fields = self._ready[0].field_ids
            group = [file for file in self._ready if file.field_ids == fields][:size]
            self._ready = [file for file in self._ready if file not in group]
            started = time.monotonic()
            about = {"job_id": self._control.job_id, "fragments": len(group)}
            with span("geneva.commit", about):
                outcome = commit_columns(
                    self.prepared.ref,
                    self.prepared.dataset,
                    self.prepared.computation,
                    group,
                    self._control.job_id,
                    self._control.max_conflict_retries,
                )
            self._booked_commit(outcome, time.monotonic() - started)

    def _booked_commit(self, outcome: CommitOutcome, seconds: float) -> None:
        progress = self.progress
        self._moved_on = self._moved_on or outcome.moved_on
        store = open_checkpoints(self.prepared.ref)
        for file, _ in outcome.lost:
            # Its fragment is gone, but its rows are not: the next plan finds out where they are
            # now.
            record_staged(store, self.prepared.prefixes[file.fragment_id], file)
        self._files.update(file.path for file in outcome.landed)
        self._files.update(file.path for file, _ in outcome.lost)
        self._prune([file.fragment_id for file in outcome.landed])
        landed = sum(self._plans[f.fragment_id].compute.count for f in outcome.landed)
        lost = sum(self._plans[f.fragment_id].compute.count for f, _ in outcome.lost)
        self._note(
            committed=progress.committed + landed,
            ready_to_commit=progress.ready_to_commit - lost,
            checkpointed=progress.checkpointed - lost,
            fragments_committed=progress.fragments_committed + len(outcome.landed),
            commits=progress.commits + 1,
            commit_seconds=progress.commit_seconds + seconds,
        )

    def _is_time_to_look(self) -> bool:
        """Whether to look into running tasks: often for somebody who watches, else now and then."""
        pause = 0.0 if self._control.watch_checkpoints else _LOOK_SECONDS
        now = time.monotonic()
        if now - self._looked < pause:
            return False
        self._looked = now
        return True

    def _look_inside(self) -> None:
        """Count the rows that running tasks have checkpointed so far."""
        keys = index_keys(open_checkpoints(self.prepared.ref).list_keys("udf-"))
        booked = {id_ for id_, split in self._splits.items() if split.rows_done}
        running = sum(
            self._plans[fragment_id].compute.slice(key.rows).count
            for (prefix, fragment_id), found in keys.items()
            if fragment_id in self._plans
            and fragment_id not in booked
            and self.prepared.prefixes.get(fragment_id) == prefix
            for key in found
            if key.rows is not None and key.rows.end <= self._plans[fragment_id].physical_rows
        )
        seen = min(self.progress.total, self.progress.ready_to_commit + running)
        looked = replace(
            self.progress,
            checkpointed=max(self.progress.checkpointed, seen),
            seconds=time.monotonic() - self._started,
        )
        for listener in self._control.listeners:
            listener(looked)

    def _stop(self) -> None:
        """Stop what still runs, and wait: tasks left behind would steal the next job's slots."""
        if self._runner is not None and self._in_flight:
            self._runner.cancel()
            wait(self._in_flight, timeout=30)

    def _note(self, **changes: object) -> None:
        seconds = time.monotonic() - self._started
        self.progress = replace(self.progress, seconds=seconds, **changes)  # type: ignore[arg-type]
        for listener in self._control.listeners:
            listener(self.progress)


_FAILURES: dict[str, type[GenevaError]] = {
    kind.__name__: kind
    for kind in (
        UDFOutputError,
        UDFIntegrityError,
        InvalidUDFError,
        UDFTimeoutError,
        TooManyFailedRowsError,
    )
}
_FAILURES[WorkerDied.__name__] = WorkerLostError


def _failure(failure: PartFailure) -> GenevaError:
    error = _FAILURES.get(failure.kind, UDFExecutionError)(failure.message)
    if failure.traceback:
        error.add_note(f"In the UDF:\n{failure.traceback}")
    return error

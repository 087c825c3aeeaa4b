"""Tasks on their way: handed to a runner, awaited, and submitted again when their workers died."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from geneva.errors import WorkerLostError
from geneva.execution.backfill.ledger import Ledger
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.backfill.tasks import TaskQueue
from geneva.execution.runner import InProcessRunner, Runner, describe_jobs, job_group, slots_for
from geneva.execution.worker.poison_rows import Suspect, note_key, read_suspects
from geneva.execution.worker.run import run_task
from geneva.execution.worker.task import Task, TaskReport
from geneva.planning.backfill import BackfillPlan
from geneva.planning.sizing import max_in_flight
from geneva.storage.checkpoints.cleanup import delete_keys
from geneva.storage.checkpoints.staging import open_checkpoints

_STOP_SECONDS = 30.0
MAX_JOBS_IN_FLIGHT = 16
"""Spark jobs at once; on a large cluster each of them carries several tasks."""
_PROBE_SECONDS = 0.1
"""So long a first task is waited for, where others may not be needed."""
_MAX_LOST = 200
"""Workers that died before a job is given up. Spark itself starts most of them four times."""
_SPARK_TRIES = 4


class JobRunner:
    """The runner of a job, made when there is something to run, and not before."""

    def __init__(self, make_runner: Callable[[], Runner]) -> None:
        """Make nothing yet: `make_runner` may start Spark."""
        self._make_runner = make_runner
        self._made: Runner | None = None

    def runner_for(self, plan: BackfillPlan) -> Runner:
        """What runs a plan: this process, where it is not worth starting Spark."""
        if self._made is None:
            if plan.is_small_without_calls:
                return InProcessRunner(1)
            self._made = self._make_runner()
        return self._made


@dataclass(slots=True)
class _Submitted:
    """Tasks that were handed out together."""

    tasks: list[Task]
    rows: tuple[int, ...]
    """For how many rows each of them calls the function."""
    began: float | None
    """When there was a slot for them; None: they wait for one."""

    def rows_left(self, rows_per_second: float) -> float:
        """About how many rows are still to be run."""
        seconds = time.monotonic() - self.began if self.began is not None else 0.0
        return sum(max(0.0, rows - rows_per_second * seconds) for rows in self.rows)


class Dispatcher:
    """Keeps the slots of a runner busy with the tasks of one round."""

    def __init__(
        self, prepared: PreparedBackfill, tasks: TaskQueue, ledger: Ledger, job_runner: JobRunner
    ) -> None:
        """Submit nothing yet."""
        self._prepared, self._tasks, self._ledger = prepared, tasks, ledger
        self._job_runner = job_runner
        self._runner: Runner | None = None
        self._in_flight: dict[Future[list[str]], _Submitted] = {}
        self._unheard: deque[tuple[Task, TaskReport]] = deque()
        self._probe_ends: float | None = None
        """Until when the first task is waited for, before others are handed out."""
        self._notes: dict[str, tuple[Suspect | None, ...]] = {}
        """What dead workers noted, per first part of a task."""
        self._lost = 0
        """Workers that died."""

    @property
    def is_busy(self) -> bool:
        """Whether something runs, or can be run."""
        return bool(self._tasks or self._in_flight)

    @property
    def running(self) -> Collection[Future[list[str]]]:
        """What runs."""
        return self._in_flight.keys()

    def fill(self) -> None:
        """Keep every slot busy, with one task waiting behind them to bridge the gaps."""
        runner = self._get_runner()
        asked = self._prepared.request.options.concurrency
        slots = slots_for(runner, self._prepared.computation.resources)
        slots = max(1, min(asked, slots) if asked else slots)
        self._ledger.slots(slots)
        per_job = max(1, slots // MAX_JOBS_IN_FLIGHT)
        limit = slots if asked else max_in_flight(slots, per_job)
        # A job of Spark takes some ms, whether it is for one task or for several.
        at_once = self._tasks.is_soon_done(slots, self._ledger.rows_per_second)
        together = slots if at_once else per_job
        while self._tasks and sum(len(sent.tasks) for sent in self._in_flight.values()) < limit:
            if self._awaits_probe(slots):
                return
            batch: list[Task] = []
            while len(batch) < together and (task := self._next(slots, per_job)) is not None:
                batch.append(task)
            self._submit(batch)

    def _awaits_probe(self, slots: int) -> bool:
        """Whether the first task is waited for before there are others."""
        if not self._tasks.is_worth_a_probe(slots, self._ledger.rows_per_second):
            self._probe_ends = None
        elif self._probe_ends is None and not self._in_flight:
            self._probe_ends = time.monotonic() + _PROBE_SECONDS
            return False
        return self.patience is not None

    @property
    def patience(self) -> float | None:
        """Seconds for which the first task is still waited for; None: it is not."""
        left = self._probe_ends - time.monotonic() if self._probe_ends is not None else 0.0
        return left if left > 0 and self._in_flight else None

    def reports(self) -> Iterator[tuple[Task, TaskReport]]:
        """Yield the reports of tasks that have ended, each with its task."""
        for future in [*self._in_flight]:
            if not future.done():
                continue
            tasks = self._ended(future)
            if isinstance(future.exception(), WorkerLostError):
                self._submit_again(tasks, future)
                continue
            self._take_reports(tasks, future)
        yield from self._heard()

    def finished(self) -> Iterator[tuple[Task, TaskReport]]:
        """Yield the reports of tasks that have ended well by now, and that nobody has heard yet."""
        for future in [*self._in_flight]:
            if future.done() and future.exception() is None:
                self._take_reports(self._ended(future), future)
        yield from self._heard()

    def _take_reports(self, tasks: list[Task], done: Future[list[str]]) -> None:
        for task, report in zip(tasks, map(TaskReport.from_json, done.result()), strict=True):
            self._tasks.take_back(task, report)
            self._unheard.append((task, report))

    def _heard(self) -> Iterator[tuple[Task, TaskReport]]:
        while self._unheard:
            yield self._unheard.popleft()

    def stop(self) -> None:
        """Stop what still runs, and wait: tasks left behind would steal the next job's slots."""
        if self._runner is not None and self._in_flight:
            self._runner.cancel()
            wait(self._in_flight, timeout=_STOP_SECONDS)

    def _get_runner(self) -> Runner:
        if self._runner is None:
            self._runner = self._job_runner.runner_for(self._prepared.plan)
        return self._runner

    def _next(self, slots: int, per_job: int) -> Task | None:
        speed = self._ledger.rows_per_second
        return self._tasks.take(slots, speed, self._rows_in_flight(), per_job)

    def _rows_in_flight(self) -> float:
        """About how many rows are still to be run by the tasks that are on their way."""
        speed = self._ledger.rows_per_second or 0.0
        return sum(sent.rows_left(speed) for sent in self._in_flight.values())

    def _ended(self, future: Future[list[str]]) -> list[Task]:
        """Take tasks that have ended: those that waited longest have their slots by now."""
        ended = self._in_flight.pop(future)
        waiting = next((sent for sent in self._in_flight.values() if sent.began is None), None)
        if waiting is not None:
            waiting.began = time.monotonic()
        return ended.tasks

    def _submit(self, tasks: list[Task]) -> None:
        resources = self._prepared.computation.resources
        runner = self._get_runner()
        describe_jobs(runner, job_group(tasks[0].work.job_id), self._description(tasks))
        rows = tuple(task.rows_to_run for task in tasks)
        running = sum(len(sent.tasks) for sent in self._in_flight.values())
        began = time.monotonic() if running < self._ledger.progress.slots else None
        sent = _Submitted(tasks, rows, began)
        self._in_flight[runner.submit(run_task, tasks, resources)] = sent
        self._ledger.submitted(len(tasks))

    def _description(self, tasks: list[Task]) -> str:
        """What people see of the tasks in Spark's pages."""
        prepared, rounds = self._prepared, self._ledger.progress.rounds
        shown = prepared.plan.shown
        return f"geneva {shown.table}.{shown.name}: job {tasks[0].work.job_id}, round {rounds}"

    def _submit_again(self, tasks: list[Task], lost: Future[list[str]]) -> None:
        """Go on with tasks whose workers died, as long as their notes narrow the cause down."""
        self._ledger.lost_workers()
        tries = _tries(lost)
        self._lost += tries or _SPARK_TRIES
        if self._lost > _MAX_LOST:
            raise WorkerLostError(
                f"{self._lost} workers died in this job, which is given up after {_MAX_LOST}: too "
                "many rows kill the process that computes them. What was computed is kept. "
                f"{lost.exception()}"
            )
        is_first = tries == 1 and not any(task.attempt for task in tasks)
        # Only later tries leave notes of what they do: a plain `local[N]` has made none yet.
        if not (self._learned(tasks) or is_first):
            store, job_id = open_checkpoints(self._prepared.ref), tasks[0].work.job_id
            delete_keys(store, store.list_keys(f"attempt-{job_id}-"))
            lost.result()
        self._submit([replace(task, attempt=task.attempt + 1) for task in tasks])

    def _learned(self, tasks: list[Task]) -> bool:
        """Whether dead workers noted something that was not known before."""
        store = open_checkpoints(self._prepared.ref)
        for own in (own for task in tasks for own in task.columns):
            first = note_key(own.work.job_id, own.parts[0])
            notes = read_suspects(store, own.work.job_id, own.parts)
            if any(notes) and self._notes.get(first) != notes:
                self._notes[first] = notes
                return True
        return False


def _tries(lost: Future[list[str]]) -> int | None:
    """How often Spark tried a task whose workers died; None: it doesn't say."""
    error = lost.exception()
    return error.tries if isinstance(error, WorkerLostError) else None

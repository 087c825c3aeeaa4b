"""The tasks of one round: cut on demand, and fragments that several tasks share put together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.worker.task import (
    ColumnWork,
    PartResult,
    PartWork,
    Task,
    TaskReport,
    UnreadablePart,
)
from geneva.model.rows import RowRange
from geneva.planning.sizing import MAX_FRAGMENTS_PER_TASK, Part, WorkQueue

_MAX_READ_TRIES = 2
"""A store that fails for a moment is no damage: what can't be read is read once more."""


@dataclass(slots=True)
class _Split:
    """A fragment that several tasks share."""

    rows_done: int = 0
    checkpoints: list[RowRange] = field(default_factory=list)


class TaskQueue:
    """What is still to be handed out. A fragment whose ranges are all done is assembled next."""

    def __init__(
        self,
        prepared: PreparedBackfill,
        work: ColumnWork,
        *,
        one_by_one: bool = False,
        expected_speed: float | None = None,
    ) -> None:
        """Queue the fragments of a plan, in its order; `one_by_one`: a task for each of them.

        `expected_speed`: rows per second that a task of an earlier job has computed.
        """
        self._prepared, self.work = prepared, work
        self._plans = {plan.fragment_id: plan for plan in prepared.plan.fragments}
        self._queue = WorkQueue(
            prepared.plan.fragments,
            work.sizes.task_size,
            max_fragments=1 if one_by_one else MAX_FRAGMENTS_PER_TASK,
            batch_size=work.sizes.batch_size or 1,
            checkpoint_size=work.sizes.checkpoint_size,
            # Where each call is counted, a task's rows are.
            may_give_back=work.max_cost is None and not work.bounds_lost_rows,
            expected_speed=expected_speed,
        )
        self._splits: dict[int, _Split] = {}
        self._assemblies: deque[PartWork] = deque()
        self._tries: Counter[tuple[int, int]] = Counter()
        self._again: deque[PartWork] = deque()
        self._riders: dict[int, list[TaskQueue]] = {}
        """By fragment: queues of other columns that wait for a task with the whole fragment."""

    def take_along(self, queue: TaskQueue, fragment_ids: Collection[int]) -> None:
        """Let fragments of another column's queue ride with this one's: one read serves both."""
        queue._queue.hold(fragment_ids)
        self._queue.may_give_back = False  # the columns of a task end together
        for fragment_id in fragment_ids:
            self._riders.setdefault(fragment_id, []).append(queue)

    def let_go(self, queue: TaskQueue) -> None:
        """Take nothing of another queue along any more."""
        for fragment_id, riders in self._riders.items():
            if queue in riders:
                riders.remove(queue)
                queue._queue.release(fragment_id)

    def __bool__(self) -> bool:
        """Whether something can be handed out now; a fragment may be to assemble later."""
        return bool(self._queue or self._assemblies or self._again)

    def is_worth_a_probe(self, slots: int, rows_per_second: float | None) -> bool:
        """Whether to wait a moment for the first task, see `WorkQueue.is_worth_a_probe`."""
        return self._queue.is_worth_a_probe(slots, rows_per_second)

    def is_soon_done(self, slots: int, rows_per_second: float | None) -> bool:
        """Whether the first tasks do everything in a moment, see `WorkQueue.is_soon_done`."""
        return self._queue.is_soon_done(slots, rows_per_second)

    def take(
        self, slots: int, rows_per_second: float | None, in_flight: float = 0, per_job: int = 1
    ) -> Task | None:
        """Cut the next task, see `WorkQueue.next_task`; None: there is none now."""
        for waiting in (self._assemblies, self._again):
            if waiting:
                parts = tuple(waiting)
                waiting.clear()
                return Task(self.work, parts)
        if not self._queue:
            return None
        taken, limit = self._queue.next_task(slots, rows_per_second, in_flight, per_job)
        for part in taken:
            if not part.whole:
                self._splits.setdefault(part.plan.fragment_id, _Split())
        parts = tuple(map(self._prepared.part_work, taken))
        riders = self._take_riders(taken)
        return Task(self.work, parts, limit=limit, riders=riders)

    def put_back(self, parts: Sequence[PartWork]) -> None:
        """Queue whole fragments once more that a task had no time to begin with."""
        self._queue.put_back([self._plans[part.fragment_id] for part in parts])

    def take_back(self, task: Task, report: TaskReport) -> None:
        """Queue once more what a task had no time for."""
        if report.parts_left:
            self.put_back(task.parts[-report.parts_left :])
        ends = {(part.fragment_id, part.rows.start): part.rows.end for part in task.parts}
        for result in report.results:
            if result.rows.end < ends[result.fragment_id, result.rows.start]:
                self._queue.put_back_rest(self._plans[result.fragment_id], result.rows.end)

    def _take_riders(self, parts: Iterable[Part]) -> tuple[Task, ...]:
        """Tasks of other columns for the same rows; a fragment that is split they do themselves."""
        taken: dict[TaskQueue, list[PartWork]] = {}
        for part in parts:
            fragment_id = part.plan.fragment_id
            for queue in self._riders.pop(fragment_id, ()):
                if part.whole:
                    own = queue._queue.take_held(fragment_id)
                    taken.setdefault(queue, []).append(queue._prepared.part_work(own))
                else:
                    queue._queue.release(fragment_id)
        return tuple(Task(queue.work, tuple(own)) for queue, own in taken.items())

    def try_again(self, unreadable: UnreadablePart) -> bool:
        """Queue a part once more that could not be read; False: it was tried often enough."""
        place = (unreadable.fragment_id, unreadable.rows.start)
        self._tries[place] += 1
        if self._tries[place] >= _MAX_READ_TRIES:
            return False
        self._again.append(self._work_on(unreadable))
        return True

    def _work_on(self, part: UnreadablePart) -> PartWork:
        """The work on a part once more."""
        plan, split = self._plans[part.fragment_id], self._splits.get(part.fragment_id)
        whole = len(part.rows) == plan.physical_rows
        if whole and split is not None:
            return self._prepared.assembly_work(plan, split.checkpoints)
        return self._prepared.part_work(Part(plan, part.rows, whole))

    def is_assembled(self, result: PartResult) -> bool:
        """Whether a fragment was put together of ranges that were reported before."""
        return result.fragment_id in self._splits and result.staged_path is not None

    def range_done(self, result: PartResult) -> None:
        """Take a range of a shared fragment; after its last one the fragment is assembled."""
        split = self._splits.setdefault(result.fragment_id, _Split())
        plan = self._plans[result.fragment_id]
        split.rows_done += len(result.rows)
        split.checkpoints.extend(result.checkpoints)
        if split.rows_done == plan.physical_rows:
            self._assemblies.append(self._prepared.assembly_work(plan, split.checkpoints))

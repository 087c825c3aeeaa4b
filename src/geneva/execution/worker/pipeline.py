"""A task as a pipeline: the reader's windows through the program to the writer, part by part.

```
 reader's thread           the task's own thread            writer's thread
 windows, read ahead  ->   batches, program, values   ->    receipts, checkpoints, column file
       bounded queue                            bounded queue
```

A task of several columns of a view reads their rows once. Each column has its program and its
writer as if it was alone: the task's own thread gives a window to one program after the other.

- The reader runs ahead of the program, also into the next part. It changes nothing. Its errors come
  to the program in their place, behind what was read before them.
- The program takes windows in order. It goes on after a result that is to be durable now only when
  the writer has acknowledged it: where the user counted the rows that may be lost, and where
  poison rows are searched for. There it goes on after a part only when that is settled, too.
- The writer takes results in order. A part is done when its `finish` has returned.
- A batch on which the user's function or SQL failed ends the task: what was computed before it is
  saved, and reported; of the task's other columns, too. Any other error, of any stage, fails the
  task, and Spark runs it again.
- Whatever ends the task, its threads end with it. One that a store keeps waiting is left behind: it
  stops when the store answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import wait

from geneva.errors import SQLExecutionError, UDFOutputError
from geneva.execution.apply.pauses import JobEnded
from geneva.execution.worker.batches import BatchRunner, Event
from geneva.execution.worker.pacing import Deadline
from geneva.execution.worker.poison_rows import PoisonSearch, note_key
from geneva.execution.worker.read_ahead import Group, ReadAhead
from geneva.execution.worker.reader import Reader
from geneva.execution.worker.records import (
    BatchFailed,
    Interrupted,
    Leg,
    OpenTask,
    PartBegins,
    PartEnds,
)
from geneva.execution.worker.settling import PartSettler
from geneva.execution.worker.shared_reader import expressions_of
from geneva.execution.worker.task import (
    PartFailure,
    PartResult,
    PartWork,
    TaskReport,
    UnreadablePart,
)
from geneva.execution.worker.threads import Halt, Stage, Stopped
from geneva.execution.worker.write_behind import WriteBehind
from geneva.execution.worker.writer import Writer
from geneva.planning.sizing import Limit
from geneva.storage.lance.damage import Damaged, is_storage_full

_PATIENCE_SECONDS = 5.0
"""How long a failed task waits for a thread that is in the midst of a read or write."""


class Pipeline:
    """Reader, program and writer of one column of a task."""

    def __init__(self, task: OpenTask, *, is_retry: bool) -> None:
        """`is_retry`: an earlier attempt at the task was lost."""
        self._task, self._is_retry = task, is_retry
        self._parts_begun = self._parts_left = 0
        self._reader = Reader(task)
        self._runner = BatchRunner(task)
        self._writer = Writer(task)
        self._settler = PartSettler(task, self._writer)
        self._part: PartWork | None = None
        """The part whose results are handed over."""

    def run(
        self,
        parts: Iterable[PartWork],
        done: Iterable[PartResult] = (),
        limit: Limit | None = None,
    ) -> TaskReport:
        """Do the parts in order, up to a failure; report on them after those `done` before.

        Behind the `limit` no other part is begun: the rest is reported as left.
        """
        run_together([self], [(part,) for part in parts], limit)
        return self.report(done)

    def report(self, done: Iterable[PartResult] = ()) -> TaskReport:
        """What was done, after those parts that were `done` before."""
        outcomes = self._settler.outcomes
        stages = (self._reader, self._runner, self._writer)
        timings = [stage.clock.timings() for stage in stages]
        return TaskReport(
            results=(*done, *(found for found in outcomes if isinstance(found, PartResult))),
            failure=self.failure,
            unreadable=tuple(found for found in outcomes if isinstance(found, UnreadablePart)),
            timings=timings[0].plus(timings[1]).plus(timings[2]),
            parts_left=self._parts_left,
            recorded=tuple(self._writer.recorded),
            retries=self._runner.retries,
            tokens=self._runner.usage.tokens,
            cost=self._runner.usage.cost,
            limit_updates=self._runner.usage.requests,
        )

    @property
    def failure(self) -> PartFailure | None:
        """What ends the task."""
        return self._settler.failure

    def reads(self, sql: str | None) -> bool:
        """Whether an expression is read for this column."""
        return any(sql == text for _, text in expressions_of(self._task.work.computation))

    @property
    def reader(self) -> Reader:
        """Reads its inputs."""
        return self._reader

    # ------------------------------------------------ what `run_together` asks for, in this order

    def open(self, halt: Halt, columns: int, deadline: Deadline) -> None:
        """Start the writer's thread; so many `columns` share the memory of the task."""
        self._runner.deadline = deadline
        # A failure that its writer finds stops this column at once, and the others in good order.
        self._behind = WriteBehind(self._settler, halt.inner(), columns)
        self._thread = Stage("geneva-writer", self._behind.run, halt)

    def begin(self, part: PartWork) -> None:
        """Go on with another part."""
        key = note_key(self._task.work.job_id, part)
        search = PoisonSearch(self._task.store, key, is_retry=self._is_retry)
        self._begun = part
        self._parts_begun += 1
        self._hand_over(self._runner.begin(part, search))

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch, where that is given."""
        return self._task.work.sizes.batch_size

    def take(self, group: Group) -> None:
        """Compute what was read of the part."""
        # What the writer can't write is not worth computing.
        if self._settler.given_up is not self._begun:
            self._hand_over(self._runner.run(*group))

    @property
    def is_given_back(self) -> bool:
        """Whether the rest of the part is not computed here."""
        return self._runner.is_given_back

    def end(self, error: Exception | None) -> None:
        """End the part; `error`: it could not be read on."""
        self._hand_over(self._runner.end(error))

    def finish(self) -> None:
        """Compute what is still queued."""
        self._hand_over(self._runner.finish())

    def fail(self, error: Exception) -> None:
        """End the task by an error in the part whose results were handed over last."""
        self._runner.abandon()
        self._behind.end(PartEnds(error), wait=False)

    def interrupt(self) -> None:
        """End the task because another column failed."""
        self._runner.abandon()
        if self._part is not None:
            self._behind.end(PartEnds(Interrupted()), wait=False)

    def close(self) -> None:
        """Wait until everything is written."""
        self._behind.close()
        self._thread.join()

    def stop(self) -> None:
        """Let nothing go on, whatever happened."""
        self._runner.abandon()
        self._thread.join(_PATIENCE_SECONDS)
        if self._writer.saving is not None:
            wait([self._writer.saving], _PATIENCE_SECONDS)

    def release(self) -> None:
        """Give back what the program has reserved."""
        self._runner.close()

    def check(self, parts: int) -> None:
        """Make sure that all parts that were begun are settled, and note how many were not."""
        outcomes, begun = len(self._settler.outcomes), self._parts_begun
        if outcomes != begun:
            raise AssertionError(f"{outcomes} of {begun} parts are settled")
        self._parts_left = parts - begun

    def _hand_over(self, events: Iterable[Event]) -> None:
        """Hand on what the program makes; raises _ColumnFailed where that ends the task."""
        try:
            for event in events:
                if isinstance(event, PartEnds) and isinstance(event.error, BatchFailed):
                    raise event.error
                self._hand_on(event)
        except Exception as error:
            if not isinstance(error, BatchFailed) and not is_storage_full(error):
                raise
            raise _ColumnFailed(self, error) from error

    def _hand_on(self, event: Event) -> None:
        behind = self._behind
        if isinstance(event, PartBegins):
            self._part = event.part
            behind.begin(event)
        elif isinstance(event, PartEnds):
            behind.end(event, wait=self._is_retry or self._task.work.bounds_lost_rows)
            self._part = None
        else:
            for saved in behind.add(event):
                self._runner.saved(saved)


class _ColumnFailed(Exception):
    """The function or SQL of a column failed, or there is no space: the task ends."""

    def __init__(self, column: Pipeline, error: Exception) -> None:
        super().__init__(str(error))
        self.column, self.error = column, error


def run_together(
    columns: Sequence[Pipeline], legs: Sequence[Leg], limit: Limit | None = None
) -> None:
    """Do the legs of a task in order, up to a failure; behind the `limit` no other is begun."""
    try:
        if legs:
            rows = sum(part.rows_to_run for leg in legs for part in leg if part is not None)
            _run_threads(columns, legs, Deadline(limit, rows))
    finally:
        for column in columns:
            column.release()
    if all(column.failure is None for column in columns):
        for place, column in enumerate(columns):
            column.check(sum(leg[place] is not None for leg in legs))


def _run_threads(columns: Sequence[Pipeline], legs: Sequence[Leg], deadline: Deadline) -> None:
    halt = Halt()
    readers = [(column.reader, column.batch_size) for column in columns]
    ahead = ReadAhead(readers, legs, halt)
    reader = Stage("geneva-reader", ahead.run, halt)
    for column in columns:
        column.open(halt, len(columns), deadline)
    try:
        try:
            for number, leg in enumerate(legs):
                if number and deadline.is_over:
                    break
                _compute(columns, leg, ahead)
            for column in columns:
                column.finish()
            for column in columns:
                column.close()
        except _ColumnFailed as failed:
            # The others first: a failure stops all threads.
            others = [column for column in columns if column is not failed.column]
            for column in others:
                column.interrupt()
                column.close()
            failed.column.fail(failed.error)
            failed.column.close()
        except JobEnded:
            for column in columns:
                column.interrupt()
                column.close()
            raise
        except Stopped:
            if halt.is_set:
                raise
            for column in (column for column in columns if column.failure is None):
                column.interrupt()
                column.close()
    except Stopped:
        pass  # by an error, which is raised below, or by a failure that is reported
    finally:
        halt.set()
        # What it reads of a part that is given back, nobody waits for.
        given_back = any(column.is_given_back for column in columns)
        reader.join(0.0 if given_back else _PATIENCE_SECONDS)
        for column in columns:
            column.stop()
    if halt.error is not None:
        raise halt.error


def _compute(columns: Sequence[Pipeline], leg: Leg, ahead: ReadAhead) -> None:
    """Compute the parts of a leg."""
    own = [(column, part) for column, part in zip(columns, leg, strict=True) if part is not None]
    for column, part in own:
        column.begin(part)
    error: Exception | None = None
    groups = ahead.next_leg()
    while not all(column.is_given_back for column, _ in own):
        try:
            found = next(groups, None)
        except Damaged as damage:
            error = damage
            break
        except (SQLExecutionError, UDFOutputError) as failed:
            column, part = _at_fault(own, failed)
            column.end(BatchFailed(failed, part.rows, None, ()))
            column.finish()
            raise AssertionError("a failure ends the task") from failed
        if found is None:
            break
        place, group = found
        columns[place].take(group)
    for column, _ in own:
        column.end(error)


def _at_fault(
    own: Sequence[tuple[Pipeline, PartWork]], error: SQLExecutionError | UDFOutputError
) -> tuple[Pipeline, PartWork]:
    """The column of a leg whose SQL failed."""
    sql = getattr(error, "sql", None)
    return next((found for found in own if found[0].reads(sql)), own[0])

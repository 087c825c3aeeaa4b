"""A task as a pipeline: the reader's windows through the program to the writer, part by part.

```
 reader's thread           the task's own thread            writer's thread
 windows, read ahead  ->   batches, program, values   ->    receipts, checkpoints, column file
       bounded queue                            bounded queue
```

- The reader runs ahead of the program, also into the next part. It changes nothing. Its errors come
  to the program in their place, behind what was read before them.
- The program takes windows in order. It goes on after a result that is to be durable now only when
  the writer has acknowledged it: where the user counted the rows that may be lost, and where
  poison rows are searched for. There it goes on after a part only when that is settled, too.
- The writer takes results in order. A part is done when its `finish` has returned.
- A batch on which the user's function or SQL failed ends the task: what was computed before it is
  saved, and reported. Any other error, of any stage, fails the task, and Spark runs it again.
- Whatever ends the task, its threads end with it. One that a store keeps waiting is left behind: it
  stops when the store answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import wait

from geneva.errors import SQLExecutionError, UDFOutputError
from geneva.execution.worker.batches import BatchRunner, Event
from geneva.execution.worker.poison_rows import PoisonSearch, note_key
from geneva.execution.worker.read_ahead import ReadAhead
from geneva.execution.worker.reader import Reader
from geneva.execution.worker.records import BatchFailed, OpenTask, PartBegins, PartEnds
from geneva.execution.worker.settling import PartSettler
from geneva.execution.worker.task import PartResult, PartWork, TaskReport, UnreadablePart
from geneva.execution.worker.threads import Halt, Stage, Stopped
from geneva.execution.worker.write_behind import WriteBehind
from geneva.execution.worker.writer import Writer
from geneva.storage.lance.damage import Damaged, is_storage_full

_PATIENCE_SECONDS = 5.0
"""How long a failed task waits for a thread that is in the midst of a read or write."""


class Pipeline:
    """Reader, program and writer of one task."""

    def __init__(self, task: OpenTask, *, is_retry: bool) -> None:
        """`is_retry`: an earlier attempt at the task was lost."""
        self._task, self._is_retry = task, is_retry
        self._parts_begun = 0
        self._reader = Reader(task)
        self._runner = BatchRunner(task)
        self._writer = Writer(task)
        self._settler = PartSettler(task, self._writer)

    def run(
        self,
        parts: Iterable[PartWork],
        done: Iterable[PartResult] = (),
        max_seconds: float | None = None,
    ) -> TaskReport:
        """Do the parts in order, up to a failure; report on them after those `done` before.

        After `max_seconds` no other part is begun: the rest is reported as left.
        """
        parts = tuple(parts)
        self._deadline = time.monotonic() + (math.inf if max_seconds is None else max_seconds)
        try:
            if parts:
                self._run_threads(parts)
        finally:
            self._runner.close()
        outcomes, failure = self._settler.outcomes, self._settler.failure
        begun = self._parts_begun
        if failure is None and len(outcomes) != begun:
            raise AssertionError(f"{len(outcomes)} of {begun} parts are settled")
        stages = (self._reader, self._runner, self._writer)
        timings = [stage.clock.timings() for stage in stages]
        return TaskReport(
            results=(*done, *(found for found in outcomes if isinstance(found, PartResult))),
            failure=failure,
            unreadable=tuple(found for found in outcomes if isinstance(found, UnreadablePart)),
            timings=timings[0].plus(timings[1]).plus(timings[2]),
            parts_left=len(parts) - begun if failure is None else 0,
            recorded=tuple(self._writer.recorded),
            retries=self._runner.retries,
            tokens=self._runner.usage.tokens,
            cost=self._runner.usage.cost,
            limit_updates=self._runner.usage.requests,
        )

    def _run_threads(self, parts: tuple[PartWork, ...]) -> None:
        halt = Halt()
        ahead = ReadAhead(self._reader, parts, halt, self._task.work.sizes.batch_size)
        behind = WriteBehind(self._settler, halt)
        reader = Stage("geneva-reader", ahead.run, halt)
        writer = Stage("geneva-writer", behind.run, halt)
        try:
            self._compute(parts, ahead, behind)
            behind.close()
            writer.join()
        except Stopped:
            pass  # by an error, which is raised below, or by a failure that is reported
        finally:
            halt.set()
            reader.join(_PATIENCE_SECONDS)
            writer.join(_PATIENCE_SECONDS)
            if self._writer.saving is not None:
                wait([self._writer.saving], _PATIENCE_SECONDS)
        if halt.error is not None:
            raise halt.error

    def _compute(self, parts: tuple[PartWork, ...], ahead: ReadAhead, behind: WriteBehind) -> None:
        """Compute the parts in order, up to a failure that ends the task."""
        try:
            for event in self._events(parts, ahead):
                self._hand_over(event, behind)
                if isinstance(event, PartEnds) and isinstance(event.error, BatchFailed):
                    return
        except Exception as error:
            # Of the part whose results were handed over last.
            if not isinstance(error, BatchFailed) and not is_storage_full(error):
                raise
            self._hand_over(PartEnds(error), behind)
        finally:
            self._runner.abandon()

    def _hand_over(self, event: Event, behind: WriteBehind) -> None:
        if isinstance(event, PartBegins):
            behind.begin(event)
        elif isinstance(event, PartEnds):
            behind.end(event.error, wait=self._is_retry or self._task.work.bounds_lost_rows)
        else:
            for saved in behind.add(event):
                self._runner.saved(saved)

    def _events(self, parts: tuple[PartWork, ...], ahead: ReadAhead) -> Iterator[Event]:
        """What the program makes of the parts."""
        runner = self._runner
        for part in parts:
            if self._parts_begun and time.monotonic() > self._deadline:
                break
            self._parts_begun += 1
            key = note_key(self._task.work.job_id, part)
            search = PoisonSearch(self._task.store, key, is_retry=self._is_retry)
            yield from runner.begin(part, search)
            error: Exception | None = None
            groups = ahead.next_part()
            while True:
                try:
                    group = next(groups, None)
                except Damaged as damage:
                    error = damage
                    break
                except (SQLExecutionError, UDFOutputError) as failed:
                    error = BatchFailed(failed, part.rows, None, ())
                    break
                if group is None:
                    break
                # What the writer can't write is not worth computing.
                if self._settler.given_up is not part:
                    yield from runner.run(*group)
            yield from runner.end(error)
        yield from runner.finish()

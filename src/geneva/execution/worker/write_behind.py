"""The writer's thread: writes what was computed while the program computes on.

The program runs ahead of the writer by some bytes, by about a second of work, which is lost with
the worker, and by a few parts: what can't be written is not worth computing. Small results are
handed over several at once: each hand-over has its price.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from geneva.execution.worker.records import (
    Computed,
    Durable,
    PartBegins,
    PartEnds,
    Result,
    Saved,
)
from geneva.execution.worker.settling import PartSettler
from geneva.execution.worker.threads import BoundedQueue, Halt, Stopped

_MAX_BYTES = 32 * 1024 * 1024
"""Values that were computed and wait for the writer."""
_MAX_SECONDS = 1.0
"""Work that waits for the writer."""
_GROUP_BYTES = 4 * 1024 * 1024
"""Small results are handed over when they have so many bytes ..."""
_GROUP_SECONDS = 0.1
"""... or took this long."""
_RECORD_BYTES = 1024
"""What a result takes, however few values are in it."""
_MAX_UNSETTLED = 4
"""Parts that may still be written when the next one begins, those that are closing aside."""
_ASKING = (Durable.SOON, Durable.NOW)


@dataclass(frozen=True, slots=True)
class _Values:
    """Results of a part, in order. If the last one asks for a checkpoint, it is acknowledged."""

    results: tuple[Computed | Result, ...]


@dataclass(frozen=True, slots=True)
class _End:
    """The part has no more results."""

    ends: PartEnds
    now: bool
    """Whether somebody waits until the part is settled."""


class WriteBehind:
    """Takes results in the task's own thread; `run` writes them in another one."""

    def __init__(self, settler: PartSettler, halt: Halt, columns: int = 1) -> None:
        """Write nothing yet. So many `columns` of a task share the memory."""
        self._settler, self._halt = settler, halt
        self._max_bytes = _MAX_BYTES // columns
        self._queue: BoundedQueue[PartBegins | _Values | _End | None] = BoundedQueue(halt)
        self._acknowledged: BoundedQueue[tuple[Saved, ...]] = BoundedQueue(halt)
        self._is_saving = False
        self._settled: BoundedQueue[None] = BoundedQueue(halt)
        self._unsettled = 0
        self._group: list[Computed | Result] = []
        self._group_bytes, self._group_seconds = 0, 0.0

    def begin(self, begins: PartBegins) -> None:
        """Go on with another part, when all but the last few are settled."""
        self._await_settled(_MAX_UNSETTLED + self._settler.max_closing)
        self._unsettled += 1
        self._queue.put(begins)

    def add(self, result: Computed | Result) -> list[Saved]:
        """Hand a result over; return what was acknowledged since the last one.

        One checkpoint at a time is written behind, so that a slow writer doesn't lose ever more
        with its worker. A result that is to be durable now is acknowledged before this returns.
        """
        asks = result.durable in _ASKING
        saved = self._saved(wait=asks)
        self._group.append(result)
        self._group_bytes += result.nbytes + _RECORD_BYTES
        self._group_seconds += result.seconds
        full = self._group_bytes >= _GROUP_BYTES or self._group_seconds >= _GROUP_SECONDS
        if full or asks:
            self._hand_over()
        self._is_saving = self._is_saving or asks
        return saved + self._saved(wait=True) if result.durable is Durable.NOW else saved

    def end(self, ends: PartEnds, *, wait: bool) -> None:
        """End the part. If it could not be computed on, what was added is saved.

        `wait`: return when the part is settled, and its notes on poison rows are gone.
        """
        self._hand_over()
        self._queue.put(_End(ends, wait))
        if wait:
            self._await_settled(0)

    def close(self) -> None:
        """End the task: `run` returns when everything is written."""
        self._queue.put(None)

    def run(self) -> None:
        """Write what is handed over, up to the end of the task or to a failure that ends it."""
        settler = self._settler
        while settler.failure is None and (message := self._queue.get()) is not None:
            if isinstance(message, PartBegins):
                settler.begin(message.part, message.search)
            elif isinstance(message, _Values):
                saved = settler.add(message.results)
                if message.results[-1].durable in _ASKING:
                    self._acknowledge(saved)
            else:
                for _ in range(settler.end(message.ends, now=message.now)):
                    self._settled.put(None)
        settler.finish()
        if settler.failure is not None:
            self._halt.set()

    def _acknowledge(self, saved: Future[Saved] | None) -> None:
        """Tell the program, when a checkpoint is there, or that there will be none.

        An error is raised in the writer's own thread, when it needs the checkpoint.
        """

        def put(done: Future[Saved]) -> None:
            with suppress(Stopped):
                self._acknowledged.put((done.result(),) if done.exception() is None else ())

        if saved is None:
            self._acknowledged.put(())
        else:
            saved.add_done_callback(put)

    def _await_settled(self, max_unsettled: int) -> None:
        """Wait until no more parts than this are still to be settled."""
        while self._unsettled > max_unsettled:
            self._settled.get()
            self._unsettled -= 1

    def _hand_over(self) -> None:
        if not self._group:
            return
        share = max(self._group_bytes / self._max_bytes, self._group_seconds / _MAX_SECONDS)
        self._queue.put(_Values(tuple(self._group)), share)
        self._group, self._group_bytes, self._group_seconds = [], 0, 0.0

    def _saved(self, *, wait: bool) -> list[Saved]:
        """What the writer says of the checkpoint that it was asked for, if it was."""
        if not self._is_saving:
            return []
        saved = self._acknowledged.get() if wait else self._acknowledged.get_now()
        self._is_saving = saved is None
        return [*saved] if saved is not None else []

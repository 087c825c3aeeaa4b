"""The reader's thread: reads the parts of a task ahead of the programs, also into the next part.

Where the size of batches is given, it cuts them, too: each in buffers of its own, so that a call
can begin as soon as the one before it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from geneva.background import in_background
from geneva.execution.apply.compact import compact_batch
from geneva.execution.worker.reader import Reader
from geneva.execution.worker.records import Clock, Item, Leg, Result, Window
from geneva.execution.worker.shared_reader import SharedReader
from geneva.execution.worker.threads import BoundedQueue, Halt
from geneva.execution.worker.waiting import WaitingRows
from geneva.storage.lance.damage import Damaged, reading

_MAX_BYTES = 32 * 1024 * 1024
"""Inputs that were read and wait for the program."""
_RECORD_BYTES = 1024
"""What a record takes, however few values are in it."""
_MAX_AT_ONCE = 8
"""Small parts that are read from an object store at the same time; together they are a window."""
_MAX_GROUP = 64
"""Batches that are handed on at once: each hand-over has its price."""

Group: TypeAlias = tuple[Item, ...]
"""Windows that follow each other, or a result."""


@dataclass(frozen=True, slots=True)
class _EndOfLeg:
    """No more of a leg comes; `error`: because it can't be read on."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _SmallLeg:
    """What was read of a leg, how long that took, and what ended it."""

    items: list[Item]
    clock: Clock
    error: BaseException | None = None


class ReadAhead:
    """Hands on what the readers read, in order; and their errors, each in its place."""

    def __init__(
        self, readers: Sequence[tuple[Reader, int | None]], legs: Sequence[Leg], halt: Halt
    ) -> None:
        """Read nothing yet: that is what `run` does, in a thread of its own.

        There is a reader for each column of the task, and the size of its batches if it is given.
        """
        self._readers = [reader for reader, _ in readers]
        self._batch_sizes = [size for _, size in readers]
        self._awaited = [*self._batch_sizes]
        """The size of each program's first batch; None: it was read, or no size is given."""
        self._legs = legs
        self._shared = SharedReader(self._readers)
        self._queue: BoundedQueue[tuple[int, Group] | _EndOfLeg] = BoundedQueue(halt)

    def run(self) -> None:
        """Read all legs, in order. A damaged one is no reason not to read the next one."""
        legs, ahead = deque(self._legs), deque[Future[_SmallLeg]]()
        while legs or ahead:
            while legs and len(ahead) < _MAX_AT_ONCE and self._is_small(legs[0]):
                read = partial(self._read_small, legs.popleft())
                ahead.append(in_background("geneva-reader-ahead", read))
            items = self._of_small(ahead.popleft()) if ahead else self._items(legs.popleft())
            error = self._hand_on(items)
            self._queue.put(_EndOfLeg(error))
            if error is not None and not isinstance(error, Damaged):
                return

    def next_leg(self) -> Iterator[tuple[int, Group]]:
        """What was read of the next leg, and for which column; raises what ended its reading."""
        while not isinstance(found := self._queue.get(), _EndOfLeg):
            yield found
        if found.error is not None:
            raise found.error

    def _hand_on(self, items: Iterator[tuple[int, Item]]) -> BaseException | None:
        """Hand on what is read of a leg; return what ended it."""
        groups = self._groups(items)
        while True:
            try:
                found = next(groups, None)
            except BaseException as error:  # noqa: BLE001  raised where the part is computed
                return error
            if found is None:
                return None
            size = sum(item.nbytes + _RECORD_BYTES for item in found[1])
            self._queue.put(found, size / _MAX_BYTES)

    def _groups(self, items: Iterator[tuple[int, Item]]) -> Iterator[tuple[int, Group]]:
        """What is handed on, in order: windows as they were read, or cut into batches."""
        waiting = [WaitingRows() for _ in self._readers]
        for place, item in items:
            own, size = waiting[place], self._batch_sizes[place]
            if isinstance(item, Result):
                yield from ((place, group) for group in _batches(own, len(own), size or 1))
                yield place, (item,)
            elif size is None:
                yield place, (item,)
            else:
                own.add(item)
                full = len(own) - len(own) % size
                yield from ((place, group) for group in _batches(own, full, size))
        for place, own in enumerate(waiting):
            rest = _batches(own, len(own), self._batch_sizes[place] or 1)
            yield from ((place, group) for group in rest)

    def _items(self, leg: Leg) -> Iterator[tuple[int, Item]]:
        """What is read of a leg, and for which column."""
        own = [(place, part) for place, part in enumerate(leg) if part is not None]
        if len(own) > 1:
            found: Iterator[tuple[int, Item]] = reading(self._shared.read(leg))
        else:
            ((only, part),) = own
            found = ((only, item) for item in reading(self._readers[only].read(part)))
        for place, item in found:
            for some in self._awaited_apart(place, item):
                yield place, self._readers[place].digested(some)

    def _awaited_apart(self, place: int, item: Item) -> Iterator[Item]:
        """The first batch of a task apart from what was read with it, as calls wait for that one.

        The rest in ever larger parts: each should be ready when those before it are computed.
        """
        if isinstance(item, Result):
            yield item
            return
        size, self._awaited[place] = self._awaited[place], None
        if size is None or len(item.offsets) <= size:
            yield item
            return
        rows = WaitingRows()
        rows.add(item)
        while rows:
            yield rows.take(min(size, len(rows)))
            size *= 4

    def _is_small(self, leg: Leg) -> bool:
        """Whether reading a leg is one short request, which is waited for and nothing else."""
        task, (part, *riders) = self._readers[0].task, leg
        if part is None or any(riders) or not task.work.ref.is_remote:
            return False
        # Of a source's rows nobody knows how wide they are.
        if task.work.computation.source is not None or part.covered or part.reuse:
            return False
        return len(part.rows) * _MAX_AT_ONCE <= part.window

    def _read_small(self, leg: Leg) -> _SmallLeg:
        """Read a small leg as a whole, with a reader of its own."""
        ((part, *_), own) = leg, Reader(self._readers[0].task)
        assert part is not None
        items: list[Item] = []
        try:
            items.extend(own.digested(item) for item in reading(own.read(part)))
        except BaseException as error:  # noqa: BLE001  raised where the part is computed
            return _SmallLeg(items, own.clock, error)
        return _SmallLeg(items, own.clock)

    def _of_small(self, reading_it: Future[_SmallLeg]) -> Iterator[tuple[int, Item]]:
        """What was read of a small leg. As others were read meanwhile, it took a share."""
        read, clock = reading_it.result(), self._readers[0].clock
        clock.read += read.clock.read / _MAX_AT_ONCE
        clock.write += read.clock.write
        for item in read.items:
            yield 0, replace(item, seconds=item.seconds / _MAX_AT_ONCE)
        if read.error is not None:
            raise read.error


def _batches(waiting: WaitingRows, rows: int, size: int) -> Iterator[Group]:
    """The first rows that wait, in windows of `size` rows, each in buffers of its own."""
    while rows:
        group: list[Window] = []
        while rows and len(group) < _MAX_GROUP:
            window = waiting.take(min(size, rows))
            rows -= len(window.offsets)
            group.append(replace(window, inputs=compact_batch(window.inputs)))
        yield tuple(group)

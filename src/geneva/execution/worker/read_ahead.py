"""The reader's thread: reads the parts of a task ahead of the program, also into the next part.

Where the size of batches is given, it cuts them, too: each in buffers of its own, so that a call
can begin as soon as the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from geneva.execution.apply.compact import compact_batch
from geneva.execution.worker.reader import Reader
from geneva.execution.worker.records import Result, Window
from geneva.execution.worker.task import PartWork
from geneva.execution.worker.threads import BoundedQueue, Halt
from geneva.execution.worker.waiting import WaitingRows
from geneva.storage.lance.damage import Damaged, reading

_MAX_BYTES = 32 * 1024 * 1024
"""Inputs that were read and wait for the program."""
_RECORD_BYTES = 1024
"""What a record takes, however few values are in it."""
_MAX_GROUP = 64
"""Batches that are handed on at once: each hand-over has its price."""

Group = tuple[Window | Result, ...]
"""Windows that follow each other, or a result."""


@dataclass(frozen=True, slots=True)
class _EndOfPart:
    """No more of a part comes; `error`: because it can't be read on."""

    error: BaseException | None = None


class ReadAhead:
    """Hands on what the reader read, in order; and its errors, each in its place."""

    def __init__(
        self, reader: Reader, parts: Sequence[PartWork], halt: Halt, batch_size: int | None = None
    ) -> None:
        """Read nothing yet: that is what `run` does, in a thread of its own."""
        self._reader, self._parts, self._batch_size = reader, parts, batch_size
        self._queue: BoundedQueue[Group | _EndOfPart] = BoundedQueue(halt)

    def run(self) -> None:
        """Read all parts, in order. A damaged one is no reason not to read the next one."""
        for part in self._parts:
            error = self._read(part)
            self._queue.put(_EndOfPart(error))
            if error is not None and not isinstance(error, Damaged):
                return

    def next_part(self) -> Iterator[Group]:
        """What was read of the next part; raises what ended the reading of it."""
        while not isinstance(group := self._queue.get(), _EndOfPart):
            yield group
        if group.error is not None:
            raise group.error

    def _read(self, part: PartWork) -> BaseException | None:
        groups = self._groups(reading(self._reader.read(part)))
        while True:
            try:
                group = next(groups, None)
            except BaseException as error:  # noqa: BLE001  raised where the part is computed
                return error
            if group is None:
                return None
            size = sum(_size_of(item) + _RECORD_BYTES for item in group)
            self._queue.put(group, size / _MAX_BYTES)

    def _groups(self, items: Iterator[Window | Result]) -> Iterator[Group]:
        """What is handed on, in order: windows as they were read, or cut into batches."""
        waiting = WaitingRows()
        size = self._batch_size
        for item in items:
            if isinstance(item, Result):
                yield from _batches(waiting, len(waiting), size or 1)
                yield (item,)
            elif size is None:
                yield (self._reader.digested(item),)
            else:
                waiting.add(self._reader.digested(item))
                yield from _batches(waiting, len(waiting) - len(waiting) % size, size)
        yield from _batches(waiting, len(waiting), size or 1)


def _batches(waiting: WaitingRows, rows: int, size: int) -> Iterator[Group]:
    """The first rows that wait, in windows of `size` rows, each in buffers of its own."""
    while rows:
        group: list[Window] = []
        while rows and len(group) < _MAX_GROUP:
            window = waiting.take(min(size, rows))
            rows -= len(window.offsets)
            group.append(replace(window, inputs=compact_batch(window.inputs)))
        yield tuple(group)


def _size_of(item: Window | Result) -> int:
    if isinstance(item, Result):
        return item.nbytes
    known = item.known.values.nbytes if item.known is not None else 0
    return int(item.inputs.nbytes + known)

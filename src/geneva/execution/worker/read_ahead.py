"""The reader's thread: reads the parts of a task ahead of the program, also into the next part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from geneva.execution.worker.reader import Reader
from geneva.execution.worker.records import Result, Window
from geneva.execution.worker.task import PartWork
from geneva.execution.worker.threads import BoundedQueue, Halt
from geneva.storage.lance.damage import Damaged, reading

_MAX_BYTES = 32 * 1024 * 1024
"""Inputs that were read and wait for the program."""
_RECORD_BYTES = 1024
"""What a record takes, however few values are in it."""


@dataclass(frozen=True, slots=True)
class _EndOfPart:
    """No more of a part comes; `error`: because it can't be read on."""

    error: BaseException | None = None


class ReadAhead:
    """Hands on what the reader read, in order; and its errors, each in its place."""

    def __init__(self, reader: Reader, parts: Sequence[PartWork], halt: Halt) -> None:
        """Read nothing yet: that is what `run` does, in a thread of its own."""
        self._reader, self._parts = reader, parts
        self._queue: BoundedQueue[Window | Result | _EndOfPart] = BoundedQueue(halt)

    def run(self) -> None:
        """Read all parts, in order. A damaged one is no reason not to read the next one."""
        for part in self._parts:
            error = self._read(part)
            self._queue.put(_EndOfPart(error))
            if error is not None and not isinstance(error, Damaged):
                return

    def next_part(self) -> Iterator[Window | Result]:
        """What was read of the next part; raises what ended the reading of it."""
        while not isinstance(item := self._queue.get(), _EndOfPart):
            yield item
        if item.error is not None:
            raise item.error

    def _read(self, part: PartWork) -> BaseException | None:
        items = reading(self._reader.read(part))
        while True:
            try:
                item = next(items, None)
                if isinstance(item, Window):
                    item = self._reader.digested(item)
            except BaseException as error:  # noqa: BLE001  raised where the part is computed
                return error
            if item is None:
                return None
            self._queue.put(item, (_size_of(item) + _RECORD_BYTES) / _MAX_BYTES)


def _size_of(item: Window | Result) -> int:
    if isinstance(item, Result):
        return item.nbytes
    known = item.known.values.nbytes if item.known is not None else 0
    return int(item.inputs.nbytes + known)

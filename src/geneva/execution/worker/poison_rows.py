"""What a worker leaves behind when it dies: a note of the rows that it was about to compute.

A first attempt notes nothing, so that it costs nothing. A later one notes every batch before it
starts. The attempt after that takes the noted rows in sixteen parts, saving each, and so on until
one row is left. A row that killed its worker twice, all by itself, is not tried again: the policy
decides on it, as if it had raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from geneva.errors import UDFError, UDFTimeoutError, WorkerDied
from geneva.execution.worker.task import PartWork
from geneva.model.rows import Offsets
from geneva.storage.checkpoints.store import CheckpointStore

_PARTS = 16
"""Into how many parts suspected rows are cut: a note is cheaper than a dead worker."""
_DEATHS = 2
"""A single row that killed this many workers is at fault."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Rows [start, end) that were being computed when a worker died; `rows` of them are wanted."""

    start: int
    end: int
    rows: int
    tries: int = 1
    hung: bool = False

    def error(self) -> UDFError | None:
        """What is wrong with the row; None while that is not certain."""
        if self.rows != 1 or not (self.hung or self.tries >= _DEATHS):
            return None
        if self.hung:
            return UDFTimeoutError(
                "the call took longer than the UDF's timeout and could not be interrupted: its "
                "worker process was ended"
            )
        return WorkerDied(
            f"the worker process died {self.tries} times while it computed this row alone "
            "(segfault, out of memory, or exit)"
        )


def trail_key(job_id: str, part: PartWork) -> str:
    """Where the note of a part is."""
    return f"attempt-{job_id}-{part.fragment_id}-{part.rows.start}"


def read_notes(
    store: CheckpointStore, job_id: str, parts: Sequence[PartWork]
) -> tuple[Suspect | None, ...]:
    """What the dead left behind of these parts."""
    return tuple(_read(store, trail_key(job_id, part)) for part in parts)


def _read(store: CheckpointStore, key: str) -> Suspect | None:
    with suppress(KeyError, IndexError, TypeError):
        return Suspect(**store[key].to_pylist()[0])
    return None


class Trail:
    """The notes on one part."""

    def __init__(self, store: CheckpointStore, job_id: str, part: PartWork, *, again: bool) -> None:
        """`again`: an earlier attempt was lost, so that there may be a note, and one is kept."""
        self._store, self._key, self._again = store, trail_key(job_id, part), again
        self._suspect = _read(store, self._key) if again else None
        self._noted = self._suspect is not None

    def limit(self, offsets: Offsets, size: int) -> int:
        """How many of the next rows may be computed together, of at most `size`."""
        suspect = self._suspect
        if suspect is None or int(offsets[0]) >= suspect.end:
            return size
        before, inside = np.searchsorted(offsets, (suspect.start, suspect.end)).tolist()
        if before:
            return min(size, before)
        return max(1, min(size, inside, -(-suspect.rows // _PARTS)))

    def is_suspect(self, offsets: Offsets) -> bool:
        """Whether rows are among those that killed a worker: they are saved one by one."""
        suspect = self._suspect
        return suspect is not None and suspect.start <= int(offsets[0]) < suspect.end

    def verdict(self, offsets: Offsets) -> tuple[UDFError, int] | None:
        """The error that the row is known for, and how often it was tried; None: try it."""
        suspect = self._suspect
        if suspect is None or len(offsets) != 1 or int(offsets[0]) != suspect.start:
            return None
        error = suspect.error()
        return (error, suspect.tries) if error is not None else None

    def starting(self, offsets: Offsets) -> None:
        """Note that these rows are computed now."""
        if self._again:
            self._note(offsets, hung=False)

    def hung(self, offsets: Offsets) -> None:
        """Note that these rows take for ever. The process is about to end."""
        self._note(offsets, hung=len(offsets) == 1)

    def clear(self) -> None:
        """Forget it: the part is done."""
        if self._noted:
            with suppress(KeyError, OSError):
                del self._store[self._key]

    def _note(self, offsets: Offsets, *, hung: bool) -> None:
        start, end = int(offsets[0]), int(offsets[-1]) + 1
        was = self._suspect
        tries = was.tries + 1 if was is not None and (was.start, was.end) == (start, end) else 1
        note = Suspect(start, end, len(offsets), tries, hung)
        self._store[self._key] = pa.RecordBatch.from_pylist([asdict(note)])
        self._noted = True


@dataclass(frozen=True, slots=True)
class BatchGuard:
    """Knows which rows a batch is of, for the watchdog."""

    trail: Trail
    offsets: Offsets

    def hung(self, row: int | None) -> None:
        """Note the row that hangs, or all of them where it can't be told."""
        self.trail.hung(self.offsets if row is None else self.offsets[row : row + 1])

"""Finding the rows that kill their worker.

A first attempt at a task notes nothing, so that it costs nothing. A later one notes every batch
before it starts. The attempt after that takes the noted rows in sixteen parts, saving each, and so
on until one row is left. A row that killed its worker twice, all by itself, is not tried again: the
policy decides on it, as if it had raised.
"""

from __future__ import annotations

import hashlib
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
_MIN_DEATHS = 2
"""A single row that killed this many workers is at fault."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Rows [start, end) that were being computed when a worker died; `rows` of them are wanted.

    `tries` counts the attempts at exactly these rows; `hung`: the call could not be stopped.
    """

    start: int
    end: int
    rows: int
    tries: int = 1
    hung: bool = False

    def error(self) -> UDFError | None:
        """What is wrong with the row; None while that is not certain."""
        if self.rows != 1 or not (self.hung or self.tries >= _MIN_DEATHS):
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


@dataclass(frozen=True, slots=True)
class Condemned:
    """A row that is not tried again: the error that it counts as, and how often it was tried."""

    error: UDFError
    tries: int


def note_key(job_id: str, part: PartWork) -> str:
    """The checkpoint key of the note on a part; a job may compute several columns of it."""
    column = hashlib.md5(part.prefix.encode(), usedforsecurity=False).hexdigest()[:8]
    return f"attempt-{job_id}-{column}-{part.fragment_id}-{part.rows.start}"


def read_suspects(
    store: CheckpointStore, job_id: str, parts: Sequence[PartWork]
) -> tuple[Suspect | None, ...]:
    """For each part the rows that were being computed when its worker died, if any."""
    return tuple(_read(store, note_key(job_id, part)) for part in parts)


def _read(store: CheckpointStore, key: str) -> Suspect | None:
    with suppress(KeyError, IndexError, TypeError):
        return Suspect(**store[key].to_pylist()[0])
    return None


class PoisonSearch:
    """The search for a poison row in one part, over the attempts at its task."""

    def __init__(self, store: CheckpointStore, key: str, *, is_retry: bool) -> None:
        """`is_retry`: an earlier attempt was lost, so that notes are read and kept."""
        self._store, self._key, self.is_retry = store, key, is_retry
        self._suspect = _read(store, self._key) if is_retry else None
        self._noted = self._suspect is not None

    def max_rows(self, offsets: Offsets, size: int) -> int:
        """How many of the next rows may be computed together, of at most `size`."""
        suspect = self._suspect
        if suspect is None or int(offsets[0]) >= suspect.end:
            return size
        before, inside = np.searchsorted(offsets, (suspect.start, suspect.end)).tolist()
        if before:
            return min(size, before)
        return max(1, min(size, inside, -(-suspect.rows // _PARTS)))

    def is_suspect(self, offsets: Offsets) -> bool:
        """Whether rows are among those that killed a worker: each batch of them is saved."""
        suspect = self._suspect
        return suspect is not None and suspect.start <= int(offsets[0]) < suspect.end

    def condemned(self, offsets: Offsets) -> Condemned | None:
        """What is known of a single row that must not be tried again; None: try it."""
        suspect = self._suspect
        if suspect is None or len(offsets) != 1 or int(offsets[0]) != suspect.start:
            return None
        error = suspect.error()
        return Condemned(error, suspect.tries) if error is not None else None

    def starting(self, offsets: Offsets) -> None:
        """Note that these rows are computed now."""
        if self.is_retry:
            self._note(offsets, hung=False)

    def hung(self, offsets: Offsets) -> None:
        """Note that the call for these rows can't be stopped. The process is about to end."""
        self._note(offsets, hung=len(offsets) == 1)

    def clear(self) -> None:
        """Delete the note: the part is done."""
        if self._noted:
            with suppress(KeyError, OSError):
                del self._store[self._key]

    def _note(self, offsets: Offsets, *, hung: bool) -> None:
        start, end = int(offsets[0]), int(offsets[-1]) + 1
        was = self._suspect
        tries = was.tries + 1 if was is not None and (was.start, was.end) == (start, end) else 1
        note = Suspect(start=start, end=end, rows=len(offsets), tries=tries, hung=hung)
        self._store[self._key] = pa.RecordBatch.from_pylist([asdict(note)])
        self._noted = True


@dataclass(frozen=True, slots=True)
class BatchGuard:
    """Knows which rows a batch is of, for the watchdog of timeouts."""

    search: PoisonSearch
    offsets: Offsets

    def hung(self, row: int | None) -> None:
        """Note the row that hangs, or all of them where it is not known."""
        self.search.hung(self.offsets if row is None else self.offsets[row : row + 1])

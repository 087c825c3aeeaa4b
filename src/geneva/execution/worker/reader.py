"""The reader of a worker: the inputs of rows to compute, and values that are there already."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from geneva.background import in_background
from geneva.execution.worker.records import Clock, Durable, Item, OpenTask, Result, Window
from geneva.execution.worker.task import PartWork, RowFailure
from geneva.model.addresses import offsets_of
from geneva.model.digests import digest_rows
from geneva.model.rows import Offsets, RowRange, RowSet
from geneva.storage.checkpoints.reuse import ReusedValues
from geneva.storage.checkpoints.store import CheckpointKey, errors_of
from geneva.storage.columns.inputs import InputReader
from geneva.storage.lance.fragments import width_of
from geneva.storage.lance.pieces import Piece
from geneva.udf.picking import picked

_MAX_AT_ONCE = 8
_AHEAD_BYTES = 8 * 1024 * 1024
"""Checkpoints that are read from an object store at the same time: how many, and how large."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """Which rows of a part are run, and where the values of others come from."""

    part: PartWork
    to_run: RowSet
    reused: ReusedValues | None


class Reader:
    """Reads the parts of a task. It writes nothing and calls no function of the user's."""

    def __init__(self, task: OpenTask) -> None:
        """Read at the task's version."""
        self._task = task
        self._inputs = InputReader(task.dataset, task.work.computation, task.work.job_id)
        self.clock = Clock()

    def read(self, part: PartWork) -> Iterator[Item]:
        """The part in ascending order: windows to compute, and results of earlier runs.

        A checkpoint that can't be used is read as inputs instead.
        """
        wanted = self._choose(part)
        at = part.rows.start
        for covered, loaded in self._loaded(part):
            yield from self._windows(wanted, RowRange(at, covered.start))
            if loaded is not None:
                yield loaded
            else:
                yield from self._windows(wanted, covered)
            at = covered.end
        yield from self._windows(wanted, RowRange(at, part.rows.end))

    @property
    def task(self) -> OpenTask:
        """What it reads for."""
        return self._task

    def digested(self, window: Item) -> Item:
        """The same window with the digests of its inputs, where the computation has receipts."""
        computation = self._task.work.computation
        if not computation.receipts or isinstance(window, Result):
            return window
        started = time.perf_counter()
        rows = len(window.offsets)
        inputs = computation.receipted(window.inputs)
        digests = digest_rows(inputs, computation.receipt_seed(), rows)
        self.clock.write += time.perf_counter() - started
        return replace(window, digests=digests)

    def _choose(self, part: PartWork) -> _Wanted:
        if not part.reuse:
            return _Wanted(part, part.compute, None)
        task = self._task
        reused = ReusedValues(task.work.ref, task.store, task.schema, task.dataset)
        chosen = members(part, part.compute, part.rows)
        taken = reused.open(part.reuse, RowSet.from_offsets(part.physical_rows, chosen))
        if not taken:
            return _Wanted(part, part.compute, None)
        return _Wanted(part, part.compute.minus(taken.slice(part.rows)), reused)

    def _windows(self, wanted: _Wanted, rows: RowRange) -> Iterator[Item]:
        """Inputs of the rows of a range that have no value yet, with values of the others."""
        if len(rows) == 0:
            return
        part, reused = wanted.part, wanted.reused
        offsets = members(part, wanted.to_run, rows)
        inputs = self._inputs.read(part.fragment_id, offsets, rows, part.window)
        at = rows.start
        while True:
            started = time.perf_counter()
            item = next(inputs, None)
            seconds = time.perf_counter() - started
            self.clock.read += seconds
            if item is None:
                break
            chunk, batch = item
            end = int(chunk[-1]) + 1
            known = reused.between(at, end) if reused is not None else None
            yield Window(RowRange(at, end), chunk, batch, known, seconds)
            at = end
        if reused is not None:
            yield from _reused_rest(reused, RowRange(at, rows.end), part.window)

    def _loaded(self, part: PartWork) -> Iterator[tuple[RowRange, Result | None]]:
        """The checkpointed ranges of a part, in order, each with its values.

        From an object store several are read at once, where those before tell that they are small.
        """
        left, ahead = deque(part.covered), deque[tuple[RowRange, Future[Result | None]]]()
        width = width_of(self._task.schema.types)
        while left or ahead:
            while left and len(ahead) < self._at_once(left, width):
                load = partial(self._load, part, left[0])
                ahead.append((left.popleft(), in_background("geneva-reader-ahead", load)))
            rows, loading = ahead.popleft()
            started = time.perf_counter()
            loaded = loading.result()
            self.clock.checkpoint += time.perf_counter() - started
            if loaded is not None:
                width = loaded.nbytes // len(rows)
            yield rows, loaded

    def _at_once(self, ranges: Iterable[RowRange], width: int | None) -> int:
        """How many checkpoints to read at the same time, of rows of so many bytes."""
        if width is None or not self._task.work.ref.is_remote:
            return 1
        largest = max(1, width * max(map(len, ranges)))
        return max(1, min(_MAX_AT_ONCE, _AHEAD_BYTES // largest))

    def _load(self, part: PartWork, rows: RowRange) -> Result | None:
        """The values of a checkpointed range; None when the checkpoint can't be used."""
        key = CheckpointKey(part.prefix, part.fragment_id, rows).path()
        wanted = members(part, part.compute, rows)
        try:
            batch = self._task.store[key]
            values = batch.select(self._task.schema.names)
            addresses = batch.column("_rowaddr").to_numpy()
        except KeyError:
            return None
        offsets = offsets_of(addresses)
        if values.schema.types != self._task.schema.types:
            return None
        if not np.array_equal(offsets, wanted):
            places = np.searchsorted(offsets, wanted)
            found = places < len(offsets)
            if not found.all() or not np.array_equal(offsets[places], wanted):
                return None
            values = picked(values, places)
        return Result(
            rows=rows,
            piece=Piece(wanted, values),
            failures=_failures_in(batch, offsets, wanted),
            rows_reused=len(wanted),
            durable=Durable.ALREADY,
        )


def _reused_rest(reused: ReusedValues, rows: RowRange, window: int) -> Iterator[Result]:
    """Values that are taken over for rows behind the last one to compute."""
    for start in range(rows.start, rows.end, window):
        some = RowRange(start, min(start + window, rows.end))
        piece = reused.between(some.start, some.end)
        if piece is not None:
            ends = RowRange(some.start, int(piece.offsets[-1]) + 1)
            yield Result(rows=ends, piece=piece, rows_reused=len(piece.offsets))


def members(part: PartWork, chosen: RowSet, rows: RowRange) -> Offsets:
    """The rows of a range that are in a set of the part's rows."""
    start = part.rows.start
    inside = RowRange(rows.start - start, rows.end - start)
    return chosen.slice(inside).offsets() + rows.start


def _failures_in(
    batch: pa.RecordBatch, offsets: Offsets, wanted: Offsets
) -> tuple[RowFailure, ...]:
    """What a checkpoint holds about the wanted rows that failed."""
    errors = errors_of(batch)
    if not errors:
        return ()
    chosen = set(wanted.tolist())
    return tuple(
        RowFailure(**json.loads(text))
        for place, text in errors.items()
        if int(offsets[place]) in chosen
    )

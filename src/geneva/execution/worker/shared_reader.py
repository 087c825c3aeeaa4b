"""One read for several columns of a view: they are made from the same rows of the same source."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from geneva.execution.worker.reader import Reader, members
from geneva.execution.worker.records import Leg, Window
from geneva.model.computation import Computation
from geneva.model.rows import RowRange
from geneva.storage.columns.inputs import InputReader


@dataclass(frozen=True, slots=True, eq=False)
class _Union:
    """Reads what several columns need, each expression once."""

    inputs: InputReader
    columns: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]
    """For each column of the task that is read for: the names of its inputs, and where they are."""


class SharedReader:
    """Reads legs of several parts: nothing of them is there already, and their rows are the same.

    The time is booked on the first reader.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        """There is a reader for each column of the task."""
        self._readers = readers
        self._unions: dict[tuple[int, ...], _Union] = {}

    def read(self, leg: Leg) -> Iterator[tuple[int, Window]]:
        """The windows of a leg in ascending order: of the same rows one for each column."""
        places = tuple(place for place, part in enumerate(leg) if part is not None)
        first = leg[places[0]]
        assert first is not None
        union = self._union(places)
        window = min(part.window for part in leg if part is not None)
        wanted = members(first, first.compute, first.rows)
        items = union.inputs.read(first.fragment_id, wanted, first.rows, window)
        clock, at = self._readers[places[0]].clock, first.rows.start
        while True:
            started = time.perf_counter()
            item = next(items, None)
            seconds = time.perf_counter() - started
            clock.read += seconds
            if item is None:
                return
            chunk, batch = item
            rows = RowRange(at, int(chunk[-1]) + 1)
            for place, columns in union.columns:
                yield place, Window(rows, chunk, _chosen(batch, columns), seconds=seconds)
                seconds = 0.0
            at = rows.end

    def _union(self, places: tuple[int, ...]) -> _Union:
        if places not in self._unions:
            self._unions[places] = self._make(places)
        return self._unions[places]

    def _make(self, places: tuple[int, ...]) -> _Union:
        tasks = [self._readers[place].task for place in places]
        computations = [task.work.computation for task in tasks]
        texts: dict[str, str] = {}
        for computation in computations:
            for name, text in expressions_of(computation):
                texts.setdefault(text, name)
        where = {text: place for place, text in enumerate(texts)}
        lead, source = tasks[0], computations[0].source
        assert source is not None
        every = tuple((name, text) for text, name in texts.items())
        reads = replace(computations[0], source=replace(source, expressions=every))
        return _Union(
            InputReader(lead.dataset, reads, lead.work.job_id),
            tuple(
                (place, tuple((name, where[text]) for name, text in expressions_of(computation)))
                for place, computation in zip(places, computations, strict=True)
            ),
        )


def expressions_of(computation: Computation) -> tuple[tuple[str, str], ...]:
    """What a computation reads of its source: names and SQL."""
    return computation.source.expressions if computation.source is not None else ()


def _chosen(batch: pa.RecordBatch, columns: tuple[tuple[str, int], ...]) -> pa.RecordBatch:
    """The inputs of one column; as many rows where it has none."""
    if not columns:
        return pa.record_batch([pa.nulls(batch.num_rows)], names=["nothing"])
    names = [name for name, _ in columns]
    return pa.RecordBatch.from_arrays([batch.column(place) for _, place in columns], names=names)

"""What a table function is called with: a query over the rows of one partition.

Rows are read when they are asked for. Those of small partitions that follow each other are read
together, so that a million of them don't cost a million requests.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.errors import UserInputError
from geneva.model.computation import PartitionRows
from geneva.model.rows import RowIds
from geneva.planning.membership import choose_rows
from geneva.storage.lance.fragments import rows_for
from geneva.storage.lance.pieces import concat_batches, concat_inputs, in_parts
from geneva.storage.lance.results import Results, Timeout, within
from geneva.storage.lance.row_ids import read_row_ids
from geneva.storage.lance.source_rows import MAX_NARROW_ROWS, SourceRows, next_window
from geneva.udf.picking import picked


class PartitionQueries:
    """Makes the queries for a batch of partitions, whose last column lists their rows."""

    def __init__(self, rows: PartitionRows, scope: str) -> None:
        """Read nothing yet."""
        self._rows, self.source = rows, SourceRows.of(rows.source, scope)
        self.max_rows = next_window(0, 0)
        """Rows to read at once, by how wide those were that were read so far."""

    def __call__(self, batch: pa.RecordBatch) -> list[PartitionQuery]:
        """A query for each partition."""
        lists = batch.column(batch.num_columns - 1)
        ends = lists.offsets.to_numpy()
        ids = lists.values.to_numpy()
        present = lists.is_valid().to_numpy(zero_copy_only=False)
        if not present.all():
            every = self._every_row()
            return [PartitionQuery(_Reader([every], self), 0) for _ in range(len(lists))]
        parts = [ids[a:b] for a, b in itertools.pairwise(ends)]
        reader = _Reader(parts, self)
        return [PartitionQuery(reader, place) for place in range(len(parts))]

    def _every_row(self) -> RowIds:
        """All rows of the query: a partition that lists none has these."""
        rows = self._rows
        return choose_rows(
            read_row_ids(self.source.dataset(), rows.where),
            shuffle_seed=rows.seed,
            offset=rows.offset,
            limit=rows.limit,
        )


class _Reader:
    """Reads the rows of partitions that follow each other."""

    def __init__(self, parts: Sequence[RowIds], queries: PartitionQueries) -> None:
        self.parts, self.source, self._queries = parts, queries.source, queries
        self._lock = threading.Lock()
        self._first, self._held = 0, list[pa.RecordBatch]()

    def windows(self, place: int, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, as few at a time as memory needs."""
        ids = self.parts[place]
        if columns is None and len(ids) <= self._queries.max_rows:
            yield self._small(place)
            return
        yield from _chosen(self.source, columns).windows(ids, MAX_NARROW_ROWS)

    def _small(self, place: int) -> pa.RecordBatch:
        """The rows of a small partition, read with those of the next ones."""
        with self._lock:
            if not self._first <= place < self._first + len(self._held):
                self._read_from(place)
            return self._held[place - self._first]

    def _read_from(self, place: int) -> None:
        last, rows, max_rows = place + 1, len(self.parts[place]), self._queries.max_rows
        while last < len(self.parts) and rows + len(self.parts[last]) <= max_rows:
            rows += len(self.parts[last])
            last += 1
        parts = self.parts[place:last]
        batch = _taken(self.source, np.concatenate(parts))
        if rows:
            fitting = rows_for(batch.nbytes, rows, MAX_NARROW_ROWS)
            self._queries.max_rows = max(1, min(fitting, max(4 * rows, max_rows)))
        ends = np.cumsum([len(part) for part in parts]).tolist()
        starts = [0, *ends[:-1]]
        self._first = place
        self._held = [batch.slice(a, b - a) for a, b in zip(starts, ends, strict=True)]


def _taken(source: SourceRows, ids: npt.NDArray[Any]) -> pa.RecordBatch:
    """The rows of these ids, which may be read in another order than they are given."""
    order = np.argsort(ids, kind="stable")
    batch = concat_inputs([part for _, part in in_parts(source.take, ids[order])])
    if bool((order[1:] > order[:-1]).all()):
        return batch
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return picked(batch, back)


def _chosen(source: SourceRows, columns: Sequence[str] | None) -> SourceRows:
    if columns is None:
        return source
    known = dict(source.expressions)
    return replace(source, expressions=tuple((name, known[name]) for name in columns))


class PartitionQuery(Results):
    """A query over the rows of a partition, as a table function gets it."""

    is_geneva_query: ClassVar = True

    def __init__(self, reader: _Reader, place: int, columns: Sequence[str] | None = None) -> None:
        """Read nothing yet."""
        self._reader, self._place, self._columns = reader, place, columns

    @property
    def schema(self) -> pa.Schema:
        """The columns of the rows."""
        return _chosen(self._reader.source, self._columns).schema()

    def select(self, columns: Sequence[str]) -> PartitionQuery:
        """Only these columns: the others are not read."""
        known = self.schema.names
        names = [columns] if isinstance(columns, str) else list(columns)
        missing = [name for name in names if name not in known]
        if missing or not names:
            raise UserInputError(
                f"The rows of the partition have no column {missing[0]!r}, only {known}."
                if missing
                else "select needs one or more names of columns."
            )
        return PartitionQuery(self._reader, self._place, names)

    def count_rows(self) -> int:
        """How many rows there are; none is read."""
        return len(self._reader.parts[self._place])

    def __len__(self) -> int:
        """How many rows there are; none is read."""
        return self.count_rows()

    def to_batches(
        self, batch_size: int | None = None, timeout: Timeout = None
    ) -> pa.RecordBatchReader:
        """The rows, batch by batch: as many as memory allows, or `batch_size` each."""
        if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
            raise UserInputError(
                f"batch_size must be a number of rows above 0, not {batch_size!r}."
            )
        windows = self._reader.windows(self._place, self._columns)
        filled = (batch for batch in windows if batch.num_rows)
        batches = filled if batch_size is None else _resized(filled, batch_size)
        return pa.RecordBatchReader.from_batches(self.schema, within(batches, timeout))

    def __getattr__(self, name: str) -> Any:
        """Say what can be done instead of what only a table's query can."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"The rows of a partition have no {name!r}: they have select([...]), to_arrow(), "
            "to_pandas(), to_polars(), to_list(), to_batches(batch_size=), count_rows() and "
            "schema. Which rows there are is for the view's query to say.",
            name=name,
            obj=self,
        )

    def __repr__(self) -> str:
        """Show the columns, and how many rows there are."""
        return f"PartitionQuery(columns={self.schema.names}, rows={self.count_rows()})"


def _resized(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of exactly `size`, but for the last one."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        while rows >= size:
            whole = concat_batches(held)
            yield whole.slice(0, size)
            held, rows = [whole.slice(size)], rows - size
    if rows:
        yield concat_batches(held)

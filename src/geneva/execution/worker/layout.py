"""Laying computed values out over the rows of a fragment, as its column file holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from geneva.model.rows import Mask, Offsets, RowRange, RowSet
from geneva.storage.lance.pieces import Piece, concat_batches, null_rows
from geneva.udf.picking import picked


class Layout:
    """Turns pieces, in ascending order, into batches that cover every row of a range.

    Rows without a new value keep the old one, or are NULL where there are no old ones. So do, of a
    column that is `kept` there, rows that have a new one.
    """

    def __init__(
        self,
        schema: pa.Schema,
        rows: RowRange,
        max_rows: int,
        old: Iterator[pa.RecordBatch] | None = None,
        kept: Mapping[str, RowSet] | None = None,
    ) -> None:
        """Begin at the range's start; gaps come in batches of at most `max_rows`.

        `old` gives batches that cover the range in order, in any lengths.
        """
        self._schema, self._max_rows = schema, max_rows
        self._at, self._end = rows.start, rows.end
        self._old = _Buffered(old) if old is not None else None
        self._kept = kept or {}

    def add(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """The rows up to the end of a piece."""
        if not len(piece.offsets):
            return
        first, last = int(piece.offsets[0]), int(piece.offsets[-1])
        yield from self._gap(first)
        width = last + 1 - first
        base = self._old.next(width) if self._old is not None else None
        self._at = last + 1
        values = piece.values.select(self._schema.names)
        kept = {name: rows.mask()[piece.offsets] for name, rows in self._kept.items()}
        kept = {name: mask for name, mask in kept.items() if mask.any()}
        if piece.is_contiguous and not kept:
            yield values
            return
        if base is None:
            base = null_rows(self._schema, width)
        places = piece.offsets - first
        yield _spread(places, values, base, kept)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The rows behind the last piece."""
        yield from self._gap(self._end)

    def _gap(self, end: int) -> Iterator[pa.RecordBatch]:
        while self._at < end:
            width = min(self._max_rows, end - self._at)
            self._at += width
            if self._old is not None:
                yield self._old.next(width)
            else:
                yield null_rows(self._schema, width)


def _spread(
    places: Offsets, values: pa.RecordBatch, base: pa.RecordBatch, kept: Mapping[str, Mask]
) -> pa.RecordBatch:
    """Lay values out at their places among others; `kept` ones stay, by column."""
    both = concat_batches([base, values])
    indices = np.arange(base.num_rows, dtype=np.int64)
    indices[places] = base.num_rows + np.arange(len(places), dtype=np.int64)
    if not kept:
        return picked(both, indices)
    columns = []
    for name, column in zip(both.schema.names, both.columns, strict=True):
        own = indices.copy()
        if name in kept:
            own[places[kept[name]]] = places[kept[name]]
        columns.append(picked(column, own))
    return pa.RecordBatch.from_arrays(columns, schema=both.schema)


class _Buffered:
    """Hands out exact lengths of a stream of batches."""

    def __init__(self, stream: Iterator[pa.RecordBatch]) -> None:
        self._stream = stream
        self._rest: pa.RecordBatch = None
        self._used = 0

    def next(self, rows: int) -> pa.RecordBatch:
        parts: list[pa.RecordBatch] = []
        while rows:
            if self._rest is None or self._used == self._rest.num_rows:
                self._rest, self._used = next(self._stream), 0
            part = self._rest.slice(self._used, rows)
            self._used += part.num_rows
            rows -= part.num_rows
            # Lance's writer panics on sliced nested structs: take makes a compact copy.
            whole = part.num_rows == self._rest.num_rows
            parts.append(part if whole else picked(part, np.arange(part.num_rows)))
        return concat_batches(parts)

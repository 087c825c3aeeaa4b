"""Values of some rows of a fragment, and putting them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from geneva.model.digests import Digests
from geneva.model.rows import Offsets, RowRange


@dataclass(frozen=True, slots=True)
class Piece:
    """Computed values of some rows of a fragment, ascending: a column for each one written."""

    offsets: Offsets
    values: pa.RecordBatch
    digests: Digests | None = None
    """The digests of the rows' inputs, 0 where they are not known; None: of none they are."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows follow each other without a gap."""
        return len(self.offsets) == 0 or bool(
            self.offsets[-1] - self.offsets[0] + 1 == len(self.offsets)
        )


def scatter(
    pieces: Iterable[Piece],
    schema: pa.Schema,
    rows: RowRange,
    step: int,
    old: Iterator[pa.RecordBatch] | None,
) -> Iterator[pa.RecordBatch]:
    """Lay pieces out densely over `rows`: the old value, or NULL, where nothing was computed.

    `old` yields batches that cover `rows` in order, in any lengths; without it the gaps are NULL.
    """
    at = rows.start
    old_values = _Buffered(old) if old is not None else None
    for piece in pieces:
        if not len(piece.offsets):
            continue
        first, last = int(piece.offsets[0]), int(piece.offsets[-1])
        yield from _gap(schema, at, first, step, old_values)
        width = last + 1 - first
        base = old_values.next(width) if old_values is not None else None
        yield piece.values if piece.is_contiguous else _spread(piece, first, width, base)
        at = last + 1
    yield from _gap(schema, at, rows.end, step, old_values)


def _gap(
    schema: pa.Schema, start: int, end: int, step: int, old_values: _Buffered | None
) -> Iterator[pa.RecordBatch]:
    for at in range(start, end, step):
        width = min(step, end - at)
        yield old_values.next(width) if old_values is not None else null_rows(schema, width)


def null_rows(schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """Rows that are NULL in every column."""
    return pa.RecordBatch.from_arrays([pa.nulls(rows, f.type) for f in schema], schema=schema)


def _spread(piece: Piece, first: int, width: int, base: pa.RecordBatch | None) -> pa.RecordBatch:
    """Lay a piece with gaps out densely, over what was there or over NULLs."""
    places = piece.offsets - first
    if base is None:
        base = null_rows(piece.values.schema, 1)
        indices = np.zeros(width, dtype=np.int64)
    else:
        indices = np.arange(width, dtype=np.int64)
    indices[places] = base.num_rows + np.arange(len(places), dtype=np.int64)
    return concat_batches([base, piece.values]).take(pa.array(indices))


def merged(pieces: Sequence[Piece]) -> Piece:
    """Several pieces as one, ascending."""
    if len(pieces) == 1:
        return pieces[0]
    offsets = np.concatenate([piece.offsets for piece in pieces])
    order = np.argsort(offsets, kind="stable")
    values = concat_batches([piece.values for piece in pieces]).take(pa.array(order))
    return Piece(offsets[order], values, digests_of(pieces)[order])


def digests_of(pieces: Sequence[Piece]) -> Digests:
    """The digests of the inputs of several pieces' rows, 0 where they are not known."""
    return np.concatenate(
        [
            np.zeros(len(piece.offsets), dtype=np.uint64)
            if piece.digests is None
            else piece.digests
            for piece in pieces
        ]
    )


def concat_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of many of the same columns; dictionaries are unified."""
    if len(batches) == 1:
        return batches[0]
    columns = [
        concat([batch.column(i) for batch in batches]) for i in range(batches[0].num_columns)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def concat(arrays: Sequence[pa.Array]) -> pa.Array:
    """One array of many; dictionaries are unified."""
    if len(arrays) == 1:
        return arrays[0]
    kind = arrays[0].type
    if pa.types.is_dictionary(kind):
        # Not by unify_dictionaries: Lance 2.0 reads NULLs as members of the dictionary.
        plain = pa.concat_arrays([array.dictionary_decode() for array in arrays])
        encoded = plain.dictionary_encode()
        return encoded if encoded.type == kind else encoded.cast(kind)
    return pa.concat_arrays(arrays)


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
            parts.append(part if whole else part.take(pa.array(np.arange(part.num_rows))))
        return concat_batches(parts)

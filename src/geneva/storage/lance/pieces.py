"""Values of some rows of a fragment, and putting them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from geneva.errors import UDFOutputError
from geneva.model.digests import Digests
from geneva.model.rows import Offsets


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


def null_rows(schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """Rows that are NULL in every column."""
    return pa.RecordBatch.from_arrays([pa.nulls(rows, f.type) for f in schema], schema=schema)


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
    """One array of many; dictionaries are unified. UDFOutputError when one has no room for all."""
    if len(arrays) == 1:
        return arrays[0]
    kind = arrays[0].type
    if pa.types.is_dictionary(kind):
        # Not by unify_dictionaries: Lance 2.0 reads NULLs as members of the dictionary.
        plain = pa.concat_arrays([array.dictionary_decode() for array in arrays])
        encoded = plain.dictionary_encode()
        if len(encoded.dictionary) > room(kind):
            raise UDFOutputError(
                f"Together the values of these rows are more than the {room(kind)} different ones "
                f"that {kind.index_type} indices of {kind} can tell apart; nothing of it was "
                "published. Declare the column with a wider index type, or without a dictionary."
            )
        return encoded if encoded.type == kind else encoded.cast(kind)
    return pa.concat_arrays(arrays)


def room(kind: pa.DictionaryType) -> int:
    """How many different values a dictionary of this type can have."""
    return 2 ** int(kind.index_type.bit_width - pa.types.is_signed_integer(kind.index_type))


def writable(array: pa.Array) -> pa.Array:
    """The array as Lance's writer takes it: a slice of structs within structs makes it panic."""
    nested = pa.types.is_nested(array.type) and not pa.types.is_dictionary(array.type)
    return pa.concat_arrays([array]) if nested and _is_sliced(array) else array


def _is_sliced(array: pa.Array) -> bool:
    """Whether an array, or one below it, begins in the middle of its memory."""
    if array.offset:
        return True
    if pa.types.is_struct(array.type):
        return any(_is_sliced(array.field(i)) for i in range(array.type.num_fields))
    return pa.types.is_nested(array.type) and hasattr(array, "values") and _is_sliced(array.values)

"""Values of some rows, and putting them together, also where their dictionaries have no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from geneva.errors import UDFOutputError
from geneva.model.digests import Digests
from geneva.model.rows import Offsets
from geneva.storage.lance.dataset import Dataset
from geneva.udf.picking import from_start, picked


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
    values = picked(concat_batches([piece.values for piece in pieces]), order)
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
        concat([batch.column(i) for batch in batches], name)
        for i, name in enumerate(batches[0].schema.names)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def concat(arrays: Sequence[pa.Array], name: str = "") -> pa.Array:
    """One array of many; dictionaries are unified. UDFOutputError when one has no room for all.

    `name` is the column's, for the error.
    """
    if len(arrays) == 1:
        return arrays[0]
    kind = arrays[0].type
    if pa.types.is_dictionary(kind):
        # Not by unify_dictionaries: Lance 2.0 reads NULLs as members of the dictionary.
        plain = pa.concat_arrays([array.dictionary_decode() for array in arrays])
        encoded = plain.dictionary_encode()
        if len(encoded.dictionary) > room(kind):
            raise no_room(kind, name)
        return encoded if encoded.type == kind else encoded.cast(kind)
    try:
        return pa.concat_arrays(arrays)
    except pa.ArrowInvalid as error:
        full = next(_dictionary_types(kind), None)
        if full is None or not _says_full(error):
            raise
        raise no_room(full, name) from error


def _dictionary_types(kind: pa.DataType) -> Iterator[pa.DictionaryType]:
    """The types of the dictionaries in a type, those with the narrowest indices first."""
    found = [kind] if pt.is_dictionary(kind) else []
    for index in range(kind.num_fields if pt.is_nested(kind) else 0):
        found.extend(_dictionary_types(kind.field(index).type))
    yield from sorted(found, key=room)


def concat_inputs(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of many, for a function: a dictionary that has no room for all gets wider indices.

    Rows of a view come from many fragments of its source, each of which has dictionaries of its
    own.
    """
    try:
        return concat_batches(batches)
    except (UDFOutputError, pa.ArrowInvalid):
        schema = batches[0].schema
        wide = pa.schema([field.with_type(_widened(field.type)) for field in schema])
        if wide == schema:
            raise
        return concat_batches([batch.cast(wide) for batch in batches])


def _widened(kind: pa.DataType) -> pa.DataType:
    """The type with indices of 32 bits in its dictionaries, at the top or in structs and lists."""
    if pt.is_dictionary(kind):
        return pa.dictionary(pa.int32(), kind.value_type)
    if pt.is_struct(kind):
        return pa.struct([field.with_type(_widened(field.type)) for field in kind])
    if pt.is_list(kind):
        return pa.list_(kind.value_field.with_type(_widened(kind.value_type)))
    return kind


def no_room(kind: pa.DictionaryType, name: str = "") -> UDFOutputError:
    """The error for rows that have together more values than a column's dictionary can hold."""
    where = f"In column {name!r} the values" if name else "The values"
    return UDFOutputError(
        f"{where} of these rows are together more than the {room(kind)} different ones that "
        f"{kind.index_type} indices of {kind} can tell apart; nothing of it was published. Declare "
        "the column with a wider index type, or without a dictionary; a view can select it as "
        f"SQL: cast({name or '...'} as string)."
    )


class DictionaryFull(Exception):
    """Rows have together more values than the indices of their dictionaries can tell apart."""


_FULL_SIGNS = ("dictionary key bigger than the key type", "requires a larger index type")


def _says_full(error: Exception) -> bool:
    return any(sign in str(error).lower() for sign in _FULL_SIGNS)


def check_all_taken(dataset: Dataset, taken: pa.Table, wanted: int) -> None:
    """Refuse to go on without rows that were asked for by id: they would shift all others."""
    if taken.num_rows != wanted:
        raise OSError(
            f"{dataset.uri} at version {dataset.version} gave {taken.num_rows} of {wanted} rows "
            "asked for by id"
        )


@contextmanager
def noticing_full_dictionaries(rows: int) -> Iterator[None]:
    """Raise DictionaryFull in place of what Lance or Arrow raise, where fewer rows may do."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        if rows > 1 and _says_full(error):
            raise DictionaryFull(str(error)) from error
        raise


_Number = TypeVar("_Number", bound=np.generic)
_Read = TypeVar("_Read")


def in_parts(
    take: Callable[[npt.NDArray[_Number]], _Read], rows: npt.NDArray[_Number]
) -> Iterator[tuple[npt.NDArray[_Number], _Read]]:
    """Read rows, in halves of halves where their dictionaries have no room for all of them."""
    try:
        taken = take(rows)
    except DictionaryFull:
        half = len(rows) // 2
        yield from in_parts(take, rows[:half])
        yield from in_parts(take, rows[half:])
    else:
        yield rows, taken


def room(kind: pa.DictionaryType) -> int:
    """How many different values a dictionary of this type can have."""
    return 2 ** int(kind.index_type.bit_width - pa.types.is_signed_integer(kind.index_type))


def writable(array: pa.Array) -> pa.Array:
    """The array as Lance's writer takes it: a slice of structs within structs makes it panic."""
    nested = pa.types.is_nested(array.type) and not pa.types.is_dictionary(array.type)
    return from_start(array) if nested else array

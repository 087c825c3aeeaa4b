"""Some rows of what is in memory: instead of Arrow's own `take`, `filter`, `drop_null`.

Of a slice of fixed-size lists of fixed-size lists (a matrix per row) Arrow 26 gives the values of
other rows, and says nothing.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

Rows = TypeVar("Rows", pa.Array, pa.ChunkedArray, pa.RecordBatch, pa.Table)


def picked(rows: Rows, places: npt.NDArray[Any] | pa.Array) -> Rows:
    """The rows at some places, in the order of these."""
    return _unsliced(rows).take(places if isinstance(places, pa.Array) else pa.array(places))


def filtered(rows: Rows, mask: npt.NDArray[Any]) -> Rows:
    """The rows for which a mask is true."""
    return _unsliced(rows).filter(pa.array(mask))


def without_nulls(array: pa.Array) -> pa.Array:
    """The values that are not NULL."""
    return _unsliced(array).drop_null()


def _unsliced(rows: Rows) -> Rows:
    """The same rows, whose matrices begin with their memory."""
    if isinstance(rows, pa.RecordBatch | pa.Table):
        if not any(_has_matrices(field.type) for field in rows.schema):
            return rows
        columns = [_unsliced(column) for column in rows.columns]
        return type(rows).from_arrays(columns, schema=rows.schema)
    if not _has_matrices(rows.type):
        return rows
    if isinstance(rows, pa.ChunkedArray):
        return pa.chunked_array([_unsliced(chunk) for chunk in rows.chunks], rows.type)
    return from_start(rows)


def _has_matrices(kind: pa.DataType) -> bool:
    """Whether there are fixed-size lists of fixed-size lists anywhere in a type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _has_matrices(kind.storage_type)
    if pt.is_fixed_size_list(kind) and pt.is_fixed_size_list(kind.value_type):
        return True
    inner = range(kind.num_fields if pt.is_nested(kind) else 0)
    return any(_has_matrices(kind.field(i).type) for i in inner)


def from_start(array: pa.Array) -> pa.Array:
    """The same values, with memory that begins with them; a copy only where that is not so yet."""
    return pa.concat_arrays([array]) if _is_sliced(array) else array


def _is_sliced(array: pa.Array) -> bool:
    """Whether an array, or one below it, begins in the middle of its memory."""
    if array.offset:
        return True
    if isinstance(array, pa.ExtensionArray):
        return _is_sliced(array.storage)
    if pt.is_struct(array.type):
        return any(_is_sliced(array.field(i)) for i in range(array.type.num_fields))
    return pt.is_nested(array.type) and hasattr(array, "values") and _is_sliced(array.values)

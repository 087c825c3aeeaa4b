"""Arrow arrays as the values that a function called once per row gets to see."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from geneva.storage.lance.blob_files import blob_values

if TYPE_CHECKING:
    from geneva.udf.declare import UDF


def input_values(batch: pa.RecordBatch, udf: UDF) -> list[list[Any]]:
    """Return the columns of a batch as a SCALAR UDF sees them, as its annotations say."""
    forms = itertools.zip_longest(batch.columns, udf.file_inputs, udf.python_inputs)
    return [_values_of(column, kind, is_file=bool(is_file)) for column, is_file, kind in forms]


def _values_of(column: pa.Array, container: type[Any] | None, *, is_file: bool) -> list[Any]:
    if is_file:
        return blob_values(column)
    return python_values(column) if container is None else plain_values(column, container)


def plain_values(array: pa.Array, container: type[Any]) -> list[Any]:
    """Return an array's rows as lists (or tuples) and dicts of Python's own, all the way down."""
    rows = _pylist(array)
    if container is not tuple:
        return rows
    return [tuple(row) if isinstance(row, list) else row for row in rows]


def python_values(array: pa.Array) -> list[Any]:
    """Return an array's rows as a SCALAR UDF sees them.

    NULL is None, a list of numbers a (read-only) numpy array, a struct or map a dict. A list that
    itself contains NULLs is a Python list: numpy has no way to say so.
    """
    kind = array.type
    if pt.is_dictionary(kind):
        return python_values(array.dictionary_decode())
    if isinstance(kind, pa.BaseExtensionType) and is_list_of_numbers(kind.storage_type):
        return python_values(array.storage)
    if pt.is_struct(kind) and kind.num_fields:
        names = [field.name for field in kind]
        children = [python_values(child) for child in array.flatten()]
        rows: list[Any] = [
            dict(zip(names, row, strict=True)) for row in zip(*children, strict=True)
        ]
        return _with_nulls(rows, array)
    if is_list_of_numbers(kind):
        return _numpy_rows(array)
    return _pylist(array)


def _pylist(array: pa.Array) -> list[Any]:
    # Asking for dicts makes pyarrow ten times slower, so only where there are maps.
    options = {"maps_as_pydicts": "lossy"} if "map<" in str(array.type) else {}
    values: list[Any] = array.to_pylist(**options)
    return values


def is_list_of_numbers(kind: pa.DataType) -> bool:
    """Say whether rows of this type are numpy arrays."""
    is_list = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    return is_list and _is_number_or_bool(kind.value_type)


def _is_number_or_bool(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind))


def _numpy_rows(array: pa.Array) -> list[Any]:
    if pt.is_fixed_size_list(array.type):
        width = array.type.list_size
        offsets = np.arange(array.offset, array.offset + len(array) + 1) * width
    else:
        offsets = array.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    items = array.values[first:last]
    numbers = _numpy_items(items)
    numbers.flags.writeable = False  # it may be the batch's own memory
    bounds = (offsets - first).tolist()
    rows: list[Any] = [numbers[a:b] for a, b in itertools.pairwise(bounds)]
    if items.null_count:
        is_null = items.is_null().to_numpy(zero_copy_only=False)
        for row, (a, b) in enumerate(itertools.pairwise(bounds)):
            if is_null[a:b].any():
                rows[row] = items[a:b].to_pylist()
    return _with_nulls(rows, array)


def _numpy_items(items: pa.Array) -> np.ndarray[Any, Any]:
    """Return the items as numpy sees them; what stands under a NULL is arbitrary, and not used."""
    if pt.is_boolean(items.type):
        return np.array(items.fill_null(False).to_numpy(zero_copy_only=False))
    if len(items) == 0:
        return np.empty(0, items.type.to_pandas_dtype())
    dtype = np.dtype(items.type.to_pandas_dtype())
    return np.frombuffer(items.buffers()[1], dtype, len(items), items.offset * dtype.itemsize)


def _with_nulls(rows: list[Any], array: pa.Array) -> list[Any]:
    if array.null_count:
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)):
            rows[row] = None
    return rows

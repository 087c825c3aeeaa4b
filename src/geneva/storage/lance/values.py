"""Exact equality of values, row by row, whatever their types."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geneva.model.rows import Mask
from geneva.udf.picking import picked


def equal_rows(old: pa.Array, new: pa.Array) -> Mask:
    """Row by row whether the values are the same, whatever their type.

    NULL is NULL, NaN is NaN, and 0.0 is not -0.0: a function can tell them apart. Values of
    different types differ, but for widths: those of receipts, too, don't depend on them.
    """
    old, new = _without_encoding(old), _without_encoding(new)
    no_old, no_new = _flags(old.is_null()), _flags(new.is_null())
    same = no_old & no_new
    some = ~(no_old | no_new)
    if some.any():
        same |= some & _equal_values(old, new)
    return same


def _equal_values(old: pa.Array, new: pa.Array) -> Mask:
    """Equality of rows that are NULL in neither; other rows get any answer."""
    a, b = old.type, new.type
    nothing = np.zeros(len(old), dtype=np.bool_)
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        names = [field.name for field in a]
        if names != [field.name for field in b]:
            return nothing
        same = ~nothing
        for i in range(len(names)):
            same &= equal_rows(old.field(i), new.field(i))
        return same
    if pa.types.is_fixed_size_list(a) and pa.types.is_fixed_size_list(b):
        if a.list_size != b.list_size:
            return nothing
        return np.all(equal_rows(_items(old), _items(new)).reshape(len(old), a.list_size), axis=1)
    if all(pa.types.is_list(kind) or pa.types.is_large_list(kind) for kind in (a, b)):
        return _equal_lists(old, new)
    if a != b:
        widest = _widest(a, b)
        return nothing if widest is None else _equal_values(old.cast(widest), new.cast(widest))
    if pa.types.is_floating(a):
        x, y = old.to_numpy(zero_copy_only=False), new.to_numpy(zero_copy_only=False)
        bits = np.dtype(f"u{x.itemsize}")
        return (x.view(bits) == y.view(bits)) | (np.isnan(x) & np.isnan(y))
    try:
        return _flags(pc.equal(old, new))
    except pa.ArrowNotImplementedError:
        pairs = zip(old.to_pylist(), new.to_pylist(), strict=True)
        return np.fromiter((was == now for was, now in pairs), dtype=np.bool_, count=len(old))


def _widest(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """A type that holds all values of both, where these differ in their width alone."""
    types = pa.types
    if types.is_integer(a) and types.is_integer(b):
        # Of the largest unsigned numbers and signed ones, decimals hold both.
        return pa.decimal128(20) if pa.uint64() in (a, b) else pa.int64()
    if types.is_floating(a) and types.is_floating(b):
        return pa.float64()
    for wide, is_kind in ((pa.large_string(), _is_text), (pa.large_binary(), _is_bytes)):
        if is_kind(a) and is_kind(b):
            return wide
    return None


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _equal_lists(old: pa.Array, new: pa.Array) -> Mask:
    lengths = pc.list_value_length(old)
    same = _flags(pc.equal(lengths.cast(pa.int64()), pc.list_value_length(new).cast(pa.int64())))
    rows = np.flatnonzero(same)
    # Through take: what is behind a NULL list must not count as its items.
    items = equal_rows(*(picked(side, rows).flatten() for side in (old, new)))
    ends = np.cumsum(picked(lengths, rows).to_numpy(zero_copy_only=False))
    wrong = np.concatenate([[0], np.cumsum(~items)])
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    same[rows] = wrong[ends.astype(np.int64)] == wrong[starts.astype(np.int64)]
    return same


def _items(array: pa.Array) -> pa.Array:
    """The items of fixed-size lists, with those of NULL lists."""
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)


def _without_encoding(array: pa.Array) -> pa.Array:
    """The values themselves: no dictionaries, no extension types, maps as lists of pairs."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_map(array.type):
        pair = pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])
        return array.cast(pa.list_(pair))
    return array


def _flags(answer: pa.Array) -> Mask:
    """A boolean array as a mask of its own; NULL is no."""
    return np.array(pc.fill_null(answer, False))


def aligned(
    left: Iterator[tuple[int, pa.RecordBatch]], right: Iterator[tuple[int, pa.RecordBatch]]
) -> Iterator[tuple[tuple[int, pa.RecordBatch], tuple[int, pa.RecordBatch]]]:
    """Two dense streams over the same rows, cut to the same batches."""
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        (start, old), (_, new) = a, b
        rows = min(old.num_rows, new.num_rows)
        yield (start, old.slice(0, rows)), (start, new.slice(0, rows))
        a = (start + rows, old.slice(rows)) if old.num_rows > rows else next(left, None)
        b = (start + rows, new.slice(rows)) if new.num_rows > rows else next(right, None)

"""Python values as Arrow arrays, unchanged or not at all.

The rule: a value is taken when the column's type can hold exactly that value, so that reading it
back gives an equal one. What is free is layout (a numpy array for a list, a dataclass for a
struct, an int for a whole float) and the precision of floats, which are rounded to the width of
the column and never to infinity. None, NA, NaT and masked items are NULL.

Nested values are taken apart and put together again; the rule is applied to their leaves, so that
it is the same at every depth. Leaves that are numpy arrays never become Python objects.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from geneva.execution.apply.leaves import leaf_array, numpy_leaf, unboxed
from geneva.execution.apply.tensors import numpy_of
from geneva.storage.lance.pieces import room
from geneva.udf.types import is_list

Flags = npt.NDArray[np.bool_]

_PLAIN_LISTS = frozenset({list, tuple, type(None)})
_NOT_LISTS = (str, bytes, bytearray, memoryview, collections.abc.Set, Mapping)
_MAX_INT32 = np.iinfo(np.int32).max
TOO_LARGE = (
    "more than 2 GiB in one batch; declare a large type (pa.large_string(), pa.large_binary(), "
    "pa.large_list(...)) or a smaller batch_size"
)


def array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return Python values as an array of exactly `kind`; raise for one that doesn't fit."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, array_of(values, kind.storage_type))
    if pt.is_dictionary(kind):
        return encoded(array_of(values, kind.value_type), kind)
    if pt.is_struct(kind):
        return _structs(values, kind)
    if pt.is_map(kind):
        return _maps(values, kind)
    if is_list(kind):
        return _lists(values, kind)
    return single(leaf_array(values, kind))


def array_of_numpy(numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return a numpy array with one dimension as an array of exactly `kind`; as `array_of`."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, array_of_numpy(numbers, kind.storage_type))
    if pt.is_dictionary(kind):
        return encoded(array_of_numpy(numbers, kind.value_type), kind)
    if pt.is_nested(kind) or numbers.dtype == object:
        return array_of(list(numbers), kind)
    return single(numpy_leaf(numbers, kind))


def encoded(plain: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return values as a dictionary array; raise when the indices can't count them."""
    array = plain.dictionary_encode()
    if len(array.dictionary) > room(kind):
        raise ValueError(
            f"it is one more than the {room(kind)} different values that {kind.index_type} "
            "indices can tell apart; declare a wider index type"
        )
    return array if array.type == kind else array.cast(kind)


def single(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the one array that chunks make."""
    combined = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    if isinstance(combined, pa.ChunkedArray):
        raise ValueError(TOO_LARGE)
    return combined


def is_array_like(value: Any) -> bool:
    """Say whether a value is a numpy array, or offers to be one (a tensor)."""
    return hasattr(value, "__array__") and not isinstance(value, np.generic)


def pandas_values(value: Any) -> list[Any]:
    """Return the items of a pandas Series, index or array; what is missing is None."""
    missing = np.asarray(value.isna())
    items = value.tolist()
    return [None if no else item for item, no in zip(items, missing, strict=True)]


def is_pandas(value: Any) -> bool:
    """Say whether a value is a pandas Series, index or array, without importing pandas."""
    return type(value).__module__.startswith("pandas.") and hasattr(value, "dtype")


def masked_values(array: np.ma.MaskedArray[Any, Any]) -> list[Any]:
    """Return the items of a masked array (of any dimension), None for masked ones."""
    if array.ndim > 1:
        return [masked_values(row) for row in array]
    pairs = zip(array.data, np.ma.getmaskarray(array), strict=True)
    return [None if masked else item for item, masked in pairs]


# ------------------------------------------------------------------------------ lists


def _lists(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pt.is_list(kind) and all(_is_array(v, kind.value_type) for v in values):
        return _lists_of_arrays(values, kind)
    rows = [v if type(v) in _PLAIN_LISTS else _items(v) for v in values]
    is_null = _null_flags(rows)
    if pt.is_fixed_size_list(kind):
        wrong = next((r for r in rows if r is not None and len(r) != kind.list_size), None)
        if wrong is not None:
            raise ValueError(f"it has {len(wrong)} items, but the list has {kind.list_size}")
        items = _flat(rows, kind.value_type, null_length=kind.list_size)
        return _assembled(kind, is_null, [], [items])
    lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int64, len(rows))
    return _assembled(kind, is_null, _extents(lengths, kind), [_flat(rows, kind.value_type)])


def _is_array(value: Any, kind: pa.DataType) -> bool:
    return isinstance(value, pa.StructArray) and value.type.equals(kind)


def _lists_of_arrays(arrays: Sequence[pa.StructArray], kind: pa.DataType) -> pa.Array:
    """Rows of tables, which are there in the right type already."""
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    items = pa.concat_arrays([*arrays, pa.array([], kind.value_type)])
    return _assembled(kind, np.zeros(len(arrays), np.bool_), _extents(lengths, kind), [items])


def _items(value: Any) -> Any:
    """Return the items of a list of any make as a list, tuple or numpy array; None for NULL."""
    if type(value) is np.ndarray and value.ndim:
        return value
    value = unboxed(value)
    if value is None or isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return value.to_pylist() if value.null_count or pt.is_nested(value.type) else _numpy(value)
    if isinstance(value, np.ma.MaskedArray) and value.ndim:
        return masked_values(value)
    if is_pandas(value):
        plain = isinstance(value.dtype, np.dtype) and value.dtype != object
        return np.asarray(value) if plain else pandas_values(value)
    if is_array_like(value):
        array = _numpy(value)
        if array.ndim:
            return array
    is_sequence = isinstance(value, (collections.abc.Sequence, collections.abc.ValuesView))
    if isinstance(value, _NOT_LISTS) or not (is_sequence or isinstance(value, collections.deque)):
        raise TypeError("it is not a list")
    return list(value)


def _numpy(value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(numpy_of(value))
    except Exception as error:
        raise TypeError(f"it can't be made a numpy array: {error}") from error


def _flat(rows: Sequence[Any], kind: pa.DataType, null_length: int = 0) -> pa.Array:
    """Return the items of all rows as one array; a NULL row has `null_length` of them."""
    full = [row for row in rows if row is not None and len(row)]
    is_numpy = bool(full) and all(isinstance(r, np.ndarray) and r.ndim == 1 for r in full)
    # Of one type, because numpy would make floats of large ints, and ints of bools, in a mixture.
    if is_numpy and len({row.dtype for row in full}) == 1 and full[0].dtype != object:
        if null_length:
            filler = np.zeros(null_length, full[0].dtype)
            full = [filler if row is None else row for row in rows]
        return array_of_numpy(np.concatenate(full), kind)
    filling = [None] * null_length
    filled = (filling if row is None else row for row in rows)
    return array_of(list(itertools.chain.from_iterable(filled)), kind)


def _extents(lengths: npt.NDArray[np.int64], kind: pa.DataType) -> list[pa.Buffer]:
    """Return the buffers that say where the items of each row are."""
    ends = np.cumsum(lengths)
    large = pt.is_large_list(kind) or pt.is_large_list_view(kind)
    if not large and len(ends) and ends[-1] > _MAX_INT32:
        raise ValueError("more than 2**31 items in one batch; declare pa.large_list(...)")
    width = np.int64 if large else np.int32
    offsets = np.concatenate([[0], ends]).astype(width)
    if pt.is_list_view(kind) or pt.is_large_list_view(kind):
        return [pa.py_buffer(offsets[:-1].copy()), pa.py_buffer(lengths.astype(width))]
    return [pa.py_buffer(offsets)]


def _null_flags(rows: Sequence[Any]) -> Flags:
    return np.fromiter((row is None for row in rows), np.bool_, len(rows))


def _assembled(
    kind: pa.DataType, is_null: Flags, extents: list[pa.Buffer], children: list[pa.Array]
) -> pa.Array:
    nulls = int(np.count_nonzero(is_null))
    valid = pa.array(~is_null).buffers()[1] if nulls else None
    return pa.Array.from_buffers(
        kind, len(is_null), [valid, *extents], null_count=nulls, children=children
    )


# ------------------------------------------------------------------------------ maps, structs


def _maps(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    rows = [v if type(v) is dict or v is None else _pairs(v) for v in values]
    lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int64, len(rows))
    pairs = [pair for row in rows if row for pair in (row.items() if type(row) is dict else row)]
    keys, items = [key for key, _ in pairs], [item for _, item in pairs]
    children = [array_of(keys, kind.key_type), array_of(items, kind.item_type)]
    if children[0].null_count:
        raise ValueError("a key of a map can't be NULL")
    entries = pa.struct([kind.key_field, kind.item_field])
    entry = _assembled(entries, np.zeros(len(keys), np.bool_), [], children)
    return _assembled(kind, _null_flags(rows), _extents(lengths, kind), [entry])


def _pairs(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return the pairs of a dict, or of a list of pairs; None for NULL."""
    value = unboxed(value)
    if isinstance(value, Mapping):
        return list(value.items())
    try:
        pairs = _items(value)
    except TypeError:
        raise TypeError("it is neither a dict nor a list of pairs") from None
    if pairs is None:
        return None
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError("it is neither a dict nor a list of pairs")
    return list(pairs)


def _structs(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    names = [field.name for field in kind]
    getters = _getters_of(values, names)
    if getters is not None:
        present = [value for value in values if value is not None]
        is_null = _null_flags(values)
        columns = (_spread(map(getter, present), is_null) for getter in getters)
        children = [_field(column, field) for column, field in zip(columns, kind, strict=True)]
        return _assembled(kind, is_null, [], children)
    rows = [_record(value, names) for value in values]
    records = [row for row in rows if row is not None]
    unknown = set(itertools.chain.from_iterable(records)).difference(names)
    if unknown:
        raise ValueError(f"it has the fields {sorted(map(str, unknown))}, which the struct lacks")
    empty: dict[str, Any] = {}
    filled = [empty if row is None else row for row in rows]
    children = [_field([row.get(f.name) for row in filled], f) for f in kind]
    return _assembled(kind, _null_flags(rows), [], children)


def _getters_of(values: Sequence[Any], names: Sequence[str]) -> list[Callable[[Any], Any]] | None:
    """What reads the fields of records that are all of one class with just these; else None."""
    classes = set(map(type, values)) - {type(None)}
    if len(classes) != 1:
        return None
    (record,) = classes
    if issubclass(record, tuple) and list(getattr(record, "_fields", ())) == names:
        return [operator.itemgetter(i) for i in range(len(names))]
    if dataclasses.is_dataclass(record) and [f.name for f in dataclasses.fields(record)] == names:
        return [operator.attrgetter(name) for name in names]
    return None


def _spread(present: Iterable[Any], is_null: Flags) -> list[Any]:
    """Return values with None where a row has none."""
    if not is_null.any():
        return list(present)
    rest = iter(present)
    return [None if null else next(rest) for null in is_null.tolist()]


def _field(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """Return the values of a struct's field; an error names it."""
    try:
        return array_of(values, field.type)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        raise ValueError(f"its field {field.name!r}: {error}") from error


def _record(value: Any, names: Sequence[str]) -> Mapping[str, Any] | None:
    """Return a dict, dataclass, named tuple, or a tuple in the order of the fields, as a dict."""
    if type(value) is dict:
        return value
    value = unboxed(value)
    if value is None or isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        fields: dict[str, Any] = value._asdict()
        return fields
    if isinstance(value, tuple) and len(value) == len(names):
        return dict(zip(names, value, strict=True))
    if isinstance(value, list) and all(isinstance(p, tuple) and len(p) == 2 for p in value):
        record = dict(value)
        if len(record) == len(value):
            return record
    raise TypeError("it is not a record of the struct's fields (a dict, dataclass or named tuple)")

"""What a function returned, as an array of exactly the column's type, or the reason why not."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from geneva.execution.apply.row_values import is_list_of_numbers
from geneva.render.text import shorten
from geneva.render.values import repr_text
from geneva.udf.types import holds

ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def forbidden_null(array: pa.Array, field: pa.Field) -> str | None:
    """Return the path of a NULL inside a struct or list where its field allows none."""
    if not field.nullable and array.null_count:
        return str(field.name)
    kind = field.type
    if pt.is_struct(kind):
        children = list(zip(array.drop_null().flatten(), kind, strict=True))
    elif pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        if kind.value_field.nullable and not pt.is_nested(kind.value_type):
            return None
        children = [(array.flatten(), kind.value_field)]
    else:
        return None
    inner = (forbidden_null(child, child_field) for child, child_field in children)
    return next((f"{field.name}.{path}" for path in inner if path is not None), None)


Refuse = Callable[[int | None, str], NoReturn]


def values_to_array(
    values: Sequence[Any], kind: pa.DataType, refuse: Refuse, first_row: int = 0
) -> pa.Array:
    """Return one Python value per row as an array of exactly `kind`; refuse what doesn't fit."""
    try:
        return _single(_array_of(values, kind))
    except ARROW_ERRORS as error:
        problem = error
    # Only now look for the row, one at a time: the usual case never pays for it.
    for row, value in enumerate(values, first_row):
        try:
            _array_of([value], kind)
        except ARROW_ERRORS as error:
            shown = type(value).__name__
            found = f"{shown} for row {row}: {repr_text(value)}"
            refuse(row, f"returned a {found}: {reason_of(error)}")
    return refuse(None, f"returned values that don't make one array: {reason_of(problem)}")


def reason_of(error: BaseException) -> str:
    """Return what an error said, in one short line."""
    return shorten(str(error).rstrip("."), 200)


def _single(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    combined = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    if isinstance(combined, pa.ChunkedArray):
        raise ValueError(
            "more than 2 GiB in one batch; declare a large type (pa.large_string(), "
            "pa.large_binary(), pa.large_list(...)) or a smaller batch_size"
        )
    return combined


def _array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _single(_array_of(values, kind.storage_type)))
    if is_list_of_numbers(kind):
        rows = [np.asarray(v) if _is_array_like(v) else v for v in values]
        if all(v is None or (isinstance(v, np.ndarray) and v.ndim == 1) for v in rows):
            return _array_of_numpy_rows(rows, kind)
        values = rows
    fitting = _fitting(kind)
    return pa.array(values if fitting is None else fitting(values), kind)


def _is_array_like(value: Any) -> bool:
    """Say whether a value is a numpy array, or offers to be one (a tensor)."""
    return hasattr(value, "__array__") and not isinstance(value, np.generic)


def _array_of_numpy_rows(rows: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Build a list array from numpy rows without making a Python object per item."""
    item = kind.value_type
    is_fixed = pt.is_fixed_size_list(kind)
    filler = np.zeros(kind.list_size if is_fixed else 0, item.to_pandas_dtype())
    is_null = np.fromiter((row is None for row in rows), bool, len(rows))
    filled = [filler if row is None else row for row in rows]
    lengths = np.fromiter(map(len, filled), np.int64, len(filled))
    if is_fixed and (lengths != kind.list_size).any():
        wrong = int(lengths[lengths != kind.list_size][0])
        raise ValueError(f"it has {wrong} items, but the list has {kind.list_size}")
    items = _items_of(np.concatenate(filled) if filled else filler, item)
    mask = pa.array(is_null) if is_null.any() else None
    if is_fixed:
        return pa.FixedSizeListArray.from_arrays(items, type=kind, mask=mask)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    large = pt.is_large_list(kind)
    if not large and offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError("more than 2**31 items in one batch; declare pa.large_list(...)")
    lists = pa.LargeListArray if large else pa.ListArray
    starts = pa.array(offsets, pa.int64() if large else pa.int32())
    return lists.from_arrays(starts, items, type=kind, mask=mask)


def _items_of(numbers: np.ndarray[Any, Any], item: pa.DataType) -> pa.Array:
    """Return numpy items in the declared type: a float's width may change, nothing else is lost."""
    if pt.is_floating(item) and np.issubdtype(numbers.dtype, np.number):
        return pa.array(numbers.astype(item.to_pandas_dtype(), copy=False))
    if pt.is_boolean(item) != (numbers.dtype == np.bool_):
        raise TypeError(f"items of {numbers.dtype} can't be stored as {item}")
    return pa.array(numbers).cast(item)


Fitting = Callable[[Sequence[Any]], Sequence[Any]]


def _fitting(kind: pa.DataType) -> Fitting | None:
    """Return the check and preparation that values of this type need before pa.array, if any."""
    if pt.is_dictionary(kind):
        return _fitting(kind.value_type)
    if pt.is_integer(kind):
        return _no_fractions
    if pt.is_floating(kind):
        return _no_bools if not pt.is_float16(kind) else _half_floats
    if pt.is_temporal(kind):
        return lambda values: _no_lost_time(values, kind)
    if pt.is_struct(kind):
        return lambda values: _records(values, kind)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return lambda values: _lists(values, kind)
    return None


def _no_fractions(values: Sequence[Any]) -> Sequence[Any]:
    # pyarrow would cut 1.5 down to 1, and take np.True_ for 1, without a word.
    kinds = set(map(type, values))
    if np.bool_ in kinds:
        raise TypeError("a bool is not a number here; return int(...)")
    if any(issubclass(cls, (float, np.floating)) for cls in kinds):
        for value in values:
            if isinstance(value, (float, np.floating)) and not float(value).is_integer():
                raise TypeError(f"{value} is not a whole number")
    return values


def _no_bools(values: Sequence[Any]) -> Sequence[Any]:
    if not {bool, np.bool_}.isdisjoint(map(type, values)):
        raise TypeError("a bool is not a number here; return float(...)")
    return values


def _half_floats(values: Sequence[Any]) -> Sequence[Any]:
    return [v.item() if isinstance(v, np.generic) else v for v in _no_bools(values)]


def _no_lost_time(values: Sequence[Any], kind: pa.DataType) -> Sequence[Any]:
    """Refuse what pyarrow would round: a time of day for a date, microseconds for seconds."""
    kinds = set(map(type, values))
    if any(issubclass(cls, (float, np.floating)) for cls in kinds):
        raise TypeError("a float is not a point or span of time")
    if pt.is_date(kind):
        if any(issubclass(cls, datetime.datetime) for cls in kinds):
            raise TypeError("a datetime has a time of day, the column does not; return .date()")
        return values
    step = {"s": 1_000_000, "ms": 1_000}.get(kind.unit, 1)
    if step > 1:
        for value in values:
            part = getattr(value, "microsecond", 0) or getattr(value, "microseconds", 0)
            if part % step:
                raise ValueError(f"it is finer than the column's unit ({kind.unit})")
    return values


def _records(values: Sequence[Any], kind: pa.DataType) -> Sequence[Any]:
    """Return dicts for a struct column; refuse keys that it doesn't have."""
    rows = [_as_dict(value) for value in values]
    names = {field.name for field in kind}
    unknown = set(itertools.chain.from_iterable(r for r in rows if type(r) is dict)) - names
    if unknown:
        raise ValueError(f"it has the fields {sorted(map(str, unknown))}, which the struct lacks")
    for field in kind:
        prepare = _fitting(field.type)
        if prepare is not None:
            having = [r for r in rows if type(r) is dict and r.get(field.name) is not None]
            for row, value in zip(having, prepare([r[field.name] for r in having]), strict=True):
                row[field.name] = value
    return rows


def _as_dict(value: Any) -> Any:
    """Return a dict of its own for a dict, dataclass or named tuple."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return value._asdict()
    return dict(value) if isinstance(value, dict) else value


def _lists(values: Sequence[Any], kind: pa.DataType) -> Sequence[Any]:
    """Return Python lists for a list column, with items prepared for theirs."""
    rows = [np.asarray(v).tolist() if _is_array_like(v) else v for v in values]
    # pyarrow takes any iterable: a set has no order, and a str would become its letters.
    odd = {type(v) for v in rows} - {list, tuple, type(None)}
    if any(issubclass(cls, (str, bytes, set, frozenset, dict)) for cls in odd):
        raise TypeError("it is not a list")
    prepare = _fitting(kind.value_type)
    if prepare in (None, _no_bools):
        return rows
    assert prepare is not None
    flat = prepare([item for row in rows if row is not None for item in row])
    items = iter(flat)
    return [None if row is None else list(itertools.islice(items, len(row))) for row in rows]


def result_to_array(result: Any, kind: pa.DataType, refuse: Refuse, first_row: int = 0) -> pa.Array:
    """Return what a batch UDF returned as an array of exactly `kind`; refuse what would lose."""
    if isinstance(result, (list, tuple)):
        return values_to_array(result, kind, refuse, first_row)
    try:
        array = _returned_array(result, kind)
    except ARROW_ERRORS as error:
        refuse(None, f"returned a {type(result).__name__}: {reason_of(error)}")
    if array is None:
        refuse(
            None,
            f"returned a {type(result).__name__}: {repr_text(result)}; a batch UDF returns one "
            f"value per row, as a pa.Array, numpy array, list or pandas Series",
        )
    if not holds(_storage(kind), _storage(array.type)):
        refuse(
            None,
            f"returned an array of {array.type}, which the column can't hold without loss; "
            f"declare data_type to match, or cast the result with .cast(...)",
        )
    try:
        return _cast(array, kind)
    except ARROW_ERRORS as error:
        refuse(None, f"returned an array of {array.type}: {reason_of(error)}")


def _returned_array(result: Any, kind: pa.DataType) -> pa.Array | None:
    if isinstance(result, (pa.RecordBatch, pa.Table)):
        return _struct_or_column(result, kind)
    if isinstance(result, (pa.Array, pa.ChunkedArray)):
        return _single(result)
    if type(result).__module__.startswith("pandas.") and hasattr(result, "dtype"):
        as_declared = kind if result.dtype == object else None
        return _single(pa.Array.from_pandas(result, type=as_declared))
    if hasattr(result, "__arrow_c_stream__"):
        return _single(pa.chunked_array(result))
    if _is_array_like(result):
        array = np.asarray(result)
        if array.ndim == 0:
            return None
        if array.dtype == object:
            return _single(_array_of(array.tolist(), kind))
        return pa.array(array) if array.ndim == 1 else _nested_lists(array)
    return None


def _nested_lists(array: np.ndarray[Any, Any]) -> pa.Array:
    """Return an n-dimensional numpy array as fixed-size lists, innermost first."""
    items = pa.array(np.ascontiguousarray(array).reshape(-1))
    for width in reversed(array.shape[1:]):
        items = pa.FixedSizeListArray.from_arrays(items, width)
    return items


def _struct_or_column(result: pa.RecordBatch | pa.Table, kind: pa.DataType) -> pa.Array:
    names = [field.name for field in kind] if pt.is_struct(kind) else None
    if names is not None and sorted(result.schema.names) == sorted(names):
        columns = [_single(result.column(name)) for name in names]
        return pa.StructArray.from_arrays(columns, names)
    if result.num_columns == 1:
        return _single(result.column(0))
    wanted = f"the struct's fields {names}" if names else "one column"
    raise ValueError(f"it has the columns {result.schema.names}, expected {wanted}")


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        return _cast(array.storage, kind)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _cast(array, kind.storage_type))
    if pt.is_null(array.type):
        return pa.nulls(len(array), kind)
    if pt.is_dictionary(array.type):
        return _cast(array.dictionary_decode(), kind)
    if pt.is_dictionary(kind):
        encoded = _cast(array, kind.value_type).dictionary_encode()
        return encoded if encoded.type == kind else encoded.cast(kind)
    return _single(array.cast(kind))

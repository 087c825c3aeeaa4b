"""What a function returned, as an array of exactly the column's type, or the reason why not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from geneva.execution.apply.compact import copied
from geneva.execution.apply.convert import (
    array_of,
    encoded,
    is_array_like,
    is_pandas,
    masked_values,
    pandas_values,
    single,
)
from geneva.execution.apply.layouts import Layout, Values
from geneva.execution.apply.tensors import is_tensor, numpy_of
from geneva.render.text import a_type, shorten
from geneva.render.values import error_text, repr_text
from geneva.storage.lance.pieces import room
from geneva.udf.picking import without_nulls
from geneva.udf.taken import taken
from geneva.udf.types import holds, is_binary, is_blob_type, is_list, is_text

ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def forbidden_null(array: pa.Array, field: pa.Field) -> str | None:
    """Return the path of a NULL inside a struct or list where its field allows none."""
    if not field.nullable and array.null_count:
        return str(field.name)
    kind = field.type
    if pt.is_struct(kind):
        children = list(zip(without_nulls(array).flatten(), kind, strict=True))
    elif pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        if kind.value_field.nullable and not pt.is_nested(kind.value_type):
            return None
        children = [(array.flatten(), kind.value_field)]
    else:
        return None
    inner = (forbidden_null(child, child_field) for child, child_field in children)
    return next((f"{field.name}.{path}" for path in inner if path is not None), None)


def may_forbid_null(kind: pa.DataType) -> bool:
    """Whether a type has a field or items, at any depth, that are declared not null."""
    inner = [kind.field(i) for i in range(kind.num_fields)]
    return any(not field.nullable or may_forbid_null(field.type) for field in inner)


def may_differ(kind: pa.DataType) -> bool:
    """Whether an array of a type may still be none that a column of that type can hold."""
    return isinstance(kind, pa.BaseExtensionType) or bool(pt.is_dictionary(kind))


def own_values(
    result: Any, kind: pa.DataType, layout: Layout | None, rows: int, *, stays: bool
) -> Values | None:
    """What a function returned, where it is just what it should be; None: it may not be.

    It is copied before the next call: functions return memory that they use again, or views of
    their inputs, which would keep these; and Lance panics on sliced structs. It `stays` as it is
    only where nobody else has it. `layout`: that of the type, if it has one.
    """
    try:
        # Objects and texts are looked at one by one, elsewhere.
        is_array = type(result) is np.ndarray and result.dtype.kind not in "SU"
        is_array = is_array and not result.dtype.hasobject
        is_numbers = is_array or is_tensor(result)
        if is_numbers and not is_array:
            # What comes from a GPU is in memory of its own by that.
            stays = stays or not result.is_cpu
            result = numpy_of(result)
        if layout is not None and is_numbers:
            packed = layout.of_numpy(result, rows, may_keep=stays)
            if packed is not None:
                return packed
        has_rows = result.ndim > 0 if is_numbers else isinstance(result, pa.Array)
        if not has_rows or len(result) != rows:
            return None
        if layout is not None and not is_numbers and result.type == kind:
            packed = layout.of_arrow(result)
            if packed is not None:
                return packed
        array = _returned_array(result, kind)
        if array is None or array.type != kind:
            return None
        return array if stays else copied(array)
    except (*ARROW_ERRORS, RuntimeError):  # the latter is torch's
        return None


Refuse = Callable[[int | None, str], NoReturn]


def values_to_array(
    values: Sequence[Any], kind: pa.DataType, refuse: Refuse, first_row: int = 0
) -> pa.Array:
    """Return one Python value per row as an array of exactly `kind`; refuse what doesn't fit."""
    try:
        return array_of(values, kind)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  values are the user's objects
        problem = error
    # Only now look for the row: the usual case never pays for it.
    row = _first_failing(len(values), lambda end: array_of(values[:end], kind))
    if row is None:
        return refuse(None, f"returned values that don't make one array: {reason_of(problem)}")
    value = values[row]
    reason = _reason_alone(value, kind) or reason_of(problem)
    shown = f"{a_type(value)} for row {first_row + row}: {repr_text(value)}"
    return refuse(first_row + row, f"returned {shown}: {reason}")


def records_to_array(
    values: Sequence[Any],
    kind: pa.StructType,
    refuse: Refuse,
    first_row: int = 0,
    *,
    optional: Collection[str] = (),
) -> pa.Array:
    """The same for records that are several columns: none may leave a field out, but `optional`."""
    required = {field.name for field in kind}.difference(optional)
    loose = tuple(made for made in set(map(type, values)) if issubclass(made, Mapping))
    for row, value in enumerate(values) if loose else ():
        if isinstance(value, loose) and not required <= value.keys():
            lacking = ", ".join(repr(f.name) for f in kind if f.name in required - value.keys())
            problem = f"returned {a_type(value)} for row {first_row + row}"
            refuse(first_row + row, f"{problem} without the field {lacking}: {repr_text(value)}")
    return values_to_array(values, kind, refuse, first_row)


def _first_failing(rows: int, convert: Callable[[int], Any]) -> int | None:
    """Return the row without which everything before it can be converted; None if there is none."""
    if not _fails(convert, rows):
        return None
    good, bad = 0, rows  # the first `good` rows can be converted, the first `bad` can't
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if _fails(convert, middle) else (middle, bad)
    return bad - 1


def _fails(convert: Callable[[int], Any], end: int) -> bool:
    try:
        convert(end)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  values are the user's objects
        return True
    return False


def _reason_alone(value: Any, kind: pa.DataType) -> str | None:
    """Return why a value can't be stored; None when only those before it are the reason."""
    try:
        array_of([value], kind)
    except Exception as error:  # noqa: BLE001  values are the user's objects
        return reason_of(error)
    return None


def reason_of(error: BaseException) -> str:
    """Return what an error said, in one short line."""
    return shorten(error_text(error).rstrip(".") or type(error).__name__, 200)


def result_to_array(result: Any, kind: pa.DataType, refuse: Refuse, first_row: int = 0) -> pa.Array:
    """Return what a batch UDF returned as an array of exactly `kind`; refuse what would lose.

    An array of a type is taken when the column holds all values of that type. Python objects, also
    in numpy arrays and pandas Series, are looked at one by one.
    """
    is_array = isinstance(result, (pa.Array, pa.ChunkedArray))
    values = None if is_array else _python_values(result, kind)
    if values is not None:
        return values_to_array(values, kind, refuse, first_row)
    try:
        array = _returned_array(result, kind)
    except ARROW_ERRORS as error:
        refuse(None, f"returned {a_type(result)}: {reason_of(error)}")
    if array is None:
        refuse(
            None,
            f"returned {a_type(result)}: {repr_text(result)}; a batch UDF returns one "
            f"value per row, as a pa.Array, numpy array, list or pandas Series",
        )
    if array.type != kind and not holds(_storage(kind), _storage(array.type)):
        refuse(None, _too_wide(result, array.type, kind))
    try:
        return cast_array(array, kind)
    except ARROW_ERRORS as error:
        row = _first_failing(len(array), lambda end: cast_array(array[:end], kind))
        where = "" if row is None else f", row {first_row + row}"
        found = None if row is None else first_row + row
        refuse(found, f"returned an array of {array.type}{where}: {reason_of(error)}")


def _too_wide(result: Any, given: pa.DataType, kind: pa.DataType) -> str:
    """Why an array of a type is refused, and what to do about it, in the words of its library."""
    if not (isinstance(result, np.ndarray) or is_tensor(result)):
        return (
            f"returned an array of {given}, which the column can't hold without loss; "
            f"declare data_type to match, or cast the result with .cast(...)"
        )
    shape, dtype = tuple(result.shape), numpy_of(result).dtype
    name, cast = ("tensor", "to(torch.") if is_tensor(result) else ("numpy array", "astype(np.")
    shown = f"returned a {name} of {result.dtype}"
    shown += f" and shape {shape}" if len(shape) > 1 else ""
    items, fitting = _storage(kind), ""
    for _ in shape[1:]:
        items = items.value_type if is_list(items) else pa.null()
    if dtype.kind in "iuf" and (pt.is_integer(items) or pt.is_floating(items)):
        made = items
        for width in reversed(shape[1:]):
            made = pa.list_(made, width)
        fitting = items.to_pandas_dtype().__name__ if holds(_storage(kind), made) else ""
    if not fitting:
        flat = shape[1:] == (1,) and not is_list(_storage(kind))
        advice = ", or make it flat with .squeeze(1)" if flat else ""
        return f"{shown}, which the column can't hold; declare data_type to match{advice}"
    return (
        f"{shown}, which the column can't hold without loss; declare data_type to match, or "
        f"convert the result with .{cast}{fitting})"
    )


def result_to_records(
    result: Any,
    kind: pa.StructType,
    refuse: Refuse,
    first_row: int = 0,
    *,
    optional: Collection[str] = (),
) -> pa.Array:
    """The same for a function that fills several columns: a RecordBatch, a table, or records."""
    given = _named_columns(result)
    if given is None:
        values = _python_values(result, kind)
        if values is not None:
            return records_to_array(values, kind, refuse, first_row, optional=optional)
        return result_to_array(result, kind, refuse, first_row)
    names, listed = [field.name for field in kind], [name for name, _ in given]
    shown = f"returned {a_type(result)} with the columns {listed}"
    columns = dict(given)
    twice = [name for name in columns if listed.count(name) > 1]
    if twice:
        refuse(None, f"{shown}: {twice[0]!r} is there {listed.count(twice[0])} times")
    unknown = [name for name in columns if name not in names]
    if unknown:
        refuse(None, f"{shown}: {unknown[0]!r} is none of {names}")
    lacking = [name for name in names if name not in columns and name not in optional]
    if lacking:
        refuse(None, f"{shown}: {lacking[0]!r} is missing")

    def converted(field: pa.Field) -> pa.Array:
        def refuse_field(row: int | None, problem: str) -> NoReturn:
            refuse(row, f"{problem} (column {field.name!r})")

        return result_to_array(columns[field.name], field.type, refuse_field, first_row)

    found = {field.name: converted(field) for field in kind if field.name in columns}
    lengths = {name: len(array) for name, array in found.items()}
    if len(set(lengths.values())) > 1:
        refuse(None, f"{shown} of different lengths: {lengths}")
    rows = next(iter(lengths.values()), 0)
    arrays = [found.get(f.name, pa.nulls(rows, f.type)) for f in kind]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _named_columns(result: Any) -> list[tuple[str, Any]] | None:
    """The columns of a table of any make, with their names; None where it is none."""
    if isinstance(result, (pa.RecordBatch, pa.Table)):
        return list(zip(result.schema.names, result.columns, strict=True))
    if isinstance(result, Mapping):
        return list(result.items())
    if type(result).__module__.startswith("pandas.") and hasattr(result, "columns"):
        return list(result.items())
    return None


def _python_values(result: Any, kind: pa.DataType) -> Sequence[Any] | None:
    """Return the values of a result that has no type of its own."""
    if isinstance(result, (list, tuple)):
        return result
    if isinstance(result, Iterator) and not hasattr(result, "__arrow_c_stream__"):
        return [*map(taken, result)]
    if is_pandas(result) and result.dtype == object:
        return pandas_values(result)
    if isinstance(result, np.ma.MaskedArray):
        # pyarrow keeps the mask of plain rows only.
        return masked_values(result) if result.ndim > 1 or _goes_by_item(result, kind) else None
    if isinstance(result, np.ndarray) and _goes_by_item(result, kind) and result.ndim:
        values: list[Any] = result.tolist()
        return values
    return None


def _goes_by_item(array: np.ndarray[Any, Any], kind: pa.DataType) -> bool:
    """Whether items are taken one by one: objects; and texts, which Arrow ends at a NUL."""
    if array.dtype.kind not in "SU":
        return bool(array.dtype == object)
    while is_list(kind) or pt.is_dictionary(kind):
        kind = kind.value_type
    return is_text(kind) or is_binary(kind)


def _returned_array(result: Any, kind: pa.DataType) -> pa.Array | None:
    if isinstance(result, (pa.RecordBatch, pa.Table)):
        return _struct_or_column(result, kind)
    if isinstance(result, (pa.Array, pa.ChunkedArray)):
        array = _valid(single(result))
        return _blob_bytes(array) if is_blob_type(array.type) else array
    if is_pandas(result):
        return single(pa.Array.from_pandas(result))
    if hasattr(result, "__arrow_c_stream__"):
        return _valid(single(pa.chunked_array(result)))
    if is_array_like(result):
        array = numpy_of(result)
        if array.ndim == 0:
            return None
        return pa.array(array) if array.ndim == 1 else _nested_lists(array)
    return None


def _valid(array: pa.Array) -> pa.Array:
    """Refuse an array whose buffers contradict each other: it would be stored, and never read."""
    array.validate(full=True)
    return array


def _blob_bytes(array: pa.Array) -> pa.Array:
    """The bytes of an array of Lance's blobs; refuse addresses of other files."""
    data = pc.struct_field(array.storage, "data")
    if data.null_count > array.null_count:
        raise ValueError("blobs that a function returns have bytes of their own, and no uri")
    return data


def _nested_lists(array: np.ndarray[Any, Any]) -> pa.Array:
    """Return an n-dimensional numpy array as fixed-size lists, innermost first."""
    items = pa.array(np.ascontiguousarray(array).reshape(-1))
    for width in reversed(array.shape[1:]):
        items = pa.FixedSizeListArray.from_arrays(items, width)
    return items


def _struct_or_column(result: pa.RecordBatch | pa.Table, kind: pa.DataType) -> pa.Array:
    names = [field.name for field in kind] if pt.is_struct(kind) else None
    if names is not None and sorted(result.schema.names) == sorted(names):
        columns = [_valid(single(result.column(name))) for name in names]
        return pa.StructArray.from_arrays(columns, names)
    if result.num_columns == 1:
        return _valid(single(result.column(0)))
    wanted = f"the struct's fields {names}" if names else "one column"
    raise ValueError(f"it has the columns {result.schema.names}, expected {wanted}")


def _storage(kind: pa.DataType) -> pa.DataType:
    """Return what an extension type is stored as; a period of pandas is not an int by that."""
    is_plain = not isinstance(kind, pa.BaseExtensionType)
    return kind if is_plain or kind.extension_name.startswith("pandas.") else kind.storage_type


def cast_array(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return an array of a type that `kind` holds, as one of exactly `kind`."""
    if array.type == kind and not (pt.is_dictionary(kind) and len(array.dictionary) > room(kind)):
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        return cast_array(array.storage, kind)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, cast_array(array, kind.storage_type))
    if pt.is_null(array.type):
        return pa.nulls(len(array), kind)
    if pt.is_dictionary(array.type):
        return cast_array(array.dictionary_decode(), kind)
    if pt.is_dictionary(kind):
        return encoded(cast_array(array, kind.value_type), kind)
    return single(array.cast(kind))

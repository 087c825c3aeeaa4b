"""Arrow values in another Arrow type, unchanged or not at all. No pyspark here.

The rule, both when a table is read by Spark and when Spark writes into one: layout is free (large
types, views, dictionaries, fixed-size lists), numbers may change their width as long as each value
stays what it is, and floats may be rounded to the column's width, never to infinity. Texts don't
become numbers, and times without a zone don't get one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from geneva.errors import TypeMismatchError
from geneva.udf.picking import picked
from geneva.udf.types import is_binary, is_list, is_text

BFLOAT16 = "lance.bfloat16"


class Unfit(ValueError):
    """A value, or a type, that another type can't hold."""


def cast_batch(batch: pa.RecordBatch, schema: pa.Schema, what: str) -> pa.RecordBatch:
    """The columns of a schema by name, in exactly its types. `what` is said in errors."""
    arrays = []
    for field in schema:
        try:
            arrays.append(cast(batch.column(field.name), field.type, nullable=field.nullable))
        except (Unfit, pa.ArrowException) as error:
            raise TypeMismatchError(f"Column {field.name!r} of {what}: {error}") from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def cast(array: pa.Array, kind: pa.DataType, *, nullable: bool = True) -> pa.Array:
    """An array of exactly `kind` with the same values; `Unfit` where there is none."""
    if not nullable and array.null_count:
        raise Unfit(f"there are NULLs in it, and it is {kind} NOT NULL")
    source = array.type
    if source == kind and not _forbids_nulls(kind):
        return array
    if isinstance(source, pa.BaseExtensionType):
        return cast(_opened(array), kind)
    if isinstance(kind, pa.BaseExtensionType):
        return _sealed(array, kind)
    if pt.is_dictionary(source):
        return cast(array.dictionary_decode(), kind)
    if pt.is_null(source):
        return pa.nulls(len(array), kind)
    if pt.is_dictionary(kind):
        return cast(array, kind.value_type).dictionary_encode().cast(kind)
    if is_list(kind) and is_list(source):
        return _lists(array, kind)
    if pt.is_map(kind) and pt.is_map(source):
        return _maps(array, kind)
    if pt.is_struct(kind) and pt.is_struct(source):
        return _structs(array, kind)
    return _leaves(array, kind)


def check_castable(source: pa.DataType, kind: pa.DataType, *, units: bool = False) -> None:
    """Refuse a pair of types of which no value fits; what is left is up to the values.

    `units`: times may become counts of their units, for whoever reads them and asked for that.
    """
    cast(pa.nulls(0, source), kind)
    if not units and (time := _time_as_number(source, kind)) is not None:
        raise Unfit(f"{time} can't be int64. Convert it to a number of your own choice first")


def _time_as_number(source: pa.DataType, kind: pa.DataType) -> pa.DataType | None:
    """The type of times that would be numbers, of types that can be cast; None: there is none."""
    if pt.is_integer(kind) and (pt.is_timestamp(source) or pt.is_duration(source)):
        return source
    if pt.is_dictionary(kind):
        return _time_as_number(source, kind.value_type)
    if not (pt.is_nested(kind) and pt.is_nested(source)):
        return None
    if pt.is_struct(kind):
        pairs = [(field.type, kind.field(field.name).type) for field in source]
    elif pt.is_map(kind):
        pairs = [(source.key_type, kind.key_type), (source.item_type, kind.item_type)]
    else:
        pairs = [(source.value_type, kind.value_type)]
    found = (_time_as_number(below, target) for below, target in pairs)
    return next((time for time in found if time is not None), None)


def _forbids_nulls(kind: pa.DataType) -> bool:
    """Whether a type has fields inside that take no NULL, so that values have to be looked at."""
    if not pt.is_nested(kind):
        return False
    if pt.is_map(kind):
        return not kind.item_field.nullable or _forbids_nulls(kind.item_type)
    below = [kind.field(i) for i in range(kind.num_fields)]
    return any(not field.nullable or _forbids_nulls(field.type) for field in below)


# ------------------------------------------------------------------------------ extension types


def _opened(array: pa.Array) -> pa.Array:
    """The values of an extension type as plain ones."""
    if array.type.extension_name != BFLOAT16:
        return array.storage
    storage = array.storage
    bits = np.frombuffer(storage.buffers()[1] or b"", dtype=np.uint16)
    bits = bits[storage.offset : storage.offset + len(storage)]
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    return pa.array(wide, mask=np.asarray(storage.is_null()))


def _sealed(array: pa.Array, kind: pa.BaseExtensionType) -> pa.Array:
    """Plain values in an extension type."""
    if kind.extension_name != BFLOAT16:
        return pa.ExtensionArray.from_storage(kind, cast(array, kind.storage_type))
    floats = cast(array, pa.float32())
    numbers = np.asarray(floats.fill_null(0.0), dtype=np.float32)
    bits = numbers.view(np.uint32)
    # To the nearest, ties to even; NaN stays one.
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded = np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)
    _refuse_overflow(np.isinf((rounded.astype(np.uint32) << 16).view(np.float32)), numbers, kind)
    valid = pa.array(~np.asarray(floats.is_null())).buffers()[1] if floats.null_count else None
    storage = pa.Array.from_buffers(pa.binary(2), len(floats), [valid, pa.py_buffer(rounded)])
    return pa.ExtensionArray.from_storage(kind, storage)


# ------------------------------------------------------------------------------ nested types


def _lists(array: pa.Array, kind: pa.DataType) -> pa.Array:
    items = cast(array.flatten(), kind.value_type, nullable=kind.value_field.nullable)
    lengths = pc.list_value_length(array).fill_null(0)
    if pt.is_fixed_size_list(kind):
        return _fixed_size_lists(array, items, lengths, kind)
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
    large = pt.is_large_list(kind)
    offsets_array = pa.array(offsets, pa.int64() if large else pa.int32())
    make = pa.LargeListArray if large else pa.ListArray
    return make.from_arrays(offsets_array, items, type=kind, mask=_nulls(array))


def _fixed_size_lists(
    array: pa.Array, items: pa.Array, lengths: pa.Array, kind: pa.DataType
) -> pa.Array:
    size = kind.list_size
    counts = np.asarray(lengths)[~np.asarray(array.is_null())]
    wrong = counts[counts != size]
    if len(wrong):
        raise Unfit(f"a list has {wrong[0]} items, and each has {size} in {kind}")
    nulls = _nulls(array)
    if nulls is not None:
        # A NULL list has room for its items: any will do.
        places = np.zeros((len(array), size), dtype=np.int64)
        places[~np.asarray(nulls)] = np.arange(len(items)).reshape(-1, size)
        items = (
            picked(items, places.ravel()) if len(items) else pa.nulls(places.size, kind.value_type)
        )
    return pa.FixedSizeListArray.from_arrays(items, type=kind, mask=nulls)


def _maps(array: pa.Array, kind: pa.DataType) -> pa.Array:
    source = array.type
    pairs = pa.struct([("key", source.key_type), ("value", source.item_type)])
    lists = array.cast(pa.list_(pairs))
    keys, items = lists.flatten().flatten()
    lengths = np.asarray(pc.list_value_length(lists).fill_null(0), dtype=np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    made = pa.MapArray.from_arrays(
        offsets,
        cast(keys, kind.key_type),
        cast(items, kind.item_type, nullable=kind.item_field.nullable),
        type=kind,
        mask=_nulls(array),
    )
    assert isinstance(made, pa.MapArray)
    return made


def _structs(array: pa.Array, kind: pa.DataType) -> pa.Array:
    names = [field.name for field in array.type]
    unknown = [name for name in names if kind.get_field_index(name) < 0]
    if unknown:
        raise Unfit(f"there is no field {unknown[0]!r} in {kind}")
    children = dict(zip(names, array.flatten(), strict=True))
    inside = array.is_valid()
    made = []
    for field in kind:
        child = children.get(field.name)
        if child is None:
            child = pa.nulls(len(array), field.type)
        if not field.nullable and _any(pc.and_(child.is_null(), inside)):
            raise Unfit(f"there are NULLs in field {field.name!r}, which is NOT NULL")
        made.append(cast(child, field.type))
    return pa.StructArray.from_arrays(made, fields=list(kind), mask=_nulls(array))


def _nulls(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _any(flags: pa.Array) -> bool:
    return bool(pc.any(flags).as_py())


# ------------------------------------------------------------------------------ leaves


def _leaves(array: pa.Array, kind: pa.DataType) -> pa.Array:
    source = array.type
    if not _same_family(source, kind):
        raise Unfit(f"{source} can't be {kind}{_advice(source, kind)}")
    try:
        made = array.cast(kind)
    except pa.ArrowException as error:
        raise Unfit(
            f"not every {source} can be {kind}: {str(error).rstrip('.')}{_advice(source, kind)}"
        ) from None
    if pt.is_floating(kind) and pt.is_floating(source) and kind.bit_width < source.bit_width:
        _refuse_overflow(np.isinf(_numbers(made)), _numbers(array), kind)
    return made


def _numbers(array: pa.Array) -> np.ndarray[tuple[int, ...], np.dtype[np.floating]]:
    return array.to_numpy(zero_copy_only=False)


def _refuse_overflow(
    infinite: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    numbers: np.ndarray[tuple[int, ...], np.dtype[np.floating]],
    kind: pa.DataType,
) -> None:
    lost = numbers[infinite & np.isfinite(numbers)]
    if len(lost):
        raise Unfit(f"{lost[0]!r} is too large for {kind}")


def _same_family(source: pa.DataType, kind: pa.DataType) -> bool:
    if pt.is_integer(kind) and (pt.is_timestamp(source) or pt.is_duration(source)):
        # Their count of units, for whoever needs all digits of nanoseconds.
        return bool(kind == pa.int64())
    if pt.is_decimal(kind) and pt.is_floating(source):
        return False
    families: Sequence[bool] = [
        check(source) and check(kind)
        for check in (
            pt.is_boolean,
            _is_number,
            is_text,
            is_binary,
            pt.is_date,
            _is_instant,
            _is_local_time,
            pt.is_time,
            pt.is_duration,
        )
    ]
    return any(families)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind))


def _is_instant(kind: pa.DataType) -> bool:
    return pt.is_timestamp(kind) and kind.tz is not None


def _is_local_time(kind: pa.DataType) -> bool:
    return pt.is_timestamp(kind) and kind.tz is None


def _advice(source: pa.DataType, kind: pa.DataType) -> str:
    if pt.is_timestamp(source) and pt.is_timestamp(kind):
        if (source.tz is None) != (kind.tz is None):
            return ": one has a time zone, one has none. Cast it to TIMESTAMP or TIMESTAMP_NTZ"
        return ". As BIGINT, the count of its units, it keeps all digits: read it with a schema"
    return ""

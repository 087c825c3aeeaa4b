"""Whether a table's file format can hold a column at all: tried out, and not looked up."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.types as pt
from lance.file import LanceFileReader, LanceFileWriter

from geneva.storage.lance.damage import is_damage
from geneva.udf.types import is_binary, is_text


@lru_cache(maxsize=256)
def why_not_storable(version: str, kind: pa.DataType) -> str | None:
    """Why a column of this type can't be in a table of some format; None: it can.

    A column that is added is NULL until it is computed. Where its format can't write that, every
    update and every compaction of the table fails. Of some types it writes NULL and no value.
    """
    problem = _tried(version, _one_null, kind)
    if problem is not None:
        return f"it is NULL until it is filled, and updates and compactions would fail: {problem}"
    problem = _tried(version, _one_value, kind)
    return f"its values can't be written: {problem}" if problem is not None else None


def _tried(version: str, make: Callable[[pa.DataType], pa.Array], kind: pa.DataType) -> str | None:
    """What Lance says against a row of that type; None: nothing, or Arrow can't make such a row."""
    try:
        row = make(kind)
    except (pa.ArrowException, NotImplementedError):
        return None
    return _written(version, row)


def _written(version: str, values: pa.Array) -> str | None:
    """What Lance says against one row; None: it reads as it was written."""
    try:
        with tempfile.TemporaryDirectory(prefix="geneva-trial-") as folder:
            path = str(Path(folder, "trial.lance"))
            schema = pa.schema([pa.field("x", values.type)])
            writer = LanceFileWriter(path, schema, version=version)
            writer.write_batch(pa.record_batch([values], names=["x"]))
            writer.close()
            found = LanceFileReader(path).read_all().to_table().column(0)
    except BaseException as error:
        if not is_damage(error) and not isinstance(error, NotImplementedError):
            raise
        return str(error).split(", /")[0]
    return None if found.null_count == values.null_count else "NULL comes back as a value"


def _one_null(kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.nulls(1, kind.storage_type))
    return pa.nulls(1, kind)


def _one_value(kind: pa.DataType) -> pa.Array:
    """A row that is not NULL, with one item in each list."""
    if isinstance(kind, pa.BaseExtensionType):
        texts = isinstance(kind, pa.JsonType)
        storage = pa.array(["{}"], kind.storage_type) if texts else _one_value(kind.storage_type)
        return pa.ExtensionArray.from_storage(kind, storage)
    if pt.is_dictionary(kind):
        return _one_value(kind.value_type).dictionary_encode().cast(kind)
    if pt.is_struct(kind):
        return pa.StructArray.from_arrays([_one_value(f.type) for f in kind], fields=list(kind))
    if pt.is_fixed_size_list(kind):
        items = [_one_value(kind.value_type)] * kind.list_size
        items = pa.concat_arrays(items) if items else pa.nulls(0, kind.value_type)
        return pa.FixedSizeListArray.from_arrays(items, type=kind)
    if pt.is_map(kind):
        pairs = _one_value(kind.key_type), _one_value(kind.item_type)
        return pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), *pairs, type=kind)
    if pt.is_list(kind) or pt.is_large_list(kind):
        large = pt.is_large_list(kind)
        make = pa.LargeListArray if large else pa.ListArray
        ends = pa.array([0, 1], pa.int64() if large else pa.int32())
        return make.from_arrays(ends, _one_value(kind.value_type), type=kind)
    if pt.is_null(kind):
        return pa.nulls(1)
    if is_text(kind) or (is_binary(kind) and not pt.is_fixed_size_binary(kind)):
        return pa.array(["a"]).cast(kind)
    if pt.is_nested(kind):
        raise NotImplementedError(f"a value of {kind}")
    zero = bytes(-(-kind.bit_width // 8))
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(zero)])

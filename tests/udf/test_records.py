"""Functions that fill several columns: how they are declared, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

import geneva
from geneva import Columns, UnpackedUDF, udf
from geneva.errors import InvalidUDFError


class Size(NamedTuple):
    w: int
    h: int | None


@dataclass
class Features:
    name: str
    vector: Annotated[np.ndarray[Any, Any], pa.list_(pa.float32(), 2)]


class Words(TypedDict):
    first: str
    last: NotRequired[str]


def kinds(made: geneva.UDF) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in made.outputs}


def test_a_record_of_any_make_says_the_columns() -> None:
    @udf
    def size(x: int) -> Columns[Size]:
        return Size(x, None)

    @udf
    async def features(x: int) -> Columns[Features] | None:
        return None

    @udf
    def words(x: int) -> geneva.Columns[Words]:
        return {"first": "a"}

    assert kinds(size) == {"w": pa.int64(), "h": pa.int64()}
    assert kinds(features) == {"name": pa.string(), "vector": pa.list_(pa.float32(), 2)}
    assert kinds(words) == {"first": pa.string(), "last": pa.string()}
    assert [each.unpacks for each in (size, features, words)] == [True, True, True]
    assert words.optional_fields == ("last",)
    assert size(3) == Size(3, None), "called as it was written"
    assert "columns w: int64, h: int64" in repr(size)


def test_a_schema_says_them_for_batches() -> None:
    schema = pa.schema([pa.field("w", pa.int32()), pa.field("h", pa.int32(), nullable=False)])

    @udf(output_schema=schema)
    def size(x: pa.Array) -> pa.RecordBatch:
        return pa.record_batch({"w": x, "h": x})

    @udf(output_schema=schema, input_columns=["x"])
    def of_batches(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    assert kinds(size) == kinds(of_batches) == {"w": pa.int32(), "h": pa.int32()}
    assert [field.nullable for field in size.outputs] == [True, False]


def test_a_class_and_a_pickle_of_it() -> None:
    @udf
    class Measure:
        def __init__(self, by: int = 2) -> None:
            self.by = by

        def __call__(self, x: int) -> Columns[Size]:
            return Size(x * self.by, x)

    loaded = cloudpickle.loads(cloudpickle.dumps(Measure(by=5)))
    assert loaded.unpacks
    assert kinds(loaded) == {"w": pa.int64(), "h": pa.int64()}
    assert tuple(loaded(2)) == (10, 2)
    assert loaded.version == Measure(by=5).version != Measure(by=6).version


def test_a_struct_is_one_column() -> None:
    @udf
    def size(x: int) -> Size:
        return Size(x, x)

    assert not size.unpacks
    assert [field.name for field in size.outputs] == [""]


def test_what_names_no_columns_is_refused() -> None:
    with pytest.raises(InvalidUDFError, match="is no record"):

        @udf
        def plain(x: int) -> Columns[int]:
            return x

    with pytest.raises(InvalidUDFError, match="Columns names no record"):

        @udf
        def bare(x: int) -> Columns:  # type: ignore[type-arg]
            return x

    with pytest.raises(InvalidUDFError, match="Give one of them"):

        @udf(data_type=pa.int64())
        def both(x: int) -> Columns[Size]:
            return Size(x, x)

    with pytest.raises(InvalidUDFError, match=r"one or more columns, .*not \[\]"):

        @udf(output_schema=pa.schema([]))
        def none(x: int) -> dict[str, int]:
            return {}

    with pytest.raises(InvalidUDFError, match=r"more than upper and lower case, not \['a', 'A'\]"):

        @udf(output_schema=pa.schema([("a", pa.int64()), ("A", pa.int64())]))
        def alike(x: int) -> dict[str, int]:
            return {}

    with pytest.raises(InvalidUDFError, match="by their fields"):

        @udf(field_metadata={"a": "b"})
        def described(x: int) -> Columns[Size]:
            return Size(x, x)

    with pytest.raises(InvalidUDFError, match="returns several columns"):
        UnpackedUDF(udf(lambda x: x, data_type=pa.int64(), input_columns=["x"]))


def test_a_prefix_names_the_columns() -> None:
    @udf
    def size(x: int) -> Columns[Size]:
        return Size(x, x)

    assert list(UnpackedUDF(size).columns) == ["w", "h"]
    assert list(UnpackedUDF(size, prefix="img_").columns) == ["img_w", "img_h"]
    with pytest.raises(InvalidUDFError, match="must be a string"):
        UnpackedUDF(size, prefix=3)  # type: ignore[arg-type]

"""Arrow values in another type: unchanged, or refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lance.arrow import bfloat16_array

from arrow_types import columns
from geneva.errors import TypeMismatchError
from geneva.spark.source.types import arrow_schema, spark_schema
from geneva.storage.lance.casts import Unfit, cast, cast_batch, check_castable

CASES = columns()


@pytest.mark.parametrize("name", CASES)
def test_every_type_goes_to_sparks_and_back(name: str) -> None:
    array = CASES[name]
    schema = arrow_schema(spark_schema(pa.schema([("c", array.type)])))
    (there,) = cast_batch(pa.record_batch({"c": array}), schema, "t").columns
    assert there.type == schema.field("c").type
    there.validate(full=True)
    back = cast(there, array.type)
    back.validate(full=True)
    assert back.type == array.type
    assert back.to_pylist() == array.to_pylist()


@pytest.mark.parametrize("name", CASES)
def test_slices_are_cast_like_wholes(name: str) -> None:
    array = CASES[name]
    kind = arrow_schema(spark_schema(pa.schema([("c", array.type)]))).field("c").type
    whole = cast(array, kind)
    assert cast(array[1:], kind).equals(whole[1:])
    assert cast(array[1:1], kind).equals(whole[1:1])


@given(st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 255))))))
def test_lists_of_any_layout_become_one_another(rows: list[list[int | None] | None]) -> None:
    array = pa.array(rows, pa.list_(pa.uint8()))
    for kind in (pa.large_list(pa.int16()), pa.list_(pa.int64())):
        made = cast(array, kind)
        made.validate(full=True)
        assert made.type == kind
        assert made.to_pylist() == rows


@given(st.lists(st.one_of(st.none(), st.lists(st.integers(), min_size=2, max_size=2))))
def test_lists_become_fixed_size_lists(rows: list[list[int] | None]) -> None:
    rows = [None if row is None else [n % 100 for n in row] for row in rows]
    made = cast(pa.array(rows, pa.list_(pa.int64())), pa.list_(pa.float32(), 2))
    made.validate(full=True)
    assert made.to_pylist() == rows


@pytest.mark.parametrize(
    ("array", "kind", "why"),
    [
        (pa.array([300]), pa.int8(), "300"),
        (pa.array([-1]), pa.uint8(), "-1"),
        (pa.array([1.5]), pa.int64(), "1.5"),
        (pa.array([2**53 + 1]), pa.float64(), "9007199254740993"),
        (pa.array([1e300]), pa.float32(), "1e\\+300"),
        (pa.array([1e39], pa.float64()), bfloat16_array([1.0]).type, "too large"),
        (pa.array(["1"]), pa.int64(), "string can't be int64"),
        (pa.array([1]), pa.string(), "int64 can't be string"),
        (pa.array([True]), pa.int64(), "bool can't be int64"),
        (pa.array([0.1]), pa.decimal128(10, 2), "double can't be decimal"),
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us"), "would lose data"),
        (pa.array([1], pa.timestamp("us")), pa.timestamp("us", "UTC"), "TIMESTAMP_NTZ"),
        (pa.array([[1, 2, 3]]), pa.list_(pa.int64(), 2), "a list has 3 items"),
        (
            pa.array([[None]], pa.list_(pa.int8())),
            pa.list_(pa.field("x", pa.int8(), False)),
            "NULL",
        ),
        (pa.array([{"a": 1, "b": 2}]), pa.struct([("a", pa.int64())]), "no field 'b'"),
        (pa.array([b"abc"]), pa.binary(2), "widths must match"),
    ],
)
def test_what_would_change_is_refused(array: pa.Array, kind: pa.DataType, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        cast(array, kind)


def test_nanoseconds_can_be_had_as_a_number() -> None:
    array = pa.array([1_600_000_000_123_456_789, None], pa.timestamp("ns", "UTC"))
    assert cast(array, pa.int64()).to_pylist() == [1_600_000_000_123_456_789, None]


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.duration("us")])
def test_times_become_numbers_only_for_whoever_asks(kind: pa.DataType) -> None:
    number = pa.int64()
    pairs = [
        (kind, number),
        (pa.list_(kind), pa.list_(number, 2)),
        (pa.struct([("a", kind)]), pa.struct([("b", pa.string()), ("a", number)])),
        (pa.map_(pa.string(), kind), pa.map_(pa.string(), number)),
    ]
    for source, target in pairs:
        check_castable(source, target, units=True)
        check_castable(source, source)
        with pytest.raises(Unfit, match="can't be int64"):
            check_castable(source, target)


def test_an_error_names_the_column() -> None:
    batch = pa.record_batch({"a": pa.array([1]), "b": pa.array([300])})
    schema = pa.schema([("a", pa.int64()), ("b", pa.int8())])
    with pytest.raises(TypeMismatchError, match=r"Column 'b' of table 't': .*300"):
        cast_batch(batch, schema, "table 't'")


def test_a_missing_field_of_a_struct_is_null() -> None:
    kind = pa.struct([("b", pa.string()), ("a", pa.int32())])
    assert cast(pa.array([{"a": 1}, None]), kind).to_pylist() == [{"b": None, "a": 1}, None]
    strict = pa.struct([pa.field("b", pa.string(), nullable=False), pa.field("a", pa.int32())])
    with pytest.raises(Unfit, match="NULLs in field 'b'"):
        cast(pa.array([{"a": 1}, None]), strict)


def test_what_spark_has_no_type_for_is_refused_by_name() -> None:
    schema = pa.schema([("ok", pa.int8()), ("wide", pa.decimal256(60, 2))])
    with pytest.raises(TypeMismatchError, match=r"Column 'wide' .* at most 38 digits"):
        spark_schema(schema)

"""Applying a UDF to a batch: what goes in, what may come out, and what is said when it may not."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import gc
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.debug.error_store import ErrorHandlingConfig
from geneva.errors import UDFExecutionError, UDFOutputError
from geneva.execution.apply.batch import Applier, CellFailure
from geneva.execution.apply.forks import CallPool
from geneva.execution.apply.row_values import python_values
from geneva.udf.declare import UDF, udf
from geneva.udf.policy import Retry, skip_on_error

UTC = datetime.UTC


def batch_of(*values: Any, kind: pa.DataType | None = None) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(list(values), kind)})


def run(declared: UDF, batch: pa.RecordBatch, threads: int = 1) -> pa.Array:
    output = pa.field("out", declared.data_type, declared.nullable)
    with Applier(declared, output, threads) as applier:
        array = applier.apply(batch)
    assert type(array).__name__ != "ChunkedArray"
    assert array.type == output.type
    assert len(array) == batch.num_rows
    assert array.offset == 0
    array.validate(full=True)
    return array


def returning(value: Any, kind: pa.DataType, *, nullable: bool = True) -> UDF:
    """Make a scalar UDF that returns the same value for every row."""
    return udf(lambda x: value, data_type=kind, nullable=nullable)


def returning_batch(make: Callable[[int], Any], kind: pa.DataType, *, nullable: bool = True) -> UDF:
    """Make an array UDF whose result is made from the number of rows."""

    def whole(x: pa.Array) -> pa.Array:
        return make(len(x))

    return udf(whole, data_type=kind, nullable=nullable)


def failure_of(declared: UDF, batch: pa.RecordBatch, threads: int = 1) -> CellFailure:
    with pytest.raises((UDFExecutionError, UDFOutputError)) as caught:
        run(declared, batch, threads)
    failure = caught.value.failure  # type: ignore[union-attr]
    assert isinstance(failure, CellFailure)
    assert pickle.loads(pickle.dumps(caught.value)).failure == failure
    return failure


# ------------------------------------------------------------------------------ inputs


def test_a_scalar_function_is_called_once_a_row():
    seen: list[Any] = []

    def double(x: int | None) -> int | None:
        seen.append(x)
        return None if x is None else x * 2

    assert run(udf(double), batch_of(1, None, 3)).to_pylist() == [2, None, 6]
    assert seen == [1, None, 3]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float32())], ids=str)
def test_lists_of_numbers_arrive_as_numpy(kind: pa.DataType):
    rows = pa.array([[9.0], [1.0, 2.0], None, [], [1.0, None]], kind)[1:]
    values = python_values(rows)
    assert values[0].dtype == np.float32
    assert values[0].tolist() == [1.0, 2.0]
    assert not values[0].flags.writeable
    assert values[1] is None
    assert values[2].tolist() == []
    assert values[3] == [1.0, None]


@pytest.mark.parametrize("item", [pa.float16(), pa.int8(), pa.float64(), pa.bool_()], ids=str)
def test_fixed_size_lists_arrive_as_numpy(item: pa.DataType):
    rows = pa.array([[0, 0], [1, 0], None, [1, 1]], pa.list_(pa.int8(), 2))
    rows = rows.cast(pa.list_(item, 2))[1:]
    values = python_values(rows)
    assert values[0].dtype == item.to_pandas_dtype()
    assert [None if v is None else v.tolist() for v in values] == [[1, 0], None, [1, 1]]


def test_a_vector_is_not_copied():
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8, dtype="f4")), 4)
    values = python_values(vectors)
    assert values[0].__array_interface__["data"][0] == vectors.values.buffers()[1].address


def test_other_values_arrive_as_python_sees_them():
    when = datetime.datetime(2024, 5, 6, 7, tzinfo=UTC)
    struct = pa.array(
        [{"a": [1, 2], "b": "x"}, None], pa.struct({"a": pa.list_(pa.int64()), "b": pa.string()})
    )
    first, second = python_values(struct)
    assert first["a"].tolist() == [1, 2]
    assert (first["b"], second) == ("x", None)
    assert python_values(pa.array([when], pa.timestamp("us", "UTC"))) == [when]
    assert python_values(pa.array([b"a", None])) == [b"a", None]
    assert python_values(pa.array(["a", "b", "a"]).dictionary_encode()) == ["a", "b", "a"]
    assert python_values(pa.array([["a"], None])) == [["a"], None]
    assert python_values(pa.array([{"k": 1}], pa.map_(pa.string(), pa.int64()))) == [{"k": 1}]
    nested = pa.list_(pa.struct({"n": pa.int64()}))
    assert python_values(pa.array([[{"n": 1}]], nested)) == [[{"n": 1}]]


@given(
    st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4), max_size=8),
    st.integers(0, 4),
)
def test_rows_do_not_depend_on_their_neighbours(rows: list[Any], start: int):
    array = pa.array(rows, pa.list_(pa.int64()))[start:]
    for value, row in zip(python_values(array), rows[start:], strict=True):
        if row is None or None in row:
            assert value == row
        else:
            assert isinstance(value, np.ndarray)
            assert value.tolist() == row


def test_array_functions_get_arrays_in_order():
    calls: list[int] = []

    @udf(data_type=pa.int64())
    def minus(a: pa.Array, b: pa.Array) -> pa.Array:
        calls.append(len(a))
        return pa.compute.subtract(a, b)

    batch = pa.record_batch({"first": [5, 6], "second": [1, 2]})
    assert run(minus, batch).to_pylist() == [4, 4]
    assert calls == [2]


def test_record_batch_functions_get_the_batch():
    @udf(data_type=pa.int64(), input_columns=["a", "meta.b"])
    def total(rows: pa.RecordBatch) -> pa.Array:
        return pa.compute.add(rows["a"], rows["meta.b"])

    batch = pa.record_batch({"a": [1, 2], "meta.b": [10, 20]})
    assert run(total, batch).to_pylist() == [11, 22]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_rows_no_calls(threads: int):
    fails = udf(lambda x: pytest.fail("called"), data_type=pa.list_(pa.float16(), 3))
    assert run(fails, batch_of(kind=pa.int64()), threads).to_pylist() == []


# ------------------------------------------------------------------------------ outputs

KINDS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.null(), [None]),
    (pa.bool_(), [True, False]),
    *((k, [0, 1, 100]) for k in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *((k, [0, 1, 100]) for k in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())),
    *((k, [0.5, 1.0, float("inf")]) for k in (pa.float16(), pa.float32(), pa.float64())),
    *((k, ["", "abc", "é"]) for k in (pa.string(), pa.large_string(), pa.string_view())),
    *((k, [b"", b"abc"]) for k in (pa.binary(), pa.large_binary(), pa.binary_view())),
    (pa.binary(2), [b"ab"]),
    (pa.decimal128(10, 2), [decimal.Decimal("1.25")]),
    (pa.decimal256(50, 2), [decimal.Decimal("1.25")]),
    (pa.date32(), [datetime.date(2024, 1, 2)]),
    (pa.date64(), [datetime.date(2024, 1, 2)]),
    (pa.time32("s"), [datetime.time(1, 2, 3)]),
    (pa.time64("us"), [datetime.time(1, 2, 3, 4)]),
    (pa.timestamp("s"), [datetime.datetime(2024, 1, 2, 3)]),  # noqa: DTZ001
    (pa.timestamp("us"), [datetime.datetime(2024, 1, 2, 3, 4, 5, 6)]),  # noqa: DTZ001
    (pa.timestamp("us", "UTC"), [datetime.datetime(2024, 1, 2, tzinfo=UTC)]),
    (pa.timestamp("ns", "Europe/Berlin"), [pd.Timestamp("2024-01-02", tz="Europe/Berlin")]),
    (pa.duration("us"), [datetime.timedelta(seconds=1, microseconds=2)]),
    (pa.list_(pa.int64()), [[], [1, 2]]),
    (pa.list_(pa.string()), [[], ["a", None]]),
    (pa.large_list(pa.float32()), [[], [1.5, None]]),
    (pa.list_(pa.float32(), 2), [[1.0, 2.0]]),
    (pa.list_(pa.float16(), 2), [[1.0, 2.0]]),
    (pa.list_(pa.list_(pa.int32())), [[[1], []], []]),
    (pa.struct({"a": pa.int64(), "b": pa.string()}), [{"a": 1, "b": "x"}, {"a": None, "b": None}]),
    (pa.list_(pa.struct({"a": pa.int64()})), [[{"a": 1}, None], []]),
    (pa.struct({"v": pa.list_(pa.float32(), 2)}), [{"v": [1.0, 2.0]}]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1)], []]),
]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=lambda v: str(v)[:40])
def test_every_type_can_be_returned(kind: pa.DataType, values: list[Any]):
    values = [*values, None]
    remaining = iter(values)
    scalar = udf(lambda x: next(remaining), data_type=kind)
    batch = batch_of(*range(len(values)))
    expected = pa.array(values, kind)
    assert run(scalar, batch).equals(expected)
    assert run(returning_batch(lambda n: values, kind), batch).equals(expected)
    assert run(returning_batch(lambda n: expected, kind), batch).equals(expected)
    twice = pa.concat_arrays([expected, expected])
    sliced = returning_batch(lambda n: twice[n:], kind)
    assert run(sliced, batch).equals(expected)


def test_results_never_share_memory_with_what_was_returned():
    struct = pa.array([{"a": {"b": i}} for i in range(6)])
    result = run(returning_batch(lambda n: struct[3:], struct.type), batch_of(1, 2, 3))
    assert result.to_pylist() == [{"a": {"b": i}} for i in (3, 4, 5)]
    assert result.field("a").offset == result.field("a").field("b").offset == 0

    @udf(data_type=pa.int64())
    def same(x: pa.Array) -> pa.Array:
        return x

    batch = batch_of(1, 2)
    assert run(same, batch).buffers()[1].address != batch["x"].buffers()[1].address


def test_vectors_from_numpy():
    kind = pa.list_(pa.float32(), 3)
    doubles = udf(lambda x: None if x is None else np.full(3, x, "f8"), data_type=kind)
    assert run(doubles, batch_of(1.0, None, 2.0)).to_pylist() == [[1.0] * 3, None, [2.0] * 3]
    ragged = udf(lambda x: np.arange(x, dtype="i4"), data_type=pa.list_(pa.int64()))
    assert run(ragged, batch_of(0, 2, 1)).to_pylist() == [[], [0, 1], [0]]
    mixed = udf(lambda x: np.ones(2) if x else [0, 0], data_type=pa.list_(pa.float16(), 2))
    assert run(mixed, batch_of(0, 1)).to_pylist() == [[0, 0], [1, 1]]
    square = udf(lambda x: np.ones((2, 2)), data_type=pa.list_(pa.list_(pa.float32())))
    assert run(square, batch_of(0)).to_pylist() == [[[1, 1], [1, 1]]]


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Box:
    name: str
    corners: list[Point]


def test_extension_types():
    tensor = pa.fixed_shape_tensor(pa.float32(), [2, 2])
    made = run(returning(np.ones(4), tensor), batch_of(0, 1))
    assert made.storage.to_pylist() == [[1.0] * 4] * 2
    same = returning_batch(lambda n: np.ones((n, 4), "f4"), tensor)
    assert run(same, batch_of(0, 1)).equals(made)
    assert run(returning_batch(lambda n: made, tensor), batch_of(0, 1)).equals(made)
    assert python_values(made)[0].tolist() == [1.0] * 4


def test_records_of_every_make():
    point = pa.struct({"x": pa.int64(), "y": pa.float64()})
    box = pa.struct({"name": pa.string(), "corners": pa.list_(point)})
    expected = {"name": "b", "corners": [{"x": 1, "y": 2.0}]}
    assert run(returning(Box("b", [Point(1, 2.0)]), box), batch_of(0)).to_pylist() == [expected]
    assert run(returning(expected, box), batch_of(0)).to_pylist() == [expected]
    assert run(returning({"x": 1}, point), batch_of(0)).to_pylist() == [{"x": 1, "y": None}]
    numpy_inside = {"name": "b", "corners": [{"x": np.int64(1), "y": np.float32(2)}]}
    assert run(returning(numpy_inside, box), batch_of(0)).to_pylist() == [expected]


def test_numbers_that_fit_are_taken():
    assert run(returning(1, pa.float32()), batch_of(0)).to_pylist() == [1.0]
    assert run(returning(0.1, pa.float32()), batch_of(0)).to_pylist() == [np.float32(0.1)]
    assert run(returning(np.float64(2), pa.int64()), batch_of(0)).to_pylist() == [2]
    assert run(returning(np.int64(3), pa.int8()), batch_of(0)).to_pylist() == [3]
    assert run(returning(np.float32(1.5), pa.float16()), batch_of(0)).to_pylist() == [1.5]


SURPRISES: list[tuple[pa.DataType, Any, str]] = [
    (pa.int64(), "7", "str"),
    (pa.int64(), 1.5, "float"),
    (pa.int64(), np.float64(1.5), "float64"),
    (pa.int64(), float("nan"), "float"),
    (pa.int64(), True, "bool"),
    (pa.int64(), np.bool_(True), type(np.bool_(True)).__name__),
    (pa.int8(), 300, "int"),
    (pa.int64(), 2**70, "int"),
    (pa.uint8(), -1, "int"),
    (pa.float64(), True, "bool"),
    (pa.float64(), "1.0", "str"),
    (pa.string(), 1.5, "float"),
    (pa.string(), 1, "int"),
    (pa.bool_(), 1, "int"),
    (pa.date32(), datetime.datetime(2024, 1, 2, 3), "datetime"),  # noqa: DTZ001
    (pa.timestamp("s"), datetime.datetime(2024, 1, 1, 0, 0, 0, 5), "datetime"),  # noqa: DTZ001
    (pa.duration("us"), 2.5, "float"),
    (pa.decimal128(5, 2), decimal.Decimal("1.234"), "Decimal"),
    (pa.list_(pa.float32(), 3), [1.0, 2.0], "list"),
    (pa.list_(pa.float32(), 3), np.ones(2), "ndarray"),
    (pa.list_(pa.float32(), 3), 1.0, "float"),
    (pa.list_(pa.int64()), np.array([1.5]), "ndarray"),
    (pa.list_(pa.int64()), [np.float64(1.5)], "list"),
    (pa.list_(pa.int64()), np.array([True]), "ndarray"),
    (pa.list_(pa.string()), "abc", "str"),
    (pa.list_(pa.int64()), {1, 2}, "set"),
    (pa.struct({"a": pa.int64()}), {"a": 1, "b": 2}, "dict"),
    (pa.struct({"a": pa.int64()}), {"a": "x"}, "dict"),
    (pa.struct({"a": pa.int64()}), 3, "int"),
]


@pytest.mark.parametrize(("kind", "value", "value_type"), SURPRISES, ids=lambda v: str(v)[:30])
def test_surprises_are_refused_with_their_row(kind: pa.DataType, value: Any, value_type: str):
    good = {str(k): v[0] for k, v in KINDS}.get(str(kind))
    calls: list[int] = []

    def sometimes(x: int) -> Any:
        calls.append(x)
        return value if x == 2 else good

    failure = failure_of(udf(sometimes, data_type=kind), batch_of(0, 1, 2, 3))
    assert (failure.row, failure.exception_type) == (2, "UDFOutputError")
    assert value_type in failure.message
    assert str(kind) in failure.message
    assert calls == [0, 1, 2, 3]


def test_a_long_value_is_shown_short():
    failure = failure_of(returning("x" * 1000, pa.int64()), batch_of(0))
    assert len(failure.message) < 500
    assert "xxx..." in failure.message


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (pa.int64(), lambda n: pa.chunked_array([[1], list(range(n - 1))])),
        (pa.int64(), lambda n: pa.array(range(n), pa.int8())),
        (pa.large_string(), lambda n: pa.array(["a"] * n)),
        (pa.string(), lambda n: pa.array(["a"] * n).dictionary_encode()),
        (pa.dictionary(pa.int8(), pa.string()), lambda n: pa.array(["a"] * n)),
        (pa.float32(), lambda n: pa.nulls(n)),
        (pa.list_(pa.float32(), 2), lambda n: pa.array([[1.0, 2.0]] * n, pa.list_(pa.float32()))),
        (pa.list_(pa.float32()), lambda n: np.ones((n, 2), "f4")),
        (pa.list_(pa.float32(), 2), lambda n: np.ones((n, 2), "f4")),
        (pa.float64(), lambda n: np.ones(n)),
        (pa.string(), lambda n: np.array(["a"] * n)),
        (pa.string(), lambda n: np.array(["a"] * n, dtype=object)),
        (pa.int64(), lambda n: pd.Series(range(n))),
        (pa.string(), lambda n: pd.Series(["a"] * n)),
        (pa.int64(), lambda n: pa.record_batch({"only": list(range(n))})),
        (pa.int64(), lambda n: tuple(range(n))),
        (
            pa.struct({"a": pa.int64(), "b": pa.large_string()}),
            lambda n: pa.record_batch({"b": ["x"] * n, "a": list(range(n))}),
        ),
        (pa.struct({"a": pa.int64()}), lambda n: pa.table({"a": list(range(n))})),
        (pa.struct({"a": pa.int64()}), lambda n: pd.DataFrame({"a": list(range(n))})),
    ],
)
def test_batch_results_of_every_make(kind: pa.DataType, make: Callable[[int], Any]):
    result = run(returning_batch(make, kind), batch_of(*range(4)))
    assert len(result) == 4


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        (pa.int64(), lambda n: pa.array([1.5] * n), "array of double"),
        (pa.float32(), lambda n: pa.array([1.5] * n), "array of double"),
        (pa.float32(), lambda n: np.ones(n), "array of float64"),
        (pa.list_(pa.float32(), 3), lambda n: np.ones((n, 2), "f4"), "float32 and shape (4, 2)"),
        (
            pa.list_(pa.float32(), 3),
            lambda n: pa.array([[1.0]] * n, pa.list_(pa.float32())),
            "list",
        ),
        (pa.int64(), lambda n: pa.array(range(n + 1)), "5 values for a batch of 4 rows"),
        (pa.int64(), lambda n: [1], "1 value for a batch of 4 rows"),
        (pa.int64(), lambda n: 7, "returned an int: 7"),
        (pa.int64(), lambda n: None, "returned a NoneType"),
        (pa.int64(), lambda n: np.int64(7), "returned an int64"),
        (pa.int64(), lambda n: pa.record_batch({"a": [1] * n, "b": [1] * n}), "one column"),
        (pa.struct({"a": pa.int64()}), lambda n: pa.table({"a": [1], "b": [1]}), "fields"),
        (pa.int64(), lambda n: ["x"] * n, "str for row 0"),
        (pa.int64(), lambda n: pd.Series([1.5] * n), "array of double"),
    ],
)
def test_batch_results_that_do_not_fit(kind: pa.DataType, make: Any, words: str):
    failure = failure_of(returning_batch(make, kind), batch_of(*range(4)))
    assert failure.exception_type == "UDFOutputError"
    assert words in failure.message
    assert f"declared type: {kind}" in failure.message


@pytest.mark.parametrize(
    ("kind", "result", "words"),
    [
        (pa.float32(), np.ones(4), "a numpy array of float64, which the column"),
        (pa.float16(), np.ones(4, "f4"), "a numpy array of float32, which the column"),
        (pa.int32(), np.ones(4, "i8"), "a numpy array of int64, which the column"),
        (pa.list_(pa.float32()), np.ones((4, 3)), "a numpy array of float64 and shape (4, 3), "),
        (pa.list_(pa.float32(), 3), np.ones((4, 3)), "numpy array of float64 and shape (4, 3), "),
    ],
    ids=str,
)
def test_a_numpy_array_that_is_too_wide_is_told_in_words_of_numpy(
    kind: pa.DataType, result: Any, words: str
):
    said = failure_of(returning_batch(lambda n: result, kind), batch_of(*range(4))).message
    said, _, _ = said.partition(f"declared type: {kind}")
    items = kind.value_type if pa.types.is_nested(kind) else kind
    assert words in said
    assert f"convert the result with .astype(np.{items.to_pandas_dtype().__name__})" in said
    assert ".cast(" not in said
    assert "fixed_size_list" not in said


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        (pa.list_(pa.float32(), 3), np.ones((4, 2))),
        (pa.float32(), np.ones((4, 2))),
        (pa.timestamp("s"), np.ones(4)),
        (pa.int64(), np.array(["a"] * 4)),
        (pa.struct({"a": pa.int64()}), np.ones(4)),
    ],
    ids=str,
)
def test_a_numpy_array_of_another_shape_or_kind_is_not_to_be_converted(
    kind: pa.DataType, result: Any
):
    said = failure_of(returning_batch(lambda n: result, kind), batch_of(*range(4))).message
    assert "a numpy array of " in said
    assert ".astype(" not in said


def test_null_where_none_is_allowed():
    never = udf(lambda x: x, data_type=pa.int64(), nullable=False)
    assert run(never, batch_of(1, 2)).to_pylist() == [1, 2]
    failure = failure_of(never, batch_of(1, None))
    assert (failure.row, failure.exception_type) == (1, "UDFOutputError")
    assert "returned None for row 1" in failure.message
    assert "nullable=False" in failure.message
    lances = Applier(never, pa.field("out", pa.int64()))  # where every column may be NULL
    with pytest.raises(UDFOutputError, match="nullable=False"):
        lances.apply(batch_of(None, kind=pa.int64()))
    whole = returning_batch(lambda n: pa.nulls(n), pa.int64(), nullable=False)
    assert "nullable=False" in failure_of(whole, batch_of(1)).message
    inner = pa.struct([pa.field("a", pa.int64(), nullable=False)])
    assert run(returning(None, inner), batch_of(0)).to_pylist() == [None]
    assert "'value.a'" in failure_of(returning({"a": None}, inner), batch_of(0)).message
    items = pa.list_(pa.field("item", pa.int64(), nullable=False))
    assert "'value.item'" in failure_of(returning([None], items), batch_of(0)).message


# ------------------------------------------------------------------------------ failures


def _helper(x: int) -> float:
    return 1 / (x - 2)


@pytest.mark.parametrize("threads", [1, 4])
def test_an_exception_says_which_row(threads: int):
    calls: list[int] = []

    def divide(x: int) -> float:
        calls.append(x)
        return _helper(x)

    with pytest.raises(UDFExecutionError) as caught:
        run(udf(divide), batch_of(0, 1, 2, 3), threads)
    assert str(caught.value) == (
        "UDF 'divide' failed on row 2 of the batch: ZeroDivisionError: division by zero"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    failure = caught.value.failure  # type: ignore[attr-defined]
    assert failure.row == 2
    assert (failure.exception_type, failure.message) == ("ZeroDivisionError", "division by zero")
    assert "_helper" in failure.traceback
    assert 'apply.py"' not in failure.traceback.replace("test_apply.py", "")
    assert sorted(calls)[:3] == [0, 1, 2]
    assert len(calls) == len(set(calls))


def _cast_to_numbers(x: str) -> Any:
    return pa.array([x]).cast(pa.float32())[0]


def _cast_to_lists(x: pa.Array) -> pa.Array:
    return pa.array([1]).cast(pa.list_(pa.float32()))


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x: x + 1, TypeError),
        (_cast_to_numbers, pa.ArrowInvalid),
        (_cast_to_lists, pa.ArrowNotImplementedError),
    ],
    ids=["TypeError", "ArrowInvalid", "ArrowNotImplementedError"],
)
def test_a_type_error_shows_what_was_given(
    function: Callable[..., Any], error: type[BaseException]
) -> None:
    declared = udf(function, data_type=pa.float32(), name="my_udf")
    with pytest.raises(UDFExecutionError) as caught:
        run(declared, batch_of("a"))
    assert isinstance(caught.value.__cause__, error)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("UDF 'my_udf' failed with type error: ")
    assert lines[1:] == [
        "Input batch schema: x: string",
        "UDF expects input_columns: ['x']",
        "UDF output type: float",
    ]


def test_the_inputs_of_the_row_that_ends_the_job_are_kept():
    shown = failure_of(_raising(ValueError("no")), batch_of(0, 1, 2)).preview
    assert shown == "x=1"
    wrong = udf(lambda x: "text" if x == 2 else x, data_type=pa.int64())
    assert failure_of(wrong, batch_of(0, 1, 2)).preview == "x=2"
    hidden = ErrorHandlingConfig(store_inputs=False)
    quiet = udf(lambda x: 1 // x, data_type=pa.int64(), error_handling=hidden)
    assert failure_of(quiet, batch_of(0)).preview == ""
    again = udf(lambda x: 1 // x, data_type=pa.int64(), on_error=[Retry(max_attempts=3, backoff=0)])
    failure = failure_of(again, batch_of(1, 0))
    assert (failure.attempt, failure.preview) == (3, "x=0")


def _raising(error: BaseException) -> UDF:
    def raises(x: int) -> int:
        if x == 1:
            raise error
        return x

    return udf(raises)


@pytest.mark.parametrize("threads", [1, 2])
def test_exits_and_stops_are_failures_too(threads: int):
    for error in (SystemExit(3), StopIteration(), RuntimeError("x")):
        failure = failure_of(_raising(error), batch_of(0, 1, 2), threads)
        assert (failure.row, failure.exception_type) == (1, type(error).__name__)


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "error", [GeneratorExit("x"), asyncio.CancelledError("x"), Panic("x")], ids=repr
)
def test_whatever_else_it_raises_is_a_failure(error: BaseException, threads: int):
    failure = failure_of(_raising(error), batch_of(0, 1, 2), threads)
    assert (failure.row, failure.exception_type) == (1, "RuntimeError")
    assert failure.message == f"the function raised {type(error).__name__}: x"

    @udf(on_error=skip_on_error())
    def skipped(x: int) -> int:
        raise error

    assert run(skipped, batch_of(0, 1), threads).null_count == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_passes_through(threads: int):
    with pytest.raises(KeyboardInterrupt):
        run(_raising(KeyboardInterrupt()), batch_of(0, 1, 2), threads)


def test_a_batch_failure_has_no_row():
    @udf(data_type=pa.int64())
    def fails(x: pa.Array) -> pa.Array:
        raise ValueError("no")

    failure = failure_of(fails, batch_of(1, 2))
    assert (failure.row, failure.exception_type) == (None, "ValueError")


# ------------------------------------------------------------------------------ threads and state


def test_no_more_threads_than_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def noting(x: int) -> int:
        calls.append(x)
        return x

    begun: list[object] = []
    submit = CallPool.submit

    def counted(pool: CallPool, function: Any, *args: Any) -> Any:
        begun.append(function)
        return submit(pool, function, *args)

    monkeypatch.setattr(CallPool, "submit", counted)
    assert run(udf(noting), batch_of(1, 2), threads=32).to_pylist() == [1, 2]
    assert sorted(calls) == [1, 2]
    assert len(begun) == 2


def test_threads_keep_the_order_and_share_the_work():
    names: set[str] = set()
    calls: list[int] = []
    together = threading.Barrier(3, timeout=10)

    def slow(x: int) -> int:
        if x < 3:
            together.wait()  # passes only if three rows are under way at once
        names.add(threading.current_thread().name)
        calls.append(x)
        return x * 10

    batch = batch_of(*range(50))
    assert run(udf(slow), batch, threads=3).to_pylist() == [x * 10 for x in range(50)]
    assert sorted(calls) == list(range(50))
    assert all(name.startswith("geneva-udf") for name in names)


def test_a_failing_thread_stops_the_others_and_the_first_row_is_told():
    calls: list[int] = []

    def fails(x: int) -> int:
        calls.append(x)
        if x == 1:
            time.sleep(0.05)
        if x in (1, 2):
            raise ValueError(str(x))
        return x

    failure = failure_of(udf(fails), batch_of(*range(1000)), threads=3)
    assert (failure.row, failure.message) == (1, "1")
    assert len(calls) < 1000


def test_batch_functions_get_slices_in_threads():
    sizes: list[int] = []

    @udf(data_type=pa.int64())
    def double(x: pa.Array) -> list[Any]:
        sizes.append(len(x))
        return [v * 2 for v in x.to_pylist()]

    assert run(double, batch_of(*range(10)), threads=4).to_pylist() == [x * 2 for x in range(10)]
    assert sorted(sizes) == [1, 3, 3, 3]

    @udf(data_type=pa.int64())
    def wrong(x: pa.Array) -> list[Any]:
        return ["seven" if v == 7 else v for v in x.to_pylist()]

    assert failure_of(wrong, batch_of(*range(10)), threads=4).row == 7


def test_a_stateful_udf_is_made_once_and_closed():
    events: list[str] = []

    @udf(data_type=pa.int64())
    class Add:
        def __init__(self, n: int) -> None:
            events.append("init")
            self.n = n

        def setup(self) -> None:
            events.append("setup")

        def close(self) -> None:
            events.append("close")

        def __call__(self, x: int) -> int:
            return x + self.n

    declared = Add(5)
    with Applier(declared, pa.field("out", pa.int64()), threads=2) as applier:
        assert applier.apply(batch_of(1, 2)).to_pylist() == [6, 7]
        assert applier.apply(batch_of(3)).to_pylist() == [8]
    assert events == ["init", "setup", "close"]


def test_a_setup_that_fails_is_the_functions_failure():
    @udf(data_type=pa.int64())
    class Broken:
        def setup(self) -> None:
            raise OSError("no model file")

        def __call__(self, x: int) -> int:
            return x

    with pytest.raises(UDFExecutionError, match="could not be set up: OSError: no model file"):
        run(Broken(), batch_of(1))


def test_plain_rows_cost_few_calls_besides_the_functions_own():
    """What is done for each row, counted; benchmarks time it."""
    few, many = _calls_made(1_000), _calls_made(11_000)
    more = many - few
    assert more["<lambda>"] == 10_000
    assert more["taken"] == 10_000
    assert more.total() < 20_100, more.most_common(5)


def _calls_made(rows: int) -> Counter[str]:
    """How often each function, of Python or of C, is called for a batch of so many rows."""
    batch, found = batch_of(*range(rows)), Counter[str]()

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1
        elif event == "c_call":
            found[called.__name__] += 1

    with Applier(udf(lambda x: x * 2, data_type=pa.int64()), pa.field("out", pa.int64())) as a:
        a.apply(batch)
        gc.collect()
        gc.disable()  # what other tests have left would be counted: py4j's objects call the JVM
        sys.setprofile(note)
        try:
            a.apply(batch)
        finally:
            sys.setprofile(None)
            gc.enable()
    return found

"""Records that functions return, as one array per column: what is taken, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypedDict

import pandas as pd
import pyarrow as pa
import pytest

from geneva import Columns, Skip, udf
from geneva.errors import UDFOutputError
from geneva.execution.apply.batch import Applied, Applier

BATCH = pa.record_batch({"x": pa.array([1, 2, 3])})
SCHEMA = pa.schema([("w", pa.int64()), ("h", pa.float32())])


class Size(NamedTuple):
    w: int
    h: float


@dataclass
class Box:
    w: int
    h: float


class Loose(TypedDict):
    w: int
    h: NotRequired[float]


def applied(
    function: Callable[..., Any], fields: tuple[str, ...] = ("w", "h"), **options: Any
) -> Applied:
    declared = function if hasattr(function, "unpacks") else udf(function, **options)
    output = pa.field("w, h", declared.data_type)
    with Applier(declared, output, fields=fields) as applier:
        return applier.run(BATCH)


def values(found: Applied) -> list[list[Any]]:
    return [array.to_pylist() for array in found.arrays]


def test_records_of_every_make() -> None:
    def tuples(x: int) -> Columns[Size]:
        return Size(x, x / 2)

    def classes(x: int) -> Columns[Box]:
        return Box(x, x / 2)

    def dicts(x: int) -> Columns[Loose]:
        return {"w": x, "h": x / 2}

    async def awaited(x: int) -> Columns[Size]:
        await asyncio.sleep(0)
        return Size(x, x / 2)

    for function in (tuples, classes, dicts, awaited):
        assert values(applied(function)) == [[1, 2, 3], [0.5, 1.0, 1.5]]
    assert values(applied(tuples, ("h",))) == [[0.5, 1.0, 1.5]], "just what is wanted"
    assert values(applied(tuples, ("h", "w"))) == [[0.5, 1.0, 1.5], [1, 2, 3]]


def test_no_record_is_null_in_every_column() -> None:
    def some(x: int) -> Columns[Size] | None:
        return None if x == 2 else Size(x, 0.0)

    assert values(applied(some)) == [[1, None, 3], [0.0, None, 0.0]]


def test_what_may_be_left_out_is_null() -> None:
    def loose(x: int) -> Columns[Loose]:
        return {"w": x} if x == 1 else {"w": x, "h": 1.0}

    assert values(applied(loose)) == [[1, 2, 3], [None, 1.0, 1.0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda x, h: pa.record_batch({"h": h, "w": x}),
        lambda x, h: pa.table({"w": x, "h": h}),
        lambda x, h: {"w": x, "h": h.to_numpy()},
        lambda x, h: pd.DataFrame({"w": x.to_numpy(), "h": h.to_numpy()}),
        lambda x, h: [{"w": a, "h": b} for a, b in zip(x.to_pylist(), h.to_pylist(), strict=True)],
        lambda x, h: pa.StructArray.from_arrays([x, h], ["w", "h"]),
    ],
)
def test_batches_of_every_make(make: Callable[..., Any]) -> None:
    def sizes(x: pa.Array) -> Any:
        return make(x, pa.array([0.5, 1.0, 1.5], pa.float32()))

    found = applied(sizes, output_schema=SCHEMA)
    assert values(found) == [[1, 2, 3], [0.5, 1.0, 1.5]]
    assert [array.type for array in found.arrays] == SCHEMA.types


def two_of_a_name(columns: list[pa.Array], names: list[str]) -> pa.Table:
    return pa.Table.from_arrays(columns, names)


@pytest.mark.parametrize(
    "make",
    [
        pa.RecordBatch.from_arrays,
        two_of_a_name,
        lambda columns, names: (
            two_of_a_name(columns, ["w", "h", "z"]).to_pandas().set_axis(names, axis=1)
        ),
    ],
)
@pytest.mark.parametrize("names", [["w", "w", "h"], ["w", "h", "w"]])
def test_two_columns_of_one_name_are_refused(make: Callable[..., Any], names: list[str]) -> None:
    def sizes(x: pa.Array) -> Any:
        return make([x, pa.array([4, 5, 6]), pa.array([7, 8, 9])], names)

    with pytest.raises(UDFOutputError, match="'w' is there 2 times"):
        applied(sizes, output_schema=SCHEMA)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"w": 1}, "for row 1 without the field 'h'"),
        ({"w": 1, "h": 2.0, "z": 3}, r"row 1.*fields \['z'\], which the struct lacks"),
        ({"w": "one", "h": 2.0}, "row 1.*its field 'w': a str"),
        ({"w": 2**70, "h": 2.0}, "row 1.*its field 'w'"),
        ((1, 2.0, 3), "row 1.*not a record"),
        (7, "row 1.*not a record"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_row_and_field(bad: Any, message: str) -> None:
    def sizes(x: int) -> Any:
        return bad if x == 2 else {"w": x, "h": 1.0}

    with pytest.raises(UDFOutputError, match=message):
        applied(sizes, output_schema=SCHEMA)
    found = applied(sizes, output_schema=SCHEMA, on_error=[Skip(UDFOutputError)])
    assert values(found) == [[1, None, 3], [1.0, None, 1.0]]
    assert [failure.row for failure in found.failures] == [1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"w": [1, 2, 3]}, "'h' is missing"),
        ({"w": [1, 2, 3], "h": [1.0] * 3, "z": [1] * 3}, "'z' is none of"),
        ({"w": ["a", "b", "c"], "h": [1.0] * 3}, r"\(column 'w'\)"),
        ({"w": [1, 2], "h": [1.0] * 3}, "different lengths"),
        ({"w": [1, 2], "h": [1.0] * 2}, "returned 2 values for a batch of 3 rows"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_column(
    columns: dict[str, Any], message: str
) -> None:
    def sizes(x: pa.Array) -> Any:
        return {name: pa.array(items) for name, items in columns.items()}

    with pytest.raises(UDFOutputError, match=message):
        applied(sizes, output_schema=pa.schema([("w", pa.int64()), ("h", pa.float64())]))


def test_a_field_that_may_not_be_null() -> None:
    schema = pa.schema([pa.field("w", pa.int64(), nullable=False), ("h", pa.float64())])

    def sizes(x: int) -> Any:
        return {"w": None if x == 3 else x, "h": None}

    with pytest.raises(UDFOutputError, match="None for field 'w' of row 2, declared not null"):
        applied(sizes, output_schema=schema)
    assert values(applied(lambda x: None, input_columns=["x"], output_schema=schema)) == [
        [None] * 3,
        [None] * 3,
    ]

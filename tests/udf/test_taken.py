"""A function may return the same object each time: each row has what it held then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import Connection, udf
from geneva.errors import UDFExecutionError
from geneva.on_error import skip_on_error
from geneva.udf.taken import taken


@dataclass
class Point:
    x: list[int]


SHAPES: dict[str, tuple[Any, Any, pa.DataType, Any]] = {
    "list": (lambda: [0], lambda v, x: v.__setitem__(0, x), pa.list_(pa.int64()), lambda x: [x]),
    "inner list": (
        lambda: [[0]],
        lambda v, x: v[0].__setitem__(0, x),
        pa.list_(pa.list_(pa.int64())),
        lambda x: [[x]],
    ),
    "dict": (
        lambda: {"a": 0},
        lambda v, x: v.update(a=x),
        pa.struct([("a", pa.int64())]),
        lambda x: {"a": x},
    ),
    "array": (
        lambda: np.zeros(2, np.int64),
        lambda v, x: v.fill(x),
        pa.list_(pa.int64()),
        lambda x: [x, x],
    ),
    "number": (
        lambda: np.zeros((), np.float64),
        lambda v, x: v.fill(x),
        pa.float64(),
        lambda x: float(x),
    ),
    "view of a number": (
        lambda: np.zeros(1, np.int64),
        lambda v, x: v.fill(x),
        pa.list_(pa.int64(), 1),
        lambda x: [x],
    ),
    "bytearray": (
        lambda: bytearray(1),
        lambda v, x: v.__setitem__(0, x),
        pa.binary(),
        lambda x: bytes([x]),
    ),
    "record": (
        lambda: Point([0]),
        lambda v, x: v.x.__setitem__(0, x),
        pa.struct([("x", pa.list_(pa.int64()))]),
        lambda x: {"x": [x]},
    ),
}


@pytest.mark.parametrize("how", ["by row", "threads", "async", "generator"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_is_taken_before_the_next_call(local_db: Connection, shape: str, how: str) -> None:
    make, change, kind, wanted = SHAPES[shape]
    value = make()

    def by_row(x: int) -> Any:
        change(value, x)
        return value

    async def by_await(x: int) -> Any:
        await asyncio.sleep(0)
        return by_row(x)

    def by_batch(x: pa.Array) -> Iterator[Any]:
        return (by_row(each) for each in x.to_pylist())

    functions = {"by row": by_row, "threads": by_row, "async": by_await, "generator": by_batch}
    function = udf(functions[how], data_type=kind, input_columns=["x"])
    table = local_db.create_table("t", pa.table({"x": range(20)}))
    table.add_columns({"y": function})
    # More threads would write to the one object at once, which is nobody's to mend.
    options = {"intra_applier_concurrency": 1} if how == "threads" else {}
    table.backfill("y", **options)
    assert table.to_arrow()["y"].to_pylist() == [wanted(x) for x in range(20)]


def test_only_what_can_change_is_copied() -> None:
    for value in (None, 1, 2.5, "text", b"bytes", np.float32(1.5), (1, "a")):
        assert taken(value) is value
    memory = bytearray(b"abcd")
    view = taken(memoryview(memory).cast("H"))
    memory[:] = b"xxxx"
    assert (bytes(view), view.format) == (b"abcd", "H")
    iterator = iter([1, 2])
    assert taken(iterator) is iterator or list(taken(iterator)) == [1, 2]


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Wordless(), "can't be shown: ValueError"),
        (FileNotFoundError("no file caf\udce9.txt"), "caf\\udce9.txt"),
    ],
)
def test_an_error_is_kept_whatever_its_message_is(
    local_db: Connection, error: Exception, said: str
) -> None:
    def failing(x: int) -> int:
        if x == 3:
            raise error
        return x

    def declared(**options: Any) -> Any:
        return udf(failing, data_type=pa.int64(), input_columns=["x"], **options)

    table = local_db.create_table("t", pa.table({"x": range(6)}))
    table.add_columns({"skipped": declared(on_error=skip_on_error())})
    table.backfill("skipped")
    assert table.to_arrow()["skipped"].to_pylist() == [0, 1, 2, None, 4, 5]
    (record,) = table.get_errors()
    assert said in record.message
    table.add_columns({"failed": declared()})
    with pytest.raises(UDFExecutionError, match="row 3"):
        table.backfill("failed")

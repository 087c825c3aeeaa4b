"""Sources whose columns got another type, or hold what Lance's writer chokes on."""

from __future__ import annotations

from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import Connection
from geneva.errors import SQLExecutionError
from support import Calls, counted
from view_support import STABLE, values


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def one(x: Any) -> int:
    return 1 if x is None else len(str(x))


@pytest.mark.parametrize(
    ("before", "after", "data"),
    [
        (pa.int32(), pa.int64(), [1, -2, None, 2**31 - 1]),
        slow(pa.uint8(), pa.int32(), [1, 2, None, 255]),
        slow(pa.float32(), pa.float64(), [0.5, -0.0, None, float("nan")]),
        slow(pa.string(), pa.large_string(), ["a", "", None, "b" * 50]),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), [[1], [], None, [2, None]]),
    ],
    ids=str,
)
def test_a_widened_column_costs_nothing(
    local_db: Connection, calls: Calls, before: pa.DataType, after: pa.DataType, data: list[Any]
) -> None:
    rows = pa.table({"id": range(4), "x": pa.array(data, before)})
    source = local_db.create_table("src", rows, storage_options=STABLE)
    query = source.query().select(["id", "x"])
    view = local_db.create_materialized_view(
        "v", query.add_column({"t": counted(calls, one, data_type=pa.int64(), version="1")})
    )
    view.refresh()
    calls.clear()
    kept = values(view)
    lance.dataset(source.ref.uri).alter_columns({"path": "x", "data_type": after})
    assert view.plan_refresh().rows_to_compute == 0
    view.refresh()
    assert calls.count == 0
    assert values(view) == kept
    source.checkout_latest()
    source.delete("id = 0")
    view.refresh()
    assert calls.count == 0
    assert view.plan_refresh().is_empty


def test_a_value_that_the_view_can_not_hold_is_named(local_db: Connection, calls: Calls) -> None:
    rows = pa.table({"id": range(4), "x": pa.array(range(4), pa.int32())})
    source = local_db.create_table("src", rows, storage_options=STABLE)
    view = local_db.create_materialized_view("v", source.query().select(["id", "x"]))
    view.refresh()
    lance.dataset(source.ref.uri).alter_columns({"path": "x", "data_type": pa.int64()})
    source.checkout_latest()
    source.add(pa.table({"id": [4, 5], "x": [4, 2**40]}))
    with pytest.raises(SQLExecutionError, match=r"'v', column 'x'.*is int64 by now.*view's int32"):
        view.refresh()
    source.delete("id = 5")
    view.refresh()
    assert values(view, "x") == {i: i for i in range(5)}


@pytest.mark.parametrize("options", [{}, {"checkpoint_size": 1}], ids=["", "checkpoints"])
def test_structs_in_structs_are_written_in_slices(
    local_db: Connection, calls: Calls, options: dict[str, int]
) -> None:
    kind = pa.struct({"a": pa.struct({"b": pa.list_(pa.int64())})})
    data = [{"a": {"b": [1]}}, None, {"a": None}, {"a": {"b": None}}, {"a": {"b": []}}]
    rows = pa.table({"id": range(5), "s": pa.array(data, kind)})
    source = local_db.create_table("src", rows, storage_options=STABLE)

    def same(s: Any) -> Any:
        return s

    def slices(s: pa.Array) -> pa.Array:
        return pa.concat_arrays([s[:1], s])[1:]

    query = source.query().select(["id", "s"])
    for name, function in (("t", same), ("u", slices)):
        query = query.add_column({name: counted(calls, function, data_type=kind, version="1")})
    view = local_db.create_materialized_view("v", query)
    view.refresh(**options)
    for name in ("s", "t", "u"):
        assert view.to_arrow()[name].to_pylist() == data

"""Calls that cost the same for one row and for a thousand."""

from __future__ import annotations

import time

import pyarrow as pa
import pyarrow.compute as pc

from geneva import Connection
from support import Calls, counted


def test_a_call_with_a_fixed_cost_gets_many_rows(local_db: Connection, calls: Calls) -> None:
    def double(x: pa.Array) -> pa.Array:
        time.sleep(0.2)
        return pc.multiply(x, 2)

    table = local_db.create_table("t", pa.table({"x": pa.array(range(1_000), pa.int64())}))
    table.add_columns({"y": counted(calls, double, data_type=pa.int64())})
    table.backfill("y")
    assert table.to_arrow()["y"].to_pylist() == [2 * x for x in range(1_000)]
    assert calls.count <= 20, "not one call per row, and not many more than tasks"

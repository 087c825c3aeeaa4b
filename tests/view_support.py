"""A source table, a view of it, and its values: what tests of views share."""

from __future__ import annotations

from typing import Any

import lance
import pyarrow as pa

from geneva import Connection, Table
from geneva.view import MaterializedView
from support import Calls, tripled

STABLE = {"new_table_enable_stable_row_ids": "true"}


def numbers(start: int, stop: int) -> pa.Table:
    ids = range(start, stop)
    return pa.table({"id": pa.array(ids, pa.int64()), "name": [f"n{i}" for i in ids]})


def make_source(db: Connection, rows: int = 10, name: str = "src", **options: Any) -> Table:
    return db.create_table(name, numbers(0, rows), storage_options={**STABLE, **options})


def make_view(db: Connection, source: Table, calls: Calls, name: str = "v") -> MaterializedView:
    query = source.query().where("id % 2 = 0").select(["id"]).add_column({"t": tripled(calls)})
    return db.create_materialized_view(name, query)


def values(view: Table, column: str = "t") -> dict[int, Any]:
    table = view.to_arrow()
    pairs = zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True)
    return dict(sorted(pairs))


def fragment_rows(view: Table) -> list[int]:
    return [f.count_rows() for f in lance.dataset(view.ref.uri).get_fragments()]

"""Rows of several fragments whose dictionaries have no room for the values of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from geneva import Connection, Table
from geneva.errors import UDFOutputError
from geneva.storage.lance.dataset import open_dataset
from geneva.storage.lance.scans import Scan, ScanPart, columns_of, scan_part
from support import Calls, counted, slow
from view_support import STABLE

NARROW = pa.dictionary(pa.int8(), pa.string())
SHAPES: dict[str, tuple[pa.DataType, Callable[[str], Any]]] = {
    "plain": (NARROW, lambda v: v),
    "list": (pa.list_(NARROW), lambda v: [v]),
    "struct": (pa.struct({"d": NARROW}), lambda v: {"d": v}),
}
FRAGMENTS, ROWS = 4, 100


def make_source(db: Connection, shape: str = "plain", fragments: int = FRAGMENTS) -> Table:
    """Each fragment has values of its own: fewer than there is room for, unlike any two."""
    kind, wrap = SHAPES[shape]
    parts = [
        pa.table(
            {
                "id": pa.array(range(ROWS * i, ROWS * (i + 1)), pa.int64()),
                "d": pa.array([wrap(f"{i}-{j}") for j in range(ROWS)], kind),
            }
        )
        for i in range(fragments)
    ]
    table = db.create_table("src", parts[0], storage_options=STABLE)
    for part in parts[1:]:
        table.add(part)
    return table


EXPECTED = [f"{i}-{j}" for i in range(FRAGMENTS) for j in range(ROWS)]


def strings(d: pa.Array) -> pa.Array:
    """The strings of a column of any shape."""

    def inside(value: Any) -> str:
        found = value["d"] if isinstance(value, dict) else value
        return str(found[0] if isinstance(found, list) else found)

    return pa.array([inside(value) for value in d.to_pylist()])


@pytest.mark.parametrize(
    ("shape", "batch_size"),
    [("plain", None), ("struct", 300), slow("plain", 300), slow("list", 300)],
)
def test_functions_of_a_view_get_them(
    local_db: Connection, calls: Calls, shape: str, batch_size: int | None
) -> None:
    source = make_source(local_db, shape)
    function = counted(calls, strings, data_type=pa.string(), batch_size=batch_size)
    query = source.query().select(["id"]).add_column({"x": function})
    view = local_db.create_materialized_view("v", query)
    view.refresh()
    assert view.to_arrow().sort_by("id")["x"].to_pylist() == EXPECTED
    batches = sorted(calls.batches)
    assert sum(batches) == FRAGMENTS * ROWS
    assert batch_size is None or batches == [100, 300]
    for moved in ("id < 100", "id between 300 and 399"):  # in one statement Lance can't
        source.update(where=moved, values_sql={"id": "id + 1000"})
    view.refresh()
    assert sorted(calls.batches) == batches, "the function's input is the same as it was"
    assert sorted(view.to_arrow()["id"].to_pylist()) == sorted(source.to_arrow()["id"].to_pylist())


def test_a_view_that_can_not_hold_them_says_so(local_db: Connection) -> None:
    source = make_source(local_db)
    view = local_db.create_materialized_view("v", source.query().select(["id", "d"]))
    with pytest.raises(UDFOutputError, match=r"In column 'd' .* more than the 128 different"):
        view.refresh()
    query = source.query().select({"id": "id", "d": "cast(d as string)"})
    as_told = local_db.create_materialized_view("w", query)
    as_told.refresh()
    assert as_told.to_arrow().sort_by("id")["d"].to_pylist() == EXPECTED


def test_a_query_gives_them(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db)
    query = source.query().select(["id", "d"])
    found = query.add_column({"x": counted(calls, strings, data_type=pa.string())}).to_arrow()
    assert found.schema.field("d").type == NARROW
    assert found["d"].to_pylist() == found["x"].to_pylist() == EXPECTED
    assert len(calls.taken()) == FRAGMENTS * ROWS


def test_a_scan_for_few_of_many_rows_gives_them(local_db: Connection) -> None:
    dataset = open_dataset(make_source(local_db, fragments=8).ref)
    scan = Scan(columns_of(dataset.schema, ["id", "d"]), where="id % 11 < 2", row_id=True)
    batches = list(scan_part(dataset, scan, ScanPart(tuple(range(8)))))
    rows = [row for batch in batches for row in batch.to_pylist()]
    wanted = [i for i in range(8 * ROWS) if i % 11 < 2]
    assert rows == [{"id": i, "d": f"{i // 100}-{i % 100}", "_rowid": i} for i in wanted]

"""Others undo what a refresh has done, while it goes on: the next one finds that out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from geneva import UDF, Connection, Table, udf
from geneva.execution.runner import InProcessRunner
from support import connect

STABLE = {"new_table_enable_stable_row_ids": "true"}


def doubled(view: str, order: str) -> UDF:
    """A function that, when it is called, does once to the view what a file asks for."""

    @udf(data_type=pa.int64(), input_columns=["x"])
    def doubled(x: int) -> int:
        if Path(order).exists():
            word, number = Path(order).read_text().split()
            Path(order).unlink()
            if word == "restore":
                lance.dataset(view, version=int(number)).restore()
            else:
                lance.dataset(view).delete(f"__source_row_id = {number}")
        return 2 * x

    return doubled


def make_view(db: Connection, order: Path) -> tuple[Table, Any]:
    data = pa.table({"id": range(1, 7), "x": range(10, 70, 10)})
    source = db.create_table("src", data, storage_options=STABLE)
    function = doubled(f"{db.uri}/v.lance", str(order))
    query = source.query().select(["id"]).add_column({"y": function})
    return source, db.create_materialized_view("v", query)


def rows(view: Any) -> list[tuple[int, int]]:
    return sorted((row["id"], row["y"]) for row in view.to_arrow().to_pylist())


def test_a_view_that_is_restored_to_where_its_refresh_began(
    local_db: Connection, tmp_path: Path
) -> None:
    order = tmp_path / "order"
    source, view = make_view(local_db, order)
    view.refresh()
    source.delete("id = 2")
    source.update(where="id = 3", values={"x": 33})
    began = int(lance.dataset(view.ref.uri).version) + 1
    order.write_text(f"restore {began}")
    view.refresh()
    assert not order.exists()
    view.refresh()
    assert view.plan_refresh().up_to_date
    assert rows(view) == [(1, 20), (3, 66), (4, 80), (5, 100), (6, 120)]


def test_a_job_id_that_comes_again_on_a_database_from_a_backup(tmp_path: Path) -> None:
    """What the first job of the id committed says nothing of the second one's versions."""
    folder, backup, order = tmp_path / "db", tmp_path / "backup", tmp_path / "order"
    _, view = make_view(connect(folder, InProcessRunner), order)
    shutil.copytree(folder, backup)
    view.refresh(job_id="nightly")
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    view = connect(folder, InProcessRunner).open_table("v")
    order.write_text("delete 2")
    view.refresh(job_id="nightly")
    assert not order.exists()
    view.refresh()
    assert rows(view) == [(i, 20 * i) for i in range(1, 7)]

"""A view or table that is dropped while it is computed: it stays dropped, and its name is free."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import wait_for
from geneva import UDF, Connection, JobStatus, Table, udf
from geneva.errors import GenevaError, TableNotFoundError
from geneva.execution.backfill.committer import publish_columns
from geneva.execution.runner import InProcessRunner
from geneva.storage.lance.dataset import open_pinned
from support import Calls, connect, make_table, publishing, tripled
from view_support import make_source, make_view, values


def dropping(db: Connection, name: str) -> Any:
    """Publish after somebody has dropped the table; groups of a view publish side by side."""
    lock, dropped = threading.Lock(), []

    def publish(*args: Any) -> Any:
        with lock:
            if not dropped:
                db.drop_table(name)
                dropped.append(name)
        return publish_columns(*args)

    return publishing(db, publish)


def test_a_view_that_was_dropped_stays_dropped(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls)
    with (
        dropping(local_db, "v"),
        pytest.raises(GenevaError, match="dropped while a job was at work on it"),
    ):
        view.refresh()
    assert local_db.list_jobs()[0].status is JobStatus.FAILED
    assert local_db.list_materialized_views() == []
    calls.clear()
    again = make_view(local_db, source, calls)
    again.refresh()
    assert values(again) == {i: i * 3 for i in range(0, 10, 2)}
    assert calls.taken() == [0, 2, 4, 6, 8]


def test_what_is_left_of_one_can_be_dropped(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db)
    rest = Path(local_db.uri) / "v.lance" / "data"
    rest.mkdir(parents=True)
    (rest / "geneva-part.lance").write_bytes(b"")
    assert local_db.list_materialized_views() == []
    local_db.drop_materialized_view("v")
    assert not rest.exists()
    rest.mkdir(parents=True)
    view = make_view(local_db, source, calls)
    view.refresh()
    assert len(view) == 5


def test_a_table_that_was_dropped_stays_dropped(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [4])
    table.add_columns({"x": tripled(calls)})
    with (
        dropping(local_db, "t"),
        pytest.raises(GenevaError, match="dropped while a job was at work on it"),
    ):
        table.backfill("x")
    made: Table = make_table(local_db, [3])
    assert made.schema.names == ["id"]
    assert made.version == 1


def deleting(path: Path, at: int) -> UDF:
    """Three times `id`; a row deletes a folder by hand, as often as workers make parts of it."""

    def delete(id: int) -> int:
        while id == at and path.exists():
            shutil.rmtree(path, ignore_errors=True)
        return id * 3

    return udf(delete)


def check_last_job(db: Connection, error: TableNotFoundError) -> None:
    job = db.list_jobs()[0]
    assert (job.job_id, job.status) == (error.job_id, JobStatus.FAILED)
    assert job.error == f"TableNotFoundError: {error}"


@pytest.mark.parametrize("at", [0, 7])
def test_a_table_whose_folder_is_deleted_by_hand_was_dropped(db: Connection, at: int) -> None:
    table = make_table(db, [8, 4])
    table.add_columns({"x": deleting(Path(db.uri) / "t.lance", at)})
    with pytest.raises(TableNotFoundError, match=r"'t' .*dropped") as raised:
        table.backfill("x", checkpoint_size=1)  # so that files are open by then
    check_last_job(db, raised.value)


def test_so_it_is_for_a_task_that_comes_later(tmp_path: Path) -> None:
    folder, noticed = tmp_path / "db" / "t.lance", tmp_path / "noticed"

    class Runner(InProcessRunner):
        def _call(self, function: Callable[[Any], str], item: Any) -> str:
            if item.parts[0].fragment_id == 0:
                return super()._call(function, item)
            wait_for(lambda: not folder.exists(), "the deletion")
            open_pinned.cache_clear()  # as in a process of its own
            try:
                return super()._call(function, item)
            finally:
                noticed.touch()

    @udf
    def delete(id: int) -> int:
        shutil.rmtree(folder, ignore_errors=True)
        wait_for(noticed.exists, "the other task")
        return id * 3

    db = connect(tmp_path / "db", lambda: Runner(2))
    table = make_table(db, [1, 1])
    table.add_columns({"x": delete})
    with pytest.raises(TableNotFoundError, match=r"'t' .*dropped") as raised:
        table.backfill("x")
    check_last_job(db, raised.value)


@pytest.mark.parametrize("name", ["src", "v"])
def test_so_was_a_view_and_its_source(db: Connection, name: str) -> None:
    function = deleting(Path(db.uri) / f"{name}.lance", at=4)
    query = make_source(db).query().select(["id"]).add_column({"t": function})
    view = db.create_materialized_view("v", query)
    with pytest.raises(TableNotFoundError, match=f"'{name}'") as raised:
        view.refresh()
    check_last_job(db, raised.value)

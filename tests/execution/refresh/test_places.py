"""Where the source of a view is: beside it when the database moves, in a namespace, elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from geneva import Connection
from geneva.execution.runner import InProcessRunner
from support import Calls, connect, counted, triple, tripled, uncommitted
from view_support import STABLE, make_source, make_view, numbers, values


def moved(db: Connection, to: Path, calls: Calls, *, copied: bool) -> Connection:
    (shutil.copytree if copied else shutil.move)(db.uri, to)
    return connect(to, InProcessRunner)


@pytest.mark.parametrize("copied", [True, False])
def test_views_of_a_moved_database_follow_its_own_tables(
    local_db: Connection, calls: Calls, tmp_path: Path, copied: bool
) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls)
    view.refresh()
    local_db.create_materialized_view("top", view.query().select(["id"])).refresh()
    local_db.create_materialized_view("broken", source.query().where("id > 7"))
    calls.clear()
    there = moved(local_db, tmp_path / "other place", calls, copied=copied)
    assert there.open_table("v").plan_refresh().is_empty  # type: ignore[attr-defined]
    there.open_table("src").add(numbers(10, 14))
    if copied:
        local_db.open_table("src").add(numbers(100, 120))
    for name in ("v", "top", "broken"):
        there.open_table(name).refresh()  # type: ignore[attr-defined]
    assert calls.taken() == [10, 12]
    assert sorted(values(there.open_table("v"))) == [0, 2, 4, 6, 8, 10, 12]
    assert len(there.open_table("top")) == 7
    assert sorted(values(there.open_table("broken"), "name")) == [8, 9, 10, 11, 12, 13]


def test_a_refresh_that_was_cut_off_goes_on_elsewhere(
    local_db: Connection, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of the version that was never reached is known for what it is."""
    source = make_source(local_db, rows=4)
    view = local_db.create_materialized_view(
        "v", source.query().select(["id"]).add_column({"t": (tripled(calls), ["id"])})
    )
    view.refresh()
    source.update(where="id = 2", values={"id": 20})
    with uncommitted(monkeypatch):
        view.refresh()
    there = moved(local_db, tmp_path / "moved", calls, copied=False)
    there.open_table("src").update(where="id = 20", values={"id": 2})
    calls.clear()
    again = there.open_table("v")
    again.refresh()  # type: ignore[attr-defined]
    assert values(again) == {0: 0, 1: 3, 2: 6, 3: 9}


def test_a_source_elsewhere_is_stored_whole(
    local_db: Connection, calls: Calls, tmp_path: Path
) -> None:
    source = make_source(local_db)
    other = connect(tmp_path / "elsewhere", InProcessRunner)
    view = source.query().select(["id"]).create_materialized_view("v", other)
    assert view.definition.source_address == source.ref.uri
    there = moved(other, tmp_path / "moved", calls, copied=False)
    source.add(numbers(10, 11))
    there.open_table("v").refresh()  # type: ignore[attr-defined]
    assert len(there.open_table("v")) == 11


def test_views_of_the_first_release_are_read(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls)
    dataset = lance.dataset(view.ref.uri)
    stored = json.loads(dataset.schema.metadata[b"geneva::view::query"])
    assert stored.pop("address") == "src.lance"
    dataset.update_schema_metadata({"geneva::view::query": json.dumps(stored, sort_keys=True)})
    view = local_db.open_table("v")
    view.refresh()  # type: ignore[attr-defined]
    assert values(view) == {i: i * 3 for i in range(0, 10, 2)}


def test_a_table_in_a_namespace_is_another_than_the_one_of_its_name(
    local_db: Connection, calls: Calls, tmp_path: Path
) -> None:
    make_source(local_db)
    local_db.create_namespace(["ns"])
    data = pa.table({"id": [70, 80]})
    inner = local_db.create_table("src", data, namespace_path=["ns"], storage_options=STABLE)
    assert inner.ref.name == "ns$src"
    view = local_db.create_materialized_view(
        "v", inner.query().add_column({"t": counted(calls, triple)})
    )
    view.refresh()
    assert values(view) == {70: 210, 80: 240}
    inner = local_db.open_table("src", namespace_path=["ns"])
    inner.add(pa.table({"id": [90]}))
    inner.add_columns({"u": counted(calls, triple)})
    inner.backfill("u")
    assert [job.table_name for job in local_db.list_jobs()] == ["ns$src", "v"]
    there = moved(local_db, tmp_path / "moved", calls, copied=True)
    for db in (local_db, there):
        found = db.open_table("v")
        found.refresh()  # type: ignore[attr-defined]
        assert values(found) == {70: 210, 80: 240, 90: 270}
    passages = local_db.create_materialized_view("w", inner.query().where("id > 75"))
    passages.refresh()
    assert sorted(values(passages, "u")) == [80, 90]

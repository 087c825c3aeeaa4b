"""A source with fragments that can't be read: all other rows of the view are refreshed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import Chunker, Connection, MaterializedView, Table, chunker
from geneva.errors import UnreadableFragmentsError
from geneva.execution.backfill import validity_checks
from support import Calls, damage
from support import tripled as make_udf
from view_support import STABLE, numbers, values

BAD = 1
SLOW = pytest.mark.slow
LOST = range(10, 20)


def make_source(db: Connection, fragments: int = 4) -> Table:
    table = db.create_table("src", numbers(0, 10), storage_options=STABLE)
    for start in range(10, fragments * 10, 10):
        table.add(numbers(start, start + 10))
    return table


def clean_up(source: Table) -> None:
    lance.dataset(source.ref.uri).cleanup_old_versions(timedelta(0))


def refreshed(view: MaterializedView, *fragments: int, **options: Any) -> str:
    """Refresh with an error that names the source, its fragments and the view."""
    with pytest.raises(UnreadableFragmentsError) as caught:
        view.refresh(**options)
    assert caught.value.fragments == fragments
    assert caught.value.table == "src"
    said = str(caught.value)
    assert "of table 'src' at version" in said
    assert "view 'v'" in said
    return said


def make_view(db: Connection, source: Table, calls: Calls, where: str | None) -> MaterializedView:
    query = source.query() if where is None else source.query().where(where)
    query = query.select(["id", "name"]).add_column({"t": make_udf(calls)})
    return db.create_materialized_view("v", query)


@pytest.mark.parametrize("how", ["gone", *(pytest.param(h, marks=SLOW) for h in ("cut", "noise"))])
@pytest.mark.parametrize("where", [None, "id % 2 = 0"])
def test_the_first_refresh_fills_the_others(
    local_db: Connection, calls: Calls, where: str | None, how: str
) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls, where)
    passing = [i for i in range(40) if where is None or i % 2 == 0]
    path, was = damage(source, BAD, how)
    said = refreshed(view, BAD)
    assert path.name in said
    expected = [i for i in passing if i not in LOST]
    assert calls.taken() == expected
    filled = view.to_arrow().filter(pa.compute.field("t").is_valid())
    assert dict(zip(filled["id"].to_pylist(), filled["t"].to_pylist(), strict=True)) == {
        i: i * 3 for i in expected
    }
    assert filled["name"].to_pylist() == [f"n{i}" for i in expected]
    assert where is None or "note       1 fragment of table 'src'" in str(view.plan_refresh())
    refreshed(view, BAD)
    assert calls.taken() == []
    path.write_bytes(was)
    view.refresh()
    assert calls.taken() == [i for i in passing if i in LOST]
    assert values(view) == {i: i * 3 for i in passing}
    assert view.plan_refresh().is_empty


@pytest.mark.parametrize(
    "where",
    [pytest.param(None, marks=SLOW), "id % 2 = 0", pytest.param("name != 'n3'", marks=SLOW)],
)
def test_rows_come_and_go_but_those_of_the_bad_fragment(
    local_db: Connection, calls: Calls, where: str | None
) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls, where)
    view.refresh()
    calls.clear()
    before = values(view)
    source.delete("id IN (2, 12)")
    source.update(where="id = 4", values={"name": "n3"})
    source.add(numbers(40, 44))
    # With the older versions at hand nothing would have to be read there.
    clean_up(source)
    path, was = damage(source, BAD)
    refreshed(view, BAD)
    assert calls.taken() == [i for i in range(40, 44) if where != "id % 2 = 0" or i % 2 == 0]
    found = values(view)
    gone = {2, 12} | ({4} if where == "name != 'n3'" else set())
    assert {i for i in before if i not in found} == gone
    assert {i for i in found if i in LOST} == {i for i in before if i in LOST} - {12}
    path.write_bytes(was)
    view.refresh()
    assert calls.taken() == []
    assert {i for i in before if i not in values(view)} == gone
    assert view.plan_refresh().is_empty


def test_what_is_not_read_is_no_matter(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls, "id % 2 = 0")
    view.refresh()
    calls.clear()
    damage(source, BAD)
    source.add(numbers(40, 44))
    view.refresh()
    assert calls.taken() == [40, 42]
    assert view.plan_refresh().is_empty


@SLOW
def test_a_limited_and_shuffled_view(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db)
    query = source.query().where("id % 2 = 0").shuffle(seed=3).limit(12).select(["id"])
    view = local_db.create_materialized_view("v", query.add_column({"t": make_udf(calls)}))
    view.refresh()
    before = values(view)
    calls.clear()
    source.add(numbers(40, 60))
    path, was = damage(source, BAD)
    refreshed(view, BAD)
    assert len(view) == 12
    path.write_bytes(was)
    view.refresh()
    expected = {i: i * 3 for i in values(view)}
    assert values(view) == expected
    assert not set(calls.taken()) & before.keys()


def test_one_that_is_damaged_while_the_refresh_runs(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geneva.execution.refresh import run

    source = make_source(local_db)
    view = make_view(local_db, source, calls, None)
    real, files = run._change_rows, []

    def disturbed(*args: Any) -> Any:
        if not files:
            files.append(damage(source, BAD))
        return real(*args)

    monkeypatch.setattr(run, "_change_rows", disturbed)
    refreshed(view, BAD)
    assert sorted(set(calls.taken())) == [i for i in range(40) if i not in LOST]


def test_receipts_that_workers_check(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls, None)
    view.refresh()
    calls.clear()
    monkeypatch.setattr(validity_checks, "MUCH_BYTES", 1)
    source.update(where="id < 40", values_sql={"name": "concat(name, 'x')"})
    clean_up(source)
    fragment = lance.dataset(source.ref.uri).get_fragments()[0].fragment_id
    damage(source, fragment)
    refreshed(view, fragment)
    assert calls.taken() == []


def twice(calls: Calls) -> Chunker:
    @chunker(output_schema=pa.schema([("n", pa.int64())]), version="1")
    def twice(id: int) -> Iterator[tuple[int]]:
        calls.note([id])
        yield from ((id * 10,), (id * 10 + 1,))

    return twice


def test_rows_of_a_chunked_view(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db)
    query = source.query().where("id != 25").select(["id", "name"])
    view = local_db.create_udtf_view("v", query, twice(calls))
    path, was = damage(source, BAD)
    refreshed(view, BAD)
    readable = [i for i in range(40) if i not in LOST and i != 25]
    assert calls.taken() == readable
    assert sorted(view.to_arrow()["n"].to_pylist()) == [
        i * 10 + part for i in readable for part in range(2)
    ]
    path.write_bytes(was)
    view.refresh()
    assert calls.taken() == list(LOST)
    assert len(view) == 78
    assert view.plan_refresh().is_empty
    # What is there of rows that can't be read stays.
    source.update(where="id = 3 OR id = 30", values={"name": "other"})
    source.add(numbers(40, 41))
    damage(source, BAD)
    view.refresh()
    assert calls.taken() == [40]
    assert len(view) == 80
    assert sorted(set(view.to_arrow()["name"].to_pylist())) == sorted(
        {f"n{i}" for i in range(41) if i not in (3, 25, 30)} | {"other"}
    )


@SLOW
def test_on_every_runner(db: Connection, calls: Calls) -> None:
    source = make_source(db)
    view = make_view(db, source, calls, "id % 2 = 0")
    path, was = damage(source, BAD)
    refreshed(view, BAD)
    path.write_bytes(was)
    view.refresh()
    assert values(view) == {i: i * 3 for i in range(0, 40, 2)}
    assert calls.taken() == list(range(0, 40, 2))

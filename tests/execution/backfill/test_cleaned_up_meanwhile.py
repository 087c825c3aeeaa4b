"""Somebody else moves a table on and cleans up, with Lance itself, while a job looks at it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lance
import pytest

from geneva import Connection, Table
from geneva.errors import TableChangedError, UnreadableFragmentsError
from geneva.execution.backfill import chain
from geneva.execution.refresh import prepare
from geneva.planning.backfill import BackfillPlan
from geneva.storage.checkpoints import pins
from support import Calls, damage, make_table, tripled
from view_support import make_source, numbers, values


def moved_on(uri: str) -> None:
    """The fragments of now are merged into one, and their files are gone."""
    lance.dataset(uri).optimize.compact_files()
    lance.dataset(uri).cleanup_old_versions(timedelta(0), delete_unverified=True)


def holes(uri: str, *ids: int) -> None:
    """Delete rows: their fragments get files that say so, which plans have to read."""
    for id_ in ids:
        lance.dataset(uri).delete(f"id = {id_}")


def after(module: Any, name: str, happens: list[Callable[[], object]], patch: Any) -> list[str]:
    """Let something happen after each call of a function; return a list of these calls."""
    real, calls = getattr(module, name), list[str]()

    def hooked(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        made = real(*args, **kwargs)
        if happens:
            happens.pop(0)()
        return made

    patch.setattr(module, name, hooked)
    return calls


@pytest.fixture
def table(local_db: Connection, calls: Calls) -> Table:
    table = make_table(local_db, [4, 4])
    table.add_columns({"y": tripled(calls)})
    table.backfill("y")
    table.add([{"id": 8}, {"id": 9}])
    holes(table.ref.uri, 1, 5)
    assert sorted(calls.taken()) == list(range(8))
    return table


def test_a_plan_is_made_on_the_version_after(
    table: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    happens = [partial(moved_on, table.ref.uri)]
    read = after(chain, "read_columns", happens, monkeypatch)
    plan = table.plan_backfill("y")
    assert len(read) == 2
    assert plan.version == lance.dataset(table.ref.uri).version
    assert (plan.rows_to_compute, plan.unreadable) == (2, ())
    assert calls.taken() == []


def test_a_backfill_computes_what_it_would_have(
    table: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = [partial(holes, table.ref.uri, 2), partial(moved_on, table.ref.uri)]
    happens = [partial(moved_on, table.ref.uri), lambda: [step() for step in again]]
    after(chain, "read_columns", happens, monkeypatch)
    assert table.backfill("y").rows_computed == 2
    assert values(table, "y") == {i: 3 * i for i in (0, 3, 4, 6, 7, 8, 9)}
    assert sorted(calls.taken()) == [8, 9]


def test_a_refresh_computes_what_it_would_have(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(local_db, rows=10)
    query = source.query().select({"id": "id"}).add_column({"z": tripled(calls)})
    view = local_db.create_materialized_view("v", query)
    view.refresh()
    assert sorted(calls.taken()) == list(range(10))
    for ask, gone in ((view.plan_refresh, 3), (view.refresh, 4)):
        holes(source.ref.uri, gone)
        happens: list[Callable[[], object]] = [partial(moved_on, source.ref.uri)]
        after(prepare, "read_view_state", happens, monkeypatch)
        ask()
        assert not happens
    assert values(view, "z") == {i: 3 * i for i in range(10) if i not in (3, 4)}
    assert calls.taken() == []


def test_a_table_that_is_broken_is_looked_at_twice(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("LanceError(IO): Not found: t.lance/data/x.lance")

    read = after(chain, "read_columns", [broken] * 9, monkeypatch)
    with pytest.raises(OSError, match="Not found"):
        table.plan_backfill("y")
    assert len(read) == 2


def test_what_is_damaged_is_left_out_also_while_others_write(
    table: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plans in a row leave out the same: no clean-up took it away."""
    table.update(where="id = 3", values={"id": 33})  # the row has moved: its inputs are read
    *_, moved = (f.fragment_id for f in lance.dataset(table.ref.uri).get_fragments())
    damage(table, moved)
    happens = [partial(table.add, [{"id": id_}]) for id_ in range(20, 40)]
    read = after(chain, "read_columns", list[Callable[[], object]](happens), monkeypatch)
    plan = table.plan_backfill("y")
    assert [left_out for left_out, _ in plan.unreadable] == [moved]
    assert len(read) == 2


def test_so_is_it_from_a_refresh(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(local_db, rows=10)
    query = source.query().where("id % 2 = 0").select({"id": "id"})
    view = local_db.create_materialized_view("v", query.add_column({"z": tripled(calls)}))
    view.refresh()
    source.add(numbers(10, 20))
    *_, added = (f.fragment_id for f in lance.dataset(source.ref.uri).get_fragments())
    damage(source, added)
    calls.clear()
    adds = [partial(source.add, numbers(start, start + 2)) for start in range(20, 60, 2)]
    read = after(prepare, "read_view_state", list[Callable[[], object]](adds), monkeypatch)
    plan = view.plan_refresh()
    assert f"fragment {added}: " in str(plan)
    assert len(read) == 2
    with pytest.raises(UnreadableFragmentsError, match="view 'v'"):
        view.refresh()
    assert set(calls.taken()) <= set(range(20, 60, 2))


def test_a_version_that_goes_although_it_was_pinned_is_said(
    db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean-up that listed the tags just before the job made its own."""
    table = make_table(db, [4, 4])
    table.add_columns({"y": tripled(calls)})

    def listed_before() -> None:
        read = lance.dataset(table.ref.uri)
        holes(table.ref.uri, 1)
        tags = list(read.tags.list())
        for tag in tags:
            read.tags.delete(tag)
        lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0), delete_unverified=False)
        assert tags

    after(pins, "_create", [listed_before], monkeypatch)
    with pytest.raises(TableChangedError, match="was cleaned up before the job"):
        table.backfill("y")
    table.backfill("y")
    assert values(table, "y") == {i: 3 * i for i in (0, 2, 3, 4, 5, 6, 7)}
    assert lance.dataset(table.ref.uri).tags.list() == {}


def test_columns_that_are_planned_on_one_reading_are_planned_on_the_version_after(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(local_db, [4, 4])
    for name in ("a", "b", "c"):
        table.add_columns({name: tripled(calls)})
        table.backfill(name)
    calls.clear()
    moved_on(table.ref.uri)
    lance.dataset(table.ref.uri).update({"id": "33"}, where="id = 3")
    lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0), delete_unverified=True)
    happens = [partial(moved_on, table.ref.uri)]
    after(Table, "_estimated", list[Callable[[], object]](happens), monkeypatch)
    plans = [step.plan for step in local_db.plan_refresh().steps]
    versions = [plan.version for plan in plans if isinstance(plan, BackfillPlan)]
    assert [plan.unreadable for plan in plans if isinstance(plan, BackfillPlan)] == [()] * 3
    assert versions[0] < versions[1] == versions[2] == lance.dataset(table.ref.uri).version
    assert calls.taken() == []

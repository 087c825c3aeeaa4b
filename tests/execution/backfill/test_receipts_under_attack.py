"""What a strict review of receipts found: each a short story that once ended wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lance
import lancedb
import pyarrow as pa
import pytest

from geneva import Connection, Table, udf
from support import Calls, by_id, column, counted, make_table, publishing


def double(x: int) -> int:
    return x * 2


def plus_one(x: int) -> int:
    return x + 1


def tenfold(a: int) -> int:
    return a * 10


def numbers(*x: int, start: int = 1) -> pa.Table:
    return pa.table({"id": range(start, start + len(x)), "x": list(x)})


def plain(table: Table) -> Any:
    """The table as plain LanceDB opens it."""
    return lancedb.connect(table.ref.uri.rpartition("/")[0]).open_table(table.name)


def dataset(table: Table) -> lance.LanceDataset:
    return lance.dataset(table.ref.uri)


def without_receipts(table: Table, name: str) -> None:
    """Make a column one that was declared before there were receipts."""
    hidden = [n for n in dataset(table).schema.names if n.startswith("__receipt_")]
    dataset(table).drop_columns(hidden)
    gone = {f"virtual_column.{key}": None for key in ("receipts", "udf_former", "field")}
    dataset(table).update_field_metadata({name: gone})


def test_an_input_that_is_younger_than_its_column_is_followed_through_a_rename(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [numbers(1, 2)])
    table.add_columns({"b": counted(calls, double)})
    table.add_columns({"z": "x * 10"})
    change = {"path": "b", "udf": counted(calls, double), "input_columns": ["z"]}
    table.alter_columns(change)
    table.backfill("b")
    calls.clear()
    table.alter_columns({"path": "z", "rename": "z_old"})
    table.add_columns({"z": "x * 1000"})
    assert table.plan_backfill("b").is_empty
    assert column(table, "b") == [20, 40]


def test_results_that_were_committed_serve_nobody_else(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [numbers(1, 2, 3, 4)])
    table.add_columns({"b": counted(calls, double)})
    table.backfill("b", checkpoint_size=2)
    calls.clear()
    table.add(numbers(1, 2, start=5))
    table.backfill("b", checkpoint_size=2)
    assert calls.taken() == [1, 2]
    for _ in range(2):
        table.backfill("b", where="1=1", checkpoint_size=2)
        assert len(calls.taken()) == 6


def test_a_crash_leaves_one_result_a_row(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [numbers(7, 8)])
    numbered = counted(calls, lambda x: len(calls.rows), data_type=pa.int64(), version="1")
    table.add_columns({"b": numbered})

    def die(*_: Any) -> Any:
        raise KeyboardInterrupt

    with publishing(local_db, die), pytest.raises(KeyboardInterrupt):
        table.backfill("b", checkpoint_size=1)
    calls.clear()
    table.update(where="id = 1", values={"id": 1})
    table.add(numbers(7, start=3))
    table.backfill("b")
    assert calls.rows == [7], "two rows have the input 7, and one result was there"


class TestChainsWhileOthersWrite:
    @pytest.fixture
    def hook(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
        waiting: list[Callable[[], None]] = []
        happen = lambda: waiting.pop()() if waiting else None  # noqa: E731
        monkeypatch.setattr(sys, "_geneva_chain_hook", happen, raising=False)
        return waiting.append

    def chain(self, db: Connection, calls: Calls) -> Table:
        def tenfold_with_hook(a: int) -> int:
            sys._geneva_chain_hook()  # type: ignore[attr-defined]
            return a * 10

        table = make_table(db, [numbers(1, 2)])
        table.add_columns({"a": udf(plus_one, data_type=pa.int64(), input_columns=["x"])})
        table.add_columns({"b": counted(calls, tenfold_with_hook, input_columns=["a"])})
        return table

    def test_rows_added_meanwhile_get_their_inputs_first(
        self, local_db: Connection, calls: Calls, hook: Callable[[Callable[[], None]], None]
    ) -> None:
        table = self.chain(local_db, calls)

        def somebody() -> None:
            plain(table).add(numbers(3, start=3))
            plain(table).update(where="id = 1", values={"id": 1})

        hook(somebody)
        table.backfill("b")
        assert None not in calls.rows
        assert by_id(table, "b") == {1: 20, 2: 30, 3: 40}

    def test_a_value_added_meanwhile_is_adopted_with_its_input(
        self, local_db: Connection, calls: Calls, hook: Callable[[Callable[[], None]], None]
    ) -> None:
        table = self.chain(local_db, calls)
        hook(lambda: plain(table).add(pa.table({"id": [3], "x": [3], "b": [333]})))
        table.backfill("b")
        table.backfill("b")
        assert by_id(table, "b") == {1: 20, 2: 30, 3: 333}

    def test_a_plan_knows_what_a_person_wrote(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [numbers(1, 2)])
        table.add_columns({"a": udf(plus_one, data_type=pa.int64(), input_columns=["x"])})
        table.add_columns({"b": counted(calls, tenfold)})
        table.add(pa.table({"id": [3], "x": [3], "b": [333]}))
        assert table.plan_backfill("b").rows_to_run == 2
        table.backfill("b")
        assert len(calls.rows) == 2


def test_a_struct_that_got_a_child_is_another_input(local_db: Connection, calls: Calls) -> None:
    structs = pa.array([{"a": 1}, {"a": 2}], pa.struct([("a", pa.int64())]))
    table = make_table(local_db, [pa.table({"id": [1, 2], "s": structs})])
    table.add_columns({"b": udf(lambda s: ",".join(s), data_type=pa.string())})
    table.backfill("b")
    dataset(table).add_columns(pa.field("s", pa.struct([("c", pa.int64())])))
    assert table.plan_backfill("b").rows_to_run == 2
    assert table.verify("b").ok
    table.backfill("b")
    assert column(table, "b") == ["a,c", "a,c"]


def test_a_field_id_that_was_given_away_again_proves_nothing(
    local_db: Connection, calls: Calls
) -> None:
    def or_minus_one(z: int | None) -> int:
        return -1 if z is None else z * 2

    table = make_table(local_db, [numbers(1, 2)])
    table.add_columns({"b": (counted(calls, or_minus_one), ["x"])})
    plain(table).add_columns({"z": "x * 10"})
    table.alter_columns({"path": "b", "udf": counted(calls, or_minus_one)})
    table.delete("id > 0")
    for start in (1, 3):
        rows = numbers(1, 2, start=start)
        table.add(rows.append_column("z", pa.array([10, 20])))
    table.backfill("b")
    plain(table).drop_columns(["z"])
    dataset(table).optimize.compact_files()
    dataset(table).add_columns(pa.field("z", pa.int64()))
    table.backfill("b")
    assert column(table, "b") == [-1] * 4


@pytest.mark.parametrize("gone", ["source", "view"])
def test_a_view_from_before_receipts_computes_what_it_cannot_prove(
    local_db: Connection, calls: Calls, gone: str
) -> None:
    source = make_table(local_db, [numbers(1, 2)], "s", stable_row_ids=True)
    query = source.query().select(["id"]).add_column({"b": counted(calls, double)})
    view = local_db.create_materialized_view("v", query)
    view.refresh()
    source.add(numbers(3, start=3))
    view.refresh()
    without_receipts(view, "b")
    if gone == "view":
        dataset(view).optimize.compact_files()
        dataset(view).update_field_metadata({"b": {"note": "x"}})
        dataset(view).cleanup_old_versions(timedelta(0))
    source.update(where="id = 2", values={"x": 200})
    if gone == "source":
        dataset(source).cleanup_old_versions(timedelta(0))
    local_db.open_table("v").refresh()  # type: ignore[attr-defined]
    assert by_id(view, "b") == {1: 2, 2: 400, 3: 6}


def test_what_people_supply_after_an_upgrade_is_theirs(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [numbers(1, 2)])
    table.add_columns({"b": counted(calls, double)})
    table.backfill("b")
    without_receipts(table, "b")
    table.backfill("b")
    table.add(pa.table({"id": [3], "x": [3], "b": [333]}))
    table.update(where="id = 1", values={"x": 100})
    table.backfill("b")
    assert by_id(table, "b") == {1: 200, 2: 4, 3: 333}


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_a_struct_that_was_never_computed_is_nobodys(
    local_db: Connection, calls: Calls, version: str
) -> None:
    table = make_table(local_db, [numbers(1, 2)], storage_version=version)
    kind = pa.struct([("a", pa.int64())])
    table.add_columns({"b": counted(calls, lambda x: {"a": x}, data_type=kind)})
    table.backfill("b", where="id = 1")
    table.backfill("b")
    assert column(table, "b") == [{"a": 1}, {"a": 2}]
    assert calls.rows == [1, 2]

"""Another function for a few bad rows: what is computed stays, and counts as right."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import UDF, Connection, Table, skip_on_error
from geneva.errors import UDFExecutionError, UserInputError
from geneva.udf.chunker import chunker
from support import Calls, by_id, column, counted, make_table

BAD = (3, 7, 11)


def fragile(calls: Calls, **options: Any) -> UDF:
    """Three times `id`, except for the bad ones."""

    def function(id: int) -> int:
        if id in BAD:
            raise ValueError(f"can't do {id}")
        return id * 3

    return counted(calls, function, on_error=skip_on_error(), version="fragile", **options)


def fixed(calls: Calls, times: int = 30, **options: Any) -> UDF:
    """A mended one, whose values can be told from those of the first."""
    return counted(calls, lambda id: id * times, data_type=pa.int64(), **options)


@pytest.fixture
def table(local_db: Connection, calls: Calls) -> Table:
    """Twelve rows in two fragments, three of which failed."""
    table = make_table(local_db, [6, 6])
    table.add_columns({"x": fragile(calls)})
    table.backfill("x")
    assert column(table, "x") == mixed(None)
    calls.clear()
    return table


def mixed(times: int | None) -> list[int | None]:
    return [(i * times if times else None) if i in BAD else i * 3 for i in range(12)]


def alter(table: Table, udf: UDF, **more: Any) -> None:
    table.alter_columns({"path": "x", "udf": udf, "keep": "computed", **more})


class TestKeepingWhatIsComputed:
    def test_verify_says_that_the_function_gives_other_values(
        self, table: Table, calls: Calls
    ) -> None:
        alter(table, fixed(calls))
        table.backfill("x")
        report = table.verify("x", run=True)
        assert (report.ok, report.kept_values) == (True, 8), "all but 0, which is 0 by both"

    def test_only_the_failed_rows_run(self, table: Table, calls: Calls) -> None:
        alter(table, fixed(calls))
        assert table.plan_backfill("x").rows_to_run == 3
        result = table.backfill("x")
        assert calls.taken() == list(BAD)
        assert result.rows_computed == 3
        assert column(table, "x") == mixed(30)
        assert table.plan_backfill("x").is_empty
        assert table.backfill("x").rows_computed == 0
        assert calls.count == 0

    def test_missing_rows_run_too(self, table: Table, calls: Calls) -> None:
        table.add(pa.table({"id": pa.array([12, 13], pa.int64())}))
        alter(table, fixed(calls))
        table.backfill("x")
        assert calls.taken() == [*BAD, 12, 13]
        assert column(table, "x") == [*mixed(30), 360, 390]

    def test_a_kept_value_goes_stale_with_its_inputs(self, table: Table, calls: Calls) -> None:
        alter(table, fixed(calls))
        table.backfill("x")
        calls.clear()
        table.update(where="id = 2", values={"id": 100})
        table.backfill("x")
        assert calls.taken() == [100]
        assert by_id(table, "x")[100] == 3000
        assert by_id(table, "x")[1] == 3

    @pytest.mark.parametrize("again", [True, False])
    def test_a_compaction_computes_nothing(self, table: Table, calls: Calls, again: bool) -> None:
        alter(table, fixed(calls))
        if again:
            table.backfill("x")
            calls.clear()
        table.compact_files()
        table.backfill("x")
        assert calls.taken() == ([] if again else list(BAD))
        assert by_id(table, "x") == dict(enumerate(mixed(30)))

    def test_without_keep_all_of_it_is_stale_again(self, table: Table, calls: Calls) -> None:
        alter(table, fixed(calls))
        table.backfill("x")
        calls.clear()
        table.alter_columns({"path": "x", "udf": fixed(calls, 5)})
        table.backfill("x")
        assert calls.count == 12
        assert column(table, "x") == [5 * i for i in range(12)]

    def test_what_an_earlier_change_made_stale_stays_stale(
        self, table: Table, calls: Calls
    ) -> None:
        table.alter_columns({"path": "x", "udf": fixed(calls, 5)})
        table.backfill("x", where="id < 2")
        calls.clear()
        alter(table, fixed(calls, 6))
        assert table.plan_backfill("x").rows_to_run == 10
        table.backfill("x")
        assert calls.taken() == list(range(2, 12))
        assert column(table, "x") == [0, 5, *(6 * i for i in range(2, 12))]

    def test_the_first_function_again_runs_what_it_did_not_make(
        self, table: Table, calls: Calls
    ) -> None:
        alter(table, fixed(calls))
        table.backfill("x")
        calls.clear()
        table.alter_columns({"path": "x", "udf": fragile(calls)})
        table.backfill("x")
        assert calls.taken() == list(BAD)
        assert column(table, "x") == mixed(None)

    def test_a_mixture_is_not_taken_for_the_version_that_made_it(
        self, table: Table, calls: Calls
    ) -> None:
        mended = fixed(calls)
        alter(table, mended)
        table.backfill("x")
        calls.clear()
        table.alter_columns({"path": "x", "udf": fixed(calls, 5)})
        table.alter_columns({"path": "x", "udf": mended})
        table.backfill("x")
        assert calls.taken() == [i for i in range(12) if i not in BAD]
        assert column(table, "x") == [30 * i for i in range(12)]

    def test_fix_after_fix(self, table: Table, calls: Calls) -> None:
        for times in (2, 4, 5, 6, 7, 8, 9, 10, 11, 12):
            alter(table, fixed(calls, times))
            table.backfill("x")
            table.add(pa.table({"id": pa.array([100 + times], pa.int64())}))
        assert calls.count == 3 + 9
        assert column(table, "x")[:12] == mixed(2)

    def test_keep_after_an_alteration_that_did_not(self, table: Table, calls: Calls) -> None:
        mended = fixed(calls)
        table.alter_columns({"path": "x", "udf": mended})
        assert table.plan_backfill("x").rows_to_run == 12
        alter(table, mended)
        alter(table, mended)
        table.backfill("x")
        assert calls.taken() == list(BAD)

    def test_keep_makes_up_for_one_alteration_and_not_for_those_before(
        self, table: Table, calls: Calls
    ) -> None:
        for times in (5, 6):
            table.alter_columns({"path": "x", "udf": fixed(calls, times)})
        alter(table, fixed(calls, 6))
        alter(table, fixed(calls, 6))
        table.backfill("x")
        assert calls.taken() == list(range(12))
        assert column(table, "x") == [6 * i for i in range(12)]

    @pytest.mark.parametrize("forgotten", [1, 2])
    def test_keep_makes_up_for_an_alteration_after_others_that_kept(
        self, table: Table, calls: Calls, forgotten: int
    ) -> None:
        alter(table, fixed(calls, 5))
        table.backfill("x")
        calls.clear()
        for _ in range(forgotten):
            table.alter_columns({"path": "x", "udf": fixed(calls, 6)})
            assert table.plan_backfill("x").rows_to_run == 12
        alter(table, fixed(calls, 6))
        assert table.backfill("x").rows_computed == 0
        assert calls.count == 0
        assert column(table, "x") == mixed(5)

    def test_keep_makes_up_for_the_same_function_without_it(
        self, table: Table, calls: Calls
    ) -> None:
        alter(table, fixed(calls, 5))
        table.backfill("x")
        table.alter_columns({"path": "x", "udf": fixed(calls, 5)})
        assert table.plan_backfill("x").rows_to_run == 9
        alter(table, fixed(calls, 5))
        assert table.plan_backfill("x").rows_to_run == 0

    def test_keep_makes_up_for_it_where_another_function_has_helped_since(
        self, table: Table, calls: Calls
    ) -> None:
        table.alter_columns({"path": "x", "udf": fixed(calls, 5)})
        table.backfill("x", udf=fixed(calls, 6), retry_failed=True, where="id = 3")
        alter(table, fixed(calls, 5))
        calls.clear()
        table.backfill("x")
        assert calls.taken() == [7, 11]

    def test_what_other_inputs_gave_is_not_kept(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [pa.table({"id": [1, 2], "a": [1, 2], "b": [1, 5]})])
        table.add_columns({"x": (fixed(calls, 3), ["a"])})
        table.backfill("x")
        for more in ({}, {"keep": "computed"}):
            table.alter_columns({"path": "x", "udf": (fixed(calls, 4), ["b"]), **more})
        table.backfill("x")
        assert by_id(table, "x") == {1: 3, 2: 20}

    @pytest.mark.parametrize("kept", [False, True])
    def test_a_column_of_a_release_that_did_not_say_what_was_right_before(
        self, table: Table, calls: Calls, kept: bool
    ) -> None:
        table.alter_columns({"path": "x", "udf": fixed(calls, 5)})
        if kept:
            alter(table, fixed(calls, 6))
        ds = lance.dataset(table.ref.uri)
        ds.update_field_metadata({"x": {"virtual_column.udf_right_before": None}})
        alter(table, fixed(calls, 6 if kept else 5))
        assert table.plan_backfill("x").rows_to_run == (12 if kept else 3)

    def test_what_a_person_wrote_stays(self, table: Table, calls: Calls) -> None:
        table.update(where="id = 3", values={"x": -1})
        alter(table, fixed(calls))
        table.backfill("x")
        assert calls.taken() == [7, 11]
        assert by_id(table, "x")[3] == -1

    def test_a_where_clause_computes_kept_rows_anew(self, table: Table, calls: Calls) -> None:
        alter(table, fixed(calls))
        table.backfill("x", where="id < 4")
        assert calls.taken() == [0, 1, 2, 3]
        table.backfill("x")
        assert calls.taken() == [7, 11]
        assert column(table, "x") == [0, 30, 60, 90, *mixed(30)[4:]]

    def test_unpublished_results_are_kept(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [12])

        def function(id: int) -> int:
            if id == 8:
                raise ValueError("can't do 8")
            return id * 3

        table.add_columns({"x": counted(calls, function)})
        with pytest.raises(UDFExecutionError):
            table.backfill("x", checkpoint_size=2, concurrency=1, task_size=12)
        assert calls.taken() == list(range(9))
        alter(table, fixed(calls))
        table.backfill("x")
        assert calls.taken() == [8, 9, 10, 11]
        assert column(table, "x") == [i * 3 if i < 8 else i * 30 for i in range(12)]
        assert table.backfill("x").rows_computed == 0

    def test_verify_knows_kept_values(self, table: Table, calls: Calls) -> None:
        alter(table, fixed(calls))
        table.backfill("x")
        report = table.verify("x", run=True)
        assert report.ok
        assert report.counts == {"right": 12}

    def test_other_inputs_are_refused(self, table: Table, calls: Calls) -> None:
        table.add_columns({"y": "id + 1"})
        with pytest.raises(UserInputError, match=r"same columns.*\['id'\].*\['y'\]"):
            alter(table, fixed(calls), input_columns=["y"])
        with pytest.raises(UserInputError, match="same columns"):
            table.backfill("x", udf=(fixed(calls), ["y"]), retry_failed=True)

    def test_what_can_be_kept(self, table: Table, calls: Calls) -> None:
        with pytest.raises(UserInputError, match=r"'computed'.*not 'all'"):
            table.alter_columns({"path": "x", "udf": fixed(calls), "keep": "all"})
        with pytest.raises(UserInputError, match='"keep" is for'):
            table.alter_columns({"path": "x", "rename": "y", "keep": "computed"})


class TestRetryingWithAnotherFunction:
    def test_just_the_failed_rows_run_and_their_values_stay(
        self, table: Table, calls: Calls
    ) -> None:
        mended = fixed(calls)
        assert table.plan_backfill("x", udf=mended, retry_failed=True).rows_to_run == 3
        result = table.backfill("x", udf=mended, retry_failed=True)
        assert result.rows_computed == 3
        assert calls.taken() == list(BAD)
        assert column(table, "x") == mixed(30)
        assert table.plan_backfill("x").is_empty
        table.compact_files()
        assert table.backfill("x").rows_computed == 0
        assert column(table, "x") == mixed(30)
        assert table.computed_columns()["x"].udf_version == "fragile"

    def test_of_the_rows_that_are_asked_for(self, table: Table, calls: Calls) -> None:
        asked = {"udf": fixed(calls), "retry_failed": True, "where": "id < 9"}
        assert table.plan_backfill("x", **asked).notes == (), "row 11 has failed, and is not stale"
        table.backfill("x", **asked)
        assert calls.taken() == [3, 7]
        assert table.backfill("x").rows_computed == 0
        assert column(table, "x") == [None if i == 11 else v for i, v in enumerate(mixed(30))]

    def test_planning_changes_nothing(self, table: Table, calls: Calls) -> None:
        version = lance.dataset(table.ref.uri).version
        table.plan_backfill("x", udf=fixed(calls), retry_failed=True)
        assert lance.dataset(table.ref.uri).version == version

    def test_after_an_alteration(self, table: Table, calls: Calls) -> None:
        table.alter_columns({"path": "x", "udf": fixed(calls)})
        assert table.backfill("x", retry_failed=True).rows_computed == 3
        assert calls.taken() == list(BAD)
        assert column(table, "x") == mixed(30)

    def test_rows_whose_inputs_changed_since(self, table: Table, calls: Calls) -> None:
        table.update(where="id = 3", values={"id": 30})
        assert table.backfill("x", retry_failed=True).rows_computed == 3
        assert calls.taken() == [7, 11, 30]


@dataclass
class Row:
    """What a row's value is, and what made it."""

    value: int | None = None
    version: str | None = None
    failed: bool = False
    changed: bool = False


class Model:
    """A column that knows of each row what made it, and which versions' values are right."""

    def __init__(self) -> None:
        self.rows = {i: Row() for i in range(10)}
        self.times, self.version = 3, "fragile"
        self.right = {"fragile"}

    def owed(self) -> list[int]:
        """The rows that a backfill has to compute."""
        return sorted(
            i
            for i, row in self.rows.items()
            if row.changed
            or row.version not in self.right
            or (row.failed and row.version != self.version)
        )

    def failed(self) -> list[int]:
        return sorted(i for i, row in self.rows.items() if row.failed)

    def compute(self, ids: list[int]) -> None:
        for i in ids:
            fails = self.version == "fragile" and i in BAD
            self.rows[i] = Row(None if fails else i * self.times, self.version, fails)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))]
)
def test_a_random_history_computes_what_it_owes(
    local_db: Connection, calls: Calls, seed: int
) -> None:
    rng, model = random.Random(seed), Model()
    table = make_table(local_db, [5, 5], stable_row_ids=bool(seed % 2))
    table.add_columns({"x": fragile(calls)})
    steps = ["backfill", "backfill", "keep", "replace", "back", "add", "compact", "update", "retry"]
    for step in [*rng.choices(steps, k=14), "backfill"]:
        if step in ("keep", "replace", "back"):
            model.times = 3 if step == "back" else rng.randrange(4, 99)
            model.version = "fragile" if step == "back" else f"times {model.times}"
            udf = fixed(calls, model.times, version=model.version)
            udf = fragile(calls) if step == "back" else udf
            keep = {"keep": "computed"} if step == "keep" else {}
            table.alter_columns({"path": "x", "udf": udf, **keep})
            model.right = {*(model.right if step == "keep" else ()), model.version}
        elif step == "add":
            model.rows[max(model.rows) + 1] = Row()
            table.add(pa.table({"id": pa.array([max(model.rows)], pa.int64())}))
        elif step == "compact":
            table.compact_files()
        elif step == "update":
            old, new = rng.choice(sorted(model.rows)), max(model.rows) + 1
            table.update(where=f"id = {old}", values={"id": new})
            row = model.rows.pop(old)
            model.rows[new] = replace(row, changed=row.version is not None)
        else:
            run = model.failed() if step == "retry" else model.owed()
            table.backfill("x", retry_failed=step == "retry")
            assert calls.taken() == run, step
            model.compute(run)
            assert by_id(table, "x") == {i: row.value for i, row in model.rows.items()}


class TestViews:
    def test_only_the_failed_rows_run(self, local_db: Connection, calls: Calls) -> None:
        source = make_table(local_db, [6, 6], stable_row_ids=True)
        query = source.query().select(["id"]).add_column({"x": fragile(calls)})
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        assert column(view, "x") == mixed(None)
        calls.clear()
        view.alter_columns({"path": "x", "udf": fixed(calls), "keep": "computed"})
        view.refresh()
        assert calls.taken() == list(BAD)
        assert column(view, "x") == mixed(30)
        source.update(where="id = 2", values={"id": 100})
        source.compact_files()
        view.refresh()
        assert calls.taken() == [100]
        assert by_id(view, "x")[100] == 3000
        assert by_id(view, "x")[1] == 3

    def test_under_other_inputs_than_the_querys(self, local_db: Connection, calls: Calls) -> None:
        source = make_table(local_db, [12], stable_row_ids=True)
        source.add_columns({"other": "id"})
        query = source.query().select(["id"]).add_column({"x": fragile(calls)})
        view = local_db.create_materialized_view("v", query)
        view.alter_columns({"path": "x", "udf": fragile(calls), "input_columns": ["other"]})
        view.refresh()
        calls.clear()
        change = {"path": "x", "udf": fixed(calls), "input_columns": ["other"], "keep": "computed"}
        view.alter_columns(change)
        view.refresh()
        assert calls.taken() == list(BAD)

    def test_a_chunker_can_be_altered(self, local_db: Connection, calls: Calls) -> None:
        def letters(by: str) -> Any:
            def split(name: str) -> Any:
                calls.note([name])
                if name == "bad" and by == "":
                    raise ValueError(name)
                return [{"piece": by + letter} for letter in name]

            schema = pa.schema([("piece", pa.string())])
            return chunker(split, output_schema=schema, version=by, on_error=skip_on_error())

        data = pa.table({"id": [0, 1, 2], "name": ["ab", "bad", "c"]})
        source = make_table(local_db, [data], stable_row_ids=True)
        query = source.query().select(["id"]).add_column({"pieces": letters("")})
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        assert calls.taken() == ["ab", "bad", "c"]
        view.alter_columns({"path": "pieces", "udf": letters("+"), "keep": "computed"})
        view.refresh()
        assert calls.taken() == ["bad"]
        assert sorted(column(view, "piece")) == ["+a", "+b", "+d", "a", "b", "c"]
        view.alter_columns({"path": "pieces", "udf": letters("*")})
        view.refresh()
        assert calls.taken() == ["ab", "bad", "c"]
        assert sorted(column(view, "piece")) == ["*a", "*a", "*b", "*b", "*c", "*d"]

"""One small example for each thing that receipts are for. The first release fails most of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import lance
import lancedb
import pyarrow as pa
import pytest
from lancedb.index import BTree

from geneva import Connection, Table
from geneva.errors import GenevaError, UserInputError
from oracle.functions import Function, Recorder, half, make_udf, recording, tens
from oracle.world import dying_commits
from support import by_id, make_table

A = Function("half")
B = Function("tens")
HOW_TO_WRITE = pytest.mark.parametrize(
    "indexed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["in place", "moved"]
)
"""With an index on the key Lance rewrites columns where they are, without it moves the rows."""


@pytest.fixture
def log() -> Iterator[Recorder]:
    """The calls of all functions."""
    with recording() as recorder:
        yield recorder


def numbers(first: int, last: int) -> pa.Table:
    """Rows with an id, two inputs that are the same number, and an unrelated text."""
    ids = pa.array(range(first, last), pa.int64())
    words = pa.array([f"word {i}" for i in range(first, last)])
    return pa.table({"id": ids, "x": ids, "y": ids, "u": words})


def table_of(db: Connection, *sizes: int, stable: bool = False) -> Table:
    """Make a table of fragments of these sizes; x and y are the id."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [numbers(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return make_table(db, parts, stable_row_ids=stable)


def with_chain(table: Table) -> Table:
    """Add a = half(x) and b = tens(a)."""
    table.add_columns({"a": make_udf("a", A, ["x"])})
    table.add_columns({"b": make_udf("b", B, ["a"])})
    return table


def plain(table: Table) -> Any:
    """Open the table as somebody does who has no Geneva."""
    folder, name = table.ref.uri.rsplit("/", 1)
    return lancedb.connect(folder).open_table(name.removesuffix(".lance"))


def index_id(table: Table) -> None:
    plain(table).create_index("id", config=BTree())


def upsert(table: Table, **columns: Sequence[Any]) -> None:
    """Write some columns of some rows, as somebody does who has no Geneva."""
    schema = plain(table).schema
    fields = pa.schema([pa.field(name, schema.field(name).type) for name in columns])
    data = pa.table(dict(columns), schema=fields)
    plain(table).merge_insert("id").when_matched_update_all().execute(data)


def clean_up(table: Table) -> None:
    dataset = lance.dataset(table.ref.uri)
    dataset.cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)


def calls(log: Recorder, role: str | None = None) -> list[Any]:
    """The first inputs of all calls of a column since the last look, sorted."""
    taken = [c for c in log.taken().elements() if role is None or c.role == role]
    return sorted((c.inputs[0] for c in taken), key=lambda v: (v is None, v))


def planned(table: Table, column: str) -> int:
    table.checkout_latest()
    return table.plan_backfill(column).rows_to_run


def backfill(table: Table, column: str, **options: Any) -> None:
    table.checkout_latest()
    assert table.backfill(column, **options).status == "DONE"


def assert_chain_is_right(table: Table) -> None:
    x, a, b = (by_id(table, name) for name in ("x", "a", "b"))
    assert a == {i: half(1, value) for i, value in x.items()}
    assert b == {i: tens(1, value) for i, value in a.items()}


@pytest.mark.slow  # random histories do such things, in the quick round too
class TestSuppliedValues:
    @HOW_TO_WRITE
    def test_go_stale_when_their_inputs_change_after_they_were_adopted(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        plain(table).add(pa.table({"id": [10, 11], "x": [10, 11], "a": [500, 501]}))
        if indexed:
            index_id(table)
        backfill(table, "a")
        assert calls(log) == [0, 1, 2, 3]
        upsert(table, id=[10], x=[20])
        assert planned(table, "a") == 1
        backfill(table, "a")
        assert calls(log) == [20]
        assert by_id(table, "a") | {10: 10, 11: 501} == by_id(table, "a")

    @HOW_TO_WRITE
    def test_are_kept_when_their_inputs_change_before_they_were_adopted(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 2))
        plain(table).add(pa.table({"id": [10], "x": [10], "a": [500]}))
        if indexed:
            index_id(table)
        upsert(table, id=[10], x=[20])
        backfill(table, "a")
        assert calls(log) == [0, 1]
        assert by_id(table, "a")[10] == 500

    def test_are_kept_by_another_function_until_they_were_adopted(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 2))
        plain(table).add(pa.table({"id": [10], "x": [10], "a": [500]}))
        table.checkout_latest()
        table.alter_columns({"path": "a", "udf": make_udf("a", Function("half", 2), ["x"])})
        backfill(table, "a")
        assert calls(log) == [0, 1]
        table.alter_columns({"path": "a", "udf": make_udf("a", A, ["x"])})
        backfill(table, "a")
        assert calls(log) == [0, 1, 10]
        assert by_id(table, "a") == {0: 0, 1: 0, 10: 5}

    def test_are_computed_where_a_condition_asks_for_it(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 2))
        plain(table).add(pa.table({"id": [10, 11], "x": [10, 11], "a": [500, 501]}))
        backfill(table, "a", where="id = 10")
        assert calls(log) == [10]
        assert by_id(table, "a") == {0: None, 1: None, 10: 5, 11: 501}

    def test_are_computed_where_a_condition_asks_for_it_also_after_a_job_of_their_reader_died(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 2))
        backfill(table, "a")
        plain(table).add(pa.table({"id": [10, 11], "x": [10, 12], "a": [500, None]}))
        table.checkout_latest()
        with dying_commits(table.ref.uri, 1), pytest.raises(OSError, match="driver"):
            table.backfill("b", where="id >= 10", checkpoint_size=1)
        backfill(table, "a", where="id >= 10")
        assert by_id(table, "a") == {0: 0, 1: 0, 10: 5, 11: 6}

    def test_go_stale_through_optimize_and_another_upsert(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        plain(table).add(pa.table({"id": [10, 11], "x": [10, 11], "a": [500, 501]}))
        index_id(table)
        backfill(table, "a")
        calls(log)
        upsert(table, id=[10], x=[20])
        plain(table).optimize()
        upsert(table, id=[1], x=[30])
        assert planned(table, "a") == 2
        backfill(table, "a")
        assert calls(log) == [20, 30]
        assert by_id(table, "a") == {0: 0, 1: 15, 2: 1, 3: 1, 10: 10, 11: 501}


@pytest.mark.slow  # random histories do such things, in the quick round too
class TestUpserts:
    @HOW_TO_WRITE
    def test_a_stale_row_is_still_stale_after_optimize_and_another_upsert(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4, 4))
        if indexed:
            index_id(table)
        backfill(table, "a")
        calls(log)
        upsert(table, id=[1], x=[20])
        plain(table).optimize()
        upsert(table, id=[6], x=[30])
        assert planned(table, "a") == 2
        backfill(table, "a")
        assert calls(log) == [20, 30]
        assert by_id(table, "a")[1] == 10
        assert by_id(table, "a")[6] == 15

    @HOW_TO_WRITE
    def test_of_rows_of_a_partial_backfill_that_were_compacted(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 6, 2, 3, 3, 2))
        if indexed:
            index_id(table)
        backfill(table, "a", where="id IN (1, 12)")
        plain(table).optimize()
        upsert(table, id=[1, 2, 11], x=[20, 30, 40])
        calls(log)
        backfill(table, "a")
        assert by_id(table, "a") == {i: half(1, x) for i, x in by_id(table, "x").items()}
        assert len(calls(log)) == 15

    @HOW_TO_WRITE
    def test_one_row_of_a_thousand_costs_one_call_after_a_clean_up(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 400, 600))
        if indexed:
            index_id(table)
        backfill(table, "a")
        calls(log)
        clean_up(table)
        upsert(table, id=[500], x=[20])
        clean_up(table)
        assert planned(table, "a") == 1
        backfill(table, "a")
        assert calls(log) == [20]
        assert by_id(table, "a")[500] == 10

    @HOW_TO_WRITE
    def test_of_unrelated_columns_cost_nothing(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        if indexed:
            index_id(table)
        backfill(table, "b")
        calls(log)
        upsert(table, id=[0, 1], u=["other", "words"])
        assert planned(table, "b") == 0
        backfill(table, "b")
        assert calls(log) == []

    @HOW_TO_WRITE
    def test_that_are_undone_cost_nothing(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        if indexed:
            index_id(table)
        backfill(table, "a")
        calls(log)
        upsert(table, id=[1, 2], x=[20, 30])
        upsert(table, id=[1], x=[1])
        assert planned(table, "a") == 1
        backfill(table, "a")
        assert calls(log) == [30]

    @HOW_TO_WRITE
    def test_of_an_input_and_its_value_keep_what_a_person_wrote(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        if indexed:
            index_id(table)
        backfill(table, "a")
        calls(log)
        upsert(table, id=[1, 2], x=[20, 30], a=[700, 701])
        backfill(table, "a")
        assert calls(log) == []
        assert by_id(table, "a") == {0: 0, 1: 700, 2: 701, 3: 1}
        upsert(table, id=[1], x=[40])
        backfill(table, "a")
        assert calls(log) == [40]


class TestWritersDuringAJob:
    @HOW_TO_WRITE
    @pytest.mark.parametrize("row", [0, 5, 11], ids=["computed", "in flight", "to come"])
    def test_an_upsert_leaves_no_row_stale(
        self, local_db: Connection, log: Recorder, indexed: bool, row: int
    ) -> None:
        table = with_chain(table_of(local_db, 4, 4, 4))
        if indexed:
            index_id(table)
        log.at_call(6, "a", lambda: upsert(table, id=[row], x=[40]))
        backfill(table, "a", checkpoint_size=2, concurrency=1)
        assert planned(table, "a") == 0
        assert by_id(table, "a")[row] == 20
        assert len(calls(log)) <= 12 + 1 + 2
        assert by_id(table, "a") == {i: half(1, x) for i, x in by_id(table, "x").items()}

    @HOW_TO_WRITE
    def test_a_fragment_that_this_job_committed_is_looked_at_again(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4, 4, 4, 4))
        if indexed:
            index_id(table)
        log.at_call(14, "a", lambda: upsert(table, id=[0, 15], x=[40, 50]))
        backfill(table, "a", commit_granularity=1, concurrency=1, checkpoint_size=1)
        assert planned(table, "a") == 0
        assert by_id(table, "a") == {i: half(1, x) for i, x in by_id(table, "x").items()}
        assert len(calls(log)) <= 16 + 2 + 1

    @HOW_TO_WRITE
    def test_a_correction_is_kept(self, local_db: Connection, log: Recorder, indexed: bool) -> None:
        table = with_chain(table_of(local_db, 4, 4, 4))
        if indexed:
            index_id(table)
        log.at_call(6, "a", lambda: upsert(table, id=[0, 5, 11], a=[700, 701, 702]))
        backfill(table, "a", concurrency=1)
        backfill(table, "a")
        found = by_id(table, "a")
        assert [found[0], found[5], found[11]] == [700, 701, 702]
        assert found[1] == 0
        assert found[10] == 5

    @HOW_TO_WRITE
    @pytest.mark.parametrize("columns", [{"a": [700]}, {"a": [700], "x": [40]}], ids=["a", "ax"])
    def test_a_correction_is_kept_beside_a_supplied_value(
        self, local_db: Connection, log: Recorder, indexed: bool, columns: dict[str, list[int]]
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        plain(table).add(pa.table({"id": [10, 11], "x": [10, 11], "a": [500, None]}))
        if indexed:
            index_id(table)
        log.at_call(1, "a", lambda: upsert(table, id=[11], **columns))
        backfill(table, "a", concurrency=1)
        assert by_id(table, "a") == {0: 0, 1: 0, 2: 1, 3: 1, 10: 500, 11: 700}

    def test_compaction_and_a_clean_up_cost_little(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4, 4, 4))

        def tidy() -> None:
            lance.dataset(table.ref.uri).optimize.compact_files()
            clean_up(table)

        log.at_call(6, "a", tidy)
        backfill(table, "a", checkpoint_size=2, concurrency=1)
        assert planned(table, "a") == 0
        assert len(calls(log)) <= 12 + 2
        assert by_id(table, "a") == {i: half(1, i) for i in range(12)}

    def test_rows_that_failed_are_not_called_again_after_a_compaction(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = table_of(local_db, 6, 6, 6)
        table.add_columns({"d": make_udf("d", Function("flaky"), ["y"])})
        log.failing = True
        log.at_call(1, "d", lambda: lance.dataset(table.ref.uri).optimize.compact_files())
        backfill(table, "d", checkpoint_size=2)
        assert len(calls(log)) <= 18 + 2 * 2
        expected = {i: None if i % 3 == 0 else i + 1 for i in range(18)}
        assert by_id(table, "d") == expected

    @HOW_TO_WRITE
    def test_a_column_is_right_when_its_input_was_computed_again_meanwhile(
        self, local_db: Connection, log: Recorder, indexed: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4, 4, 4))
        if indexed:
            index_id(table)
        backfill(table, "a")

        def other() -> None:
            upsert(table, id=[0, 5, 11], x=[40, 50, 60])
            local_db.open_table("t").backfill("a")

        log.at_call(6, "b", other)
        backfill(table, "b", checkpoint_size=2, concurrency=1)
        assert by_id(table, "a")[5] == 25
        assert_chain_is_right(table)
        assert planned(table, "b") == 0


class TestChains:
    def test_a_plan_stays_right_through_compaction_and_clean_up(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4, 4))
        backfill(table, "b")
        calls(log)
        upsert(table, id=[1, 6], x=[20, 30])
        backfill(table, "a")
        plain(table).optimize()
        clean_up(table)
        calls(log)
        assert planned(table, "b") == 2
        backfill(table, "b", where="id = 1")
        assert calls(log, "b") == [10]
        clean_up(table)
        assert planned(table, "b") == 1
        backfill(table, "b")
        assert calls(log, "b") == [15]
        assert_chain_is_right(table)

    def test_inputs_that_are_not_computed_are_computed_first(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        assert not table.plan_backfill("b").is_empty
        backfill(table, "b")
        assert_chain_is_right(table)
        taken = log.taken()
        assert sorted(call.role for call in taken.elements()) == ["a"] * 4 + ["b"] * 4

    def test_inputs_that_are_stale_are_computed_first(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4, 4))
        backfill(table, "b")
        log.taken()
        upsert(table, id=[1, 6], x=[20, 7])  # half(7) is half(6): nothing changes for b
        backfill(table, "b")
        assert_chain_is_right(table)
        taken = log.taken()
        assert sorted((c.role, c.inputs[0]) for c in taken) == [("a", 7), ("a", 20), ("b", 10)]

    def test_with_a_condition_only_the_selected_rows_are_brought_up_to_date(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "b", where="id < 2")
        assert sorted(call.role for call in log.taken().elements()) == ["a", "a", "b", "b"]
        assert by_id(table, "a") == {0: 0, 1: 0, 2: None, 3: None}
        assert by_id(table, "b") == {0: 1, 1: 1, 2: None, 3: None}

    def test_stale_inputs_can_be_refused(self, local_db: Connection, log: Recorder) -> None:
        table = with_chain(table_of(local_db, 4))
        with pytest.raises(GenevaError):
            table.backfill("b", upstream="refuse")
        assert calls(log) == []
        backfill(table, "a")
        calls(log)
        backfill(table, "b", upstream="refuse")
        assert calls(log) == [0, 0, 1, 1]
        upsert(table, id=[1], x=[20])
        with pytest.raises(GenevaError):
            table.backfill("b", upstream="refuse")

    def test_stale_inputs_can_be_ignored(self, local_db: Connection, log: Recorder) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "b", upstream="ignore")
        assert by_id(table, "b") == dict.fromkeys(range(4), -1)
        calls(log)
        backfill(table, "b")
        assert_chain_is_right(table)

    def test_a_cycle_is_refused_when_it_is_declared(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 2))
        with pytest.raises(UserInputError):
            table.alter_columns({"path": "a", "udf": make_udf("a", A, ["b"])})
        with pytest.raises(UserInputError):
            table.alter_columns({"path": "b", "udf": make_udf("b", B, ["b"])})
        backfill(table, "b")
        assert_chain_is_right(table)


class TestValues:
    @pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
    @pytest.mark.parametrize("kind", ["pair", "record", "ratio", "text"])
    def test_a_value_with_null_or_nan_inside_is_known_again(
        self, local_db: Connection, log: Recorder, kind: str, version: str
    ) -> None:
        if (kind, version) == ("record", "2.0"):
            pytest.skip("Lance 2.0 can't hold a NULL struct")
        table = make_table(local_db, [numbers(0, 8)], storage_version=version)
        table.add_columns({"c": make_udf("c", Function(kind), ["x", "y"])})
        backfill(table, "c")
        calls(log)
        plain(table).update(where="id IN (2, 4)", values={"x": 20})
        assert planned(table, "c") == 2
        backfill(table, "c")
        assert calls(log) == [20, 20]
        plain(table).optimize()
        clean_up(table)
        assert planned(table, "c") == 0

    def test_corrections_are_kept_also_of_what_was_there(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = table_of(local_db, 4)
        table.add_columns({"label": make_udf("c", Function("text"), ["x", "y"])})
        backfill(table, "label")
        calls(log)
        plain(table).update(where="id IN (1, 2)", values={"label": "1/1/1"})
        assert planned(table, "label") == 0
        backfill(table, "label")
        assert calls(log) == []
        assert by_id(table, "label") == {0: "0/0/1", 1: "1/1/1", 2: "1/1/1", 3: None}

    @HOW_TO_WRITE
    @pytest.mark.parametrize("options", [{}, {"checkpoint_size": 2}], ids=["", "checkpoints"])
    def test_a_null_over_a_value_is_computed(
        self, local_db: Connection, log: Recorder, indexed: bool, options: dict[str, int]
    ) -> None:
        table = with_chain(table_of(local_db, 5, 2))
        if indexed:
            index_id(table)
        backfill(table, "b", **options)
        calls(log)
        upsert(table, id=[3], a=[None])
        plain(table).update(where="id = 2", values={"a": None, "x": 20})
        assert table.verify("a").counts == {"right": 5, "not computed": 2}
        assert table.plan_backfill("a").reasons() == {"value is NULL": 2}
        assert "value is NULL: 2 rows" in str(table.plan_backfill("a"))
        backfill(table, "b", **options)
        assert calls(log, "a") == [3, 20]
        assert_chain_is_right(table)
        assert planned(table, "b") == 0
        assert table.verify("a").counts == {"right": 7}

    def test_a_null_that_comes_with_a_whole_row_is_computed(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "b")
        calls(log)
        upsert(table, id=[1, 2], x=[1, 30], y=[1, 2], u=["", ""], a=[None, None], b=[None, 7])
        backfill(table, "b")
        assert calls(log, "a") == [1, 30]
        assert by_id(table, "a") == {0: 0, 1: 0, 2: 15, 3: 1}
        assert by_id(table, "b")[2] == 7  # a person's
        assert planned(table, "b") == 0

    def test_a_null_that_the_function_returned_stays_right(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = table_of(local_db, 4)
        table.add_columns({"label": make_udf("c", Function("text"), ["x", "y"])})
        backfill(table, "label")
        calls(log)
        assert by_id(table, "label")[3] is None
        plain(table).update(values={"label": None})
        assert table.verify("label").counts == {"right": 1, "not computed": 3}
        backfill(table, "label")
        assert calls(log) == [0, 1, 2]

    def test_a_null_over_a_correction_is_computed(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "a")
        plain(table).update(where="id = 3", values={"a": 900})
        backfill(table, "a")
        calls(log)
        plain(table).update(where="id = 3", values={"a": None})
        backfill(table, "a")
        assert calls(log) == [3]
        assert by_id(table, "a")[3] == 1

    def test_a_null_over_a_value_of_an_earlier_function_is_computed(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "a")
        table.alter_columns(
            {"path": "a", "udf": make_udf("a", Function("half", 2), ["x"]), "keep": "computed"}
        )
        calls(log)
        plain(table).update(where="id = 3", values={"a": None})
        assert table.plan_backfill("a").reasons() == {"value is NULL": 1}
        backfill(table, "a")
        assert calls(log) == [3]

    def test_an_adopted_correction_goes_stale_like_any_other(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "b")
        plain(table).update(where="id = 3", values={"a": 900})
        backfill(table, "b")
        assert by_id(table, "b")[3] == 9001
        calls(log)
        upsert(table, id=[3], x=[20])
        backfill(table, "b")
        assert calls(log) == [10, 20]
        assert_chain_is_right(table)

    def test_failed_rows_stay_null_until_they_are_asked_for(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = table_of(local_db, 6)
        table.add_columns({"d": make_udf("d", Function("flaky"), ["y"])})
        log.failing = True
        backfill(table, "d")
        calls(log)
        log.failing = False
        plain(table).optimize()
        clean_up(table)
        backfill(table, "d")
        assert calls(log) == []
        upsert(table, id=[0], y=[9])
        backfill(table, "d")
        assert calls(log) == [9]
        backfill(table, "d", retry_failed=True)
        assert calls(log) == [3]
        assert by_id(table, "d") == {0: 10, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6}


@pytest.mark.slow  # random histories do such things, in the quick round too
class TestColumns:
    @pytest.mark.parametrize("ours", [True, False])
    def test_a_renamed_input_is_followed(
        self, local_db: Connection, log: Recorder, ours: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "a")
        calls(log)
        writer = table if ours else plain(table)
        writer.alter_columns({"path": "x", "rename": "x_old"})
        writer.add_columns({"x": "id + 100"})
        assert planned(table, "a") == 0
        upsert(table, id=[1, 2], x=[70, 71], x_old=[20, 2])
        backfill(table, "a")
        assert calls(log) == [20]
        assert by_id(table, "a") == {0: 0, 1: 10, 2: 1, 3: 1}

    def test_an_input_that_was_dropped_and_came_again_is_read_by_name(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "a")
        calls(log)
        plain(table).drop_columns(["x"])
        plain(table).add_columns({"x": "id * id"})
        assert planned(table, "a") == 2
        backfill(table, "a")
        assert calls(log) == [4, 9]
        assert by_id(table, "a") == {0: 0, 1: 0, 2: None, 3: None}

    @pytest.mark.parametrize("ours", [True, False])
    def test_a_cast_that_keeps_the_values_costs_nothing(
        self, local_db: Connection, log: Recorder, ours: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "b")
        calls(log)
        (table if ours else plain(table)).alter_columns({"path": "x", "data_type": pa.int32()})
        assert planned(table, "b") == 0
        upsert(table, id=[1], x=[20])
        backfill(table, "b")
        assert calls(log) == [10, 20]

    @pytest.mark.parametrize("ours", [True, False])
    def test_a_column_that_was_dropped_and_declared_again_is_computed_again(
        self, local_db: Connection, log: Recorder, ours: bool
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "b")
        calls(log)
        (table if ours else plain(table)).drop_columns(["b"])
        table.checkout_latest()
        table.add_columns({"b": make_udf("b", B, ["a"])})
        assert planned(table, "b") == 4
        backfill(table, "b")
        assert calls(log) == [0, 0, 1, 1]
        assert_chain_is_right(table)

    def test_an_overwrite_with_another_order_of_columns_is_read_by_name(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "b")
        calls(log)
        schema = pa.schema([table.schema.field(name) for name in ("id", "y", "x", "a", "b")])
        rows = pa.table({"id": [7, 8], "y": [0, 0], "x": [10, 20], "a": [None, 5], "b": [None] * 2})
        folder = table.ref.uri.rsplit("/", 1)[0]
        lancedb.connect(folder).create_table("t", rows.cast(schema), mode="overwrite")
        table = local_db.open_table("t")
        backfill(table, "b")
        assert by_id(table, "a") == {7: 5, 8: 5}
        assert by_id(table, "b") == {7: 51, 8: 51}
        assert calls(log) == [5, 5, 10]

    def test_a_plan_after_an_overwrite_knows_what_was_computed_before(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "a", checkpoint_size=1)
        calls(log)
        schema = pa.schema([table.schema.field(name) for name in ("id", "x", "a")])
        rows = pa.table({"id": [7, 8], "x": [1, 20], "a": pa.nulls(2, pa.int64())})
        folder = table.ref.uri.rsplit("/", 1)[0]
        lancedb.connect(folder).create_table("t", rows.cast(schema), mode="overwrite")
        table = local_db.open_table("t")
        assert planned(table, "a") == 1
        backfill(table, "a")
        assert calls(log) == [20]
        assert by_id(table, "a") == {7: 0, 8: 10}

    def test_a_plan_after_another_function_and_an_overwrite_knows_what_was_supplied(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        table.alter_columns({"path": "a", "udf": make_udf("a", Function("half", 2), ["x"])})
        schema = pa.schema([table.schema.field(name) for name in ("id", "x", "a")])
        rows = pa.table({"id": [7, 8], "x": [10, 20], "a": [None, 500]})
        folder = table.ref.uri.rsplit("/", 1)[0]
        lancedb.connect(folder).create_table("t", rows.cast(schema), mode="overwrite")
        table = local_db.open_table("t")
        assert planned(table, "a") == 1
        backfill(table, "a")
        assert calls(log) == [10]
        assert by_id(table, "a") == {7: 10, 8: 500}

    def test_another_function_and_back_costs_nothing(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "a")
        calls(log)
        table.alter_columns({"path": "a", "udf": make_udf("a", Function("half", 2), ["x"])})
        assert planned(table, "a") == 4
        table.alter_columns({"path": "a", "udf": make_udf("a", A, ["x"])})
        assert planned(table, "a") == 0
        backfill(table, "a")
        assert calls(log) == []

    def test_receipts_are_hidden(self, local_db: Connection, log: Recorder) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "b")
        shown = ["id", "x", "y", "u", "a", "b"]
        assert table.schema.names == shown
        assert table.to_arrow().schema.names == shown
        assert list(table.to_pandas().columns) == shown
        assert table.search(None).to_arrow().schema.names == shown
        assert table.head(2).schema.names == shown


@pytest.mark.slow  # random histories do such things, in the quick round too
class TestVersions:
    def test_a_restored_table_has_its_old_values_and_receipts(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4))
        backfill(table, "b")
        version = lance.dataset(table.ref.uri).version
        upsert(table, id=[1], x=[20])
        backfill(table, "b")
        calls(log)
        plain(table).restore(version)
        assert planned(table, "b") == 0
        assert_chain_is_right(table)
        upsert(table, id=[1], x=[20])
        backfill(table, "b")
        assert calls(log) == [10, 20]

    def test_a_plan_after_a_restore_knows_the_calls(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 3))
        version = lance.dataset(table.ref.uri).version
        upsert(table, id=[1], x=[20])
        backfill(table, "a", checkpoint_size=2)
        calls(log)
        plain(table).restore(version)
        wanted = planned(table, "a")
        backfill(table, "a")
        assert wanted == len(calls(log))
        assert by_id(table, "a") == {0: 0, 1: 0, 2: 1}

    @pytest.mark.parametrize("commit", [1, 2])
    def test_a_job_whose_driver_died_is_taken_up(
        self, local_db: Connection, log: Recorder, commit: int
    ) -> None:
        table = with_chain(table_of(local_db, 4, 4, 4))
        backfill(table, "a", where="id < 2")
        calls(log)
        with dying_commits(table.ref.uri, commit) as fuse, pytest.raises(OSError, match="driver"):
            table.backfill("a", commit_granularity=1, checkpoint_size=2)
        assert fuse.blown
        backfill(table, "a")
        assert calls(log) == list(range(2, 12))
        assert by_id(table, "a") == {i: half(1, i) for i in range(12)}

    def test_rows_that_changed_while_a_job_was_dead_are_computed_again(
        self, local_db: Connection, log: Recorder
    ) -> None:
        table = with_chain(table_of(local_db, 4, 4))
        with dying_commits(table.ref.uri, 1), pytest.raises(OSError, match="driver"):
            table.backfill("a", checkpoint_size=2)
        index_id(table)
        upsert(table, id=[1, 6], x=[20, 30])
        backfill(table, "a")
        assert by_id(table, "a") == {i: half(1, x) for i, x in by_id(table, "x").items()}


class TestViews:
    def test_cleaning_up_the_source_costs_no_calls(
        self, local_db: Connection, log: Recorder
    ) -> None:
        source = with_chain(table_of(local_db, 4, 4, stable=True))
        backfill(source, "a")
        query = source.query().select(["id", "a"]).add_column({"b": make_udf("v", B, ["a"])})
        view = local_db.create_materialized_view("view", query)
        view.refresh()
        assert calls(log, "v") == [0, 0, 1, 1, 2, 3, 3, None]
        upsert(source, id=[1, 6], x=[20, 7])
        backfill(source, "a")
        plain(source).optimize()
        clean_up(source)
        log.taken()
        assert view.refresh().status == "DONE"
        assert calls(log, "v") == [10]
        assert {r["id"]: r["b"] for r in view.to_arrow().to_pylist()} == {
            i: tens(1, a) for i, a in by_id(source, "a").items()
        }

    def test_rows_that_left_a_cleaned_up_source_leave_the_view(
        self, local_db: Connection, log: Recorder
    ) -> None:
        source = table_of(local_db, 4, 4, stable=True)
        query = source.query().select(["id"]).add_column({"v": make_udf("v", A, ["x"])})
        view = local_db.create_materialized_view("view", query)
        view.refresh()
        calls(log)
        plain(source).delete("id IN (1, 6)")
        upsert(source, id=[2], x=[20])
        clean_up(source)
        assert view.refresh().status == "DONE"
        assert calls(log) == [20]
        found = {row["id"]: row["v"] for row in view.to_arrow().to_pylist()}
        assert found == {i: half(1, x) for i, x in by_id(source, "x").items()}

"""A where clause computes exactly the rows it selects; the others keep what they have."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from geneva import Connection, Table
from geneva.errors import InvalidFilterError
from support import Calls, by_id, checkpoint_ranges, column, counted, make_table, tripled


def negative(id: int) -> int:
    return -id


class TestSelection:
    def test_only_the_selected_rows_run(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [4, 4])
        table.add_columns({"x": tripled(calls)})
        result = table.backfill("x", where="id % 2 = 1 AND id < 6")
        assert calls.rows == [1, 3, 5]
        assert result.rows_computed == result.rows_committed == 3
        assert by_id(table, "x") == {i: 3 * i if i in (1, 3, 5) else None for i in range(8)}

    def test_the_rest_comes_later_and_nothing_twice(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [4, 4])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x", where="id IN (1, 5)")
        table.backfill("x")
        assert calls.rows == list(range(8))
        assert by_id(table, "x") == {i: 3 * i for i in range(8)}

    def test_rows_that_are_asked_for_run_again_and_the_others_keep_their_values(
        self, db: Connection, calls: Calls
    ) -> None:
        table = make_table(db, [4])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        for _ in range(2):
            calls.clear()
            table.backfill("x", where="id > 1")
            assert calls.rows == [2, 3]
        assert column(table, "x") == [0, 3, 6, 9]

    def test_unselected_rows_keep_older_values(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [4, 2])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        table.alter_columns({"path": "x", "udf": counted(calls, negative)})
        calls.clear()
        table.backfill("x", where="id IN (1, 4)")
        assert by_id(table, "x") == {0: 0, 1: -1, 2: 6, 3: 9, 4: -4, 5: 15}
        assert calls.taken() == [1, 4]
        table.backfill("x")
        assert by_id(table, "x") == {i: -i for i in range(6)}
        assert calls.rows == [0, 2, 3, 5], "what the new function made already stays"

    def test_no_row_selected(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3])
        table.add_columns({"x": tripled(calls)})
        version = table.version
        assert table.backfill("x", where="id > 99").rows_computed == 0
        assert (calls.count, table.version) == (0, version)

    def test_unknown_counts_as_no(self, db: Connection, calls: Calls) -> None:
        data = pa.table({"id": [0, 1, 2], "a": pa.array([None, 5, 1], pa.int64())})
        table = make_table(db, [data])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x", where="a > 2")
        assert column(table, "x") == [None, 3, None]
        assert calls.rows == [1]

    def test_deleted_rows_are_not_selected(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [6])
        table.delete("id IN (0, 3)")
        table.add_columns({"x": tripled(calls)})
        table.backfill("x", where="id <= 4", checkpoint_size=2, task_size=100)
        assert calls.rows == [1, 2, 4]
        assert by_id(table, "x") == {1: 3, 2: 6, 4: 12, 5: None}
        assert checkpoint_ranges(table) == {}, "who asks for these rows again wants new values"

    def test_a_few_rows_out_of_many(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [1_000])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x", where="id IN (3, 500, 999)")
        assert calls.rows == [3, 500, 999]
        table.backfill("x", where="id IN (4, 500)")
        values = by_id(table, "x")
        assert {i: v for i, v in values.items() if v is not None} == {
            3: 9,
            4: 12,
            500: 1_500,
            999: 2_997,
        }
        assert calls.rows == [3, 4, 500, 500, 999]

    @pytest.mark.parametrize("stable", [False, True])
    def test_a_few_rows_by_address_with_deletions(
        self, local_db: Connection, calls: Calls, stable: bool
    ) -> None:
        table = make_table(local_db, [100, 100], stable_row_ids=stable)
        table.delete("id % 3 = 0")
        table.add_columns({"x": tripled(calls)})
        table.backfill("x", where="id IN (1, 3, 50, 199)")
        assert calls.rows == [1, 50, 199]
        assert {i: v for i, v in by_id(table, "x").items() if v} == {1: 3, 50: 150, 199: 597}


class TestExpressions:
    @pytest.fixture
    def table(self, local_db: Connection, calls: Calls) -> Table:
        now = datetime.now(UTC).replace(tzinfo=None)
        data = pa.table(
            {
                "id": pa.array([0, 1, 2, 3], pa.int64()),
                "name": ["it's", "b", None, "d%"],
                "at": pa.array(
                    [now, now - timedelta(days=10), now - timedelta(days=40), None],
                    pa.timestamp("us"),
                ),
                "day": pa.array([now.date(), None, None, None], pa.date32()),
                "meta": [{"w": 1.5}, {"w": 2.5}, None, {"w": None}],
                "tags": [["a"], [], None, ["a", "b"]],
                "flag": [True, False, None, True],
                "odd name": [1, 2, 3, 4],
                "Größe": [1, 2, 3, 4],
            }
        )
        table = make_table(local_db, [data])
        table.add_columns({"x": tripled(calls)})
        return table

    @pytest.mark.parametrize(
        ("where", "selected"),
        [
            ("id >= 2", [2, 3]),
            ("name = 'it''s'", [0]),
            ("name IS NULL OR name LIKE 'd%'", [2, 3]),
            ("name IN ('b', 'z')", [1]),
            ("at > now() - interval '30 days'", [0, 1]),
            ("at < now() - interval '30 days'", [2]),
            ("at >= '2020-01-01'", [0, 1, 2]),
            ("at > timestamp '2020-01-01 00:00:00'", [0, 1, 2]),
            ("day > date '2020-01-01'", [0]),
            ("meta.w > 2", [1]),
            ("array_has(tags, 'b')", [3]),
            ("flag", [0, 3]),
            ("NOT flag", [1]),
            ("`odd name` BETWEEN 2 AND 3", [1, 2]),
            ("`Größe` = 4", [3]),
            ("x IS NULL", [0, 1, 2, 3]),
            ("x IS NOT NULL", []),
            ("length(name) = 1", [1]),
            ("id = 1 -- a remark", [1]),
            ("true", [0, 1, 2, 3]),
        ],
    )
    def test_datafusion_sql_over_any_column(
        self, table: Table, calls: Calls, where: str, selected: list[int]
    ) -> None:
        assert table.plan_backfill("x", where=where).rows_to_run == len(selected)
        table.backfill("x", where=where)
        assert calls.rows == selected
        assert [i for i, value in by_id(table, "x").items() if value is not None] == selected

    @pytest.mark.parametrize(
        "where",
        [
            "id >",
            "nope = 1",
            "id = ",
            "meta.nope = 1",
            "id ++ 1",
            "SELECT 1",
            "id",
            "name",
            "no_such_function(id)",
            "id = 1; DROP TABLE t",
            "at > now() - interval 'many days'",
            "nope > now() - interval '1 day'",
        ],
    )
    def test_a_wrong_one_is_refused_before_a_job_exists(
        self, table: Table, calls: Calls, where: str
    ) -> None:
        for start in (table.plan_backfill, table.backfill, table.backfill_async):
            with pytest.raises(InvalidFilterError) as caught:
                start("x", where=where)  # type: ignore[operator]
            assert repr(where) in str(caught.value)
            assert "/home/" not in str(caught.value)
        assert table._connection.list_jobs() == []
        assert calls.count == 0

    def test_a_wrong_one_is_refused_on_an_empty_table_as_well(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = local_db.create_table("e", schema=pa.schema([("id", pa.int64())]))
        table.add_columns({"x": tripled(calls)})
        with pytest.raises(InvalidFilterError, match="nope"):
            table.backfill("x", where="nope = 1")
        assert local_db.list_jobs() == []


@pytest.mark.parametrize(
    "where", ["id = 1 id = 2", "id = 1 garbage", "id = 1, 2", "id = 1; id = 2"]
)
def test_nothing_of_a_clause_is_ignored(local_db: Connection, calls: Calls, where: str) -> None:
    table = make_table(local_db, [3])
    table.add_columns({"x": tripled(calls)})
    with pytest.raises(InvalidFilterError, match="can't be used on this table"):
        table.backfill("x", where=where)
    assert calls.count == 0


class TestStaleRowsOutside:
    """An explicit clause beside stale rows is warned of: every time, with their number."""

    @pytest.fixture
    def table(self, local_db: Connection, calls: Calls) -> Table:
        table = make_table(local_db, [4, 4, 4])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        return table

    def warned(self, table: Table, caplog: pytest.LogCaptureFixture, where: str) -> int:
        """How many rows the backfill says are stale outside of its clause."""
        caplog.clear()
        table.backfill("x", where=where)
        said = [r.getMessage() for r in caplog.records if "outside the where clause" in r.message]
        numbers = [int(text.split(": ")[1].split(" row")[0]) for text in said]
        return numbers[0] if numbers else 0

    def test_for_every_fragment_and_every_time(
        self, table: Table, calls: Calls, caplog: pytest.LogCaptureFixture
    ) -> None:
        table.alter_columns({"path": "x", "udf": counted(calls, negative)})
        left = 12
        for where, rows in (("id = 0", 1), ("id = 0", 0), ("id = 5", 1), ("x IS NULL", 0)):
            left -= rows
            assert self.warned(table, caplog, where) == left, where
        table.compact_files()
        assert self.warned(table, caplog, "id = 11") == left - 1
        assert self.warned(table, caplog, "id >= 0") == 0
        assert self.warned(table, caplog, "id = 3") == 0

    def test_after_an_update_of_inputs(
        self, table: Table, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert self.warned(table, caplog, "id = 3") == 0
        table.update(where="id IN (1, 2, 9)", values_sql={"id": "id + 100"})
        for where, left in (("x IS NULL", 3), ("id = 101", 2), ("id = 101", 2), ("id > 100", 0)):
            assert self.warned(table, caplog, where) == left, where

    def test_rows_that_have_no_value_are_not_stale(
        self, table: Table, calls: Calls, caplog: pytest.LogCaptureFixture
    ) -> None:
        table.add(pa.table({"id": pa.array([12, 13], pa.int64())}))
        assert self.warned(table, caplog, "id = 12") == 0
        table.update(where="id = 12", values={"id": 99})
        assert self.warned(table, caplog, "id = 3") == 1
        table.alter_columns({"path": "x", "udf": counted(calls, negative)})
        assert self.warned(table, caplog, "id = 3") == 12

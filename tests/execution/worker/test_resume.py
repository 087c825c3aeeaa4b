"""What a failed run leaves behind is used by the next one, and never believed blindly."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from geneva import Connection, JobStatus, Table
from geneva.errors import UDFExecutionError
from support import (
    Calls,
    breakable,
    by_id,
    checkpoint_keys,
    checkpoint_ranges,
    checkpoint_store,
    column,
    counted,
    make_table,
    staged_records,
    tripled,
    uncommitted,
)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return tmp_path / "broken"


class TestAfterAFailure:
    def test_checkpointed_batches_are_not_computed_again(
        self, db: Connection, calls: Calls, broken: Path
    ) -> None:
        table = make_table(db, [10])
        table.add_columns({"x": breakable(calls, broken)})
        broken.write_text(json.dumps([7]))
        with pytest.raises(UDFExecutionError, match="can't do 7"):
            table.backfill("x", checkpoint_size=2, task_size=100)
        assert checkpoint_ranges(table) == {0: [(0, 2), (2, 4), (4, 6)]}
        assert calls.taken() == [0, 1, 2, 3, 4, 5, 6, 7]
        broken.unlink()
        plan = table.plan_backfill("x")
        assert (plan.rows_to_run, plan.rows_reused) == (4, 6)
        assert "reuse" in str(plan)
        result = table.backfill("x", checkpoint_size=2, task_size=100)
        assert calls.rows == [6, 7, 8, 9]
        assert (result.rows_computed, result.rows_reused) == (4, 6)
        assert column(table, "x") == [3 * i for i in range(10)]

    def test_committed_fragments_stay_committed(
        self, db: Connection, calls: Calls, broken: Path
    ) -> None:
        table = make_table(db, [2] * 5)
        table.add_columns({"x": breakable(calls, broken)})
        broken.write_text(json.dumps([7]))
        with pytest.raises(UDFExecutionError):
            table.backfill("x", commit_granularity=1, task_size=2, concurrency=1)
        assert by_id(table, "x") == {i: 3 * i if i < 6 else None for i in range(10)}
        broken.unlink()
        calls.clear()
        table.backfill("x")
        assert set(calls.rows) <= {6, 7, 8, 9}
        assert by_id(table, "x") == {i: 3 * i for i in range(10)}

    def test_failing_again_and_again_still_moves_on(
        self, db: Connection, calls: Calls, broken: Path
    ) -> None:
        table = make_table(db, [9])
        table.add_columns({"x": breakable(calls, broken)})
        for row in (2, 5, 8):
            broken.write_text(json.dumps([row]))
            with pytest.raises(UDFExecutionError, match=f"can't do {row}"):
                table.backfill("x", checkpoint_size=1, task_size=100)
        broken.unlink()
        table.backfill("x", checkpoint_size=1, task_size=100)
        assert column(table, "x") == [3 * i for i in range(9)]
        assert calls.rows == sorted([*range(9), 2, 5, 8]), "a failing row once more, no other"

    def test_a_range_that_several_tasks_share(
        self, db: Connection, calls: Calls, broken: Path
    ) -> None:
        table = make_table(db, [20])
        table.add_columns({"x": breakable(calls, broken)})
        broken.write_text(json.dumps([19]))
        with pytest.raises(UDFExecutionError):
            table.backfill("x", task_size=5, concurrency=1)
        broken.unlink()
        calls.clear()
        result = table.backfill("x", task_size=5)
        # Of the last range the rows before the failing one may have been saved, or not.
        assert set(calls.rows) <= {15, 16, 17, 18, 19}
        assert result.rows_computed == calls.count
        assert column(table, "x") == [3 * i for i in range(20)]

    def test_a_where_clause_resumes_as_itself(
        self, db: Connection, calls: Calls, broken: Path
    ) -> None:
        table = make_table(db, [10])
        table.add_columns({"x": breakable(calls, broken)})
        broken.write_text(json.dumps([7]))
        with pytest.raises(UDFExecutionError):
            table.backfill("x", where="id % 2 = 1", checkpoint_size=1, task_size=100)
        broken.unlink()
        calls.clear()
        assert table.plan_backfill("x", where="id % 2 = 0").rows_to_run == 5, "another clause"
        table.backfill("x", where="id % 2 = 1", checkpoint_size=1, task_size=100)
        assert calls.rows == [7, 9]
        assert by_id(table, "x") == {i: 3 * i if i % 2 else None for i in range(10)}

    def test_a_changed_function_uses_nothing_of_the_old_one(
        self, db: Connection, calls: Calls, broken: Path
    ) -> None:
        table = make_table(db, [6])
        table.add_columns({"x": breakable(calls, broken)})
        broken.write_text(json.dumps([5]))
        with pytest.raises(UDFExecutionError):
            table.backfill("x", checkpoint_size=1, task_size=100)
        calls.clear()
        table.alter_columns({"path": "x", "udf": counted(calls, lambda id: -id, data_type="int64")})
        table.backfill("x")
        assert column(table, "x") == [-i for i in range(6)]
        assert calls.rows == list(range(6))

    def test_changed_inputs_use_nothing_of_the_old_ones(
        self, local_db: Connection, calls: Calls, broken: Path
    ) -> None:
        table = make_table(local_db, [6])
        table.add_columns({"a": tripled(calls)})
        table.backfill("a")
        table.add_columns({"x": (breakable(calls, broken), ["a"])})
        broken.write_text(json.dumps([15]))
        with pytest.raises(UDFExecutionError):
            table.backfill("x", checkpoint_size=1, task_size=100)
        table.backfill("a", udf=counted(calls, lambda id: -id, data_type=pa.int64()))
        calls.clear()
        # Of what is there: by its own function `a` would be computed anew first.
        table.backfill("x", upstream="ignore")
        assert column(table, "x") == [-3 * i for i in range(6)]
        assert calls.count == 5, "the row whose input is 0 as before has a result"

    def test_rows_deleted_since_are_left_out(
        self, db: Connection, calls: Calls, broken: Path
    ) -> None:
        table = make_table(db, [10])
        table.add_columns({"x": breakable(calls, broken)})
        broken.write_text(json.dumps([7]))
        with pytest.raises(UDFExecutionError):
            table.backfill("x", checkpoint_size=2, task_size=100)
        broken.unlink()
        calls.clear()
        table.delete("id IN (1, 8)")
        table.backfill("x", checkpoint_size=2, task_size=100)
        assert calls.rows == [6, 7, 9]
        left = [0, 2, 3, 4, 5, 6, 7, 9]
        assert by_id(table, "x") == {i: 3 * i for i in left}


class TestStagedFiles:
    """In one process only: the driver is what fails here."""

    def test_staged_files_are_committed_without_a_call(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = make_table(local_db, [4, 4])
        table.add_columns({"x": tripled(calls)})
        with uncommitted(monkeypatch):
            table.backfill("x", checkpoint_size=4, task_size=4)
        assert local_db.list_jobs()[0].status is JobStatus.FAILED
        assert staged_records(table) == [0, 1]
        assert column(table, "x") == [None] * 8
        plan = table.plan_backfill("x")
        assert (plan.rows_to_run, plan.rows_reused) == (0, 8)
        assert "reuse staged file" in str(plan)
        result = table.backfill("x")
        assert (result.rows_computed, result.rows_reused, result.rows_committed) == (0, 8, 8)
        assert checkpoint_keys(table) == [], "nothing is left of the job that died"
        assert calls.rows == list(range(8))
        assert column(table, "x") == [3 * i for i in range(8)]

    def test_a_staged_file_that_is_gone_or_damaged_is_made_again(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = make_table(local_db, [4, 4, 4])
        table.add_columns({"x": tripled(calls)})
        with uncommitted(monkeypatch):
            table.backfill("x", checkpoint_size=4, task_size=4)
        store = checkpoint_store(table)
        files = {
            key.fragment_id: Path(table.ref.uri)
            / "data"
            / store[key.path()].column("file")[0].as_py()
            for key in checkpoint_keys(table)
            if key.rows is None
        }
        files[0].unlink()
        files[1].write_bytes(files[1].read_bytes()[:-10])
        calls.clear()
        table.backfill("x")
        assert column(table, "x") == [3 * i for i in range(12)]
        assert calls.count == 0, "the batch checkpoints are still there"

    def test_a_staged_file_in_the_place_of_another_is_made_again(
        self,
        local_db: Connection,
        calls: Calls,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        table = make_table(local_db, [4, 4, 4])
        table.add_columns({"x": tripled(calls)})
        with uncommitted(monkeypatch):
            table.backfill("x", checkpoint_size=4, task_size=4)
        store = checkpoint_store(table)
        keys = [key for key in checkpoint_keys(table) if key.rows is None]
        names = {key.fragment_id: store[key.path()].column("file")[0].as_py() for key in keys}
        first, second = (Path(table.ref.uri) / "data" / names[i] for i in (0, 1))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        for key in checkpoint_keys(table):
            if key.rows is not None:
                del store[key.path()]
        calls.clear()
        table.backfill("x")
        assert column(table, "x") == [3 * i for i in range(12)]
        assert sorted(calls.rows) == list(range(8)), "the third one was whole, and its own"
        assert f"{names[0]} holds what was staged as {names[1]}" in caplog.text

    def test_a_staged_file_of_a_column_that_was_dropped_is_not_used(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = make_table(local_db, [4])
        table.add_columns({"x": tripled(calls)})
        with uncommitted(monkeypatch):
            table.backfill("x", checkpoint_size=4, task_size=4)
        table.drop_columns(["x"])
        table.add_columns({"x": tripled(calls)})
        assert table.plan_backfill("x").fragments[0].action.value != "reuse staged file"
        table.backfill("x")
        assert column(table, "x") == [0, 3, 6, 9]
        assert set(calls.rows) == {0, 1, 2, 3}

    def test_quick_work_is_not_worth_a_record(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = make_table(local_db, [4])
        table.add_columns({"x": tripled(calls)})
        with uncommitted(monkeypatch):
            table.backfill("x", task_size=4)
        assert checkpoint_keys(table) == []
        assert calls.count == 4


def test_tables_with_the_same_rows_do_not_share_results(
    db: Connection, calls: Calls, broken: Path
) -> None:
    tables: list[Table] = [make_table(db, [4], name) for name in ("a", "b")]
    broken.write_text(json.dumps([3]))
    for table in tables:
        table.add_columns({"x": breakable(calls, broken)})
        with pytest.raises(UDFExecutionError):
            table.backfill("x", checkpoint_size=1, task_size=10)
    assert calls.rows == [0, 0, 1, 1, 2, 2, 3, 3]

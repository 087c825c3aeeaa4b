"""What a backfill computes, how often it calls the function, and what each parameter does."""

from __future__ import annotations

import asyncio
import itertools
import math
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geneva import UDF, Connection, JobStatus, Table, udf
from geneva.errors import (
    JobTimeoutError,
    TableNotFoundError,
    UserInputError,
)
from geneva.execution.runner import InProcessRunner
from geneva.planning import sizing
from support import (
    Calls,
    by_id,
    checkpoint_keys,
    checkpoint_ranges,
    checkpoint_store,
    column,
    connect,
    counted,
    make_table,
    staged_records,
    tripled,
    uncommitted,
)


def slowly(id: int) -> int:
    time.sleep(0.05)
    return id * 3


class TestEveryRowOnce:
    def test_all_rows_of_all_fragments(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [5, 1, 7])
        table.add_columns({"x": tripled(calls)})
        assert set(by_id(table, "x").values()) == {None}
        result = table.backfill("x")
        assert by_id(table, "x") == {i: 3 * i for i in range(13)}
        assert calls.rows == list(range(13))
        assert result.status is JobStatus.DONE
        assert (result.rows_computed, result.rows_committed, result.rows_reused) == (13, 13, 0)
        assert result.fragments_committed == 3

    def test_the_handle_sees_the_result(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        assert table.to_arrow().column("x").to_pylist() == [0, 3, 6]
        assert table.to_pandas()["x"].tolist() == [0, 3, 6]
        assert table.search().where("x = 3").to_list()[0]["id"] == 1
        assert calls.count == 3

    def test_a_second_time_calls_nothing_and_commits_nothing(
        self, db: Connection, calls: Calls
    ) -> None:
        table = make_table(db, [4, 4])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        version = table.version
        again = table.backfill("x")
        assert calls.count == 8
        assert table.version == version
        assert (again.status, again.rows_computed) == (JobStatus.DONE, 0)

    def test_a_null_that_the_function_returned_is_a_value(
        self, db: Connection, calls: Calls
    ) -> None:
        table = make_table(db, [6])
        odd_only = counted(calls, lambda id: id if id % 2 else None, data_type=pa.int64())
        table.add_columns({"x": odd_only})
        table.backfill("x")
        table.backfill("x")
        assert column(table, "x") == [None, 1, None, 3, None, 5]
        assert calls.rows == list(range(6))

    def test_several_columns_of_one_table(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3, 3])
        table.add_columns({"x": tripled(calls)})
        table.add_columns({"y": (tripled(calls), ["x"])})
        table.backfill("x")
        table.backfill("y")
        assert column(table, "y") == [9 * i for i in range(6)]
        assert calls.rows == sorted([*range(6), *(3 * i for i in range(6))])

    def test_appended_rows_only(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [4])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        calls.clear()
        table.add(pa.table({"id": [10, 11]}))
        assert table.backfill("x").rows_computed == 2
        assert calls.rows == [10, 11]
        assert by_id(table, "x") == {i: 3 * i for i in (0, 1, 2, 3, 10, 11)}

    def test_deleted_rows_never_run(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [6, 3, 5])
        table.delete("id IN (1, 2, 6, 7, 8, 13)")
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        left = [0, 3, 4, 5, 9, 10, 11, 12]
        assert calls.rows == left
        assert by_id(table, "x") == {i: 3 * i for i in left}

    def test_a_changed_function_runs_anew(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        table.alter_columns({"path": "x", "udf": counted(calls, lambda id: -id, data_type="int64")})
        assert column(table, "x") == [0, 3, 6], "until the next backfill"
        calls.clear()
        table.backfill("x")
        assert column(table, "x") == [0, -1, -2]
        assert calls.count == 3

    def test_a_version_decides_whether_a_function_changed(
        self, db: Connection, calls: Calls
    ) -> None:
        table = make_table(db, [3])
        table.add_columns({"x": tripled(calls, version="1")})
        table.backfill("x")
        other = counted(calls, lambda id: -id, data_type=pa.int64(), version="1")
        table.alter_columns({"path": "x", "udf": other})
        assert table.backfill("x").rows_computed == 0
        newer = counted(calls, lambda id: -id, data_type=pa.int64(), version="2")
        table.alter_columns({"path": "x", "udf": newer})
        assert table.backfill("x").rows_computed == 3
        assert column(table, "x") == [0, -1, -2]
        assert calls.count == 6

    def test_a_dropped_and_added_column_starts_from_nothing(
        self, db: Connection, calls: Calls
    ) -> None:
        table = make_table(db, [4])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x", checkpoint_size=2, task_size=100)
        table.drop_columns(["x"])
        table.add_columns({"x": tripled(calls)})
        assert column(table, "x") == [None] * 4
        table.backfill("x")
        assert column(table, "x") == [0, 3, 6, 9]
        # Batch checkpoints hold values of the same function of the same inputs: they may be used.
        assert set(calls.rows) == {0, 1, 2, 3}
        assert calls.count in (4, 8)

    def test_optimize_keeps_values_and_needs_no_new_calls(
        self, db: Connection, calls: Calls
    ) -> None:
        table = make_table(db, [3, 3, 3])
        table.delete("id = 4")
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        table.optimize(cleanup_older_than=timedelta(milliseconds=1))
        left = [0, 1, 2, 3, 5, 6, 7, 8]
        assert len(table.to_lance().get_fragments()) == 1
        assert by_id(table, "x") == {i: 3 * i for i in left}
        table.backfill("x")
        assert by_id(table, "x") == {i: 3 * i for i in left}
        assert calls.rows == left


class TestEmptyTables:
    def test_no_rows(self, local_db: Connection, calls: Calls) -> None:
        table = local_db.create_table("t", schema=pa.schema([("id", pa.int64())]))
        table.add_columns({"x": tripled(calls)})
        assert table.backfill("x").rows_computed == 0
        assert table.plan_backfill("x").is_empty
        table.add(pa.table({"id": [7]}))
        table.backfill("x")
        assert column(table, "x") == [21]
        assert calls.rows == [7]

    def test_every_row_deleted(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [3, 2])
        table.add_columns({"x": tripled(calls)})
        table.delete("id >= 0")
        result = table.backfill("x", where="id > 0")
        assert (result.status, calls.count) == (JobStatus.DONE, 0)
        assert table.backfill("x").rows_computed == 0
        assert column(table, "x") == []

    def test_every_row_of_one_fragment_deleted(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3, 2, 1])
        table.delete("id IN (3, 4)")
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        assert by_id(table, "x") == {0: 0, 1: 3, 2: 6, 5: 15}
        assert calls.rows == [0, 1, 2, 5]


class TestNothingStartsWithoutNeed:
    SCRIPT = """
import sys, geneva
db = geneva.connect(sys.argv[1])
table = db.open_table("t")
table.computed_columns(), repr(table), str(table.plan_backfill("x"))
result = table.backfill("x")
assert result.status == "DONE" and result.rows_computed == 0, result
assert db.get_job(result).status == "DONE"
assert "pyspark" not in sys.modules and "py4j" not in sys.modules
"""

    def test_nothing_to_do_imports_no_spark(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [3])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", self.SCRIPT, local_db.uri],
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        assert (run.stdout, run.stderr) == ("", "")
        assert calls.count == 3

    def test_no_runner_is_made_without_work(self, tmp_path: Path, calls: Calls) -> None:
        def never() -> None:
            raise AssertionError("a runner was made")

        table = make_table(connect(tmp_path, never), [3])  # type: ignore[arg-type]
        table.add_columns({"x": tripled(calls)})
        assert table.plan_backfill("x").rows_to_run == 3
        assert table.backfill("x", where="id > 100").rows_computed == 0
        assert calls.count == 0


class Prepared:
    """Three times a number, read ahead in a thread."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def prepare(self, id: pa.Array) -> list[int]:
        return id.to_pylist()

    def __call__(self, ids: list[int]) -> pa.Array:
        self.calls.note(ids, time.monotonic())
        return pa.array([3 * i for i in ids])


def tripled_by(kind: str, calls: Calls) -> UDF:
    """Three times the column `id`, computed in one way or another."""

    def by_batch(id: pa.Array) -> pa.Array:
        return pa.array([3 * i for i in id.to_pylist()])

    async def by_call(id: int) -> int:
        await asyncio.sleep(0)
        calls.note([id], time.monotonic())
        return 3 * id

    match kind:
        case "batches":
            return counted(calls, by_batch, data_type=pa.int64(), batch_size=8)
        case "async":
            return udf(by_call, data_type=pa.int64())
        case "prepared":
            options = {"cpu_workers": 2, "batch_size": 8, "input_columns": ["id"]}
            return udf(Prepared, data_type=pa.int64(), **options)(calls)
    return tripled(calls)


class TestParameters:
    @pytest.mark.parametrize(("fragments", "granularity"), [(7, 1), (7, 3), (7, 64), (1, 1)])
    def test_commit_granularity_is_fragments_a_version(
        self, db: Connection, calls: Calls, fragments: int, granularity: int
    ) -> None:
        table = make_table(db, [2] * fragments)
        table.add_columns({"x": tripled(calls)})
        before = table.version
        result = table.backfill("x", commit_granularity=granularity)
        assert table.version - before == math.ceil(fragments / granularity)
        assert result.progress.commits == math.ceil(fragments / granularity)
        assert calls.rows == list(range(2 * fragments))

    def test_num_frags_goes_on_where_the_last_call_stopped(
        self, db: Connection, calls: Calls
    ) -> None:
        table = make_table(db, [2] * 5)
        table.add_columns({"x": tripled(calls)})
        done = []
        for _ in range(4):
            done.append(table.backfill("x", num_frags=2).fragments_committed)
        assert done == [2, 2, 1, 0]
        assert calls.rows == list(range(10))
        assert by_id(table, "x") == {i: 3 * i for i in range(10)}

    def test_num_frags_of_a_where_are_the_same_each_time(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [2] * 3)
        table.add_columns({"x": tripled(calls)})
        for _ in range(2):
            table.backfill("x", where="id > 1", num_frags=1)
            assert calls.taken() == [2, 3], "a `where` computes what it selects, again"

    def test_one_at_a_time(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [1] * 4)
        table.add_columns({"x": counted(calls, slowly)})
        table.backfill("x", concurrency=1, task_size=1)
        assert calls.most_at_once == 1
        assert calls.rows == list(range(4))

    def test_as_many_at_once_as_there_are_slots(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [4] * 4)
        table.add_columns({"x": counted(calls, slowly)})
        table.backfill("x", task_size=4)
        assert calls.most_at_once == 2
        assert calls.rows == list(range(16))

    def test_threads_within_a_task(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [8])
        table.add_columns({"x": counted(calls, slowly)})
        table.backfill(
            "x", concurrency=1, intra_applier_concurrency=4, checkpoint_size=8, task_size=8
        )
        assert calls.most_at_once == 4
        assert calls.rows == list(range(8))
        assert column(table, "x") == [3 * i for i in range(8)]

    def test_task_size_is_rows_a_task(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [20])
        table.add_columns({"x": tripled(calls)})
        result = table.backfill("x", task_size=5)
        assert result.progress.tasks == 4 + 1, "four ranges and one assembly"
        assert calls.rows == list(range(20))
        assert column(table, "x") == [3 * i for i in range(20)]
        assert checkpoint_ranges(table) == {}, "what is committed needs no checkpoint"

    def test_several_fragments_in_a_task(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [2] * 6)
        table.add_columns({"x": tripled(calls)})
        assert table.backfill("x", task_size=4).progress.tasks == 3
        assert calls.rows == list(range(12))

    def test_a_slot_that_is_alone_gets_one_task(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [20_000, 2, 2, 2])
        table.add_columns({"x": tripled(calls)})
        assert table.backfill("x", concurrency=1).progress.tasks == 1
        assert len(calls.rows) == 20_006

    def test_what_it_has_no_time_to_begin_with_comes_next(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sizing, "_FIRST_SECONDS_ALONE", 0.0)
        monkeypatch.setattr(sizing, "_MAX_REST_SECONDS", 0.0)
        table = make_table(local_db, [3, 2, 2])
        table.add_columns({"x": tripled(calls)})
        result = table.backfill("x", concurrency=1)
        assert result.progress.tasks == 2, "one fragment, and all others when its speed is known"
        assert calls.rows == list(range(7))
        assert by_id(table, "x") == {i: 3 * i for i in range(7)}

    def test_a_small_job_is_one_task(
        self, db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sizing, "_FIRST_SECONDS", 60.0)
        table = make_table(db, [100])
        table.add_columns({"x": tripled(calls)})
        result = table.backfill("x", concurrency=2)
        assert (result.progress.tasks, result.progress.checkpoints) == (1, 0)
        assert calls.rows == list(range(100))

    def test_few_rows_are_handed_out_evenly(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [20])
        table.add_columns({"x": tripled(calls)})
        result = table.backfill("x", concurrency=2)
        assert result.progress.tasks == 2 + 1, "each row may take minutes; and one assembly"
        assert calls.rows == list(range(20))

    @pytest.mark.parametrize("kind", ["rows", "batches", "async", "prepared"])
    def test_a_fragment_that_takes_long_is_given_back_and_shared(
        self, db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        monkeypatch.setattr(sizing, "_FIRST_SECONDS", 0.0)
        table = make_table(db, [200])
        table.delete("id in (0, 7, 30, 31, 199)")
        table.add_columns({"x": tripled_by(kind, calls)})
        result = table.backfill("x", concurrency=2, where="id % 3 != 1")
        wanted = [i for i in range(200) if i % 3 != 1 and i not in (0, 7, 30, 31, 199)]
        assert result.progress.tasks > 2
        assert calls.rows == wanted
        assert result.progress.udf_rows == result.progress.committed == len(wanted)
        assert by_id(table, "x") == {i: 3 * i if i % 3 != 1 else None for i in by_id(table, "x")}
        assert table.plan_backfill("x", where="id % 3 != 1").rows_to_run == len(wanted)
        table.backfill("x")
        assert calls.rows == [i for i in range(200) if i not in (0, 7, 30, 31, 199)]

    def test_a_checkpoint_size_is_kept_to_exactly(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [10, 4])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x", checkpoint_size=4, task_size=100)
        assert checkpoint_ranges(table) == {0: [(0, 4), (4, 8), (8, 10)], 1: [(0, 4)]}
        assert staged_records(table) == [0, 1]
        definition = table.computed_columns()["x"]
        for key in checkpoint_keys(table):
            text = key.path()
            assert text.startswith(f"udf-triple_ver-{definition.udf_version}_col-x_where-")
            assert "_uri-" in text
            assert "_srcfiles-" in text
        store = checkpoint_store(table)
        for key in checkpoint_keys(table):
            if key.rows is not None:
                batch = store[key.path()]
                value, receipt, address, digest = batch.schema.names
                assert digest == "_digest"
                assert (value, address) == ("x", "_rowaddr")
                assert receipt.startswith("__receipt_")
                addresses = batch.column("_rowaddr").to_pylist()
                base = key.fragment_id << 32
                assert addresses == list(range(base + key.rows.start, base + key.rows.end))
        assert calls.rows == list(range(14))

    def test_a_udf_may_bring_its_own_sizes_and_the_call_wins(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [6])
        table.add_columns({"x": tripled(calls, checkpoint_size=2, task_size=6)})
        table.backfill("x", num_frags=1)
        assert checkpoint_ranges(table) == {0: [(0, 2), (2, 4), (4, 6)]}
        table.alter_columns(
            {"path": "x", "udf": tripled(calls, checkpoint_size=2, task_size=6, version="2")}
        )
        table.backfill("x", checkpoint_size=3)
        assert (3, 6) in checkpoint_ranges(table)[0]
        assert calls.count == 12

    def test_tasks_of_a_given_size_have_whole_batches(
        self, local_db: Connection, calls: Calls
    ) -> None:
        def arrays(id: pa.Array) -> pa.Array:
            return id

        table = make_table(local_db, [34])
        table.add_columns({"x": counted(calls, arrays, data_type=pa.int64(), batch_size=8)})
        assert table.backfill("x", task_size=10).progress.tasks == 4  # the last puts it together
        assert sorted(calls.batches) == [2, 8, 8, 8, 8]

    def test_batch_size_is_rows_a_call(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [10])

        def arrays(id: pa.Array) -> pa.Array:
            return pa.compute.multiply(id, 3)

        table.add_columns({"x": counted(calls, arrays, data_type=pa.int64(), batch_size=4)})
        table.backfill("x", task_size=100)
        assert calls.batches == [4, 4, 2]
        assert column(table, "x") == [3 * i for i in range(10)]

    @pytest.mark.parametrize("most", [1, 3, 8])
    def test_checkpoints_by_time_stay_under_their_maximum(
        self, local_db: Connection, calls: Calls, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = make_table(local_db, [30])
        table.add_columns({"x": tripled(calls)})
        with uncommitted(monkeypatch):
            table.backfill("x", max_checkpoint_size=most, task_size=100)
        ranges = checkpoint_ranges(table)[0]
        assert max(end - start for start, end in ranges) <= most
        assert max(calls.batches) <= most
        assert calls.rows == list(range(30))

    def test_checkpoints_by_time_stay_over_their_minimum(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = make_table(local_db, [30])
        table.add_columns({"x": counted(calls, slowly)})
        with uncommitted(monkeypatch):
            table.backfill(
                "x",
                min_checkpoint_size=7,
                max_checkpoint_size=9,
                batch_checkpoint_flush_interval_seconds=0,
                task_size=100,
            )
        sizes = [end - start for start, end in checkpoint_ranges(table)[0]]
        assert all(7 <= size <= 9 for size in sizes[:-1])
        assert calls.rows == list(range(30))

    def test_a_flush_interval_makes_work_durable(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = make_table(local_db, [6])
        table.add_columns({"x": counted(calls, slowly)})
        with uncommitted(monkeypatch):
            table.backfill("x", batch_checkpoint_flush_interval_seconds=0, task_size=100)
        assert len(checkpoint_ranges(table)[0]) >= 2
        assert calls.count == 6

    def test_a_quick_fragment_needs_no_batch_checkpoint(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [1_000])
        table.add_columns({"x": counted(calls, lambda id: id, data_type=pa.int64())})
        table.backfill("x", task_size=1_000)
        assert checkpoint_ranges(table) == {}
        assert calls.count == 1_000

    @pytest.mark.parametrize("diversity", [0, 2, 5, 100])
    def test_shuffling_changes_the_order_and_nothing_else(
        self, local_db: Connection, calls: Calls, diversity: int
    ) -> None:
        table = make_table(local_db, [2] * 12)
        table.add_columns({"x": tripled(calls)})
        plan = table.plan_backfill("x", task_shuffle_diversity=diversity)
        order = [fragment.fragment_id for fragment in plan.fragments]
        assert sorted(order) == list(range(12))
        assert (order == list(range(12))) == (diversity < 2)
        table.backfill("x", task_shuffle_diversity=diversity)
        assert calls.rows == list(range(24))
        assert by_id(table, "x") == {i: 3 * i for i in range(24)}

    def test_a_timeout_ends_the_job_and_keeps_what_is_done(
        self, db: Connection, calls: Calls
    ) -> None:
        table = make_table(db, [2] * 20)
        table.add_columns({"x": counted(calls, slowly)})
        with pytest.raises(JobTimeoutError, match=r"did not finish within 0\.6 s"):
            table.backfill("x", timeout=timedelta(seconds=0.6), commit_granularity=1, task_size=2)
        assert db.list_jobs()[0].status is JobStatus.FAILED
        done = [i for i, value in by_id(table, "x").items() if value is not None]
        table.backfill("x")
        assert by_id(table, "x") == {i: 3 * i for i in range(40)}
        for row in done:
            assert calls.rows.count(row) == 1, "committed rows are not computed again"

    def test_read_version_reads_the_rows_of_then(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3])
        table.add_columns({"x": tripled(calls)})
        then = table.version
        table.add(pa.table({"id": [10, 11]}))
        assert table.plan_backfill("x", read_version=then).rows_to_run == 3
        result = table.backfill("x", read_version=then)
        assert db.get_job(result).config["read_version"] == then
        found = by_id(table, "x")
        assert {i: found[i] for i in range(3)} == {0: 0, 1: 3, 2: 6}
        assert calls.rows[:3] == [0, 1, 2]

    def test_a_version_that_is_not_there(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [3])
        table.add_columns({"x": tripled(calls)})
        with pytest.raises(TableNotFoundError, match="'t' at version 99"):
            table.backfill("x", read_version=99)
        with pytest.raises(UserInputError, match="did not exist yet in version 1"):
            table.backfill("x", read_version=1)
        assert local_db.list_jobs() == []

    def test_another_udf_for_one_run(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x", udf=counted(calls, lambda id: -id, data_type=pa.int64()))
        assert column(table, "x") == [0, -1, -2]
        assert calls.count == 3

    def test_a_plain_column_becomes_a_computed_one(self, db: Connection, calls: Calls) -> None:
        table = db.create_table(
            "t", pa.table({"id": [0, 1, 2], "x": pa.array([None, 7, None], pa.int64())})
        )
        table.backfill("x", udf=tripled(calls))
        assert column(table, "x") == [0, 7, 6], "a value that is there stays"
        assert calls.rows == [0, 2]
        assert "x" in table.computed_columns()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"concurrency": 0},
            {"concurrency": 1.5},
            {"intra_applier_concurrency": 0},
            {"checkpoint_size": -1},
            {"min_checkpoint_size": 0},
            {"max_checkpoint_size": "7"},
            {"min_checkpoint_size": 5, "max_checkpoint_size": 4},
            {"task_size": 0},
            {"commit_granularity": True},
            {"read_version": 0},
            {"num_frags": 0},
            {"batch_checkpoint_flush_interval_seconds": -1},
            {"task_shuffle_diversity": -1},
            {"timeout": "soon"},
            {"where": ""},
            {"where": 3},
        ],
        ids=str,
    )
    def test_wrong_numbers_are_refused_before_a_job_exists(
        self, local_db: Connection, calls: Calls, wrong: dict[str, object]
    ) -> None:
        table = make_table(local_db, [3])
        table.add_columns({"x": tripled(calls)})
        name = next(iter(wrong))
        for start in (table.backfill, table.backfill_async, table.plan_backfill):
            with pytest.raises(UserInputError, match=name):
                start("x", **wrong)  # type: ignore[operator]
        assert local_db.list_jobs() == []
        assert calls.count == 0


@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 15),
    deleted=st.sets(st.integers(0, 39), max_size=20),
)
@settings(max_examples=10)
def test_checkpoints_hold_exactly_the_rows_asked_for(
    tmp_path_factory: pytest.TempPathFactory, rows: int, size: int, deleted: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    calls = Calls(str(folder / "calls"))
    table = make_table(connect(folder, InProcessRunner), [rows])
    live = sorted(set(range(rows)) - deleted)
    if len(live) < rows:
        table.delete(f"id NOT IN ({', '.join(map(str, [*live, -1]))})")
    table.add_columns({"x": tripled(calls)})
    table.backfill("x", checkpoint_size=size, task_size=1_000)
    assert calls.rows == live
    ranges = checkpoint_ranges(table).get(0, [])
    held = [[i for i in live if start <= i < end] for start, end in ranges]
    assert [i for batch in held for i in batch] == live
    assert [len(batch) for batch in held[:-1]] == [size] * (len(held) - 1)
    assert all(start == end for (_, end), (start, _) in itertools.pairwise(ranges))


class TestPlans:
    def test_a_plan_says_what_will_run_and_changes_nothing(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [3, 3])
        table.add_columns({"x": tripled(calls)})
        before = sorted(p for p in Path(table.ref.uri).rglob("*") if p.is_file())
        plan = table.plan_backfill("x")
        assert plan.rows_to_run == plan.rows_to_compute == 6
        assert "run the UDF on 3 rows (new)" in str(plan)
        assert sorted(p for p in Path(table.ref.uri).rglob("*") if p.is_file()) == before
        assert table.backfill("x").rows_computed == plan.rows_to_run
        assert "nothing to do: 6 rows in 2 fragments up to date" in str(table.plan_backfill("x"))
        assert calls.count == 6

    def test_a_plan_for_another_udf_writes_nothing(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [3])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        before = sorted(p for p in Path(table.ref.uri).rglob("*") if p.is_file())
        plan = table.plan_backfill("x", udf=udf(lambda id: 1, data_type=pa.int64()))
        assert plan.rows_to_run == 3
        assert "UDF changed" in str(plan)
        assert sorted(p for p in Path(table.ref.uri).rglob("*") if p.is_file()) == before
        assert calls.count == 3

    @pytest.mark.parametrize("where", [None, "id > 1"])
    def test_plan_and_run_agree(
        self, local_db: Connection, calls: Calls, where: str | None
    ) -> None:
        table: Table = make_table(local_db, [3, 4])
        table.add_columns({"x": tripled(calls)})
        plan = table.plan_backfill("x", where=where, num_frags=1)
        result = table.backfill("x", where=where, num_frags=1)
        assert plan.rows_to_run == result.rows_computed == calls.count

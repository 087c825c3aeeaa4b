"""Jobs as their users meet them: results, futures, history."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import geneva
from geneva import Connection, JobFuture, JobResult, JobStatus, Table, skip_on_error, udf
from geneva.errors import (
    ColumnNotFoundError,
    JobCancelledError,
    JobNotFoundError,
    JobTimeoutError,
    StorageFullError,
    UDFExecutionError,
)
from geneva.execution.jobs import dead_jobs
from geneva.execution.jobs.progress import JobProgress
from geneva.execution.runner import InProcessRunner
from geneva.storage.checkpoints.store import errors_of
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.history import JobHistory
from geneva.storage.jobs.records import _LOST
from support import (
    Calls,
    by_id,
    checkpoint_keys,
    checkpoint_store,
    column,
    connect,
    counted,
    make_table,
    publishing,
    tripled,
)


def slowly(id: int) -> int:
    time.sleep(0.1)
    return id * 3


def wait_until(said: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not said():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestResults:
    def test_a_result_is_a_job_id(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3])
        table.add_columns({"x": tripled(calls)})
        result = table.backfill("x")
        assert isinstance(result, str)
        assert result.job_id == result == f"{result}" == "".join([result])
        assert str(result).startswith("DONE: 3 rows computed, 3 committed in ")
        assert str(result).endswith(f" s (job {result.job_id})"), "what `print` shows"
        assert {result.job_id: 1}[result] == 1
        for key in (result, result.job_id):
            assert db.get_job(key).job_id == result
            assert db._history.get(key).status is JobStatus.DONE
        assert "computed=3" in repr(result)
        copy = pickle.loads(pickle.dumps(result))
        assert isinstance(copy, JobResult)
        assert (copy, copy.status, copy.rows_computed) == (result, JobStatus.DONE, 3)
        assert calls.count == 3

    def test_a_pickled_result_says_the_same(self) -> None:
        progress = JobProgress(total=2, udf_rows=2, committed=2)
        result = JobResult("a-job", JobStatus.DONE, progress, ["another"], unit="partition")
        assert str(result).startswith("DONE: 2 partitions computed in ")
        copy = pickle.loads(pickle.dumps(result))
        assert (str(copy), repr(copy), copy.unit) == (str(result), repr(result), "partition")

    def test_what_is_said_of_several_functions_and_of_source_rows(self) -> None:
        progress = JobProgress(total=2, udf_rows=4, committed=2, failed_rows=1, functions=2)
        result = JobResult("a-job", JobStatus.DONE, progress)
        told = "DONE: 4 values of 2 functions computed, 1 of them failed and skipped, 2 rows "
        assert str(result).startswith(f"{told}committed in ")
        progress = JobProgress(total=2, udf_rows=1, committed=2)
        result = JobResult("a-job", JobStatus.DONE, progress, unit="source row")
        assert str(result).startswith("DONE: 1 source row computed, 2 committed in ")

    def test_columns_that_are_computed_first_add_no_rows(self, local_db: Connection) -> None:
        table = make_table(local_db, [3, 2])
        table.add_columns({"odd": udf(lambda id: id % 2, name="odd", data_type=pa.int64())})
        table.add_columns({"ten": udf(lambda odd: odd * 10, name="ten", data_type=pa.int64())})
        result = table.backfill("ten")
        assert (result.rows_committed, result.rows_computed, result.progress.total) == (5, 10, 5)
        assert local_db.get_job(result).metrics["checkpointed"] == 5
        assert "10 values of 2 functions computed, 5 rows committed" in str(result)
        table.update(where="id = 1", values={"id": 3})  # another input, and odd as before
        result = table.backfill("ten")
        assert (result.rows_committed, result.rows_computed, result.progress.total) == (1, 1, 1)

    def test_remarks_name_the_column_that_they_are_about(
        self, local_db: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        table = make_table(local_db, [3])
        share = udf(
            lambda id: 1 / id, name="share", data_type=pa.float64(), on_error=skip_on_error()
        )
        table.add_columns({"share": share})
        double = udf(
            lambda share: share and share * 2,
            name="double",
            data_type=pa.float64(),
            input_columns=["share"],
        )
        table.add_columns({"double": double})
        table.backfill("double")
        table.update(where="id = 2", values={"id": 4})
        table.backfill("double")
        (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert said.startswith("The backfill of column 'double' of table 't': share: 1 row failed")

    def test_an_error_says_how_to_go_on(self, local_db: Connection) -> None:
        table = make_table(local_db, [3])
        table.add_columns({"x": udf(lambda id: 1 / id, name="x", data_type=pa.float64())})
        with pytest.raises(UDFExecutionError) as raised:
            table.backfill("x")
        assert "row 0 (of rows [0, 1)): UDF 'x' failed: ZeroDivisionError" in str(raised.value)
        assert "on_error=skip_on_error()" in raised.value.__notes__[-1]

    def test_records_and_plans_are_short_in_a_list(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [3])
        table.add_columns({"x": tripled(calls)})
        plan = table.plan_backfill("x")
        assert repr(plan) == "BackfillPlan('t', 'x', version=2, rows_to_compute=3 of 3)"
        (column,) = table.computed_columns().values()
        assert repr(column).startswith("ColumnDefinition('x', int64, triple(id), version=")
        table.backfill("x")
        (job,) = jobs = local_db.list_jobs()
        assert len(repr(job)) < 400
        assert "metrics" not in repr(job)
        assert f"{job.job_id[:8]}</td>" in jobs._repr_html_()  # type: ignore[attr-defined]

    def test_progress_has_numbers_by_name(self) -> None:
        progress = JobProgress(total=2, udf_rows=1)
        assert (progress["udf_rows"], progress["total"], progress["rows_per_second"]) == (1, 2, 0)

    def test_rows_of_running_tasks_count_for_the_speed(self) -> None:
        running = JobProgress(total=90, kept_rows=10, checkpointed=50, udf_rows=8, seconds=4.0)
        assert running["rows_per_second"] == 10.0

    def test_numbers_add_up(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3, 3])
        table.add_columns({"x": tripled(calls)})
        progress = table.backfill("x").progress
        assert progress.total == progress.checkpointed == progress.ready_to_commit == 6
        assert progress.committed == progress.udf_rows == calls.count == 6
        assert (progress.fragments, progress.fragments_committed, progress.rounds) == (2, 2, 1)
        metrics = db.list_jobs()[0].metrics
        assert metrics["committed"] == 6
        assert metrics["udf_seconds"] >= 0


class TestHistory:
    def test_a_job_that_went_well(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [2, 2])
        table.add_columns({"x": tripled(calls)})
        result = table.backfill("x", where="id > 0", commit_granularity=1)
        record = db.get_job(result)
        assert (record.table_name, record.column_name) == ("t", "x")
        assert (record.job_type, record.status, record.error) == ("BACKFILL", JobStatus.DONE, None)
        assert record.config["where"] == "id > 0"
        kinds = [event.kind for event in record.events]
        assert kinds == ["created", "status", "committed", "committed", "status"]
        states = [e.payload["status"] for e in record.events if e.kind == "status"]
        assert states == ["RUNNING", "DONE"]
        assert record.created_at <= record.updated_at
        assert record.metrics["committed"] == calls.count == 3
        assert [r.job_id for r in db._history.list()] == [result]

    def test_a_job_that_failed(self, db: Connection, calls: Calls) -> None:
        def fails(id: int) -> int:
            raise ZeroDivisionError("no")

        table = make_table(db, [2])
        table.add_columns({"x": counted(calls, fails)})
        with pytest.raises(UDFExecutionError):
            table.backfill("x", task_size=10)
        (record,) = db.list_jobs(status="FAILED")
        assert record.status is JobStatus.FAILED
        assert "ZeroDivisionError: no" in (record.error or "")
        assert db.list_jobs(status=JobStatus.DONE) == []
        assert calls.count == 1

    def test_a_job_with_nothing_to_do_is_on_record(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [2])
        table.add_columns({"x": tripled(calls)})
        first, second = table.backfill("x"), table.backfill("x")
        assert [r.job_id for r in db.list_jobs()] == [second, first]
        assert db.get_job(second).metrics["udf_rows"] == 0
        assert calls.count == 2

    def test_jobs_of_all_tables_and_a_new_connection(
        self, db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        from geneva import connect

        for name in ("a", "b"):
            table = make_table(db, [1], name)
            table.add_columns({"x": tripled(calls)})
            table.backfill("x")
        other = connect(tmp_path / "db")
        assert [r.table_name for r in other.list_jobs()] == ["b", "a"]
        assert [r.table_name for r in other.list_jobs("a")] == ["a"]
        with pytest.raises(JobNotFoundError, match="There is no job 'x' in this database"):
            other.get_job("x")
        assert other.table_names() == ["a", "b"]
        assert calls.count == 2


class TestFindingOne:
    @pytest.fixture
    def table(self, db: Connection, calls: Calls) -> Table:
        table = make_table(db, [1])
        table.add_columns({"x": tripled(calls)})
        return table

    def test_by_what_has_its_id(self, db: Connection, table: Table) -> None:
        future = table.backfill_async("x")
        result = future.result()
        for key in (future, result, db.list_jobs()[0], db.get_job(result)):
            assert db.get_job(key).job_id == result.job_id

    def test_by_the_first_characters_of_its_id(self, db: Connection, table: Table) -> None:
        for job_id in ("abc", "abcd", "abce", "xyz"):
            table.backfill("x", job_id=job_id)
        assert db.get_job("abc").job_id == "abc", "a whole id is that job's"
        assert db.get_job("x").job_id == "xyz"
        with pytest.raises(JobNotFoundError, match="3 jobs begin with 'ab': give more of the id"):
            db.get_job("ab")
        for unknown in ("abcx", ""):
            with pytest.raises(JobNotFoundError, match=f"There is no job '{unknown}' in this"):
                db.get_job(unknown)
        with pytest.raises(JobNotFoundError, match="There is no job 'x' in this database"):
            db.cancel_job("x")


class TestFutures:
    def test_done_status_progress_and_result(
        self, db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        gate = str(tmp_path / "gate")

        def gated(id: int) -> int:
            while not Path(gate).exists():
                time.sleep(0.01)
            return id * 3

        table = make_table(db, [2, 2])
        table.add_columns({"x": counted(calls, gated)})
        future = table.backfill_async("x", commit_granularity=1)
        assert isinstance(future, JobFuture)
        assert db.get_job(future.job_id).status in (JobStatus.PENDING, JobStatus.RUNNING)
        wait_until(lambda: future.status() is JobStatus.RUNNING)
        assert not future.done()
        assert (future.progress().total, future.progress().committed) == (4, 0)
        with pytest.raises(JobTimeoutError, match=r"still running after 0\.05 s"):
            future.result(timeout=0.05)
        wait_until(lambda: db.get_job(future.job_id).status is JobStatus.RUNNING)
        Path(gate).touch()
        result = future.result(timeout=60)
        assert isinstance(result, JobResult)
        assert (result, result.status) == (future.job_id, JobStatus.DONE)
        assert future.done()
        assert future.status() is JobStatus.DONE
        assert future.progress().committed == 4
        assert future.result() == result
        assert calls.rows == [0, 1, 2, 3]
        assert column(table, "x") == [0, 3, 6, 9]

    def test_wrong_arguments_raise_at_once(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [2])
        table.add_columns({"x": tripled(calls)})
        with pytest.raises(ColumnNotFoundError):
            table.backfill_async("nope")
        with pytest.raises(TypeError):
            table.backfill_async("x", nope=1)
        assert local_db.list_jobs() == []

    def test_a_failure_comes_out_of_result(self, db: Connection, calls: Calls) -> None:
        def fails(id: int) -> int:
            raise RuntimeError("no")

        table = make_table(db, [2])
        table.add_columns({"x": counted(calls, fails)})
        future = table.backfill_async("x", task_size=10)
        for _ in range(2):
            with pytest.raises(UDFExecutionError, match="RuntimeError: no"):
                future.result(timeout=60)
        assert future.done()
        assert future.status() is JobStatus.FAILED
        assert calls.count == 1

    def test_cancel_keeps_what_is_finished(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [2] * 30)
        table.add_columns({"x": counted(calls, slowly)})
        future = table.backfill_async("x", commit_granularity=1, task_size=2)
        wait_until(lambda: future.progress().committed >= 2)
        future.cancel()
        with pytest.raises(JobCancelledError, match="was cancelled"):
            future.result(timeout=60)
        assert future.status() is JobStatus.CANCELLED
        assert db.get_job(future.job_id).status is JobStatus.CANCELLED
        done = [i for i, value in by_id(table, "x").items() if value is not None]
        assert 2 <= len(done) < 60
        plan = table.plan_backfill("x")
        assert plan.rows_to_compute == 60 - len(done)
        assert all(calls.rows.count(i) == 1 for i in done)

    def test_two_columns_at_the_same_time(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [3, 3])
        table.add_columns({"x": tripled(calls), "y": tripled(calls)})
        futures = [table.backfill_async(name) for name in ("x", "y")]
        assert {future.result(timeout=60).status for future in futures} == {JobStatus.DONE}
        assert column(table, "x") == column(table, "y") == [3 * i for i in range(6)]
        assert calls.rows == sorted([*range(6)] * 2)

    def test_no_thread_is_left(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [3])
        table.add_columns({"x": tripled(calls)})
        future = table.backfill_async("x")
        future.result()
        own = f"geneva-job-{future.job_id[:8]}"
        wait_until(lambda: own not in [thread.name for thread in threading.enumerate()])
        assert calls.count == 3


def test_a_full_disk_is_said_in_a_sentence_wherever_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = connect(tmp_path / "db", InProcessRunner)
    table = db.create_table("t", pa.table({"id": [1, 2]}))

    @udf
    def double(id: int) -> int:
        return 2 * id

    table.add_columns({"c": double})
    lances = "LanceError(IO): write failed, No space left on device (os error 28), /a/b.rs:1:2\n"

    def full(*_: object, **__: object) -> Any:
        raise OSError(lances + "x" * 1800)

    with publishing(db, full), pytest.raises(StorageFullError) as caught:
        table.backfill("c")
    text = str(caught.value)
    assert "column 'c' of table 't'" in text
    assert "No space left on device" in text
    assert len(text) < 400
    assert caught.value.job_id is not None
    with monkeypatch.context() as patched:
        patched.setattr(JobHistory, "announce", full)
        with pytest.raises(StorageFullError, match="run again"):
            table.backfill("c")
    assert table.backfill("c").rows_committed == 2


def test_keys_in_errors_of_functions_are_hidden(tmp_path: Path) -> None:
    place = tmp_path / "db"
    db = geneva.connect(place, runner=InProcessRunner, env={"KEY": "s3cr3tvalue"})
    table = make_table(db, [3])

    def call(id: int) -> int:
        raise ValueError("GET https://example.org/?key=s3cr3tvalue")

    skipping = udf(call, data_type=pa.int64(), on_error=skip_on_error())
    table.add_columns({"a": skipping, "b": udf(call, data_type=pa.int64())})
    table.backfill("a")
    with pytest.raises(UDFExecutionError, match=r"key=\*\*\*") as caught:
        table.backfill("b")
    assert "s3cr3t" not in str(caught.value)
    assert all(record.message.endswith("key=***") for record in table.get_errors())
    files = [path.read_bytes() for path in (place / "_geneva").rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not any(b"s3cr3tvalue" in content for content in files)


def test_keys_are_hidden_however_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With newlines and quotes as `repr` and JSON write them, and in names of errors."""
    place, key = tmp_path / "db", 'first "s3cr3t"\nsecönd\\l1ne\n'
    monkeypatch.setenv("GENEVA_TEST_KEY", key)  # this runner's workers are in this process
    db = geneva.connect(place, runner=InProcessRunner, env={"GENEVA_TEST_KEY": key})
    table = make_table(db, [5])

    def call(id: int) -> int:
        key = os.environ["GENEVA_TEST_KEY"]
        kinds: list[BaseException] = [
            ValueError({"Authorization": key}),
            KeyError(key),
            ValueError(json.dumps({"key": json.dumps(key)})),
            ExceptionGroup("both", [ValueError(key)]),
            type(f"Error{key}", (Exception,), {})("x"),
        ]
        raise kinds[id]

    skipping = udf(call, data_type=pa.int64(), on_error=skip_on_error())
    table.add_columns({"a": skipping})
    table.backfill("a")
    found = table.get_errors()
    assert {record.exception_type for record in found} >= {"KeyError", "Error***"}
    preview = table.preview(skipping, n=5)
    told = [*map(str, found), *(record.traceback for record in found)]
    told += [str(preview), preview._repr_html_()]
    told += [str(preview.failures), str(preview.to_record())]
    told += [
        path.read_bytes().decode(errors="ignore") for path in place.rglob("*") if path.is_file()
    ]
    assert len(found) == 5
    assert sum("***" in text for text in told) > 10
    for text in told:
        assert "s3cr3t" not in text
        assert "l1ne" not in text


def table_with_a_key_in_checkpoints(db: geneva.Connection) -> geneva.Table:
    """Its function says a key in what it raises, and its job can't publish."""
    table = make_table(db, [3])

    def call(id: int) -> int:
        raise ValueError("GET https://example.org/?key=s3cr3tvalue")

    def refuse(*_: Any) -> Any:
        raise OSError("the store is away")

    table.add_columns({"a": udf(call, data_type=pa.int64(), on_error=skip_on_error())})
    with publishing(db, refuse), pytest.raises(OSError, match="the store is away"):
        table.backfill("a", checkpoint_size=1)
    return table


def test_keys_in_errors_are_hidden_before_anything_is_stored(tmp_path: Path) -> None:
    """In checkpoints as well, which may stay for long where a job was not ended well."""
    db = geneva.connect(tmp_path / "db", runner=InProcessRunner, env={"KEY": "s3cr3tvalue"})
    table = table_with_a_key_in_checkpoints(db)
    store = checkpoint_store(table)
    texts = [t for key in store.list_keys() for t in errors_of(store[key]).values()]
    assert len(texts) == 3
    assert all("key=***" in text and "s3cr3t" not in text for text in texts)
    found = table.get_errors()
    assert len(found) == 3
    assert all(record.message.endswith("key=***") for record in found)


def test_keys_in_errors_of_other_jobs_are_hidden_where_these_are_resumed(tmp_path: Path) -> None:
    """Their connection did not know the key, so that it is in their checkpoints."""
    place = tmp_path / "db"
    unknowing = geneva.connect(place, runner=InProcessRunner)
    table = table_with_a_key_in_checkpoints(unknowing)
    staged = [key.path() for key in checkpoint_keys(table) if key.rows is None]
    checkpoint_store(table).discard(staged)  # as if it had died just before
    db = geneva.connect(place, runner=InProcessRunner, env={"KEY": "s3cr3tvalue"})
    done = db.open_table("t").backfill("a")
    assert (done.rows_computed, done.rows_reused, done.rows_failed) == (0, 3, 3)
    found = table.get_errors(job_id=done.job_id)
    assert len(found) == 3
    for record in found:
        assert record.message.endswith("key=***")
        assert "s3cr3t" not in str(record)


def test_nothing_fresh_is_removed_while_a_job_runs_that_has_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = geneva.connect(tmp_path / "db", runner=InProcessRunner)
    table = db.create_table("t", pa.table({"x": [1]}))
    history = db._history

    def begin(job_id: str, **end: str) -> None:
        facts = {"table": "t", "column": "c", "type": "BACKFILL", "driver": {}}
        created = JobEvent(job_id, "created", facts, seq=0)
        history.append([created, JobEvent(job_id, "status", end, seq=1)])

    begin("dead", status="FAILED", error=_LOST)
    removed: list[str] = []
    monkeypatch.setattr(dead_jobs, "remove_dead_files", lambda *_: removed.append("some"))
    dead_jobs.remove_dead(
        "t",
        [table.ref],
        history,
        db._signals,
        own="me",
        ready=lambda: begin("new", status="RUNNING"),
    )
    assert removed == []
    history.append([JobEvent("new", "status", {"status": "DONE"}, seq=2)])
    dead_jobs.remove_dead("t", [table.ref], history, db._signals, own="me")
    assert removed == ["some"]

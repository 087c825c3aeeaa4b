"""A backfill, its resume and its history on S3: nothing local, and no key in the clear."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import random
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lance.dataset import Tags

import geneva
from cluster import wait_for
from geneva.checkpoint import LanceCheckpointStore
from geneva.checkpoint_utils import CheckpointKey, WorkIdentity
from geneva.connection import Connection
from geneva.errors import (
    TableChangedError,
    TableNotFoundError,
    UDFError,
    UnreadableSourceError,
)
from geneva.execution.load import work
from geneva.execution.runner import InProcessRunner
from geneva.execution.worker.task import Task
from geneva.model.jobs import JobStatus
from geneva.model.tables import Secrets, TableRef
from geneva.storage.checkpoints.staging import open_checkpoints
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.history import JobHistory
from geneva.table import Table
from geneva.udf.declare import UDF
from processes import finish, nothing_left_in, processes_in, start_script
from s3_server import ACCESS_KEY, SECRET_KEY, Bucket, bucket, s3_endpoint
from support import Calls, publishing

pytestmark = pytest.mark.s3

__all__ = ["bucket", "s3_endpoint"]  # fixtures: pytest finds them by name

ROWS, FRAGMENTS = 90, 3


def open_database(bucket: Bucket) -> Connection:
    return geneva.connect(
        bucket.uri, storage_options=bucket.storage_options, runner=lambda: InProcessRunner(2)
    )


def logged_double(calls: Calls, die_at: int) -> UDF:
    """A UDF that logs its calls, and dies at one value for as long as a mark is there."""

    @geneva.udf(data_type=pa.int64(), input_columns=["x"])
    def double(x: int) -> int:
        if x == die_at and Path(f"{calls.path}.die").exists():
            os._exit(9)
        calls.note([x])
        return x * 2

    return double


@contextmanager
def no_commits(table: Table) -> Iterator[None]:
    """Everything up to the commit works; the commit doesn't."""

    def refuse(*_: Any) -> Any:
        raise OSError("the store is away")

    with publishing(table._connection, refuse):
        yield


@pytest.fixture
def table(bucket: Bucket, calls: Calls) -> Table:
    """Three fragments of thirty rows, and a column that is declared but not computed."""
    db = open_database(bucket)
    table = db.create_table("t", pa.table({"x": range(30)}))
    for start in (30, 60):
        table.add(pa.table({"x": range(start, start + 30)}))
    table.add_columns({"y": logged_double(calls, die_at=65)})
    return table


def values(table: Table, column: str = "y") -> list[Any]:
    return table.to_arrow().sort_by("x").column(column).to_pylist()


def doubled(rows: int = ROWS) -> list[int]:
    return [2 * x for x in range(rows)]


class TestBackfill:
    def test_fills_the_column_and_keeps_everything_in_the_bucket(
        self, table: Table, calls: Calls, bucket: Bucket
    ) -> None:
        result = table.backfill("y", checkpoint_size=10)
        assert result.status is JobStatus.DONE
        assert values(table) == doubled()
        assert calls.rows == list(range(ROWS))
        assert len(bucket.keys("t.lance/_udfs/")) == 1
        assert bucket.keys("t.lance/_checkpoints/")
        assert bucket.keys("_geneva/jobs.lance/")
        assert open_database(bucket).table_names() == ["t"]

    def test_second_run_computes_only_what_is_new(
        self, table: Table, calls: Calls, bucket: Bucket
    ) -> None:
        table.backfill("y")
        assert table.backfill("y").rows_computed == 0
        table.add(pa.table({"x": range(90, 100)}))
        again = open_database(bucket).open_table("t")  # another handle: nothing is remembered
        assert again.backfill("y").rows_computed == 10
        assert values(again) == doubled(100)
        assert calls.rows == list(range(100))

    def test_where_leaves_the_others_alone(self, table: Table, calls: Calls) -> None:
        assert table.backfill("y", where="x % 3 = 0").rows_computed == 30
        assert values(table) == [2 * x if x % 3 == 0 else None for x in range(ROWS)]
        assert table.backfill("y").rows_computed == 60
        assert values(table) == doubled()
        assert calls.rows == list(range(ROWS))

    def test_history_survives_the_process(self, table: Table, bucket: Bucket) -> None:
        done = table.backfill("y")
        record = open_database(bucket).get_job(done)
        assert (record.status, record.table_name) == (JobStatus.DONE, "t")
        assert record.metrics["committed"] == ROWS
        assert [job.job_id for job in open_database(bucket).list_jobs("t")] == [done]


class TestResume:
    def test_staged_files_are_committed_without_running_the_udf(
        self, table: Table, calls: Calls, bucket: Bucket
    ) -> None:
        with no_commits(table), pytest.raises(OSError, match="the store is away"):
            table.backfill("y", checkpoint_size=10)
        assert calls.rows == list(range(ROWS))
        assert len(bucket.keys("t.lance/data/")) == 2 * FRAGMENTS  # x, and y staged
        (failed,) = open_database(bucket).list_jobs()
        assert failed.status is JobStatus.FAILED
        again = open_database(bucket).open_table("t").backfill("y")
        assert (again.rows_computed, again.rows_reused) == (0, ROWS)
        assert values(open_database(bucket).open_table("t")) == doubled()

    @pytest.mark.slow
    def test_crash_in_the_middle_costs_the_batch_that_was_open(
        self, table: Table, calls: Calls, bucket: Bucket, tmp_path: Path
    ) -> None:
        mark = Path(f"{calls.path}.die")
        mark.touch()
        script = f"""
            import geneva
            from geneva.execution.runner import InProcessRunner
            db = geneva.connect({bucket.uri!r}, storage_options={bucket.storage_options!r},
                                runner=lambda: InProcessRunner(1))
            db.open_table("t").backfill("y", checkpoint_size=10, task_size=90)
            """
        process = start_script(tmp_path, script)
        process.communicate(timeout=60)
        assert process.returncode == 9
        assert calls.taken() == list(range(65))
        mark.unlink()
        (lost,) = open_database(bucket).list_jobs()
        assert lost.status is JobStatus.FAILED
        assert "lost" in (lost.error or "")
        result = open_database(bucket).open_table("t").backfill("y", checkpoint_size=10)
        assert result.rows_computed == 30
        assert values(open_database(bucket).open_table("t")) == doubled()
        assert calls.rows == list(range(60, 90))

    @pytest.mark.slow
    def test_damaged_checkpoints_are_computed_again(
        self, table: Table, calls: Calls, bucket: Bucket
    ) -> None:
        with no_commits(table), pytest.raises(OSError, match="away"):
            table.backfill("y", checkpoint_size=10, task_size=30)
        keys = bucket.keys("t.lance/_checkpoints/")
        staged = [key for key in keys if "_range-" not in key]
        ranges = [key for key in keys if "_range-" in key]
        for key in staged:
            bucket.client.delete_object(Bucket=bucket.name, Key=key)
        body = bucket.client.get_object(Bucket=bucket.name, Key=ranges[0])["Body"].read()
        bucket.client.put_object(Bucket=bucket.name, Key=ranges[0], Body=body[: len(body) // 2])
        bucket.client.put_object(Bucket=bucket.name, Key=ranges[1], Body=b"")
        result = open_database(bucket).open_table("t").backfill("y", checkpoint_size=10)
        assert (result.rows_computed, result.rows_reused) == (20, 70)
        assert values(open_database(bucket).open_table("t")) == doubled()


# ---------------------------------------------------------------------------------------- secrets


def assert_no_secret(text: str | bytes, where: str) -> None:
    data = text.encode() if isinstance(text, str) else text
    for secret in (SECRET_KEY, ACCESS_KEY):
        for form in (secret, secret.replace("/", "%2F").replace("+", "%2B"), secret.lower()):
            assert form.encode() not in data, f"a key is in the clear in {where}"
            assert form.encode("utf-16-le") not in data, f"a key is in the clear in {where}"


def assert_no_secret_in_bucket(bucket: Bucket) -> None:
    found = dict(bucket.objects())
    assert len(found) > 10
    for key, body in found.items():
        assert_no_secret(key, "an object's name")
        assert_no_secret(body, key)


class TestSecrets:
    @pytest.mark.slow
    def test_none_in_any_object_log_or_repr(
        self,
        table: Table,
        bucket: Bucket,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        caplog.set_level(logging.DEBUG)
        caplog.set_level(logging.INFO, logger="botocore")  # the test's own client
        with no_commits(table), pytest.raises(OSError, match="away"):
            table.backfill("y", checkpoint_size=10, where="x < 50")
        plan = table.plan_backfill("y", where="x < 50")
        future = table.backfill_async("y", checkpoint_size=10)
        result = future.result(60)
        db = open_database(bucket)
        assert_no_secret_in_bucket(bucket)
        shown = [db, table, table.ref, plan, future, result, db.list_jobs(), table.schema]
        for thing in shown:
            assert_no_secret(f"{thing!r} {thing!s}", type(thing).__name__)
        assert_no_secret(repr(open_checkpoints(table.ref)), "the checkpoint store")
        assert_no_secret(repr(table.schema.metadata) + repr(table.schema.field("y").metadata), "it")
        assert_no_secret(caplog.text, "the log")
        assert_no_secret("".join(capfd.readouterr()), "the output")

    def test_none_in_a_pickled_task(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        tasks: list[Task] = []
        submit = InProcessRunner.submit

        def spied(self: InProcessRunner, function: Any, items: Any, *rest: Any) -> Any:
            tasks.extend(items)
            return submit(self, function, items, *rest)

        monkeypatch.setattr(InProcessRunner, "submit", spied)
        plan = table.plan_backfill("y")
        table.backfill("y")
        assert tasks
        for thing in (*tasks, table.ref, plan):
            for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
                assert_no_secret(pickle.dumps(thing, protocol), "a pickle")
            assert_no_secret(cloudpickle.dumps(thing), "a cloudpickle")
            assert_no_secret(f"{thing!r} {thing!s}", "a repr")
        loaded = pickle.loads(pickle.dumps(tasks[0]))
        assert loaded == tasks[0]
        assert loaded.work.ref.storage_options["aws_secret_access_key"] == SECRET_KEY

    def test_pickled_options_show_nothing_whatever_they_are(self) -> None:
        rng = random.Random(7)
        for _ in range(300):
            size = rng.choice([8, 16, 40, 200, 2_000])
            secret = "".join(rng.choices(string.ascii_letters + string.digits + "/+=-_", k=size))
            ref = TableRef("t", "s3://b/t", Secrets({"key": secret, secret: "x"}))
            assert secret.encode() not in pickle.dumps(ref)
            assert pickle.loads(pickle.dumps(ref)) == ref

    def test_none_in_errors(self, bucket: Bucket, table: Table) -> None:
        @geneva.udf(data_type=pa.int64(), input_columns=["x"])
        def broken(x: int) -> int:
            raise ValueError("the user's own words")

        table.add_columns({"z": broken})
        with pytest.raises(UDFError, match="the user's own words") as caught:
            table.backfill("z")
        assert_no_secret(chain_of(caught.value), "the UDF's error")
        absent = bucket.storage_options | {"aws_endpoint": "http://127.0.0.1:1"}
        quick = {"client_max_retries": "0", "client_retry_timeout": "1"}
        with pytest.raises(Exception, match=r".") as refused:
            geneva.connect(bucket.uri, storage_options=absent | quick).open_table("t")
        assert_no_secret(chain_of(refused.value), "the store's error")
        with pytest.raises(Exception, match="nothing_here") as missing:
            open_database(bucket).open_table("nothing_here")
        assert_no_secret(chain_of(missing.value), "the table's error")
        failed = open_database(bucket).list_jobs(status="FAILED")
        assert_no_secret(repr(failed), "the history")
        assert_no_secret_in_bucket(bucket)


def chain_of(error: BaseException | None) -> str:
    """An error as a log would show it, with its causes."""
    import traceback

    out = io.StringIO()
    traceback.print_exception(error, file=out)
    out.write(repr(error))
    return out.getvalue()


class TestBranches:
    @pytest.mark.slow
    def test_a_branch_stays_in_its_folder(self, table: Table, calls: Calls, bucket: Bucket) -> None:
        table.backfill("y", where="x < 45")
        calls.clear()
        branch = table.branches.create("rel/v1")

        def own() -> set[str]:
            keys = set(bucket.keys("t.lance/")) - set(bucket.keys("t.lance/tree/"))
            return {key for key in keys if "/_refs/" not in key}

        before = own()
        branch.add(pa.table({"x": range(90, 95)}))
        assert branch.plan_backfill("y").rows_to_compute == 50
        branch.backfill("y", checkpoint_size=10)
        assert calls.rows == list(range(45, 95))
        assert values(branch) == doubled(95)
        assert branch.verify("y").ok
        branch.compact_files()
        assert branch.backfill("y").rows_computed == 0
        branch.cleanup_checkpoints()
        assert own() == before
        assert open_database(bucket).open_table("t@rel/v1").count_rows() == 95
        query = branch.query().where("x > 88")
        view = table._connection.create_materialized_view("v", query)
        view.refresh()
        assert values(view) == [2 * x for x in range(89, 95)]

    def test_a_table_in_a_namespace(self, calls: Calls, bucket: Bucket) -> None:
        db = open_database(bucket)
        db.create_namespace(["ns"])
        table = db.create_table("t", pa.table({"x": range(5)}), namespace_path=["ns"])
        table.add_columns({"y": logged_double(calls, die_at=65)})
        table.backfill("y")
        assert values(db.open_table("ns$t")) == doubled(5)
        assert db.all_table_names() == ["ns$t"]


# ---------------------------------------------------------------------------------------- on Spark


def double_and_look(calls: Calls) -> UDF:
    """A UDF that searches Spark's files on this machine for a key, and kills the driver once."""
    secret = SECRET_KEY[::-1]  # the UDF must not be where the key is found

    @geneva.udf(data_type=pa.int64(), input_columns=["x"])
    def double(x: int) -> int:
        calls.note([x])
        if x == 5:
            for found in Path(os.environ["TMPDIR"]).rglob("*"):
                assert not found.is_file() or secret[::-1].encode() not in found.read_bytes(), found
        if x == 85 and Path(f"{calls.path}.die").exists():
            while calls.count < 56:  # fragments come in a mixed order: one of the others is done
                time.sleep(0.05)
            os.kill(int(os.environ["DRIVER"]), 9)
            time.sleep(60)
        return x * 2

    return double


@pytest.mark.slow
@pytest.mark.spark
def test_spark_killed_and_finished_by_another_process(
    bucket: Bucket, table: Table, calls: Calls, tmp_path: Path
) -> None:
    folder = tmp_path / "machine"
    table.alter_columns({"path": "y", "udf": double_and_look(calls)})
    script = f"""
        import json, os, geneva
        os.environ["DRIVER"] = str(os.getpid())
        options = json.loads(os.environ.pop("OPTIONS"))
        db = geneva.connect({bucket.uri!r}, storage_options=options)
        result = db.open_table("t").backfill("y", checkpoint_size=10, task_size=30)
        print(json.dumps([result.status, result.rows_computed, result.rows_reused]))
        """
    options = json.dumps(bucket.storage_options)
    mark = Path(f"{calls.path}.die")
    mark.touch()
    with nothing_left_in(folder):
        first = start_script(folder, script, OPTIONS=options)
        first.communicate(timeout=60)
        assert first.returncode == -9
        mark.unlink()
        wait_for(lambda: not processes_in(folder), "the killed driver's workers to leave", 10)
        before = calls.count
        assert 56 <= before < ROWS
        second = start_script(folder, script, OPTIONS=options)
        status, computed, reused = json.loads(finish(second))
        wait_for(lambda: not processes_in(folder), "the second driver's workers to leave", 10)
    assert status == "DONE"
    assert computed + reused <= ROWS  # a slow first driver has committed some of them
    assert calls.count == before + computed <= ROWS + 20  # a batch of ten on each of two slots
    assert values(open_database(bucket).open_table("t")) == doubled()
    assert_no_secret_in_bucket(bucket)
    left = [path for path in folder.rglob("*") if not path.is_dir()]
    assert left == []


def test_a_key_that_is_longer_than_a_file_name(bucket: Bucket) -> None:
    store = LanceCheckpointStore(f"{bucket.uri}/store", Secrets(bucket.storage_options))
    name = "a_function_with_a_long_name_" * 4
    key = CheckpointKey(WorkIdentity(name, "1", name, "", "", (), "id").prefix(), 0).path()
    store[key] = pa.record_batch({"x": [1]})
    assert store.list_keys(f"udf-{name}_") == [key]
    assert key in store
    assert store[key].column(0).to_pylist() == [1]
    del store[key]
    assert store.list_keys() == []


@pytest.mark.slow
def test_a_view_of_a_table_function(bucket: Bucket, calls: Calls) -> None:
    @geneva.udtf(output_schema=pa.schema([("k", pa.int64()), ("n", pa.int64())]), partition_by="k")
    def counting(source: Any) -> Iterator[dict[str, int]]:
        k = source.to_arrow()["k"][0].as_py()
        calls.note([k])
        yield {"k": k, "n": source.count_rows()}

    db = open_database(bucket)
    table = db.create_table("sizes", pa.table({"id": range(9), "k": [0, 1, 2] * 3}))
    view = db.create_udtf_view("counted", table, counting)
    view.refresh()
    assert calls.taken() == [0, 1, 2]
    table.update(where="id = 0", values={"k": 1})
    table.delete("k = 2")
    view.refresh()
    assert calls.taken() == [0, 1]
    assert sorted(view.to_arrow().to_pylist(), key=lambda row: row["k"]) == [
        {"k": 0, "n": 2},
        {"k": 1, "n": 4},
    ]
    view.optimize()
    assert view.plan_refresh().is_empty


def test_a_table_that_is_dropped_and_made_anew_is_not_remembered(
    bucket: Bucket, calls: Calls
) -> None:
    db = open_database(bucket)
    for start in (0, 100, 200):
        table = db.create_table("t", pa.table({"x": range(start, start + 3)}), mode="overwrite")
        table.add_columns({"y": logged_double(calls, die_at=-1)})
        assert table.version == 2  # the same as of the one before
        table.backfill("y")
        assert calls.taken() == [start, start + 1, start + 2]
        assert values(table) == [2 * start, 2 * start + 2, 2 * start + 4]
        db.drop_table("t")
        for key in bucket.keys("t.lance"):
            bucket.client.delete_object(Bucket=bucket.name, Key=key)


def test_a_version_that_cannot_be_pinned_ends_the_job(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError("no tags today")

    with monkeypatch.context() as patch:
        patch.setattr(Tags, "create", refused)
        with pytest.raises(OSError, match="no tags today"):
            table.backfill("y")
    (job,) = table._connection.list_jobs()
    assert job.status is JobStatus.FAILED
    table.backfill("y")
    assert values(table) == doubled()


def test_a_history_that_was_opened_ahead_shows_who_came_before(bucket: Bucket) -> None:
    first, second = (JobHistory(bucket.uri, Secrets(bucket.storage_options)) for _ in range(2))
    begun = JobEvent("one", "created", {"table": "t", "work": "w"})
    first.append([replace(begun, job_id="none", payload={})])  # makes the table
    second.open_ahead()
    first.announce([begun], "w")
    assert second.announce([replace(begun, job_id="two")], "w").unfinished == ("one",)
    second.open_ahead()
    first.append([JobEvent("one", "status", {"status": "DONE"})])
    found = second.announce([replace(begun, job_id="three")], "w")
    assert found.unfinished == ("two",)
    assert found.finished == {"one"}


def test_a_table_that_takes_the_place_of_a_jobs_own_is_left_alone(
    table: Table, bucket: Bucket, calls: Calls
) -> None:
    uri, options, mark = bucket.uri, bucket.storage_options, Path(f"{calls.path}.made")

    @geneva.udf(data_type=pa.int64(), input_columns=["x"])
    def replaces(x: int) -> int:
        if not mark.exists():
            mark.touch()
            other = geneva.udf(lambda x: -x, data_type=pa.int64(), input_columns=["x"])
            db = geneva.connect(uri, storage_options=options)
            db.drop_table("t")
            # The same fragments, versions and fields as those of the one before.
            made = db.create_table("t", pa.table({"x": range(1_000, 1_030)}))
            for start in (1_030, 1_060):
                made.add(pa.table({"x": range(start, start + 30)}))
            for column in ("y", "z"):
                made.add_columns({column: other})
        return x

    table.add_columns({"z": replaces})
    with pytest.raises(TableNotFoundError, match="was dropped"):
        table.backfill("z")
    now = open_database(bucket).open_table("t")
    assert sorted(now.to_arrow()["x"].to_pylist()) == list(range(1_000, 1_090))
    assert now.to_arrow()["z"].null_count == 90


def test_a_version_that_is_cleaned_up_before_its_job_has_pinned_it(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Tags.create

    def late(self: Tags, tag: str, *where: Any) -> None:
        create(self, tag, 10_000)  # as if that one was gone

    with monkeypatch.context() as patch:
        patch.setattr(Tags, "create", late)
        with pytest.raises(TableChangedError, match="run it again"):
            table.backfill("y")
    table.backfill("y")
    assert values(table) == doubled()


def put_rows(bucket: Bucket, name: str, rows: dict[str, list[Any]]) -> str:
    """Write a Parquet file to the folder rows; return the folder."""
    file = io.BytesIO()
    pq.write_table(pa.table(rows), file)
    bucket.client.put_object(Bucket=bucket.name, Key=f"rows/{name}", Body=file.getvalue())
    return f"s3://{bucket.name}/rows"


class TestLoading:
    """As of MinIO: a folder is listed in milliseconds, a HEAD request tells whole seconds."""

    def test_a_folder_and_a_file(self, bucket: Bucket) -> None:
        put_rows(bucket, "a.parquet", {"id": [1], "v": ["x"]})
        folder = put_rows(bucket, "b.parquet", {"id": [2], "v": ["y"]})
        listed = bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]
        seen = [bucket.client.head_object(Bucket=bucket.name, Key=f["Key"]) for f in listed]
        assert [f["LastModified"] for f in listed] != [f["LastModified"] for f in seen]

        table = open_database(bucket).create_table("t", pa.table({"id": [1, 2, 3]}))
        options = bucket.storage_options
        table.load_columns(folder, "id", ["v"], storage_options=options)
        assert table.to_arrow()["v"].to_pylist() == ["x", "y", None]
        table.load_columns(f"{folder}/a.parquet", "id", ["v"], storage_options=options)
        assert table.to_arrow()["v"].to_pylist() == ["x", "y", None]

    @pytest.mark.parametrize("later", ["yy", pytest.param("y", marks=pytest.mark.slow)])
    def test_a_file_that_is_replaced_is_refused(
        self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, later: str
    ) -> None:
        folder = put_rows(bucket, "a.parquet", {"id": [1], "v": ["x"]})
        table = open_database(bucket).create_table("t", pa.table({"id": [1]}))
        real = work.stage_source

        def replacing(*args: Any) -> Any:
            if len(later) == 1:  # a file of the same size is known by its time
                time.sleep(2.1)
            put_rows(bucket, "a.parquet", {"id": [1], "v": [later]})
            return real(*args)

        monkeypatch.setattr(work, "stage_source", replacing)
        with pytest.raises(UnreadableSourceError, match=r"a\.parquet was replaced"):
            table.load_columns(folder, "id", ["v"], storage_options=bucket.storage_options)

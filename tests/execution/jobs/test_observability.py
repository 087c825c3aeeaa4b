"""What people are told to look for: lines of the log, and numbers of a job."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pytest

from geneva.config import Settings
from geneva.connection import Connection
from geneva.errors import GenevaError, UDFExecutionError
from geneva.execution.jobs.progress import JobProgress
from geneva.spark.embedded.settings import LocalOptions, local_settings
from support import Calls, make_table, tripled, uncommitted


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="geneva")
    return caplog


def test_reuse_and_staleness_in_the_log(
    local_db: Connection,
    calls: Calls,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = make_table(local_db, [4, 4, 4])
    table.add_columns({"c": tripled(calls, checkpoint_size=2)})
    table.backfill("c", num_frags=1)
    assert "Collected 0 checkpointed fragments with 0 rows for column 'c'" in log.text
    assert "Stale rows of column 'c' of table 't': 4 " in log.text
    with uncommitted(monkeypatch):
        table.backfill("c", num_frags=1)
    log.clear()
    calls.clear()
    result = table.backfill("c")
    assert "Collected 2 checkpointed fragments with 8 rows" in log.text
    assert "4 right rows, 1 fragment wholly right; 4 rows of 1 other computed" in log.text
    assert len(calls.rows) == 4
    metrics = result.progress.metrics()
    assert (metrics["reused_rows"], metrics["skipped_rows"]) == (4, 4)
    assert metrics["skipped_fragments"] == 1
    log.clear()
    idle = table.backfill("c")
    assert "Collected 3 checkpointed fragments with 12 rows" in log.text
    assert local_db.get_job(idle).metrics["skipped_rows"] == 12


def test_data_files_that_do_not_match(
    local_db: Connection,
    calls: Calls,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = make_table(local_db, [4])
    table.add_columns({"c": tripled(calls, checkpoint_size=2)})
    with uncommitted(monkeypatch):
        table.backfill("c")
    table.delete("id = 1")
    assert "mismatch" not in log.text
    table.backfill("c")
    assert "Checkpoint data files mismatch: " in log.text
    assert sorted(set(calls.rows)) == [0, 1, 2, 3]


def test_a_refresh_says_what_it_takes_over(
    local_db: Connection, log: pytest.LogCaptureFixture
) -> None:
    stable = {"new_table_enable_stable_row_ids": "true"}
    source = local_db.create_table("s", pa.table({"x": [1, 2]}), storage_options=stable)
    view = local_db.create_materialized_view("v", source)
    view.refresh()
    source.add(pa.table({"x": [3]}))
    log.clear()
    result = view.refresh()
    assert "Collected 1 checkpointed fragments with 2 rows" in log.text
    assert local_db.get_job(result).metrics["skipped_rows"] >= 2


def test_conflicts(local_db: Connection, calls: Calls, log: pytest.LogCaptureFixture) -> None:
    from geneva.execution.backfill.committer import TableCommitter

    table = make_table(local_db, [4, 4])
    table.add_columns({"c": tripled(calls)})

    class Rival(TableCommitter):
        def commit_next(self, *args: object, **options: bool) -> object:  # type: ignore[override]
            if self._ready and table.count_rows() == 8:
                table.delete("id = 1")
            return super().commit_next(*args, **options)  # type: ignore[arg-type]

    local_db._make_committer = Rival
    table.backfill("c")
    assert "conflict: somebody else committed to table 't'" in log.text


def test_numbers_of_workers(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"c": tripled(calls, checkpoint_size=2)})
    metrics = table.backfill("c").progress.metrics()
    assert metrics["checkpoints"] >= 4
    assert metrics["checkpoints_per_second"] > 0
    assert 0 < metrics["worker_utilization"] <= 1
    assert metrics["worker_memory_bytes"] > 1_000_000
    assert 0 < metrics["fragment_seconds"] <= metrics["worker_seconds"]
    assert 0 < metrics["max_fragment_seconds"] <= metrics["worker_seconds"]
    assert metrics["slots"] == 2


def test_parts_of_a_job_have_the_largest_not_the_sum() -> None:
    one = JobProgress(total=1, slots=2, worker_memory_bytes=5, worker_seconds=1.0, seconds=2.0)
    both = one.plus(JobProgress(total=1, slots=2, worker_memory_bytes=7, worker_seconds=2.0))
    assert (both.slots, both.worker_memory_bytes, both.worker_seconds) == (2, 7, 3.0)
    assert both.worker_utilization == 0.75


def test_an_error_knows_its_job(local_db: Connection) -> None:
    from geneva import udf

    def fails(id: int) -> int:
        raise ZeroDivisionError("no")

    table = make_table(local_db, [2])
    table.add_columns({"c": udf(fails)})
    with pytest.raises(UDFExecutionError) as raised:
        table.backfill("c")
    assert local_db.get_job(raised.value.job_id or "").status == "FAILED"
    with pytest.raises(GenevaError) as early:
        table.backfill("nope")
    assert early.value.job_id is None


def test_the_web_pages_of_spark_on_request(tmp_path: Path) -> None:
    assert local_settings(tmp_path, LocalOptions())["spark.ui.enabled"] == "false"
    assert local_settings(tmp_path, LocalOptions(ui=True))["spark.ui.enabled"] == "true"
    assert Settings.from_environment({"GENEVA_SPARK_UI": "1"}).spark_ui
    assert not Settings.from_environment({}).spark_ui

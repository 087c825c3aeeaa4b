"""Loads whose process is killed, and loads between stores."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import geneva
from geneva.errors import UserInputError
from geneva.execution.runner import InProcessRunner
from geneva.model.jobs import JobStatus
from processes import start_script
from s3_server import ACCESS_KEY, SECRET_KEY, Bucket, bucket, s3_endpoint
from support import connect

__all__ = ["bucket", "s3_endpoint"]  # fixtures: pytest finds them by name

ROWS = 3_000


def rows() -> pa.Table:
    ids = np.random.default_rng(1).permutation(ROWS)
    return pa.table({"id": ids, "v": ids * 3})


@pytest.mark.slow
def test_a_load_that_is_killed_goes_on(tmp_path: Path) -> None:
    """Killed when everything is staged, and nothing committed: nothing is done twice."""
    db = connect(tmp_path / "db", InProcessRunner)
    ids = pa.table({"id": range(ROWS)})
    lance.write_dataset(ids, f"{db.uri}/t.lance", max_rows_per_file=ROWS // 5)
    pq.write_table(rows(), tmp_path / "rows.parquet")
    code = f"""
        import functools, os, signal, geneva
        from geneva.execution.backfill.committer import TableCommitter
        from geneva.execution.runner import InProcessRunner

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        db = geneva.connect({str(tmp_path / "db")!r}, runner=InProcessRunner)
        db._make_committer = functools.partial(TableCommitter, publish=die)
        source = {str(tmp_path / "rows.parquet")!r}
        db.open_table("t").load_columns(source, "id", ["v"], checkpoint_interval_seconds=0)
        """
    child = start_script(tmp_path / "machine", code)
    child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL

    table = db.open_table("t")
    assert table.to_arrow()["v"].null_count == ROWS
    before = {path: path.stat().st_mtime_ns for path in Path(table.ref.uri).rglob("loads/*/*")}
    result = table.load_columns(
        tmp_path / "rows.parquet", "id", ["v"], checkpoint_interval_seconds=0
    )
    assert before
    assert (result.rows_reused, result.rows_committed) == (ROWS, ROWS)
    assert table.to_arrow()["v"].to_pylist() == [3 * i for i in range(ROWS)]
    assert {job.status for job in db.list_jobs()} == {JobStatus.DONE, JobStatus.FAILED}
    assert not [*Path(table.ref.uri).rglob("loads/*")], "what it had staged is removed"


@pytest.mark.s3
def test_table_and_source_in_object_stores(bucket: Bucket, tmp_path: Path) -> None:
    db = geneva.connect(
        bucket.uri, storage_options=bucket.storage_options, runner=lambda: InProcessRunner(2)
    )
    table = db.create_table("t", pa.table({"id": range(ROWS)}))
    made = rows()
    for part in range(2):
        file = io.BytesIO()
        pq.write_table(made.slice(part * ROWS // 2, ROWS // 2), file)
        name = f"db/source/part-{part}.parquet"
        bucket.client.put_object(Bucket=bucket.name, Key=name, Body=file.getvalue())
    result = table.load_columns(f"{bucket.uri}/source", "id", ["v"])
    assert result.progress.loaded_rows == ROWS
    assert table.to_arrow()["v"].to_pylist() == [3 * i for i in range(ROWS)]
    assert str(table.load_columns(f"{bucket.uri}/source", "id", ["v"])).startswith("DONE: nothing")
    assert not any("/loads/" in key for key in bucket.keys("t.lance"))

    local = connect(tmp_path / "db", InProcessRunner)
    copy = local.create_table("t", pa.table({"id": [7, 8]}))
    copy.load_columns(f"{bucket.uri}/source", "id", ["v"], storage_options=bucket.storage_options)
    assert copy.to_arrow()["v"].to_pylist() == [21, 24]
    lance.write_dataset(made, f"{bucket.uri}/s.lance", storage_options=bucket.storage_options)
    copy.load_columns(f"{bucket.uri}/s.lance", "id", ["v"], storage_options=bucket.storage_options)
    with pytest.raises(UserInputError, match="nothing to load at"):
        table.load_columns(f"{bucket.uri}/elsewhere", "id", ["v"])
    told = "".join(f"{job}" for job in (*db.list_jobs(), *local.list_jobs()))
    assert ACCESS_KEY not in told
    assert SECRET_KEY not in told

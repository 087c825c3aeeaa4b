"""Columns that one call fills together: on Spark, with processes that die, and on S3."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import lance
import pyarrow as pa
import pytest

import geneva
from conftest import connect
from geneva import UDF, Columns, Table, udf
from geneva.execution.runner import InProcessRunner
from geneva.execution.worker import program
from processes import kill, nothing_left_in, start_script
from s3_server import Bucket, bucket, s3_endpoint
from support import Calls, make_table, publishing

__all__ = ["bucket", "s3_endpoint"]  # fixtures: pytest finds them by name


class Size(NamedTuple):
    w: int
    h: int


def sizes(calls: Calls, *, die_at: int = -1, seconds: float = 0.0, **options: Any) -> UDF:
    """`w` is twice the id, `h` a thousand more; the worker dies at one id, once."""
    mark = f"{calls.path}.died"

    def size(id: int) -> Columns[Size]:
        calls.note([id])
        time.sleep(seconds)
        if id == die_at and not Path(mark).exists():
            Path(mark).touch()
            os._exit(9)
        return Size(2 * id, 2 * id + 1_000)

    return udf(size, **options)


def check(table: Table, rows: int) -> None:
    found = table.to_arrow().sort_by("id")
    assert found["w"].to_pylist() == [2 * i for i in range(rows)]
    assert found["h"].to_pylist() == [2 * i + 1_000 for i in range(rows)]
    assert table.plan_backfill("w").is_empty


@pytest.mark.spark
@pytest.mark.slow
def test_a_killed_worker_is_replaced(tmp_path: Path, calls: Calls) -> None:
    table = make_table(connect(tmp_path / "db", None), (30, 30))
    table.add_columns(sizes(calls, die_at=41))
    table.backfill("h", checkpoint_size=5)
    check(table, 60)
    assert set(calls.rows) == set(range(60))
    assert calls.count <= 60 + 5, "the batch that died is computed again, and no more"
    dataset = lance.dataset(table.ref.uri)
    assert all(len(f.metadata.files) == 2 for f in dataset.get_fragments())


@pytest.mark.spark
@pytest.mark.slow
def test_a_sibling_is_dropped_while_workers_compute(tmp_path: Path, calls: Calls) -> None:
    table = make_table(connect(tmp_path / "db", None), (30, 30))
    table.add_columns(sizes(calls, seconds=0.02))
    job = table.backfill_async("h", checkpoint_size=5)
    while calls.count < 10:
        assert not job.done()
        time.sleep(0.02)
    table.drop_columns("w")
    job.result()
    assert calls.taken() == list(range(60)), "what was computed for both is taken over for one"
    assert table.to_arrow().sort_by("id")["h"].to_pylist() == [2 * i + 1_000 for i in range(60)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_driver(tmp_path: Path, calls: Calls) -> None:
    """Also where one of the columns was added again: what it had computed is not lost."""
    db = connect(tmp_path / "db", InProcessRunner)
    table = make_table(db, (40, 40))
    size = sizes(calls, seconds=0.01)
    table.add_columns(size)
    for column in ("w", "h"):
        with nothing_left_in(tmp_path / column):
            code = f"""
                import geneva
                from geneva.execution.runner import InProcessRunner
                db = geneva.connect({db.uri!r}, runner=InProcessRunner)
                db.open_table("t").backfill({column!r}, checkpoint_size=5)
                """
            process = start_script(tmp_path / column, code)
            deadline = time.monotonic() + 120
            while calls.count < 40:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{calls.count} calls, then: {kill(process)}")
                time.sleep(0.02)
            kill(process)
        table.backfill("w", checkpoint_size=5)
        check(table, 80)
        slots = InProcessRunner().slots
        assert calls.count <= 80 + 5 * slots
        calls.clear()
        kept = by_column(table, "h")
        table.drop_columns("w")
        table.add_columns(size)
    table.backfill("h")
    assert by_column(table, "h") == kept
    check(table, 80)


def by_column(table: Table, name: str) -> set[str]:
    """The data files that hold a column."""
    dataset = lance.dataset(table.ref.uri)
    (field,) = [f.id() for f in dataset.lance_schema.fields() if f.name() == name]
    every = [file for f in dataset.get_fragments() for file in f.metadata.files]
    return {file.path for file in every if field in file.fields}


@pytest.mark.slow
@pytest.mark.s3
def test_on_s3(bucket: Bucket, calls: Calls) -> None:
    db = geneva.connect(
        bucket.uri, storage_options=bucket.storage_options, runner=lambda: InProcessRunner(2)
    )
    table = db.create_table("t", pa.table({"id": range(10)}))
    table.add(pa.table({"id": range(10, 20)}))
    size = sizes(calls)
    table.add_columns(size)

    def refuse(*_: Any) -> Any:
        raise OSError("the store is away")

    with publishing(db, refuse), pytest.raises(OSError, match="the store is away"):
        table.backfill("w", checkpoint_size=4)
    assert calls.taken() == list(range(20))
    program.close_programs()
    table.backfill("h")
    assert calls.count == 0, "what was staged is committed as it is"
    check(table, 20)
    table.drop_columns("w")
    table.add_columns(size)
    table.backfill("w")
    assert calls.taken() == list(range(20))
    check(table, 20)

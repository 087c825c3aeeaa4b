"""Databases for programs that run an event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

import geneva
from geneva import JobStatus
from geneva.asynchronous import AsyncView
from geneva.errors import JobCancelledError, UserInputError
from geneva.execution.runner import InProcessRunner
from support import Calls, tripled


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


async def database(path: Path) -> geneva.AsyncConnection:
    return await geneva.connect_async(path / "db", runner=InProcessRunner)


def test_columns_and_views(tmp_path: Path, calls: Calls) -> None:
    async def program() -> None:
        db = await database(tmp_path)
        table = await db.create_table("t", rows(0, 1))
        assert table.sync.to_lance().has_stable_row_ids
        await table.add_columns({"x": tripled(calls)})
        assert (await table.plan_backfill("x")).rows_to_compute == 2
        result, ticks = await asyncio.gather(table.backfill("x"), asyncio.sleep(0, "ticks"))
        assert (result.rows_computed, ticks) == (2, "ticks")
        await table.add(rows(2))  # LanceDB's own coroutine
        assert await table.count_rows() == 3
        view = await db.create_materialized_view("v", table.sync.search(None).where("id > 0"))
        assert isinstance(view, AsyncView)
        assert (await view.refresh()).status is JobStatus.DONE
        opened = await db.open_table("v")
        assert (await opened.to_arrow())["id"].to_pylist() == [1, 2]
        assert await db.list_materialized_views() == ["v"]
        assert [job.job_type for job in await db.list_jobs()] == ["REFRESH", "BACKFILL"]
        assert (await db.get_job(result)).status is JobStatus.DONE
        assert await db.table_names() == ["t", "v"]
        with pytest.raises(UserInputError):
            await table.backfill("nope")
        with pytest.raises(AttributeError, match="'AsyncTable' object has no attribute 'bakfill'"):
            table.bakfill()
        assert {"backfill", "add", "get_errors"} <= set(dir(table))
        assert {"open_table", "list_tables", "get_job"} <= set(dir(db))

    asyncio.run(program())
    assert calls.taken() == [0, 1]


@pytest.mark.slow
def test_a_cancelled_await_stops_the_job(tmp_path: Path) -> None:
    started = tmp_path / "started"

    @geneva.udf(data_type=pa.int64())
    def slow(id: int) -> int:
        import time

        started.touch()
        time.sleep(0.05)
        return id

    async def program() -> None:
        db = await database(tmp_path)
        table = await db.create_table("t", rows(*range(400)))
        await table.add_columns({"x": slow})
        waiting = asyncio.create_task(
            table.backfill("x", batch_checkpoint_flush_interval_seconds=0)
        )
        while not started.exists():
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises((asyncio.CancelledError, JobCancelledError)):
            await waiting
        (job,) = await db.list_jobs()
        assert job.status is JobStatus.CANCELLED

    asyncio.run(program())

"""Databases for programs that run an event loop."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from pathlib import Path

import lancedb
import pyarrow as pa
import pytest

import geneva
from geneva import JobStatus
from geneva.asynchronous import AsyncView
from geneva.errors import JobCancelledError, TableNotFoundError, UserInputError
from geneva.execution.runner import InProcessRunner
from support import Calls, tripled


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


async def database(path: Path) -> geneva.AsyncConnection:
    return await geneva.connect_async(path / "db", runner=InProcessRunner)


class TestFolderThatIsNotThere:
    """As on a connection that waits: a look makes nothing, and the first write makes the folder."""

    def test_a_look_makes_nothing(self, tmp_path: Path) -> None:
        async def program() -> None:
            db = await database(tmp_path / "no")
            assert await db.table_names() == await db.list_materialized_views() == []
            assert (await db.list_tables()).tables == []
            assert (await db.list_namespaces()).namespaces == []
            assert await db.list_jobs() == []
            assert (await db.refresh(), (await db.plan_refresh()).steps) == ((), ())
            for look in (db.open_table, db.open_materialized_view, db.refresh, db.plan_refresh):
                with pytest.raises(TableNotFoundError, match="there is no folder"):
                    await look("t")
            await db.drop_table("t", ignore_missing=True)
            for dropping in (db.drop_table, db.drop_materialized_view):
                with pytest.raises(ValueError, match=r"not found|there is no folder"):
                    await dropping("t")
            await db.drop_all_tables()
            await db.drop_database()
            with pytest.raises(ValueError, match="not found"):
                await db.rename_table("t", "u")
            with pytest.raises(AttributeError, match="Did you mean 'table_names'"):
                db.tabel_names()
            assert not hasattr(db, "_repr_html_"), "a notebook asks for it"
            assert {"table_names", "list_tables", "list_jobs"} <= set(dir(db))
            assert db.is_open()
            with db:
                pass
            assert not db.is_open()
            for call in (db.list_tables, partial(db.create_table, "t", rows(0))):
                with pytest.raises(RuntimeError, match="Connection is closed"):
                    await call()

        asyncio.run(program())
        assert list(tmp_path.iterdir()) == []

    def test_the_first_write_makes_it(self, tmp_path: Path) -> None:
        async def program() -> None:
            db, other = await database(tmp_path / "no"), await database(tmp_path / "no")
            await asyncio.gather(*(db.create_table(name, rows(0)) for name in "tuv"))
            for each in (db, other):
                assert await each.table_names() == (await each.list_tables()).tables
                assert await each.table_names() == ["t", "u", "v"]
            assert await (await other.open_table("t")).count_rows() == 1
            await db.drop_all_tables()
            assert await other.table_names() == []
            db.close()
            assert not db.is_open()

        asyncio.run(program())

    def test_lancedb_waits_in_all_of_its_calls(self) -> None:
        """What it has by another kind of method needs one of its own in `AsyncNoFolder`."""
        for name, method in inspect.getmembers(lancedb.AsyncConnection, inspect.isfunction):
            if not name.startswith("_") and name not in ("close", "is_open"):
                assert inspect.iscoroutinefunction(inspect.unwrap(method)), name


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


def test_queries_of_ours(tmp_path: Path, calls: Calls) -> None:
    async def program() -> None:
        db = await database(tmp_path)
        table = await db.create_table("t", rows(0, 1, 2))
        query = (await table.search(None)).where("id > 0").select({"x": tripled(calls)})
        assert query.schema.names == ["x"]
        assert (await query.to_list(), await query.count_rows()) == ([{"x": 3}, {"x": 6}], 2)
        assert calls.taken() == [1, 2]
        assert await (await table.search()).to_list() == [{"id": 0}, {"id": 1}, {"id": 2}]
        made = await query.create_materialized_view("u")
        for view in (made, await db.create_materialized_view("v", query)):
            await view.refresh()
            assert (await view.to_arrow())["x"].to_pylist() == [3, 6]
        whole = await db.create_materialized_view("w", source=table)
        await whole.refresh()
        assert await whole.count_rows() == 3
        letters = geneva.chunker(
            lambda id: [{"n": id}] * id, output_schema=pa.schema([("n", pa.int64())])
        )
        exploded = await db.create_udtf_view("x", source=await table.search(None), udtf=letters)
        await exploded.refresh()
        assert (await exploded.to_arrow())["n"].to_pylist() == [1, 2, 2]
        with pytest.raises(UserInputError, match=r"LanceDB's own.*`await table.search\(None\)`"):
            await db.create_materialized_view("y", table.query().where("id > 0"))
        with pytest.raises(AttributeError, match="no 'nope'"):
            query.nope  # noqa: B018
        assert {"where", "to_list"} <= set(dir(query))

    asyncio.run(program())


def test_what_ours_do_otherwise_they_do_here_too(tmp_path: Path, calls: Calls) -> None:
    async def program() -> None:
        with await database(tmp_path) as db:
            table = await db.create_table("t", rows(0, 1))
            await table.add_columns({"x": tripled(calls)})
            await table.backfill("x")
            names = ["id", "x"]
            assert (await table.schema()).names == (await table.to_arrow()).schema.names == names
            assert (await table.query().to_list())[0].keys() == set(names)
            await table.checkout(1)
            with pytest.raises(UserInputError, match="version 1 is checked out"):
                await table.backfill("x")
            await table.checkout_latest()
            branch = await table.branches.create("trial")
            assert isinstance(branch, geneva.AsyncTable)
            await branch.add(rows(5))
            assert (await branch.backfill("x")).rows_computed == 1
            assert await table.count_rows() == 2
            view = await db.create_materialized_view("v", table.sync.search(None))
            await view.refresh()
            with pytest.raises(UserInputError, match="Change that table, then refresh"):
                await view.add(rows(3))
            with pytest.raises(UserInputError, match="merge_insert is not possible"):
                view.merge_insert("id")
            theirs = await db.create_materialized_view("m", "t", select=["id"])
            assert type(theirs).__module__.startswith("lancedb")
            assert isinstance(await db.open_materialized_view("v"), AsyncView)
            assert await db.table_names(start_after="m") == ["t", "v"]
            assert (db.is_remote(), db.system_namespace) == (False, ["_geneva"])
            with db.context():
                assert (await table.backfill("x")).rows_computed == 0
        assert not db.is_open()

    asyncio.run(program())


@pytest.mark.parametrize("name", [None, "v"])
def test_a_cancelled_refresh_stops_its_job_and_begins_no_other(
    tmp_path: Path, name: str | None
) -> None:
    started = tmp_path / "started"

    @geneva.udf(data_type=pa.int64())
    def slow(id: int) -> int:
        import time

        started.touch()
        time.sleep(0.05)
        return id

    async def program() -> None:
        db = await geneva.connect_async(tmp_path / "db", runner=lambda: InProcessRunner(2))
        table = await db.create_table("t", rows(*range(200)))
        query = (await table.search(None)).select(["id"]).add_column({"y": slow})
        await db.create_materialized_view("v", query)
        await db.create_materialized_view("w", query)
        waiting = asyncio.create_task(db.refresh(name))
        while not started.exists():
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        (job,) = await db.list_jobs()
        assert job.status is JobStatus.CANCELLED

    asyncio.run(program())


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

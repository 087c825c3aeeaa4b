"""Databases, tables and views for programs that run an event loop.

LanceDB's own coroutines are handed on; what Geneva adds runs in threads, so that a backfill holds
nothing up: `await table.backfill("c")`. A job that is awaited and cancelled is asked to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from geneva.connection import Connection, connect
from geneva.jobs import JobFuture, JobResult
from geneva.storage.lance.database import new_table_options, open_database_async
from geneva.storage.lance.delegation import delegated_attribute
from geneva.table import Table
from geneva.view import MaterializedView

if TYPE_CHECKING:
    from pathlib import Path

_Result = TypeVar("_Result")
_PLAIN = frozenset(
    {"add_columns", "alter_columns", "drop_columns", "plan_backfill", "plan_refresh", "verify"}
    | {"get_errors", "get_failed_row_addresses", "computed_columns", "list_computed_columns"}
    | {"cleanup_checkpoints", "backfill_async", "refresh_async", "load_columns_async"}
)
"""What Geneva's tables and views have, or do otherwise than LanceDB's."""
_OF_DATABASE = frozenset(
    {"get_job", "list_jobs", "cancel_job", "create_udtf_view", "create_materialized_view"}
    | {"create_scalar_udtf_view"}
    | {"list_materialized_views", "drop_materialized_view", "copy_table", "all_table_names"}
    | {"define_cluster", "list_clusters", "delete_cluster", "define_manifest", "list_manifests"}
    | {"delete_manifest", "drop_table", "table_names"}
)


async def connect_async(uri: str | Path, **options: Any) -> AsyncConnection:
    """Connect to a database, as `geneva.connect` does, for a program that runs an event loop."""
    connection = await asyncio.to_thread(connect, uri, **options)
    database = await open_database_async(connection.uri, connection._storage_options)
    return AsyncConnection(connection, database)


class AsyncConnection:
    """An open database. What is not Geneva's is LanceDB's own asynchronous connection."""

    def __init__(self, connection: Connection, database: Any) -> None:
        """Use `connect_async`."""
        self._connection, self._database = connection, database

    @property
    def sync(self) -> Connection:
        """The same for code that waits."""
        return self._connection

    async def create_table(self, name: str, *args: Any, **kwargs: Any) -> AsyncTable:
        """Create a table, as LanceDB does, with stable row ids."""
        given = kwargs.pop("storage_options", None)
        place = kwargs.get("namespace_path")
        options = new_table_options(self._connection._storage_options, given, place)
        await self._database.create_table(name, *args, storage_options=options, **kwargs)
        return await self.open_table(name, namespace_path=place)

    async def open_table(self, name: str, **kwargs: Any) -> AsyncTable:
        """Open a table or a view, as `Connection.open_table` does."""
        table = await asyncio.to_thread(self._connection.open_table, name, **kwargs)
        return AsyncTable.of(table)

    def __getattr__(self, name: str) -> Any:
        """Hand everything else on: what is Geneva's in a thread, the rest to LanceDB."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _OF_DATABASE:
            return _in_thread(getattr(self._connection, name))
        return delegated_attribute(self, self._database, name)

    def __dir__(self) -> list[str]:
        """What Geneva and LanceDB can do."""
        return sorted({*object.__dir__(self), *_OF_DATABASE, *_public(self._database)})

    def __repr__(self) -> str:
        """Show where the database is."""
        return f"AsyncConnection({self._connection.uri!r})"


class AsyncTable:
    """A table or view. What is not Geneva's is LanceDB's own asynchronous table."""

    def __init__(self, table: Table) -> None:
        """Use `AsyncConnection.open_table`."""
        self._table = table

    @classmethod
    def of(cls, table: Table) -> AsyncTable:
        """A table or a view for an event loop."""
        return AsyncView(table) if isinstance(table, MaterializedView) else cls(table)

    @property
    def sync(self) -> Table:
        """The same for code that waits."""
        return self._table

    async def backfill(self, col_name: str, **options: Any) -> JobResult:
        """Compute the column's values, as `Table.backfill` does."""
        future = await asyncio.to_thread(self._table.backfill_async, col_name, **options)
        return await _ended(future)

    async def load_columns(self, *args: Any, **options: Any) -> JobResult:
        """Load columns from elsewhere by key, as `Table.load_columns` does."""
        future = await asyncio.to_thread(self._table.load_columns_async, *args, **options)
        return await _ended(future)

    def __getattr__(self, name: str) -> Any:
        """Hand everything else on: what is Geneva's in a thread, the rest to LanceDB."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _PLAIN and hasattr(self._table, name):
            return _in_thread(getattr(self._table, name))
        return delegated_attribute(self, self._table._lancedb()._table, name)

    def __dir__(self) -> list[str]:
        """What Geneva and LanceDB can do."""
        return sorted({*object.__dir__(self), *_PLAIN, *_public(self._table._lancedb()._table)})

    def __repr__(self) -> str:
        """Show the table."""
        return f"Async{self._table!r}"


class AsyncView(AsyncTable):
    """A materialized view."""

    async def refresh(self, *args: Any, **options: Any) -> JobResult:
        """Bring the view up to date, as `MaterializedView.refresh` does."""
        assert isinstance(self._table, MaterializedView)
        future = await asyncio.to_thread(self._table.refresh_async, *args, **options)
        return await _ended(future)


def _in_thread(call: Callable[..., _Result]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        made = await asyncio.to_thread(call, *args, **kwargs)
        return AsyncTable.of(made) if isinstance(made, Table) else made

    return run


async def _ended(future: JobFuture) -> JobResult:
    """Wait for a job's end; cancelled, ask it to stop, and wait until it has."""
    try:
        return await asyncio.to_thread(future.result)
    except asyncio.CancelledError:
        future.cancel()
        await asyncio.to_thread(future.wait)
        raise


def _public(thing: Any) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]

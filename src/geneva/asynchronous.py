"""Databases, tables and views for programs that run an event loop.

LanceDB's own coroutines are handed on; what Geneva adds runs in threads, so that a backfill holds
nothing up: `await table.backfill("c")`. A job that is awaited and cancelled is asked to stop.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from geneva.connection import Connection, connect
from geneva.database_refresh import Stop, refresh_database
from geneva.errors import UserInputError
from geneva.jobs import JobFuture, JobResult
from geneva.query import Query
from geneva.storage.lance.database import (
    is_source_of_lancedb,
    new_table_options,
    open_database_async,
)
from geneva.storage.lance.delegation import (
    COMMITTING,
    MERGE,
    delegated_attribute,
    merged_within,
)
from geneva.storage.lance.folder import AsyncNoFolder, is_missing_folder
from geneva.storage.lance.scores import is_of_words, score_of, without_score
from geneva.storage.views.definition import ViewKind
from geneva.table import Table
from geneva.view import MaterializedView

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

_Result = TypeVar("_Result")
_FURTHER = ("nearest_to", "nearest_to_text")
"""What makes another kind of query of one."""
_RESULTS = frozenset(
    {
        *("to_arrow", "to_batches", "to_list", "to_pandas", "to_polars", "to_pydantic"),
        *("count_rows", "create_materialized_view"),
    }
)
"""What makes something of a query, and so takes its time."""
_AT_ONCE = frozenset({"context", "local_ray_context", "is_remote"})
"""Of a connection, what waits for nothing."""


async def connect_async(uri: str | Path, **options: Any) -> AsyncConnection:
    """Connect to a database, as `geneva.connect` does, for a program that runs an event loop.

    A folder that isn't there is made by what writes to it first.
    """
    connection = await asyncio.to_thread(connect, uri, **options)
    opening = partial(open_database_async, connection.uri, connection._storage_options)
    if await asyncio.to_thread(is_missing_folder, connection.uri):
        return AsyncConnection(connection, AsyncNoFolder(connection.uri, opening))
    return AsyncConnection(connection, await opening())


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
        with self._connection._writing("create_table", name):
            await self._database.create_table(name, *args, storage_options=options, **kwargs)
        return await self.open_table(name, namespace_path=place)

    async def open_table(self, name: str, **kwargs: Any) -> AsyncTable:
        """Open a table or a view, as `Connection.open_table` does."""
        table = await asyncio.to_thread(self._connection.open_table, name, **kwargs)
        return AsyncTable.of(table)

    async def table_names(
        self,
        *,
        namespace_path: Sequence[str] | None = None,
        start_after: str | None = None,
        limit: int | None = None,
    ) -> list[str]:
        """The names of all tables, sorted, or of those in a namespace."""
        names = self._connection.table_names
        return await asyncio.to_thread(names, start_after, limit, namespace_path=namespace_path)

    async def create_materialized_view(self, name: str, source: Any = None, **options: Any) -> Any:
        """Make a view of a query, or one of LanceDB's own views of a table's name."""
        if is_source_of_lancedb(source):
            options = await self._for_lancedb(source, options)
            return await self._database.create_materialized_view(name, source, **options)
        return await _in_thread(self._connection.create_materialized_view)(name, source, **options)

    async def create_materialized_view_async(self, name: str, source: Any, **options: Any) -> Any:
        """Start to make one of LanceDB's own views of a table's name, and return its job."""
        options = await self._for_lancedb(source, options)
        return await self._database.create_materialized_view_async(name, source, **options)

    async def _for_lancedb(self, source: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The options of one of LanceDB's own views, without the columns that are Geneva's own."""
        columns = self._connection._columns_for_lancedb
        select = await asyncio.to_thread(columns, source, options.get("select"))
        return {**options, "select": select}

    async def open_materialized_view(self, name: str) -> Any:
        """Open a view: Geneva's is an `AsyncView`, LanceDB's is LanceDB's own object."""
        kind = await asyncio.to_thread(self._connection._view_kind, name)
        if kind is ViewKind.LANCEDB:
            return await self._database.open_materialized_view(name)
        return await _in_thread(self._connection.open_materialized_view)(name)

    async def refresh(self, name: str | None = None, **options: Any) -> Any:
        """Bring everything up to date, or one view, as `Connection.refresh` does."""
        if name is not None:
            view = await asyncio.to_thread(self._connection._view_to_refresh, name)
            return await AsyncView(view).refresh(**options)
        stop = Stop()
        refreshing = partial(refresh_database, self._connection, options, stop=stop)
        work = asyncio.create_task(asyncio.to_thread(refreshing))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.to_thread(stop.set)  # it may wait for a job that is about to begin
            await asyncio.gather(work, return_exceptions=True)
            raise

    def close(self) -> None:
        """Close LanceDB's own connection."""
        self._database.close()

    def __enter__(self) -> Self:
        """Close it at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Hand everything else on: what is Geneva's in a thread, the rest to LanceDB."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _AT_ONCE:
            return getattr(self._connection, name)
        return _attribute(self, self._connection, self._database, name)

    def __dir__(self) -> list[str]:
        """What Geneva and LanceDB can do."""
        return sorted({*object.__dir__(self), *_public(self._connection), *_public(self._database)})

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

    async def schema(self) -> pa.Schema:
        """The table's schema, without the columns that are Geneva's own."""
        return await asyncio.to_thread(lambda: self._table.schema)

    # LanceDB's queries, of all columns but Geneva's own, unless `select` names others.

    def query(self) -> Any:
        """LanceDB's query of the rows."""
        return self._shown(self._lancedb.query())

    def vector_search(self, query_vector: Any) -> Any:
        """LanceDB's search of the rows that are nearest to a vector."""
        return self._shown(self._lancedb.vector_search(query_vector))

    async def search(self, *args: Any, **options: Any) -> Any:
        """LanceDB's search, by a vector, words or both.

        `search(None)` builds a query of Geneva's, an `AsyncGenevaQuery`; `search()` is `query()`.
        """
        if not options and args in ((), (None,)):
            return AsyncGenevaQuery(self._table.query()) if args else self.query()
        return self._shown(await self._lancedb.search(*args, **options))

    def _shown(self, found: Any, chosen: Any = None) -> Any:
        """A query of all columns but Geneva's own, unless some are `chosen`, whatever it becomes.

        A vector or words that are added to it make another kind of query, with another score.
        """
        kind, selects = type(found), found.select
        if chosen is None:
            self._table._without_hidden(found, *score_of(found))

        def select(columns: Any) -> Any:
            nonlocal chosen
            chosen = columns
            return selects(columns)

        def further(method: str, *args: Any, **options: Any) -> Any:
            asked = chosen
            if asked is None:
                self._table._without_hidden(found)  # and without a score that is no longer there
            return self._shown(getattr(kind, method)(found, *args, **options), asked)

        async def output_schema() -> pa.Schema:
            rows = self._lancedb.query().select(without_score(chosen or self._table._visible()))
            return await (rows.with_row_id() if found._with_row_id else rows).output_schema()

        found.select = select
        if is_of_words(found):
            found.output_schema = output_schema
        for method in _FURTHER:
            if hasattr(kind, method):
                setattr(found, method, partial(further, method))
        return found

    def take_offsets(self, offsets: list[int]) -> Any:
        """Take rows by their place in the table."""
        return self._table._without_hidden(self._lancedb.take_offsets(offsets))

    def take_row_ids(self, row_ids: list[int]) -> Any:
        """Take rows by their row ids."""
        return self._table._without_hidden(self._lancedb.take_row_ids(row_ids))

    @property
    def branches(self) -> AsyncBranches:
        """The table's branches: to make one, open one, list and delete them."""
        return AsyncBranches(self._table)

    @property
    def _lancedb(self) -> Any:
        """LanceDB's own asynchronous table, which reads the same version."""
        return self._table._lancedb()._table

    def __enter__(self) -> Self:
        """Close it at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self._lancedb.close()

    def __getattr__(self, name: str) -> Any:
        """Hand everything else on: what is Geneva's in a thread, the rest to LanceDB."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = _attribute(self, self._table, self._lancedb, name)
        if name not in COMMITTING or name in vars(Table):
            return found
        return self._merging(found) if name == MERGE else self._committing(name, found)

    def _merging(self, merge: Callable[..., Any]) -> Callable[..., Any]:
        """LanceDB's builder of a merge, for a table that is still there."""
        calling = partial(self._table._calling, MERGE)
        return lambda *args, **options: merged_within(merge(*args, **options), calling)

    def _committing(self, name: str, commit: Callable[..., Any]) -> Callable[..., Any]:
        """A coroutine of LanceDB's that commits, for a table that is still there."""

        async def run(*args: Any, **options: Any) -> Any:
            with await asyncio.to_thread(self._table._calling, name):
                return await commit(*args, **options)

        return run

    def __dir__(self) -> list[str]:
        """What Geneva and LanceDB can do."""
        return sorted({*object.__dir__(self), *_public(self._table), *_public(self._lancedb)})

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

    def merge_insert(self, *args: Any, **options: Any) -> Any:
        """Refuse: a view's rows come from its source."""
        self._table.merge_insert(*args, **options)


class AsyncGenevaQuery:
    """A query of Geneva's over a table. Building it waits for nothing; its result is awaited."""

    def __init__(self, query: Query) -> None:
        """Use `AsyncTable.search(None)`."""
        self._query = query

    @property
    def sync(self) -> Query:
        """The same for code that waits."""
        return self._query

    def __getattr__(self, name: str) -> Any:
        """What `geneva.Query` can do: what makes a result of it, in a thread."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._query, name)
        if name in _RESULTS:
            return _in_thread(found)
        return partial(self._further, found) if inspect.ismethod(found) else found

    @staticmethod
    def _further(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        made = method(*args, **options)
        return AsyncGenevaQuery(made) if isinstance(made, Query) else made

    def __dir__(self) -> list[str]:
        """What Geneva's queries can do."""
        return sorted({*object.__dir__(self), *_public(self._query)})

    def __repr__(self) -> str:
        """Show the query."""
        return f"Async{self._query!r}"


class AsyncBranches:
    """The branches of a table, for an event loop."""

    def __init__(self, table: Table) -> None:
        """Use `AsyncTable.branches`."""
        self._branches = table.branches

    def __getattr__(self, name: str) -> Any:
        """What `Table.branches` can do, in a thread."""
        if name.startswith("_"):
            raise AttributeError(name)
        return _in_thread(getattr(self._branches, name))


def _attribute(own: Any, ours: Any, theirs: Any, name: str) -> Any:
    """What a table or connection has by a name: Geneva's in a thread, what is not is LanceDB's."""
    found = inspect.getattr_static(type(ours), name, None)
    home = next((kind for kind in type(ours).__mro__ if name in vars(kind)), object)
    if home in _OURS:
        if inspect.isfunction(found):
            return _in_thread(getattr(ours, name))
        if not hasattr(type(theirs), name):
            return getattr(ours, name)
    return delegated_attribute(own, theirs, name)


_OURS = frozenset({Connection, Table, MaterializedView})
"""The classes whose own methods are Geneva's."""


def _in_thread(call: Callable[..., _Result]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        given = [_sync(value) for value in args]
        named = {name: _sync(value) for name, value in kwargs.items()}
        made = await asyncio.to_thread(call, *given, **named)
        return AsyncTable.of(made) if isinstance(made, Table) else made

    return run


def _sync(value: Any) -> Any:
    """A table or query that Geneva's own code can read."""
    if isinstance(value, AsyncTable | AsyncGenevaQuery):
        return value.sync
    kind = type(value)
    if kind.__module__.startswith("lancedb.") and re.fullmatch(r"Async\w*Query", kind.__name__):
        raise UserInputError(
            f"{kind.__name__} is LanceDB's own, and only LanceDB can read it. For a view, build "
            "the query with `await table.search(None)` and its where, select, limit and offset."
        )
    return value


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

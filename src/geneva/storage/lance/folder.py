"""A folder of tables, looked at by Lance alone: LanceDB takes longer to import than to ask.

What a folder can't answer by itself (namespaces, branches, searches, writing, what is wrong with a
table) is LanceDB's to answer, which is imported then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import lance

from geneva.model.uris import local_path
from geneva.storage.lance.lancedb_import import lancedb

_TABLE = ".lance"
_NAMESPACES = "__manifest"
"""LanceDB's list of namespaces, and of the tables in them."""


def open_folder(path: str, open_database: Callable[[], Any]) -> Any:
    """A database to look at: the folder, where Lance alone can read it, or LanceDB's own."""
    folder = Path(path)
    if not folder.is_dir() or (folder / _NAMESPACES).exists():
        return open_database()
    return Folder(folder, open_database)


def is_missing_folder(uri: str) -> bool:
    """Whether a database's folder isn't there, and can be made."""
    folder = local_path(uri)
    if folder is None:
        return False
    try:
        if folder.exists():
            return False
        above = next(place for place in folder.parents if place.exists())
    except OSError:  # LanceDB says what it is
        return False
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


@cache
def _names_of_lancedb() -> frozenset[str]:
    """What LanceDB's connections have: some of it they get when they are made."""
    with TemporaryDirectory() as folder:
        return frozenset(dir(lancedb().connect(folder)))


class NoFolder:
    """A database whose folder isn't there: nothing is in it.

    What is not defined here is LanceDB's, which makes the folder; but not for a misspelt name, or
    one that a notebook asks every object for.
    """

    def __init__(self, uri: str, open_database: Callable[[], Any]) -> None:
        """Make nothing yet."""
        self.uri, self._open_database = uri, open_database

    def __getattr__(self, name: str) -> Any:
        """Hand everything else to LanceDB."""
        if name.startswith("__") or name not in _names_of_lancedb():
            raise AttributeError(name)
        return getattr(self._open_database(), name)

    def list_tables(self, **page: Any) -> Any:
        """There are none."""
        return SimpleNamespace(tables=[], page_token=None)

    def list_namespaces(self, **page: Any) -> Any:
        """There are none."""
        return SimpleNamespace(namespaces=[], page_token=None)

    def open_table(self, name: str, **options: Any) -> Any:
        """Say, in the words of LanceDB, that there is no table."""
        raise ValueError(f"Table {name!r} was not found")

    def rename_table(self, name: str, *others: Any, **options: Any) -> Any:
        """Say that there is no table."""
        return self.open_table(name)

    def drop_table(self, name: str, *, ignore_missing: bool = False, **options: Any) -> None:
        """Nothing is to be dropped."""
        if not ignore_missing:
            self.open_table(name)

    def drop_all_tables(self, *options: Any, **named: Any) -> None:
        """Nothing is to be dropped."""

    drop_database = drop_all_tables


class AsyncNoFolder:
    """The same for an event loop, by LanceDB's asynchronous connection.

    That is opened by the first coroutine which is more than a look, or finds the folder there.
    """

    def __init__(self, uri: str, open_database: Callable[[], Awaitable[Any]]) -> None:
        """Make nothing yet."""
        self.uri, self._open_database = uri, open_database
        self._opening = asyncio.Lock()
        self._opened: Any = None
        self._is_closed = False

    def is_open(self) -> bool:
        """Whether nobody has closed it."""
        return not self._is_closed

    def close(self) -> None:
        """Close LanceDB's connection, too, if there is one by now."""
        self._is_closed = True
        if self._opened is not None:
            self._opened.close()

    def __getattr__(self, name: str) -> Any:
        """A coroutine of LanceDB's; of a look, one that makes nothing."""
        if name.startswith("_") or name not in dir(self):
            raise AttributeError(name)

        async def call(*args: Any, **options: Any) -> Any:
            if self._is_closed:
                raise RuntimeError("Connection is closed")  # as LanceDB says it
            if name in vars(NoFolder) and is_missing_folder(self.uri):
                return getattr(self._nothing(), name)(*args, **options)
            return await getattr(await self._lancedb(), name)(*args, **options)

        return call

    def __dir__(self) -> list[str]:
        """What LanceDB's connections have."""
        return dir(lancedb().AsyncConnection)

    def _nothing(self) -> NoFolder:
        return NoFolder(self.uri, lambda: self._opened)

    async def _lancedb(self) -> Any:
        async with self._opening:
            if self._opened is None:
                self._opened = await self._open_database()
        return self._opened


class Folder:
    """A database without namespaces. What is not defined here is LanceDB's."""

    def __init__(self, path: Path, open_database: Callable[[], Any]) -> None:
        """Use `open_folder`."""
        self._path, self._open_database = path, open_database
        self.uri = str(path)

    @cached_property
    def _lancedb(self) -> Any:
        return self._open_database()

    def __getattr__(self, name: str) -> Any:
        """Hand everything else to LanceDB."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._lancedb, name)

    def list_tables(self, **page: Any) -> Any:
        """All names at once, in the form of LanceDB's pages."""
        if "namespace_path" in page:
            return self._lancedb.list_tables(**page)
        found = (place for place in self._path.iterdir() if place.suffix == _TABLE)
        return SimpleNamespace(
            tables=[place.stem for place in found if place.is_dir()], page_token=None
        )

    def list_namespaces(self, **page: Any) -> Any:
        """There are none."""
        if "namespace_path" in page:
            return self._lancedb.list_namespaces(**page)
        return SimpleNamespace(namespaces=[], page_token=None)

    def open_table(self, name: str, **options: Any) -> Any:
        """Open a table at its latest version."""
        if options:
            return self._lancedb.open_table(name, **options)
        try:
            dataset = lance.dataset(str(self._path / f"{name}{_TABLE}"))
        except (OSError, ValueError):  # LanceDB says what it is
            return self._lancedb.open_table(name)
        return FolderTable(name, dataset, lambda: self._lancedb.open_table(name))


class FolderTable:
    """A table to look at. What is not defined here is LanceDB's."""

    namespace: tuple[str, ...] = ()

    def __init__(
        self, name: str, dataset: lance.LanceDataset, open_table: Callable[[], Any]
    ) -> None:
        """Use `Folder.open_table`."""
        self.name, self.uri = name, str(dataset.uri)
        self._dataset, self._open_table = dataset, open_table

    @cached_property
    def _lancedb(self) -> Any:
        return self._open_table()

    def __getattr__(self, name: str) -> Any:
        """Hand everything else to LanceDB."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._lancedb, name)

    @property
    def schema(self) -> Any:
        """The table's schema."""
        return self._dataset.schema

    @property
    def version(self) -> int:
        """The version that was the latest when the table was opened."""
        return int(self._dataset.version)

    @property
    def branches(self) -> Any:
        """The table's branches, as Lance has them."""
        return self._dataset.branches

    def current_branch(self) -> None:
        """No branch but the main one."""

    def initial_storage_options(self) -> None:
        """A folder has none."""

    def count_rows(self, filter: str | None = None) -> int:
        """How many rows there are."""
        return int(self._dataset.count_rows(filter))

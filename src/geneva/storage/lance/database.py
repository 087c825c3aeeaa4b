"""LanceDB, the part that Geneva does not replace."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from geneva.errors import GenevaError, StorageUnavailableError, UserInputError
from geneva.model.tables import Secrets
from geneva.model.uris import TableName, local_path, without_credentials
from geneva.render.text import one_line, shorten
from geneva.storage.lance.damage import damage_reason
from geneva.storage.lance.lancedb_import import lancedb

_STABLE_ROW_IDS = "new_table_enable_stable_row_ids"
_STABLE_ROW_IDS_BEFORE = "enable_move_stable_row_ids"
"""The option's older name."""

CONNECT_SECONDS = 60.0
"""How long a store may take to answer when a database is opened."""
_UNREACHABLE = re.compile(
    r"HttpError|RetryError|reqwest|timed out|connect error|dns error|Unauthenticated"
    r"|PermissionDenied|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|NoSuchBucket"
    r"|credential provider|Failed to connect|Failed to resolve region",
    re.IGNORECASE,
)
_STATUS = re.compile(r"status: (\d{3})")
_NOT_THERE = ("not found", "file name too long")
_MAX_CAUSE = 300
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"|<Message>([^<]+)</Message>')
"""What a store's client says last, inside the layers that libraries have put around it."""
_USUAL_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Names that need no LanceDB to be found good."""
_DROP_ATTEMPTS = 10
_DROP_PAUSE_SECONDS = 0.05


def _errors() -> tuple[type[Exception], ...]:
    """What LanceDB raises when it can't do what it was asked."""
    namespaces = sys.modules.get("lance_namespace.errors")  # slow to import; not there, not raised
    more = () if namespaces is None else (namespaces.LanceNamespaceError,)
    return ValueError, OSError, RuntimeError, *more


def open_database(uri: str, storage_options: Secrets, options: Mapping[str, Any]) -> Any:
    """Open a LanceDB database."""
    with opening(uri, storage_options):
        return _in_time(
            lambda: lancedb().connect(uri, storage_options=storage_options.plain(), **options)
        )


def is_source_of_lancedb(source: Any) -> bool:
    """Whether it is what LanceDB makes views of its own from: a table's name, or a dedup of one."""
    return isinstance(source, str) or type(source).__name__ == "VectorDedupSource"


async def open_database_async(uri: str, storage_options: Secrets) -> Any:
    """Open a LanceDB database for an event loop."""
    with opening(uri, storage_options):
        return await lancedb().connect_async(uri, storage_options=storage_options.plain())


@contextmanager
def opening(uri: str, storage_options: Secrets) -> Iterator[None]:
    """Say in a sentence why a database can't be opened: by how it was named, or by its store."""
    what = f"Database {without_credentials(uri)!r}"
    try:
        with _reaching(what, storage_options):
            yield
    except GenevaError:
        raise
    except (ValueError, FileExistsError, NotADirectoryError) as error:
        reason = storage_options.redact(damage_reason(error))
        for prefix in ("Invalid input, ", "Invalid user input: "):
            reason = reason.removeprefix(prefix)
        raise UserInputError(f"{what} can't be opened: {reason.rstrip('.')}.") from error


def _in_time(connect: Callable[[], Any], seconds: float = CONNECT_SECONDS) -> Any:
    """Connect, or give up: a store that takes requests and never answers holds its client long."""
    connected: Future[Any] = Future()

    def run() -> None:
        try:
            connected.set_result(connect())
        except BaseException as error:  # noqa: BLE001  it is the caller's
            connected.set_exception(error)

    threading.Thread(target=run, name="geneva-connect", daemon=True).start()
    try:
        return connected.result(seconds)
    except TimeoutError:
        if connected.done():
            raise
        raise TimeoutError(f"it did not answer in {seconds:g} s (timed out)") from None


@contextmanager
def _reaching(what: str, secrets: Secrets) -> Iterator[None]:
    """Say in a sentence that a store can't be reached: its client buries that in its own state."""
    try:
        yield
    except _errors() as error:
        text = str(error)
        if not (isinstance(error, PermissionError) or _UNREACHABLE.search(text)):
            raise
        causes = ["".join(found) for found in _CAUSE.findall(text)]
        cause = causes[-1] if causes else shorten(damage_reason(error), _MAX_CAUSE)
        if not causes and (status := _STATUS.search(text)) is not None:
            cause = f"it answers with HTTP status {status[1]}"
        raise StorageUnavailableError(
            f"{what} can't be reached: {secrets.redact(cause)}. Check the address, the keys and "
            "the network (storage_options, or the store's own environment variables), and run "
            "this again."
        ) from error


def open_lancedb_table(
    database: Any, name: TableName, secrets: Secrets, options: Mapping[str, Any] | None = None
) -> Any:
    """Open a table or a branch of one, at its latest version; None when there is none."""
    asked = dict(options or {})
    if name.branch is not None:
        asked["branch"] = name.branch
    if name.namespace:
        asked["namespace_path"] = list(name.namespace)
        # LanceDB doesn't hand its own on to a namespace.
        asked.setdefault("storage_options", secrets.plain())
    check_table_name(name.table)
    try:
        with _reaching(f"Table {str(name)!r}", secrets):
            return database.open_table(name.table, **asked)
    except _errors() as error:
        text = str(error).lower()
        if isinstance(error, StorageUnavailableError) or not any(s in text for s in _NOT_THERE):
            raise
        return None


def new_table_options(
    of_database: Mapping[str, str],
    given: Mapping[str, Any] | None,
    namespace: Sequence[str] | None = None,
) -> dict[str, str]:
    """The storage options of a table that is created: with stable row ids, unless told otherwise.

    LanceDB adds the database's own options, except in a namespace.
    """
    asked = dict(Secrets(given))
    known = {**of_database, **asked}
    options = {**(of_database if namespace else {}), **asked, _STABLE_ROW_IDS: _stable(known)}
    options.pop(_STABLE_ROW_IDS_BEFORE, None)
    return options


def wants_stable_row_ids(of_database: Mapping[str, str]) -> bool:
    """Whether a table that is created has stable row ids: yes, unless told otherwise."""
    return _stable(of_database).lower() == "true"


def _stable(known: Mapping[str, str]) -> str:
    return known.get(_STABLE_ROW_IDS, known.get(_STABLE_ROW_IDS_BEFORE, "true"))


def drop_table(database: Any, name: str, **options: Any) -> None:
    """Drop a table. A job that still writes into its folder is no reason to fail."""
    for attempt in range(_DROP_ATTEMPTS):
        try:
            database.drop_table(name, **options)
        except (OSError, RuntimeError, ValueError) as error:
            text = str(error).lower()
            if attempt and "not found" in text:
                return
            if "not empty" not in text or attempt + 1 == _DROP_ATTEMPTS:
                raise
            time.sleep(_DROP_PAUSE_SECONDS)
        else:
            return


def list_table_names(database: Any, namespace: Sequence[str] = ()) -> list[str]:
    """The names of all tables of the database, or of those in a namespace, sorted.

    A folder of data files and nothing else is no table: a write that was to create one failed, or
    is still at it. In an object store it would take a request for each table to know that.
    """
    names = list_table_places(database, namespace)
    folder = None if namespace else local_path(database.uri)
    return [name for name in names if folder is None or not _was_never_created(folder, name)]


def list_table_places(database: Any, namespace: Sequence[str] = ()) -> list[str]:
    """The names of whatever LanceDB takes for a table, with a version or without one, sorted."""
    return sorted(_pages(database.list_tables, "tables", namespace))


def _was_never_created(folder: Path, name: str) -> bool:
    place = folder / f"{name}.lance"
    try:
        return [inside.name for inside in place.iterdir()] == ["data"]
    except OSError:  # dropped meanwhile, or it is elsewhere
        return False


def list_every_table(
    database: Any, secrets: Secrets, namespace: tuple[str, ...] = ()
) -> Iterator[TableName]:
    """All tables of a database, each before its branches; those in namespaces come last."""
    for table in list_table_names(database, namespace):
        name = TableName(table, namespace)
        yield name
        for branch in _branches_of(database, name, secrets):
            yield replace(name, branch=branch)
    for inner in sorted(_pages(database.list_namespaces, "namespaces", namespace)):
        yield from list_every_table(database, secrets, (*namespace, inner))


def _branches_of(database: Any, name: TableName, secrets: Secrets) -> list[str]:
    try:
        table = open_lancedb_table(database, name, secrets)
        return sorted(table.branches.list()) if table is not None else []
    except BaseException as error:  # noqa: BLE001
        one_line(error)  # it can't be opened: whoever tries to will say why
        return []


def _pages(read: Callable[..., Any], what: str, namespace: Sequence[str]) -> Iterator[str]:
    place = {"namespace_path": list(namespace)} if namespace else {}
    with _reaching("The database", Secrets()):
        page = read(limit=1000, **place)
        yield from getattr(page, what)
        while page.page_token:
            page = read(limit=1000, page_token=page.page_token, **place)
            yield from getattr(page, what)


def check_table_name(name: str) -> None:
    """Refuse a name that LanceDB would not take for a table."""
    if _USUAL_NAME.fullmatch(name):
        return
    from lancedb.util import validate_table_name

    try:
        validate_table_name(name)
    except ValueError as error:
        raise UserInputError(f"{name!r} can't be the name of a table or view: {error}") from error


def ivf_flat(partitions: int) -> Any:
    """What `create_index` takes for an index of so many partitions over whole vectors."""
    from lancedb.index import IvfFlat

    return IvfFlat(distance_type="l2", num_partitions=partitions)

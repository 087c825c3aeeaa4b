"""LanceDB, the part that Geneva does not replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lancedb
from lance_namespace.errors import LanceNamespaceError
from lancedb.util import validate_table_name

from geneva.errors import UserInputError
from geneva.model.tables import Secrets
from geneva.model.uris import TableName


def open_database(uri: str, storage_options: Secrets, options: Mapping[str, Any]) -> Any:
    """Open a LanceDB database."""
    return lancedb.connect(uri, storage_options=storage_options.plain(), **options)


def open_lancedb_table(database: Any, name: TableName, options: Mapping[str, Any]) -> Any:
    """Open a table or a branch of one, at its latest version; None when there is none."""
    place = {"namespace_path": list(name.namespace)} if name.namespace else {}
    branch = {} if name.branch is None else {"branch": name.branch}
    try:
        return database.open_table(name.table, **place, **branch, **options)
    except (ValueError, OSError, RuntimeError, LanceNamespaceError) as error:
        if "not found" not in str(error).lower():
            raise
        return None


def list_table_names(database: Any, namespace: Sequence[str] = ()) -> list[str]:
    """The names of all tables of the database, or of those in a namespace, sorted."""
    place = {"namespace_path": list(namespace)} if namespace else {}
    names: list[str] = []
    page = database.list_tables(limit=1000, **place)
    names.extend(page.tables)
    while page.page_token:
        page = database.list_tables(limit=1000, page_token=page.page_token, **place)
        names.extend(page.tables)
    return sorted(names)


def check_table_name(name: str) -> None:
    """Refuse a name that LanceDB would not take for a table."""
    try:
        validate_table_name(name)
    except ValueError as error:
        raise UserInputError(f"{name!r} can't be the name of a table or view: {error}") from error

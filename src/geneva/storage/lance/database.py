"""LanceDB, the part that Geneva does not replace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lancedb
from lancedb.util import validate_table_name

from geneva.errors import UserInputError
from geneva.model.tables import Secrets


def open_database(uri: str, storage_options: Secrets, options: Mapping[str, Any]) -> Any:
    """Open a LanceDB database."""
    return lancedb.connect(uri, storage_options=storage_options.plain(), **options)


def is_missing_table(error: Exception) -> bool:
    """Whether LanceDB says that there is no such table."""
    return "not found" in str(error).lower()


def list_table_names(database: Any) -> list[str]:
    """The names of all tables, sorted."""
    names: list[str] = []
    page = database.list_tables(limit=1000)
    names.extend(page.tables)
    while page.page_token:
        page = database.list_tables(limit=1000, page_token=page.page_token)
        names.extend(page.tables)
    return sorted(names)


def check_table_name(name: str) -> None:
    """Refuse a name that LanceDB would not take for a table."""
    try:
        validate_table_name(name)
    except ValueError as error:
        raise UserInputError(f"{name!r} can't be the name of a table or view: {error}") from error

"""The database that a command works on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from geneva.cli import quick_import
from geneva.cli.terminal import hide
from geneva.config import without_collecting
from geneva.errors import ColumnNotFoundError, UserInputError
from geneva.model.tables import Secrets
from geneva.model.uris import local_path, resolve
from geneva.render.text import did_you_mean, listed

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.table import Table


def connect(db: str, storage_option: Iterable[str] | None) -> Connection:
    """Open the database. A local folder has to be there."""
    options = read_storage_options(storage_option)
    resolve(db)
    folder = local_path(db)
    if folder is not None and not folder.is_dir():
        raise UserInputError(f"There is no database {db!r}: there is no such folder.")
    import geneva

    return geneva.connect(db, storage_options=options)


def connect_to_look(db: str, storage_option: Iterable[str] | None) -> Connection:
    """Open the database for a command that computes nothing, changes nothing and runs no function.

    Nor does it import LanceDB or pandas, where the tables are in a folder.
    """
    quick_import.has_only_looked = True
    with without_collecting():
        quick_import.import_arrow_alone()
        return connect(db, storage_option)._for_looking()


def read_storage_options(given: Iterable[str] | None) -> dict[str, str]:
    """Pairs of KEY=VALUE as a dict; a wrong one is refused without being repeated."""
    options: dict[str, str] = {}
    for position, pair in enumerate(given or (), start=1):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UserInputError(f"Storage option number {position} is not of the form KEY=VALUE.")
        options[key.strip()] = value
    hide(Secrets(options))
    return options


def check_columns(table: Table, columns: Iterable[str], hint: str = "") -> None:
    """Refuse names that the table doesn't have, with the one that was probably meant."""
    known = table.schema.names
    for name in columns:
        if name not in known:
            message = (
                f"Table {table.ref.name!r} has no column {name!r}.{did_you_mean(name, known)} "
                f"It has: {listed(known)}."
            )
            raise ColumnNotFoundError(f"{message} {hint}" if hint else message)

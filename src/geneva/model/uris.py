"""Where databases and tables are: paths and URIs, resolved in one way. Pure, but for the home."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from geneva.errors import TypeMismatchError, UserInputError

_BRANCH, _NAMESPACE = "@", "$"
"""What stands before a branch, and behind a namespace. No table's own name can have them."""
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/]*(/|$)")
_FILE = re.compile(r"file:(?://(?:localhost)?(?=/)|(?=/(?!/)))", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TableName:
    """What a table is called: `table`, `table@branch`, `namespace$table`.

    A branch is a table of its own wherever tables are named: in jobs, errors, messages, commands.
    """

    table: str
    namespace: tuple[str, ...] = ()
    branch: str | None = None

    def __str__(self) -> str:
        """The name in one word."""
        name = _NAMESPACE.join((*self.namespace, self.table))
        return name if self.branch is None else f"{name}{_BRANCH}{self.branch}"

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read a name in one word."""
        if not isinstance(text, str):
            raise TypeMismatchError(
                f"The name of a table or view is a text, and not {type(text).__name__}: {text!r}."
            )
        path, _, branch = text.partition(_BRANCH)
        *namespace, table = path.split(_NAMESPACE)
        return cls(table, tuple(namespace), branch or None)


def local_path(place: str | Path) -> Path | None:
    """The absolute path of a local folder, also of a `file:` URI; None for an object store's."""
    address = without_file_scheme(str(place))
    return None if "://" in address else Path(address).expanduser().absolute()


def resolve(place: str | Path) -> str:
    """A database's address, the same wherever the process works: an absolute path, or a URI."""
    if not str(place).strip():
        raise UserInputError("A database's address can't be empty.")
    folder = local_path(place)
    # LanceDB would take what is no URI for a path, and make that folder.
    if folder is None and not _URI.match(str(place)):
        raise UserInputError(
            f"{str(place)!r} is no URI of a database: give one such as s3://bucket/path, or a path."
        )
    return str(place) if folder is None else str(folder)


def table_uri(database: str, name: str) -> str:
    """Where a database keeps a table that is in no namespace, or a branch of it."""
    table, _, branch = name.partition(_BRANCH)
    return branch_uri(f"{database.rstrip('/')}/{table}.lance", branch or None)


def branch_uri(table: str, branch: str | None) -> str:
    """Where a branch of a table is: a dataset of its own, inside the table's folder."""
    return table if branch is None else f"{table}/tree/{branch}"


def without_file_scheme(uri: str) -> str:
    """An address as a path, where it is a quoted `file:///` or `file:/` URI."""
    scheme = _FILE.match(uri)
    if scheme is not None:
        return unquote(uri[scheme.end() :])
    if uri.lower().startswith("file:"):
        raise UserInputError(
            f"{uri!r} names no folder of this machine: give a path, or file:///an/absolute/path."
        )
    return uri


def relative_uri(database: str, uri: str) -> str:
    """The address of a table from its database on; unchanged where the table is in another one."""
    inside, place = (without_file_scheme(where.rstrip("/")) for where in (uri, database))
    if inside.startswith(f"{place}/"):
        return inside.removeprefix(f"{place}/")
    folder, table = local_path(place), local_path(inside)
    if folder is not None and table is not None:
        # Also where one of them is spelled through a link.
        folder, table = folder.resolve(), table.resolve()
        if table.is_relative_to(folder):
            return table.relative_to(folder).as_posix()
    return inside


def is_relative(address: str) -> bool:
    """Whether an address is one from a database on."""
    return "://" not in address and not Path(address).is_absolute()


def joined_uri(database: str, address: str) -> str:
    """The address of a table, from one that `relative_uri` gave."""
    return f"{database.rstrip('/')}/{address}" if is_relative(address) else address


def same_place(one: str, other: str) -> bool:
    """Whether two addresses are those of one database."""
    return one.rstrip("/") == other.rstrip("/")


def without_credentials(uri: str) -> str:
    """An address to show: without a user, password or key that a URI may hold."""
    if "://" not in uri:
        return uri
    try:
        parts = urlsplit(uri)
    except ValueError:  # brackets that hold no address: it is no URI, and can't be taken apart
        return f"{uri.partition('://')[0]}://..."
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"

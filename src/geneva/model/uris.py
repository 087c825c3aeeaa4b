"""Where databases and tables are: paths and URIs, resolved in one way. Pure, but for the home."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit


def local_path(place: str | Path) -> Path | None:
    """The absolute path of a local folder; None for the URI of an object store."""
    if "://" in str(place):
        return None
    return Path(place).expanduser().absolute()


def resolve(place: str | Path) -> str:
    """A database's address, the same wherever the process works: an absolute path, or a URI."""
    folder = local_path(place)
    return str(place) if folder is None else str(folder)


def table_uri(database: str, name: str) -> str:
    """Where a database keeps a table."""
    return f"{database.rstrip('/')}/{name}.lance"


def same_place(one: str, other: str) -> bool:
    """Whether two addresses are those of one database."""
    return one.rstrip("/") == other.rstrip("/")


def without_credentials(uri: str) -> str:
    """An address to show: without a user, password or key that a URI may hold."""
    if "://" not in uri:
        return uri
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"

"""What can be asked of the data source, as Spark hands it over: texts by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geneva.errors import UnknownOptionError, UserInputError
from geneva.model.tables import Secrets, TableRef
from geneva.model.uris import (
    TableName,
    branch_uri,
    local_path,
    without_credentials,
    without_file_scheme,
)
from geneva.render.text import did_you_mean, listed

BLOBS = ("descriptors", "bytes")
_READ = ("columns", "where", "version", "with_row_id", "with_row_address", "blobs")
_PLACE = ("path", "branch")
_WRITE = ("app_id", "batch_id", "max_rows_per_fragment", "overwrite_schema")
_SPARKS_OWN = ("checkpointlocation", "outputmode", "querytype")
"""What Spark adds for a stream."""
_OF_A_CATALOG = ("owner", "location")
"""What Spark adds for a table of its catalog; when that is read, it hands over no path."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read of a table."""

    columns: tuple[str, ...] | None = None
    """Column paths; None: all that people see."""
    where: str | None = None
    version: int | str | None = None
    """A number or a tag; None: the latest."""
    with_row_id: bool = False
    with_row_address: bool = False
    blobs: str = BLOBS[0]

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if self.blobs not in BLOBS:
            raise UserInputError(f"blobs must be one of {listed(BLOBS)}, not {self.blobs!r}.")
        if self.columns is not None and not self.columns and not self._with_meta():
            raise UserInputError("columns must name at least one column.")

    def _with_meta(self) -> bool:
        return self.with_row_id or self.with_row_address

    def as_texts(self) -> dict[str, str]:
        """The options as Spark takes them."""
        texts = {"blobs": self.blobs}
        if self.columns is not None:
            texts["columns"] = json.dumps(self.columns)
        if self.where is not None:
            texts["where"] = self.where
        if self.version is not None:
            texts["version"] = str(self.version)
        flags = {"with_row_id": self.with_row_id, "with_row_address": self.with_row_address}
        return texts | {name: "true" for name, asked in flags.items() if asked}


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write into a table."""

    app_id: str | None = None
    """Whose batches they are: with `batch_id`, a batch lands once however often it is written."""
    batch_id: int | None = None
    max_rows_per_fragment: int | None = None
    overwrite_schema: bool = False

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if self.batch_id is not None and self.app_id is None:
            raise UserInputError("batch_id needs an app_id: whose batches are they?")


def check_names(options: Mapping[str, str]) -> None:
    """Refuse options that are none: a misspelled one would be left out in silence."""
    known = (*_PLACE, *_READ, *_WRITE)
    for name in options:
        if name.lower() in _OF_A_CATALOG:
            raise UserInputError(
                "Spark's catalog can't hold such tables (CREATE TABLE, saveAsTable). In SQL: "
                "CREATE TEMPORARY VIEW name USING geneva OPTIONS (path 'DB/name.lance'), or "
                "db.register_views(spark)."
            )
        if name.lower() not in (*known, *_SPARKS_OWN):
            raise UnknownOptionError(
                f"There is no option {name!r}.{did_you_mean(name, known)} Options are "
                f"{listed(known)}. Keys of an object store are given once: geneva.register(spark, "
                "storage_options={...})."
            )


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of a reader."""
    _refuse(options, _WRITE, "write")
    columns = options.get("columns")
    return ReadOptions(
        columns=None if columns is None else _names(columns),
        where=options.get("where"),
        version=asked_version(options),
        with_row_id=_flag(options, "with_row_id"),
        with_row_address=_flag(options, "with_row_address"),
        blobs=options.get("blobs", BLOBS[0]).lower(),
    )


def asked_version(options: Mapping[str, str]) -> int | str | None:
    """The version to read: a number, a tag, or None for the latest."""
    text = options.get("version")
    return int(text) if text is not None and text.isdecimal() else text


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """The options of a writer."""
    if "version" in options:
        raise UserInputError(
            "One version of a table is read-only, and so are views in Spark, each of which is one. "
            'Write into the table itself: df.write.format("geneva").mode("append").save(uri).'
        )
    _refuse(options, _READ, "read")
    return WriteOptions(
        app_id=options.get("app_id"),
        batch_id=_count(options, "batch_id", 0),
        max_rows_per_fragment=_count(options, "max_rows_per_fragment", 1),
        overwrite_schema=_flag(options, "overwrite_schema"),
    )


def table_ref(options: Mapping[str, str], secrets: Secrets, folder: str) -> TableRef:
    """Where the table is. `folder` is what a relative path begins at."""
    given = options.get("path", "")
    path = given.rstrip("/")
    if not path:
        raise UserInputError("Which table? load(...) and save(...) take its URI: DB/name.lance.")
    if path.endswith(":") and "://" in given:
        raise UserInputError(
            f"{given!r} names no table: its URI is like s3://bucket/DB/name.lance."
        )
    user = path.partition("://")[2].partition("/")[0].rpartition("@")[0]
    if ":" in user:  # a container of Azure's stands there without one
        raise UserInputError(
            f"There are keys in the URI of {without_credentials(path)!r}, which Spark shows in its "
            "plans and pages. Give them once: geneva.register(spark, storage_options={...})."
        )
    uri = without_file_scheme(path)
    if local_path(uri) is not None:
        uri = str(Path(folder, Path(uri).expanduser()))
    root, tree, branch = uri.partition(".lance/tree/")
    table = f"{root}.lance" if tree else uri
    asked = options.get("branch") or branch or None
    name = TableName(table.rpartition("/")[2].removesuffix(".lance"), branch=asked)
    return TableRef(str(name), branch_uri(table, asked), secrets, asked)


def _names(text: str) -> tuple[str, ...]:
    """Names of columns: separated by commas, or a JSON list, in which they may be anything."""
    if not text.lstrip().startswith("["):
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        names = json.loads(text)
    except ValueError as error:
        raise UserInputError(f"columns is no JSON list: {error}.") from None
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UserInputError(f"columns must be a list of names, not {text!r}.")
    return tuple(names)


def _flag(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise UserInputError(f"{name} must be true or false, not {text!r}.")
    return text == "true"


def _count(options: Mapping[str, str], name: str, least: int) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UserInputError(f"{name} must be a whole number of at least {least}, not {text!r}.")
    return int(text)


def _refuse(options: Mapping[str, str], names: Sequence[str], use: str) -> None:
    given = [name for name in names if name in options]
    if given:
        raise UserInputError(f"{given[0]!r} says how to {use} a table, and has no use here.")

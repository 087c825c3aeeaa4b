"""What a materialized view is made of, as records: its query, column by column. No storage here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa

from geneva.errors import UserInputError
from geneva.model.partitions import Keyed
from geneva.model.uris import table_uri
from geneva.udf.declare import UDF

SOURCE_ROW_ID = "__source_row_id"
IS_SET = "__is_set"
SYSTEM_COLUMNS = (SOURCE_ROW_ID, IS_SET)
"""Of every view: which source row a row is made of, and whether it was computed (NULL: no)."""

CHUNKS = "__chunks"
"""The column of lists in the hidden view of a chunked one."""
HIDDEN_SUFFIX = " (chunks)"
"""What the hidden view is called, behind the name of the other."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What is computed, by the names that users know: neither hidden views nor their columns."""

    table: str
    name: str
    """The column's, or that of the function that makes the rows."""
    is_view: bool
    makes_rows: bool

    @classmethod
    def of(cls, table: str, column: str, function: str) -> Shown:
        """A column of a table, or of a hidden view, that a function fills."""
        makes_rows = column == CHUNKS
        return cls(
            table=table.removesuffix(HIDDEN_SUFFIX),
            name=function if makes_rows else column,
            is_view=table.endswith(HIDDEN_SUFFIX),
            makes_rows=makes_rows,
        )

    @property
    def place(self) -> str:
        """Where something happened, at the beginning of a sentence."""
        kind = "View" if self.is_view else "Table"
        what = "rows of" if self.makes_rows else "column"
        return f"{kind} {self.table!r}, {what} {self.name!r}"

    def __str__(self) -> str:
        """The same within a sentence."""
        kind = "view" if self.is_view else "table"
        what = "the rows of" if self.makes_rows else "column"
        return f"{what} {self.name!r} of {kind} {self.table!r}"


_FORMAT = 1


class ColumnKind(StrEnum):
    """Where a view's column comes from."""

    COLUMN = "column"
    SQL = "sql"
    UDF = "udf"
    CHUNKER = "chunker"
    UDTF = "udtf"


MAKES_ROWS = (ColumnKind.CHUNKER, ColumnKind.UDTF)
"""What stands for several columns, of rows of its own."""


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """One column of a view; a CHUNKER or UDTF stands for all columns that it yields."""

    name: str
    kind: ColumnKind
    expression: str
    """The source's column path, the SQL text, or "" for a UDF and a chunker; of a table function
    the columns that say the partition."""
    inputs: tuple[str, ...] = ()
    """The source's column paths that it depends on: exactly those that its plan reads. For a UDF
    in the order of its parameters."""
    udf_name: str = ""
    udf_version: str = ""
    udf_digest: str = ""
    """SHA-256 of the pickled function, which is in the view's `_udfs` folder."""
    output: str = ""
    """Which field of the function's record it is; empty: the function's value itself."""


@dataclass(frozen=True, slots=True)
class QueryColumn:
    """One column of a query, checked against the table; a chunker stands for all of its own."""

    name: str
    kind: ColumnKind
    expression: str
    inputs: tuple[str, ...]
    fields: tuple[pa.Field, ...]
    """What comes out: one field, or all that the chunker yields."""
    udf: UDF | None = None
    """The function, fed from `inputs`; of a chunker the one that returns lists."""
    output: str = ""
    """Which field of the function's record it is; empty: the function's value itself."""
    call: str = ""
    """Columns of the same call have the same; empty: it is the only one."""


@dataclass(frozen=True, slots=True)
class ViewQuery:
    """The query of a view: which rows of which table, in which order, with which columns.

    `shuffle` comes with a seed always: one is drawn when the view is made without. `limit` and
    `offset` count rows of the source, after the filter and the shuffle.
    """

    base_table: str
    base_db_uri: str
    where: str | None
    where_inputs: tuple[str, ...]
    columns: tuple[ViewColumn, ...]
    shuffle: bool = False
    shuffle_seed: int | None = None
    limit: int | None = None
    offset: int | None = None
    base_address: str = ""
    """Where the source is, from the view's database on, so that both can be moved together; a whole
    URI where it is in another database. Empty: made by a release that went by URI and name."""
    keys: int | None = None
    """Of a hidden view of keys and digests of rows: how many of its columns, the last ones, say the
    partition of a row. None: it is no such view."""
    partition_index: str | None = None
    """The column of the source whose IVF index says the partition of a row."""

    def __post_init__(self) -> None:
        """Refuse a shuffle whose order nobody could repeat."""
        if self.shuffle and self.shuffle_seed is None:
            raise ValueError("a shuffled view needs a seed")

    @property
    def seed(self) -> int | None:
        """The shuffle's seed; None when rows come in the source's order."""
        return self.shuffle_seed if self.shuffle else None

    @property
    def chunker(self) -> ViewColumn | None:
        """The chunker or table function that makes rows of its own, if there is one."""
        return next((c for c in self.columns if c.kind in MAKES_ROWS), None)

    @property
    def udtf(self) -> ViewColumn | None:
        """The table function that makes the rows, if there is one."""
        return next((c for c in self.columns if c.kind is ColumnKind.UDTF), None)

    @property
    def keyed(self) -> Keyed | None:
        """What keys and digests of rows are made of, in a hidden view of such."""
        if self.keys is None:
            return None
        names = tuple(column.name for column in self.columns)
        at = len(names) - self.keys
        return Keyed(keys=names[at:], values=names[:at])

    @property
    def source_address(self) -> str:
        """Where the source is: relative to the view's database, or a whole URI."""
        return self.base_address or table_uri(self.base_db_uri, self.base_table)

    def to_json(self) -> str:
        """The query as text, always the same for the same query."""
        stored = {
            "format": _FORMAT,
            "table": self.base_table,
            "db_uri": self.base_db_uri,
            "columns": [column.name for column in self.columns],
            "column_sources": [_source_record(c) for c in self.columns if not _has_udf(c)],
            "column_udfs": [_udf_record(c) for c in self.columns if _has_udf(c)],
            "where": self.where,
            "where_inputs": list(self.where_inputs),
            "shuffle": self.shuffle,
            "shuffle_seed": self.shuffle_seed,
            "limit": self.limit,
            "offset": self.offset,
            **({"address": self.base_address} if self.base_address else {}),
            **({"keys": self.keys} if self.keys is not None else {}),
            **({"partition_index": self.partition_index} if self.partition_index else {}),
        }
        return json.dumps(stored, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ViewQuery:
        """The query that `to_json` wrote."""
        try:
            stored = json.loads(text)
            written = stored["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserInputError(
                f"The view's stored query can't be read ({error}): create the view again."
            ) from error
        if written != _FORMAT:
            raise UserInputError(
                f"The view's query is stored in format {written}; this version of Geneva reads "
                f"format {_FORMAT}. Use the version that made the view, or create it again."
            )
        found = {
            column.name: column
            for column in map(_read_column, (*stored["column_sources"], *stored["column_udfs"]))
        }
        return cls(
            base_table=stored["table"],
            base_db_uri=stored["db_uri"],
            where=stored["where"],
            where_inputs=tuple(stored["where_inputs"]),
            columns=tuple(found[name] for name in stored["columns"]),
            shuffle=stored["shuffle"],
            shuffle_seed=stored["shuffle_seed"],
            limit=stored["limit"],
            offset=stored["offset"],
            base_address=stored.get("address", ""),
            keys=stored.get("keys"),
            partition_index=stored.get("partition_index"),
        )

    def digest(self) -> str:
        """SHA-256 of the query's text, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _has_udf(column: ViewColumn) -> bool:
    return column.kind in (ColumnKind.UDF, *MAKES_ROWS)


def _source_record(column: ViewColumn) -> dict[str, Any]:
    return {
        "name": column.name,
        "kind": column.kind.value,
        "expression": column.expression,
        "inputs": list(column.inputs),
    }


def _udf_record(column: ViewColumn) -> dict[str, Any]:
    return {
        "name": column.name,
        "kind": column.kind.value,
        "inputs": list(column.inputs),
        **({"expression": column.expression} if column.expression else {}),
        "udf": f"_udfs/{column.udf_digest}",
        "udf_name": column.udf_name,
        "udf_version": column.udf_version,
        **({"output": column.output} if column.output else {}),
    }


def _read_column(stored: Mapping[str, Any]) -> ViewColumn:
    return ViewColumn(
        name=stored["name"],
        kind=ColumnKind(stored["kind"]),
        expression=stored.get("expression", ""),
        inputs=tuple(stored["inputs"]),
        udf_name=stored.get("udf_name", ""),
        udf_version=stored.get("udf_version", ""),
        udf_digest=stored.get("udf", "").removeprefix("_udfs/"),
        output=stored.get("output", ""),
    )

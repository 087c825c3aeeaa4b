"""SQL expressions over a table: what they depend on, their values for given rows.

Two planners read them. Lance's own is tried first; what it doesn't know (CASE, intervals) goes to
DataFusion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.errors import ColumnNotFoundError, InvalidFilterError, UserInputError
from geneva.model.computation import RECEIPT_PREFIX
from geneva.model.view_query import SYSTEM_COLUMNS
from geneva.render.text import did_you_mean
from geneva.storage.lance.dataset import filter_message, has_path, quote_path
from geneva.storage.lance.dense_rows import DenseRows
from geneva.storage.lance.fragments import field_at, is_blob


@dataclass(frozen=True, slots=True)
class Expression:
    """An SQL expression that fits a table."""

    sql: str
    type: pa.DataType
    inputs: tuple[str, ...]
    """The column paths that its plan reads: exact, unless a name makes the plan hard to read."""
    by_lance: bool
    """Whether Lance's own planner takes it; it knows no CASE and no intervals, DataFusion does."""


def read_expression(dataset: lance.LanceDataset, sql: str) -> Expression:
    """Check an SQL expression against a table; say its type and which columns it depends on.

    The inputs are what the plan reads from the table, after constants are folded away. Where the
    plan can't be read, they are all columns whose name is in the text: too many at worst.
    """
    _check_brackets(sql)
    try:
        # In parentheses: Lance takes what it can parse and ignores the rest of the text.
        scanner = dataset.scanner(columns={"out": f"({sql}\n)", "row": "_rowid"})
        kind, plan = scanner.projected_schema.field("out").type, scanner.explain_plan(True)
        inputs = _inputs_in(plan, sql, dataset.schema)
        return Expression(sql, _storable(kind), inputs, by_lance=True)
    except (ValueError, OSError) as error:
        refusal = error
    try:
        explained = dataset.sql(f"EXPLAIN SELECT ({sql}\n) AS out FROM dataset").build()
        plan = "\n".join(p for b in explained.to_batch_records() for p in b["plan"].to_pylist())
        _check_row_by_row(plan)
        reader = dataset.sql(f"SELECT ({sql}\n) AS out FROM dataset").build().to_stream_reader()
        kind = reader.schema.field("out").type
        inputs = _inputs_in(plan, sql, dataset.schema)
        return Expression(sql, _storable(kind), inputs, by_lance=False)
    except (ValueError, OSError, pa.ArrowException) as error:
        lance_gave_up = "not supported SQL in lance" in str(refusal)
        raise _refusal(sql, error if lance_gave_up else refusal, dataset.schema) from error


def _storable(kind: pa.DataType) -> pa.DataType:
    """The type that a column can have: DataFusion computes some strings as views."""
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def read_condition(dataset: lance.LanceDataset, sql: str) -> Expression:
    """Check a where clause against a table; say which columns it depends on."""
    try:
        found = read_expression(dataset, sql)
    except ColumnNotFoundError:
        raise
    except UserInputError as error:
        raise InvalidFilterError(str(error)) from error
    if not pa.types.is_boolean(found.type):
        raise InvalidFilterError(
            filter_message(sql, ValueError(f"it is a {found.type} and no condition."))
        )
    return found


_UNREPEATABLE = re.compile(
    r"\b(?:(?:now|today|rand|random|uuid|version)\s*\(|current_(?:date|time|timestamp)\b"
    r"|_row(?:id|addr|offset)\b|_row_(?:last_updated|created)_at_version\b)",
    re.IGNORECASE,
)


def unrepeatable_part(sql: str) -> str | None:
    """What of an expression gives another value at another time or place; None for nothing."""
    found = _UNREPEATABLE.search(re.sub(r"'(?:[^']|'')*'", "''", sql))
    return found.group(0).rstrip("( ") if found else None


def _check_brackets(sql: str) -> None:
    """Refuse what would end our own parentheses and go on behind them."""
    depth = 0
    for bracket in re.findall(r"[()]", _without_literals(sql)):
        depth += 1 if bracket == "(" else -1
        if depth < 0:
            break
    if depth:
        raise UserInputError(f"The SQL expression {sql!r} has a parenthesis too many or too few.")


def _without_literals(sql: str) -> str:
    """The text with strings, quoted names and comments blanked out."""
    return re.sub(r"'(?:[^']|'')*'|`[^`]*`|\"[^\"]*\"|--[^\n]*|/\*.*?\*/", " ", sql, flags=re.S)


def _check_row_by_row(plan: str) -> None:
    found = re.search(r"^\s*(Aggregate|Window|Subquery|Unnest|\w*Join)\w*:", plan, re.MULTILINE)
    if found is not None:
        what = found.group(1).lower()
        raise ValueError(f"it needs more than its own row (its plan has a step of kind {what}).")


_PROJECTION = re.compile(r"LanceRead: .*?projection=\[(.*?)\], num_fragments=")


def _inputs_in(plan: str, sql: str, schema: pa.Schema) -> tuple[str, ...]:
    found = _PROJECTION.search(plan)
    if found is not None:
        paths = [path for path in found.group(1).split(", ") if path]
        if all(has_path(schema, path) for path in paths):
            return tuple(dict.fromkeys(paths))
    return tuple(name for name in schema.names if name.lower() in sql.lower())


def _refusal(sql: str, error: Exception, schema: pa.Schema) -> UserInputError:
    """The error that says what is wrong with an expression, without the Rust source position."""
    reason = re.split(r", /(?:home|root)/", str(error))[0].removeprefix("Invalid user input: ")
    unknown = re.search(r"No field named ([^.]*(?:\.[^. ]+)*)\. ", reason)
    if unknown is not None:
        return ColumnNotFoundError(missing_column(unknown.group(1).strip("\"`'"), schema, sql))
    return UserInputError(
        f"The SQL expression {sql!r} can't be used on this table: {reason} "
        "(It is DataFusion SQL: quote names with `backticks`, strings with 'single quotes'.)"
    )


def missing_column(name: str, schema: pa.Schema, sql: str | None = None) -> str:
    """What to say of a column that is not there."""
    hidden = (*SYSTEM_COLUMNS, RECEIPT_PREFIX)
    known = [n for n in schema.names if not n.startswith(hidden)]
    where = f", which {sql!r} names," if sql is not None and sql != name else ""
    return f"Column {name!r}{where} is not in the table." + (
        did_you_mean(name, known) or f" It has {known}."
    )


class _Sql(str):
    """An expression, and no path."""

    __slots__ = ()


def _quoted_path(sql: str, schema: pa.Schema) -> str | None:
    """The path that an expression is no more than, if it is one in backticks."""
    path = sql.replace("`", "")
    return path if has_path(schema, path) and sql == quote_path(path, schema) else None


def _read_type(arrow_field: pa.Field) -> pa.DataType:
    return pa.large_binary() if is_blob(arrow_field) else arrow_field.type


class RowReader:
    """Reads rows of a table by id: columns by path, then SQL expressions.

    An expression that is a path in backticks is that column.
    """

    def __init__(
        self, dataset: lance.LanceDataset, paths: Sequence[str], expressions: Sequence[str] = ()
    ) -> None:
        """Plan the reading; nothing is read yet."""
        self._dataset, schema = dataset, dataset.schema
        wanted = [*paths, *(_quoted_path(sql, schema) or _Sql(sql) for sql in expressions)]
        planned = {sql: read_expression(dataset, sql) for sql in wanted if isinstance(sql, _Sql)}
        by_query = [e for e in planned.values() if not e.by_lance]
        roots = {_root(path, schema) for e in by_query for path in e.inputs}
        plain = [path for path in wanted if not isinstance(path, _Sql)]
        self._paths = list(dict.fromkeys([*plain, *sorted(roots)]))
        self._projection = {f"c{i}": quote_path(p, schema) for i, p in enumerate(self._paths)}
        self._projection["row"] = "_rowid"  # Lance takes no rows of constants alone
        self._columns: list[tuple[str | Expression, pa.DataType]] = []
        for position, what in enumerate(wanted):
            if not isinstance(what, _Sql):
                kind = _read_type(field_at(schema, what))
                self._columns.append((f"c{self._paths.index(what)}", kind))
            elif planned[what].by_lance:
                self._projection[f"e{position}"] = f"({what}\n)"
                self._columns.append((f"e{position}", planned[what].type))
            else:
                self._columns.append((planned[what], planned[what].type))
        self._dense = DenseRows(dataset, self._projection)
        self._has_blobs = any(is_blob(field_at(schema, path)) for path in self._paths)

    def take(self, ids: npt.NDArray[np.uint64]) -> list[pa.Array]:
        """The values for the rows `ids`, in that order: first the paths', then the expressions'."""
        table = self._taken(ids).combine_chunks()
        if table.num_rows != len(ids):
            raise OSError(
                f"{self._dataset.uri} at version {self._dataset.version} gave {table.num_rows} of "
                f"{len(ids)} rows asked for by id"
            )
        return [
            _compact(
                self._queried(column, table)
                if isinstance(column, Expression)
                else _single(table.column(column)),
                kind,
            )
            for column, kind in self._columns
        ]

    def _taken(self, ids: npt.NDArray[np.uint64]) -> pa.Table:
        if not self._has_blobs or not len(ids):
            scanned = self._dense.read(ids)
            if scanned is not None:
                return scanned
            return self._dataset._take_rows(ids.tolist(), self._projection)
        # Taking rows knows no blob handling: it would give descriptors instead of bytes.
        table = self._dataset.scanner(
            columns=self._projection,
            filter=f"_rowid IN ({', '.join(map(str, ids.tolist()))})",
            blob_handling="all_binary",
        ).to_table()
        found = table.column("row").to_numpy()
        order = np.argsort(found)
        places = order[np.searchsorted(found, ids, sorter=order)] if len(found) else order
        return table.take(pa.array(places))

    def _queried(self, expression: Expression, table: pa.Table) -> pa.Array:
        """Let DataFusion compute what Lance's planner can't, over the rows in memory."""
        roots = {_root(path, self._dataset.schema) for path in expression.inputs}
        rows = pa.table(
            {
                **{root: table.column(f"c{self._paths.index(root)}") for root in roots},
                "__row": pa.array(np.arange(table.num_rows)),
            }
        )
        query = f"SELECT __row, ({expression.sql}\n) AS out FROM dataset"
        batches = lance.write_dataset(rows, "memory://").sql(query).build().to_batch_records()
        if not batches:
            return pa.array([], expression.type)
        computed = pa.Table.from_batches(batches).sort_by("__row")
        return _single(computed.column("out").combine_chunks())


def _root(path: str, schema: pa.Schema) -> str:
    return path if path in schema.names else path.split(".")[0]


def _compact(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The array in its type and in memory of its own, offsets counted from zero.

    Lance hands out parts of pages as they are: Arrow's own kernels make garbage of such strings.
    """
    if array.type != kind:
        array = array.cast(kind)
    return pa.concat_arrays([array, array[:0]]) if len(array) else array


def _single(column: Any) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

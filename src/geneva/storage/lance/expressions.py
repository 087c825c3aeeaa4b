"""SQL expressions over a table: what they depend on, their type, their values for given rows.

One engine computes them all, DataFusion, over rows in memory or over the table. It never sees a
name that a user gave: columns are `c0`, `c1` and so on in memory, and exact in a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from geneva.errors import (
    ColumnNotFoundError,
    InvalidFilterError,
    SQLExecutionError,
    UnknownFilterColumnError,
    UserInputError,
)
from geneva.model.sql import (
    ROW_META,
    Path,
    Resolved,
    parse_sql,
    quoted_name,
    quoted_path,
    refusal,
    resolve,
    shown,
    text_of,
    with_short_lists,
)
from geneva.render.text import shorten
from geneva.storage.lance.damage import is_panic
from geneva.storage.lance.dataset import has_path, quote_path
from geneva.storage.lance.dense_rows import DenseRows
from geneva.storage.lance.fragments import field_at, is_blob
from geneva.storage.lance.pieces import check_all_taken, noticing_full_dictionaries
from geneva.udf.picking import picked

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """An SQL expression that fits a table."""

    sql: str
    """As it was written."""
    exact: str
    """With every column under its exact name in backticks: it means the same on any day."""
    type: pa.DataType
    inputs: tuple[str, ...]
    """The column paths that its plan reads, after constants are folded away."""
    paths: tuple[Path, ...]
    """The columns that it names; also those that don't matter."""
    in_table: str
    """The text over the table."""
    in_memory: str
    """The text over rows in memory, whose column `ci` is the i-th path."""

    def evaluate(self, columns: Sequence[pa.Array], rows: int) -> pa.Array:
        """Its values for rows in memory, given the values of its paths."""
        query = f"SELECT {_ROW}, ({self.in_memory}\n) AS out FROM dataset"
        batches = _asked(query, columns, rows)
        if not batches:
            return pa.array([], self.type)
        computed = pa.Table.from_batches(batches)
        # In its own type first: Arrow's kernels know no string views.
        values = compact(single(computed.column("out")), self.type)
        return picked(values, pc.sort_indices(computed.column(_ROW)))


@dataclass(frozen=True, slots=True, eq=False)
class Condition(Expression):
    """An SQL condition. Its value for a row is whether a WHERE takes it: NULL is no.

    That is asked of a WHERE in memory, too, so that both say the same: behind it Lance compares
    -0.0 and 0.0 as equal, and in a projection DataFusion doesn't.
    """

    def evaluate(self, columns: Sequence[pa.Array], rows: int) -> pa.Array:
        """Whether rows in memory satisfy it, given the values of its paths."""
        query = f"SELECT {_ROW} FROM dataset WHERE ({self.in_memory}\n) IS TRUE"
        mask = np.zeros(rows, dtype=np.bool_)
        for batch in _asked(query, columns, rows):
            mask[batch.column(_ROW).to_numpy()] = True
        return pa.array(mask)


_ROW = "r"
"""The number of a row in memory; the other columns are `c0`, `c1` and so on."""


def _asked(query: str, columns: Sequence[pa.Array], rows: int) -> list[pa.RecordBatch]:
    """What DataFusion answers about rows in memory."""
    named = {f"c{i}": compact(values, values.type) for i, values in enumerate(columns)}
    table = pa.table({**named, _ROW: pa.array(np.arange(rows))})
    return _answered(lance.write_dataset(table, "memory://").sql(query))


def read_expression(dataset: lance.LanceDataset, sql: str) -> Expression:
    """Check an SQL expression against a table; say its type and which columns it depends on."""
    resolved = resolve(parse_sql(sql), dataset.schema)
    _check_intervals(dataset, resolved)
    paths = resolved.distinct_paths()
    in_memory = resolved.written(lambda path: f"c{paths.index(path)}", _as_duration)
    kinds = tuple(_path_type(dataset.schema, path) for path in paths)
    try:
        kind, used = _plan(with_short_lists(in_memory), kinds)
    except _PlanError as error:
        raise refusal(sql, _with_names(str(error), paths)) from None
    inputs = tuple(".".join(paths[i]) for i in used if paths[i][0] not in ROW_META)
    in_table = resolved.written(quoted_path, _as_duration)
    return Expression(sql, resolved.exact(), kind, inputs, paths, in_table, in_memory)


def read_condition(dataset: lance.LanceDataset, sql: str) -> Condition:
    """Check a where clause against a table; say which columns it depends on."""
    try:
        found = read_expression(dataset, sql)
        if not pa.types.is_boolean(found.type):
            raise refusal(sql, f"it is a {found.type} and no condition.")
    except ColumnNotFoundError as error:
        raise UnknownFilterColumnError(filter_message(sql, str(error))) from None
    except UserInputError as error:
        reason = str(error).partition(" can't be used: ")[2]
        if re.search(r"\bregexp_match\s*\(", sql, re.IGNORECASE):
            reason += " regexp_match gives what matched: regexp_like(...) says whether a text does."
        raise InvalidFilterError(filter_message(sql, reason)) from None
    return Condition(
        found.sql,
        found.exact,
        found.type,
        found.inputs,
        found.paths,
        found.in_table,
        found.in_memory,
    )


def filter_message(sql: str, reason: str) -> str:
    """What is wrong with a where clause."""
    return (
        f"The where clause {shown(sql)} can't be used on this table: {reason} "
        "(It is DataFusion SQL: quote names with `backticks`, strings with 'single quotes'.)"
    )


def unrepeatable_part(sql: str) -> str | None:
    """What of an expression gives another value at another time or place; None for nothing."""
    return parse_sql(sql).volatile_part()


# -- planning


class _PlanError(ValueError):
    """DataFusion doesn't take an expression, or can't compute it."""


def _plan(text: str, kinds: Sequence[pa.DataType]) -> tuple[pa.DataType, tuple[int, ...]]:
    """The type of an expression over columns `c0`, `c1`, ..., and which of them it reads."""
    fields = [pa.field(f"c{i}", kind) for i, kind in enumerate(kinds)]
    schema = pa.schema([*fields, pa.field(_ROW, pa.int64())])
    empty = lance.write_dataset(schema.empty_table(), "memory://")
    batches = _answered(empty.sql(f"EXPLAIN SELECT ({text}\n) AS out FROM dataset"))
    plan = "\n".join(step for batch in batches for step in batch["plan"].to_pylist())
    _check_row_by_row(plan)
    query = empty.sql(f"SELECT ({text}\n) AS out FROM dataset")
    kind = _guarded(lambda: query.build().to_stream_reader().schema.field("out").type)
    return _storable(kind), _columns_read(plan, text, len(kinds))


def _columns_read(plan: str, text: str, count: int) -> tuple[int, ...]:
    """The columns of `c0`, `c1`, ... that a plan reads; all, if a literal looks like a plan."""
    found = re.findall(r"^\s*TableScan: dataset projection=\[([^\]]*)\]", plan, re.MULTILINE)
    if len(found) != 1 or "TableScan" in text:
        return tuple(range(count))
    return tuple(sorted(int(n[1:]) for n in found[0].split(", ") if n and n != _ROW))


def _check_row_by_row(plan: str) -> None:
    found = re.search(r"^\s*(Aggregate|Window|Subquery|Unnest|\w*Join)\w*:", plan, re.MULTILINE)
    if found is not None:
        what = found.group(1).lower()
        raise _PlanError(f"it is made from more, or into more, than one row (by its {what}).")


def _answered(query: Any) -> list[pa.RecordBatch]:
    return _guarded(lambda: list(query.build().to_batch_records()))


def _guarded(ask: Callable[[], _T]) -> _T:
    """Ask DataFusion; whatever it objects to, or panics on, is an error without Rust in it."""
    try:
        return ask()
    except Exception as error:
        raise _PlanError(_reason(error)) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise _PlanError(_reason(error)) from None


def _reason(error: BaseException) -> str:
    """What an engine says, without Rust's source positions and its own words for itself."""
    reason = re.split(r", /[^ ]*\.rs:|, /(?:home|root|rustc)/|\s*Backtrace:", str(error))[0]
    words = r"^(?:Invalid user input: |LanceError\(\w+\): |Error during planning: |SQL error: )+"
    text = re.sub(words, "", reason).strip().rstrip(".").replace("\n", " ")
    return text if text.endswith("?") else f"{text}."


def _with_names(reason: str, paths: Sequence[Path]) -> str:
    """A message of DataFusion's with the user's names for columns."""
    named = [".".join(path) for path in paths]
    return re.sub(
        r"\b(?:dataset\.)?c(\d+)\b",
        lambda m: named[int(m[1])] if int(m[1]) < len(named) else m[0],
        reason,
    )


def _path_type(schema: pa.Schema, path: Path) -> pa.DataType:
    if path[0] in ROW_META and path[0] not in schema.names:
        return ROW_META[path[0]]
    top = schema.field(path[0])
    kind = _read_type(top)
    for name in path[1:]:
        kind = kind.field(kind.get_field_index(name)).type
    return kind


def _storable(kind: pa.DataType) -> pa.DataType:
    """The type that a column can have: DataFusion computes some strings as views."""
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_storable(f.type)) for f in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_item(kind), kind.list_size)
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(_item(kind))
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_item(kind))
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def _item(kind: Any) -> pa.Field:
    field: pa.Field = kind.value_field
    return field.with_type(_storable(field.type))


def check_stored_type(sql: str, kind: pa.DataType) -> None:
    """Refuse an expression whose values a table can't hold."""
    try:
        lance.write_dataset(pa.table({"out": pa.nulls(1, kind)}), "memory://")
    except (ValueError, OSError, pa.ArrowException):
        raise refusal(sql, f"it is a {kind}, which a table can't hold. Cast it.") from None


# -- intervals


def _check_intervals(dataset: lance.LanceDataset, resolved: Resolved) -> None:
    """Refuse comparisons of computed intervals: DataFusion compares months, days, then the rest.

    An interval that is written down is compared as a duration instead.
    """
    if not resolved.parsed.computed_intervals:
        return
    for part in parse_sql(resolved.exact()).computed_intervals:
        try:
            kind = _type_in(dataset, text_of(part))
        except _PlanError:
            continue  # What is wrong with it is said of the whole expression.
        if pa.types.is_interval(kind):
            raise refusal(
                resolved.parsed.text,
                f"{text_of(part)} is an interval, and such have no order: a month has 28 to 31 "
                "days. Compare a duration with an interval as it is: x > INTERVAL '3 days'.",
            )


def _type_in(dataset: lance.LanceDataset, sql: str) -> pa.DataType:
    query = dataset.sql(f"SELECT ({sql}\n) AS out FROM dataset")
    query = query.with_row_id(True).with_row_addr(True)
    return _guarded(lambda: query.build().to_stream_reader().schema.field("out").type)


@lru_cache(maxsize=64)
def _as_duration(interval: str) -> str:
    """An interval that something is compared with, as nanoseconds alone."""
    empty = lance.write_dataset(pa.table({_ROW: [0]}), "memory://")
    try:
        ((value,),) = (b["out"].to_pylist() for b in _answered(empty.sql(_OUT.format(interval))))
    except _PlanError as error:
        raise refusal(interval, str(error)) from None
    if value.months:
        raise refusal(interval, "a month has 28 to 31 days: compare with days or hours.")
    return f"INTERVAL '{value.days * 86_400_000_000_000 + value.nanoseconds} nanoseconds'"


_OUT = "SELECT ({}\n) AS out FROM dataset"


# -- reading


def _quoted_path(sql: str, schema: pa.Schema) -> str | None:
    """The path that an expression is no more than, if it is one in backticks."""
    path = sql.replace("`", "")
    return path if has_path(schema, path) and sql == quote_path(path, schema) else None


def _read_type(arrow_field: pa.Field) -> pa.DataType:
    return pa.large_binary() if is_blob(arrow_field) else arrow_field.type


def projected(path: Path) -> str:
    """A path as Lance's own planner reads it."""
    return ".".join(map(quoted_name, path))


class RowReader:
    """Reads rows of a table by id: columns by path, then SQL expressions.

    An expression that is a path in backticks is that column.
    """

    def __init__(
        self,
        dataset: lance.LanceDataset,
        paths: Sequence[str],
        expressions: Sequence[str | Condition] = (),
    ) -> None:
        """Plan the reading; nothing is read yet."""
        self._dataset, schema = dataset, dataset.schema
        self._projection = {"row": "_rowid"}  # Lance takes no rows of constants alone
        self._has_blobs = False
        self._columns: list[str | tuple[Expression, list[str]]] = []
        self._types: list[pa.DataType] = []
        for what in (*paths, *(_planned(dataset, each) for each in expressions)):
            if isinstance(what, Expression):
                self._columns.append((what, [self._column(p, projected(p)) for p in what.paths]))
                self._types.append(what.type)
            else:
                self._columns.append(self._column((what,), quote_path(what, schema)))
                self._types.append(_read_type(field_at(schema, what)))
        self._dense = DenseRows(dataset, self._projection)

    @property
    def types(self) -> Sequence[pa.DataType]:
        """The types of what is read, in order."""
        return self._types

    def _column(self, path: Path, text: str) -> str:
        """Read one more column of the table, or one that is read already."""
        for name, known in self._projection.items():
            if known == text and name != "row":
                return name
        schema = self._dataset.schema
        if path[0] in schema.names or path[0] not in ROW_META:
            root = schema.field(path[0]) if path[0] in schema.names else field_at(schema, path[0])
            self._has_blobs = self._has_blobs or is_blob(root)
        if path[0] in _OF_SCANS:
            raise UserInputError(f"{path[0]!r} is there for conditions only, not for columns.")
        name = f"c{len(self._projection)}"
        self._projection[name] = text if path[0] not in ROW_META else path[0]
        return name

    def take(self, ids: npt.NDArray[np.uint64]) -> list[pa.Array]:
        """The values for the rows `ids`, in that order: first the paths', then the expressions'.

        DictionaryFull: rows of several fragments, to be read `in_parts`.
        """
        with noticing_full_dictionaries(len(ids)):
            table = self._taken(ids).combine_chunks()
        check_all_taken(self._dataset, table, len(ids))
        return [
            compact(single(table.column(column)), kind)
            if isinstance(column, str)
            else computed(column[0], [single(table.column(c)) for c in column[1]], ids)
            for column, kind in zip(self._columns, self._types, strict=True)
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
        return picked(table, places)


_OF_SCANS = ("_row_created_at_version", "_row_last_updated_at_version")
"""What Lance doesn't give for rows that are taken by id."""


def _planned(dataset: lance.LanceDataset, given: str | Condition) -> str | Expression:
    """What is to be read for an expression: the column that it is no more than, or its inputs."""
    if isinstance(given, Condition):
        return given
    return _quoted_path(given, dataset.schema) or read_expression(dataset, given)


def computed(
    expression: Expression, columns: Sequence[pa.Array], ids: npt.NDArray[Any], what: str = "id"
) -> pa.Array:
    """The values of an expression for rows that were read; a row that has none is named."""
    try:
        return expression.evaluate(columns, len(ids))
    except _PlanError as error:
        row, reason = _first_failing(expression, columns, len(ids), str(error))
    inputs = {".".join(p): c[row] for p, c in zip(expression.paths, columns, strict=True)}
    values = ", ".join(f"{path} = {shorten(str(value), 80)}" for path, value in inputs.items())
    failed = SQLExecutionError(
        f"The SQL expression {shown(expression.sql)} can't be computed for the row of {what} "
        f"{int(ids[row])} ({values}): {_with_names(reason, expression.paths)}"
    )
    failed.sql, failed.row_id = expression.sql, int(ids[row])
    raise failed


def in_column(error: SQLExecutionError, column: str) -> SQLExecutionError:
    """The error, which names the column too."""
    named = SQLExecutionError(f"Column {column!r}: {error}")
    named.sql, named.row_id, named.column = error.sql, error.row_id, column
    return named


def _first_failing(
    expression: Expression, columns: Sequence[pa.Array], rows: int, reason: str
) -> tuple[int, str]:
    """The first row that an expression can't be computed for, by halving; and why."""
    first, last = 0, rows
    while last - first > 1:
        middle = (first + last) // 2
        try:
            expression.evaluate([c[first:middle] for c in columns], middle - first)
            first = middle
        except _PlanError as error:
            last, reason = middle, str(error)
    return first, reason


def compact(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The array in its type and in memory of its own, offsets counted from zero.

    Lance hands out parts of pages as they are: Arrow's own kernels make garbage of such strings.
    """
    if array.type != kind:
        array = array.cast(kind)
    return pa.concat_arrays([array, array[:0]]) if len(array) else array


def single(column: Any) -> pa.Array:
    """The one array of a column."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

"""Queries over a table: which rows, in which order, with which columns. The makings of a view.

A query can be evaluated here and now (`to_arrow` and its kin), or be the definition of a
materialized view. Every method returns a new query and checks its argument first.
"""

from __future__ import annotations

import secrets
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from geneva.errors import InvalidUDFError, UserInputError
from geneva.flags import check_flag
from geneva.model.partitions import KEY_PREFIX
from geneva.model.rows import RowIds
from geneva.model.sql import ROW_META, check_readable
from geneva.model.view_query import ColumnKind, QueryColumn, ViewColumn, ViewQuery
from geneva.planning.membership import choose_rows
from geneva.query_columns import (
    ColumnSource,
    SeveralColumns,
    check_output_name,
    chunker_of_query,
    distinct,
    every_column,
    function_columns,
    is_several,
    made_column,
    named_like_itself,
    plain_column,
    refuse_nested_blobs,
    row_fact,
    several_columns,
    sql_text,
)
from geneva.render.text import count
from geneva.storage.columns.definitions import FunctionSource
from geneva.storage.lance.dataset import (
    Dataset,
    noticing_deletion,
    open_dataset,
    refuse_names_of_lance,
)
from geneva.storage.lance.expressions import (
    check_stored_type,
    read_condition,
    unrepeatable_part,
)
from geneva.storage.lance.fragments import is_blob
from geneva.storage.lance.results import Results, Timeout, within
from geneva.storage.lance.row_ids import read_row_ids
from geneva.storage.views.definition import source_udf_fields
from geneva.udf.declare import UDF, serialize_udf, udf_digest
from geneva.udf.table_function import UDTF

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.model.tables import TableRef
    from geneva.table import Table
    from geneva.udf.chunker import Chunker

__all__ = ["GenevaQuery", "GenevaQueryBuilder", "Query"]

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class _State:
    where: tuple[str, ...] = ()
    selected: tuple[QueryColumn, ...] | None = None
    """None: all of the table's columns."""
    added: tuple[QueryColumn, ...] = ()
    seed: int | None = None
    limit: int | None = None
    offset: int | None = None
    fragments: frozenset[int] | None = None
    """Only the rows of these; None: of all."""


@dataclass(slots=True)
class _Source:
    """The table at the version that its handle reads; opened again only when that moves."""

    table: Table
    _opened: Dataset | None = field(default=None, repr=False)

    def dataset(self) -> Dataset:
        version = self.table.version
        if self._opened is None or self._opened.version != version:
            self._opened = open_dataset(self.table.ref, version)
        return self._opened


class Query(Results):
    """A query over a table, as of the version that the table's handle reads.

    Rows come in the order of their ids, which is that of insertion, or shuffled; the filter is
    applied first, then the shuffle, then `offset` and `limit`. With a chunker these count rows of
    the source, each of which gives any number of rows.
    """

    is_geneva_query: ClassVar = True

    def __init__(self, table: Table) -> None:
        """Ask for all rows and columns of a table."""
        self._source, self._state = _Source(table), _State()

    # -- building

    def where(self, condition: Any, prefilter: bool = True) -> Query:  # noqa: FBT001, FBT002
        """Only the rows that satisfy an SQL condition, and those of earlier calls.

        `prefilter` is LanceDB's word for vector searches. Here the filter always comes first.
        """
        condition = sql_text(condition)
        if not isinstance(condition, str) or not condition.strip():
            raise UserInputError(f"where must be an SQL condition, not {condition!r}.")
        found = read_condition(self._dataset(), condition)
        # Under exact names: a column that comes later can't change what it means.
        return self._with(where=(*self._state.where, found.exact))

    def select(self, columns: Any) -> Query:
        """Only these columns: a list of paths, or `{name: path | SQL | UDF | (udf, [inputs])}`.

        A list may hold UDFs that fill several columns, and `UnpackedUDF(udf, prefix=...)`.

        A string that is the path of a column is that column, any other is SQL. A path into a
        struct gives a column of its last name. Columns that were added before can be named too.
        """
        if isinstance(columns, str) or not isinstance(columns, Sequence | Mapping) or not columns:
            raise UserInputError(
                f"select takes a list of columns or a dict of name and source, not {columns!r}."
            )
        dataset = self._dataset()
        added = {column.name: column for column in self._state.added}
        if isinstance(columns, Mapping):
            chosen = [made_column(dataset, name, source) for name, source in columns.items()]
        else:
            chosen = []
            for c in columns:
                if is_several(c):
                    chosen += several_columns(dataset, c)
                else:
                    chosen.append(added.get(str(c)) or plain_column(dataset, c))
        chosen += [c for c in self._state.added if _outlasts_select(c) and c not in chosen]
        return self._with(selected=distinct(chosen), added=())

    def add_column(
        self,
        column: Mapping[str, ColumnSource] | ColumnSource | SeveralColumns,
        source: ColumnSource | None = None,
    ) -> Query:
        """Add columns: `{name: source}`, `name, source`, or a UDF, which is named like itself.

        One that fills several columns adds all of them; `UnpackedUDF(udf, prefix=...)` renames
        them.

        A source is a UDF, `(udf, [input columns])`, a path or SQL; or a chunker, which adds all
        the columns that it yields and repeats the others for each of its rows.
        """
        given: dict[str, Any] = {}
        several: list[QueryColumn] = []
        if isinstance(column, Mapping):
            given = dict(column)
        elif is_several(column):
            several = several_columns(self._dataset(), column)  # type: ignore[arg-type]
        elif isinstance(column, str):
            if source is None:
                raise UserInputError(f"add_column({column!r}) needs a UDF or SQL to compute it.")
            given = {column: source}
        else:
            given = {named_like_itself(column): column}
        dataset = self._dataset()
        of_query = {name: chunker_of_query(self._columns(), what) for name, what in given.items()}
        new = several + [made_column(dataset, name, what) for name, what in of_query.items()]
        distinct([*self._columns(), *new])
        return self._with(added=(*self._state.added, *new))

    def without(self, columns: str | Sequence[str]) -> Query:
        """All columns so far but these; those of other names stay."""
        names = _items("without", "names of columns", str, columns)
        left = tuple(c for c in self._columns() if c.name not in names)
        return self._with(selected=left, added=())

    def exploded(self, chunker: Chunker) -> Query:
        """This query with a chunker, and with those of its inputs that its view is to have."""
        own, inherit = self._columns(), chunker.inherit_input_columns
        bound = chunker_of_query(own, chunker)
        inputs = made_column(self._dataset(), chunker.name, bound).inputs
        query = self
        if inherit:
            there = {column.expression for column in own}
            more = [path for path in inputs if path not in there]
            query = self.add_column({path.rpartition(".")[2]: path for path in more})
        elif inherit is False or self._state.selected is None:
            left = (c for c in own if c.kind is not ColumnKind.COLUMN or c.expression not in inputs)
            query = self._with(selected=tuple(left), added=())
        # As a pair: its inputs are found, and are columns of the table.
        return query.add_column(bound if bound.input_columns is None else (bound, list(inputs)))

    def shuffle(self, seed: int | None = None) -> Query:
        """The rows in an order that `seed` decides; without one, it is drawn now and kept."""
        if seed is None:
            seed = secrets.randbits(_SEED_BITS)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UserInputError(f"The seed of a shuffle must be a whole number, not {seed!r}.")
        return self._with(seed=seed)

    def limit(self, rows: int | None) -> Query:
        """At most so many rows; None: all."""
        return self._with(limit=_checked_count("limit", rows))

    def offset(self, rows: int | None) -> Query:
        """Without the first so many rows."""
        return self._with(offset=_checked_count("offset", rows))

    def with_fragments(self, fragments: int | Sequence[int]) -> Query:
        """Only the rows of some fragments (`table.get_fragments()`), before `offset` and `limit`.

        Fragments come and go, so that such a query can't be a view.
        """
        wanted = frozenset(
            map(int, _items("with_fragments", "numbers of fragments", Integral, fragments))
        )
        there = {f.fragment_id for f in self._dataset().get_fragments()}
        if unknown := sorted(wanted - there):
            raise UserInputError(
                f"Table {self.source.name!r} has no fragments {unknown} at version "
                f"{self.source_version}; it has {sorted(there)}."
            )
        return self._with(fragments=wanted)

    def with_row_id(self, with_row_id: bool = True) -> Query:  # noqa: FBT001, FBT002
        """With the rows' ids, in a column `_rowid`."""
        return self._with_fact("_rowid", wanted=with_row_id)

    def with_row_address(self, with_row_address: bool = True) -> Query:  # noqa: FBT001, FBT002
        """With where the rows are (fragment << 32 | offset), in a column `_rowaddr`."""
        return self._with_fact("_rowaddr", wanted=with_row_address)

    def _with_fact(self, name: str, *, wanted: bool) -> Query:
        """With a column of what Lance knows of every row, or without it."""
        check_flag("with_row_id" if name == "_rowid" else "with_row_address", wanted)
        if wanted == (name in self.schema.names):
            return self
        if wanted:
            return self._with(added=(*self._state.added, row_fact(name)))
        return self.without([name])

    def enable_internal_api(self) -> Query:
        """The query itself: nothing of it is locked here. A word of Geneva on Ray."""
        return self

    # -- describing

    @property
    def schema(self) -> pa.Schema:
        """The schema of the result."""
        return pa.schema([f for column in self._columns() for f in column.fields])

    @property
    def columns(self) -> tuple[QueryColumn, ...]:
        """The columns, in order."""
        return self._columns()

    @property
    def chunker(self) -> QueryColumn | None:
        """The column that makes several rows of one, if there is one."""
        return next((c for c in self._columns() if c.kind is ColumnKind.CHUNKER), None)

    @property
    def source(self) -> TableRef:
        """Where the table is."""
        return self._source.table.ref

    @property
    def source_version(self) -> int:
        """The version that the query reads."""
        return int(self._dataset().version)

    def explain(self) -> str:
        """Describe what the query does, and which of the table's columns it reads. Runs nothing."""
        query, version = self.definition({}), self.source_version
        lines = [f"rows of {query.base_table!r} at version {version}"]
        if query.where is not None:
            lines.append(f"  where {query.where}  [reads {_listed(query.where_inputs)}]")
        lines.append(
            "  in the order of " + (f"shuffle {query.seed}" if query.shuffle else "row ids")
        )
        bounds = (("skipping", query.offset), ("at most", query.limit))
        lines += [f"  {word} {count(rows, 'row')}" for word, rows in bounds if rows is not None]
        lines += [
            f"  {c.name}: {c.kind} {c.expression or c.udf_name}  [reads {_listed(c.inputs)}]"
            for c in query.columns
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Show the table and the columns."""
        return f"Query({self.source.name!r}, columns={self.schema.names})"

    def __getattr__(self, name: str) -> Any:
        """Say where LanceDB's own query methods are."""
        if not name.startswith("_"):
            hint = f"LanceDB's own query builder may have it: table.search().{name}"
            raise AttributeError(f"A Geneva query has no {name!r}. {hint}", name=name, obj=self)
        raise AttributeError(name)

    # -- evaluating

    def to_batches(
        self, batch_size: int | None = None, timeout: Timeout = None
    ) -> pa.RecordBatchReader:
        """The result, batch by batch. UDFs run in this process."""
        if batch_size is not None and _checked_count("batch_size", batch_size) == 0:
            raise UserInputError("batch_size must be 1 or more.")
        refuse_nested_blobs(self._columns())
        from geneva.execution.evaluate import evaluate

        dataset, columns = self._dataset(), self._columns()
        names = dataset.schema.names
        check_readable((p for c in columns for p in c.inputs if p in names), dataset.schema)
        env = self._source.table._connection._variables

        def batches() -> Iterator[pa.RecordBatch]:
            with noticing_deletion(lambda: self.source):
                ids = self._row_ids(dataset)
                yield from evaluate(dataset, columns, ids, batch_size, self.source, env)

        return pa.RecordBatchReader.from_batches(self.schema, within(batches(), timeout))

    def count_rows(self) -> int:
        """How many rows the result has. With a chunker, this computes it."""
        if self.chunker is not None:
            return sum(batch.num_rows for batch in self.to_batches())
        return len(self._row_ids(self._dataset()))

    def _row_ids(self, dataset: Dataset) -> RowIds:
        state = self._state
        wanted = state.fragments
        with noticing_deletion(lambda: self.source):
            there = (f.fragment_id for f in dataset.get_fragments()) if wanted is not None else ()
            left_out = [fragment for fragment in there if fragment not in (wanted or ())]
            ids = read_row_ids(dataset, _all_of(state.where), without=left_out)
        return choose_rows(ids, shuffle_seed=state.seed, offset=state.offset, limit=state.limit)

    # -- becoming a view

    def create_materialized_view(
        self, view_name: Any, conn: Connection | str | None = None, **options: Any
    ) -> Any:
        """Make the query a view, in this table's database or another. Nothing is computed yet.

        Also `create_materialized_view(conn, view_name)`.
        """
        name, place = (conn, view_name) if isinstance(conn, str) else (view_name, conn)
        connection = self._source.table._connection if place is None else place
        if not isinstance(name, str) or not hasattr(connection, "create_materialized_view"):
            raise UserInputError(
                "create_materialized_view takes the view's name, and the connection of another "
                f"database if it is to be there, not {view_name!r} and {conn!r}."
            )
        return connection.create_materialized_view(name, self, **options)

    def udfs(self) -> dict[str, UDF]:
        """The functions by the column that they compute; of a chunker the one that gives lists."""
        return {c.name: c.udf for c in self._columns() if c.udf is not None}

    def definition(self, digests: Mapping[str, str] | None = None) -> ViewQuery:
        """The query as a record. `digests` says, by column, under which digest a UDF is stored."""
        if digests is None:
            digests = {name: udf_digest(serialize_udf(udf)) for name, udf in self.udfs().items()}
        state, dataset = self._state, self._dataset()
        where = _all_of(state.where)
        return ViewQuery(
            base_table=self.source.name,
            base_db_uri=self._source.table._connection.uri,
            where=where,
            where_inputs=read_condition(dataset, where).inputs if where is not None else (),
            columns=tuple(_view_column(c, digests.get(c.name, "")) for c in self._columns()),
            shuffle=state.seed is not None,
            shuffle_seed=state.seed,
            limit=state.limit,
            offset=state.offset,
        )

    def view_schema(self, digests: Mapping[str, str]) -> pa.Schema:
        """The user's columns of a view of this query, with the UDFs' definitions on them."""
        dataset = self._dataset()
        made: dict[str, pa.Field] = {}
        for c in self._columns():
            if c.kind is ColumnKind.UDF and c.udf is not None:
                if c.name not in made:
                    names = {o.name: o.output for o in self._columns() if _same_call(o, c)}
                    source = FunctionSource(c.inputs, digests[c.name])
                    made |= source_udf_fields(dataset, names, c.udf, source)
            else:
                made |= {field.name: field for field in c.fields}
        return pa.schema([made[name] for name in self.schema.names])

    def table_function(self, udtf: UDTF) -> tuple[ViewQuery, ViewQuery]:
        """The query of a view of a table function over these rows, and that of its rows.

        The second has the columns that the function sees, then those that say the partition.
        """
        own = self._columns()
        for column in (c for c in own if c.udf is not None):
            raise InvalidUDFError(
                f"Column {column.name!r} of the query is computed by a function, and a table "
                "function reads columns and SQL. Make a view of the query, and the table "
                "function's view of that one."
            )
        udtf.check_bound()
        for made in udtf.output_schema:
            check_output_name(made.name)
        refuse_names_of_lance(udtf.output_schema.names)
        dataset, what = self._dataset(), f"UDTF '{udtf.name}'"
        if udtf.input_columns is None:
            plain = (c for c in own if self._state.selected is not None or not _is_blob_column(c))
            names = [column.name for column in plain]
        else:
            names = udtf.input_columns
        values = function_columns(dataset, own, names, what)
        if udtf.partition_by_indexed_column is not None:
            function_columns(dataset, (), [udtf.partition_by_indexed_column], what)
        keys = function_columns(dataset, own, udtf.partition_by, what)
        keys = tuple(replace(key, name=f"{KEY_PREFIX}{key.name}") for key in keys)
        columns = (*distinct(values), *distinct(keys))
        paths = tuple(dict.fromkeys(path for column in columns for path in column.inputs))
        indexed = udtf.partition_by_indexed_column
        query = replace(self.definition({}), partition_index=indexed)
        function = ViewColumn(
            name=udtf.name,
            kind=ColumnKind.UDTF,
            expression=", ".join(udtf.partition_by) or indexed or "",
            inputs=paths,
            udf_name=udtf.name,
            udf_version=udtf.version,
            udf_digest=udf_digest(serialize_udf(udtf.udf)),
        )
        rows = tuple(_view_column(column, "") for column in columns)
        return replace(query, columns=(function,)), replace(query, columns=rows, keys=len(keys))

    def check_viewable(self) -> None:
        """Refuse what can't be a view: reserved names, SQL that has another value tomorrow."""
        refuse_names_of_lance(self.schema.names)
        if self._state.fragments is not None:
            raise UserInputError(
                "A query of some fragments can't be a view: fragments come and go when a table is "
                "written to. Say which rows with where(...)."
            )
        for name in self.schema.names:
            check_output_name(name)
        refuse_nested_blobs(self._columns())
        sql = [c for c in self._columns() if c.kind is ColumnKind.SQL]
        for column in sql:
            check_stored_type(column.expression, column.fields[0].type)
        for text in (*self._state.where, *(column.expression for column in sql)):
            part = unrepeatable_part(text)
            if part is not None:
                raise UserInputError(
                    f"{text!r} can't be part of a view: {part!r} has another value each time, so "
                    "that a view of it could never be brought up to date. Put the value itself."
                )

    # -- resolving

    def _dataset(self) -> Dataset:
        return self._source.dataset()

    def _with(self, **changes: Any) -> Query:
        query = Query.__new__(Query)
        query._source, query._state = self._source, replace(self._state, **changes)
        return query

    def _columns(self) -> tuple[QueryColumn, ...]:
        selected = self._state.selected
        if selected is None:
            selected = every_column(self._dataset().schema)
        return (*selected, *self._state.added)


if TYPE_CHECKING:
    GenevaQueryBuilder = Query
else:

    class GenevaQueryBuilder(ABC):  # noqa: B024  (nothing is made of it)
        """The name that programs for Geneva on Ray know queries by, for annotations and isinstance.

        `table.search(None)` and `table.search()` give one, and table functions are called with one.
        """

        @classmethod
        def __subclasshook__(cls, kind: type[Any]) -> bool:
            return bool(getattr(kind, "is_geneva_query", False))


GenevaQuery = ViewQuery
"""The same, of the record that a view keeps."""


def _checked_count(name: str, rows: Any) -> int | None:
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 0):
        raise UserInputError(f"{name} must be a number of rows, 0 or more, not {rows!r}.")
    return rows


def _items(method: str, what: str, kind: type[Any], given: Any) -> list[Any]:
    """One item, or several, as a list."""
    items = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if any(isinstance(item, bool) or not isinstance(item, kind) for item in items):
        raise UserInputError(f"{method} takes a list of {what}, not {given!r}.")
    return items


def _all_of(conditions: Sequence[str]) -> str | None:
    if len(conditions) < 2:
        return conditions[0] if conditions else None
    return " AND ".join(f"({condition}\n)" for condition in conditions)


def _outlasts_select(column: QueryColumn) -> bool:
    """Whether a column that was added before a `select` is there after it without being named."""
    return column.kind is ColumnKind.CHUNKER or column.name in ROW_META


def _same_call(one: QueryColumn, other: QueryColumn) -> bool:
    """Whether one call of a function gives both columns."""
    return one is other or (bool(one.call) and one.call == other.call)


def _view_column(column: QueryColumn, digest: str) -> ViewColumn:
    udf = column.udf
    return ViewColumn(
        name=column.name,
        kind=column.kind,
        expression=column.expression,
        inputs=column.inputs,
        udf_name=udf.name if udf is not None else "",
        udf_version=udf.version if udf is not None else "",
        udf_digest=digest if udf is not None else "",
        output=column.output,
    )


def _is_blob_column(column: QueryColumn) -> bool:
    return any(is_blob(made) for made in column.fields)


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths) or "nothing"

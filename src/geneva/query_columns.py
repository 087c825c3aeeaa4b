"""The columns of a query: what a name and a source mean on a table, and what is refused."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import pyarrow as pa

from geneva.errors import ColumnExistsError, ColumnNotFoundError, InvalidUDFError, UserInputError
from geneva.execution.declarations import refuse_blob_inside
from geneva.model.sql import check_readable, missing_column
from geneva.model.view_query import ColumnKind, QueryColumn
from geneva.storage.lance.dataset import Dataset, check_column_name, has_path
from geneva.storage.lance.expressions import read_expression
from geneva.storage.lance.fragments import holds_blob, is_blob
from geneva.storage.views.definition import copied_field, visible_schema
from geneva.udf.chunker import Chunker
from geneva.udf.declare import UDF, resolve_inputs
from geneva.udf.records import UnpackedUDF
from geneva.udf.table_function import UDTF
from geneva.udf.transforms import refuse_several

ColumnSource: TypeAlias = str | UDF | Chunker | tuple[UDF | Chunker, Sequence[str]]
SeveralColumns: TypeAlias = UDF | UnpackedUDF | tuple[UDF | UnpackedUDF, Sequence[str]]


def every_column(schema: pa.Schema) -> tuple[QueryColumn, ...]:
    """All columns of a table; of a view without its system columns."""
    return tuple(_copied(schema, name, name) for name in visible_schema(schema).names)


def plain_column(dataset: Dataset, path: Any) -> QueryColumn:
    """The column at a path, under its last name."""
    schema = dataset.schema
    if not isinstance(path, str):
        raise UserInputError(f"select takes names of columns, not {path!r}.")
    if not has_path(schema, path):
        raise ColumnNotFoundError(
            missing_column(path, schema)
            + " An SQL expression needs a name: select({name: expression})."
        )
    name = path if path in schema.names else path.rpartition(".")[2]
    check_output_name(name)
    return _copied(schema, path, name)


def sql_text(given: Any) -> Any:
    """An expression of LanceDB's (`lancedb.expr.col("a") > 1`) as SQL; anything else as it is."""
    expressions = sys.modules.get("lancedb.expr")  # where it was imported, if there is any
    is_one = expressions is not None and isinstance(given, expressions.Expr)
    return given.to_sql() if is_one else given


def made_column(dataset: Dataset, name: Any, source: Any) -> QueryColumn:
    """A column under a name: a path's, or computed by SQL, a UDF or a chunker."""
    source = sql_text(source)
    if not isinstance(name, str):
        raise UserInputError(f"A column's name must be a string, not {name!r}.")
    check_output_name(name)
    if isinstance(source, str):
        if has_path(dataset.schema, source):
            return _copied(dataset.schema, source, name)
        return _computed_by_sql(dataset, name, source)
    function, inputs = source if _is_pair(source) else (source, None)
    if isinstance(function, Chunker):
        return _chunked(dataset, name, function, inputs)
    if isinstance(function, UDF):
        return _computed_by_udf(dataset, name, function, inputs)
    return _refuse(name, source)


def _copied(schema: pa.Schema, path: str, name: str) -> QueryColumn:
    made = copied_field(schema, path, name)
    return QueryColumn(name, ColumnKind.COLUMN, path, (path,), (made,))


def row_fact(name: str) -> QueryColumn:
    """A column of what Lance knows of every row: `_rowid`, `_rowaddr`."""
    return QueryColumn(name, ColumnKind.SQL, name, (), (pa.field(name, pa.uint64()),))


def refuse_nested_blobs(columns: Sequence[QueryColumn]) -> None:
    """Refuse structs that hold blobs: Lance gives them as descriptors, and not as bytes."""
    for column in columns:
        for made in column.fields if column.kind is ColumnKind.COLUMN else ():
            if holds_blob(made) and not is_blob(made):
                raise UserInputError(
                    f"Column {column.name!r} can't be part of a query: there are blobs inside of "
                    f"it ({made.type}). Select what is inside by its path: "
                    f'select({{"name": "{column.expression}.field", ...}}).'
                )


def _computed_by_sql(dataset: Dataset, name: str, sql: str) -> QueryColumn:
    if not sql.strip():
        raise UserInputError(f"Column {name!r} is given an empty expression.")
    try:
        found = read_expression(dataset, sql)
    except UserInputError as error:
        raise type(error)(f"Column {name!r}: {error}") from None
    if pa.types.is_null(found.type):
        raise UserInputError(
            f"Column {name!r}: {sql!r} has no type; write, for example, CAST(NULL AS STRING)."
        )
    made = pa.field(name, found.type)
    return QueryColumn(name, ColumnKind.SQL, found.exact, found.inputs, (made,))


def _computed_by_udf(dataset: Dataset, name: str, udf: UDF, inputs: Any) -> QueryColumn:
    bound, paths = _bound(dataset, udf, inputs)
    refuse_several(udf, name)
    (field,) = udf.outputs
    made = field.with_name(name)
    refuse_blob_inside(name, made)
    return QueryColumn(name, ColumnKind.UDF, "", paths, (made,), bound)


def is_several(source: Any) -> bool:
    """Whether a source is a function that fills several columns, which have names of their own."""
    function = source[0] if _is_pair(source) else source
    return isinstance(function, UnpackedUDF) or (isinstance(function, UDF) and function.unpacks)


def several_columns(dataset: Dataset, source: SeveralColumns) -> list[QueryColumn]:
    """The columns of a function that fills several by one call."""
    given, inputs = source if isinstance(source, tuple) else (source, None)
    unpacked = given if isinstance(given, UnpackedUDF) else UnpackedUDF(given)
    bound, paths = _bound(dataset, unpacked.udf, inputs)
    call = uuid.uuid4().hex
    made = []
    for name, field in unpacked.columns.items():
        check_output_name(name)
        column = field.with_name(name).with_nullable(True)
        refuse_blob_inside(name, column)
        made.append(
            QueryColumn(
                name, ColumnKind.UDF, "", paths, (column,), bound, output=field.name, call=call
            )
        )
    return made


def chunker_of_query(columns: Sequence[QueryColumn], source: Any) -> Any:
    """A chunker that reads columns of a query by the names that they have there.

    What the query has none of is the table's. Sources of other kinds are returned as they are, and
    so is `(chunker, [columns])`, which names columns of the table.
    """
    if not isinstance(source, Chunker):
        return source
    chunker = source
    renamed = {c.name: c for c in columns if c.expression != c.name}
    asked = chunker.input_columns or []
    for column in (renamed[name] for name in asked if name in renamed):
        if column.kind is not ColumnKind.COLUMN or chunker.batch:
            by = column.expression or f"UDF '{column.udf.name if column.udf else ''}'"
            raise InvalidUDFError(
                f"Chunker '{chunker.name}' reads column {column.name!r}, which the query makes "
                f"({by}), and a chunker reads columns of the table. Make a view of the query, and "
                "the chunker's view of that one."
            )
    paths = [renamed[name].expression if name in renamed else name for name in asked]
    return chunker.with_inputs(paths) if paths != asked else chunker


def _chunked(dataset: Dataset, name: str, chunker: Chunker, inputs: Any) -> QueryColumn:
    chunker.check_bound()
    if holds_blob(pa.field(name, chunker.udf.data_type)):
        raise InvalidUDFError(
            f"Column {name!r}: a chunker can't yield blobs (lance-encoding:blob). Let it yield "
            "large_binary values: these are stored well without."
        )
    bound, paths = _bound(dataset, chunker.udf, inputs)
    fields = tuple(f.with_nullable(True) for f in chunker.output_schema)
    for made in fields:
        check_output_name(made.name)
    return QueryColumn(name, ColumnKind.CHUNKER, "", paths, fields, bound)


def function_columns(
    dataset: Dataset, selected: Sequence[QueryColumn], names: Sequence[str], what: str
) -> tuple[QueryColumn, ...]:
    """Columns that a table function asks for by name: of the query, or else of its table."""
    known = {column.name: column for column in selected}
    found = []
    for name in names:
        column = known.get(name)
        if column is None:
            if not has_path(dataset.schema, name):
                raise ColumnNotFoundError(f"{what}: {missing_column(name, dataset.schema)}")
            column = _copied(dataset.schema, name, name)
        found.append(column)
    refuse_nested_blobs(found)
    return tuple(found)


def _bound(dataset: Dataset, udf: UDF, inputs: Any) -> tuple[UDF, tuple[str, ...]]:
    if inputs is not None:
        udf = udf.with_inputs([inputs] if isinstance(inputs, str) else inputs)
    schema = visible_schema(dataset.schema)
    if udf.input_columns is None:
        schema = pa.schema([field for field in schema if not holds_blob(field)])
    found = resolve_inputs(udf, schema)
    check_readable([each.root for each in found], schema)
    return udf, tuple(resolved.path for resolved in found)


def _is_pair(source: Any) -> bool:
    return isinstance(source, tuple | list) and len(source) == 2


def named_like_itself(source: Any) -> str:
    """The name of a column that is given by its function alone."""
    function = source[0] if _is_pair(source) else source
    return function.name if isinstance(function, UDF | Chunker) else _refuse(repr(source), source)


def _refuse(name: str, source: Any) -> NoReturn:
    hint = " Decorate it with @udf." if callable(source) else ""
    if isinstance(source, UDTF):
        hint = " It makes a view of its own: db.create_udtf_view(name, source=query, udtf=...)."
    raise InvalidUDFError(
        f"Column {name!r} must be given a column, SQL, a UDF or (udf, [input columns]), not "
        f"{type(source).__name__}.{hint}"
    )


def check_output_name(name: str) -> None:
    """Refuse a name that a view can't have."""
    check_column_name(name)
    if name.startswith("__"):
        raise UserInputError(
            f"Column name {name!r} can't start with '__': such names are Geneva's own. Select it "
            f"under another one: select({{{name.strip('_')!r}: ...}})."
        )


def distinct(columns: Sequence[QueryColumn]) -> tuple[QueryColumn, ...]:
    """The columns, if no two have one name and at most one is a chunker."""
    seen: dict[str, str] = {}
    for made, name in ((c, field.name) for c in columns for field in c.fields):
        if name.lower() in seen:
            if made.kind is ColumnKind.CHUNKER:
                raise ColumnExistsError(
                    f"Chunker {made.name!r} yields a column {name!r}, and the query has "
                    f"{seen[name.lower()]!r} already. Select the columns to keep: "
                    "source=table.query().select([...]), or call the chunker's differently."
                )
            raise ColumnExistsError(
                f"The query has a column {seen[name.lower()]!r} already, so that there can't be "
                f"another {name!r}. Give it another name: select({{name: source}}), or "
                "add_column({name: source})."
            )
        seen[name.lower()] = name
    chunkers = [column for column in columns if column.kind is ColumnKind.CHUNKER]
    if len(chunkers) > 1:
        raise InvalidUDFError("A query can have one chunker. Make a view, and query that.")
    for chunker in chunkers:
        if any(chunker.name == column.name for column in columns if column is not chunker):
            raise ColumnExistsError(
                f"The query has a column {chunker.name!r} already, and the chunker goes by that "
                "name. Give it another one: add_column({name: chunker}), or @chunker(name=...)."
            )
    return tuple(columns)

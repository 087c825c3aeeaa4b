"""Writing data frames into tables: tasks stage fragments, one commit publishes them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from geneva.errors import (
    ColumnNotFoundError,
    TableNotFoundError,
    TypeMismatchError,
    UserInputError,
)
from geneva.execution.runner import freeze_heap_once
from geneva.model.sql import is_readable_name, missing_column
from geneva.model.tables import TableRef
from geneva.spark.source.options import WriteOptions
from geneva.spark.source.types import arrow_schema, plain_type, spark_schema
from geneva.storage.columns.row_commits import (
    Batch,
    Change,
    RowsToCommit,
    appended,
    commit_rows,
    create_table,
)
from geneva.storage.columns.row_files import (
    discard_rows,
    given_schema,
    remove_if_empty,
    stage_rows,
    stored_batch,
)
from geneva.storage.lance.casts import Unfit, cast_batch, check_castable
from geneva.storage.lance.dataset import (
    Dataset,
    check_column_name,
    field_ids_of,
    first_file,
    open_dataset,
    open_pinned,
    refuse_names_of_lance,
    refuse_two_of_a_name,
)
from geneva.storage.views.definition import is_view, visible_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FRAGMENT_ROWS = 1 << 20


# ------------------------------------------------------------------------------------ planning


def plan_write(
    ref: TableRef, schema: StructType, options: WriteOptions, *, overwrite: bool
) -> RowsToCommit:
    """What a write will do, and which columns its rows have. What can't be written is refused."""
    given = _arrow(schema)
    try:
        table = open_dataset(ref)
    except TableNotFoundError:
        table = None
    if table is not None and is_view(table.schema):
        raise UserInputError(
            f"{ref.name!r} is a materialized view: its rows come from its query. Write into the "
            "table that it is of, then refresh it."
        )
    if options.overwrite_schema and not overwrite:
        raise UserInputError('overwrite_schema is for mode("overwrite").')
    if table is None and ref.branch is not None:
        raise TableNotFoundError(
            f"There is no branch {ref.name!r}, and a write makes none: create it first "
            "(table.branches.create)."
        )
    if table is None or options.overwrite_schema:
        refuse_names_of_lance(given.names)
        for i, name in enumerate(given.names):
            check_column_name(name)
            refuse_two_of_a_name(given.names[:i], name)
        return _to_commit(Change.REPLACE_TABLE, _new_schema(given), table, {})
    written = _written_schema(ref, table, given)
    change = Change.REPLACE_ROWS if overwrite else Change.APPEND
    ids = field_ids_of(table)
    planned = {name: ids[name] for name in written.names}
    return _to_commit(change, written, table, planned)


def _to_commit(
    change: Change, schema: pa.Schema, table: Dataset | None, ids: dict[str, tuple[int, ...]]
) -> RowsToCommit:
    version = 0 if table is None else int(table.version)
    first = None if table is None else first_file(table)
    return RowsToCommit(change, schema, uuid.uuid4().hex, version, ids, first)


def _arrow(schema: StructType) -> pa.Schema:
    """The types that Spark hands batches over in; refuse those that no table holds."""
    if not schema.names:
        raise UserInputError("The data frame has no columns, and a table's rows have some.")
    twins = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twins:
        raise UserInputError(f"The data frame has two columns {twins[0]!r}: drop or rename one.")
    try:
        found = arrow_schema(schema)
        same = spark_schema(found)
    except (PySparkException, TypeMismatchError) as error:
        raise TypeMismatchError(f"The data frame can't be written: {error}") from None
    for mine, theirs in zip(same, schema, strict=True):
        if mine.dataType != plain_type(theirs.dataType):
            raise TypeMismatchError(
                f"Column {theirs.name!r} is {theirs.dataType.simpleString()}, which no table "
                "holds. Cast it to another type."
            )
    return found


def _new_schema(given: pa.Schema) -> pa.Schema:
    """The columns of a new table: all may be NULL, so that a later write can leave some out."""
    return pa.schema([pa.field(f.name, _named_item(f.type)) for f in given])


def _named_item(kind: pa.DataType) -> pa.DataType:
    """A type with lists as Arrow itself names their items; Spark says `element`."""
    if pa.types.is_list(kind):
        return pa.list_(_named_item(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_named_item(kind.key_type), _named_item(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _named_item(f.type)) for f in kind])
    return kind


def _written_schema(ref: TableRef, table: Dataset, given: pa.Schema) -> pa.Schema:
    """The columns of the table that the data frame has, in the table's types."""
    visible = visible_schema(table.schema)
    for name in given.names:
        if name not in visible.names or not is_readable_name(name):
            raise ColumnNotFoundError(missing_column(name, visible))
    missing = [f.name for f in visible if not f.nullable and f.name not in given.names]
    if missing:
        raise UserInputError(
            f"Column {missing[0]!r} of table {ref.name!r} can't be NULL, and the data frame has "
            "no such column."
        )
    fields = [field for field in table.schema if field.name in given.names]
    for field in given_schema(pa.schema(fields)):
        try:
            check_castable(given.field(field.name).type, field.type)
        except (Unfit, pa.ArrowException) as error:
            raise TypeMismatchError(
                f"Column {field.name!r} can't be written into table {ref.name!r}: {error}."
            ) from None
    return pa.schema(fields)


# ------------------------------------------------------------------------------------ writing


@dataclass(frozen=True)
class StagedRows(WriterCommitMessage):
    """What one task has staged."""

    fragments: str
    query_id: str | None = None
    """The streaming query that it was for."""


@dataclass(frozen=True, slots=True)
class RowWriter:
    """Stages the rows of tasks, and commits them all."""

    ref: TableRef
    rows: RowsToCommit
    options: WriteOptions

    def stage(self, batches: Iterator[pa.RecordBatch]) -> str:
        """Write the rows of one task as fragments that nobody sees yet."""
        rows = self.rows
        creates = rows.change is Change.REPLACE_TABLE
        table = None if creates else open_pinned(self.ref, rows.planned_version, rows.write_id)
        schema = given_schema(rows.schema)
        what = f"the data frame, for table {self.ref.name!r}"
        made = (
            stored_batch(cast_batch(batch, schema, what), rows.schema, table)
            for batch in batches
            if batch.num_rows
        )
        size = self.options.max_rows_per_fragment or FRAGMENT_ROWS
        text = stage_rows(self.ref, rows.schema, made, size, create=creates)
        freeze_heap_once()
        return text

    def commit(self, staged: Sequence[str], batch: Batch | None) -> None:
        """Publish what the tasks have staged; throw it away where the batch has landed before."""
        rows = self.rows
        if batch is not None:
            # A stream has one writer for many batches, each of which is a commit of its own.
            rows = replace(rows, write_id=f"{rows.write_id}-{batch.number}")
            if not rows.planned_version:
                # A batch is noted in its table, before it lands in it.
                rows = appended(self.ref, rows, create_table(self.ref, rows.schema), staged)
        if not commit_rows(self.ref, rows, staged, batch):
            self.discard(staged)

    def discard(self, staged: Sequence[str]) -> None:
        """Delete what nobody will commit."""
        discard_rows(self.ref, staged)
        if not self.rows.planned_version:
            remove_if_empty(self.ref)


class TableWriter(DataSourceArrowWriter):
    """Writes a data frame into a table."""

    def __init__(self, writer: RowWriter) -> None:
        """Keep what tasks and the commit need: Spark pickles it to both."""
        self._writer = writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of one task."""
        return StagedRows(self._writer.stage(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish what all tasks have staged, in one commit."""
        options = self._writer.options
        batch = None
        if options.app_id is not None and options.batch_id is not None:
            batch = Batch(options.app_id, options.batch_id)
        self._writer.commit(_staged(messages), batch)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete what tasks have staged. Those that failed left nothing to be known of."""
        self._writer.discard(_staged(messages))


class TableStreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream into a table: each batch once, however often Spark replays it."""

    def __init__(self, writer: RowWriter) -> None:
        """Keep what tasks and the commit need: Spark pickles it to both."""
        self._writer = writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of one task."""
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        return StagedRows(self._writer.stage(iterator), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Publish a batch in one commit."""
        staged = _staged(messages)
        if all(text == "[]" for text in staged):
            return
        queries = {m.query_id for m in messages if isinstance(m, StagedRows) and m.query_id}
        app_id = self._writer.options.app_id or next(iter(queries), None)
        if app_id is None:
            raise UserInputError("Spark doesn't say which query this is: give it an app_id.")
        self._writer.commit(staged, Batch(app_id, batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Delete what tasks have staged."""
        self._writer.discard(_staged(messages))


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[str]:
    return [message.fragments for message in messages if isinstance(message, StagedRows)]

"""A query evaluated here and now: rows read by id, functions called in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.compute as pc

from geneva.errors import SQLExecutionError
from geneva.execution.apply.batch import Applier
from geneva.execution.worker.surroundings import enter_function, trying_functions
from geneva.model.rows import RowIds
from geneva.model.tables import TableRef
from geneva.model.view_query import SOURCE_ROW_ID, ColumnKind, QueryColumn
from geneva.storage.lance.dataset import Dataset, read_snapshot
from geneva.storage.lance.expressions import RowReader, in_column
from geneva.storage.lance.fragments import window_rows
from geneva.storage.lance.lists import list_columns, runs_by_bytes
from geneva.storage.lance.pieces import in_parts
from geneva.udf.picking import picked


def evaluate(
    dataset: Dataset,
    columns: Sequence[QueryColumn],
    ids: RowIds,
    batch_size: int | None,
    ref: TableRef,
    env: Mapping[str, str],
) -> Iterator[pa.RecordBatch]:
    """The rows of a query: read by id, computed column by column, chunks laid out.

    Functions find the variables of `env`, and their own; whoever asks for the rows does not.
    """
    reads = (p for c in columns if c.kind is not ColumnKind.SQL for p in c.inputs)
    paths = list(dict.fromkeys(reads))
    reader = RowReader(dataset, paths, [c.expression for c in columns if c.kind is ColumnKind.SQL])
    size = batch_size or _window(dataset, [p for c in columns for p in c.inputs], ref)

    def take(rows: RowIds) -> list[pa.Array]:
        try:
            return reader.take(rows)
        except SQLExecutionError as error:
            column = next(c.name for c in columns if c.expression == error.sql)
            raise in_column(error, column) from None

    with ExitStack() as open_functions:
        appliers = {
            key: open_functions.enter_context(_applier([c for c in columns if _call(c) == key]))
            for key in dict.fromkeys(_call(c) for c in columns if c.udf is not None)
        }
        for start in range(0, len(ids), size):
            for _, taken in in_parts(take, ids[start : start + size]):
                yield from _laid_out(columns, _computed(columns, paths, taken, appliers, env))


def _computed(
    columns: Sequence[QueryColumn],
    paths: Sequence[str],
    taken: Sequence[pa.Array],
    appliers: Mapping[str, Applier],
    env: Mapping[str, str],
) -> dict[str, pa.Array]:
    """The columns of rows that were read: `taken` is what `paths` read, and then what SQL gave."""
    plain, of_sql = dict(zip(paths, taken, strict=False)), iter(taken[len(paths) :])
    given: dict[str, Iterator[pa.Array]] = {}
    arrays: dict[str, pa.Array] = {}
    for c in columns:
        if c.kind is ColumnKind.SQL:
            arrays[c.name] = next(of_sql)
            continue
        if c.udf is None:
            arrays[c.name] = plain[c.inputs[0]]
            continue
        call = _call(c)
        if call not in given:
            inputs = [plain[path] for path in c.inputs]
            with trying_functions(env):
                enter_function(c.udf)
                given[call] = iter(_applied(appliers[call], inputs, c.inputs))
        arrays[c.name] = next(given[call])
    return arrays


def _call(column: QueryColumn) -> str:
    """What columns of the same call have in common."""
    return column.call or column.name


def _applier(columns: Sequence[QueryColumn]) -> Applier:
    """The function of some columns, which are all of one call."""
    udf = columns[0].udf
    assert udf is not None
    fields = tuple(column.output for column in columns) if udf.unpacks else None
    return Applier(udf, pa.field(columns[0].name, udf.data_type), fields=fields)


def _window(dataset: Dataset, paths: Sequence[str], ref: TableRef) -> int:
    """Rows to read at once, so that they stay small in memory."""
    snapshot = read_snapshot(dataset, ref)
    fields = {i for path in paths for i in snapshot.field_ids[path]}
    sizes = [file.size_bytes for f in snapshot.fragments for file in f.files_of(fields)]
    rows = sum(f.physical_rows for f in snapshot.fragments)
    return window_rows(snapshot.schema, paths, sizes, rows)


def _applied(
    applier: Applier, inputs: Sequence[pa.Array], paths: Sequence[str]
) -> Sequence[pa.Array]:
    """What a function gives for some rows, column by column."""
    batch = pa.RecordBatch.from_arrays(inputs, names=list(paths))
    size = applier.udf.batch_size or batch.num_rows or 1
    starts = range(0, max(batch.num_rows, 1), size)
    parts = [applier.run(batch.slice(start, size)).arrays for start in starts]
    return [pa.concat_arrays(arrays) for arrays in zip(*parts, strict=True)]


def _laid_out(
    columns: Sequence[QueryColumn], arrays: Mapping[str, pa.Array]
) -> Iterator[pa.RecordBatch]:
    """The columns as a batch; where a chunker gave lists, a row for each of their items."""
    chunked = next((c for c in columns if c.kind is ColumnKind.CHUNKER), None)
    schema = pa.schema([f for c in columns for f in c.fields])
    if chunked is None:
        values = [arrays[c.name] for c in columns]
        if len(values[0]):
            yield pa.record_batch(values, schema=schema)
        return
    lists = arrays[chunked.name]
    parents = pc.list_parent_indices(lists).to_numpy()
    items = list_columns(lists)
    own = [c for c in columns if c is not chunked]
    repeated = {c.name: arrays[c.name] for c in own}
    # With a column of its own: a batch without any has no rows.
    batch = pa.record_batch({**repeated, SOURCE_ROW_ID: pa.array(range(len(lists)))})
    for some in runs_by_bytes(batch, parents):
        made = {name: picked(values, parents[some]) for name, values in repeated.items()}
        made |= {name: values[some] for name, values in items.items()}
        yield pa.record_batch([made[field.name] for field in schema], schema=schema)

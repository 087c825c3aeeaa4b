"""Views of several rows for one: a hidden view of one list per row, laid out as rows.

The chunker is a UDF of the hidden view, so that checkpoints, staleness and jobs are those of any
view. Laying its lists out runs no user code, and is done again for just the rows that changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geneva.errors import JobCancelledError, TableChangedError
from geneva.execution.backfill.driver import JobControl
from geneva.execution.jobs.progress import JobProgress
from geneva.execution.refresh.prepare import PreparedRefresh, RefreshRequest, prepare_refresh
from geneva.execution.refresh.run import run_refresh
from geneva.execution.runner import Runner
from geneva.model.rows import RowIds
from geneva.model.tables import TableRef
from geneva.model.view_query import IS_SET, SOURCE_ROW_ID
from geneva.planning.refresh import RefreshPlan
from geneva.storage.lance.dataset import open_dataset
from geneva.storage.lance.row_ids import read_row_ids
from geneva.storage.lance.source_rows import SourceRows
from geneva.storage.views.definition import is_hidden, read_view
from geneva.storage.views.explode import CHUNKS, commit_chunks, inner_ref, write_chunk_rows
from geneva.storage.views.source_changes import read_changes
from geneva.storage.views.state import commit_refreshed, commit_refreshing, read_view_state

_ROWS_PER_ITEM = 20_000
_TAKEN_AT_ONCE = 1_024


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Rows of the hidden view to lay out, for one task."""

    outer: TableRef
    rows: SourceRows
    ids: RowIds
    columns: tuple[str, ...]
    """Columns that are carried along."""
    made: tuple[str, ...]
    """All columns of the rows."""


def lay_out(item: Layout) -> str:
    """Write the rows of an item's lists as fragments that nobody sees yet; return what they are."""
    view = open_dataset(item.outer).schema
    # Not the columns that were added to the view: they are to be computed.
    schema = pa.schema([view.field(name) for name in item.made])
    return write_chunk_rows(item.outer, schema, _laid_out(item, schema))


def _laid_out(item: Layout, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(item.ids), _TAKEN_AT_ONCE):
        batch = item.rows.take(item.ids[at : at + _TAKEN_AT_ONCE])
        lists = batch.column(CHUNKS)
        parents = pc.list_parent_indices(lists)
        chunks = pc.list_flatten(lists)
        made = {
            SOURCE_ROW_ID: batch.column(SOURCE_ROW_ID).take(parents),
            IS_SET: pa.repeat(pa.scalar(True), len(chunks)),
            **{name: batch.column(name).take(parents) for name in item.columns},
        }
        kind = chunks.type
        names = [kind.field(i).name for i in range(kind.num_fields)]
        values = dict(zip(names, chunks.flatten(), strict=True))
        made.update(values)
        yield pa.record_batch([made[field.name] for field in schema], schema=schema)


@dataclass(frozen=True, slots=True)
class PreparedChunkRefresh:
    """A refresh of the hidden view, and of the rows laid out from it."""

    ref: TableRef
    inner: PreparedRefresh
    plan: RefreshPlan


def prepare_chunk_refresh(
    ref: TableRef, source: TableRef, request: RefreshRequest
) -> PreparedChunkRefresh:
    """Plan the refresh of a chunked view: that of its hidden view, which the rows follow."""
    inner = prepare_refresh(inner_ref(ref), source, request)
    schema = open_dataset(ref).schema
    info, state = read_view(schema), read_view_state(schema)
    current = (
        inner.plan.is_empty
        and state.refreshed
        and state.computed_at == (inner.view_version,)
        and info is not None
        and info.base_version == inner.target.version
    )
    plan = replace(inner.plan, view=ref.name, up_to_date=current)
    return PreparedChunkRefresh(ref, inner, plan)


def run_chunk_refresh(prepared: PreparedChunkRefresh, control: JobControl) -> JobProgress:
    """Refresh the hidden view, then lay out what changed in it."""
    progress, version = JobProgress(total=0), prepared.inner.view_version
    if not prepared.inner.plan.is_empty:
        progress, version = run_refresh(prepared.inner, control)
    _lay_out_changes(prepared, version, control)
    return progress


def _lay_out_changes(prepared: PreparedChunkRefresh, version: int, control: JobControl) -> None:
    """Replace the rows of every source row whose list or carried values changed."""
    outer, inner = prepared.ref, prepared.inner.ref
    before = read_view_state(open_dataset(outer).schema).computed_at
    commit_refreshing(outer, version, control.job_id, control.is_running)
    lists = open_dataset(inner, version)
    columns = tuple(n for n in lists.schema.names if n != CHUNKS and not is_hidden(n))
    rows = SourceRows(
        inner,
        version,
        tuple((name, f"`{name}`") for name in (SOURCE_ROW_ID, CHUNKS, *columns)),
    )
    gone, fresh = _changed_rows(inner, before, rows, [CHUNKS, *columns])
    fragments: list[str] = []
    if len(fresh):
        chunk = lists.schema.field(CHUNKS).type.value_type
        made = (SOURCE_ROW_ID, IS_SET, *columns, *(field.name for field in chunk))
        items = [
            Layout(
                outer=outer,
                rows=rows,
                ids=fresh[at : at + _ROWS_PER_ITEM],
                columns=columns,
                made=made,
            )
            for at in range(0, len(fresh), _ROWS_PER_ITEM)
        ]
        fragments = _run_items(items, control)
    commit_chunks(outer, gone, fragments)
    commit_refreshed(outer, prepared.inner.target.version, control.job_id, {}, computed_at=version)


def _changed_rows(
    inner: TableRef, before: Sequence[int], now: SourceRows, watched: list[str]
) -> tuple[RowIds | None, RowIds]:
    """Source rows whose rows have to go (None: all), and rows of the hidden view to lay out.

    What is there may be of several versions, when a run was cut off: then what differs from any.
    """
    gone, fresh = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    for version in before:
        try:
            changes = read_changes(inner, version, now.version, watched)
        except TableChangedError:
            before = ()
            break
        touched = np.unique(np.concatenate([*changes.changed.values(), np.zeros(0, np.uint64)]))
        then = SourceRows(inner, version, ((SOURCE_ROW_ID, SOURCE_ROW_ID),))
        gone.append(_source_ids(then, np.union1d(changes.deleted, touched)))
        fresh.append(np.union1d(changes.inserted, touched))
    if not before:
        return None, read_row_ids(open_dataset(inner, now.version), None)
    ids = np.unique(np.concatenate(fresh))
    # Also what a run that was cut off may have laid out of them already.
    return np.unique(np.concatenate([*gone, _source_ids(now, ids)])), ids


def _source_ids(rows: SourceRows, ids: RowIds) -> RowIds:
    parts = [
        rows.take(ids[at : at + 100_000]).column(SOURCE_ROW_ID).to_numpy()
        for at in range(0, len(ids), 100_000)
    ]
    return np.unique(np.concatenate([*parts, np.zeros(0, np.int64)])).astype(np.uint64)


def _run_items(items: list[Layout], control: JobControl) -> list[str]:
    if len(items) == 1:
        # Less than a task is worth: laying out runs no user code, so that it may run here.
        return [lay_out(items[0])]
    runner: Runner = control.make_runner()
    waiting: dict[Future[list[str]], int] = {
        runner.submit(lay_out, [item]): i for i, item in enumerate(items)
    }
    written: dict[int, str] = {}
    while waiting:
        done, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
        for future in done:
            written[waiting.pop(future)] = future.result()[0]
        if control.cancelled.is_set():
            runner.cancel()
            raise JobCancelledError(f"Job {control.job_id} was cancelled.")
    return [written[i] for i in range(len(items))]

"""Laying lists out as the rows of a chunked view: tasks that write what nobody sees yet.

They run no user code. Carried values stand once in a list's row and many times in what is laid out:
so all that is read and written is measured in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from geneva.execution.worker.layout import Layout as DenseLayout
from geneva.model.rows import Mask, Offsets, RowIds, RowRange
from geneva.model.tables import TableRef
from geneva.model.view_query import IS_SET, SOURCE_ROW_ID
from geneva.storage.lance.dataset import (
    field_ids_of,
    fragment_facts,
    open_dataset,
    quote_path,
)
from geneva.storage.lance.fragments import (
    fitting_window,
    read_windows,
    rows_for,
    size_of_inputs,
    window_rows,
)
from geneva.storage.lance.lists import list_columns, places_in_lists, runs_by_bytes
from geneva.storage.lance.pieces import Piece, in_parts
from geneva.storage.lance.source_rows import SourceRows, next_window
from geneva.storage.views.definition import is_hidden
from geneva.storage.views.explode import CHUNKS, stage_rewritten, write_chunk_rows
from geneva.udf.picking import picked


@dataclass(frozen=True, slots=True)
class Lists:
    """One version of the hidden view: what the rows of a chunked view are laid out from."""

    ref: TableRef
    version: int
    carried: tuple[str, ...]
    """Columns that every row of a list gets the same value of."""
    content: tuple[str, ...]
    """Columns that the chunker yields."""

    @classmethod
    def read(cls, ref: TableRef, version: int) -> Lists:
        """The hidden view at one version."""
        schema = open_dataset(ref, version).schema
        return cls(
            ref=ref,
            version=version,
            carried=tuple(n for n in schema.names if n != CHUNKS and not is_hidden(n)),
            content=tuple(field.name for field in schema.field(CHUNKS).type.value_type),
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that come of the lists, the system's aside."""
        return (*self.carried, *self.content)

    def windows(self, ids: RowIds) -> Iterator[pa.RecordBatch]:
        """Lists and what is carried with them: one at first, for it may be all rows of a table."""
        return self.rows(self.columns).windows(ids, first_rows=1)

    def rows(self, columns: Sequence[str]) -> SourceRows:
        """Reads what some columns are made from."""
        wanted = [SOURCE_ROW_ID, *(name for name in columns if name in self.carried)]
        if set(columns).intersection(self.content):
            wanted.append(CHUNKS)
        schema = open_dataset(self.ref, self.version).schema
        return SourceRows(
            self.ref, self.version, tuple((name, quote_path(name, schema)) for name in wanted)
        )


def read_source_ids_of(ref: TableRef, version: int, ids: RowIds) -> RowIds:
    """The source rows that rows of the hidden view are of, in their order."""
    rows = SourceRows(ref, version, ((SOURCE_ROW_ID, SOURCE_ROW_ID),))
    parts = [
        rows.take(ids[at : at + 100_000]).column(SOURCE_ROW_ID).to_numpy()
        for at in range(0, len(ids), 100_000)
    ]
    return np.concatenate([*parts, np.zeros(0, np.int64)]).astype(np.uint64)


# ---------------------------------------------------------------------------------- new rows


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Lists to lay out as new rows, for one task."""

    outer: TableRef
    lists: Lists
    ids: RowIds
    kept: tuple[RowIds, Offsets]
    """Rows that are in the view already, as (row of the hidden view, place in its list)."""
    max_rows_per_fragment: int | None = None


def lay_out(item: Layout) -> str:
    """Write the rows of an item's lists as fragments that nobody sees yet; return what they are."""
    view = open_dataset(item.outer).schema
    # Not the columns that were added to the view: they are to be computed.
    names = (SOURCE_ROW_ID, IS_SET, *item.lists.columns)
    schema = pa.schema([view.field(name) for name in names])
    return write_chunk_rows(item.outer, schema, _new_rows(item, schema), item.max_rows_per_fragment)


def _new_rows(item: Layout, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    at = 0
    for batch in item.lists.windows(item.ids):
        ids = item.ids[at : at + batch.num_rows]
        at += batch.num_rows
        lists = batch.column(CHUNKS)
        parents = pc.list_parent_indices(lists).to_numpy()
        fresh = np.flatnonzero(~_is_kept(ids[parents], places_in_lists(parents), item.kept))
        own = batch.drop_columns([CHUNKS])
        chunks = list_columns(lists)
        for some in runs_by_bytes(own, parents[fresh]):
            chosen = pa.array(fresh[some])
            made = {
                IS_SET: pa.repeat(pa.scalar(True), len(chosen)),
                **_taken(own, pa.array(parents[fresh[some]])),
                **{name: picked(values, chosen) for name, values in chunks.items()},
            }
            yield pa.record_batch([made[field.name] for field in schema], schema=schema)


def _taken(batch: pa.RecordBatch, places: pa.Array) -> dict[str, pa.Array]:
    return {name: picked(batch.column(name), places) for name in batch.schema.names}


def _is_kept(ids: RowIds, places: Offsets, kept: tuple[RowIds, Offsets]) -> Mask:
    if not len(kept[0]):
        return np.zeros(len(ids), dtype=np.bool_)
    pair = np.dtype([("id", np.uint64), ("place", np.int64)])
    wanted, known = np.empty(len(ids), pair), np.empty(len(kept[0]), pair)
    wanted["id"], wanted["place"] = ids, places
    known["id"], known["place"] = kept
    return np.isin(wanted, known)


# ------------------------------------------------------------------------- rows that stay


@dataclass(frozen=True, slots=True, eq=False)
class Rewrite:
    """Columns of some rows of a fragment that get other values in place, for one task."""

    outer: TableRef
    version: int
    fragment_id: int
    physical_rows: int
    columns: tuple[str, ...]
    lists: Lists
    rows: Offsets
    ids: RowIds
    """Per row, the row of the hidden view that it is of."""
    places: Offsets
    """Per row, its place in the list."""


def rewrite(item: Rewrite) -> str:
    """Write the columns of all rows of the fragment as a file nobody sees yet; return its name."""
    view = open_dataset(item.outer, item.version)
    fragment = fragment_facts(view.get_fragment(item.fragment_id).metadata)
    every = RowRange(0, item.physical_rows)
    field_ids = field_ids_of(view)
    sizes = size_of_inputs(fragment, [i for name in item.columns for i in field_ids[name]])
    window = fitting_window(
        view,
        item.fragment_id,
        item.columns,
        every,
        window_rows(view.schema, item.columns, sizes, len(every)),
    )
    old = (b for _, b in read_windows(view, item.fragment_id, item.columns, every, window))
    schema = pa.schema([view.schema.field(name) for name in item.columns])
    dense = DenseLayout(schema, every, window, old)

    def batches() -> Iterator[pa.RecordBatch]:
        for piece in _new_values(item, window):
            yield from dense.add(piece)
        yield from dense.finish()

    return stage_rewritten(item.outer, view, item.columns, batches())


def _new_values(item: Rewrite, window: int) -> Iterator[Piece]:
    """The new values, in the order of the fragment's rows, few bytes at a time."""
    source, at, step = item.lists.rows(item.columns), 0, next_window(0, 0)
    while at < len(item.rows):
        # A piece is laid out over all rows that it spans.
        end = int(np.searchsorted(item.rows, item.rows[at] + window))
        places = np.arange(at, min(at + step, end))
        for some, values in in_parts(partial(_values_of, item, source), places):
            yield Piece(item.rows[some], values)
            step = max(1, rows_for(values.nbytes, values.num_rows, 4 * step))
        at += len(places)


def _values_of(item: Rewrite, source: SourceRows, some: npt.NDArray[np.int64]) -> pa.RecordBatch:
    ids, owners = np.unique(item.ids[some], return_inverse=True)
    batch = source.take(ids)
    parents = pa.array(owners)
    made = {n: picked(batch.column(n), parents) for n in item.columns if n in item.lists.carried}
    if CHUNKS in batch.schema.names:
        lists = batch.column(CHUNKS)
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
        starts = np.cumsum(lengths) - lengths
        places = pa.array(starts[owners] + item.places[some])
        made.update({n: picked(values, places) for n, values in list_columns(lists).items()})
    return pa.RecordBatch.from_arrays([made[n] for n in item.columns], names=list(item.columns))

"""The rows of a chunked view: written as fragments, put in place of older ones by one commit."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from lance import LanceOperation, Transaction
from lance.file import LanceFileWriter

from geneva.model.addresses import Addresses, split_by_fragment
from geneva.model.partitions import DIGEST, KEY
from geneva.model.rows import Offsets, RowIds
from geneva.model.tables import TableRef
from geneva.model.uris import branch_uri
from geneva.model.view_query import CHUNKS as CHUNKS
from geneva.model.view_query import HIDDEN_SUFFIX, IS_SET, MAKES_ROWS, SOURCE_ROW_ID, ViewQuery
from geneva.storage.columns.row_files import fragments_of, stage_rows
from geneva.storage.columns.staged_files import data_file, storable, written_schema
from geneva.storage.lance.dataset import Dataset, field_ids_of, nodes_of, open_dataset
from geneva.storage.lance.transactions import JOB_PROPERTY
from geneva.storage.views.definition import DEFAULT_FRAGMENT_ROWS
from geneva.storage.views.state import read_view_state

_NO_SOURCE = -1
"""As a source row: that of rows that somebody wrote by hand, which stand for none."""
_TOMBSTONE = -2
"""What stands in a data file's list of fields for one that another file has by now."""


def inner_ref(outer: TableRef) -> TableRef:
    """The hidden view of a chunked one. It is inside the other's folder, and goes with it."""
    hidden = TableRef(
        f"{outer.name}{HIDDEN_SUFFIX}", f"{outer.root}/_chunks", outer.storage_options
    )
    if outer.branch is None:
        return hidden
    branch = _hidden_branch(outer, hidden)
    return replace(hidden, uri=branch_uri(hidden.root, branch), branch=branch)


def chunk_schema(outer: TableRef) -> pa.Schema:
    """The columns of a chunked view that its function yields."""
    lists = open_dataset(inner_ref(outer)).schema.field(CHUNKS).type
    return pa.schema(list(lists.value_type))


def query_columns(outer: TableRef, query: ViewQuery) -> set[str]:
    """The columns of a view that its query fills: a chunker fills those that it yields.

    Its own name is no column's: one that is added to the view may have it.
    """
    if query.keyed is not None:
        return {KEY, DIGEST}
    named = {column.name for column in query.columns if column.kind not in MAKES_ROWS}
    return named if query.chunker is None else named.union(chunk_schema(outer).names)


def _hidden_branch(outer: TableRef, hidden: TableRef) -> str:
    """The branch of a hidden view that goes with a branch of the view, made when first asked for.

    It begins at the version that the branch's rows were laid out from, where that is still there.
    It is called by the identity of the branch: names of deleted branches are used again.
    """
    view, lists = open_dataset(outer), open_dataset(hidden)
    *older, own = (name for _, name in view.branches.list()[outer.branch]["branch_identifier"])
    present = lists.branches.list()
    if own in present:
        return own
    parent = next((name for name in reversed(older) if name in present), None)
    laid_out = read_view_state(view.schema).computed_at
    for version in (*sorted(laid_out)[-1:], None):
        try:
            lists.create_branch(own, (parent, version))
        except (OSError, ValueError):
            if own in lists.branches.list():
                break  # somebody else was quicker
            if version is None:
                raise
        else:
            break
    return own


def drop_hidden_branches(outer: TableRef) -> None:
    """Delete the branches of a hidden view that belong to no branch of the view any more."""
    root = replace(outer, uri=outer.root, branch=None)
    hidden = open_dataset(inner_ref(root))
    # Listed first: a branch of the view is there before the hidden one that goes with it.
    left = hidden.branches.list()
    used = {
        name
        for branch in open_dataset(root).branches.list().values()
        for _, name in branch["branch_identifier"]
    }
    # One that others were made from goes after these.
    for name in sorted(left.keys() - used, key=lambda n: -len(left[n]["branch_identifier"])):
        with suppress(OSError, ValueError):
            hidden.branches.delete(name)


# ------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfSources:
    """Rows of a chunked view, in the order of their addresses."""

    ids: RowIds
    addresses: Addresses
    source_ids: RowIds

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.ids)


def read_rows_of(view: Dataset, source_ids: RowIds | None) -> RowsOfSources:
    """The live rows of a chunked view that are of some source rows; None: of any."""
    empty = np.zeros(0, dtype=np.uint64)
    parts = [(empty, empty, empty)]
    scanner = view.scanner(
        columns=[SOURCE_ROW_ID, IS_SET], with_row_id=True, with_row_address=True, scan_in_order=True
    )
    for batch in scanner.to_batches() if source_ids is None or len(source_ids) else ():
        ids, addresses = (batch.column(n).to_numpy() for n in ("_rowid", "_rowaddr"))
        sources = np.where(
            np.asarray(batch.column(IS_SET).fill_null(False)),
            np.asarray(batch.column(SOURCE_ROW_ID).fill_null(_NO_SOURCE)),
            _NO_SOURCE,
        ).astype(np.uint64)
        if source_ids is not None:
            hit = np.isin(sources, source_ids)
            ids, addresses, sources = ids[hit], addresses[hit], sources[hit]
        parts.append((ids, addresses, sources))
    return RowsOfSources(*(np.concatenate(side) for side in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A row of a view's source."""

    row_id: int
    row_address: int


def source_places(
    inner: TableRef, source: Dataset, row_ids: Sequence[int | None]
) -> list[SourcePlace | None]:
    """Where the source rows are that rows of the hidden view are of; None: not there any more."""
    hidden = open_dataset(inner)
    wanted = sorted({i for i in row_ids if i is not None})
    if not wanted:
        return [None] * len(row_ids)
    # Rows that are gone are left out.
    found = hidden._take_rows(pa.array(wanted, pa.uint64()), ["_rowid", SOURCE_ROW_ID])
    sources = dict(zip(*(found.column(i).to_pylist() for i in (0, 1)), strict=True))
    ids = pa.array(sorted(set(sources.values())), pa.uint64())
    there = source._take_rows(ids, ["_rowid", "_rowaddr"])
    addresses = dict(zip(*(there.column(i).to_pylist() for i in (0, 1)), strict=True))
    places = {i: SourcePlace(own, addresses[own]) for i, own in sources.items() if own in addresses}
    return [places.get(i) if i is not None else None for i in row_ids]


# ------------------------------------------------------------------------------------ staging


def write_chunk_rows(
    outer: TableRef,
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    max_rows_per_fragment: int | None = None,
) -> str:
    """Write rows as fragments that no version has yet; return what they are as text.

    `schema` has the view's own columns; those that were added to it are NULL in new rows.
    """
    return stage_rows(outer, schema, batches, max_rows_per_fragment or DEFAULT_FRAGMENT_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class RewrittenColumns:
    """A data file with other values of some columns for some rows of a fragment, not published."""

    fragment_id: int
    columns: tuple[str, ...]
    rows: Offsets
    """The rows with other values; the file has all rows of the fragment."""
    path: str


def stage_rewritten(
    outer: TableRef, view: Dataset, columns: Sequence[str], batches: Iterable[pa.RecordBatch]
) -> str:
    """Write columns of all rows of a fragment as a data file; return its name."""
    schema = written_schema(view.schema, columns)
    name = f"geneva-rewritten-{uuid.uuid4().hex}.lance"
    writer = LanceFileWriter(
        f"{outer.uri}/data/{name}",
        schema,
        version=view.data_storage_version,
        storage_options=outer.storage_options.plain(),
    )
    for batch in batches:
        arrays = [storable(view, batch.column(field.name)) for field in schema]
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    writer.close()
    return name


# ------------------------------------------------------------------------------------ publishing


def commit_chunks(
    view: Dataset,
    gone: Addresses,
    rewritten: Sequence[RewrittenColumns],
    fragments: Sequence[str],
    job_id: str = "",
) -> None:
    """Take rows out, publish rewritten columns and add fragments, in one commit on a version."""
    new = fragments_of(fragments)
    updated, removed = _without(view, gone)
    for file in rewritten:
        current = updated.get(file.fragment_id) or view.get_fragment(file.fragment_id).metadata
        updated[file.fragment_id] = _with_file(view, current, file)
    if not (new or updated or removed):
        return
    operation = LanceOperation.Update(
        removed_fragment_ids=removed,
        updated_fragments=list(updated.values()),
        new_fragments=new,
        fields_modified=_fields_below(view, {name for file in rewritten for name in file.columns}),
        # Every column of the new rows may have new values. Of the columns that are not named Lance
        # takes indexes to cover the new fragments, and hides their rows from queries.
        fields_for_preserving_frag_bitmap=[*nodes_of(view.lance_schema).values()],
        update_mode="rewrite_columns" if rewritten else "rewrite_rows",
        # So that just these rows count as updated, for whoever compares versions.
        updated_fragment_offsets={f.fragment_id: _bitmap(f.rows) for f in rewritten} or None,
    )
    transaction = Transaction(
        view.version, operation, transaction_properties={JOB_PROPERTY: job_id}
    )
    lance.LanceDataset.commit(view, transaction)


def _without(view: Dataset, gone: Addresses) -> tuple[dict[int, Any], list[int]]:
    """The fragments that rows are taken out of, by id, and those that none is left of."""
    updated: dict[int, Any] = {}
    removed: list[int] = []
    for fragment_id, offsets in split_by_fragment(np.sort(gone)):
        left = view.get_fragment(fragment_id).delete_rows(offsets.tolist())
        if left is None:
            removed.append(fragment_id)
        else:
            updated[fragment_id] = left
    return updated, removed


def _with_file(view: Dataset, fragment: Any, file: RewrittenColumns) -> Any:
    """A fragment whose columns are read from another file."""
    every = field_ids_of(view)
    fields = [i for name in file.columns for i in every[name]]
    stored = fragment.to_json()
    for entry in stored["files"]:
        entry["fields"] = [_TOMBSTONE if i in fields else i for i in entry["fields"]]
    stored["files"] = [e for e in stored["files"] if set(e["fields"]) != {_TOMBSTONE}]
    made = lance.FragmentMetadata.from_json(json.dumps(stored))
    made.files.append(data_file(view, file.path, fields))
    return made


def _fields_below(view: Dataset, columns: set[str]) -> list[int]:
    """The ids of columns and of all that is inside them."""
    nodes: Mapping[str, int] = nodes_of(view.lance_schema)
    return sorted({i for path, i in nodes.items() if path in columns or _root(path) in columns})


def _root(path: str) -> str:
    return path.partition(".")[0]


def _bitmap(offsets: Offsets) -> bytes:
    """Rows as a RoaringBitmap in its portable format, without runs: what Lance reads."""
    keys, starts, counts = np.unique(offsets >> 16, return_index=True, return_counts=True)
    head = struct.pack("<II", 12_346, len(keys))
    pairs = zip(keys.tolist(), counts.tolist(), strict=True)
    head += b"".join(struct.pack("<HH", key, count - 1) for key, count in pairs)
    containers = [
        _container(offsets[start : start + count] & 0xFFFF)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]
    sizes = [len(head) + 4 * len(keys), *map(len, containers)]
    places = np.cumsum(sizes)[:-1].astype("<u4")
    return head + places.tobytes() + b"".join(containers)


def _container(values: Offsets) -> bytes:
    """Numbers below 65,536: as a list while that is short, then as bits."""
    if len(values) <= 4_096:
        return values.astype("<u2").tobytes()
    bits = np.zeros(1 << 16, dtype=np.bool_)
    bits[values] = True
    return np.packbits(bits, bitorder="little").tobytes()

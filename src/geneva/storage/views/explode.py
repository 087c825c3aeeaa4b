"""The rows of a chunked view: written as fragments, put in place of older ones by one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance import LanceOperation, Transaction
from lance.fragment import write_fragments

from geneva.model.addresses import offsets_of
from geneva.model.tables import TableRef
from geneva.model.uris import branch_uri
from geneva.model.view_query import SOURCE_ROW_ID
from geneva.storage.columns.dictionaries import has_narrow_dictionary
from geneva.storage.lance.commit import retry_conflicts
from geneva.storage.lance.dataset import open_dataset
from geneva.storage.lance.pieces import concat_batches
from geneva.storage.views.state import read_view_state

CHUNKS = "__chunks"
"""The hidden view's column of lists."""
_MAX_RETRIES = 19


def inner_ref(outer: TableRef) -> TableRef:
    """The hidden view of a chunked one. It is inside the other's folder, and goes with it."""
    hidden = TableRef(f"{outer.name} (chunks)", f"{outer.root}/_chunks", outer.storage_options)
    if outer.branch is None:
        return hidden
    branch = _hidden_branch(outer, hidden)
    return replace(hidden, uri=branch_uri(hidden.root, branch), branch=branch)


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


def write_chunk_rows(outer: TableRef, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> str:
    """Write rows as fragments that no version has yet; return what they are as text.

    `schema` has the view's own columns; those that were added to it are NULL in new rows.
    """
    if has_narrow_dictionary(schema.types) and (held := list(batches)):
        batches = iter([concat_batches(held)])  # as `ColumnFileWriter` does, and why
    fragments = write_fragments(
        pa.RecordBatchReader.from_batches(schema, batches),
        outer.uri,
        schema=schema,
        mode="append",
        storage_options=outer.storage_options.plain(),
    )
    return json.dumps([fragment.to_json() for fragment in fragments])


def commit_chunks(
    outer: TableRef, gone: npt.NDArray[np.uint64] | None, fragments: Sequence[str]
) -> None:
    """Put new rows in the place of those of `gone` source rows (None: of all), in one commit.

    Done again after a crash it gives the same: rows are found by the source row they are of.
    """
    new = [
        lance.FragmentMetadata.from_json(json.dumps(item))
        for text in fragments
        for item in json.loads(text)
    ]

    def attempt() -> None:
        view = open_dataset(outer)
        updated, removed = _without(view, gone)
        if not (new or updated or removed):
            return
        operation = LanceOperation.Update(
            removed_fragment_ids=removed,
            updated_fragments=updated,
            new_fragments=new,
            fields_modified=[],
            fields_for_preserving_frag_bitmap=[],
            update_mode="rewrite_rows",
        )
        lance.LanceDataset.commit(view, Transaction(view.version, operation))

    # After a compaction, say, the rows are elsewhere.
    retry_conflicts(attempt, _MAX_RETRIES)


def _without(
    view: lance.LanceDataset, gone: npt.NDArray[np.uint64] | None
) -> tuple[list[lance.FragmentMetadata], list[int]]:
    updated: list[lance.FragmentMetadata] = []
    removed: list[int] = []
    for fragment in view.get_fragments():
        if gone is None:
            removed.append(fragment.fragment_id)
            continue
        if not len(gone):
            continue
        table = view.scanner(
            columns=[SOURCE_ROW_ID], with_row_address=True, fragments=[fragment]
        ).to_table()
        hit = np.isin(table.column(SOURCE_ROW_ID).to_numpy().astype(np.uint64), gone)
        if not hit.any():
            continue
        offsets = offsets_of(table.column("_rowaddr").to_numpy()[hit])
        left = fragment.delete_rows(offsets.tolist())
        if left is None:
            removed.append(fragment.fragment_id)
        else:
            updated.append(left)
    return updated, removed

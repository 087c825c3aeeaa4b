"""The hidden tables of a view of a table function: the source's rows by partition, and these.

`_rows` is a hidden view with the key and the digest of each row that the query selects. From it
comes `_partitions`, a table with a row for each partition: what the function is called for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Protocol

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.dataset import VectorIndexReader

from geneva.errors import UserInputError
from geneva.model.addresses import split_by_fragment
from geneva.model.digests import Digests
from geneva.model.partitions import (
    DIGEST,
    DIGEST_TYPE,
    KEY,
    KEY_TYPE,
    KeyedIds,
    Partitions,
    key_of_texts,
    key_texts,
    key_words,
)
from geneva.model.rows import Offsets, RowIds, RowSet
from geneva.model.tables import TableRef
from geneva.model.view_query import IS_SET, SOURCE_ROW_ID
from geneva.render.text import count, shorten
from geneva.storage.lance.dataset import Dataset, open_dataset
from geneva.storage.lance.row_ids import NO_IDS, scan_ids
from geneva.storage.views.definition import create_empty, delete_view_rows

PARTITION, ID, ROWS = "partition", "id", "rows"
_DIGEST, _PLACES, _COUNT = "digest", "places", "count"
PARTITIONS_ADDRESS = "_partitions"
"""Where the table is, from the view's folder on: the source of a hidden view of lists."""
_PARTITIONS_SCHEMA = pa.schema(
    [
        pa.field(PARTITION, pa.string()),
        pa.field(ID, pa.string()),
        pa.field(_DIGEST, pa.uint64()),
        pa.field(_PLACES, pa.uint64()),
        pa.field(_COUNT, pa.int64()),
        pa.field(ROWS, pa.large_list(pa.uint64())),
    ]
)
"""What it is called, its key, sums of the digests and of the ids of its rows, how many they are,
and their ids in the source; NULL: all rows of the query."""
KEYED_SCHEMA = pa.schema([pa.field(KEY, KEY_TYPE), pa.field(DIGEST, DIGEST_TYPE)])
"""The columns of the hidden view of rows."""
ALL_ROWS = "all rows"
"""What the partition is called that has all rows of a query."""
_MAX_NAME = 200
_MAX_FRAGMENTS = 64
"""Fragments of the table of partitions before they are compacted."""


def rows_ref(outer: TableRef) -> TableRef:
    """The hidden view of keys and digests. It is inside the view's folder, and goes with it."""
    return TableRef(f"{outer.name} (rows)", f"{outer.root}/_rows", outer.storage_options)


def partitions_ref(outer: TableRef) -> TableRef:
    """The hidden table of partitions."""
    return TableRef(
        f"{outer.name} (partitions)", f"{outer.root}/{PARTITIONS_ADDRESS}", outer.storage_options
    )


def create_partitions(ref: TableRef) -> Dataset:
    """Make the empty table of partitions."""
    return create_empty(ref, _PARTITIONS_SCHEMA)


# ------------------------------------------------------------------------------------ rows


class Assignment(Protocol):
    """Says which partition rows are in, where their own columns don't."""

    def keys(self, ids: RowIds) -> tuple[Digests, Digests]:
        """The keys of rows."""


def read_keyed_ids(rows: Dataset, assignment: Assignment | None = None) -> Iterator[KeyedIds]:
    """The rows of the hidden view of rows, some at a time."""
    scanner = rows.scanner(columns=[SOURCE_ROW_ID, KEY, DIGEST], filter=IS_SET)
    for batch in scanner.to_batches():
        ids = batch.column(SOURCE_ROW_ID).to_numpy().astype(np.uint64)
        yield keyed_ids(ids, batch, assignment)


def keyed_ids(ids: RowIds, batch: pa.RecordBatch, assignment: Assignment | None) -> KeyedIds:
    """Rows whose keys and digests are the columns of a batch."""
    high, low = key_words(batch.column(KEY)) if assignment is None else assignment.keys(ids)
    return KeyedIds(ids, high, low, batch.column(DIGEST).to_numpy())


class IndexedPartitions:
    """The partitions of an IVF index, as the index has them at a version of the source."""

    def __init__(self, source: Dataset, table: str, column: str) -> None:
        """Read which partition each row is in: 16 bytes of memory for each."""
        self._table, self._column = table, column
        reader, covered = _open_index(source, table, column)
        parts = [
            reader.read_partition(number).column("_rowid").to_numpy()
            for number in range(reader.num_partitions())
        ]
        ids = np.concatenate([NO_IDS, *parts]).astype(np.uint64)
        numbers = np.repeat(np.arange(len(parts), dtype=np.uint64), [len(part) for part in parts])
        # A row that was rewritten since is in the index still, where its old vector was.
        outside = [i for f in source.get_fragments() if (i := f.fragment_id) not in covered]
        own = ~np.isin(ids, scan_ids(source, None, outside))
        order = np.argsort(ids[own])
        self._ids, self._numbers = ids[own][order], numbers[own][order]
        if bool((self._ids[1:] == self._ids[:-1]).any()):
            raise UserInputError(
                f"The index of column {column!r} of table {table!r} has rows in several of its "
                "partitions: make it anew, with table.create_index(...)."
            )

    def keys(self, ids: RowIds) -> tuple[Digests, Digests]:
        """The keys of rows: the numbers of their partitions."""
        places = np.minimum(np.searchsorted(self._ids, ids), max(len(self._ids) - 1, 0))
        missing = int(np.count_nonzero(self._ids[places] != ids)) if len(self._ids) else len(ids)
        if missing:
            raise UserInputError(
                f"{count(missing, 'row')} or more of table {self._table!r} are not in the index of "
                f"column {self._column!r}, so that nobody knows their partition. Call "
                "optimize() of the table, which indexes them, and refresh again."
            )
        return np.zeros(len(ids), np.uint64), self._numbers[places]


def _open_index(
    source: Dataset, table: str, column: str
) -> tuple[VectorIndexReader, frozenset[int]]:
    """The IVF index of a column, and the fragments that it is of."""
    for index in source.describe_indices():
        if list(index.field_names) == [column]:
            fragments = frozenset(i for part in index.segments for i in part.fragment_ids)
            try:
                return VectorIndexReader(source, index.name), fragments
            except (ValueError, KeyError):
                continue
    raise UserInputError(
        f"Column {column!r} of table {table!r} has no IVF index at version {source.version}. Make "
        f"one with table.create_index({column!r}, config=...), or partition by a column of values "
        "(partition_by)."
    )


# ------------------------------------------------------------------------------ partitions


def read_partitions(ref: TableRef, version: int | None = None) -> Partitions:
    """The partitions that are on record."""
    table = open_dataset(ref, version).to_table(columns=[ID, _DIGEST, _PLACES, _COUNT])
    if not table.num_rows:
        return Partitions.empty()
    high, low = key_of_texts(table.column(ID))
    numbers = (table.column(name).to_numpy() for name in (_DIGEST, _PLACES, _COUNT))
    return Partitions.of(high, low, *numbers)


def partition_name(values: dict[str, object]) -> str:
    """What a partition is called: the values that its rows have in common."""
    return shorten(json.dumps(values, default=str, ensure_ascii=False), _MAX_NAME)


def partition_batch(partitions: Partitions, names: list[str], ids: RowIds | None) -> pa.RecordBatch:
    """Partitions as rows of their table; `ids` are those of their rows, one after the other."""
    if ids is None:
        lists = pa.nulls(len(partitions), pa.large_list(pa.uint64()))
    else:
        ends = np.concatenate([[0], np.cumsum(partitions.counts)])
        lists = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(ids))
    columns = [
        pa.array(names, pa.string()),
        key_texts(partitions.high, partitions.low),
        pa.array(partitions.digests),
        pa.array(partitions.places),
        pa.array(partitions.counts),
        lists,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_PARTITIONS_SCHEMA)


def commit_partitions(ref: TableRef, batches: Iterator[pa.RecordBatch], *, anew: bool) -> None:
    """Put partitions on record, in place of what is there of the same key; `anew`: none is."""
    dataset = open_dataset(ref)
    options = ref.storage_options.plain()
    reader = pa.RecordBatchReader.from_batches(_PARTITIONS_SCHEMA, batches)
    if anew:
        lance.write_dataset(reader, dataset, mode="append", storage_options=options)
        return
    merge = dataset.merge_insert(ID).when_matched_update_all().when_not_matched_insert_all()
    merge.execute(reader)


def drop_partitions(ref: TableRef, gone: Partitions, job_id: str) -> None:
    """Take partitions off the record."""
    if not len(gone):
        return
    dataset = open_dataset(ref)
    table = dataset.to_table(columns=[ID], with_row_address=True)
    high, low = key_of_texts(table.column(ID))
    addresses = table.column("_rowaddr").to_numpy()[gone.find(high, low) >= 0]
    places = {
        fragment: RowSet.from_offsets(_physical_rows(dataset, fragment), offsets)
        for fragment, offsets in split_by_fragment(np.sort(addresses))
    }
    delete_view_rows(dataset, places, job_id)


def _physical_rows(dataset: Dataset, fragment_id: int) -> int:
    return int(dataset.get_fragment(fragment_id).physical_rows)


def tidy_partitions(ref: TableRef) -> None:
    """Put the fragments of many refreshes together."""
    dataset = open_dataset(ref)
    if len(dataset.get_fragments()) > _MAX_FRAGMENTS:
        dataset.optimize.compact_files()


def ids_by_partition(
    chosen: Partitions, parts: Iterator[KeyedIds]
) -> tuple[npt.NDArray[np.int64], RowIds]:
    """Rows of chosen partitions: the place of its partition, and the id, of each; by their ids."""
    places: list[Offsets] = [np.zeros(0, np.int64)]
    ids: list[RowIds] = [np.zeros(0, np.uint64)]
    for part in parts:
        found = chosen.find(part.high, part.low)
        own = found >= 0
        places.append(found[own])
        ids.append(part.ids[own])
    every = np.concatenate(ids)
    order = np.argsort(every)
    return np.concatenate(places)[order], every[order]

"""Looking keys up in a staged source."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from geneva.model.computation import StagedKeys
from geneva.model.digests import Digests
from geneva.model.rows import Mask, Offsets
from geneva.model.tables import TableRef
from geneva.storage.lance.pieces import concat_batches
from geneva.storage.lance.values import equal_rows
from geneva.storage.loads.staging import (
    gather,
    hash_keys,
    index_name,
    open_folder,
    partition_of,
    read_block,
    read_rows,
)
from geneva.udf.picking import filtered, picked

_KEPT_BYTES = 256 * 1024 * 1024
"""A source up to this size is kept in memory once it was read; of a larger one nothing is."""
_MAX_READERS = 256
"""Files that are held open."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The rows of a source that were found for some keys."""

    matched: Mask
    """Which of the keys are in the source."""
    values: pa.RecordBatch | None
    """The values of these, in their order; None where there is none."""


class KeyLookup:
    """Finds rows of a staged source by their keys."""

    def __init__(
        self, ref: TableRef, staged: StagedKeys, columns: tuple[str, ...] | None = None
    ) -> None:
        """Read nothing yet. `columns`: the key, and the values to read; None: all."""
        self._staged, self._columns = staged, None if columns is None else list(columns)
        self._folder = open_folder(ref, staged.folder)
        self._index: dict[int, tuple[Digests, Digests]] = {}
        self._blocks: dict[int, pa.RecordBatch] = {}
        self._of_thread = threading.local()
        self._keeps_blocks = staged.nbytes <= _KEPT_BYTES

    def find(self, keys: pa.Array) -> Found:
        """Look keys up. NULL is no key, and never found."""
        if pa.types.is_dictionary(keys.type):
            keys = keys.dictionary_decode()
        hashes = hash_keys(keys)
        matched = np.zeros(len(keys), dtype=np.bool_)
        left = np.flatnonzero(np.asarray(keys.is_valid()))
        pieces: list[tuple[Offsets, pa.RecordBatch]] = []
        candidate = 0
        while True:
            # Most keys have one candidate. Different keys with the same hash are told apart here.
            left, places = self._candidates(hashes, left, candidate)
            if not len(left):
                break
            rows = gather(places, self._read)
            same = equal_rows(rows.column(0), picked(keys, left))
            if same.all():
                pieces.append((left, rows))
            elif same.any():
                pieces.append((left[same], filtered(rows, same)))
            matched[left[same]] = True
            left = left[~same]
            candidate += 1
        return Found(matched, _in_order(pieces))

    def _candidates(self, hashes: Digests, rows: Offsets, number: int) -> tuple[Offsets, Digests]:
        """The rows that have a candidate of that number, and its place in the source."""
        # In order: the pages of the index that are looked at come one after the other.
        rows = rows[np.argsort(hashes[rows])]
        wanted = hashes[rows]
        places = np.zeros(len(hashes), dtype=np.uint64)
        hit = np.zeros(len(hashes), dtype=np.bool_)
        partitions = partition_of(wanted, self._staged.partitions)
        for partition in np.unique(partitions):
            low, high = np.searchsorted(partitions, (partition, partition + np.uint64(1)))
            known, at = self._partition(int(partition))
            found = np.searchsorted(known, wanted[low:high]) + number
            inside = found < len(known)
            inside[inside] = known[found[inside]] == wanted[low:high][inside]
            some = rows[low:high][inside]
            places[some], hit[some] = at[found[inside]], True
        found_rows = np.flatnonzero(hit)
        return found_rows, places[found_rows]

    def _partition(self, partition: int) -> tuple[Digests, Digests]:
        if partition not in self._index:
            batch = self._folder.map_arrow(index_name(partition))
            self._index[partition] = (batch.column(0).to_numpy(), batch.column(1).to_numpy())
        return self._index[partition]

    def _read(self, block: int, rows: Digests) -> pa.RecordBatch:
        if not self._keeps_blocks:
            return read_rows(self._reader(block), rows)
        if block not in self._blocks:
            self._blocks[block] = read_block(self._reader(block))
        return picked(self._blocks[block], rows)

    def _reader(self, block: int) -> Any:
        """An open block. Lance's readers are for one thread each."""
        readers: dict[Any, Any] = self._of_thread.__dict__
        if block not in readers:
            if len(readers) >= _MAX_READERS:
                readers.clear()
            readers[block] = self._folder.block(self._staged.blocks[block], self._columns)
        return readers[block]


@lru_cache(maxsize=2)
def open_lookup(
    ref: TableRef, staged: StagedKeys, columns: tuple[str, ...] | None = None
) -> KeyLookup:
    """What looks keys up in a staged source, made once per process."""
    return KeyLookup(ref, staged, columns)


def _in_order(pieces: Sequence[tuple[Offsets, pa.RecordBatch]]) -> pa.RecordBatch | None:
    """The values of all keys that were found, in the order of the keys; without the keys."""
    if not pieces:
        return None
    rows = concat_batches([batch for _, batch in pieces])
    if len(pieces) > 1:
        offsets = np.concatenate([offsets for offsets, _ in pieces])
        rows = picked(rows, np.argsort(offsets))
    return rows.select(range(1, rows.num_columns))

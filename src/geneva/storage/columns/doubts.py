"""Inputs of which nobody can tell which columns they are: what the receipts of a few rows say.

A receipt is made from the values of a row's inputs. So the column whose values receipts fit is the
one that was read. Where they fit none, or several, or hardly more than by chance, it stays open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import lance
import numpy as np
import pyarrow as pa

from geneva.model.addresses import offsets_of
from geneva.model.computation import Computation, Output
from geneva.model.digests import Digests, digest_rows
from geneva.model.rows import Mask, Offsets
from geneva.model.tables import ColumnDefinition, Doubt
from geneva.storage.columns.definitions import computation_of, fed_from, rebound
from geneva.storage.columns.receipts import input_part, is_failed, is_result, receipt_bits
from geneva.storage.lance.dataset import FragmentFacts, TableSnapshot, quote_path
from geneva.storage.lance.fragments import (
    RowTaker,
    field_at,
    holds_blob,
    size_of_inputs,
    window_rows,
)

Item = TypeVar("Item")

_MAX_FRAGMENTS = 8
_MAX_ROWS = 64
_MAX_BLOB_ROWS = 4
"""Blobs may be of any size."""
_RECEIPTS_READ = 4_096
"""Of a fragment: rows without one may come first."""


def settled(
    dataset: lance.LanceDataset, snapshot: TableSnapshot, definition: ColumnDefinition
) -> ColumnDefinition:
    """The definition with the columns that receipts were made from; in doubt where they don't tell.

    Reads a few rows, where it is in doubt about one input.
    """
    doubt = definition.doubt
    if doubt is None or not doubt.is_only or definition.inputs_changed:
        return definition
    definitions = [_fed_with(definition, doubt, name) for name in doubt.candidates]
    there = snapshot.field_ids.keys() & snapshot.fields.kinds.keys()
    if not there.issuperset(path for found in definitions for path in found.inputs):
        return definition
    computations = [computation_of(snapshot, found) for found in definitions]
    chosen = _decided(_Sampler(dataset, snapshot, computations, doubt.candidates).read())
    return definition if chosen is None else rebound(definitions[chosen], snapshot.fields)


def _fed_with(definition: ColumnDefinition, doubt: Doubt, name: str) -> ColumnDefinition:
    """The definition, if the input in doubt is the column `name`."""
    paths = tuple(name if path == doubt.path else path for path in definition.inputs)
    return fed_from(replace(definition, doubt=None), paths)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What was found in rows with receipts: a line for each candidate, a place for each row."""

    fits: Mask
    """Whether the receipt was made from the candidate's value."""
    values: Digests
    """Digests of the candidate's values alone."""
    has_value: Mask
    """Whether these are not NULL."""


def _decided(seen: _Seen) -> int | None:
    """The one candidate that fits wherever any does; None: there is none, or it may be by chance.

    Rows may be stale: then they fit none. Where all candidates have the same value, a row tells
    nothing.
    """
    anywhere = seen.fits.any(axis=0)
    found = np.flatnonzero((seen.fits == anywhere).all(axis=1))
    if len(found) != 1 or not anywhere.any():
        return None
    tells = (seen.values != seen.values[0]).any(axis=0) | (len(seen.values) == 1)
    one = int(found[0])
    fits, values = seen.fits[one], seen.values[one]
    # Each value counts once: those of a flag or a category fit other columns' receipts by chance.
    wrong = {*values[tells & ~fits].tolist()}
    right = {*values[tells & fits & seen.has_value[one]].tolist()} - wrong
    return one if right and len(right) >= len(wrong) else None


class _Sampler:
    """Reads a few rows that were computed, and compares their receipts with each candidate."""

    def __init__(
        self,
        dataset: lance.LanceDataset,
        snapshot: TableSnapshot,
        computations: Sequence[Computation],
        candidates: Sequence[str],
    ) -> None:
        """`computations` are those of the column, one for each of the `candidates`."""
        self._dataset, self._snapshot = dataset, snapshot
        self._computations, self._candidates = computations, candidates
        self._paths = tuple(dict.fromkeys(p for c in computations for p in c.input_paths))

    def read(self) -> _Seen:
        """Of columns that are filled together, the first one that has receipts is enough."""
        parts: list[_Seen] = []
        for receipt in self._computations[0].receipts:
            parts = parts or list(self._read(receipt))
        if not parts:
            nothing = np.zeros((len(self._candidates), 0), dtype=np.bool_)
            return _Seen(nothing, nothing.astype(np.uint64), nothing)
        return _Seen(
            fits=np.concatenate([part.fits for part in parts], axis=1),
            values=np.concatenate([part.values for part in parts], axis=1),
            has_value=np.concatenate([part.has_value for part in parts], axis=1),
        )

    def _read(self, receipt: Output) -> Iterator[_Seen]:
        with_receipts = [f for f in self._snapshot.fragments if f.files_of(receipt.field_ids)]
        blobs = any(holds_blob(field_at(self._snapshot.schema, path)) for path in self._paths)
        max_rows = _MAX_BLOB_ROWS if blobs else _MAX_ROWS
        fragments = _spread(with_receipts, min(_MAX_FRAGMENTS, max_rows))
        for fragment in fragments:
            count = min(max_rows // len(fragments), self._window(fragment))
            offsets, bits = self._computed(fragment, receipt, count)
            if len(offsets):
                taken = RowTaker(self._dataset, fragment.id, self._paths).take(offsets)
                yield self._compared(taken, bits)

    def _window(self, fragment: FragmentFacts) -> int:
        field_ids = [i for path in self._paths for i in self._snapshot.field_ids[path]]
        sizes = size_of_inputs(fragment, field_ids)
        return window_rows(self._snapshot.schema, self._paths, sizes, fragment.physical_rows)

    def _computed(
        self, fragment: FragmentFacts, receipt: Output, count: int
    ) -> tuple[Offsets, Digests]:
        """Some rows of a fragment whose receipts say that they were computed, and the receipts."""
        found = self._dataset.scanner(
            columns={"receipt": quote_path(receipt.name, self._snapshot.schema)},
            fragments=[self._dataset.get_fragment(fragment.id)],
            with_row_address=True,
            limit=_RECEIPTS_READ,
            scan_in_order=True,
        ).to_table()
        receipts = found.column("receipt").combine_chunks()
        rows = _spread(np.flatnonzero(is_result(receipts) & ~is_failed(receipts)).tolist(), count)
        return offsets_of(found.column("_rowaddr").to_numpy())[rows], receipt_bits(receipts)[rows]

    def _compared(self, rows: pa.RecordBatch, bits: Digests) -> _Seen:
        columns = [rows.column(name) for name in self._candidates]
        return _Seen(
            fits=np.stack([_fits(c, rows, bits) for c in self._computations]),
            values=np.stack([digest_rows([c], 0, rows.num_rows) for c in columns]),
            has_value=np.stack([np.asarray(column.is_valid()) for column in columns]),
        )


def _fits(computation: Computation, rows: pa.RecordBatch, bits: Digests) -> Mask:
    """Rows whose receipts were made from these inputs, by any function that the column has had."""
    inputs = [rows.column(path) for path in computation.input_paths]
    fits = np.zeros(len(bits), dtype=np.bool_)
    known = (computation.version, *computation.kept_versions, *computation.former_versions)
    for version in known:
        digests = digest_rows(inputs, computation.receipt_seed(version), len(bits))
        fits |= input_part(digests) == input_part(bits)
    return fits


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most so many of them, from the first one on, evenly."""
    return list(items[:: max(1, -(-len(items) // count))])

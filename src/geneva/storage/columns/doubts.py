"""Inputs of which nobody can tell which columns they are: what files and receipts say.

A data file that Geneva wrote says which fields of which other files it was computed from. An
overwrite writes all files anew: so where one is still there, the table was not overwritten since,
and ids mean what they meant. Where values are there, and none of these files is, the history is
asked also if names and ids agree: they may do so by chance.

A receipt is made from the values of a row's inputs. Where the table may have been overwritten,
receipts can only confirm the column that is named like the input, or, where that name is gone, the
one that has its id: any other may be a copy of the input's former values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TypeVar

import lance
import numpy as np
import pyarrow as pa

from geneva.model.addresses import offsets_of
from geneva.model.computation import Computation, Output, receipt_name
from geneva.model.digests import Digests, digest_rows
from geneva.model.rows import Mask, Offsets
from geneva.model.tables import ColumnDefinition
from geneva.storage.columns.definitions import by_history, computation_of, fed_from, rebound
from geneva.storage.columns.provenance import named, named_inputs, parse_file_name, signature_of
from geneva.storage.columns.receipts import input_part, is_failed, is_result, receipt_bits
from geneva.storage.lance.damage import is_damage
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
_MAX_CHANCE = 0.001
"""How probable it may be that so many receipts fit by chance."""


def settled(
    dataset: lance.LanceDataset, snapshot: TableSnapshot, definition: ColumnDefinition
) -> ColumnDefinition:
    """The definition with the columns that its values were made from; in doubt where nothing tells.

    Where it is in doubt, files are looked at by their names, and then a few rows are read.
    """
    doubt = definition.doubt
    there = snapshot.field_ids.keys() & snapshot.fields.kinds.keys()
    readings = (definition.inputs,) if doubt is None else doubt.readings
    if not there.issuperset(path for paths in readings for path in paths):
        return definition
    if doubt is None:
        files = _files(snapshot, [computation_of(snapshot, definition)])
        return by_history(definition, snapshot.fields) if files.are_others else definition
    if not readings:
        return definition
    definitions = [fed_from(replace(definition, doubt=None), paths) for paths in readings]
    computations = [computation_of(snapshot, found) for found in definitions]
    files = _files(snapshot, computations)
    found = _by_files(snapshot, definition, files)
    if found is not None:
        return rebound(definitions[found], snapshot.fields)
    if len(readings) > 1 and (definition.inputs_changed or not (files.is_there or doubt.by_name)):
        return definition  # receipts may be of the inputs before
    seen = _Sampler(dataset, snapshot, computations).read()
    if seen is not None:
        allowed = range(len(definitions)) if files.is_there else range(1)
        confirmed = [i for i in allowed if _is_confirmed(seen, i)]
        return rebound(definitions[confirmed[0]], snapshot.fields) if confirmed else definition
    if doubt.by_name or doubt.overwritten:
        return definition
    # Nothing was computed yet, or can be read, and the name is gone: nothing else can be meant.
    pairs = zip(definition.inputs, definitions[0].inputs, strict=True)
    assumed = tuple((name, path) for name, path in pairs if name != path)
    return replace(rebound(definitions[0], snapshot.fields), assumed=assumed)


@dataclass(frozen=True, slots=True)
class _Files:
    """What the names of data files say that hold a column's receipts."""

    is_there: bool
    """Whether any is of the column: then the table was not overwritten since."""
    are_others: bool
    """Whether there are some, and none is: then it may have been."""
    proven: frozenset[int]
    """The readings that any was computed from."""


def _files(snapshot: TableSnapshot, computations: Sequence[Computation]) -> _Files:
    """Look for data files of the column, and for which of the readings they were computed from.

    One is enough where there is nothing to choose from.
    """
    one, any_files, is_there, proven = computations[0], False, False, set[int]()
    receipts = frozenset(i for receipt in one.receipts for i in receipt.field_ids)
    versions = {named("", v, ()).udf for v in (*_versions(one), one.file_version)}
    column = named(one.id, "", ()).column
    for fragment in snapshot.fragments:
        files = fragment.files_of(receipts)
        names = [parse_file_name(file.path) for file in files]
        own = {n.inputs for n in names if n and n.column == column and n.udf in versions}
        any_files = any_files or bool(files)
        if own:
            is_there = True
            made = (named_inputs(signature_of(c, fragment)) for c in computations)
            fits = [i for i, inputs in enumerate(made) if inputs in own]
            proven.update(fits if len(fits) == 1 else ())
        if is_there and len(computations) == 1:
            break
    return _Files(is_there, any_files and not is_there, frozenset(proven))


def _by_files(snapshot: TableSnapshot, definition: ColumnDefinition, files: _Files) -> int | None:
    """The reading that files prove, by what they were computed from, or by being there at all.

    As long as one is, the table was not overwritten, and ids mean what they meant: jobs write down
    those that have changed. Only ids above that of the receipts may be given away again.
    """
    doubt, fields = definition.doubt, snapshot.fields
    if doubt is None or not files.is_there:
        return None
    if len(files.proven) == 1 and not definition.inputs_changed:  # else it may be one before
        return min(files.proven)
    by_ids = tuple(fields.named(field) for field in definition.input_fields)
    receipts = fields.nodes[receipt_name(definition.uuid)]
    is_sure = all(node < receipts for node, _ in definition.input_fields)
    places = [i for i, paths in enumerate(doubt.readings) if paths == by_ids]
    return places[0] if places and is_sure and not doubt.overwritten else None


def _versions(computation: Computation) -> tuple[str, ...]:
    """All functions that the column has had."""
    return (computation.version, *computation.kept_versions, *computation.former_versions)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What was found in rows with receipts."""

    receipts: Digests
    """Of each row, what its receipt says of the inputs."""
    digests: Digests
    """What it would say: by reading, function of the column, and row."""
    has_values: Mask
    """By reading and row: whether all inputs are there."""


def _is_confirmed(seen: _Seen, reading: int) -> bool:
    """Whether receipts fit a reading, and not by chance.

    Rows may be stale: then they fit none. But none may fit another reading alone. Where all have
    the same values, a row tells nothing. How often receipts fit by chance is seen from how often
    they fit the values of other rows: those of flags and categories do.
    """
    fits = (seen.digests == seen.receipts).any(axis=1)
    if (fits & ~fits[reading]).any():
        return False
    tells = (seen.digests != seen.digests[0]).any(axis=(0, 1)) | (len(fits) == 1)
    rows = np.flatnonzero(tells & seen.has_values[reading])
    matches = seen.digests[reading][:, rows, None] == seen.receipts[None, None, rows]
    fitting, every = int(fits[reading][rows].sum()), int(matches.any(axis=0).sum())
    others = len(rows) * (len(rows) - 1)
    chance = (every - fitting) / others if others else 0.0
    return fitting > 0 and _probability(len(rows), fitting, chance) < _MAX_CHANCE


def _probability(tries: int, successes: int, chance: float) -> float:
    """How probable it is that at least so many of some tries succeed."""
    return sum(
        comb(tries, n) * chance**n * (1 - chance) ** (tries - n)
        for n in range(successes, tries + 1)
    )


class _Sampler:
    """Reads a few rows that were computed, and compares their receipts with each reading."""

    def __init__(
        self,
        dataset: lance.LanceDataset,
        snapshot: TableSnapshot,
        computations: Sequence[Computation],
    ) -> None:
        """`computations` are those of the column, one for each reading of its inputs."""
        self._dataset, self._snapshot = dataset, snapshot
        self._computations = computations
        self._paths = tuple(dict.fromkeys(p for c in computations for p in c.input_paths))

    def read(self) -> _Seen | None:
        """Of columns that are filled together, the first one that has receipts is enough.

        None: there are no receipts, or none that can be read.
        """
        parts: list[_Seen] = []
        for receipt in self._computations[0].receipts:
            parts = parts or list(self._read(receipt))
        if not parts:
            return None
        return _Seen(
            receipts=np.concatenate([part.receipts for part in parts]),
            digests=np.concatenate([part.digests for part in parts], axis=2),
            has_values=np.concatenate([part.has_values for part in parts], axis=1),
        )

    def _read(self, receipt: Output) -> Iterator[_Seen]:
        with_receipts = [f for f in self._snapshot.fragments if f.files_of(receipt.field_ids)]
        blobs = any(holds_blob(field_at(self._snapshot.schema, path)) for path in self._paths)
        max_rows = _MAX_BLOB_ROWS if blobs else _MAX_ROWS
        fragments = _spread(with_receipts, min(_MAX_FRAGMENTS, max_rows))
        for fragment in fragments:
            count = min(max_rows // len(fragments), self._window(fragment))
            try:
                seen = self._compared(fragment, receipt, count)
            except BaseException as error:
                if not is_damage(error):
                    raise
                continue  # the plan says which fragments can't be read
            if seen is not None:
                yield seen

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

    def _compared(self, fragment: FragmentFacts, receipt: Output, count: int) -> _Seen | None:
        """What some rows of a fragment say; None: it has none that were computed."""
        offsets, bits = self._computed(fragment, receipt, count)
        if not len(offsets):
            return None
        rows = RowTaker(self._dataset, fragment.id, self._paths).take(offsets)
        return _Seen(
            receipts=input_part(bits),
            digests=np.stack([_digests(c, rows) for c in self._computations]),
            has_values=np.stack([_has_values(c, rows) for c in self._computations]),
        )


def _digests(computation: Computation, rows: pa.RecordBatch) -> Digests:
    """What receipts of these inputs would say, by any function that the column has had."""
    inputs = [rows.column(path) for path in computation.input_paths]
    seeds = [computation.receipt_seed(version) for version in _versions(computation)]
    return np.stack([input_part(digest_rows(inputs, seed, rows.num_rows)) for seed in seeds])


def _has_values(computation: Computation, rows: pa.RecordBatch) -> Mask:
    inputs = [np.asarray(rows.column(path).is_valid()) for path in computation.input_paths]
    return np.logical_and.reduce(inputs, axis=0)


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most so many of them, from the first one on, evenly."""
    return list(items[:: max(1, -(-len(items) // count))])

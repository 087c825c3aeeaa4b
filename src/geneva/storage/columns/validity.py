"""Which values of a computation are right, proven in one of three ways, cheapest first.

By identity: the files of inputs and values are those that a file of ours names: nothing is read. By
history: a compaction copied such rows, as its transaction tells: nothing is read. By receipt: the
receipts of these very rows are compared with their inputs as they are now. Nothing is guessed, and
no user code runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from geneva.model.computation import Computation
from geneva.model.digests import Digests, digest_rows
from geneva.model.rows import Mask, Offsets, RowRange, RowSet
from geneva.model.tables import Reason, TableRef
from geneva.model.view_query import SOURCE_ROW_ID
from geneva.storage.columns.inputs import InputReader
from geneva.storage.columns.provenance import (
    NamedProvenance,
    input_signature,
    named,
    parse_file_name,
    read_provenance,
)
from geneva.storage.columns.receipts import (
    RECEIPT_TYPE,
    Written,
    input_part,
    joined_receipts,
    read_receipts,
)
from geneva.storage.lance.dataset import FragmentFacts, TableSnapshot, file_version
from geneva.storage.lance.fragments import fitting_window, read_windows, size_of_inputs, window_rows
from geneva.storage.lance.transactions import CompactionHistory

_MAX_GENERATIONS = 64
"""How many compactions of compactions to follow."""


@dataclass(frozen=True, slots=True)
class Validity:
    """What is known of a computation's values in one fragment."""

    right: RowSet
    """Rows whose value was made by this version of the function from the present inputs."""
    reason: Reason
    """Why the others are not right."""
    undecided: RowSet
    """Rows that files and history say nothing about."""
    failed: RowSet
    """Rows on which this version of the function failed, given the present inputs."""
    supplied: RowSet
    """Rows whose value a person wrote, and which no receipt is for."""
    unproven: RowSet
    """Rows with a value from before the column had receipts."""
    unsealed: RowSet
    """Right rows that have no receipt yet."""
    stale: RowSet
    """Rows whose receipt is of other inputs, or of another version of the function."""
    made_from: frozenset[str] = frozenset()
    """The input signatures, as file names have them, that right values were computed from."""
    checked_rows: int = 0
    """Rows whose receipts were read."""

    @classmethod
    def nothing(cls, size: int, reason: Reason) -> Validity:
        """No row is right, and that is certain."""
        none = RowSet.empty(size)
        return cls(none, reason, none, none, none, none, none, none)

    @classmethod
    def unknown(cls, size: int) -> Validity:
        """Nothing can be said without looking at the rows."""
        return replace(cls.nothing(size, Reason.PARTIAL), undecided=RowSet.full(size))

    def to_text(self) -> str:
        """What a worker sends back."""
        sets = {name: getattr(self, name).encode() for name in _ROW_SETS}
        return json.dumps({**sets, "reason": self.reason.value, "checked_rows": self.checked_rows})

    @classmethod
    def from_text(cls, text: str) -> Validity:
        """What `to_text` wrote."""
        found: dict[str, Any] = json.loads(text)
        found |= {name: RowSet.decode(found[name]) for name in _ROW_SETS}
        return cls(**{**found, "reason": Reason(found["reason"])})

    def without(self, stale: RowSet) -> Validity:
        """The same after inputs of some rows changed."""
        if not stale:
            return self
        return replace(
            self,
            right=self.right.minus(stale),
            reason=Reason.INPUT_CHANGED,
            failed=self.failed.minus(stale),
            unsealed=self.unsealed.minus(stale),
        )

    def joined(self, looked: Validity) -> Validity:
        """Add what a look at the undecided rows has shown."""
        reason = self.reason if looked.reason is Reason.UP_TO_DATE else looked.reason
        return Validity(
            right=self.right.union(looked.right),
            reason=reason,
            undecided=looked.undecided,
            failed=self.failed.union(looked.failed),
            supplied=self.supplied.union(looked.supplied),
            unproven=self.unproven.union(looked.unproven),
            unsealed=self.unsealed.union(looked.unsealed),
            stale=self.stale.union(looked.stale),
            made_from=self.made_from,
            checked_rows=self.checked_rows + looked.checked_rows,
        )


_ROW_SETS = tuple(
    name for name, found in Validity.__dataclass_fields__.items() if found.type == "RowSet"
)


def signature_of(computation: Computation, fragment: FragmentFacts) -> tuple[str, ...]:
    """What the values of a fragment are computed from now: files and fields, or a source."""
    if computation.source is not None:
        return (computation.source.signature,)
    return input_signature(fragment, [found.field_ids for found in computation.inputs])


def adoption_signature(computation: Computation, fragment: FragmentFacts) -> tuple[str, ...]:
    """What receipts are of that stand in another file than their values: of those values too."""
    values = (f"values:{file.path}" for file in fragment.files_of(computation.output_ids))
    return (*signature_of(computation, fragment), *sorted(values))


def output_file(computation: Computation, fragment: FragmentFacts) -> str | None:
    """The file that holds the values; several, for a struct that grew, as one text."""
    return "\n".join(file.path for file in fragment.files_of(computation.output_ids)) or None


class ValidityReader:
    """Judges the values of one computation at one version of a table."""

    def __init__(
        self,
        dataset: lance.LanceDataset,
        snapshot: TableSnapshot,
        computation: Computation,
        *,
        reads_values: bool = False,
    ) -> None:
        """Open nothing yet: most fragments are judged by the names of their files.

        `reads_values`: compare receipts with values also where nobody can have written others.
        """
        self._reads_values = reads_values
        self._null_structs = file_version(dataset) >= (2, 1)
        self._dataset, self._snapshot, self._computation = dataset, snapshot, computation
        self._ref: TableRef = snapshot.ref
        self._known: dict[tuple[object, ...], Validity] = {}

    @cached_property
    def _history(self) -> CompactionHistory:
        return CompactionHistory(self._dataset)

    @cached_property
    def _inputs(self) -> InputReader:
        return InputReader(self._dataset, self._computation, skip_missing=True)

    # ---------------------------------------------------------------- by identity, and by history

    def by_files(self, fragment: FragmentFacts, generation: int = 0) -> Validity:
        """What files and history say; the rows that they say nothing about are undecided."""
        key = (fragment.id, fragment.files, fragment.physical_rows)
        if key not in self._known:
            self._known[key] = self._by_identity(fragment) or self._by_history(fragment, generation)
        return self._known[key]

    def _by_identity(self, fragment: FragmentFacts) -> Validity | None:
        computation, rows = self._computation, fragment.physical_rows
        values = fragment.files_of(computation.output_ids)
        if not values:
            return Validity.nothing(rows, Reason.NEW)
        receipt = computation.receipt
        receipts = fragment.files_of(receipt.field_ids) if receipt is not None else ()
        files = receipts or values
        if len(files) != 1:
            return None
        found = parse_file_name(files[0].path)
        wanted = self._wanted_name(fragment, together=files == values)
        if found is None or found.column != wanted.column:
            return None
        sealed = bool(receipts) or (receipt is None and computation.mark is not None)
        if found.udf != wanted.udf:
            # Some rows of a part may be of this version: those that were kept.
            alone = found.complete and files == values
            return Validity.nothing(rows, Reason.UDF_CHANGED) if alone else None
        if found.inputs != wanted.inputs and computation.source is None:
            return None
        made_from = frozenset((found.inputs,))
        if found.complete:
            right = RowSet.full(rows)
            return replace(
                Validity.nothing(rows, Reason.UP_TO_DATE),
                right=right,
                unsealed=RowSet.empty(rows) if sealed else right,
                made_from=made_from,
            )
        return self._by_provenance(files[0].path, rows, made_from, sealed=sealed)

    def _wanted_name(self, fragment: FragmentFacts, *, together: bool) -> NamedProvenance:
        computation = self._computation
        signature = signature_of if together else adoption_signature
        return named(computation.id, computation.version, signature(computation, fragment))

    def _by_provenance(
        self, path: str, rows: int, made_from: frozenset[str], *, sealed: bool
    ) -> Validity | None:
        provenance = read_provenance(self._ref, path)
        if provenance is None or provenance.valid.size != rows:
            return None
        none = RowSet.empty(rows)
        failed = provenance.failed or none
        return Validity(
            right=provenance.valid,
            reason=Reason.PARTIAL,
            undecided=RowSet.full(rows).minus(provenance.valid).minus(failed),
            failed=failed,
            supplied=none,
            unproven=none,
            unsealed=none if sealed else provenance.valid,
            stale=none,
            made_from=made_from,
        )

    def _by_history(self, fragment: FragmentFacts, generation: int) -> Validity:
        """Rows that a compaction copied, out of fragments that are wholly right or wholly not."""
        unknown = Validity.unknown(fragment.physical_rows)
        fields = {*self._computation.written_ids}
        fields.update(i for found in self._computation.inputs for i in found.field_ids)
        files = fragment.files_of(fields)
        compaction = self._history.of_file(files[0].path) if files else None
        if compaction is None or generation >= _MAX_GENERATIONS:
            return unknown
        start = 0
        for child in compaction.children:
            if any(file.path == files[0].path for file in child.files):
                break
            start += child.physical_rows
        if child.files_of(fields) != files or child.physical_rows != fragment.physical_rows:
            # Something was written into it since.
            return unknown
        if _held(child, fields) != frozenset().union(
            *(_held(p, fields) for p in compaction.parents)
        ):
            # A column was dropped before it, and its field's id may have been given away since.
            return unknown
        judged = [self.by_files(parent, generation + 1) for parent in compaction.parents]
        parents = list(zip(compaction.parents, judged, strict=True))
        if any(v.undecided or v.failed or not _is_uniform(p, v) for p, v in parents):
            return unknown
        own = slice(start, start + fragment.physical_rows)
        right = _copied([(p, v.right) for p, v in parents])[own]
        unsealed = _copied([(p, v.unsealed) for p, v in parents])[own]
        if len(right) != fragment.physical_rows:
            return unknown
        reasons = [v.reason for v in judged if not v.right.is_full] or [Reason.UP_TO_DATE]
        return replace(
            Validity.nothing(fragment.physical_rows, reasons[0]),
            right=RowSet.from_mask(right),
            unsealed=RowSet.from_mask(unsealed),
            made_from=frozenset().union(*(v.made_from for v in judged)),
        )

    # --------------------------------------------------------------------------------- by receipt

    def by_receipt(self, fragment: FragmentFacts, rows: RowSet) -> Validity:
        """Look at the receipts and inputs of some live rows. Each of them gets decided."""
        if self._computation.receipt is None:
            return self._by_value(fragment, rows)
        written = self._read_written(fragment)
        wanted = rows.mask()
        fits = np.zeros(fragment.physical_rows, dtype=np.bool_)
        former = 0
        to_check = np.flatnonzero(wanted & written.present)
        for offsets, batch in self._read_inputs(fragment, to_check):
            same = self._fits(written, offsets, batch, self._computation.version)
            fits[offsets] = same
            former += self._former_rows(written, offsets[~same], batch, ~same)
        intact = written.intact & ~written.failed
        supplied = wanted & written.supplied
        unproven = np.zeros(len(wanted), dtype=np.bool_)
        if self._computation.older_than_receipts:
            unproven = supplied & ~written.present
            supplied = supplied & ~unproven
        right = fits & intact
        stale = wanted & written.present & (written.intact & ~fits)
        none = RowSet.empty(fragment.physical_rows)
        return Validity(
            right=RowSet.from_mask(right),
            reason=self._reason(fragment, stale, former, wanted & ~right & ~supplied & ~unproven),
            undecided=none,
            failed=RowSet.from_mask(fits & written.failed),
            supplied=RowSet.from_mask(supplied),
            unproven=RowSet.from_mask(unproven),
            unsealed=none,
            stale=RowSet.from_mask(stale),
            checked_rows=rows.count,
        )

    def _reason(self, fragment: FragmentFacts, stale: Mask, former: int, not_right: Mask) -> Reason:
        if former:
            return Reason.UDF_CHANGED
        if stale.any():
            return Reason.INPUT_CHANGED
        if not not_right.any():
            return Reason.UP_TO_DATE
        receipt = self._computation.receipt
        ours = receipt is not None and fragment.files_of(receipt.field_ids)
        return Reason.PARTIAL if ours else Reason.NULL

    def input_digests(self, fragment: FragmentFacts, rows: Offsets) -> Digests:
        """The digests of the present inputs of some rows, as receipts have them."""
        digests = np.zeros(len(rows), dtype=np.uint64)
        at = 0
        seed = self._computation.receipt_seed()
        for offsets, batch in self._read_inputs(fragment, rows):
            digests[at : at + len(offsets)] = digest_rows(batch.columns, seed, len(offsets))
            at += len(offsets)
        return digests

    def _fits(
        self, written: Written, offsets: Offsets, batch: pa.RecordBatch, version: str
    ) -> Mask:
        seed = self._computation.receipt_seed(version)
        digests = digest_rows(batch.columns, seed, len(offsets))
        return input_part(written.bits[offsets]) == input_part(digests)

    def _former_rows(
        self, written: Written, offsets: Offsets, batch: pa.RecordBatch, stale: Mask
    ) -> int:
        """How many stale rows are as an earlier version of the function left them."""
        versions = self._computation.former_versions
        if not versions or not len(offsets):
            return 0
        rows = batch.take(pa.array(np.flatnonzero(stale)))
        return sum(int(np.count_nonzero(self._fits(written, offsets, rows, v))) for v in versions)

    def _read_inputs(
        self, fragment: FragmentFacts, offsets: Offsets
    ) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        computation = self._computation
        paths = (SOURCE_ROW_ID,) if computation.source is not None else computation.input_paths
        rows = RowRange(0, fragment.physical_rows)
        if len(offsets):
            rows = RowRange(int(offsets[0]), int(offsets[-1]) + 1)
        window = self._window(fragment, paths)
        if fragment.source_ids is not None:
            return self._inputs.read_placeholders(fragment.source_ids, offsets, window)
        return self._inputs.read(fragment.id, offsets, rows, window)

    def _window(self, fragment: FragmentFacts, paths: tuple[str, ...]) -> int:
        field_ids = [i for path in paths for i in self._snapshot.field_ids[path]]
        sizes = size_of_inputs(fragment, field_ids)
        return window_rows(self._snapshot.schema, paths, sizes, fragment.physical_rows)

    def _read_written(self, fragment: FragmentFacts) -> Written:
        """The receipts of a fragment; with its values, where somebody may have written some."""
        receipt = self._computation.receipt
        assert receipt is not None
        names = [output.name for output in self._computation.outputs]
        receipts = fragment.files_of(receipt.field_ids)
        together = receipts == fragment.files_of(self._computation.output_ids)
        name = parse_file_name(receipts[0].path) if len(receipts) == 1 else None
        if together and name is not None and name.complete and not self._reads_values:
            # All of it was computed or adopted then, and nobody wrote a value since.
            scanned = self._scan(fragment, [receipt.name])
            return joined_receipts([read_receipts(b.column(0), None) for b in scanned])
        parts: list[Written] = []
        for batch in self._scan(fragment, [*names, receipt.name] if receipts else names):
            own = batch.columns[: len(names)]
            found = batch.columns[-1] if receipts else pa.nulls(batch.num_rows, RECEIPT_TYPE)
            parts.append(read_receipts(found, own, null_structs=self._null_structs))
        return joined_receipts(parts)

    def _scan(self, fragment: FragmentFacts, paths: list[str]) -> Iterator[pa.RecordBatch]:
        where = (self._dataset, fragment.id, paths, RowRange(0, fragment.physical_rows))
        window = fitting_window(*where, self._window(fragment, tuple(paths)))
        for _, batch in read_windows(*where, window):
            yield batch

    def _by_value(self, fragment: FragmentFacts, rows: RowSet) -> Validity:
        """Without receipts: what has a value is unproven, or filled where a mark says so."""
        computation = self._computation
        mark = computation.mark
        names = [mark.name] if mark is not None else [o.name for o in computation.outputs]
        present = np.zeros(fragment.physical_rows, dtype=np.bool_)
        at = 0
        for batch in self._scan(fragment, names):
            there = np.zeros(batch.num_rows, dtype=np.bool_)
            for column in batch.columns:
                flags = column.fill_null(False) if mark is not None else column.is_valid()
                there |= np.asarray(flags)
            present[at : at + batch.num_rows] = there
            at += batch.num_rows
        found = RowSet.from_mask(present & rows.mask())
        judged = Validity.nothing(fragment.physical_rows, Reason.PARTIAL)
        if mark is not None:
            return replace(judged, right=found)
        if computation.older_than_receipts:
            return replace(judged, unproven=found, checked_rows=rows.count)
        return replace(judged, supplied=found, checked_rows=rows.count)


def _held(fragment: FragmentFacts, fields: Iterable[int]) -> frozenset[int]:
    """Which of some fields a fragment has files for."""
    wanted = frozenset(fields)
    return frozenset(i for file in fragment.files for i in file.fields if i in wanted)


def _is_uniform(fragment: FragmentFacts, validity: Validity) -> bool:
    """Whether it is known which of the live rows are right: all or none, or no row is deleted."""
    sets = (validity.right, validity.unsealed)
    return not fragment.deleted_rows or all(found.is_full or not found for found in sets)


def _copied(parts: list[tuple[FragmentFacts, RowSet]]) -> Mask:
    """Sets of rows of several fragments as a compaction copies them: live rows, in order."""
    masks = [
        np.full(fragment.live_rows, bool(rows), dtype=np.bool_)
        if fragment.deleted_rows
        else rows.mask()
        for fragment, rows in parts
    ]
    return np.concatenate(masks) if masks else np.zeros(0, dtype=np.bool_)

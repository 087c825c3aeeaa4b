"""Proving which values of a computation are right, in one of three ways, cheapest first.

By identity: the files of inputs and values are those that a file of ours names: nothing is read. By
history: a compaction copied such rows, by its own transaction: nothing is read. By receipt: the
receipts of these very rows are compared with their inputs as they are now. Nothing is guessed, and
no user code runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import lance
import numpy as np
import pyarrow as pa

from geneva.model.computation import Computation, Load, mixed_version
from geneva.model.digests import Digests, digest_rows
from geneva.model.rows import Mask, Offsets, RowRange, RowSet
from geneva.model.tables import Reason, TableRef
from geneva.model.view_query import SOURCE_ROW_ID
from geneva.storage.columns.inputs import InputReader
from geneva.storage.columns.provenance import (
    NamedProvenance,
    adoption_signature,
    named,
    named_inputs,
    parse_file_name,
    provenance_at,
    signature_of,
)
from geneva.storage.columns.receipts import (
    RECEIPT_TYPE,
    StoredReceipts,
    concat_receipts,
    input_part,
    read_receipts,
)
from geneva.storage.columns.validity import Validity, ValueState
from geneva.storage.lance.dataset import (
    FileFacts,
    FragmentFacts,
    TableSnapshot,
    file_uri,
    file_version,
)
from geneva.storage.lance.fragments import (
    RowTaker,
    fitting_window,
    read_windows,
    size_of_inputs,
    window_rows,
)
from geneva.storage.lance.transactions import Compaction, CompactionHistory
from geneva.storage.lance.values import equal_rows

_MAX_GENERATIONS = 64
"""How many compactions of compactions to follow."""


@lru_cache(maxsize=1_024)
def _whole(size: int, state: ValueState, made_from: frozenset[str]) -> Validity:
    """Every row is right. One record serves all fragments of a size: a table has many."""
    return Validity(size, Reason.UP_TO_DATE, {state: RowSet.full(size)}, made_from)


class ValidityReader:
    """Finds out which values of one computation are right, at one version of a table."""

    def __init__(
        self,
        dataset: lance.LanceDataset,
        snapshot: TableSnapshot,
        computation: Computation,
        *,
        group: Computation | None = None,
        reads_values: bool = False,
        lost_files: frozenset[str] = frozenset(),
    ) -> None:
        """Open nothing yet: for most fragments the names of their files are enough.

        The computation has one output, or several that are judged together; `group` is the one that
        it is a facet of. `reads_values`: compare receipts with values also where nobody can have
        written others. `lost_files`: what is in these is gone.
        """
        self._lost_files = lost_files
        self._group = group or computation
        self._reads_values = reads_values
        self._null_structs = file_version(dataset) >= (2, 1)
        self._dataset, self._snapshot, self._computation = dataset, snapshot, computation
        self._ref: TableRef = snapshot.ref
        self._copied_from: dict[FragmentFacts, Validity] = {}
        """What is known of fragments that a compaction has merged, by several of its results."""

    @property
    def computation(self) -> Computation:
        """What is judged."""
        return self._computation

    @cached_property
    def _history(self) -> CompactionHistory:
        return CompactionHistory(self._dataset)

    @cached_property
    def _inputs(self) -> InputReader:
        return InputReader(self._dataset, self._computation, skip_missing=True)

    # ---------------------------------------------------------------- by identity, and by history

    def by_files(self, fragment: FragmentFacts, generation: int = 0) -> Validity:
        """What files and history say; the rows that they say nothing about are undecided."""
        return self._by_identity(fragment) or self._by_history(fragment, generation)

    def _by_identity(self, fragment: FragmentFacts) -> Validity | None:
        computation, rows = self._computation, fragment.physical_rows
        values = fragment.files_of(self._value_ids)
        if not values:
            return Validity(rows, Reason.NEW)
        if self._are_lost(values):
            return Validity(rows, Reason.LOST)
        receipts = self._receipt_files(fragment)
        files = receipts or values
        found = parse_file_name(files[0].path) if len(files) == 1 else None
        own = self._own_name
        if found is None or found.column != own.column:
            return None
        if found.udf not in self._right_names:
            # Some rows of a part, or of a mixture, may be of this version: those that were kept.
            alone = found.complete and files == values and not found.may_be_mixed
            stale = {ValueState.STALE: RowSet.full(rows)}
            return Validity(rows, Reason.UDF_CHANGED, stale) if alone else None
        if computation.source is None and found.inputs != self._named_inputs(
            fragment, together=files == values
        ):
            return None
        has_proof = receipts or not computation.runs_user_code
        right = ValueState.RIGHT if has_proof else ValueState.WITHOUT_RECEIPT
        made_from = frozenset[str]() if computation.source is None else frozenset((found.inputs,))
        if found.complete:
            return _whole(rows, right, made_from)
        alone = found.udf == own.udf and not computation.kept_versions
        return self._by_provenance(files[0], rows, right, made_from, own_failures=alone)

    @cached_property
    def _right_names(self) -> frozenset[str]:
        """How files name the versions, and the mixtures of them, whose values are right."""
        kept = self._computation.kept_versions
        every = (*kept, self._computation.version)
        mixtures = (mixed_version(every[: i + 1]) for i in range(len(every)))
        return frozenset(named("", version, ()).udf for version in (*every, *mixtures))

    @cached_property
    def _value_ids(self) -> frozenset[int]:
        return frozenset(self._computation.output_ids)

    @cached_property
    def _receipt_ids(self) -> frozenset[int]:
        return frozenset(i for receipt in self._computation.receipts for i in receipt.field_ids)

    def _receipt_files(self, fragment: FragmentFacts) -> tuple[FileFacts, ...]:
        """The files of the receipts; none where they are gone, as if nobody had written any.

        So values of which only the receipts are gone count as supplied: a person's are among them.
        """
        files = fragment.files_of(self._receipt_ids)
        return () if self._are_lost(files) else files

    def _are_lost(self, files: Iterable[FileFacts]) -> bool:
        return any(file.path in self._lost_files for file in files)

    @cached_property
    def _own_name(self) -> NamedProvenance:
        """How a file names the column and this version; inputs are another matter."""
        return named(self._computation.id, self._computation.file_version, ())

    def _named_inputs(self, fragment: FragmentFacts, *, together: bool) -> str:
        """How a file names the present inputs of a fragment."""
        if together:
            return named_inputs(signature_of(self._computation, fragment))
        file = next(iter(self._receipt_files(fragment)), None)
        there = file.fields if file is not None else frozenset[int]()
        pairs = zip(self._group.outputs, self._group.receipts, strict=False)
        fields = [
            i for output, r in pairs if there.issuperset(r.field_ids) for i in output.field_ids
        ]
        return named_inputs(adoption_signature(self._computation, fragment, fields))

    def _by_provenance(
        self,
        file: FileFacts,
        size: int,
        right: ValueState,
        made_from: frozenset[str],
        *,
        own_failures: bool,
    ) -> Validity | None:
        uri = file_uri(self._ref, self._dataset, file)
        provenance = provenance_at(uri, self._ref.storage_options)
        if provenance is None or provenance.valid.size != size:
            return None
        failed = provenance.failed if own_failures else None
        failed = failed or RowSet.empty(size)
        rows = {
            right: provenance.valid,
            ValueState.FAILED: failed,
            ValueState.UNDECIDED: RowSet.full(size).minus(provenance.valid).minus(failed),
        }
        return Validity(size, Reason.PARTIAL, rows, made_from)

    def _by_history(self, fragment: FragmentFacts, generation: int) -> Validity:
        """Rows that a compaction copied, out of fragments that are wholly right or wholly not."""
        size = fragment.physical_rows
        found = self._pure_copy(fragment) if generation < _MAX_GENERATIONS else None
        if found is None:
            return Validity.unknown(size)
        compaction, start = found
        parents = [(p, self._before_copy(p, generation + 1)) for p in compaction.parents]
        if not all(_is_uniform(parent, validity) for parent, validity in parents):
            return Validity.unknown(size)
        copied = {
            state: _copied([(p, v.rows_in(state)) for p, v in parents])[start : start + size]
            for state in (ValueState.RIGHT, ValueState.WITHOUT_RECEIPT, ValueState.STALE)
        }
        if any(len(mask) != size for mask in copied.values()):
            return Validity.unknown(size)
        reasons = [v.reason for _, v in parents if not v.right.is_full] or [Reason.UP_TO_DATE]
        return Validity(
            size=size,
            reason=reasons[0],
            rows={state: RowSet.from_mask(mask) for state, mask in copied.items()},
            made_from=frozenset().union(*(v.made_from for _, v in parents)),
        )

    def _before_copy(self, parent: FragmentFacts, generation: int) -> Validity:
        if parent not in self._copied_from:
            self._copied_from[parent] = self.by_files(parent, generation)
        return self._copied_from[parent]

    def _pure_copy(self, fragment: FragmentFacts) -> tuple[Compaction, int] | None:
        """The compaction that wrote a fragment's values and inputs, and its first row in that.

        None when there is none, or when something was written into the fragment since.
        """
        fields = {*self._computation.written_ids}
        fields.update(i for found in self._computation.inputs for i in found.field_ids)
        files = fragment.files_of(fields)
        compaction = self._history.of_file(files[0].path) if files else None
        if compaction is None:
            return None
        start = 0
        for child in compaction.children:
            if any(file.path == files[0].path for file in child.files):
                break
            start += child.physical_rows
        if child.files_of(fields) != files or child.physical_rows != fragment.physical_rows:
            return None
        before = frozenset().union(*(_held(parent, fields) for parent in compaction.parents))
        # Otherwise a column was dropped before it, whose field id may have been given away since.
        return (compaction, start) if _held(child, fields) == before else None

    # --------------------------------------------------------------------------------- by receipt

    def by_receipt(self, fragment: FragmentFacts, rows: RowSet) -> Validity:
        """Compare the receipts of some live rows with their inputs. Each of them gets decided."""
        return check_receipts([self], fragment, [rows])[0]

    def receipt_check(self, fragment: FragmentFacts, rows: RowSet) -> _ReceiptCheck:
        """Read the receipts of some rows; the inputs are for the caller to read."""
        wanted = rows.mask()
        stored = self._read_stored(fragment)
        size = fragment.physical_rows
        return _ReceiptCheck(
            computation=self._computation,
            stored=stored,
            wanted=wanted,
            to_check=wanted & stored.present,
            fits=np.zeros(size, dtype=np.bool_),
            kept=np.zeros(size, dtype=np.bool_),
        )

    def decided(self, fragment: FragmentFacts, check: _ReceiptCheck) -> Validity:
        """What a check has shown, when all inputs were compared."""
        stored, wanted, fits, kept = check.stored, check.wanted, check.fits, check.kept
        right = (fits | kept) & stored.intact & ~stored.failed
        supplied = wanted & stored.supplied
        if self._computation.source is not None:
            # A view's values are its query's: what a person wrote there is to be computed.
            supplied &= bool(self._computation.older_than_receipts) & ~stored.present
        failed_before = wanted & stored.failed & ~fits
        stale = wanted & stored.present & stored.intact & ~(fits | kept)
        is_unproven = self._computation.older_than_receipts & ~stored.present
        masks = {
            ValueState.RIGHT: right,
            ValueState.FAILED: fits & stored.failed,
            ValueState.FAILED_BEFORE: failed_before,
            ValueState.SUPPLIED: supplied & ~is_unproven,
            ValueState.UNPROVEN: supplied & is_unproven,
            ValueState.STALE: stale & ~failed_before,
            ValueState.EMPTIED: wanted & stored.emptied,
        }
        return Validity(
            size=fragment.physical_rows,
            reason=self._reason(fragment, masks, check.former, wanted & ~right & ~supplied),
            rows={state: RowSet.from_mask(mask) for state, mask in masks.items()},
            checked_rows=int(np.count_nonzero(wanted)),
        )

    def _reason(
        self,
        fragment: FragmentFacts,
        masks: Mapping[ValueState, Mask],
        former: int,
        not_right: Mask,
    ) -> Reason:
        if former:
            return Reason.UDF_CHANGED
        if masks[ValueState.STALE].any() or masks[ValueState.FAILED_BEFORE].any():
            return Reason.INPUT_CHANGED
        if not not_right.any():
            return Reason.UP_TO_DATE
        if masks[ValueState.EMPTIED].any():
            return Reason.NULL
        return Reason.PARTIAL if self._receipt_files(fragment) else Reason.NULL

    def input_digests(
        self, fragment: FragmentFacts, rows: Offsets, version: str | None = None
    ) -> Digests:
        """The digests of the present inputs of some rows, as receipts have them.

        `version`: of another version of the function.
        """
        digests = np.zeros(len(rows), dtype=np.uint64)
        at = 0
        seed = self._computation.receipt_seed(version)
        for offsets, batch in self.read_inputs(fragment, rows):
            digests[at : at + len(offsets)] = digest_rows(
                self._computation.receipted(batch), seed, len(offsets)
            )
            at += len(offsets)
        return digests

    def read_inputs(
        self, fragment: FragmentFacts, offsets: Offsets
    ) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        """The present inputs of some rows of a fragment, part by part."""
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

    def _read_stored(self, fragment: FragmentFacts) -> StoredReceipts:
        """The receipts of a fragment; with its values, where somebody may have written some."""
        (receipt,) = self._computation.receipts
        names = [output.name for output in self._computation.outputs]
        receipts = self._receipt_files(fragment)
        together = receipts == fragment.files_of(self._computation.output_ids)
        name = parse_file_name(receipts[0].path) if len(receipts) == 1 else None
        if together and name is not None and name.complete and not self._reads_values:
            # All of it was computed or adopted then, and nobody wrote a value since.
            scanned = self._scan(fragment, [receipt.name])
            return concat_receipts([read_receipts(b.column(0), None) for b in scanned])
        parts: list[StoredReceipts] = []
        for batch in self._scan(fragment, [*names, receipt.name] if receipts else names):
            own = batch.columns[: len(names)]
            found = batch.columns[-1] if receipts else pa.nulls(batch.num_rows, RECEIPT_TYPE)
            parts.append(read_receipts(found, own, null_structs=self._null_structs))
        return concat_receipts(parts)

    def _scan(self, fragment: FragmentFacts, paths: list[str]) -> Iterator[pa.RecordBatch]:
        where = (self._dataset, fragment.id, paths, RowRange(0, fragment.physical_rows))
        window = fitting_window(*where, self._window(fragment, tuple(paths)))
        for _, batch in read_windows(*where, window):
            yield batch

    def by_value(self, fragment: FragmentFacts, rows: RowSet) -> Validity:
        """Without receipts: what has a value is unproven, or right where the source has it."""
        computation = self._computation
        if isinstance(computation.program, Load):
            # Whatever stands there: that it is what the source has is for a file to say.
            return Validity(fragment.physical_rows, Reason.PARTIAL)
        flag = computation.filled_flag
        names = [flag.name] if flag is not None else [o.name for o in computation.outputs]
        present = np.zeros(fragment.physical_rows, dtype=np.bool_)
        start = 0
        for batch in self._scan(fragment, names):
            there = np.zeros(batch.num_rows, dtype=np.bool_)
            for column in batch.columns:
                flags = column.fill_null(False) if flag is not None else column.is_valid()
                there |= np.asarray(flags)
            present[start : start + batch.num_rows] = there
            start += batch.num_rows
        found = RowSet.from_mask(present & rows.mask())
        size = fragment.physical_rows
        if flag is not None:
            same = self._same_as_source(fragment, found.offsets())
            return Validity(size, Reason.PARTIAL, {ValueState.RIGHT: same})
        older = computation.older_than_receipts
        state = ValueState.UNPROVEN if older else ValueState.SUPPLIED
        return Validity(size, Reason.PARTIAL, {state: found}, checked_rows=rows.count)

    def _same_as_source(self, fragment: FragmentFacts, rows: Offsets) -> RowSet:
        """The rows among some whose values are those of their row in the source."""
        flag = self._computation.filled_flag
        carried = [output for output in self._computation.outputs if output != flag]
        same = np.zeros(fragment.physical_rows, dtype=np.bool_)
        if not carried:
            same[rows] = True
            return RowSet.from_mask(same)
        taker = RowTaker(self._dataset, fragment.id, [output.name for output in carried])
        for offsets, batch in self.read_inputs(fragment, rows):
            own = taker.take(offsets)
            equal = np.ones(len(offsets), dtype=np.bool_)
            for i, output in enumerate(carried):
                equal &= equal_rows(own.column(i), batch.column(output.name))
            same[offsets] = equal
        return RowSet.from_mask(same)


@dataclass(slots=True)
class _ReceiptCheck:
    """The receipts of one output in a fragment, while they are compared with its inputs."""

    computation: Computation
    stored: StoredReceipts
    wanted: Mask
    """The rows that are asked about."""
    to_check: Mask
    """Those of them that have a receipt."""
    fits: Mask
    """Rows whose receipt fits their inputs, by this version of the function."""
    kept: Mask
    """The same by a version whose values are kept."""
    former: int = 0
    """How many others an earlier version has left."""

    def compare(self, inputs: _InputDigests) -> None:
        """Compare some rows with their inputs."""
        own = self.to_check[inputs.offsets]
        offsets, bits = inputs.offsets[own], input_part(self.stored.bits[inputs.offsets[own]])
        versions = self.computation
        self.fits[offsets] = bits == inputs.of(versions.version)[own]
        for version in versions.kept_versions:
            self.kept[offsets] |= bits == inputs.of(version)[own]
        left = self.stored.intact[offsets] & ~(self.fits[offsets] | self.kept[offsets])
        if left.any():
            for version in versions.former_versions:
                found = bits[left] == inputs.of(version)[own][left]
                self.former += int(np.count_nonzero(found))


class _InputDigests:
    """The digests of inputs as receipts have them, made once for all outputs that need them."""

    def __init__(self, computation: Computation, offsets: Offsets, batch: pa.RecordBatch) -> None:
        self._computation, self._batch = computation, batch
        self.offsets = offsets
        self._known: dict[str, Digests] = {}

    def of(self, version: str) -> Digests:
        """As a version of the function would have them."""
        if version not in self._known:
            seed = self._computation.receipt_seed(version)
            inputs = self._computation.receipted(self._batch)
            digests = digest_rows(inputs, seed, len(self.offsets))
            self._known[version] = input_part(digests)
        return self._known[version]


def readers_of(
    dataset: lance.LanceDataset,
    snapshot: TableSnapshot,
    computation: Computation,
    lost_files: frozenset[str] = frozenset(),
) -> tuple[ValidityReader, ...]:
    """What judges the outputs of a computation, one by one; `lost_files` are known to be gone."""
    return tuple(
        ValidityReader(dataset, snapshot, facet, group=computation, lost_files=lost_files)
        for facet in computation.facets
    )


def check_receipts(
    readers: Sequence[ValidityReader], fragment: FragmentFacts, rows: Sequence[RowSet]
) -> list[Validity]:
    """What receipts say of rows of each output of a computation. Inputs are read once for all.

    Of an output none of whose rows are asked about nothing is read: its file may be gone.
    """
    asked = [place for place, own in enumerate(rows) if own]
    checked = _checked([readers[i] for i in asked], fragment, [rows[i] for i in asked])
    found = dict(zip(asked, checked, strict=True))
    nothing = Validity(fragment.physical_rows, Reason.UP_TO_DATE)
    return [found.get(place, nothing) for place in range(len(rows))]


def _checked(
    readers: Sequence[ValidityReader], fragment: FragmentFacts, rows: Sequence[RowSet]
) -> list[Validity]:
    if not readers:
        return []
    first = readers[0]
    if not first.computation.receipts:
        return [r.by_value(fragment, own) for r, own in zip(readers, rows, strict=True)]
    checks = [r.receipt_check(fragment, own) for r, own in zip(readers, rows, strict=True)]
    to_check = np.flatnonzero(np.logical_or.reduce([check.to_check for check in checks]))
    for offsets, batch in first.read_inputs(fragment, to_check):
        inputs = _InputDigests(first.computation, offsets, batch)
        for check in checks:
            check.compare(inputs)
    return [r.decided(fragment, check) for r, check in zip(readers, checks, strict=True)]


def _held(fragment: FragmentFacts, fields: Iterable[int]) -> frozenset[int]:
    """Which of some fields a fragment has files for."""
    wanted = frozenset(fields)
    return frozenset().union(*(wanted & file.fields for file in fragment.files))


def _is_uniform(fragment: FragmentFacts, validity: Validity) -> bool:
    """Whether it is known which of the live rows are right: all or none, or no row is deleted."""
    if validity.undecided or validity.failed:
        return False
    return not fragment.deleted_rows or all(
        rows.is_full or not rows for rows in validity.rows.values()
    )


def _copied(parts: list[tuple[FragmentFacts, RowSet]]) -> Mask:
    """Sets of rows of several fragments as a compaction copies them: live rows, in order."""
    masks = [
        np.full(fragment.live_rows, bool(rows), dtype=np.bool_)
        if fragment.deleted_rows
        else rows.mask()
        for fragment, rows in parts
    ]
    return np.concatenate(masks) if masks else np.zeros(0, dtype=np.bool_)

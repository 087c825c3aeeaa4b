"""Results of rows that have moved since they were computed: found again, so that none runs twice.

A crash or a conflict leaves results behind for fragments that a compaction has rewritten, or for
rows that an update has moved. Where lineage tells which rows they are now, their values are taken
over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader

from geneva.model import ColumnDefinition, Reason, TableRef
from geneva.rows import Offsets, RowRange, RowSet
from geneva.storage.checkpoints import CheckpointKey, CheckpointStore, WorkIdentity, errors_of
from geneva.storage.dataset import FileFacts, FragmentFacts
from geneva.storage.fragments import Piece, concat
from geneva.storage.lineage import ColumnIdentity, LineageTracer, Verdict
from geneva.storage.provenance import read_provenance
from geneva.storage.staging import read_staged
from geneva.storage.transactions import VersionView

_MOST_GENERATIONS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Donor:
    """Values in a data file or a checkpoint, and the rows of a fragment that they belong to.

    `source` are rows of the data file, or the offsets that the checkpoint's addresses carry.
    """

    source: Offsets
    target: Offsets
    path: str | None = None
    key: str | None = None

    def moved(self, to: Offsets) -> Donor | None:
        """The same values for rows that moved: `to` gives each target's new offset, or -1."""
        target = to[self.target]
        kept = target >= 0
        if not kept.any():
            return None
        order = np.argsort(target[kept], kind="stable")
        return Donor(self.source[kept][order], target[kept][order], self.path, self.key)


def work_identity(
    ref: TableRef,
    definition: ColumnDefinition,
    where: str | None,
    verdict: Verdict,
    signature: Sequence[str],
    output_file: str | None,
) -> WorkIdentity:
    """What the work on a fragment is.

    Where old values are carried over, their file is a source too: so that a clause that is run
    again after its result was committed is new work, and one that is run again after a crash isn't.
    The column's UUID is one as well: a column that was dropped and added again is another one.
    """
    carries = output_file is not None and (
        where is not None or bool(verdict.valid) or verdict.reason is Reason.NULL
    )
    base = (output_file,) if carries and output_file else ()
    return WorkIdentity(
        udf_name=definition.udf_name,
        udf_version=definition.udf_version,
        column=definition.name,
        where=where or "",
        uri=ref.uri,
        source_files=(*signature, *base, f"column:{definition.uuid}"),
    )


@dataclass(frozen=True, slots=True)
class DonorSearch:
    """Looks for results of rows that moved."""

    ref: TableRef
    column: ColumnIdentity
    tracer: LineageTracer
    latest: VersionView
    store: CheckpointStore
    index: dict[tuple[str, int], list[CheckpointKey]]
    """The checkpoint store's keys, by prefix and fragment."""
    where: str | None
    own_files: frozenset[str]
    """Data files that this very job committed: right even for rows that were asked for again."""
    stale: Callable[[VersionView, FragmentFacts], RowSet] | None = None
    """Rows whose value is not right any more, which only their inputs' own table can tell."""
    known: dict[tuple[int, tuple[FileFacts, ...]], list[Donor]] = field(default_factory=dict)
    """Donors by fragment: many fragments have ancestors in common."""

    def find(self, view: VersionView, fragment: FragmentFacts, depth: int = 0) -> list[Donor]:
        """Donors for rows of a fragment, out of the fragments its rows came from."""
        key = (fragment.id, fragment.files)
        if key not in self.known:
            more = depth < _MOST_GENERATIONS
            self.known[key] = self._search(view, fragment, depth) if more else []
        return self.known[key]

    def _search(self, view: VersionView, fragment: FragmentFacts, depth: int) -> list[Donor]:
        donors: list[Donor] = []
        for origin in self.tracer.origins(view, fragment):
            to = np.full(origin.parent.physical_rows, -1, dtype=np.int64)
            to[origin.source] = origin.target
            found = [
                *self._unpublished(origin.view, origin.parent),
                *self._published_since(origin.parent),
                *self.find(origin.view, origin.parent, depth + 1),
            ]
            donors.extend(moved for donor in found if (moved := donor.moved(to)) is not None)
        return donors

    def _unpublished(self, view: VersionView, fragment: FragmentFacts) -> Iterator[Donor]:
        """Staged files and batch checkpoints of a fragment that is no longer there."""
        verdict = self._verdict(view, fragment)
        prefix = work_identity(
            self.ref,
            self.column.definition,
            self.where,
            verdict,
            self.column.signature(fragment),
            self.column.output_file(fragment),
        ).prefix()
        for key in self.index.get((prefix, fragment.id), ()):
            if key.rows is not None:
                rows = np.arange(key.rows.start, min(key.rows.end, fragment.physical_rows))
                yield Donor(rows, rows, key=key.path())
                continue
            staged = read_staged(self.store, self.ref, prefix, fragment.id)
            if staged is None or staged.column_uuid != self.column.definition.uuid:
                continue
            yield from self._of_file(staged.path, verdict.valid)

    def _verdict(self, view: VersionView, fragment: FragmentFacts) -> Verdict:
        verdict = self.tracer.verdict(view, fragment)
        stale = self.stale(view, fragment) if self.stale is not None else None
        if not stale:
            return verdict
        return Verdict(verdict.valid.minus(stale), Reason.INPUT_CHANGED, verdict.certain)

    def _published_since(self, fragment: FragmentFacts) -> Iterator[Donor]:
        """What was committed to a fragment after rows had moved out of it."""
        now = self.latest.fragment(fragment.id)
        if now is None or self.column.signature(now) != self.column.signature(fragment):
            return
        path = self.column.output_file(now)
        if path is None or path == self.column.output_file(fragment):
            return
        if self.where is None or path in self.own_files:
            yield from self._of_file(path, RowSet.empty(fragment.physical_rows))

    def _of_file(self, path: str, known_before: RowSet) -> Iterator[Donor]:
        provenance = read_provenance(self.ref, path)
        definition = self.column.definition
        if provenance is None or (provenance.column_uuid, provenance.udf_version) != (
            definition.uuid,
            definition.udf_version,
        ):
            return
        if self.column.source is not None and provenance.inputs != (self.column.source,):
            return
        rows = provenance.valid.minus(known_before).offsets()
        if len(rows):
            yield Donor(rows, rows, path=path)


def donated_rows(donors: Sequence[Donor], size: int) -> RowSet:
    """The rows of a fragment that donors have values for."""
    mask = np.zeros(size, dtype=np.bool_)
    for donor in donors:
        mask[donor.target] = True
    return RowSet.from_mask(mask)


def donors_within(donors: Sequence[Donor], rows: RowRange) -> tuple[Donor, ...]:
    """The donors' share of a range of the fragment."""
    shares = []
    for donor in donors:
        inside = (donor.target >= rows.start) & (donor.target < rows.end)
        if inside.any():
            share = Donor(donor.source[inside], donor.target[inside], donor.path, donor.key)
            shares.append(share)
    return tuple(shares)


@dataclass(slots=True)
class DonatedValues:
    """Reads donors' values, in the order of the rows they are for."""

    ref: TableRef
    store: CheckpointStore
    column: str
    kind: pa.DataType
    donors: list[_OpenDonor] = field(default_factory=list)

    def open(self, donors: Sequence[Donor], wanted: RowSet) -> RowSet:
        """Open what can still be read; return the wanted rows that will get a value from it."""
        left = wanted.mask()
        taken = np.zeros(wanted.size, dtype=np.bool_)
        for donor in donors:
            use = left[donor.target]
            if not use.any():
                continue
            opened = self._open(Donor(donor.source[use], donor.target[use], donor.path, donor.key))
            if opened is None:
                continue
            self.donors.append(opened)
            left[opened.target] = False
            taken[opened.target] = True
        return RowSet.from_mask(taken)

    def _open(self, donor: Donor) -> _OpenDonor | None:
        try:
            if donor.key is not None:
                batch = self.store[donor.key]
                values = batch.column(self.column)
                addresses = batch.column("_rowaddr").to_numpy()
                # A row that failed has no result to give away.
                bad = errors_of(batch)
                places = {int(a) & 0xFFFFFFFF: i for i, a in enumerate(addresses) if i not in bad}
                kept = np.array([int(s) in places for s in donor.source], dtype=np.bool_)
                rows = np.array([places[int(s)] for s in donor.source[kept]], dtype=np.int64)
                if values.type != self.kind or not len(rows):
                    return None
                return _OpenDonor(rows, donor.target[kept], self.kind, values, None)
            reader = LanceFileReader(
                f"{self.ref.uri}/data/{donor.path}",
                storage_options=self.ref.storage_options.plain(),
            )
            if int(reader.num_rows()) <= int(donor.source.max()):
                return None
            return _OpenDonor(donor.source, donor.target, self.kind, None, reader)
        except (KeyError, OSError, ValueError, RuntimeError):
            return None

    def between(self, start: int, end: int) -> Piece | None:
        """The donated values of rows [start, end); None when there are none."""
        parts = [p for donor in self.donors if (p := donor.between(start, end)) is not None]
        return merged(parts) if parts else None


@dataclass(frozen=True, slots=True, eq=False)
class _OpenDonor:
    source: Offsets
    target: Offsets
    kind: pa.DataType
    values: pa.Array | None
    reader: LanceFileReader | None

    def between(self, start: int, end: int) -> Piece | None:
        low, high = (int(i) for i in np.searchsorted(self.target, (start, end)))
        if low == high:
            return None
        rows, target = self.source[low:high], self.target[low:high]
        if self.values is not None:
            return Piece(target, self.values.take(pa.array(rows)))
        assert self.reader is not None
        # take_rows wants ascending rows; lineage keeps the order within a fragment, an update may
        # not.
        order = np.argsort(rows, kind="stable")
        table = self.reader.take_rows(rows[order].tolist(), batch_size=len(rows)).to_table()
        back = np.empty(len(rows), dtype=np.int64)
        back[order] = np.arange(len(rows))
        return Piece(target, self._as_values(table).take(pa.array(back)))

    def _as_values(self, table: pa.Table) -> pa.Array:
        """A file's values: its one column, or a struct of all those of a group."""
        columns = [concat(column.chunks) for column in table.columns]
        if len(columns) == 1 and columns[0].type == self.kind:
            return columns[0]
        fields = [self.kind.field(i) for i in range(self.kind.num_fields)]
        return pa.StructArray.from_arrays(columns, fields=fields)


def merged(pieces: Sequence[Piece]) -> Piece:
    """Several pieces as one, ascending."""
    if len(pieces) == 1:
        return pieces[0]
    offsets = np.concatenate([piece.offsets for piece in pieces])
    order = np.argsort(offsets, kind="stable")
    values = concat([piece.values for piece in pieces]).take(pa.array(order))
    return Piece(offsets[order], values)

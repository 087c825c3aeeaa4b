"""Results that were computed and not published: found again by their receipts.

A crash or a conflict leaves results behind, perhaps for rows that an update or a compaction has
moved since. Each result has a receipt, which says what it was computed from: a row whose inputs
have that digest takes it over, and the function is not called. One result serves one row, because
a function may give another value each time on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.file import LanceFileReader

from geneva.model.computation import RECEIPT_PREFIX, Computation
from geneva.model.digests import Digests
from geneva.model.rows import Mask, Offsets, RowRange, RowSet
from geneva.model.tables import TableRef
from geneva.storage.checkpoints.staging import read_record
from geneva.storage.checkpoints.store import DIGEST_COLUMN, CheckpointKey, CheckpointStore
from geneva.storage.columns.provenance import read_provenance
from geneva.storage.columns.receipts import input_part, is_failed, is_result, receipt_bits
from geneva.storage.columns.staged_files import StagedFile, staged_file_is_whole
from geneva.storage.lance.damage import is_damage
from geneva.storage.lance.fragments import RowTaker, read_windows
from geneva.storage.lance.pieces import Piece, concat, merged
from geneva.udf.picking import picked


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file of ours in the table's folder, whether it was published or not."""

    path: str


@dataclass(frozen=True, slots=True)
class BatchCheckpoint:
    """The results of a range of rows in the checkpoint store."""

    key: str


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """Rows of the table itself."""

    fragment_id: int


Origin: TypeAlias = DataFile | BatchCheckpoint | PublishedRows


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """Results whose values are taken over, and for which rows."""

    origin: Origin
    source: Offsets
    """Where they are in their origin: physical offsets, or places in the checkpoint."""
    target: Offsets
    """The rows of the fragment that they are for, ascending."""

    @property
    def fragment_id(self) -> int | None:
        """The fragment that they are in, if they are rows of the table itself."""
        return self.origin.fragment_id if isinstance(self.origin, PublishedRows) else None

    def within(self, rows: RowRange) -> Reuse | None:
        """The part of it that is for rows of a range."""
        inside = (self.target >= rows.start) & (self.target < rows.end)
        if not inside.any():
            return None
        return replace(self, source=self.source[inside], target=self.target[inside])


def reuse_within(found: Iterable[Reuse], rows: RowRange) -> tuple[Reuse, ...]:
    """What of several is for rows of a range."""
    parts = (reuse.within(rows) for reuse in found)
    return tuple(part for part in parts if part is not None)


def reused_rows(found: Iterable[Reuse], size: int) -> RowSet | None:
    """All rows of a fragment that a result is there for; None for none."""
    mask = np.zeros(size, dtype=np.bool_)
    for reuse in found:
        mask[reuse.target] = True
    return RowSet.from_mask(mask) if mask.any() else None


_WINDOW_ROWS = 65_536
_MAX_PAIRS = 2**30
"""Pairs of rows and results that may be compared by the 47 bits of a receipt: of so many, one in a
hundred thousand times two are taken for equal that are not. Whole digests know no such limit."""


class ResultIndex:
    """Unpublished results of one computation, to be looked up by the digest of their inputs."""

    def __init__(self, results: Iterable[Results], *, shared: bool = False) -> None:
        """Take all of them. `shared`: one result serves any number of rows."""
        self._shared = shared
        self._pairs = 0
        every = list(results)
        self._origins = [r.origin for r in every]
        receipts = _together([r.receipts for r in every], np.uint64)
        order = np.argsort(input_part(receipts), kind="stable")
        self._receipts = receipts[order]
        self._digests = _together([r.digests for r in every], np.uint64)[order]
        self._rows = _together([r.rows for r in every], np.int64)[order]
        owners = [np.full(len(r.rows), i) for i, r in enumerate(every)]
        self._owners = _together(owners, np.int64)[order]

    def __len__(self) -> int:
        """How many results are left."""
        return len(self._receipts)

    def drop(self, receipts: Digests, kept_files: Collection[str]) -> None:
        """Leave out results that stand in the table: one for each of these receipts.

        Those in `kept_files` stay: who asks has computed them.
        """
        files = {DataFile(path) for path in kept_files}
        kept = np.array([origin in files for origin in self._origins], dtype=np.bool_)
        order = np.flatnonzero(~kept[self._owners])
        order = order[np.argsort(self._receipts[order], kind="stable")]
        mine, taken = self._receipts[order], np.sort(receipts)
        count = np.searchsorted(taken, mine, "right") - np.searchsorted(taken, mine, "left")
        left = np.ones(len(self), dtype=np.bool_)
        left[order[_rank_among_equals(mine) < count]] = False
        self._keep(left)

    def _keep(self, left: Mask) -> None:
        self._receipts, self._digests = self._receipts[left], self._digests[left]
        self._rows, self._owners = self._rows[left], self._owners[left]

    def take(self, offsets: Offsets, digests: Digests) -> list[Reuse]:
        """Results for rows with these input digests; nobody else gets them."""
        wanted, known = input_part(digests), input_part(self._receipts)
        order = np.argsort(wanted, kind="stable")
        wanted = wanted[order]
        first = np.searchsorted(known, wanted, side="left")
        last = np.searchsorted(known, wanted, side="right")
        # Of several rows with the same inputs, each takes the next result.
        place = first if self._shared else first + _rank_among_equals(wanted)
        hit = np.flatnonzero(place < last)
        hit = hit[self._is_same(place[hit], digests[order[hit]], len(digests))]
        if not len(hit):
            return []
        chosen, targets = place[hit], offsets[order[hit]]
        found = []
        for owner in np.unique(self._owners[chosen]).tolist():
            own = self._owners[chosen] == owner
            by_target = np.argsort(targets[own], kind="stable")
            source, target = self._rows[chosen[own]][by_target], targets[own][by_target]
            found.append(Reuse(self._origins[owner], source, target))
        if not self._shared:
            left = np.ones(len(self), dtype=np.bool_)
            left[chosen] = False
            self._keep(left)
        return found

    def _is_same(self, places: Offsets, digests: Digests, rows: int) -> Mask:
        """Whether results that agree in 47 bits are of these very inputs."""
        unknown = self._digests == 0
        self._pairs += rows * int(np.count_nonzero(unknown))
        same: Mask = self._digests[places] == digests
        return same | unknown[places] if self._pairs <= _MAX_PAIRS else same


def _together(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _rank_among_equals(ordered: Digests) -> npt.NDArray[np.int64]:
    """For each of some ordered numbers: how many equal ones come before it."""
    if not len(ordered):
        return np.empty(0, dtype=np.int64)
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    lengths = np.diff(np.append(starts, len(ordered)))
    ranks: npt.NDArray[np.int64] = np.arange(len(ordered)) - np.repeat(starts, lengths)
    return ranks


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """The usable results of one origin, row by row."""

    origin: Origin
    rows: Offsets
    """Where they are in their origin."""
    receipts: Digests
    digests: Digests
    """The whole digests of the inputs; 0 where only a receipt is known."""
    failed: Mask
    """Where the function failed."""

    def without_failed(self) -> Results:
        """Those that have a value."""
        kept = ~self.failed
        return replace(
            self,
            rows=self.rows[kept],
            receipts=self.receipts[kept],
            digests=self.digests[kept],
            failed=self.failed[kept],
        )


def read_results(
    ref: TableRef,
    store: CheckpointStore,
    computation: Computation,
    keys: Iterable[CheckpointKey],
    own_files: Mapping[str, RowSet | None],
    *,
    with_failed: bool = True,
) -> ResultIndex:
    """The results under some checkpoint keys, and in data files that a job has committed.

    `own_files` says which rows of such a file are to be had; None: all that it was made for.
    That the function failed on a row is a result, too, unless it is to be tried again.
    """
    if not computation.receipt_names:
        return ResultIndex(())
    every = list(keys)
    staged = _staged_files(ref, store, computation, every)
    ranges = [key for key in every if key.rows is not None]
    # A checkpoint has the results of a call, and a file of several outputs may have older values of
    # some of them: where both are there, the checkpoint is read.
    files: dict[str, RowSet | None] = {
        file.path: _not_saved(file, place, ranges) for place, file in staged.items()
    }
    files.update(own_files)
    found = itertools.chain(
        _results_of_checkpoints(store, computation, ranges),
        _results_of_files(ref, computation, files),
    )
    return ResultIndex(found if with_failed else (r.without_failed() for r in found))


def _staged_files(
    ref: TableRef, store: CheckpointStore, computation: Computation, keys: Iterable[CheckpointKey]
) -> dict[tuple[str, int], StagedFile]:
    """The staged files of a computation that are there, per prefix and fragment."""
    wanted = {(key.prefix, key.fragment_id): key for key in keys if key.rows is None}
    records = {key.stored_at: key for key in wanted.values()}
    found = [item for key in records.values() for item in read_record(store, key).items()]
    return {
        place: staged
        for place, staged in found
        if place in wanted
        and staged.column_uuid == computation.id
        and staged_file_is_whole(ref, staged)
    }


def _not_saved(file: StagedFile, place: tuple[str, int], ranges: Iterable[CheckpointKey]) -> RowSet:
    """The rows of a staged file that no checkpoint of the same work holds."""
    saved = [k.rows for k in ranges if (k.prefix, k.fragment_id) == place and k.rows is not None]
    covered = RowSet.from_ranges(file.physical_rows, saved)
    return RowSet.full(file.physical_rows).minus(covered)


def _results_of_checkpoints(
    store: CheckpointStore, computation: Computation, keys: Iterable[CheckpointKey]
) -> Iterator[Results]:
    written = _result_columns(computation)
    for key in keys:
        try:
            batch = store[key.path()]
        except KeyError:
            continue
        if stored_as(batch.schema.names, written) is not None:
            digests = batch.column(DIGEST_COLUMN) if DIGEST_COLUMN in batch.schema.names else None
            receipts = batch.column(computation.receipt_names[0])
            yield _usable(BatchCheckpoint(key.path()), receipts, None, digests)


def _result_columns(computation: Computation) -> list[str]:
    """The columns of a result."""
    return [*(output.name for output in computation.outputs), *computation.receipt_names]


def _results_of_files(
    ref: TableRef, computation: Computation, files: Mapping[str, RowSet | None]
) -> Iterator[Results]:
    for path, rows in files.items():
        found = _receipts_of_file(ref, path, computation)
        if found is not None:
            receipts, made = found
            wanted = made if rows is None else made & rows.mask()
            yield _usable(DataFile(path), receipts, wanted)


def committed_receipts(
    dataset: lance.LanceDataset, computation: Computation, rows: Mapping[int, RowSet]
) -> Digests:
    """The receipts of some rows of a table, per fragment; none where it has no such column."""
    if not computation.receipts:
        return _together([], np.uint64)
    parts = [
        receipt_bits(_receipts_of_fragment(dataset, computation, fragment_id)[0])[members.mask()]
        for fragment_id, members in rows.items()
    ]
    return _together(parts, np.uint64)


def _receipts_of_fragment(
    dataset: lance.LanceDataset, computation: Computation, fragment_id: int
) -> list[pa.Array]:
    """The receipts of a fragment of the table, deleted rows included, output by output."""
    everything = RowRange(0, dataset.get_fragment(fragment_id).physical_rows)
    paths = [receipt.name for receipt in computation.receipts]
    batches = [b for _, b in read_windows(dataset, fragment_id, paths, everything, _WINDOW_ROWS)]
    return [concat([batch.column(i) for batch in batches]) for i in range(len(paths))]


def committed_results(
    dataset: lance.LanceDataset,
    computation: Computation,
    right: Mapping[int, RowSet],
) -> ResultIndex:
    """The right values of a table itself, for a function that gives equal ones for equal inputs.

    `right` are the rows whose value is right, per fragment.
    """
    results = []
    for fragment_id, rows in right.items():
        if rows:
            every = _receipts_of_fragment(dataset, computation, fragment_id)
            # Of a row of which a person wrote one output, none is a result for others.
            wanted = np.logical_and.reduce([rows.mask(), *map(is_result, every)])
            found = _usable(PublishedRows(fragment_id), every[0], wanted)
            results.append(found.without_failed())
    return ResultIndex(results, shared=True)


def _usable(
    origin: Origin, receipts: pa.Array, wanted: Mask | None, digests: pa.Array | None = None
) -> Results:
    """Those of the wanted rows (None: of all) that the function computed, or failed on."""
    bits = receipt_bits(receipts)
    whole = np.zeros(len(bits), np.uint64) if digests is None else np.asarray(digests)
    usable = is_result(receipts)
    if wanted is not None:
        usable &= wanted
    rows = np.flatnonzero(usable)
    return Results(
        origin=origin,
        rows=rows,
        receipts=bits[rows],
        digests=whole[rows],
        failed=is_failed(receipts)[rows],
    )


def _receipts_of_file(
    ref: TableRef, path: str, computation: Computation
) -> tuple[pa.Array, Mask] | None:
    """The receipts in a data file, and which of its rows were computed when it was made."""
    provenance = read_provenance(ref, path)
    if provenance is None or provenance.column_uuid != computation.id:
        return None
    try:
        reader = _data_file(ref, path, [computation.receipt_names[0]])
        if stored_as(reader.metadata().schema.names, _result_columns(computation)) is None:
            return None
        table = reader.read_all(batch_size=_WINDOW_ROWS).to_table()
    except BaseException as error:
        if not is_damage(error):
            raise
        return None
    made = provenance.made
    if provenance.failed is not None:
        made = made.union(provenance.failed)
    return table.column(0).combine_chunks(), made.mask()


def _data_file(ref: TableRef, path: str, columns: list[str] | None = None) -> LanceFileReader:
    """Open a data file of a table, to read some of its columns, or all."""
    return LanceFileReader(
        f"{ref.uri}/data/{path}", storage_options=ref.storage_options.plain(), columns=columns
    )


def stored_as(there: Sequence[str], wanted: Sequence[str]) -> list[str] | None:
    """What a result calls the columns that are wanted of it; None: it doesn't have all of them.

    A result has values, and then a receipt for each of them, in the same order. A receipt is called
    after the identity of its column: so a value is found whatever its column was called then, and
    whatever other columns the same calls filled. Where there are no receipts, names have to do.
    """
    receipts = [name for name in wanted if name.startswith(RECEIPT_PREFIX)]
    if not receipts:
        return [*wanted] if set(wanted) <= set(there) else None
    first = next((i for i, n in enumerate(there) if n.startswith(RECEIPT_PREFIX)), len(there))
    values = dict(zip(there[first:], there[:first], strict=False))
    if not values.keys() >= set(receipts):
        return None
    return [*(values[receipt] for receipt in receipts), *receipts]


@dataclass(slots=True)
class ReusedValues:
    """Reads results that are taken over, in the order of the rows they are for."""

    ref: TableRef
    store: CheckpointStore
    schema: pa.Schema
    """The columns of a result, in order."""
    dataset: lance.LanceDataset
    _open: list[_OpenResults] = field(default_factory=list)

    def open(self, found: Sequence[Reuse], wanted: RowSet) -> RowSet:
        """Open what can still be read; return the wanted rows that will get a value from it."""
        left = wanted.mask()
        taken = np.zeros(wanted.size, dtype=np.bool_)
        for reuse in found:
            use = left[reuse.target]
            if not use.any():
                continue
            source, target = reuse.source[use], reuse.target[use]
            values = self._opened(reuse.origin, int(source.max()))
            if values is None:
                continue
            self._open.append(_OpenResults(values, source, target))
            left[target] = False
            taken[target] = True
        return RowSet.from_mask(taken)

    def _opened(self, origin: Origin, last: int) -> _Values | None:
        """Open an origin; None when its rows up to `last` can't be read, or are of other types."""
        try:
            match origin:
                case BatchCheckpoint(key):
                    batch = self.store[key]
                    names = self._stored_as(batch.schema)
                    return _BatchRows(batch.select(names)) if names is not None else None
                case PublishedRows(fragment_id):
                    return _TableRows(RowTaker(self.dataset, fragment_id, self.schema.names))
                case DataFile(path):
                    reader = _data_file(self.ref, path)
                    there = reader.metadata().schema
                    names = self._stored_as(there)
                    if names is None or int(reader.num_rows()) <= last:
                        return None
                    if len(names) < len(there):  # what the same calls filled, and is gone
                        reader = _data_file(self.ref, path, names)
                    return _FileRows(reader, names)
        except (KeyError, OSError, ValueError, RuntimeError):
            return None

    def _stored_as(self, there: pa.Schema) -> list[str] | None:
        """What the columns are called there; None where some are missing, or of other types."""
        names = stored_as(there.names, self.schema.names)
        if names is None or [there.field(name).type for name in names] != self.schema.types:
            return None
        return names

    def between(self, start: int, end: int) -> Piece | None:
        """The values of rows [start, end) that are taken over; None when there are none."""
        found = (results.between(start, end, self.schema) for results in self._open)
        parts = [piece for piece in found if piece is not None]
        return merged(parts) if parts else None


class _Values(Protocol):
    """Results that can be read."""

    def take(self, rows: Offsets) -> list[pa.Array]:
        """Their columns, at rows that are ascending, each once."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _OpenResults:
    values: _Values
    source: Offsets
    target: Offsets

    def between(self, start: int, end: int, schema: pa.Schema) -> Piece | None:
        low, high = (int(i) for i in np.searchsorted(self.target, (start, end)))
        if low == high:
            return None
        unique, back = np.unique(self.source[low:high], return_inverse=True)
        batch = pa.RecordBatch.from_arrays(self.values.take(unique), schema=schema)
        return Piece(self.target[low:high], picked(batch, back))


@dataclass(frozen=True, slots=True, eq=False)
class _BatchRows:
    """Rows of a checkpoint."""

    batch: pa.RecordBatch

    def take(self, rows: Offsets) -> list[pa.Array]:
        return list(picked(self.batch, rows).columns)


@dataclass(frozen=True, slots=True, eq=False)
class _FileRows:
    """Rows of a data file that is not, or no longer, part of the table."""

    reader: LanceFileReader
    names: Sequence[str]

    def take(self, rows: Offsets) -> list[pa.Array]:
        table = self.reader.take_rows(rows.tolist(), batch_size=len(rows)).to_table()
        return [table.column(name).combine_chunks() for name in self.names]


@dataclass(frozen=True, slots=True, eq=False)
class _TableRows:
    """Rows of the table itself."""

    taker: RowTaker

    def take(self, rows: Offsets) -> list[pa.Array]:
        return list(self.taker.take(rows).columns)

"""Which values are still right after rows were moved or inputs rewritten.

A compaction copies rows, so that what was right stays right. An update or upsert moves whole rows
with their old values: such a value is right where some row with the same inputs had it before. A
rewritten input is compared row by row with what it was. Nothing here runs a UDF.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, TypeAlias

import numpy as np

from geneva.model import ColumnDefinition, Reason, TableRef
from geneva.rows import Mask, Offsets, RowRange, RowSet
from geneva.storage.dataset import FileFacts, FragmentFacts, read_live_rows
from geneva.storage.fragments import read_windows
from geneva.storage.provenance import (
    Provenance,
    input_signature,
    named,
    parse_file_name,
    read_provenance,
)
from geneva.storage.transactions import (
    Birth,
    Replaced,
    Rewritten,
    Supplied,
    TableHistory,
    Updated,
    VersionView,
)
from geneva.storage.values import aligned, equal_rows, row_texts

_WINDOW = 16_384

_RECENT = 256
"""Commits to look back for rows that moved while somebody computed results for them."""

_Cell: TypeAlias = tuple[str, str, str]
"""A row's inputs and value, its value alone, its inputs alone; as text."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which rows of a fragment have a right value, and why the others don't."""

    valid: RowSet
    reason: Reason
    certain: bool = True
    """False when history is gone and only NULLs could be told from values."""
    failed: RowSet | None = None
    """Rows on which this UDF failed with these inputs; None: none."""
    lasting: bool = True
    """False when a file could not be read: it may be readable the next time."""

    def where(self, same: RowSet, reason: Reason) -> Verdict:
        """The verdict on those rows only whose inputs stayed the same."""
        failed = self.failed.intersect(same) if self.failed is not None else None
        return Verdict(self.valid.intersect(same), reason, self.certain, failed)


@dataclass(frozen=True, slots=True)
class ColumnIdentity:
    """A column and its inputs by what never changes: UUID, UDF version, field ids."""

    definition: ColumnDefinition
    output: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    source: str | None = None
    """For a column whose inputs are in another table: what they are, in its version."""
    mark: tuple[int, ...] | None = None
    """The field that tells whether a row is set, for a group of columns."""

    def signature(self, fragment: FragmentFacts) -> tuple[str, ...]:
        """The input signature of a fragment."""
        if self.source is not None:
            return (self.source,)
        return input_signature(fragment, self.inputs)

    def output_file(self, fragment: FragmentFacts) -> str | None:
        """The file that holds the column; several, for a struct that grew, as one text."""
        return "\n".join(file.path for file in fragment.files_of(self.output)) or None


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Rows of a fragment that were rows of another one, with the same inputs."""

    view: VersionView
    parent: FragmentFacts
    source: Offsets
    """Offsets in the parent."""
    target: Offsets
    """The same rows' offsets in the fragment."""


class Notes(Protocol):
    """Verdicts of earlier looks into the past."""

    def find(self, fragment: FragmentFacts) -> Verdict | None:
        """The verdict on just these values and inputs."""

    def knows(self, output_file: str) -> bool:
        """Whether values of this file were judged before, whatever their inputs were then."""


class LineageTracer:
    """Answers which committed values are right, at the latest version or an older one."""

    def __init__(
        self, ref: TableRef, column: ColumnIdentity, history: TableHistory, notes: Notes
    ) -> None:
        """Trace one column."""
        self._ref, self._column, self._history, self._notes = ref, column, history, notes
        self._known: dict[tuple[int, tuple[FileFacts, ...]], Verdict] = {}

    def verdict(self, view: VersionView, fragment: FragmentFacts) -> Verdict:
        """What is right in a fragment at a version."""
        key = (fragment.id, fragment.files)
        if key not in self._known:
            self._known[key] = self._judge(view, fragment)
        return self._known[key]

    def by_name(self, fragment: FragmentFacts) -> Verdict | None:
        """What the names of a fragment's files tell; None when they don't tell enough."""
        nothing = RowSet.empty(fragment.physical_rows)
        files = fragment.files_of(self._column.output)
        if not files:
            return Verdict(nothing, Reason.NEW)
        found = parse_file_name(files[0].path) if len(files) == 1 else None
        if found is None:
            return None
        definition, signature = self._column.definition, self._column.signature(fragment)
        wanted = named(Provenance(definition.uuid, definition.udf_version, signature, nothing))
        if (found.column, found.udf) != (wanted.column, wanted.udf):
            # In a part, the rows that it kept may be older work of this very UDF.
            kept = found.column == wanted.column and not found.complete
            return None if kept else Verdict(nothing, Reason.UDF_CHANGED)
        if found.inputs != wanted.inputs and self._column.source is None:
            return None
        if found.complete:
            return Verdict(RowSet.full(fragment.physical_rows), Reason.UP_TO_DATE)
        return None

    def _judge(self, view: VersionView, fragment: FragmentFacts) -> Verdict:
        easy = self.by_name(fragment) or self._notes.find(fragment)
        if easy is not None:
            return easy
        files = fragment.files_of(self._column.output)
        if len(files) == 1 and parse_file_name(files[0].path) is not None:
            return self._own_file(view, fragment, files[0].path)
        birth = self._history.birth_of(files[0].path) if len(files) == 1 else None
        match birth:
            case Rewritten():
                verdict = self._rewritten(birth, fragment, files[0].path)
            case Updated():
                verdict = self._updated(birth, fragment, files[0].path)
            case Supplied() if birth.version <= self._column.definition.since:
                return Verdict(RowSet.empty(fragment.physical_rows), Reason.UDF_CHANGED)
            case Supplied():
                return Verdict(self._with_value(view, fragment), Reason.NULL)
            case _:
                verdict = None
        if birth is not None:
            return self._since(birth, verdict or self._guess(view, fragment), view, fragment)
        if self._inputs_came_later(fragment) and self._notes.knows(files[0].path):
            return self._by_former_inputs(view, fragment)
        return self._guess(view, fragment)

    def _guess(self, view: VersionView, fragment: FragmentFacts) -> Verdict:
        """Without a past, a value counts as right and a NULL as not computed.

        Unless the column had another UDF before: then nobody knows which of the two made a value.
        """
        if self._column.definition.since:
            return Verdict(RowSet.empty(fragment.physical_rows), Reason.UDF_CHANGED, certain=False)
        return Verdict(self._with_value(view, fragment), Reason.NULL, certain=False)

    def _inputs_came_later(self, fragment: FragmentFacts) -> bool:
        """Whether an input is in another file than the output, so written at another time."""
        inputs = {file.path for ids in self._column.inputs for file in fragment.files_of(ids)}
        return not inputs <= {file.path for file in fragment.files_of(self._column.output)}

    def _own_file(self, view: VersionView, fragment: FragmentFacts, path: str) -> Verdict:
        """A file that Geneva wrote for some rows, or from inputs that were rewritten since."""
        nothing = RowSet.empty(fragment.physical_rows)
        provenance = read_provenance(self._ref, path)
        if provenance is None:
            return Verdict(nothing, Reason.PARTIAL, lasting=False)
        if provenance.udf_version != self._column.definition.udf_version:
            return self._kept_rows(view, fragment, path, provenance.valid)
        inputs = self._column.signature(fragment)
        if provenance.inputs == inputs or self._column.source is not None:
            return Verdict(provenance.valid, Reason.PARTIAL, failed=provenance.failed)
        birth = self._history.birth_of(path)
        seen = self._history.at(birth.read_version) if isinstance(birth, Replaced) else None
        before = seen.fragment(fragment.id) if seen is not None else None
        if seen is None or before is None or self._column.signature(before) != provenance.inputs:
            return self._by_former_inputs(view, fragment)
        same = self._unchanged_inputs(fragment, seen, view)
        made = Verdict(provenance.valid, Reason.PARTIAL, failed=provenance.failed)
        return made.where(same, Reason.INPUT_CHANGED)

    def _by_former_inputs(self, view: VersionView, fragment: FragmentFacts) -> Verdict:
        """Where the values' own past is gone: what was right before an input was rewritten."""
        files = fragment.files_of(chain(*self._column.inputs))
        births = [self._history.birth_of(file.path) for file in files]
        latest = max((b.version for b in births if isinstance(b, Replaced)), default=0)
        before = self._history.at(latest - 1) if latest > 1 else None
        was = before.fragment(fragment.id) if before is not None else None
        output = self._column.output_file(fragment)
        if before is None or was is None or self._column.output_file(was) != output:
            return Verdict(RowSet.empty(fragment.physical_rows), Reason.INPUT_CHANGED)
        judged = self.verdict(before, was)
        if not judged.certain:
            return Verdict(RowSet.empty(fragment.physical_rows), Reason.INPUT_CHANGED)
        same = self._unchanged_inputs(fragment, before, view)
        return judged.where(same, Reason.INPUT_CHANGED)

    def _kept_rows(
        self, view: VersionView, fragment: FragmentFacts, path: str, made: RowSet
    ) -> Verdict:
        """A file of another UDF, which made some rows and kept the others as they were."""
        birth = self._history.birth_of(path)
        before = self._history.at(birth.version - 1) if isinstance(birth, Replaced) else None
        was = before.fragment(fragment.id) if before is not None else None
        if before is None or was is None:
            return Verdict(RowSet.empty(fragment.physical_rows), Reason.UDF_CHANGED)
        judged = self.verdict(before, was)
        valid = judged.valid.minus(made)
        if valid and self._column.signature(was) != self._column.signature(fragment):
            valid = valid.intersect(self._unchanged_inputs(fragment, before, view))
        return Verdict(valid, Reason.UDF_CHANGED, judged.certain)

    def _since(
        self, birth: Birth, verdict: Verdict, view: VersionView, fragment: FragmentFacts
    ) -> Verdict:
        """Take back what inputs that were rewritten after the fragment was born made wrong."""
        born = self._history.at(birth.version)
        then = born.fragment(fragment.id) if born is not None else None
        if born is None or then is None:
            if not self._inputs_came_later(fragment):
                return verdict
            return self._by_former_inputs(view, fragment)
        if self._column.signature(then) == self._column.signature(fragment):
            return verdict
        same = self._unchanged_inputs(fragment, born, view)
        return replace(verdict.where(same, Reason.INPUT_CHANGED), certain=True)

    def _rewritten(self, birth: Rewritten, fragment: FragmentFacts, path: str) -> Verdict | None:
        """Rows that a compaction copied: each is as right as it was."""
        masks: list[Mask] = []
        failed: list[Mask] = []
        reason = Reason.UP_TO_DATE
        certain = True
        for parent in birth.parents:
            judged = self._parent_rows(birth.version - 1, parent)
            if judged is None:
                return None
            mask, failed_mask, verdict = judged
            masks.append(mask)
            failed.append(failed_mask)
            certain = certain and verdict.certain
            if not mask.all():
                reason = verdict.reason
        every = np.concatenate(masks) if masks else np.zeros(0, dtype=np.bool_)
        every_failed = np.concatenate(failed) if failed else every
        start = 0
        for child in birth.children:
            if any(file.path == path for file in child.files):
                end = start + fragment.physical_rows
                own, bad = every[start:end], every_failed[start:end]
                if len(own) != fragment.physical_rows:
                    return None
                found = RowSet.from_mask(bad) if bad.any() else None
                return Verdict(RowSet.from_mask(own), reason, certain, found)
            start += child.physical_rows
        return None

    def _parent_rows(
        self, version: int, parent: FragmentFacts
    ) -> tuple[Mask, Mask, Verdict] | None:
        """Which of a compacted fragment's live rows are right, and which failed, in order."""
        easy = self.by_name(parent) or self._notes.find(parent)
        if easy is not None and (easy.valid.is_full or not (easy.valid or easy.failed)):
            # Which rows were deleted makes no difference, so that nothing old needs to be read.
            none = np.zeros(parent.live_rows, dtype=np.bool_)
            return np.full(parent.live_rows, bool(easy.valid), dtype=np.bool_), none, easy
        view = self._history.at(version)
        before = view.fragment(parent.id) if view is not None else None
        if view is None or before is None:
            return None
        verdict = self.verdict(view, before)
        live = read_live_rows(view.dataset, [before])[before.id].mask()
        failed = verdict.failed or RowSet.empty(before.physical_rows)
        return verdict.valid.mask()[live], failed.mask()[live], verdict

    def _updated(self, birth: Updated, fragment: FragmentFacts, path: str) -> Verdict | None:
        """Rows that an update moved: right where a row with the same inputs had the same value."""
        before, after = self._history.at(birth.version - 1), self._history.at(birth.version)
        born = after.fragment(fragment.id) if after is not None else None
        if before is None or after is None or born is None:
            return None
        if not (self._has_columns(before) and self._has_columns(after)):
            return None
        right: set[str] = set()
        old_values: set[str] = set()
        for _, moved in self._moved_out(birth, before, after):
            for _, (pair, value, _), valid in moved:
                old_values.add(value)
                if valid:
                    right.add(pair)
        by_this_udf = birth.version > self._column.definition.since
        mask = np.zeros(fragment.physical_rows, dtype=np.bool_)
        everything = RowRange(0, born.physical_rows)
        for start, cells in self._cells(after, born.id, everything):
            for i, (pair, value, _) in enumerate(cells):
                # A value that no moved row had was written by the user together with the row.
                supplied = by_this_udf and value != _NULL and value not in old_values
                mask[start + i] = pair in right or supplied
        return Verdict(RowSet.from_mask(mask), Reason.INPUT_CHANGED)

    def origins(self, view: VersionView, fragment: FragmentFacts) -> Iterator[Origin]:
        """Where a fragment's rows were before the commit that made it, as far as history tells."""
        files = fragment.files_of((*self._column.output, *chain(*self._column.inputs)))
        births = [self._history.birth_of(file.path, _RECENT) for file in files]
        birth = next((b for b in births if isinstance(b, Rewritten | Updated)), None)
        if birth is None:
            return
        before, after = self._history.at(birth.version - 1), self._history.at(birth.version)
        born = after.fragment(fragment.id) if after is not None else None
        if before is None or after is None or born is None or not self._has_columns(before):
            return
        if isinstance(birth, Rewritten):
            found = self._copied_from(birth, before, fragment)
        else:
            found = self._moved_from(birth, before, after, fragment)
        if self._column.signature(born) == self._column.signature(fragment):
            yield from found
            return
        # Inputs were rewritten since: a result of before is one of the same inputs no longer.
        same = self._unchanged_inputs(fragment, after, view).mask()
        for origin in found:
            kept = same[origin.target]
            if kept.any():
                yield replace(origin, source=origin.source[kept], target=origin.target[kept])

    def _copied_from(
        self, birth: Rewritten, before: VersionView, fragment: FragmentFacts
    ) -> Iterator[Origin]:
        own = {file.path for file in fragment.files}
        end = start = 0
        for child in birth.children:
            start, end = end, end + child.physical_rows
            if own & {file.path for file in child.files}:
                break
        at = 0
        for parent in birth.parents:
            was = before.fragment(parent.id)
            if was is None:
                return
            rows = read_live_rows(before.dataset, [was])[was.id].offsets()
            places = np.arange(at, at + len(rows))
            at += len(rows)
            inside = (places >= start) & (places < end)
            if inside.any():
                yield Origin(before, was, rows[inside], places[inside] - start)

    def _moved_from(
        self, birth: Updated, before: VersionView, after: VersionView, fragment: FragmentFacts
    ) -> Iterator[Origin]:
        everything = RowRange(0, fragment.physical_rows)
        wanted: dict[str, deque[int]] = {}
        for start, cells in self._cells(after, fragment.id, everything):
            for i, (_, _, inputs) in enumerate(cells):
                wanted.setdefault(inputs, deque()).append(start + i)
        for was, moved in self._moved_out(birth, before, after):
            # One to one: of two rows with the same inputs, each gives to one.
            places = ((o, wanted.get(inputs)) for o, (_, _, inputs), _ in moved)
            pairs = [(o, targets.popleft()) for o, targets in places if targets]
            if pairs:
                source, target = np.array(pairs, dtype=np.int64).T
                yield Origin(before, was, source, target)

    def _moved_out(
        self, birth: Updated, before: VersionView, after: VersionView
    ) -> Iterator[tuple[FragmentFacts, list[tuple[int, _Cell, bool]]]]:
        """The rows that an update took out of each fragment: offset, content, was it right."""
        for fragment_id in birth.touched:
            was = before.fragment(fragment_id)
            if was is None:
                continue
            gone = read_live_rows(before.dataset, [was])[fragment_id]
            left = after.fragment(fragment_id)
            if left is not None:
                gone = gone.minus(read_live_rows(after.dataset, [left])[fragment_id])
            if not gone:
                continue
            valid, gone_mask = self.verdict(before, was).valid.mask(), gone.mask()
            yield (
                was,
                [
                    (start + i, cell, bool(valid[start + i]))
                    for rows in _clusters(gone.offsets())
                    for start, cells in self._cells(before, fragment_id, rows)
                    for i, cell in enumerate(cells)
                    if gone_mask[start + i]
                ],
            )

    def _cells(
        self, view: VersionView, fragment_id: int, rows: RowRange
    ) -> Iterator[tuple[int, list[_Cell]]]:
        """Rows as text, which compares exactly whatever the types."""
        paths = self._paths(view, self._fields)
        for start, batch in read_windows(view.dataset, fragment_id, paths, rows, _WINDOW):
            columns = [row_texts(batch.column(i)) for i in range(batch.num_columns)]
            yield (
                start,
                [
                    ("\0".join(texts), texts[-1], "\0".join(texts[:-1]))
                    for texts in zip(*columns, strict=True)
                ],
            )

    def _unchanged_inputs(
        self, fragment: FragmentFacts, then: VersionView, now: VersionView
    ) -> RowSet:
        """The rows whose inputs have the same values at two versions."""
        if not (self._has_columns(then) and self._has_columns(now)):
            return RowSet.empty(fragment.physical_rows)
        everything = RowRange(0, fragment.physical_rows)
        mask = np.ones(fragment.physical_rows, dtype=np.bool_)
        streams = (
            read_windows(
                view.dataset,
                fragment.id,
                self._paths(view, self._column.inputs),
                everything,
                _WINDOW,
            )
            for view in (then, now)
        )
        for (start, old), (_, new) in aligned(*streams):
            for i in range(old.num_columns):
                mask[start : start + old.num_rows] &= equal_rows(old.column(i), new.column(i))
        return RowSet.from_mask(mask)

    @property
    def _fields(self) -> tuple[tuple[int, ...], ...]:
        return (*self._column.inputs, self._column.output)

    def _has_columns(self, view: VersionView) -> bool:
        """Whether the column and its inputs existed then."""
        return all(view.path_of(ids) is not None for ids in self._fields)

    def _paths(self, view: VersionView, fields: Sequence[tuple[int, ...]]) -> list[str]:
        paths = [view.path_of(ids) for ids in fields]
        return [path for path in paths if path is not None]

    def _with_value(self, view: VersionView, fragment: FragmentFacts) -> RowSet:
        """The rows that have a value at all, deleted ones included."""
        path = view.path_of(self._column.mark or self._column.output)
        assert path is not None
        mask = np.zeros(fragment.physical_rows, dtype=np.bool_)
        everything = RowRange(0, fragment.physical_rows)
        for start, batch in read_windows(view.dataset, fragment.id, [path], everything, _WINDOW):
            column = batch.column(0)
            present = column.fill_null(False) if self._column.mark else column.is_valid()
            mask[start : start + batch.num_rows] = present.to_numpy(zero_copy_only=False)
        return RowSet.from_mask(mask)


_NULL = repr(None)


def _clusters(offsets: Offsets) -> Iterator[RowRange]:
    """Few ranges that contain all offsets: near ones are read together."""
    if not len(offsets):
        return
    cuts = np.flatnonzero(np.diff(offsets) > _WINDOW) + 1
    for run in np.split(offsets, cuts):
        yield RowRange(int(run[0]), int(run[-1]) + 1)

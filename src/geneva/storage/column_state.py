"""Which values of a computed column are right, as the committed table and its history tell."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import lance
import pyarrow as pa

from geneva.model import ColumnDefinition, Reason
from geneva.rows import RowSet
from geneva.storage.checkpoints import CheckpointStore
from geneva.storage.dataset import FragmentFacts, TableSnapshot
from geneva.storage.lineage import ColumnIdentity, LineageTracer, Verdict
from geneva.storage.staging import open_checkpoints
from geneva.storage.transactions import TableHistory, VersionView

_MOST_OLDER_NOTES = 1_000
"""Verdicts on fragments that are no longer there, kept for whoever restores an old version."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The committed values of one column in one fragment."""

    valid: RowSet
    reason: Reason
    """Why the rows that are not valid aren't."""
    output_file: str | None
    """The file the values are in; None when the fragment has none."""
    inputs: tuple[str, ...]
    """Input signature of the fragment."""
    certain: bool = True
    """False when history is gone: rows with a value count as right."""
    failed: RowSet | None = None
    """Rows on which this UDF failed with these inputs; None: none."""


def column_identity(snapshot: TableSnapshot, definition: ColumnDefinition) -> ColumnIdentity:
    """A column and its inputs by field ids."""
    return ColumnIdentity(
        definition,
        snapshot.field_ids[definition.name],
        tuple(snapshot.field_ids[path] for path in definition.inputs),
    )


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """A column's committed state, and the tracer that found it out."""

    column: ColumnIdentity
    committed: dict[int, Committed]
    tracer: LineageTracer
    view: VersionView


def read_committed(
    dataset: lance.LanceDataset, snapshot: TableSnapshot, definition: ColumnDefinition
) -> ColumnFacts:
    """What is valid in each fragment.

    Files that Geneva wrote mostly answer by their names. What had to be traced through the table's
    history is noted in the checkpoint store, because history is cleaned up one day.
    """
    return read_column(dataset, snapshot, column_identity(snapshot, definition))


def read_column(
    dataset: lance.LanceDataset, snapshot: TableSnapshot, column: ColumnIdentity
) -> ColumnFacts:
    """What is valid of a column, or of a group of columns, in each fragment."""
    notes = _Notes(open_checkpoints(snapshot.ref), column)
    tracer = LineageTracer(snapshot.ref, column, TableHistory(snapshot.ref, dataset), notes)
    verdicts: dict[int, Verdict] = {}
    unknown: list[FragmentFacts] = []
    for fragment in snapshot.fragments:
        easy = tracer.by_name(fragment)
        if easy is None:
            unknown.append(fragment)
        else:
            verdicts[fragment.id] = easy
    view = VersionView(dataset)
    if unknown:
        for fragment in unknown:
            verdict = tracer.verdict(view, fragment)
            notes.add(fragment, verdict)
            verdicts[fragment.id] = verdict
        notes.save()
    committed = {
        fragment.id: Committed(
            verdicts[fragment.id].valid,
            verdicts[fragment.id].reason,
            column.output_file(fragment),
            column.signature(fragment),
            verdicts[fragment.id].certain,
            verdicts[fragment.id].failed,
        )
        for fragment in snapshot.fragments
    }
    return ColumnFacts(column, committed, tracer, view)


class _Notes:
    """Verdicts that took a look into the past, kept under the column's UUID."""

    def __init__(self, store: CheckpointStore, column: ColumnIdentity) -> None:
        self._store, self._column = store, column
        self._key = f"lineage-{column.definition.uuid}"
        self._seen: dict[str, dict[str, str]] = {}

    @cached_property
    def _rows(self) -> dict[str, dict[str, str]]:
        """Read at first need: most plans need none."""
        try:
            rows = self._store[self._key].to_pylist()
            return {row["about"]: {"failed": "", **row} for row in rows}
        except KeyError:
            return {}

    @cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(about.split("\n\n", 1)[0] for about in self._rows)

    def knows(self, output_file: str) -> bool:
        return output_file in self._files

    def find(self, fragment: FragmentFacts) -> Verdict | None:
        row = self._rows.get(self._about(fragment))
        if row is None:
            return None
        with suppress(ValueError, KeyError):
            valid = RowSet.decode(row["valid"])
            failed = RowSet.decode(row["failed"]) if row.get("failed") else None
            if valid.size == fragment.physical_rows:
                return Verdict(valid, Reason(row["reason"]), row["certain"] == "yes", failed)
        return None

    def add(self, fragment: FragmentFacts, verdict: Verdict) -> None:
        if not verdict.lasting:
            return
        about = self._about(fragment)
        self._seen[about] = {
            "about": about,
            "valid": verdict.valid.encode(),
            "reason": verdict.reason.value,
            "certain": "yes" if verdict.certain else "no",
            "failed": verdict.failed.encode() if verdict.failed else "",
        }

    def save(self) -> None:
        """Keep what the present fragments need, and what a restored version may need again.

        A read-only table is no reason to fail.
        """
        if self._seen.items() <= self._rows.items():
            return
        older = [row for about, row in self._rows.items() if about not in self._seen]
        kept = [*older[-_MOST_OLDER_NOTES:], *self._seen.values()]
        with suppress(OSError):
            self._store[self._key] = pa.RecordBatch.from_pylist(kept)

    def _about(self, fragment: FragmentFacts) -> str:
        """What a verdict is about, for ever: these values, by this UDF, from these inputs."""
        values = self._column.output_file(fragment) or ""
        origin = (self._column.definition.udf_version, *self._column.signature(fragment))
        return values + "\n\n" + "\n".join(origin)

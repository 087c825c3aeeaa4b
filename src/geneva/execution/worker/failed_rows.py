"""The rows of a part that were skipped, on their way to checkpoint, provenance and report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from geneva.errors import TooManyFailedRowsError
from geneva.execution.apply.failures import MOST_TRACEBACKS, CellFailure
from geneva.execution.worker.task import MOST_REPORTED, RowFailure
from geneva.model.rows import Offsets, RowSet
from geneva.storage.checkpoints.store import errors_of
from geneva.storage.lance.dataset import Dataset
from geneva.storage.lance.row_ids import row_ids_at


@dataclass(slots=True)
class FailedRows:
    """What happened to the rows that failed, by offset in their fragment."""

    found: dict[int, RowFailure] = field(default_factory=dict)
    carried: set[int] = field(default_factory=set)
    """Rows that failed in an earlier run, which has told of them; they are not called again."""

    def __bool__(self) -> bool:
        """Whether any row failed."""
        return bool(self.found or self.carried)

    def carry(self, offsets: Iterable[int]) -> None:
        """Take over what an earlier run has found."""
        self.carried.update(row for row in offsets if row not in self.found)

    def add(self, offsets: Offsets, failures: Iterable[CellFailure]) -> None:
        """Take what a batch tells of its rows."""
        for failure in failures:
            assert failure.row is not None
            self._keep(row_failure(int(offsets[failure.row]), failure))

    def load(self, offsets: Offsets, wanted: Offsets, batch: pa.RecordBatch) -> None:
        """Take what a checkpoint tells of the rows that are wanted from it."""
        errors = errors_of(batch)
        if errors:
            chosen = set(wanted.tolist())
            for place, text in errors.items():
                if int(offsets[place]) in chosen:
                    self._keep(RowFailure(**json.loads(text)))

    def column(self, offsets: Offsets) -> pa.Array | None:
        """What a checkpoint of these rows has to tell; None: nothing."""
        texts = [
            self.found[row].to_json() if row in self.found else None for row in offsets.tolist()
        ]
        return pa.array(texts, pa.string()) if any(texts) else None

    def rows(self, size: int) -> RowSet:
        """The rows, as a set."""
        mask = RowSet.empty(size).mask()
        mask[[*self.found, *self.carried]] = True
        return RowSet.from_mask(mask)

    def told(self, dataset: Dataset, fragment_id: int) -> tuple[RowFailure, ...]:
        """What is reported: the first of them, with their stable row ids."""
        chosen = [self.found[row] for row in sorted(self.found)[:MOST_REPORTED]]
        return with_row_ids(dataset, fragment_id, chosen)

    def check(self, most: int | None, before: int) -> None:
        """Give up when more rows failed than may."""
        failed = before + len(self.found)
        if most is not None and failed > most:
            last = self.found[max(self.found)]
            raise TooManyFailedRowsError(
                f"{failed:,} rows failed, and the UDF's limits (max_failed_rows, "
                f"max_failed_fraction) allow {most:,} here. The last one, row {last.offset}: "
                f"{last.exception_type}: {last.message}. See table.get_errors(); raise the limits, "
                "or fix the function, and run again: what is computed is kept."
            )

    def _keep(self, failure: RowFailure) -> None:
        told = len(self.found) < MOST_TRACEBACKS
        self.found[failure.offset] = failure if told else replace(failure, traceback="")


def row_failure(offset: int, failure: CellFailure) -> RowFailure:
    """A cell's failure with its place in the fragment."""
    return RowFailure(
        offset,
        failure.exception_type,
        failure.message,
        failure.traceback,
        failure.attempt,
        failure.preview,
    )


def with_row_ids(
    dataset: Dataset, fragment_id: int, failures: Sequence[RowFailure]
) -> tuple[RowFailure, ...]:
    """The same with stable row ids, if the table has them."""
    if not failures or not dataset.has_stable_row_ids:
        return tuple(failures)
    ids = row_ids_at(dataset, fragment_id)
    return tuple(replace(failure, row_id=ids.get(failure.offset)) for failure in failures)

"""The rows of a part that were skipped, on their way to checkpoint, provenance and report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from geneva.execution.apply.failures import MAX_TRACEBACKS, CellFailure
from geneva.execution.worker.task import MAX_REPORTED, RowFailure
from geneva.model.rows import Offsets, RowSet
from geneva.storage.lance.dataset import Dataset
from geneva.storage.lance.row_ids import row_ids_at


@dataclass(slots=True)
class FailedRows:
    """What happened to the rows that failed, by offset in their fragment.

    All texts about rows that were skipped pass here on their way to a checkpoint or report, of rows
    that were computed now and of those in checkpoints of other jobs: here they lose their secrets.
    """

    hide: Callable[[str], str]
    """A text without what is secret."""
    found: dict[int, RowFailure] = field(default_factory=dict)
    earlier: set[int] = field(default_factory=set)
    """Rows that failed in an earlier run, which has reported them; they are not called again."""

    def __bool__(self) -> bool:
        """Whether any row failed."""
        return bool(self.found or self.earlier)

    def add(self, failures: Iterable[RowFailure]) -> None:
        """Take failures; only the first ones keep their traceback."""
        for failure in failures:
            in_full = len(self.found) < MAX_TRACEBACKS
            kept = failure if in_full else replace(failure, traceback="")
            self.found[failure.offset] = kept.without_secrets(self.hide)

    def add_earlier(self, offsets: Iterable[int]) -> None:
        """Take rows of which only their receipts say that they failed."""
        self.earlier.update(row for row in offsets if row not in self.found)

    def column(self, offsets: Offsets) -> pa.Array | None:
        """The failures of these rows for a checkpoint; None when there are none."""
        texts = [
            self.found[row].to_json() if row in self.found else None for row in offsets.tolist()
        ]
        return pa.array(texts, pa.string()) if any(texts) else None

    def rows(self, size: int) -> RowSet:
        """The rows, as a set."""
        mask = RowSet.empty(size).mask()
        mask[[*self.found, *self.earlier]] = True
        return RowSet.from_mask(mask)

    def reported(self, dataset: Dataset, fragment_id: int) -> tuple[RowFailure, ...]:
        """The first failures, with their stable row ids."""
        chosen = [self.found[row] for row in sorted(self.found)[:MAX_REPORTED]]
        return with_row_ids(dataset, fragment_id, chosen)


def row_failure(offset: int, failure: CellFailure) -> RowFailure:
    """A cell's failure with its place in the fragment."""
    return RowFailure(
        offset=offset,
        exception_type=failure.exception_type,
        message=failure.message,
        traceback=failure.traceback,
        attempt=failure.attempt,
        preview=failure.preview,
    )


def with_row_ids(
    dataset: Dataset, fragment_id: int, failures: Sequence[RowFailure]
) -> tuple[RowFailure, ...]:
    """The same with stable row ids, if the table has them."""
    if not failures or not dataset.has_stable_row_ids:
        return tuple(failures)
    ids = row_ids_at(dataset, fragment_id)
    return tuple(replace(failure, row_id=ids.get(failure.offset)) for failure in failures)

"""What becomes of the parts of a task: done, unreadable, or a failure that ends the task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby

from geneva.errors import StorageFullError, UDFOutputError
from geneva.execution.apply.failures import CellFailure
from geneva.execution.worker.failed_rows import FailedRows, with_row_ids
from geneva.execution.worker.poison_rows import PoisonSearch
from geneva.execution.worker.records import BatchFailed, Computed, OpenTask, Result, Saved
from geneva.execution.worker.sealing import sealed
from geneva.execution.worker.task import PartFailure, PartResult, PartWork, UnreadablePart
from geneva.execution.worker.writer import PartWriter, Writer
from geneva.storage.lance.damage import Damaged, damage_reason, is_storage_full


class PartSettler:
    """Writes the parts of a task, one after the other, and says what became of each."""

    def __init__(self, task: OpenTask, writer: Writer) -> None:
        """Write nothing yet."""
        self._task, self._writer = task, writer
        self._open: PartWriter | None = None
        self.outcomes: list[PartResult | PartFailure | UnreadablePart] = []
        """In the order of the parts. A failure is the last one."""
        self.given_up: PartWork | None = None
        """The last part that was settled before its end: nothing more of it is wanted."""

    @property
    def failure(self) -> PartFailure | None:
        """What ends the task."""
        last = self.outcomes[-1] if self.outcomes else None
        return last if isinstance(last, PartFailure) else None

    def begin(self, part: PartWork, search: PoisonSearch) -> None:
        """Go on with another part."""
        self._part, self._search = part, search
        try:
            self._open = self._writer.begin(part)
        except Exception as error:  # noqa: BLE001  what is no outcome is raised again
            self._give_up(error)

    def add(self, results: Sequence[Computed | Result]) -> Future[Saved] | None:
        """Write results of the part, in order; return what becomes durable by the last one."""
        if self._open is None:
            return None
        saved: Future[Saved] | None = None
        try:
            for result in _sealed(self._task, results):
                saved = self._open.add(result)
        except Exception as error:  # noqa: BLE001  what is no outcome is raised again
            self._give_up(error)
            return None
        return saved

    def end(self, error: Exception | None) -> None:
        """Settle the part. `error`: it could not be computed on.

        One that was given up is settled; but a failure of the function still ends the task.
        """
        try:
            if self._open is not None and error is None:
                self._settle(self._open.finish())
            elif error is not None and not (self._open is None and isinstance(error, Damaged)):
                raise error
        except Exception as found:  # noqa: BLE001  what is no outcome is raised again
            self._give_up(found)

    def finish(self) -> None:
        """Record what is worth it, at the end of the task."""
        self._writer.finish()

    def _settle(self, outcome: PartResult | PartFailure | UnreadablePart) -> None:
        self._search.clear()
        self._open = None
        self.outcomes.append(outcome)

    def _give_up(self, error: Exception) -> None:
        """Settle the part by an error, or raise it: then Spark runs the task again."""
        self.given_up = self._part
        if isinstance(error, UDFOutputError):  # found where values of several batches come together
            error = BatchFailed(error, self._part.rows, None, ())
        try:
            if isinstance(error, BatchFailed):
                self._settle(_part_failure(self._task, self._part, error, self._abandoned()))
            elif isinstance(error, Damaged):
                self._abandoned()
                part = self._part
                self._settle(UnreadablePart(part.fragment_id, part.rows, str(error)))
            else:
                raise error
        except Exception as found:
            if not is_storage_full(found):
                raise
            # Not a task to try again: it would compute the same rows, and save none of them.
            self.outcomes.append(_storage_failure(self._task, self._part, found))

    def _abandoned(self) -> FailedRows:
        """Save what was added, and no more; return the rows that were skipped so far."""
        return self._open.abandon() if self._open is not None else FailedRows()


def _sealed(task: OpenTask, results: Sequence[Computed | Result]) -> Iterator[Result]:
    """Results as they are written: what was computed in a row is sealed at once."""
    for is_computed, group in groupby(results, lambda result: isinstance(result, Computed)):
        if is_computed:
            yield sealed(task, [result for result in group if isinstance(result, Computed)])
        else:
            yield from (result for result in group if isinstance(result, Result))


def _storage_failure(task: OpenTask, part: PartWork, error: Exception) -> PartFailure:
    """Say that nothing more can be saved."""
    return PartFailure(
        fragment_id=part.fragment_id,
        kind=StorageFullError.__name__,
        message=(
            f"No space is left to save values of column {task.work.computation.name!r} of table "
            f"{task.work.ref.name!r}: {damage_reason(error)}. Make room and run again: what was "
            "saved before is kept."
        ),
        traceback="",
    )


def _part_failure(
    task: OpenTask, part: PartWork, failed: BatchFailed, skipped: FailedRows
) -> PartFailure:
    """Describe the failure with its place in the table."""
    skipped.add(failed.skipped)
    failures = [*skipped.found.values()]
    rows, where = failed.rows, f"rows [{failed.rows.start}, {failed.rows.end})"
    if failed.at_fault is not None:
        failures.append(failed.at_fault)
        where = f"row {failed.at_fault.offset}"
    cell: CellFailure | None = getattr(failed.error, "failure", None)
    column = getattr(failed.error, "column", None) or task.work.computation.name
    return PartFailure(
        fragment_id=part.fragment_id,
        kind=type(failed.error).__name__,
        message=(
            f"Table {task.work.ref.name!r}, column {column!r}, fragment "
            f"{part.fragment_id}, {where} (of rows [{rows.start}, {rows.end})): {failed.error}"
        ),
        traceback=cell.traceback if cell is not None else "",
        failures=with_row_ids(task.dataset, part.fragment_id, failures),
    )

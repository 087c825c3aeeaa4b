"""A task as a pipeline: the reader's windows through the program to the writer, part by part.

The stages run one after the other here, in one thread. They are joined by records only, so that
this module is the one place that says which of them runs where:

- The reader runs ahead of the program, also into the next part. It changes nothing.
- The program takes windows in order. It goes on after a result that is to be durable now only when
  the writer has acknowledged it: the search for poison rows relies on that.
- The writer takes results in order. A part is done when its `finish` has returned.
- A batch on which the user's function or SQL failed ends the task: what was computed before it is
  saved, and reported. Any other error, of any stage, fails the task, and Spark runs it again.
"""

from __future__ import annotations

from collections.abc import Iterable

from geneva.errors import SQLExecutionError, StorageFullError
from geneva.execution.apply.failures import CellFailure
from geneva.execution.worker.batches import BatchRunner
from geneva.execution.worker.failed_rows import FailedRows, with_row_ids
from geneva.execution.worker.poison_rows import PoisonSearch, note_key
from geneva.execution.worker.reader import Reader
from geneva.execution.worker.records import BatchFailed, OpenTask
from geneva.execution.worker.task import (
    PartFailure,
    PartResult,
    PartWork,
    TaskReport,
    UnreadablePart,
)
from geneva.execution.worker.writer import PartWriter, Writer
from geneva.storage.lance.damage import Damaged, damage_reason, is_storage_full, reading


class Pipeline:
    """Reader, program and writer of one task."""

    def __init__(self, task: OpenTask, *, is_retry: bool) -> None:
        """`is_retry`: an earlier attempt at the task was lost."""
        self._task, self._is_retry = task, is_retry
        self._reader = Reader(task)
        self._runner = BatchRunner(task)
        self._writer = Writer(task)

    def run(self, parts: Iterable[PartWork], done: Iterable[PartResult] = ()) -> TaskReport:
        """Do the parts in order, up to a failure; report on them after those `done` before."""
        results, failure, unreadable = [*done], None, list[UnreadablePart]()
        for part in parts:
            outcome = self._run_part(part)
            if isinstance(outcome, PartFailure):
                failure = outcome
                break
            if isinstance(outcome, UnreadablePart):
                unreadable.append(outcome)
            else:
                results.append(outcome)
        if failure is None or failure.kind != StorageFullError.__name__:
            self._writer.finish()
        stages = (self._reader, self._runner, self._writer)
        timings = [stage.clock.timings() for stage in stages]
        return TaskReport(
            results=tuple(results),
            failure=failure,
            unreadable=tuple(unreadable),
            timings=timings[0].plus(timings[1]).plus(timings[2]),
            recorded=tuple(self._writer.recorded),
            retries=self._runner.retries,
        )

    def _run_part(self, part: PartWork) -> PartResult | PartFailure | UnreadablePart:
        task = self._task
        key = note_key(task.work.job_id, part)
        search = PoisonSearch(task.store, key, is_retry=self._is_retry)
        self._runner.begin(part, search)
        writer = self._writer.begin(part)
        outcome: PartResult | PartFailure | UnreadablePart
        try:
            self._flow(part, writer)
            outcome = writer.finish()
        except BatchFailed as failed:
            outcome = _part_failure(task, part, failed, writer.abandon())
        except SQLExecutionError as error:
            of_part = BatchFailed(error, part.rows, None, ())
            outcome = _part_failure(task, part, of_part, writer.abandon())
        except Damaged as damage:
            writer.abandon()
            outcome = UnreadablePart(part.fragment_id, part.rows, str(damage))
        except Exception as error:
            if not is_storage_full(error):
                raise
            # Not a task to try again: it would compute the same rows, and save none of them.
            return _storage_failure(task, part, error)
        search.clear()
        return outcome

    def _flow(self, part: PartWork, writer: PartWriter) -> None:
        for item in reading(self._reader.read(part)):
            for result in self._runner.run(item):
                saved = writer.add(result)
                if saved is not None:
                    self._runner.saved(saved)


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

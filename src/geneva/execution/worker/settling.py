"""What becomes of the parts of a task: done, unreadable, or a failure that ends the task."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from geneva.errors import StorageFullError, UDFOutputError
from geneva.execution.apply.failures import CellFailure
from geneva.execution.worker.failed_rows import FailedRows, with_row_ids
from geneva.execution.worker.poison_rows import PoisonSearch
from geneva.execution.worker.records import (
    BatchFailed,
    Computed,
    Interrupted,
    OpenTask,
    PartEnds,
    Result,
    Saved,
)
from geneva.execution.worker.sealing import sealed
from geneva.execution.worker.task import (
    ColumnWork,
    PartFailure,
    PartResult,
    PartWork,
    UnreadablePart,
)
from geneva.execution.worker.writer import PartWriter, Writer
from geneva.model.view_query import Shown
from geneva.storage.columns.dictionaries import has_narrow_dictionary
from geneva.storage.columns.staged_files import StagedFile
from geneva.storage.lance.damage import Damaged, damage_reason, is_storage_full

_MAX_CLOSING = 8
"""Parts whose files are being closed, ..."""
_MAX_CLOSING_BYTES = 32 * 1024 * 1024
"""... how much is in them at most, if they are more than one, ..."""
_MAX_CLOSING_SECONDS = 0.5
"""... and how much work is lost with them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A part that was begun; `writer`: None where its file could not be opened."""

    part: PartWork
    search: PoisonSearch
    writer: PartWriter | None = None


class PartSettler:
    """Writes the parts of a task, one after the other, and says what became of each.

    Files of several parts may be closed at the same time. The parts are settled in order.
    """

    def __init__(self, task: OpenTask, writer: Writer) -> None:
        """Write nothing yet."""
        self._task, self._writer = task, writer
        self._last: _Begun | None = None
        self._is_open = False
        """Whether more is to be written to the part that was begun last."""
        self._closing: deque[tuple[_Begun, PartWriter, Future[StagedFile]]] = deque()
        self._settled = 0
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
        self._last, self._is_open = _Begun(part, search), True
        try:
            self._last = _Begun(part, search, self._writer.begin(part))
        except Exception as error:  # noqa: BLE001  what is no outcome is raised again
            self._fail(error)

    def add(self, results: Sequence[Computed | Result]) -> Future[Saved] | None:
        """Write results of the part, in order; return what becomes durable by the last one."""
        writer = self._open_writer
        if writer is None:
            return None
        saved: Future[Saved] | None = None
        try:
            for result in _sealed(self._task, results):
                saved = writer.add(result)
        except Exception as error:  # noqa: BLE001  what is no outcome is raised again
            self._fail(error)
            return None
        return saved

    def end(self, ends: PartEnds, *, now: bool) -> int:
        """End the part. `now`: settle it before returning.

        One that was given up is settled; but a failure of the function still ends the task.
        Returns how many of the parts that have ended were settled since the last time.
        """
        writer, begun, error = self._open_writer, self._last, ends.error
        assert begun is not None
        try:
            if writer is not None and error is None:
                self._close(begun, writer, gives_back=ends.is_given_back)
                self._is_open = False
            elif error is not None and not (writer is None and isinstance(error, Damaged)):
                raise error
            else:
                self._settled += 1
        except Exception as found:  # noqa: BLE001  what is no outcome is raised again
            self._fail(found)
            self._settled += 1
        self._settle_closed(every=now)
        settled, self._settled = self._settled, 0
        return settled

    def finish(self) -> None:
        """Settle what is left, and record what is worth it, at the end of the task."""
        self._settle_closed(every=True)
        if self.failure is None or self.failure.kind != StorageFullError.__name__:
            self._writer.finish()

    def _close(self, begun: _Begun, writer: PartWriter, *, gives_back: bool) -> None:
        closing = writer.close_behind() if not gives_back else None
        if closing is not None:
            self._closing.append((begun, writer, closing))
            return
        result = writer.give_back() if gives_back else writer.finish()
        self._settle_closed(every=True)
        if self.failure is None:
            self._settle(begun, result)
        self._settled += 1

    @property
    def max_closing(self) -> int:
        """How many parts may have ended and be unsettled."""
        return _MAX_CLOSING if self._task.work.ref.is_remote else 0

    @property
    def _open_writer(self) -> PartWriter | None:
        return self._last.writer if self._is_open and self._last is not None else None

    def _settle_closed(self, *, every: bool) -> None:
        """Settle parts whose files are closed, in order; wait for all, or for as many as needed."""
        while self._closing and self.failure is None:
            begun, writer, closed = self._closing[0]
            if not (every or closed.done() or self._is_too_much_closing()):
                return
            self._closing.popleft()
            self._settled += 1
            try:
                result = writer.finished(closed.result())
            except Exception as error:  # noqa: BLE001  what is no outcome is raised again
                self._give_up(begun, error)
            else:
                self._settle(begun, result)

    def _is_too_much_closing(self) -> bool:
        writers = [writer for _, writer, _ in self._closing]
        return (
            len(writers) > _MAX_CLOSING
            or sum(writer.nbytes for writer in writers) > _MAX_CLOSING_BYTES
            or sum(writer.seconds for writer in writers) > _MAX_CLOSING_SECONDS
        )

    def _settle(self, begun: _Begun, outcome: PartResult | PartFailure | UnreadablePart) -> None:
        begun.search.clear()
        self.outcomes.append(outcome)

    def _fail(self, error: Exception) -> None:
        """Settle the part that was begun last by an error, after those before it."""
        assert self._last is not None
        self._settle_closed(every=True)
        if self.failure is None:
            self._give_up(self._last, error)
        self._is_open = False

    def _give_up(self, begun: _Begun, error: Exception) -> None:
        """Settle a part by an error, or raise it: then Spark runs the task again."""
        task, part = self._task, begun.part
        if self.given_up is part:  # what was added is saved already
            begun = _Begun(part, begun.search)
        self.given_up = part
        if isinstance(error, UDFOutputError):  # found where values of several batches come together
            error = BatchFailed(error, part.rows, None, ())
        try:
            if isinstance(error, BatchFailed):
                skipped = _abandoned(task, begun)
                self._settle(begun, _part_failure(task, part, error, skipped))
            elif isinstance(error, Interrupted):
                if task.work.computation.runs_user_code:  # else it is read again in no time
                    _abandoned(task, begun)
            elif isinstance(error, Damaged):
                _abandoned(task, begun)
                self._settle(begun, UnreadablePart(part.fragment_id, part.rows, str(error)))
            else:
                raise error
        except Exception as found:
            if not is_storage_full(found):
                raise
            # Not a task to try again: it would compute the same rows, and save none of them.
            self.outcomes.append(_storage_failure(task, part, found))


def _abandoned(task: OpenTask, begun: _Begun) -> FailedRows:
    """Save what was added, and no more; return the rows that were skipped so far."""
    return begun.writer.abandon() if begun.writer is not None else FailedRows(task.work.hide)


def _sealed(task: OpenTask, results: Sequence[Computed | Result]) -> Iterator[Result]:
    """Results as they are written: what was computed in a row is sealed at once.

    One by one, where together they may have more values than a dictionary has room for: the writer
    says which row has one too many.
    """
    together: list[Computed] = []
    one_by_one = has_narrow_dictionary(task.schema.types)
    for result in results:
        if together and (one_by_one or isinstance(result, Result) or result.follows_gap):
            yield sealed(task, together)
            together = []
        if isinstance(result, Result):
            yield result
        else:
            together.append(result)
    if together:
        yield sealed(task, together)


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
    hide = task.work.hide
    if failed.at_fault is not None:
        failures.append(failed.at_fault.without_secrets(hide))
        where = f"row {failed.at_fault.offset}"
    cell: CellFailure | None = getattr(failed.error, "failure", None)
    message = getattr(failed.error, "in_table", None) or failed.error
    column = getattr(failed.error, "column", None) or task.work.computation.name
    return PartFailure(
        fragment_id=part.fragment_id,
        kind=type(failed.error).__name__,
        message=hide(
            f"{_shown(task.work, column).place}, fragment {part.fragment_id}, {where} (of rows "
            f"[{rows.start}, {rows.end})): {message}"
        ),
        traceback=hide(cell.traceback) if cell is not None else "",
        failures=with_row_ids(task.dataset, part.fragment_id, failures),
    )


def _shown(work: ColumnWork, column: str) -> Shown:
    return Shown.of(work.ref.name, column, work.computation.program_name)

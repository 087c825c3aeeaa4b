"""The program of a worker: windows of inputs in, results out, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from geneva.errors import (
    GenevaError,
    InvalidUDFError,
    TooManyFailedRowsError,
    UDFError,
    UDFIntegrityError,
)
from geneva.execution.apply.batch import Applied
from geneva.execution.apply.failures import CellFailure
from geneva.execution.apply.memo import Memo, shared_memo
from geneva.execution.worker.failed_rows import row_failure
from geneva.execution.worker.pacing import Pacing
from geneva.execution.worker.poison_rows import BatchGuard, PoisonSearch
from geneva.execution.worker.program import Program, live_program
from geneva.execution.worker.records import (
    BatchFailed,
    Clock,
    Durable,
    OpenTask,
    Result,
    Saved,
    Window,
)
from geneva.execution.worker.task import ColumnWork, PartWork, RowFailure
from geneva.model.digests import digest_rows
from geneva.model.rows import Offsets, RowRange
from geneva.storage.columns.receipts import is_failed, receipts_for
from geneva.storage.columns.staged_files import storable
from geneva.storage.lance.pieces import Piece, concat_batches, merged

_ENDS_THE_JOB = (UDFError, UDFIntegrityError, InvalidUDFError)
"""Failures of the user's function. Anything else is a failed task, which Spark runs again."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Rows that are computed together."""

    offsets: Offsets
    inputs: pa.RecordBatch

    @property
    def rows(self) -> RowRange:
        return RowRange(int(self.offsets[0]), int(self.offsets[-1]) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """What a batch gave."""

    piece: Piece
    failures: tuple[RowFailure, ...] = ()
    rows_run: int = 0
    seconds: float = 0.0


class BatchRunner:
    """Runs the task's program over windows. It reads and writes nothing but poison-row notes."""

    def __init__(
        self, task: OpenTask, load: Callable[[ColumnWork], Program] = live_program
    ) -> None:
        """Run nothing yet: the program is loaded when there are rows for it."""
        self._task, self._work, self._load = task, task.work, load
        self._pacing = Pacing(task.work)
        self._failed_rows = 0
        self._memo: Memo | None = None
        computation = task.work.computation
        if computation.memoizes and computation.receipt is not None:
            self._memo = shared_memo(task.work.job_id, computation.id)
        self.clock = Clock()
        self.retries = 0

    def begin(self, part: PartWork, search: PoisonSearch) -> None:
        """Go on with another part."""
        self._search = search
        self._pacing.begin(part.window)

    def run(self, item: Window | Result) -> Iterator[Result]:
        """Compute a window; pass on what has its values already.

        Raises BatchFailed when the user's function fails and its policy doesn't skip the row.
        """
        if isinstance(item, Window):
            yield from self._run_window(item)
        elif item.durable is Durable.ALREADY:
            self._failed_rows += len(item.failures)
            self._pacing.restart()
            yield item
        else:
            yield self._paced(item, suspect=False)

    def saved(self, saved: Saved) -> None:
        """Take the writer's acknowledgement."""
        self._pacing.saved(saved.seconds)

    def _run_window(self, window: Window) -> Iterator[Result]:
        at, done, seconds = window.rows.start, 0, window.seconds
        program = self._loaded(window)
        while done < len(window.offsets):
            size = self._pacing.batch_rows(len(window.offsets) - done, program.cost)
            size = self._search.max_rows(window.offsets[done:], size)
            batch = _Batch(window.offsets[done : done + size], window.inputs.slice(done, size))
            computed = self._run_batch(program, batch)
            rows = RowRange(at, batch.rows.end)
            piece = _with_known(computed.piece, window.known, rows)
            result = Result(
                rows=rows,
                piece=piece,
                failures=computed.failures,
                rows_run=computed.rows_run,
                rows_reused=len(piece.offsets) - computed.rows_run,
                seconds=seconds + computed.seconds,
            )
            yield self._paced(result, suspect=self._search.is_suspect(batch.offsets))
            at, done, seconds = rows.end, done + size, 0.0

    def _loaded(self, window: Window) -> Program:
        """The program; a function that can't be loaded fails on the first row."""
        try:
            return self._load(self._work)
        except _ENDS_THE_JOB as error:
            first = _Batch(window.offsets[:1], window.inputs.slice(0, 1))
            raise _batch_failed(error, first, ()) from error

    def _paced(self, result: Result, *, suspect: bool) -> Result:
        if self._pacing.is_due(result) or suspect:
            self._pacing.restart()
            return replace(result, durable=Durable.NOW)
        return result

    def _run_batch(self, program: Program, batch: _Batch) -> _Computed:
        """Compute a batch; of rows with equal inputs only one, where the function allows it."""
        memo = self._memo
        if memo is None:
            return self._compute(program, batch)
        seed = self._work.computation.receipt_seed()
        digests = digest_rows(batch.inputs.columns, seed, len(batch.offsets))
        to_compute, places, known = memo.split(digests)
        parts = [] if known is None else [known]
        computed = None
        if len(to_compute):
            rows = batch.inputs.take(pa.array(to_compute))
            computed = self._compute(program, _Batch(batch.offsets[to_compute], rows))
            values = computed.piece.values
            if not is_failed(values.column(values.num_columns - 1)).any():
                memo.add(digests[to_compute], values)
            parts.append(values)
        piece = Piece(batch.offsets, concat_batches(parts).take(pa.array(places)), digests)
        return replace(computed, piece=piece) if computed is not None else _Computed(piece)

    def _compute(self, program: Program, batch: _Batch) -> _Computed:
        failures: tuple[RowFailure, ...] = ()
        started = time.perf_counter()
        try:
            try:
                applied = self._call(program, batch)
            finally:
                seconds = time.perf_counter() - started
                self.clock.udf += seconds
            self.retries += applied.retries
            failures = _row_failures(batch.offsets, applied)
            self._check_failures(failures)
        except _ENDS_THE_JOB as error:
            raise _batch_failed(error, batch, failures) from error
        started = time.perf_counter()
        piece = self._with_receipts(batch, applied)
        self.clock.write += time.perf_counter() - started
        self._pacing.ran(len(batch.offsets), piece.values.nbytes)
        return _Computed(piece, failures, len(batch.offsets), seconds)

    def _call(self, program: Program, batch: _Batch) -> Applied:
        search = self._search
        condemned = search.condemned(batch.offsets)
        if condemned is not None:
            return program.settle(condemned.error, batch.inputs, condemned.tries)
        # A set-up that kills its worker is no row's fault: nothing is noted before it.
        program.warm(batch.inputs)
        search.starting(batch.offsets)
        started = time.perf_counter()
        applied = program.run(batch.inputs, BatchGuard(search, batch.offsets))
        program.cost = program.cost.after(len(batch.offsets), time.perf_counter() - started)
        return applied

    def _check_failures(self, failures: tuple[RowFailure, ...]) -> None:
        """Give up when more rows of the task failed than may."""
        if not failures:
            return
        self._failed_rows += len(failures)
        limit = self._work.max_failed
        if limit is not None and self._failed_rows > limit:
            last = failures[-1]
            raise TooManyFailedRowsError(
                f"{self._failed_rows:,} rows failed, and the UDF's limits (max_failed_rows, "
                f"max_failed_fraction) allow {limit:,} here. The last one, row {last.offset}: "
                f"{last.exception_type}: {last.message}. See table.get_errors(); raise the limits, "
                "or fix the function, and run again: what is computed is kept."
            )

    def _with_receipts(self, batch: _Batch, applied: Applied) -> Piece:
        """The computed values, each with its receipt."""
        digests = None
        task, computation = self._task, self._work.computation
        columns = [storable(task.dataset, values) for values in applied.values]
        if computation.receipt is not None:
            failed = [failure.row for failure in applied.failures if failure.row is not None]
            seed = computation.receipt_seed()
            digests = digest_rows(batch.inputs.columns, seed, batch.inputs.num_rows)
            columns.append(receipts_for(digests, columns, failed=failed))
        values = pa.RecordBatch.from_arrays(columns, schema=task.schema)
        return Piece(batch.offsets, values, digests)


def _with_known(piece: Piece, known: Piece | None, rows: RowRange) -> Piece:
    """A piece, and with it what is known of other rows in its range."""
    if known is None:
        return piece
    low, high = (int(i) for i in np.searchsorted(known.offsets, (rows.start, rows.end)))
    if low == high:
        return piece
    digests = known.digests[low:high] if known.digests is not None else None
    values = known.values.slice(low, high - low)
    return merged([piece, Piece(known.offsets[low:high], values, digests)])


def _row_failures(offsets: Offsets, applied: Applied) -> tuple[RowFailure, ...]:
    return tuple(
        row_failure(int(offsets[failure.row]), failure)
        for failure in applied.failures
        if failure.row is not None
    )


def _batch_failed(
    error: GenevaError, batch: _Batch, skipped: tuple[RowFailure, ...]
) -> BatchFailed:
    cell: CellFailure | None = getattr(error, "failure", None)
    at_fault = None
    if cell is not None and cell.row is not None:
        at_fault = row_failure(int(batch.offsets[cell.row]), cell)
    return BatchFailed(error, batch.rows, at_fault, skipped)

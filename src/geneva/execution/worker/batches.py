"""The program of a worker: windows of inputs in, results out, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pyarrow as pa

from geneva.errors import (
    GenevaError,
    InvalidUDFError,
    TooManyFailedRowsError,
    UDFError,
    UDFIntegrityError,
)
from geneva.execution.apply.ahead import CallsAhead
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
    Computed,
    Durable,
    OpenTask,
    Result,
    Saved,
    Window,
)
from geneva.execution.worker.task import ColumnWork, PartWork, RowFailure
from geneva.execution.worker.waiting import WaitingRows
from geneva.model.rows import Offsets, RowRange
from geneva.render.text import count
from geneva.storage.lance.pieces import concat_batches

_Values = TypeVar("_Values", Computed, Result)

_ENDS_THE_JOB = (UDFError, UDFIntegrityError, InvalidUDFError)
"""Failures of the user's function. Anything else is a failed task, which Spark runs again."""


class BatchRunner:
    """Runs the task's program over windows. It reads and writes nothing but poison-row notes."""

    def __init__(
        self, task: OpenTask, load: Callable[[ColumnWork], Program] = live_program
    ) -> None:
        """Run nothing yet: the program is loaded when there are rows for it."""
        self._work, self._load = task.work, load
        self._pacing = Pacing(task.work)
        self._failed_rows = 0
        self._memo: Memo | None = None
        computation = task.work.computation
        if computation.memoizes and computation.receipt is not None:
            self._memo = shared_memo(task.work.job_id, computation.id)
        self.clock = Clock()
        self.retries = 0

    @property
    def has_checkpoint_rows(self) -> bool:
        """Whether the user said how many rows may be lost."""
        return self._pacing.has_checkpoint_rows

    def begin(self, part: PartWork, search: PoisonSearch) -> None:
        """Go on with another part."""
        self._search = search
        self._waiting = WaitingRows()
        self._pacing.begin(part.window)

    def run(self, item: Window | Result) -> Iterator[Computed | Result]:
        """Compute a window; pass on what has its values already.

        Raises BatchFailed when the user's function fails and its policy doesn't skip the row.
        """
        if isinstance(item, Window):
            self._waiting.add(item)
            yield from self._run_waiting(is_last=not self._pacing.has_exact_batches)
            return
        yield from self.finish()
        if item.durable is Durable.ALREADY:
            self._failed_rows += len(item.failures)
            self._pacing.restart()
            yield item
        else:
            yield self._paced(item)

    def finish(self) -> Iterator[Computed]:
        """Compute the rows that are left, fewer than a batch has: no others follow them."""
        yield from self._run_waiting(is_last=True)

    def saved(self, saved: Saved) -> None:
        """Take the writer's acknowledgement."""
        self._pacing.saved(saved.seconds)

    def _run_waiting(self, *, is_last: bool) -> Iterator[Computed]:
        """Compute batches as long as there are rows for a full one; if they are the last, all."""
        waiting = self._waiting
        if not waiting:
            return
        program = self._loaded()
        with self._ahead(program) as ahead:
            while waiting:
                size = self._pacing.batch_rows(program.cost)
                if size > len(waiting) and not is_last and ahead is None:
                    return
                size = min(size, len(waiting))
                batch = waiting.take(self._search.max_rows(waiting.first(size), size))
                computed = self._run_batch(program, batch, ahead)
                yield self._paced(computed, suspect=self._search.is_suspect(batch.offsets))

    def _ahead(self, program: Program) -> AbstractContextManager[CallsAhead | None]:
        """The calls for all rows that wait, where they may be made before their batch's turn.

        Not where notes say which rows are being computed, or where rows share calls.
        """
        if self._search.is_retry or self._memo is not None:
            return nullcontext()
        rows = self._waiting.all()
        guard = BatchGuard(self._search, rows.offsets)
        return program.ahead(rows.inputs, guard) or nullcontext()

    def _loaded(self) -> Program:
        """The program; a function that can't be loaded fails on the first row."""
        try:
            return self._load(self._work)
        except _ENDS_THE_JOB as error:
            raise _batch_failed(error, self._waiting.first(1), ()) from error

    def _paced(self, result: _Values, *, suspect: bool = False) -> _Values:
        due = self._pacing.is_due(result)
        if not due and not suspect:
            return result
        self._pacing.restart()
        is_awaited = suspect or self._pacing.has_checkpoint_rows
        return replace(result, durable=Durable.NOW if is_awaited else Durable.SOON)

    def _run_batch(self, program: Program, batch: Window, ahead: CallsAhead | None) -> Computed:
        """Compute a batch; of rows with equal inputs only one, where the function allows it."""
        memo, digests = self._memo, batch.digests
        if memo is None or digests is None:
            return self._compute(program, batch, ahead)
        to_compute, places, known = memo.split(digests)
        if not len(to_compute):
            assert known is not None
            outputs = tuple(known.take(pa.array(places)).columns)
            return _computed(batch, outputs)
        rows = batch.inputs.take(pa.array(to_compute))
        part = replace(
            batch, offsets=batch.offsets[to_compute], inputs=rows, digests=digests[to_compute]
        )
        computed = self._compute(program, part)
        values = pa.RecordBatch.from_arrays(
            list(computed.outputs), names=[f"o{i}" for i in range(len(computed.outputs))]
        )
        if not computed.failed:
            memo.add(digests[to_compute], values)
        parts = [values] if known is None else [known, values]
        start = known.num_rows if known is not None else 0
        failed_at = [start + place for place in computed.failed]
        return replace(
            computed,
            offsets=batch.offsets,
            outputs=tuple(concat_batches(parts).take(pa.array(places)).columns),
            digests=digests,
            failed=tuple(np.flatnonzero(np.isin(places, failed_at)).tolist()),
        )

    def _compute(
        self, program: Program, batch: Window, ahead: CallsAhead | None = None
    ) -> Computed:
        failures: tuple[RowFailure, ...] = ()
        started = time.perf_counter()
        try:
            try:
                applied = self._call(program, batch, ahead)
            finally:
                seconds = time.perf_counter() - started
                self.clock.udf += seconds
            self.retries += applied.retries
            failures = _row_failures(batch.offsets, applied)
            self._check_failures(failures)
        except _ENDS_THE_JOB as error:
            raise _batch_failed(error, batch.offsets, failures) from error
        computed = replace(
            _computed(batch, applied.values),
            failed=tuple(f.row for f in applied.failures if f.row is not None),
            failures=failures,
            rows_run=len(batch.offsets),
            seconds=batch.seconds + seconds,
        )
        self._pacing.ran(len(batch.offsets), computed.nbytes)
        return computed

    def _call(self, program: Program, batch: Window, ahead: CallsAhead | None) -> Applied:
        search = self._search
        condemned = search.condemned(batch.offsets)
        if condemned is not None:
            return program.settle(condemned.error, batch.inputs, condemned.tries)
        # A set-up that kills its worker is no row's fault: nothing is noted before it.
        program.warm(batch.inputs)
        search.starting(batch.offsets)
        started = time.perf_counter()
        if ahead is not None:
            applied = ahead.take(len(batch.offsets), self._pacing.rows_to_checkpoint)
        else:
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
                f"{count(self._failed_rows, 'row')} failed, and the UDF's limits (max_failed_rows, "
                f"max_failed_fraction) allow {limit:,} here. The last one, row {last.offset}: "
                f"{last.exception_type}: {last.message}. See table.get_errors(); raise the limits, "
                "or fix the function, and run again: what is computed is kept."
            )


def _computed(batch: Window, outputs: tuple[pa.Array, ...]) -> Computed:
    return Computed(
        rows=batch.rows,
        offsets=batch.offsets,
        outputs=outputs,
        digests=batch.digests,
        known=batch.known,
        seconds=batch.seconds,
    )


def _row_failures(offsets: Offsets, applied: Applied) -> tuple[RowFailure, ...]:
    return tuple(
        row_failure(int(offsets[failure.row]), failure)
        for failure in applied.failures
        if failure.row is not None
    )


def _batch_failed(
    error: GenevaError, offsets: Offsets, skipped: tuple[RowFailure, ...]
) -> BatchFailed:
    cell: CellFailure | None = getattr(error, "failure", None)
    at_fault = None
    if cell is not None and cell.row is not None:
        at_fault = row_failure(int(offsets[cell.row]), cell)
    rows = RowRange(int(offsets[0]), int(offsets[-1]) + 1)
    return BatchFailed(error, rows, at_fault, skipped)

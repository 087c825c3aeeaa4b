"""The one function that is shipped: read, apply the UDF, checkpoint, stage.

State is in storage. A task may run twice, at the same time even, and nothing breaks: staged names
are unique, checkpoints of one key hold the same rows, and only the driver publishes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from geneva.errors import GenevaError, InvalidUDFError, UDFError, UDFIntegrityError
from geneva.execution.complaints import CellFailure
from geneva.execution.failed_rows import FailedRows, row_failure, with_row_ids
from geneva.execution.retry import attempt_number, resume_task
from geneva.execution.task import (
    PartFailure,
    PartResult,
    PartWork,
    Task,
    TaskReport,
)
from geneva.execution.task_run import TaskRun, Unsaved
from geneva.execution.trail import BatchGuard, Trail
from geneva.planning.ranges import gaps
from geneva.planning.sizing import BatchRule
from geneva.rows import Offsets, RowRange, RowSet
from geneva.storage.checkpoints import ERROR_COLUMN, CheckpointKey
from geneva.storage.dataset import row_addresses
from geneva.storage.donors import DonatedValues, merged
from geneva.storage.fragments import (
    Piece,
    RowTaker,
    StagedFile,
    concat,
    fitting_window,
    read_windows,
    rows_for,
    scatter,
    stage_column,
)
from geneva.storage.provenance import Provenance
from geneva.storage.source_rows import SourceRows
from geneva.storage.staging import (
    drop_staged,
    read_staged_values,
)
from geneva.view_definition import SOURCE_ROW_ID

_SPARSE = 0.2
"""Below this share of wanted rows they are read by address instead of scanning past the others."""
_BUFFER_BYTES = 64 * 1024 * 1024
"""Results held for the next checkpoint; more are made durable early, to bound memory."""
_LEAST_RECORDED_SECONDS = 0.1
"""Staged files that took less work than this are cheaper to make again than to record."""


def run_task(task: Task) -> str:
    """Do the parts of a task in order; return a `TaskReport` as JSON.

    A failure of the user's function is reported, not raised: Spark would run the task again.
    """
    started = time.perf_counter()
    run = TaskRun(task.work)
    again = bool(task.attempt or attempt_number())
    parts, results = resume_task(task)
    failure = None
    for part in parts:
        part_run = _PartRun(run, part, again=again)
        try:
            results.append(part_run.execute())
        except (UDFError, UDFIntegrityError, InvalidUDFError) as error:
            failure = part_run.failed(error)
            break
        run.rows_failed += results[-1].rows_failed
    run.record_pending(_LEAST_RECORDED_SECONDS)
    seconds = time.perf_counter() - started
    report = TaskReport(
        tuple(results),
        failure,
        run.clock.timings(),
        seconds,
        tuple(run.recorded),
        run.retries,
    )
    return report.to_json()


class _PartRun:
    """One part being computed."""

    def __init__(self, task: TaskRun, part: PartWork, *, again: bool) -> None:
        self._trail = Trail(task.store, task.work.job_id, part, again=again)
        self._task, self._part, self._work = task, part, task.work
        self._rule = BatchRule.of(task.work.sizes, part.window, task.work.flush_seconds)
        self._unsaved = Unsaved(part.rows.start)
        self._checkpoints: list[RowRange] = []
        self._rows_run = self._rows_reused = 0
        self._at: tuple[int, int] = (part.rows.start, part.rows.end)
        self._failed = FailedRows()
        self._donated: DonatedValues | None = None
        self._to_run = part.compute
        if part.donors:
            self._open_donors()

    def _open_donors(self) -> None:
        part, task = self._part, self._task
        donated = DonatedValues(task.work.ref, task.store, task.work.column, task.arrow_field.type)
        wanted = RowSet.from_offsets(part.physical_rows, self._wanted(part.rows))
        taken = donated.open(part.donors, wanted)
        if taken:
            self._donated = donated
            self._to_run = part.compute.minus(taken.slice(part.rows))

    def execute(self) -> PartResult:
        part = self._part
        path = self._stage() if part.whole else None
        if not part.whole:
            for _ in self._pieces():
                pass
        self._trail.clear()
        return PartResult(
            part.fragment_id,
            part.rows.start,
            part.rows.end,
            self._rows_run,
            self._rows_reused,
            tuple((r.start, r.end) for r in self._checkpoints),
            path,
            len(self._failed.found),
            self._failed.told(self._task.dataset, part.fragment_id),
        )

    def failed(self, error: GenevaError) -> PartFailure:
        """Keep what was computed before the failure, and describe it."""
        self._flush(self._at[0])
        self._trail.clear()
        failure: CellFailure | None = getattr(error, "failure", None)
        row = failure.row if failure is not None else None
        start, end = self._at
        told = [*self._failed.found.values()]
        if failure is not None and row is not None:
            told.append(row_failure(self._offset_of(row), failure))
        where = f"rows [{start}, {end})" if row is None else f"row {self._offset_of(row)}"
        return PartFailure(
            self._part.fragment_id,
            start,
            end,
            type(error).__name__,
            f"Table {self._work.ref.name!r}, column {self._work.column!r}, fragment "
            f"{self._part.fragment_id}, {where} (of rows [{start}, {end})): {error}",
            failure.traceback if failure is not None else "",
            self._rows_run,
            with_row_ids(self._task.dataset, self._part.fragment_id, told),
        )

    def _offset_of(self, row: int) -> int:
        return int(self._batch_offsets[row])

    def _stage(self) -> str:
        part, work, task = self._part, self._work, self._task
        assert part.valid_after is not None
        provenance = Provenance(
            work.column_uuid, work.udf_version, part.inputs, part.valid_after, part.failed_after
        )
        arrays = scatter(
            self._pieces(), task.arrow_field.type, part.rows, part.window, self._old_values()
        )
        before = task.clock.work + task.clock.checkpoint
        started = time.perf_counter()
        path, rows = stage_column(
            work.ref, task.dataset, work.outputs, arrays, provenance, complete=part.complete
        )
        spent = time.perf_counter() - started
        task.clock.write += spent - (task.clock.work + task.clock.checkpoint - before)
        if self._failed:
            path, rows = self._without_failed(path, provenance)
        if rows != part.physical_rows:
            raise AssertionError(
                f"staged {rows} rows for fragment {part.fragment_id} of {part.physical_rows} rows"
            )
        staged = StagedFile(
            part.fragment_id,
            path,
            part.physical_rows,
            work.column_uuid,
            work.field_ids,
            part.inputs,
            part.base,
        )
        task.staged(part.prefix, staged)
        return path

    def _without_failed(self, path: str, planned: Provenance) -> tuple[str, int]:
        """Stage the file again under a name and provenance that tell which rows failed.

        That is known only now, and a file's name can't be changed; the usual case never pays.
        """
        work, task = self._work, self._task
        failed = self._failed.rows(self._part.physical_rows)
        told = replace(
            planned,
            valid=planned.valid.minus(failed),
            failed=failed.union(planned.failed) if planned.failed is not None else failed,
        )
        arrays = read_staged_values(work.ref, path, self._part.window)
        staged = stage_column(work.ref, task.dataset, work.outputs, arrays, told, complete=False)
        drop_staged(work.ref, path)
        return staged

    def _old_values(self) -> Iterator[pa.Array] | None:
        if not self._part.keeps_old:
            return None
        where = (self._task.dataset, self._part.fragment_id, self._work.outputs, self._part.rows)
        windows = read_windows(*where, fitting_window(*where, self._part.window))
        return (self._task.as_values(batch) for _, batch in windows)

    def _pieces(self) -> Iterator[Piece]:
        """New values in ascending order: out of checkpoints where there are some, else computed."""
        part = self._part
        at = part.rows.start
        for covered in (*part.covered, None):
            until = covered.start if covered is not None else part.rows.end
            for open_range in gaps((), RowRange(at, until)):
                yield from self._computed(open_range)
            if covered is None:
                break
            at = covered.end
            self._flush_if_elsewhere(covered.start)
            loaded = self._loaded(covered)
            if loaded is None:
                yield from self._computed(covered)
            else:
                self._unsaved.start = covered.end
                yield loaded
        if not part.whole or self._rule.checkpoint_rows is not None or self._failed:
            # Failed rows in any case: a file can't tell what happened to them.
            self._flush(part.rows.end)

    def _loaded(self, rows: RowRange) -> Piece | None:
        """The values of a checkpointed range; None when the checkpoint can't be used."""
        key = CheckpointKey(self._part.prefix, self._part.fragment_id, rows).path()
        wanted = self._wanted(rows)
        started = time.perf_counter()
        try:
            batch = self._task.store[key]
            values = batch.column(self._work.column)
            addresses = batch.column("_rowaddr").to_numpy()
        except KeyError:
            return None
        finally:
            self._task.clock.checkpoint += time.perf_counter() - started
        offsets = (addresses & np.uint64(0xFFFFFFFF)).astype(np.int64)
        if values.type != self._task.arrow_field.type:
            return None
        if not np.array_equal(offsets, wanted):
            places = np.searchsorted(offsets, wanted)
            found = places < len(offsets)
            if not found.all() or not np.array_equal(offsets[places], wanted):
                return None
            values = values.take(pa.array(places))
        self._failed.load(offsets, wanted, batch)
        self._checkpoints.append(rows)
        self._rows_reused += len(wanted)
        return Piece(wanted, values)

    def _wanted(self, rows: RowRange) -> Offsets:
        return self._members(self._part.compute, rows)

    def _members(self, chosen: RowSet, rows: RowRange) -> Offsets:
        start = self._part.rows.start
        inside = RowRange(rows.start - start, rows.end - start)
        return chosen.slice(inside).offsets() + rows.start

    def _computed(self, rows: RowRange) -> Iterator[Piece]:
        """New values of the wanted rows of a range: taken over where a donor has them, else run."""
        self._flush_if_elsewhere(rows.start)
        for piece in self._with_donated(rows, self._run(rows)):
            yield piece
            self._save(piece)
        self._at = (rows.end, rows.end)

    def _with_donated(self, rows: RowRange, pieces: Iterator[Piece]) -> Iterator[Piece]:
        if self._donated is None:
            yield from pieces
            return
        at = rows.start
        for piece in pieces:
            end = int(piece.offsets[-1]) + 1
            yield self._joined(piece, self._take_over(at, end))
            at = end
        for start in range(at, rows.end, self._part.window):
            taken = self._take_over(start, min(start + self._part.window, rows.end))
            if taken is not None:
                yield taken

    def _take_over(self, start: int, end: int) -> Piece | None:
        assert self._donated is not None
        piece = self._donated.between(start, end)
        self._rows_reused += len(piece.offsets) if piece is not None else 0
        return piece

    @staticmethod
    def _joined(piece: Piece, taken: Piece | None) -> Piece:
        return piece if taken is None else merged([piece, taken])

    def _run(self, rows: RowRange) -> Iterator[Piece]:
        """Run the UDF over the rows of a range that nobody has a value for."""
        for offsets, batch in self._timed(self._inputs(rows)):
            done = 0
            while done < len(offsets):
                size = self._batch_size(len(offsets) - done)
                size = self._trail.limit(offsets[done:], size)
                piece = self._apply(offsets[done : done + size], batch.slice(done, size))
                done += size
                yield piece

    def _inputs(self, rows: RowRange) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        wanted = self._members(self._to_run, rows)
        if not len(wanted):
            return
        if self._work.source is not None:
            yield from self._from_source(self._work.source, wanted, rows)
            return
        dataset, part, paths = self._task.dataset, self._part, self._work.inputs
        window = fitting_window(dataset, part.fragment_id, paths, rows, part.window)
        if len(wanted) < _SPARSE * len(rows):
            taker = RowTaker(dataset, part.fragment_id, paths)
            for i in range(0, len(wanted), window):
                chunk = wanted[i : i + window]
                yield chunk, taker.take(chunk)
            return
        at = 0
        for start, batch in read_windows(dataset, part.fragment_id, paths, rows, window):
            stop = int(np.searchsorted(wanted, start + batch.num_rows, side="left"))
            chunk = wanted[at:stop]
            at = stop
            if len(chunk) == batch.num_rows:
                yield chunk, batch
            elif len(chunk):
                yield chunk, batch.take(pa.array(chunk - start))

    def _from_source(
        self, source: SourceRows, wanted: Offsets, rows: RowRange
    ) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        """Inputs out of another table, at the rows that the fragment's own rows stand for."""
        dataset, part = self._task.dataset, self._part
        windows = read_windows(dataset, part.fragment_id, [SOURCE_ROW_ID], rows, part.window)
        for start, batch in windows:
            low, high = np.searchsorted(wanted, (start, start + batch.num_rows))
            ids = batch.column(0).to_numpy()
            at = int(low)
            while at < high:
                # How wide the source's rows are, only reading some tells.
                chunk = wanted[at : min(at + self._task.source_rows, int(high))]
                rows_read = source.take(ids[chunk - start])
                self._task.source_rows = rows_for(rows_read.nbytes, len(chunk), part.window)
                yield chunk, rows_read
                at += len(chunk)

    def _timed(
        self, inputs: Iterator[tuple[Offsets, pa.RecordBatch]]
    ) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        while True:
            started = time.perf_counter()
            item = next(inputs, None)
            self._task.clock.read += time.perf_counter() - started
            if item is None:
                return
            yield item

    def _batch_size(self, available: int) -> int:
        size = self._task.batch_rows or self._rule.first
        full = self._rule.checkpoint_rows or self._rule.most_checkpoint_rows
        if full is not None:
            size = min(size, full - self._unsaved.rows)
        return max(1, min(size, available))

    def _apply(self, offsets: Offsets, batch: pa.RecordBatch) -> Piece:
        self._at = (int(offsets[0]), int(offsets[-1]) + 1)
        self._batch_offsets = offsets
        self._rows_run += len(offsets)
        known = self._trail.verdict(offsets)
        started = time.perf_counter()
        try:
            program = self._task.program
            if known is not None:
                applied = program.settle(known[0], batch, known[1])
            else:
                # A set-up that kills its worker is no row's fault: nothing is noted before it.
                program.warm(batch)
                self._trail.starting(offsets)
                applied = program.run(batch, BatchGuard(self._trail, offsets))
        finally:
            seconds = time.perf_counter() - started
            self._task.clock.udf += seconds
        values = applied.values
        self._task.retries += applied.retries
        if applied.failures:
            self._failed.add(offsets, applied.failures)
            self._failed.check(self._work.most_failed, self._task.rows_failed)
        full = self._task.batch_rows or self._rule.first
        if len(offsets) >= full:
            wish = self._rule.next_size(full, seconds)
            most = _BUFFER_BYTES * len(offsets) // max(values.nbytes, 1)
            self._task.batch_rows = max(self._rule.first, min(wish, most))
        return Piece(offsets, values)

    def _save(self, piece: Piece) -> None:
        unsaved, clock = self._unsaved, self._task.clock
        unsaved.add(piece)
        seconds = clock.work - unsaved.since
        due = self._rule.is_due(unsaved.rows, seconds, self._task.checkpoint_cost)
        if due or unsaved.bytes >= _BUFFER_BYTES or self._trail.is_suspect(piece.offsets):
            self._flush(int(piece.offsets[-1]) + 1)

    def _flush_if_elsewhere(self, start: int) -> None:
        """A checkpoint is one range: close the one before a jump."""
        if self._unsaved.pieces:
            self._flush(start)
        self._unsaved.start = start

    def _flush(self, end: int) -> None:
        """Make the results up to `end` durable as one batch checkpoint."""
        unsaved, clock = self._unsaved, self._task.clock
        if unsaved.pieces:
            rows = RowRange(unsaved.start, end)
            started = time.perf_counter()
            self._write_checkpoint(rows, unsaved.pieces)
            self._task.checkpoint_cost = time.perf_counter() - started
            clock.checkpoint += self._task.checkpoint_cost
            self._checkpoints.append(rows)
        self._unsaved = Unsaved(end, since=clock.work)

    def _write_checkpoint(self, rows: RowRange, pieces: list[Piece]) -> None:
        part = self._part
        key = CheckpointKey(part.prefix, part.fragment_id, rows).path()
        offsets = np.concatenate([piece.offsets for piece in pieces])
        addresses = pa.array(row_addresses(part.fragment_id, offsets), pa.uint64())
        values = concat([piece.values for piece in pieces])
        columns, names = [values, addresses], [self._work.column, "_rowaddr"]
        errors = self._failed.column(offsets) if self._failed else None
        if errors is not None:
            columns, names = [*columns, errors], [*names, ERROR_COLUMN]
        self._task.store[key] = pa.record_batch(columns, names=names)

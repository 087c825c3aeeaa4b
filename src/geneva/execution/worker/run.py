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
from geneva.execution.apply.batch import Applied
from geneva.execution.apply.failures import CellFailure
from geneva.execution.apply.memo import Memo, shared_memo
from geneva.execution.worker.failed_rows import FailedRows, row_failure, with_row_ids
from geneva.execution.worker.poison_rows import BatchGuard, Trail
from geneva.execution.worker.resume import attempt_number, resume_task
from geneva.execution.worker.task import (
    PartFailure,
    PartResult,
    PartWork,
    Task,
    TaskReport,
)
from geneva.execution.worker.task_run import TaskRun, Unsaved
from geneva.model.digests import Digests, digest_rows
from geneva.model.rows import Offsets, RowRange, RowSet
from geneva.planning.ranges import gaps
from geneva.planning.sizing import BatchRule
from geneva.storage.checkpoints.reuse import ReusedValues
from geneva.storage.checkpoints.staging import drop_staged, read_staged_batches
from geneva.storage.checkpoints.store import DIGEST_COLUMN, ERROR_COLUMN, CheckpointKey
from geneva.storage.columns.provenance import Provenance
from geneva.storage.columns.receipts import is_failed, make_receipts, receipts_for
from geneva.storage.columns.staged_files import StagedFile, stage_columns, storable, written_schema
from geneva.storage.lance.dataset import row_addresses
from geneva.storage.lance.fragments import fitting_window, read_windows
from geneva.storage.lance.pieces import Piece, concat_batches, digests_of, merged, scatter

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
        self._memo: Memo | None = None
        if task.work.computation.memoizes and task.work.computation.receipt is not None:
            self._memo = shared_memo(task.work.job_id, task.work.computation.id)
        self._reused: ReusedValues | None = None
        self._to_run = part.compute
        if part.reuse:
            self._open_reused()

    def _open_reused(self) -> None:
        part, task = self._part, self._task
        reused = ReusedValues(task.work.ref, task.store, task.schema, task.dataset)
        wanted = RowSet.from_offsets(part.physical_rows, self._wanted(part.rows))
        taken = reused.open(part.reuse, wanted)
        if taken:
            self._reused = reused
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
            f"Table {self._work.ref.name!r}, column {self._work.computation.name!r}, fragment "
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
            work.computation.id,
            work.computation.version,
            part.inputs,
            part.valid_after,
            part.failed_after,
            computed=part.compute if part.compute != part.valid_after else None,
        )
        schema = self._staged_schema()
        before = task.clock.work + task.clock.checkpoint
        started = time.perf_counter()
        path, rows = stage_columns(
            work.ref, task.dataset, schema, self._laid_out(), provenance, complete=part.complete
        )
        spent = time.perf_counter() - started
        task.clock.write += spent - (task.clock.work + task.clock.checkpoint - before)
        if self._failed:
            path, rows = self._without_failed(path, schema, provenance)
        if rows != part.physical_rows:
            raise AssertionError(
                f"staged {rows} rows for fragment {part.fragment_id} of {part.physical_rows} rows"
            )
        staged = StagedFile(
            fragment_id=part.fragment_id,
            path=path,
            physical_rows=part.physical_rows,
            column_uuid=work.computation.id,
            field_ids=part.field_ids,
            inputs=part.inputs,
            base=part.base,
        )
        task.staged(part.prefix, staged)
        return path

    def _staged_schema(self) -> pa.Schema:
        receipt = self._work.computation.receipt
        if self._part.receipts_only and receipt is not None:
            return written_schema(self._task.schema, [receipt.name])
        return self._task.schema

    def _laid_out(self) -> Iterator[pa.RecordBatch]:
        """The fragment's rows as they are to be: new values, and old ones where they stay."""
        part, schema = self._part, self._task.schema
        batches = scatter(self._pieces(), schema, part.rows, part.window, self._old_values())
        if not part.receipts_only:
            return batches
        last = schema.names[-1]
        return (batch.select([last]) for batch in batches)

    def _without_failed(self, path: str, schema: pa.Schema, planned: Provenance) -> tuple[str, int]:
        """Stage the file again under a name and provenance that tell which rows failed.

        That is known only now, and a file's name can't be changed; the usual case never pays.
        """
        work, task = self._work, self._task
        failed = self._failed.rows(self._part.physical_rows)
        known = replace(
            planned,
            valid=planned.valid.minus(failed),
            failed=failed.union(planned.failed) if planned.failed is not None else failed,
        )
        batches = read_staged_batches(work.ref, path, self._part.window)
        staged = stage_columns(work.ref, task.dataset, schema, batches, known, complete=False)
        drop_staged(work.ref, path)
        return staged

    def _old_values(self) -> Iterator[pa.RecordBatch] | None:
        """What is there now, with receipts for the rows that are adopted."""
        part, task = self._part, self._task
        if not part.keeps_old:
            return None
        names = task.schema.names
        where = (task.dataset, part.fragment_id, names, part.rows)
        windows = read_windows(*where, fitting_window(*where, part.window))
        if not part.adopt:
            return (batch for _, batch in windows)
        return (self._adopted(start, batch) for start, batch in windows)

    def _adopted(self, start: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Give receipts to the values that are adopted, for the inputs that they have now."""
        part, computation = self._part, self._work.computation
        rows = RowRange(start, start + batch.num_rows)
        wanted = part.adopt.slice(rows).offsets() + start
        if not len(wanted) or computation.receipt is None:
            return batch
        receipts = batch.column(batch.num_columns - 1)
        bits, valid = np.array(receipts.fill_null(0)), np.array(receipts.is_valid())
        outputs = batch.select(range(batch.num_columns - 1))
        started = time.perf_counter()
        for offsets, inputs in self._task.inputs.read(part.fragment_id, wanted, rows, part.window):
            places = offsets - start
            own = outputs.take(pa.array(places)).columns
            seed, rows_read = computation.receipt_seed(), len(offsets)
            made = make_receipts(inputs.columns, own, seed, rows_read, adopted=True)
            bits[places], valid[places] = np.asarray(made), True
        self._task.clock.read += time.perf_counter() - started
        new = pa.array(bits, receipts.type, mask=~valid)
        return pa.RecordBatch.from_arrays([*outputs.columns, new], names=batch.schema.names)

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
            values = batch.select(self._task.schema.names)
            addresses = batch.column("_rowaddr").to_numpy()
        except KeyError:
            return None
        finally:
            self._task.clock.checkpoint += time.perf_counter() - started
        offsets = (addresses & np.uint64(0xFFFFFFFF)).astype(np.int64)
        if values.schema.types != self._task.schema.types:
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
        piece = Piece(wanted, values)
        self._carry_failed(piece)
        return piece

    def _wanted(self, rows: RowRange) -> Offsets:
        return self._members(self._part.compute, rows)

    def _members(self, chosen: RowSet, rows: RowRange) -> Offsets:
        start = self._part.rows.start
        inside = RowRange(rows.start - start, rows.end - start)
        return chosen.slice(inside).offsets() + rows.start

    def _computed(self, rows: RowRange) -> Iterator[Piece]:
        """New values of the wanted rows of a range: taken over where there are some, else run."""
        self._flush_if_elsewhere(rows.start)
        for piece in self._with_reused(rows, self._run(rows)):
            yield piece
            self._save(piece)
        self._at = (rows.end, rows.end)

    def _with_reused(self, rows: RowRange, pieces: Iterator[Piece]) -> Iterator[Piece]:
        if self._reused is None:
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
        assert self._reused is not None
        piece = self._reused.between(start, end)
        if piece is not None:
            self._rows_reused += len(piece.offsets)
            self._carry_failed(piece)
        return piece

    def _carry_failed(self, piece: Piece) -> None:
        """Note the rows that failed when an earlier run tried them, as their receipts say."""
        if self._work.computation.receipt is not None:
            failed = is_failed(piece.values.column(piece.values.num_columns - 1))
            self._failed.carry(piece.offsets[failed].tolist())

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
                some, rows_read = offsets[done : done + size], batch.slice(done, size)
                done += size
                if self._memo is not None:
                    yield self._apply_memoized(self._memo, some, rows_read)
                else:
                    yield self._apply(some, rows_read)

    def _apply_memoized(self, memo: Memo, offsets: Offsets, batch: pa.RecordBatch) -> Piece:
        """Run the UDF once for each input that nobody has run it for."""
        seed = self._work.computation.receipt_seed()
        digests = digest_rows(batch.columns, seed, len(offsets))
        to_compute, places, known = memo.split(digests)
        parts = [] if known is None else [known]
        if len(to_compute):
            rows = batch.take(pa.array(to_compute))
            made = self._apply(offsets[to_compute], rows).values
            failed = is_failed(made.column(made.num_columns - 1))
            if not failed.any():
                memo.add(digests[to_compute], made)
            parts.append(made)
        self._rows_reused += len(offsets) - len(to_compute)
        piece = Piece(offsets, concat_batches(parts).take(pa.array(places)), digests)
        self._carry_failed(piece)
        return piece

    def _inputs(self, rows: RowRange) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        wanted = self._members(self._to_run, rows)
        return self._task.inputs.read(self._part.fragment_id, wanted, rows, self._part.window)

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
        self._task.retries += applied.retries
        if applied.failures:
            self._failed.add(offsets, applied.failures)
            self._failed.check(self._work.max_failed, self._task.rows_failed)
        values, digests = self._with_receipts(batch, applied)
        full = self._task.batch_rows or self._rule.first
        if len(offsets) >= full:
            wish = self._rule.next_size(full, seconds)
            most = _BUFFER_BYTES * len(offsets) // max(values.nbytes, 1)
            self._task.batch_rows = max(self._rule.first, min(wish, most))
        return Piece(offsets, values, digests)

    def _with_receipts(
        self, inputs: pa.RecordBatch, applied: Applied
    ) -> tuple[pa.RecordBatch, Digests | None]:
        """The computed values, each with its receipt, and the digests of their inputs."""
        digests = None
        task, computation = self._task, self._work.computation
        columns = [storable(task.dataset, values) for values in applied.values]
        if computation.receipt is not None:
            failed = [failure.row for failure in applied.failures if failure.row is not None]
            digests = digest_rows(inputs.columns, computation.receipt_seed(), inputs.num_rows)
            columns.append(receipts_for(digests, columns, failed=failed))
        return pa.RecordBatch.from_arrays(columns, schema=task.schema), digests

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
        values = concat_batches([piece.values for piece in pieces])
        columns, names = [*values.columns, addresses], [*values.schema.names, "_rowaddr"]
        if self._work.computation.receipt is not None:
            columns.append(pa.array(digests_of(pieces), pa.uint64()))
            names.append(DIGEST_COLUMN)
        errors = self._failed.column(offsets) if self._failed else None
        if errors is not None:
            columns, names = [*columns, errors], [*names, ERROR_COLUMN]
        self._task.store[key] = pa.record_batch(columns, names=names)

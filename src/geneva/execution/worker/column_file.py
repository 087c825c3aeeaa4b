"""The column file of a fragment: filled piece by piece, staged when the last one is there."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from geneva.errors import UDFOutputError
from geneva.execution.apply.failures import CellFailure
from geneva.execution.worker.failed_rows import row_failure
from geneva.execution.worker.layout import Layout
from geneva.execution.worker.records import BatchFailed, Clock, OpenTask
from geneva.execution.worker.task import FileWork, PartWork
from geneva.model.computation import Computation
from geneva.model.digests import Digests, digest_rows
from geneva.model.rows import Offsets, RowRange, RowSet
from geneva.planning.backfill import OutputPlan, all_rows
from geneva.render.values import error_text
from geneva.storage.columns.dictionaries import DistinctValues, Overflow, has_narrow_dictionary
from geneva.storage.columns.inputs import InputReader
from geneva.storage.columns.provenance import Provenance
from geneva.storage.columns.receipts import receipts_for
from geneva.storage.columns.staged_files import (
    ColumnFileWriter,
    StagedFile,
    drop_staged,
    read_range,
    read_ranges,
    stage_columns,
    unreadable,
    written_schema,
)
from geneva.storage.lance.damage import reading
from geneva.storage.lance.fragments import (
    MAX_WINDOW_ROWS,
    fitting_window,
    is_blob,
    read_windows,
)
from geneva.storage.lance.pieces import Piece, concat_batches
from geneva.udf.picking import picked
from geneva.udf.types import holds_json

_READ_BYTES = 16 * 1024 * 1024
"""How much is read at once of a file that is staged again, or taken back."""


def can_take_back(task: OpenTask, part: PartWork) -> bool:
    """Whether the file of a part will hold, in the same form, all that its checkpoints would."""
    file = part.file
    if file is None or file.receipts_only or has_narrow_dictionary(task.schema.types):
        return False  # of narrow dictionaries, rows are written at the end
    in_full = len(file.outputs) == len(task.work.computation.facets)
    new = all(not part.compute.minus(output.compute) for output in file.outputs)
    return in_full and new and not any(map(_has_own_form, task.schema))


class ColumnFile:
    """A column file that is being written. Left alone before `finish`, it never appears."""

    def __init__(self, task: OpenTask, part: PartWork, file: FileWork, clock: Clock) -> None:
        """Open it."""
        self._task, self._part, self._work = task, part, file
        columns = [_Written.of(task.work.computation, output) for output in file.outputs]
        values = [name for column in columns for name in column.values]
        receipts = [name for column in columns for name in column.receipts]
        laid_out = written_schema(task.schema, [*values, *receipts])
        self._schema = written_schema(task.schema, receipts) if file.receipts_only else laid_out
        old = None
        there = [name for name in laid_out.names if name not in file.lost]
        if file.keeps_old and there:
            old = reading(_old_values(task, part, laid_out, there, columns, clock))
        kept = {
            name: column.kept(part.compute)
            for column in columns
            for name in (*column.values, *column.receipts)
        }
        self._layout = Layout(
            laid_out, part.rows, part.window, old, {n: rows for n, rows in kept.items() if rows}
        )
        # Rows of which just some outputs are new: receipts say what each of them is.
        self._mixed = all_rows(part.physical_rows, kept.values())
        made = part.compute.minus(self._mixed)
        self._provenance = Provenance(
            task.work.computation.id,
            task.work.computation.file_version,
            file.inputs,
            file.valid_after,
            file.failed_after,
            computed=made if made != file.valid_after else None,
        )
        # A file's name can't be changed: if rows may be skipped, and it can't be copied, it doesn't
        # promise all of them.
        self._can_be_copied = not any(map(_has_own_form, self._schema))
        may_skip = not self._can_be_copied and bool(task.work.computation.error_policy)
        self._writer = ColumnFileWriter(
            task.work.ref,
            task.dataset,
            self._schema,
            self._provenance,
            complete=file.complete and not may_skip,
        )
        self._distinct = DistinctValues(task.dataset)
        self._at = part.rows.start
        self._row_bytes = 1
        """The size of a row, of those that were the largest together."""

    def add(self, piece: Piece) -> None:
        """Write the rows up to the end of a piece."""
        self._write(self._layout.add(piece))

    def finish(self, failed: RowSet | None) -> StagedFile:
        """Write the rows behind the last piece, and stage the file."""
        self._write(self._layout.finish())
        known = self._provenance if failed is None else self._with_failed(failed)
        path, rows = self._writer.path, self._writer.close(None if self._can_be_copied else known)
        size: int | None = self._writer.size_bytes
        self._check_readable(path)
        if failed is not None and self._can_be_copied:
            (path, rows), size = self._restage(path, failed), None
        part = self._part
        if rows != part.physical_rows:
            raise AssertionError(
                f"staged {rows} rows for fragment {part.fragment_id} of {part.physical_rows} rows"
            )
        return part.staged_file(self._work, self._task.work.computation.id, path, size)

    def take_back(self, taken: Iterable[tuple[Offsets, Digests]]) -> Generator[Piece, None, None]:
        """Give the file up: read rows back that were added, with these digests, and delete it.

        Not after `finish`, and only where `can_take_back`.
        """
        self._writer.close()
        try:
            for offsets, digests in taken:
                yield Piece(offsets, self._read_back(offsets), digests)
        finally:
            with suppress(Exception):  # nothing refers to it, and what it had may be saved by now
                drop_staged(self._task.work.ref, self._writer.path)

    def _read_back(self, offsets: Offsets) -> pa.RecordBatch:
        """Values of some rows, ascending. Those between them are read, but not held."""
        schema, at_once = self._task.schema, max(1, _READ_BYTES // self._row_bytes)
        found = []
        while len(offsets):
            first = int(offsets[0])
            last = int(offsets[int(np.searchsorted(offsets, first + at_once)) - 1])
            own, offsets = offsets[offsets <= last], offsets[offsets > last]
            start = self._part.rows.start
            rows = RowRange(first - start, last + 1 - start)
            values = read_range(self._task.work.ref, self._writer.path, rows).select(schema.names)
            if values.schema.types != schema.types:
                raise AssertionError(f"wrote {schema.types}, and read {values.schema.types}")
            found.append(picked(values, own - first))
        return concat_batches(found)

    def _write(self, batches: Iterable[pa.RecordBatch]) -> None:
        names = self._schema.names
        for batch in batches:
            written = batch.select(names) if self._work.receipts_only else batch
            overflow = self._distinct.add(written)
            if overflow is not None:
                rows = RowRange(self._at, self._at + batch.num_rows)
                raise too_many_values(overflow, rows, self._at + overflow.row)
            self._writer.write(written)
            self._row_bytes = max(self._row_bytes, written.nbytes // max(1, batch.num_rows))
            self._at += batch.num_rows

    def _check_readable(self, path: str) -> None:
        """Give up a file that Lance can't read back, before anybody relies on it."""
        problem = unreadable(self._task.work.ref, path, self._schema)
        if problem is None:
            return
        drop_staged(self._task.work.ref, path)
        kind = self._task.schema.field(0).type
        error = UDFOutputError(
            f"Lance can't read back the values that it has written ({problem}), so that nothing "
            f"of them was published. Declare the column with another type than {kind}."
        )
        raise BatchFailed(error, self._part.rows, None, ())

    def _restage(self, path: str, failed: RowSet) -> tuple[str, int]:
        """Stage the file again under a name and provenance that say which rows failed.

        That is known only now, and a file's name can't be changed; the usual case never pays.
        """
        task = self._task
        rows = max(1, min(MAX_WINDOW_ROWS, _READ_BYTES // self._row_bytes))
        batches = read_ranges(task.work.ref, path, rows)
        staged = stage_columns(
            task.work.ref,
            task.dataset,
            self._schema,
            batches,
            self._with_failed(failed),
            complete=False,
        )
        drop_staged(task.work.ref, path)
        return staged

    def _with_failed(self, failed: RowSet) -> Provenance:
        """What the file holds, given the rows that were skipped."""
        planned = self._provenance
        failed = failed.minus(self._mixed)
        return replace(
            planned,
            valid=planned.valid.minus(failed).minus(self._mixed),
            failed=failed.union(planned.failed) if planned.failed is not None else failed,
        )


def _has_own_form(field: pa.Field) -> bool:
    """Whether a file gives values of a column in another form than they are written in."""
    return is_blob(field) or holds_json(field.type)


def too_many_values(overflow: Overflow, rows: RowRange, offset: int) -> BatchFailed:
    """What ends a job whose dictionary column gets more values than its indices can count."""
    error = UDFOutputError(f"The value of row {offset} doesn't fit: {overflow}.")
    at_fault = row_failure(offset, CellFailure(None, type(error).__name__, error_text(error)))
    return BatchFailed(error, rows, at_fault, ())


@dataclass(frozen=True, slots=True)
class _Written:
    """An output as a column file has it: which columns, and which of their rows are new."""

    values: tuple[str, ...]
    receipts: tuple[str, ...]
    plan: OutputPlan

    @classmethod
    def of(cls, computation: Computation, plan: OutputPlan) -> _Written:
        facet = computation.facets[plan.place]
        values, receipts = facet.outputs, facet.receipts
        return cls(tuple(o.name for o in values), tuple(r.name for r in receipts), plan)

    def kept(self, computed: RowSet) -> RowSet:
        """Rows that are computed, but not for this output."""
        return computed.minus(self.plan.compute)


def _old_values(
    task: OpenTask,
    part: PartWork,
    schema: pa.Schema,
    there: list[str],
    columns: Sequence[_Written],
    clock: Clock,
) -> Iterator[pa.RecordBatch]:
    """The present values of a fragment, with receipts for the rows that are adopted.

    Columns of the schema that are not `there` are NULL.
    """
    where = (task.dataset, part.fragment_id, there, part.rows)
    windows = (
        (start, _with_nulls(batch, schema))
        for start, batch in read_windows(*where, fitting_window(*where, part.window))
    )
    computation = task.work.computation
    adopting = [column for column in columns if column.plan.adopt and column.receipts]
    if not adopting:
        yield from (batch for _, batch in windows)
        return
    every = all_rows(part.physical_rows, [column.plan.adopt for column in adopting])
    inputs = InputReader(task.dataset, computation, task.work.job_id)
    seed = computation.receipt_seed()
    for start, batch in windows:
        rows = RowRange(start, start + batch.num_rows)
        wanted = every.slice(rows).offsets() + start
        started = time.perf_counter()
        for offsets, some in inputs.read(part.fragment_id, wanted, rows, part.window):
            digests = digest_rows(computation.receipted(some), seed, len(offsets))
            for column in adopting:
                own = column.plan.adopt.mask()[offsets]
                batch = _with_adopted(batch, column, offsets[own] - start, digests[own])
        clock.read += time.perf_counter() - started
        yield batch


def _with_nulls(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with NULLs for the columns of a schema that it lacks."""
    if batch.num_columns == len(schema):
        return batch
    there, rows = batch.schema.names, batch.num_rows
    columns = [batch.column(f.name) if f.name in there else pa.nulls(rows, f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _with_adopted(
    batch: pa.RecordBatch, column: _Written, places: Offsets, digests: Digests
) -> pa.RecordBatch:
    """Give receipts to the values of an output at some places, for the inputs they have now."""
    (name,) = column.receipts
    receipts = batch.column(name)
    bits, valid = np.array(receipts.fill_null(0)), np.array(receipts.is_valid())
    own = picked(batch.select(list(column.values)), places).columns
    bits[places] = np.asarray(receipts_for(digests, own, adopted=True))
    valid[places] = True
    new = pa.array(bits, receipts.type, mask=~valid)
    at = batch.schema.get_field_index(name)
    return batch.set_column(at, batch.schema.field(at), new)

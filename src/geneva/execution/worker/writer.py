"""The writer of a worker: checkpoints, the column file, and records of staged files.

What is durable is what the writer has acknowledged: ranges by `Saved`, a part by its `PartResult`.
Everything else is lost with the worker, and computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from geneva.background import in_background
from geneva.execution.worker.column_file import ColumnFile, too_many_values
from geneva.execution.worker.failed_rows import FailedRows
from geneva.execution.worker.pacing import MAX_UNSAVED_BYTES
from geneva.execution.worker.records import Clock, Durable, OpenTask, Result, Saved
from geneva.execution.worker.task import PartResult, PartWork
from geneva.model.addresses import row_addresses
from geneva.model.digests import Digests
from geneva.model.rows import Offsets, RowRange
from geneva.planning.sizing import BatchRule
from geneva.storage.checkpoints.staging import record_staged
from geneva.storage.checkpoints.store import DIGEST_COLUMN, ERROR_COLUMN, CheckpointKey
from geneva.storage.columns.dictionaries import DistinctValues
from geneva.storage.columns.receipts import is_failed
from geneva.storage.columns.staged_files import StagedFile
from geneva.storage.lance.damage import is_panic, is_storage_full
from geneva.storage.lance.pieces import Piece, concat_batches, digests_of
from geneva.udf.picking import picked

_LOG = logging.getLogger(__name__)

_MIN_RECORDED_SECONDS = 0.1
"""Staged files that took less work than this are cheaper to make again than to record."""
_RECORD_SECONDS = 1.0
"""Staged files are recorded once this much work would be lost with them."""


class Writer:
    """Writes the parts of a task, one after the other."""

    def __init__(self, task: OpenTask) -> None:
        """Write nothing yet."""
        self._task = task
        self._pending: list[tuple[str, StagedFile]] = []
        self._pending_seconds = 0.0
        self.clock = Clock()
        self.recorded: list[tuple[int, ...]] = []
        """Fragments whose staged files are on record, those of one record together."""
        self.saving: Future[Saved] | None = None
        """The last checkpoint that was written behind."""

    def begin(self, part: PartWork) -> PartWriter:
        """Open what a part is written to."""
        return PartWriter(self._task, part, self)

    def worked(self, seconds: float) -> None:
        """Count work that would be lost with staged files that are not recorded."""
        self._pending_seconds += seconds

    def staged(self, prefix: str, staged: StagedFile) -> None:
        """Take a staged file; it is recorded once enough work would be lost with it."""
        self._pending.append((prefix, staged))
        work = self._task.work
        pause = work.flush_seconds
        if pause is None:
            pause = 0.0 if work.sizes.checkpoint_size is not None else _RECORD_SECONDS
        self._record(pause)

    def finish(self) -> None:
        """Record what is worth it, at the end of the task."""
        self._record(_MIN_RECORDED_SECONDS)

    def _record(self, min_seconds: float) -> None:
        if self._pending_seconds < min_seconds:
            return
        if self._pending:
            (prefix, staged), *others = self._pending
            record_staged(self._task.store, prefix, staged, *others)
            self.recorded.append(tuple(staged.fragment_id for _, staged in self._pending))
        self._pending.clear()
        self._pending_seconds = 0.0


@dataclass(slots=True)
class _Unsaved:
    """Results since the last checkpoint: the wanted rows of [start, end)."""

    start: int
    end: int
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _InFile:
    """Results that are in the column file only: the wanted rows of a range, and their digests."""

    rows: RowRange
    offsets: Offsets
    digests: Digests
    nbytes: int


class PartWriter:
    """Writes one part: takes its results in ascending order, then `finish` or `abandon`."""

    def __init__(self, task: OpenTask, part: PartWork, writer: Writer) -> None:
        """Open the column file, if the part is a whole fragment."""
        self._task, self._part, self._writer, self._clock = task, part, writer, Clock()
        self._failed = FailedRows(task.work.hide)
        self._rows_run = self._rows_valued = self._rows_reused = self._rows_unmatched = 0
        self._checkpoints: list[RowRange] = []
        self._unsaved = _Unsaved(part.rows.start, part.rows.start)
        self._in_file: list[_InFile] = []
        self._saving: Future[Saved] | None = None
        self._distinct = DistinctValues(task.dataset)
        rule = BatchRule.of(task.work.sizes, part.window, task.work.flush_seconds)
        self._max_rows = rule.max_checkpoint_rows
        self._file = None
        if part.file is not None:
            self._file = ColumnFile(task, part, part.file, self._clock)
        self.seconds = 0.0
        """The work that is lost with what is not durable yet."""
        self.nbytes = 0
        """The size of what was added."""

    def add(self, result: Result) -> Future[Saved] | None:
        """Take a result; return what becomes durable by it, when that is so.

        Only of a result that is to be durable soon, that is later: its checkpoint is written while
        the next results are taken.
        """
        if self._saving is not None and self._saving.done():
            self._wait_saved()  # a checkpoint that failed ends the part now, not with the next one
        self._rows_run += result.rows_run
        self._rows_valued += result.rows_valued
        self._rows_reused += result.rows_reused
        self._rows_unmatched += result.rows_unmatched
        self._writer.worked(result.seconds)
        self.seconds += result.seconds
        self.nbytes += result.nbytes
        self._note_failures(result)
        if result.follows_gap:
            self._save(self._unsaved.end)
            self._unsaved = _Unsaved(result.rows.start, result.rows.start)
        if result.durable is Durable.ALREADY:
            saved = self._save(result.rows.start)
            self._wait_saved()
            self._checkpoints.append(result.rows)
            self._unsaved = _Unsaved(result.rows.end, result.rows.end)
            self._fill(result.piece)
            return saved
        self._fill(result.piece)
        self._unsaved.pieces.append(result.piece)
        self._unsaved.nbytes += result.nbytes
        self._unsaved.end = result.rows.end
        if result.durable in (Durable.SOON, Durable.NOW):
            return self._save(result.rows.end, behind=result.durable is Durable.SOON)
        if result.durable is Durable.BY_FILE:
            self._leave_to_file()
        return None

    def _leave_to_file(self) -> None:
        """Hold the unsaved results no longer: they are in the column file.

        Once rows are skipped, what happened to them is in checkpoints only.
        """
        unsaved = self._unsaved
        if self._failed:
            if unsaved.nbytes > MAX_UNSAVED_BYTES:
                self._save(unsaved.end, behind=True)
            return
        self._unsaved = _Unsaved(unsaved.end, unsaved.end)
        offsets = np.concatenate([piece.offsets for piece in unsaved.pieces])
        digests = digests_of(unsaved.pieces)
        rows = RowRange(unsaved.start, unsaved.end)
        self._in_file.append(_InFile(rows, offsets, digests, unsaved.nbytes))

    def _save_in_file(self) -> None:
        """Save what is in the column file only, in place of that."""
        rows, self._in_file = _joined(self._in_file), []
        if not rows:
            return
        assert self._file is not None
        with closing(self._file.take_back([(some.offsets, some.digests) for some in rows])) as back:
            for some, piece in zip(rows, back, strict=True):
                unsaved = _Unsaved(some.rows.start, some.rows.end, [piece])
                self._write(unsaved, some.offsets, None, some.rows.end)

    def finish(self) -> PartResult:
        """Make the part durable: as a staged file, or in checkpoints up to its end."""
        if self._file is None or self._needs_checkpoints:
            self._save(self._part.rows.end)
            self._wait_saved()
        staged = self._close() if self._file is not None else None
        self._wait_saved()  # a checkpoint that was begun before ends beside the file
        return self.finished(staged)

    def give_back(self) -> PartResult:
        """Make what was added durable, in checkpoints: the rows behind it are for others."""
        rows = RowRange(self._part.rows.start, self._unsaved.end)
        self._save(rows.end)
        self._wait_saved()
        self._save_in_file()
        return replace(self.finished(None), rows=rows)

    def close_behind(self) -> Future[StagedFile] | None:
        """Begin to stage the file, while the writer goes on; `finished` ends the part.

        None where that is not worth it, or more is to be done: in an object store it is one request
        to wait for.
        """
        if self._file is None or self._needs_checkpoints or not self._task.work.ref.is_remote:
            return None
        self._wait_saved()
        return in_background("geneva-closer", self._close)

    @property
    def _needs_checkpoints(self) -> bool:
        # Of failed rows in any case: a column file can't hold what happened to them.
        return self._task.work.sizes.checkpoint_size is not None or bool(self._failed)

    def finished(self, staged: StagedFile | None) -> PartResult:
        """What is durable of the part, once it is closed."""
        part = self._part
        self._writer.worked(self._clock.read)
        self._writer.clock.add(self._clock)
        if staged is not None:
            self._writer.staged(part.prefix, staged)
        return PartResult(
            fragment_id=part.fragment_id,
            rows=part.rows,
            checkpoints=tuple(sorted(self._checkpoints, key=lambda saved: saved.start)),
            staged_path=staged.path if staged is not None else None,
            staged_bytes=staged.size_bytes if staged is not None else None,
            rows_run=self._rows_run,
            rows_valued=self._rows_valued,
            rows_reused=self._rows_reused,
            rows_failed=len(self._failed.found),
            rows_unmatched=self._rows_unmatched,
            failures=self._failed.reported(self._task.dataset, part.fragment_id),
        )

    def abandon(self) -> FailedRows:
        """Save what was added, and no more; return the rows that were skipped so far."""
        self._save(self._unsaved.end)
        self._wait_saved()
        try:
            self._save_in_file()
        except BaseException as error:
            if is_storage_full(error) or not (isinstance(error, Exception) or is_panic(error)):
                raise
            # The file could not be written, say: then what was in it is computed again.
            where = f"{self._task.work.ref.name}, fragment {self._part.fragment_id}"
            _LOG.warning("Results of %s can't be read back: %s", where, error)
        self._writer.clock.add(self._clock)
        return self._failed

    def _note_failures(self, result: Result) -> None:
        self._failed.add(result.failures)
        if result.rows_reused and self._task.work.computation.receipts:
            # Of rows that an earlier run has tried, the receipts say whether they failed.
            values = result.piece.values
            failed = is_failed(values.column(values.num_columns - 1))
            self._failed.add_earlier(result.piece.offsets[failed].tolist())

    def _fill(self, piece: Piece) -> None:
        if self._file is None:
            # Without a file the pieces are put together in checkpoints only.
            overflow = self._distinct.add(piece.values)
            if overflow is not None:
                offsets = piece.offsets
                rows = RowRange(int(offsets[0]), int(offsets[-1]) + 1)
                raise too_many_values(overflow, rows, int(offsets[overflow.row]))
        else:
            started, read = time.perf_counter(), self._clock.read
            self._file.add(piece)
            self._count_write(started, read)

    def _close(self) -> StagedFile:
        assert self._file is not None
        started, read = time.perf_counter(), self._clock.read
        failed = self._failed.rows(self._part.physical_rows) if self._failed else None
        staged = self._file.finish(failed)
        self._count_write(started, read)
        return staged

    def _count_write(self, started: float, read_before: float) -> None:
        """Count the time since `started` as writing, but for what was read meanwhile."""
        read = self._clock.read - read_before
        self._clock.write += time.perf_counter() - started - read

    def _save(self, end: int, *, behind: bool = False) -> Future[Saved] | None:
        """Make the unsaved results durable, as a checkpoint of the rows up to `end`.

        `behind`: while the writer goes on. One at a time: an error is raised by the next one.
        """
        unsaved, self._unsaved = self._unsaved, _Unsaved(end, end)
        self.seconds = 0.0
        if not unsaved.pieces:
            return None
        self._wait_saved()
        offsets = np.concatenate([piece.offsets for piece in unsaved.pieces])
        errors = self._failed.column(offsets) if self._failed else None

        def save() -> Saved:
            return self._write(unsaved, offsets, errors, end)

        if behind:
            self._saving = self._writer.saving = in_background("geneva-saver", save)
            return self._saving
        done: Future[Saved] = Future()
        done.set_result(save())
        return done

    def _wait_saved(self) -> None:
        """Wait for the checkpoint that is being written, if one is."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _write(
        self, unsaved: _Unsaved, offsets: Offsets, errors: pa.Array | None, end: int
    ) -> Saved:
        """Write a checkpoint; several, where it would be larger than it may be."""
        started = time.perf_counter()
        batch = self._checkpoint(unsaved.pieces, offsets, errors)
        at = unsaved.start
        size = self._max_rows or len(offsets)
        for first in range(0, len(offsets), size):
            last = first + size >= len(offsets)
            rows = RowRange(at, end if last else int(offsets[first + size - 1]) + 1)
            key = CheckpointKey(self._part.prefix, self._part.fragment_id, rows).path()
            self._task.store[key] = batch if size >= len(offsets) else _cut(batch, first, size)
            self._checkpoints.append(rows)
            at = rows.end
        seconds = time.perf_counter() - started
        self._clock.checkpoint += seconds
        return Saved(RowRange(unsaved.start, end), seconds)

    def _checkpoint(
        self, pieces: list[Piece], offsets: Offsets, errors: pa.Array | None
    ) -> pa.RecordBatch:
        """What a checkpoint holds of some results."""
        addresses = pa.array(row_addresses(self._part.fragment_id, offsets), pa.uint64())
        values = concat_batches([piece.values for piece in pieces])
        columns, names = [*values.columns, addresses], [*values.schema.names, "_rowaddr"]
        if self._task.work.computation.receipts:
            columns.append(pa.array(digests_of(pieces), pa.uint64()))
            names.append(DIGEST_COLUMN)
        if errors is not None:
            columns, names = [*columns, errors], [*names, ERROR_COLUMN]
        return pa.record_batch(columns, names=names)


def _joined(ranges: Sequence[_InFile]) -> list[_InFile]:
    """Ranges that follow each other as one, up to the size of a checkpoint."""
    joined: list[_InFile] = []
    for some in ranges:
        before = joined[-1] if joined else None
        if (
            before is None
            or before.rows.end != some.rows.start
            or before.nbytes + some.nbytes > MAX_UNSAVED_BYTES
        ):
            joined.append(some)
        else:
            joined[-1] = _InFile(
                RowRange(before.rows.start, some.rows.end),
                np.concatenate([before.offsets, some.offsets]),
                np.concatenate([before.digests, some.digests]),
                before.nbytes + some.nbytes,
            )
    return joined


def _cut(batch: pa.RecordBatch, first: int, rows: int) -> pa.RecordBatch:
    """Some rows of a batch, as a copy: Lance can't write slices of nested structs."""
    return picked(batch, np.arange(first, min(first + rows, batch.num_rows)))

"""The program of a worker: windows of inputs in, results out, batch by batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from geneva.errors import (
    GenevaError,
    InvalidUDFError,
    TooManyFailedRowsError,
    UDFError,
    UDFIntegrityError,
    UnmatchedKeyError,
    UntrustedFunctionError,
)
from geneva.execution.apply.ahead import CallsAhead, Flight
from geneva.execution.apply.batch import Applied
from geneva.execution.apply.call import Kept
from geneva.execution.apply.failures import CellFailure
from geneva.execution.apply.forks import end_copy
from geneva.execution.apply.layouts import Packed, Values, as_array
from geneva.execution.apply.limits import TaskUsage, shared_states
from geneva.execution.apply.memo import Memo, shared_memo
from geneva.execution.worker.column_file import can_take_back
from geneva.execution.worker.failed_rows import row_failure
from geneva.execution.worker.pacing import Deadline, Pacing
from geneva.execution.worker.poison_rows import BatchGuard, PoisonSearch
from geneva.execution.worker.program import Program, live_program
from geneva.execution.worker.records import (
    BatchFailed,
    Clock,
    Computed,
    Durable,
    OpenTask,
    PartBegins,
    PartEnds,
    Result,
    Saved,
    Window,
)
from geneva.execution.worker.task import ColumnWork, PartWork, RowFailure
from geneva.execution.worker.waiting import WaitingRows, cut_piece
from geneva.model.rows import Offsets, RowRange
from geneva.render.text import count
from geneva.storage.lance.pieces import concat_batches
from geneva.udf.picking import picked
from geneva.udf.usage import metered

_Values = TypeVar("_Values", Computed, Result)

_MAX_QUEUED_BYTES = 512 * 1024 * 1024
"""Inputs of batches that are being prepared."""

_BURST_SECONDS = 0.05
_BURST_BYTES = 8 * 1024 * 1024
"""How long calls follow each other, and what they give, before their values are looked at."""

_ENDS_THE_JOB = (
    UDFError,
    UDFIntegrityError,
    UntrustedFunctionError,
    InvalidUDFError,
    UnmatchedKeyError,
)
"""Failures that trying again can't cure. Anything else is a failed task, which Spark runs again."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Rows that are computed together, which may be on their way already."""

    program: Program
    window: Window
    search: PoisonSearch
    prepared: Future[Any] | None = None
    """What the program prepares of it."""
    ahead: CallsAhead | None = None
    """The calls for it, where they may be made before its turn."""
    nbytes: int = 0
    """The size of its inputs, where they are held before its turn."""


class _Calling:
    """Around calls for a batch: they are timed, and what ends the job says of which rows it is."""

    __slots__ = ("_clock", "_started", "_window", "seconds")

    def __init__(self, clock: Clock, window: Window) -> None:
        self._clock, self._window = clock, window

    def __enter__(self) -> _Calling:
        self._started = time.perf_counter()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        end_copy()
        self.seconds = time.perf_counter() - self._started
        self._clock.udf += self.seconds
        if isinstance(error, _ENDS_THE_JOB):
            raise _batch_failed(error, self._window.offsets, ()) from error


_Done: TypeAlias = tuple[Window, Applied | Kept, float]
"""A window, what a call for it gave, and the seconds that it took."""

Event = PartBegins | Computed | Result | PartEnds
"""What comes out of the program, part after part."""


class BatchRunner:
    """Runs the task's program over windows. It reads and writes nothing but poison-row notes.

    What it is given comes out in the same order. A program that prepares batches ahead gets
    several of them, also of the next part, before the first one is run.
    """

    def __init__(
        self, task: OpenTask, load: Callable[[ColumnWork], Program] = live_program
    ) -> None:
        """Run nothing yet: the program is loaded when there are rows for it."""
        self._task, self._work, self._load = task, task.work, load
        self._pacing = Pacing(task.work)
        self._failed_rows = 0
        self._memo: Memo | None = None
        computation = task.work.computation
        if computation.memoizes and computation.receipts:
            self._memo = shared_memo(task.work.job_id, computation.id)
        self._queued: deque[PartBegins | Result | PartEnds | _Batch] = deque()
        """What is to be run, and what stands between."""
        self._queued_batches = self._queued_bytes = 0
        self._max_queued = 0
        self._waiting = WaitingRows()
        self._rows_cut = 0
        self.clock = Clock()
        self.retries = 0
        work = task.work
        states = shared_states(work.shared_uri, work.ref.storage_options)
        self.usage = TaskUsage(states, work.job_id, work.max_cost)
        self._rows_called = 0
        self._has_value = False
        """Whether a call has ended well."""
        self._flight = Flight()
        self._unpaid: Offsets | None = None
        """The first row that is left for want of money, once there is one."""
        self._left_gap = False
        """Whether the last rows of the last batch were left."""
        self.deadline = Deadline()
        self.is_given_back = False
        """Whether the rest of the part is not to be computed here."""
        self._has_batch = False
        """Whether rows of the part were cut into a batch."""
        self._whole_batch: int | None = None
        """The given batch size, where a window of just so many rows may skip the queue."""

    def begin(self, part: PartWork, search: PoisonSearch) -> Iterator[Event]:
        """Go on with another part."""
        self._waiting = WaitingRows()
        self._cut_rule, self._cut_search = self._pacing.rule_for(part.window), search
        self._rows_cut = 0
        self.is_given_back = self._has_batch = False
        # Of a range of a fragment, others have the rest; of a second try nobody knows the reason.
        self._may_give_back = part.file is not None and not search.is_retry
        # Where rows are counted as they are cut, all go that way.
        size = self._work.sizes.batch_size
        self._whole_batch = size if self._may_run_ahead and not self._counts_rows else None
        self._queued.append(PartBegins(part, search))
        yield from self._run_queued()

    def run(self, *items: Window | Result) -> Iterator[Event]:
        """Compute windows, all of them at hand at once; pass on what has its values already.

        Raises BatchFailed when the user's function fails and its policy doesn't skip the row.
        """
        program: Program | None = None
        left = deque(items)
        while left and not self.is_given_back:
            item = left[0]
            if isinstance(item, Window) and self._is_batch(item):
                program = program or self._loaded(item.offsets)
                if not program.is_async and not program.prepares:
                    if self._should_give_back():
                        self.is_given_back = True
                        return
                    yield from self._run_at_once(program, left)
                    continue
            left.popleft()
            if isinstance(item, Window):
                self._waiting.add(item)
            else:
                yield from self._pass_on(item)
        if not self.is_given_back:
            yield from self._cut(is_last=False)

    def _least_rows(self, program: Program) -> int:
        """Rows that wait for others where there are fewer: a call of them would be a waste."""
        size = self._work.sizes.batch_size
        if size is not None:
            return size
        if program.is_async or program.prepares or not self._may_run_ahead:
            return 1
        return program.cost.least_rows(self._cut_rule.max_rows)

    def _is_batch(self, window: Window) -> bool:
        """Whether a window is a batch as it is, and nothing is to be done before it.

        Between two calls a device stands idle: the usual case takes the shortest way.
        """
        return len(window.offsets) == self._whole_batch and not self._waiting and not self._queued

    def _run_at_once(self, program: Program, left: deque[Window | Result]) -> Iterator[Event]:
        """Compute the first of what is `left`: batches as they are, as many as take a moment.

        What becomes of their values waits until all of these calls are made: between them as little
        is done as can be.
        """
        self._has_batch = True
        done: list[_Done] = []
        failed: BaseException | None = None
        try:
            self._call_some(program, left, done)
        except BaseException as error:  # noqa: BLE001  raised behind what was computed before it
            failed = error
        for window, called, seconds in done:
            applied, more = self._applied(window, called)
            self._count(window, applied)
            yield self._paced(self._computed(window, applied, seconds + more))
        if failed is not None:
            raise failed

    def _call_some(self, program: Program, left: deque[Window | Result], done: list[_Done]) -> None:
        """Call the program on windows that are `left`, and move them to what is `done`."""
        began, nbytes = time.perf_counter(), 0
        while left:
            window = left[0]
            if not isinstance(window, Window) or not self._is_batch(window):
                return
            guard = BatchGuard(self._cut_search, window.offsets)
            with _Calling(self.clock, window) as calling:
                if not done:
                    program.warm(window.inputs)
                    self.deadline.start()
                with metered(self.usage):
                    called = program.call(window.inputs, guard)
            done.append((window, called, calling.seconds))
            left.popleft()
            if isinstance(called, Kept):
                nbytes += called.nbytes
            elif called.failures:
                return
            else:
                nbytes += _size(called.outputs)
            if self._may_give_back and self.deadline.ends_part:
                return
            if not self._has_value:  # what is wrong with a function is nearly always wrong at once
                return
            if time.perf_counter() - began > _BURST_SECONDS or nbytes > _BURST_BYTES:
                return

    def _applied(self, window: Window, called: Applied | Kept) -> tuple[Applied, float]:
        """What a call gave, and the seconds that it took to find out.

        Where something is wrong with it, the function may be called again.
        """
        if isinstance(called, Applied):
            return called, 0.0
        with _Calling(self.clock, window) as calling, metered(self.usage):
            applied = called.applied()
        return applied, calling.seconds

    def _pass_on(self, result: Result) -> Iterator[Event]:
        yield from self._cut(is_last=True)
        if self.is_given_back:
            return
        is_durable = result.durable is Durable.ALREADY
        self._rows_cut = 0 if is_durable else self._rows_cut + result.num_rows
        self._queued.append(result)
        yield from self._run_queued()

    def end(self, error: Exception | None = None) -> Iterator[Event]:
        """End the part: rows that wait for a full batch are computed, as no others follow them.

        `error`: the part could not be read on, so that they are not.
        """
        if error is None:
            yield from self._cut(is_last=True)
        self._queued.append(PartEnds(error, self.is_given_back))
        yield from self._run_queued()

    def finish(self) -> Iterator[Event]:
        """Run what is still queued."""
        yield from self._run_queued(is_last=True)

    def abandon(self) -> None:
        """Run nothing more."""
        for queued in self._queued:
            if isinstance(queued, _Batch) and queued.prepared is not None:
                queued.prepared.cancel()
        self._queued.clear()
        for calls in [*self._flight.open]:
            calls.close()

    def saved(self, saved: Saved) -> None:
        """Take the writer's acknowledgement."""
        self._pacing.saved(saved.seconds)

    def _cut(self, *, is_last: bool) -> Iterator[Event]:
        """Cut batches as long as rows make one that is worth it; if they are the last, all."""
        waiting, search = self._waiting, self._cut_search
        if not waiting:
            return
        program = self._loaded(waiting.first(1))
        kept = 0 if is_last else self._rows_to_keep(program)
        ahead = self._calls_ahead(program, len(waiting) - kept)
        while (left := len(waiting) - kept) > 0:
            if self._should_give_back():
                self.is_given_back = True
                kept = len(waiting) - (yield from self._rows_called_ahead(ahead))
                continue
            size = self._pacing.batch_rows(self._cut_rule, program.cost, self._rows_cut)
            may_start = self._may_start(ahead)
            if may_start == 0:
                yield from self._run_queued(is_last=True)  # what is queued is paid for
                may_start = self._may_start(ahead)
            if may_start == 0:
                raise self._overspent(self._waiting.first(1))
            size = min(size, left, may_start or left)
            window = waiting.take(search.max_rows(waiting.first(size), size))
            if ahead is not None:
                ahead.may_start = may_start
            self._queue(program, window, ahead)
            yield from self._run_queued()
            if not self._queued:
                self._rows_cut = self._pacing.rows  # nothing is ahead
        if self.is_given_back:
            self._waiting = WaitingRows()

    def _should_give_back(self) -> bool:
        """Whether the rows that wait are for others: not before some of the part were computed."""
        may = self._may_give_back and self._has_batch and not self.is_given_back
        return may and self.deadline.ends_part

    def _rows_called_ahead(self, ahead: CallsAhead | None) -> Generator[Event, None, int]:
        """Let no more calls be made ahead; return for how many of the rows that wait some were."""
        if ahead is None:
            return 0
        ahead.hold()
        yield from self._run_queued(is_last=True)
        return ahead.started

    def _rows_to_keep(self, program: Program) -> int:
        """How many of the rows that wait are left for a batch with others, as they make none."""
        rest = self._pacing.rows_behind_batches(
            self._cut_rule, program.cost, self._rows_cut, len(self._waiting)
        )
        return rest if rest < self._least_rows(program) else 0

    def _may_start(self, ahead: CallsAhead | None) -> int | None:
        """How many of the rows that wait may be called by now; None: all.

        Not more than can be paid for. And not ahead of their turn behind the checkpoint that is
        being filled, if its size was given: they would be lost.
        """
        room = self._pacing.rows_to_checkpoint if ahead is not None else None
        account = self.usage.account
        if account is None:
            return room
        started, done = (ahead.started, ahead.done) if ahead is not None else (0, 0)
        queued = sum(len(q.window.offsets) for q in self._queued if isinstance(q, _Batch))
        # What fails may cost nothing: what calls cost is known from a row with a value.
        rows_done = done + self._rows_called if self._has_value else 0
        payable = account.affordable(rows_done, started - done + queued)
        return started + payable if room is None else min(started + payable, room)

    def _overspent(self, row: Offsets) -> BatchFailed:
        assert self.usage.account is not None
        return _batch_failed(self.usage.account.error(), row, ())

    def _paid(self, computed: Computed) -> list[Computed]:
        """What was computed, in pieces where rows between them were left for want of money.

        What else was begun is paid for, and goes on; then the job ends.
        """
        computed = self._after_gap(computed)
        if not computed.unpaid:
            return [computed]
        first, last = computed.unpaid[0], computed.unpaid[-1]
        if self._unpaid is None:
            self._unpaid = computed.offsets[first : first + 1]
        self._left_gap = last == len(computed.offsets) - 1
        return _pieces(computed)

    def _after_gap(self, result: _Values) -> _Values:
        """Mark the first result behind rows that were left."""
        if not self._left_gap:
            return result
        self._left_gap = False
        return replace(result, follows_gap=True)

    def close(self) -> None:
        """Cancel calls that nobody waits for, and give back what limits have reserved."""
        for calls in [*self._flight.open]:
            calls.close()
        self.usage.close()

    @property
    def _may_run_ahead(self) -> bool:
        """Whether rows may be worked on before their batch's turn.

        Not where notes say which rows are being computed, or where rows share calls.
        """
        return not self._cut_search.is_retry and self._memo is None

    def _calls_ahead(self, program: Program, rows: int) -> CallsAhead | None:
        """The calls for the next rows, if the program makes them before their batch's turn."""
        if not program.is_async or not self._may_run_ahead or not rows:
            return None
        waiting = self._waiting.all()
        inputs = waiting.inputs.slice(0, rows)
        ahead = program.ahead(inputs, BatchGuard(self._cut_search, waiting.offsets), self._flight)
        if ahead is not None and not self._counts_rows:
            self._warm(program, waiting)
            with metered(self.usage):
                ahead.start()
        return ahead

    @property
    def _counts_rows(self) -> bool:
        """Whether a bound says how many rows may be computed that are unpaid, or not durable."""
        return self.usage.account is not None or self._work.bounds_lost_rows

    def _queue(self, program: Program, window: Window, ahead: CallsAhead | None) -> None:
        """Queue a batch; let the program prepare it."""
        search, prepared = self._cut_search, None
        if program.prepares and self._may_run_ahead:
            self._warm(program, window)
            prepared = program.prepare(window.inputs, BatchGuard(search, window.offsets))
        self._has_batch = True
        known = len(window.known.offsets) if window.known is not None else 0
        self._rows_cut += len(window.offsets) + known
        may_wait = prepared is not None or ahead is not None
        nbytes = window.inputs.nbytes if may_wait else 0
        self._queued.append(_Batch(program, window, search, prepared, ahead, nbytes))
        self._queued_batches += 1
        self._queued_bytes += nbytes
        self._max_queued = program.prepares if prepared is not None else 0

    def _run_queued(self, *, is_last: bool = False) -> Iterator[Event]:
        """Run what is queued, but for the batches that are being prepared; if it is all, all."""
        while self._queued:
            queued = self._queued[0]
            if isinstance(queued, _Batch) and not is_last and self._may_wait(queued):
                return
            self._queued.popleft()
            if isinstance(queued, _Batch):
                self._queued_batches -= 1
                self._queued_bytes -= queued.nbytes
                computed = self._run_batch(queued)
                if queued.ahead is not None and queued.ahead.is_taken:
                    queued.ahead.close()
                suspect = queued.search.is_suspect(queued.window.offsets)
                for paid in self._paid(computed):
                    yield self._paced(paid, suspect=suspect)
            elif isinstance(queued, Result) and queued.durable is not Durable.ALREADY:
                yield self._paced(self._after_gap(queued))
            elif isinstance(queued, PartEnds) and self._unpaid is not None:
                raise self._overspent(self._unpaid)
            else:
                if isinstance(queued, Result):
                    queued = self._after_gap(queued)
                    self._failed_rows += len(queued.failures)
                    self._pacing.restart()
                elif isinstance(queued, PartBegins):
                    self._pacing.begin(queued.part.window, self._file_rows(queued))
                yield queued

    def _may_wait(self, first: _Batch) -> bool:
        """Whether the first batch of the queue is left there, and the next ones are read."""
        if self._queued_bytes > _MAX_QUEUED_BYTES:
            return False
        if first.ahead is None or self._counts_rows:
            return self._queued_batches <= self._max_queued
        queued = sum(len(q.window.offsets) for q in self._queued if isinstance(q, _Batch))
        return queued < 2 * self._flight.limit and first.ahead.done < len(first.window.offsets)

    def _loaded(self, offsets: Offsets) -> Program:
        """The program; a function that can't be loaded fails on the first of the rows."""
        try:
            return self._load(self._work)
        except _ENDS_THE_JOB as error:
            raise _batch_failed(error, offsets[:1], ()) from error

    def _warm(self, program: Program, window: Window) -> None:
        try:
            program.warm(window.inputs)
        except _ENDS_THE_JOB as error:
            raise _batch_failed(error, window.offsets, ()) from error

    def _paced(self, result: _Values, *, suspect: bool = False) -> _Values:
        durable = self._pacing.due(result)
        if suspect or durable is Durable.SOON:
            self._pacing.checkpointed()
            is_awaited = suspect or self._work.bounds_lost_rows
            durable = Durable.NOW if is_awaited else Durable.SOON
        return result if durable is Durable.LATER else replace(result, durable=durable)

    def _file_rows(self, begins: PartBegins) -> int:
        """How many rows the part has, if its file may stand for checkpoints of them; else 0."""
        part = begins.part
        if begins.search.is_retry or self._counts_rows or not can_take_back(self._task, part):
            return 0
        return part.compute.count

    def _run_batch(self, queued: _Batch) -> Computed:
        """Compute a batch; of rows with equal inputs only one, where the function allows it."""
        memo, batch = self._memo, queued.window
        digests = batch.digests
        if memo is None or digests is None:
            return self._compute(queued)
        to_compute, places, known = memo.split(digests)
        if not len(to_compute):
            assert known is not None
            outputs = tuple(picked(known, places).columns)
            return _computed(batch, outputs, batch.seconds)
        rows = picked(batch.inputs, to_compute)
        part = replace(
            batch, offsets=batch.offsets[to_compute], inputs=rows, digests=digests[to_compute]
        )
        computed = self._compute(replace(queued, window=part))
        values = pa.RecordBatch.from_arrays(
            [as_array(values) for values in computed.outputs],
            names=[f"o{i}" for i in range(len(computed.outputs))],
        )
        if not computed.failed and not computed.unpaid:
            memo.add(digests[to_compute], values)
        parts = [values] if known is None else [known, values]
        start = known.num_rows if known is not None else 0

        def places_of(rows: tuple[int, ...]) -> tuple[int, ...]:
            found = np.isin(places, [start + row for row in rows])
            return tuple(np.flatnonzero(found).tolist())

        return _computed(
            batch,
            tuple(picked(concat_batches(parts), places).columns),
            computed.seconds,
            places_of(computed.failed),
            computed.failures,
            places_of(computed.unpaid),
            rows_run=computed.rows_run,
        )

    def _compute(self, queued: _Batch) -> Computed:
        with _Calling(self.clock, queued.window) as calling:
            applied = self._call(queued)
        return self._computed(queued.window, applied, calling.seconds)

    def _count(self, batch: Window, applied: Applied) -> None:
        """Count a batch for which calls were made."""
        rows = len(batch.offsets)
        self._rows_called += rows
        self._has_value = self._has_value or len(applied.failures) < rows
        self.deadline.ran(rows)

    def _computed(self, batch: Window, applied: Applied, seconds: float) -> Computed:
        """What calls made of a batch."""
        rows = len(batch.offsets)
        self.retries += applied.retries
        failed: tuple[int, ...] = ()
        unpaid: tuple[int, ...] = ()
        failures: tuple[RowFailure, ...] = ()
        if applied.failures:
            failures = _row_failures(batch.offsets, applied)
            self._check_failures(failures, batch)
            places = [(f.row, f.is_unpaid) for f in applied.failures if f.row is not None]
            failed = tuple(row for row, is_unpaid in places if not is_unpaid)
            unpaid = tuple(row for row, is_unpaid in places if is_unpaid)
        computed = _computed(
            batch,
            applied.outputs,
            batch.seconds + seconds,
            failed,
            failures,
            unpaid,
            rows_run=rows - len(unpaid),
            rows_unmatched=applied.unmatched,
        )
        self._pacing.ran(rows, computed.nbytes)
        return computed

    def _call(self, queued: _Batch) -> Applied:
        program, batch, search = queued.program, queued.window, queued.search
        condemned = search.condemned(batch.offsets)
        if condemned is not None:
            return program.settle(condemned.error, batch.inputs, condemned.tries)
        # A set-up that kills its worker is no row's fault: nothing is noted before it.
        program.warm(batch.inputs)
        self.deadline.start()
        search.starting(batch.offsets)
        started = time.perf_counter()
        with metered(self.usage):
            if queued.ahead is not None:
                applied = queued.ahead.take(len(batch.offsets))
            else:
                guard = BatchGuard(search, batch.offsets)
                applied = program.run(batch.inputs, guard, queued.prepared)
        self._count(batch, applied)
        if not self._pacing.has_exact_batches:
            program.cost = program.cost.after(len(batch.offsets), time.perf_counter() - started)
        return applied

    def _check_failures(self, failures: tuple[RowFailure, ...], batch: Window) -> None:
        """Give up when more rows of the task failed than may."""
        self._failed_rows += len(failures)
        limit = self._work.max_failed
        if limit is None or self._failed_rows <= limit or not failures:
            return
        last = failures[-1]
        error = TooManyFailedRowsError(
            f"{count(self._failed_rows, 'row')} failed, and the UDF's limits (max_failed_rows, "
            f"max_failed_fraction) allow {limit:,} here. The last one, row {last.offset}: "
            f"{last.exception_type}: {last.message}. See table.get_errors(); raise the limits, "
            "or fix the function, and run again: what is computed is kept."
        )
        raise _batch_failed(error, batch.offsets, failures)


def _size(outputs: tuple[Values, ...]) -> int:
    # Not an array's `nbytes`: that lets go of the interpreter, and the next call would wait for it.
    return sum(
        [
            values.nbytes if isinstance(values, Packed) else values.get_total_buffer_size()
            for values in outputs
        ]
    )


def _computed(
    batch: Window,
    outputs: tuple[Values, ...],
    seconds: float,
    failed: tuple[int, ...] = (),
    failures: tuple[RowFailure, ...] = (),
    unpaid: tuple[int, ...] = (),
    *,
    rows_run: int = 0,
    rows_unmatched: int = 0,
) -> Computed:
    size = _size(outputs) + 8 * len(batch.offsets)
    return Computed(
        rows=batch.rows,
        offsets=batch.offsets,
        outputs=outputs,
        digests=batch.digests,
        failed=failed,
        unpaid=unpaid,
        failures=failures,
        known=batch.known,
        rows_run=rows_run,
        rows_unmatched=rows_unmatched,
        seconds=seconds,
        nbytes=size + (batch.known.values.nbytes if batch.known is not None else 0),
    )


def _row_failures(offsets: Offsets, applied: Applied) -> tuple[RowFailure, ...]:
    return tuple(
        row_failure(int(offsets[failure.row]), failure)
        for failure in applied.failures
        if failure.row is not None and not failure.is_unpaid
    )


def _pieces(computed: Computed) -> list[Computed]:
    """What was computed between rows that were not."""
    found: list[Computed] = []
    first, start, rows_run = 0, computed.rows.start, computed.rows_run
    for place in (*computed.unpaid, len(computed.offsets)):
        is_last = place == len(computed.offsets)
        rows = RowRange(start, computed.rows.end if is_last else int(computed.offsets[place]))
        if place > first:
            digests = computed.digests
            piece = replace(
                computed,
                rows=rows,
                offsets=computed.offsets[first:place],
                outputs=tuple(as_array(output)[first:place] for output in computed.outputs),
                digests=digests[first:place] if digests is not None else None,
                failed=tuple(row - first for row in computed.failed if first <= row < place),
                unpaid=(),
                follows_gap=first > 0 or computed.follows_gap,
                failures=tuple(f for f in computed.failures if rows.start <= f.offset < rows.end),
                known=cut_piece(computed.known, rows),
                rows_run=min(rows_run, place - first),
                seconds=0.0 if found else computed.seconds,
            )
            found.append(piece)
            rows_run -= piece.rows_run
        first, start = place + 1, rows.end + 1
    return found


def _batch_failed(
    error: GenevaError, offsets: Offsets, skipped: tuple[RowFailure, ...]
) -> BatchFailed:
    cell: CellFailure | None = getattr(error, "failure", None)
    at_fault = None
    if cell is not None and cell.row is not None:
        at_fault = row_failure(int(offsets[cell.row]), cell)
    rows = RowRange(int(offsets[0]), int(offsets[-1]) + 1)
    return BatchFailed(error, rows, at_fault, skipped)

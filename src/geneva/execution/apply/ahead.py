"""Calling an async function: many calls wait at the same time, and values come out in order.

Calls are started in the order of the rows, `limit` at a time, as soon as an earlier one has ended:
also for rows that nobody has asked for yet. So one slow call holds back the values behind it, but
not their calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol
from weakref import ref

import pyarrow as pa

from geneva.errors import UDFError
from geneva.execution.apply.by_batch import joined, slice_steps
from geneva.execution.apply.by_row import fitting, row_steps
from geneva.execution.apply.call import Applied, BatchCall
from geneva.execution.apply.event_loop import EventLoop, cancelled
from geneva.execution.apply.failures import CellFailure
from geneva.execution.apply.row_values import input_values
from geneva.execution.apply.steps import Steps, drive_async
from geneva.planning.batching import CallCost

ASYNC_LIMIT = 32
"""Calls at the same time, where nobody says how many."""
_MAX_ROWS_AHEAD = 32
"""Rows per call at a time that may be started, or done, before those ahead of them are taken."""
_MAX_BATCHES_AHEAD = 2
"""The same for functions that are called once per batch."""
_CONVERTED_ROWS = 1024
"""Rows whose inputs are made Python values at once."""


class Units(Protocol):
    """How rows are put into calls, and what was returned into values."""

    max_ahead: int
    """Units per call at a time that may be ahead of what is taken."""

    def rows(self) -> int:
        """How many rows the next call has."""

    def steps(self, start: int, size: int) -> Steps[Any]:
        """What is to be done for a call."""

    def ended(self, size: int, seconds: float) -> None:
        """Learn from a call."""

    def take(self, results: deque[Any], call: BatchCall) -> pa.Array:
        """Return the values of a slice of the rows out of the results so far."""


class RowUnits:
    """One call per row."""

    max_ahead = _MAX_ROWS_AHEAD

    def __init__(self, call: BatchCall) -> None:
        """Convert no inputs yet."""
        self._call = call
        self._converted: list[tuple[Any, ...]] = []
        self._first = 0

    def rows(self) -> int:
        """One."""
        return 1

    def steps(self, start: int, size: int) -> Steps[Any]:
        """Call with the row's values."""
        if start >= self._first + len(self._converted):
            part = self._call.batch.slice(start, _CONVERTED_ROWS)
            columns = input_values(part, self._call.udf)
            self._first, self._converted = start, list(zip(*columns, strict=True))
        return row_steps(self._call, start, self._converted[start - self._first])

    def ended(self, size: int, seconds: float) -> None:
        """A row is a row."""

    def take(self, results: deque[Any], call: BatchCall) -> pa.Array:
        """Check the values together."""
        return fitting(call, [results.popleft() for _ in range(call.batch.num_rows)])


class SliceUnits:
    """One call per slice, as long as the function says, or as calls of others took."""

    max_ahead = _MAX_BATCHES_AHEAD

    def __init__(
        self, call: BatchCall, cost: Callable[[], CallCost], learn: Callable[[CallCost], None]
    ) -> None:
        """`cost` and `learn`: what calls take, over all batches of this process."""
        self._call, self._cost, self._learn = call, cost, learn

    def rows(self) -> int:
        """As the function says, or by time."""
        return self._call.udf.batch_size or self._cost().next_rows() or 1

    def steps(self, start: int, size: int) -> Steps[Any]:
        """Call with the slice."""
        return slice_steps(self._call, start, size)

    def ended(self, size: int, seconds: float) -> None:
        """Learn what calls cost."""
        self._learn(self._cost().after(size, seconds))

    def take(self, results: deque[Any], call: BatchCall) -> pa.Array:
        """Put slices together, and keep what is left of the last one."""
        parts, missing = [], call.batch.num_rows
        while missing:
            part = results.popleft()
            if len(part) > missing:
                results.appendleft(part[missing:])
                part = part[:missing]
            parts.append(part)
            missing -= len(part)
        whole = joined(call, parts)
        return pa.concat_arrays([whole, whole[:0]]) if whole.offset else whole


ForRow = Callable[[int | None], Callable[..., Any]]
"""Returns what is awaited for one row, or for several (None)."""


@dataclass(frozen=True, slots=True)
class _Unit:
    start: int
    size: int
    task: asyncio.Task[Any]


class Flight:
    """The calls under way of one task: `limit` at a time, over all rows that it has been given."""

    def __init__(self, limit: int = 1) -> None:
        """Nothing is under way."""
        self.limit = limit
        self.calls = 0
        self.open: list[CallsAhead] = []
        self._ended: asyncio.Event | None = None

    def ended(self) -> None:
        """Take note of the end of a call; start others, for the earliest rows first."""
        self.calls -= 1
        for calls in [*self.open]:
            calls.fill()
        if self._ended is not None:
            self._ended.set()

    async def end_of_call(self) -> None:
        """Wait until the end of a call is noted, which is later than its result is there."""
        self._ended = asyncio.Event()
        await self._ended.wait()


class CallsAhead:
    """The calls for the rows of a batch. Take their values in order; close it, or use `with`."""

    def __init__(
        self,
        call: BatchCall,
        units: Units,
        prepare: Callable[[], ForRow],
        loop: EventLoop,
        flight: Flight,
    ) -> None:
        """Start nothing yet. `prepare` is called before the first call, in the thread that asks."""
        self._call, self._units_of, self._prepare = call, units, prepare
        self._loop, self._flight = loop, flight
        self._function: ForRow | None = None
        self.may_start: int | None = None
        """Of the rows that are not taken yet at most so many are started; None: any number."""
        self._started = self._done = self._taken = self._end = 0
        self._rows_in_flight = 0
        self._units: deque[_Unit] = deque()
        self._results: deque[Any] = deque()
        self._is_over = self._is_held = False
        own = ref(self)  # which has the call: its rows would wait for a garbage collection
        call.rows_open = lambda: 0 if (calls := own()) is None else calls.rows_open

    @property
    def rows_open(self) -> int:
        """Rows that may be called and of which no call has ended yet."""
        return self._rows_in_flight + max(0, self._end - self._started)

    @property
    def started(self) -> int:
        """Rows that were started and not taken yet."""
        return self._started - self._taken

    @property
    def done(self) -> int:
        """Rows that were computed and not taken yet."""
        return self.started - self._rows_in_flight

    @property
    def is_taken(self) -> bool:
        """Whether the values of all rows were taken."""
        return self._taken == self._call.batch.num_rows

    def start(self) -> None:
        """Let calls begin, as far as there is room for them."""
        if self._function is None:
            self._function = self._prepare()
            self._allow(0)
            self._loop.run(self._join())

    def _allow(self, rows: int) -> None:
        """Let the next `rows` be started, and those behind them as far as they may."""
        self._end = self._call.batch.num_rows
        if self._is_held:
            self._end = max(self._started, self._taken + rows)
        elif self.may_start is not None:
            self._end = min(self._end, self._taken + max(rows, self.may_start))

    def hold(self) -> None:
        """Start no more calls, but for rows that are taken."""
        self._loop.run(self._hold())

    def take(self, rows: int) -> Applied:
        """Return the values of the next rows, or raise what the policy makes of a failure."""
        self.start()
        self._allow(rows)
        start, self._taken = self._taken, self._taken + rows
        try:
            failures, retries = self._loop.run(self._reach(self._taken))
        except UDFError as error:
            _count_from(start, error)
            raise
        part = BatchCall(self._call.udf, self._call.output, self._call.batch.slice(start, rows))
        part.failures = {
            row - start: replace(failure, row=row - start) for row, failure in failures.items()
        }
        values = self._units_of.take(self._results, part)
        in_order = tuple(part.failures[row] for row in sorted(part.failures))
        return Applied(self._call.columns(values), in_order, retries)

    def close(self) -> None:
        """Cancel the calls that still run, and wait until they have ended."""
        self._is_over = True
        if self._function is not None:
            self._loop.run(self._cancel())

    def __enter__(self) -> CallsAhead:
        """Return the calls."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close them."""
        self.close()

    # ------------------------------------------------------------------------- inside the loop

    async def _hold(self) -> None:
        self._is_held, self._end = True, self._started

    async def _join(self) -> None:
        self._flight.open.append(self)
        self.fill()

    async def _reach(self, end: int) -> tuple[dict[int, CellFailure], int]:
        """Wait for the results of all rows before `end`, in order; say what went wrong so far."""
        self.fill()
        while self._done < end:
            if not self._units:
                await self._flight.end_of_call()
                self.fill()
                continue
            unit = self._units[0]
            if not unit.task.done():
                await asyncio.wait([unit.task])
            self._results.append(unit.task.result())
            self._units.popleft()
            self._done += unit.size
            self.fill()
        call = self._call
        failures = {row: call.failures.pop(row) for row in [*call.failures] if row < end}
        retries, call.retries = call.retries, 0
        return failures, retries

    def fill(self) -> None:
        """Start calls, as far as they may be ahead."""
        units, flight = self._units_of, self._flight
        while (
            not self._is_over
            and self._started < self._end
            and flight.calls < flight.limit
            and len(self._units) < units.max_ahead * flight.limit
        ):
            start, size = self._started, min(units.rows(), self._end - self._started)
            self._started += size
            flight.calls += 1
            self._rows_in_flight += size
            task = asyncio.create_task(self._run(start, size))
            unit = _Unit(start, size, task)
            self._units.append(unit)
            task.add_done_callback(lambda _, unit=unit: self._ended(unit))  # type: ignore[misc]

    async def _run(self, start: int, size: int) -> Any:
        assert self._function is not None
        began = time.perf_counter()
        function = self._function(start if size == 1 else None)
        result = await drive_async(self._units_of.steps(start, size), function)
        self._units_of.ended(size, time.perf_counter() - began)
        return result

    def _ended(self, unit: _Unit) -> None:
        self._rows_in_flight -= unit.size
        if unit.task.cancelled() or unit.task.exception() is not None:
            # No row behind it matters any more. Those before it have all been started.
            self._is_over = True
            for later in self._units:
                if later.start > unit.start:
                    later.task.cancel()
        self._flight.ended()

    async def _cancel(self) -> None:
        if self in self._flight.open:
            self._flight.open.remove(self)
        units, self._units = [*self._units], deque()
        await cancelled([unit.task for unit in units])


def _count_from(start: int, error: UDFError) -> None:
    """Name the row of an error by its place behind `start`, as the error of a batch does."""
    failure: CellFailure | None = getattr(error, "failure", None)
    if failure is not None and failure.row is not None:
        row = failure.row - start
        error.args = (str(error).replace(f"row {failure.row} ", f"row {row} ", 1),)
        error.failure = replace(failure, row=row)  # type: ignore[attr-defined]

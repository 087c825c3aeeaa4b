"""A UDF over one batch: hand the inputs over, call the function, check what it returned.

An `Applier` is a live UDF in a worker process. It returns exactly the column's Arrow type, one
value per row, in memory of its own, or raises an error that says which row and why. Rows that the
UDF's policy skips are NULL, and listed beside the values.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import pyarrow as pa

from geneva.errors import UDFError
from geneva.execution.apply.failures import (
    MAX_TRACEBACKS,
    CellFailure,
    describe_failure,
    raise_failed,
    refusal,
)
from geneva.execution.apply.output import (
    ARROW_ERRORS,
    forbidden_null,
    reason_of,
    result_to_array,
    values_to_array,
)
from geneva.execution.apply.row_values import python_values
from geneva.execution.apply.timeouts import Guard, guarded
from geneva.udf.declare import UDF, StatefulCallable, UDFArgType
from geneva.udf.policy import Action

__all__ = ["Applied", "Applier", "CellFailure"]

# Whatever the user's function raises is its failure. KeyboardInterrupt is not: it passes through.
_FAILURES = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class Applied:
    """The values of a batch, the rows among them that failed, and calls that were made again."""

    values: tuple[pa.Array, ...]
    """One array for each output column."""
    failures: tuple[CellFailure, ...] = ()
    retries: int = 0


class Applier:
    """A live UDF: call `apply` batch by batch, and `close` at the end (or use `with`)."""

    def __init__(self, udf: UDF, output: pa.Field, threads: int = 1) -> None:
        """Prepare to compute `output` with `threads` calls at a time; nothing is called yet."""
        self.udf, self.output, self.threads = udf, output, threads
        self._pool = ThreadPoolExecutor(threads, "geneva-udf") if threads > 1 else None

    def apply(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the column's values for a batch whose columns are the inputs, in order."""
        return self.run(batch).values[0]

    def warm(self, batch: pa.RecordBatch) -> None:
        """Set up a stateful function, if that was not done yet."""
        self._live_function(batch)

    def run(self, batch: pa.RecordBatch, guard: Guard | None = None) -> Applied:
        """Return the values and what failed; `guard` is notified when a call can't be stopped."""
        if batch.num_rows == 0:
            return Applied((pa.array([], self.output.type),))
        call = _BatchCall(self.udf, self.output, batch, self._pool, self.threads)
        function = self._live_function(batch)
        if self.udf.timeout is not None:
            function = guarded(function, self.udf.timeout, guard, call.current_row)
        values = call.values_of(function)
        failures = tuple(call.failures[row] for row in sorted(call.failures))
        return Applied((values,), failures, call.retries)

    def settle(self, error: UDFError, batch: pa.RecordBatch, attempt: int) -> Applied:
        """Apply the policy to a row (a batch of one) whose worker died or hung."""
        action, _ = self.udf.on_error.decide(error, attempt, again=False)
        if action is not Action.SKIP:
            raise_failed(self.udf, self.output, error, 0, batch)
        shown = batch if self.udf.on_error.store_inputs else None
        failure = describe_failure(error, 0, attempt, shown)
        return Applied((pa.nulls(1, self.output.type),), (failure,))

    def close(self) -> None:
        """Stop the threads and close a stateful UDF."""
        if self._pool is not None:
            self._pool.shutdown()
        if isinstance(self.udf.func, StatefulCallable):
            self.udf.func.close()

    def __enter__(self) -> Applier:
        """Return the applier itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _live_function(self, batch: pa.RecordBatch) -> Callable[..., Any]:
        if not isinstance(self.udf.func, StatefulCallable):
            return self.udf.func
        try:
            return self.udf.func.live()
        except _FAILURES as error:
            raise_failed(self.udf, self.output, error, None, batch, doing="could not be set up")


@dataclass(slots=True)
class _BatchCall:
    """One batch on its way through the function."""

    udf: UDF
    output: pa.Field
    batch: pa.RecordBatch
    pool: ThreadPoolExecutor | None
    threads: int
    failures: dict[int, CellFailure] = field(default_factory=dict)
    retries: int = 0
    _values: list[Any] = field(default_factory=list)

    def values_of(self, function: Callable[..., Any]) -> pa.Array:
        """Return the values, or raise."""
        if self.udf.arg_type is UDFArgType.SCALAR:
            return self._by_row(function)
        return self._by_batch(function)

    def current_row(self) -> int | None:
        """The row that is being computed, where that is known."""
        is_row_by_row = self.udf.arg_type is UDFArgType.SCALAR and self.pool is None
        return len(self._values) if is_row_by_row else None

    # -- row by row

    def _by_row(self, function: Callable[..., Any]) -> pa.Array:
        columns = [python_values(column) for column in self.batch.columns]
        if self.pool is not None:
            values = self._call_threaded(self.pool, function, columns)
        else:
            values = self._call_rows(function, columns)
        try:
            return self._fitting(values)
        except UDFError:
            if self.udf.on_error.is_fail_fast:
                raise
        # Only now row by row: the usual case never pays for it.
        for row, value in enumerate(values):
            if row not in self.failures:
                values[row] = self._fitting_row(function, columns, row, value)
        return self._fitting(values)

    def _call_rows(self, function: Callable[..., Any], columns: list[list[Any]]) -> list[Any]:
        values = self._values
        iterators = [iter(column) for column in columns]
        while True:
            try:
                # extend keeps what it got before an exception: its length is the failing row, and
                # the iterators stand behind it.
                values.extend(map(function, *iterators))
                if len(values) == self.batch.num_rows:
                    return values
                # map takes a StopIteration out of the function for the end of the columns.
                raise StopIteration
            except _FAILURES as error:
                row = len(values)
                values.append(self._settled(error, row, function, columns))

    def _call_threaded(
        self, pool: ThreadPoolExecutor, function: Callable[..., Any], columns: list[list[Any]]
    ) -> list[Any]:
        values: list[Any] = [None] * self.batch.num_rows
        failures: dict[int, BaseException] = {}
        rows = list(zip(*columns, strict=True))
        # Rows are handed out in order, so the first failing row is the same in every run: all
        # rows before it have started by then and are waited for.
        next_row = itertools.count()

        def work() -> None:
            while not failures and (row := next(next_row)) < len(rows):
                try:
                    try:
                        values[row] = function(*rows[row])
                    except _FAILURES as error:
                        if self.udf.on_error.decide(error, 1)[0] is Action.FAIL:
                            raise  # at once: describing it takes long, and the others run on
                        values[row] = self._settled(error, row, function, columns)
                except BaseException as error:  # noqa: BLE001  raised below, in order
                    failures[row] = error

        workers = [pool.submit(work) for _ in range(self.threads)]
        try:
            for worker in workers:
                worker.result()
        except BaseException as interrupt:
            failures[len(rows)] = interrupt  # stops the other threads
            raise
        if failures:
            row = min(failures)
            if isinstance(failures[row], _FAILURES):
                raise_failed(self.udf, self.output, failures[row], row, self.batch)
            raise failures[row]
        return values

    def _settled(
        self,
        error: BaseException,
        row: int,
        function: Callable[..., Any],
        columns: list[list[Any]],
        check: Callable[[Any], None] = lambda value: None,
    ) -> Any:
        """Return what the policy makes of a failed row: a value after all, or None; or raise."""
        for attempt in itertools.count(1):
            action, delay = self.udf.on_error.decide(error, attempt)
            if action is Action.FAIL:
                raise_failed(self.udf, self.output, error, row, self.batch)
            if action is Action.SKIP:
                self._skip(error, row, attempt)
                return None
            self.retries += 1
            time.sleep(delay)
            try:
                value = function(*(column[row] for column in columns))
                check(value)
                return value
            except _FAILURES as again:
                error = again
        return None

    def _skip(self, error: BaseException, row: int, attempt: int) -> None:
        shown = self.batch if self.udf.on_error.store_inputs else None
        in_full = len(self.failures) < MAX_TRACEBACKS
        self.failures[row] = describe_failure(error, row, attempt, shown, in_full=in_full)

    def _fitting(self, values: list[Any]) -> pa.Array:
        array = values_to_array(values, self.output.type, self._refuse)
        self._check_nulls(array)
        return array

    def _fitting_row(
        self, function: Callable[..., Any], columns: list[list[Any]], row: int, value: Any
    ) -> Any:
        def check(candidate: Any) -> None:
            fitting = values_to_array([candidate], self.output.type, self._refuse, row)
            self._check_nulls(fitting, row)

        try:
            check(value)
            return value
        except UDFError as error:
            return self._settled(error, row, function, columns, check)

    # -- batch by batch

    def _by_batch(self, function: Callable[..., Any]) -> pa.Array:
        rows = self.batch.num_rows
        if self.pool is None or rows == 1:
            return self._slice(function, 0, rows)
        size = -(-rows // self.threads)
        calls = [
            self.pool.submit(self._slice, function, start, min(size, rows - start))
            for start in range(0, rows, size)
        ]
        concurrent.futures.wait(calls)  # all of them, so that none runs on after a failure
        return self._joined([call.result() for call in calls])

    def _joined(self, parts: list[pa.Array]) -> pa.Array:
        try:
            return pa.concat_arrays(parts)
        except ARROW_ERRORS as error:
            self._refuse(None, f"returned too much for one batch: {reason_of(error)}")

    def _slice(self, function: Callable[..., Any], start: int, size: int) -> pa.Array:
        try:
            return self._call_slice(function, start, size)
        except _FAILURES as error:
            return self._settled_slice(function, start, size, error, whole=True)

    def _settled_slice(
        self,
        function: Callable[..., Any],
        start: int,
        size: int,
        error: BaseException,
        *,
        whole: bool,
    ) -> pa.Array:
        """Find the rows at fault by halves, and do with them what the policy says.

        Retries are for the slice as it was, and for the single rows that are found in the end.
        """
        for attempt in itertools.count(1):
            again = whole or size == 1
            action, delay = self.udf.on_error.decide(error, attempt, again=again)
            if action is not Action.RETRY:
                break
            self.retries += 1
            time.sleep(delay)
            try:
                return self._call_slice(function, start, size)
            except _FAILURES as failed_again:
                error = failed_again
        if action is Action.FAIL:
            row = start if size == 1 and not whole else None
            raise_failed(self.udf, self.output, error, row, self.batch)
        if size == 1:
            self._skip(error, start, attempt)
            return pa.nulls(1, self.output.type)
        halves = []
        for part, length in ((start, size // 2), (start + size // 2, size - size // 2)):
            try:
                halves.append(self._call_slice(function, part, length))
            except _FAILURES as found:
                halves.append(self._settled_slice(function, part, length, found, whole=False))
        return self._joined(halves)

    def _call_slice(self, function: Callable[..., Any], start: int, size: int) -> pa.Array:
        is_array = self.udf.arg_type is UDFArgType.ARRAY
        batch = self.batch if size == self.batch.num_rows else self.batch.slice(start, size)
        result = function(*batch.columns) if is_array else function(batch)
        array = result_to_array(result, self.output.type, self._refuse, start)
        if len(array) != size:
            self._refuse(None, f"returned {len(array)} values for a batch of {size} rows")
        # A copy: Lance panics on sliced structs, and a view would keep the inputs in memory.
        own = pa.concat_arrays([array, array[:0]])
        self._check_nulls(own, start)
        return own

    # -- checking the output

    def _check_nulls(self, array: pa.Array, first_row: int = 0) -> None:
        may_be_null = self.output.nullable and self.udf.nullable
        if not may_be_null and array.null_count:
            rows = (i + first_row for i, null in enumerate(array.is_null().to_pylist()) if null)
            row = next((row for row in rows if row not in self.failures), None)
            if row is not None:
                problem = f"returned None for row {row}, but the column is declared nullable=False"
                self._refuse(row, problem)
        path = forbidden_null(array, self.output.with_name("value").with_nullable(True))
        if path is not None:
            self._refuse(None, f"returned None for '{path}', which is declared not null")

    def _refuse(self, row: int | None, problem: str) -> NoReturn:
        raise refusal(self.udf, self.output, row, problem)

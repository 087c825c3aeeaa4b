"""Calling a function once per row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from geneva.errors import UDFError
from geneva.execution.apply.call import BatchCall
from geneva.execution.apply.forks import end_copy, rows_once
from geneva.execution.apply.output import records_to_array, values_to_array
from geneva.execution.apply.row_values import input_values
from geneva.execution.apply.steps import (
    USER_FAILURES,
    Call,
    Steps,
    drive,
    failure_of,
)
from geneva.execution.apply.tables import rows_of_tables
from geneva.udf.declare import UDFArgType
from geneva.udf.policy import Action
from geneva.udf.taken import taken

Check = Callable[[Any], None]


@dataclass(slots=True)
class RowByRow:
    """The strategy for functions of single values."""

    call: BatchCall
    _values: list[Any] = field(default_factory=list)

    def current_row(self) -> int | None:
        """The row that is being computed; with threads there are several."""
        return len(self._values) if self.call.pool is None else None

    def values_of(self, function: Callable[..., Any]) -> pa.Array:
        """Return the values, or raise."""
        columns = self.call.row_values()
        rows, found = self.call.batch.num_rows, self._values
        # Not by way of `self`, which has the call: all values would wait for a garbage collection.
        self.call.rows_open = lambda: rows - len(found)
        if self.call.pool is not None:
            values = self._call_threaded(self.call.pool, function, columns)
        else:
            iterators = [iter(column) for column in columns]
            with rows_once(*iterators):
                values = self._call_rows(function, columns, iterators)
        try:
            return self._fitting(values)
        except UDFError:
            if self.call.udf.on_error.is_fail_fast:
                raise
        # Only now row by row: the usual case never pays for it.
        for row, value in enumerate(values):
            if row not in self.call.failures:
                values[row] = self._fitting_row(function, columns, row, value)
        return self._fitting(values)

    def _call_rows(
        self, function: Callable[..., Any], columns: list[list[Any]], iterators: list[Iterator[Any]]
    ) -> list[Any]:
        values = self._values
        while True:
            try:
                # extend keeps what it got before an exception: its length is the failing row, and
                # the iterators stand behind it.
                given = map(function, *iterators)
                values.extend(map(taken, given))
                end_copy()
                if len(values) == self.call.batch.num_rows:
                    return values
                # map takes a StopIteration out of the function for the end of the columns.
                raise StopIteration
            except BaseException as error:  # noqa: BLE001  raised on where it is no failure
                row = len(values)
                values.append(self._settled(failure_of(error), row, function, columns))

    def _call_threaded(
        self, pool: ThreadPoolExecutor, function: Callable[..., Any], columns: list[list[Any]]
    ) -> list[Any]:
        values: list[Any] = [None] * self.call.batch.num_rows
        failures: dict[int, BaseException] = {}
        rows = list(zip(*columns, strict=True))
        # Rows are handed out in order, so the first failing row is the same in every run: all
        # rows before it have started by then and are waited for.
        next_row = iter(range(len(rows)))
        ended: list[int] = []
        self.call.rows_open = lambda: len(rows) - len(ended)

        def work() -> None:
            while not failures and (row := next(next_row, None)) is not None:
                try:
                    try:
                        values[row] = taken(function(*rows[row]))
                    except BaseException as error:  # noqa: BLE001  as above
                        failed = failure_of(error)
                        if self.call.udf.on_error.decide(failed, 1)[0] is Action.FAIL:
                            # At once: describing it takes long, and the others run on.
                            raise failed from failed.__cause__
                        try:
                            values[row] = self._settled(failed, row, function, columns)
                        finally:
                            del failed  # its traceback has this frame: it would wait for gc
                    ended.append(row)
                except BaseException as error:  # noqa: BLE001  raised below, in order
                    failures[row] = error

        workers = []
        try:
            with rows_once(next_row):
                for _ in range(min(self.call.threads, len(rows))):  # each starts a thread
                    workers.append(pool.submit(copy_context().run, work))
                for worker in workers:
                    worker.result()
        except BaseException as interrupt:
            failures[len(rows)] = interrupt  # stops the other threads
            raise
        if failures:
            row = min(failures)
            if isinstance(failures[row], USER_FAILURES):
                self.call.fail(failures[row], row)
            raise failures[row]
        return values

    def _settled(
        self,
        error: BaseException,
        row: int,
        function: Callable[..., Any],
        columns: list[list[Any]],
        check: Check = lambda value: None,
    ) -> Any:
        """Return what the policy makes of a failed row: a value after all, or None; or raise."""
        args = tuple(column[row] for column in columns)
        return drive(settled(self.call, error, row, args, check), function)

    def _fitting(self, values: list[Any]) -> pa.Array:
        return fitting(self.call, values)

    def _fitting_row(
        self, function: Callable[..., Any], columns: list[list[Any]], row: int, value: Any
    ) -> Any:
        def check(candidate: Any) -> None:
            fitting(self.call, [candidate], row)

        try:
            check(value)
            return value
        except UDFError as error:
            return self._settled(error, row, function, columns, check)


def fitting(call: BatchCall, values: list[Any], first_row: int = 0) -> pa.Array:
    """Return values as the column's array, or refuse them."""
    udf, kind = call.udf, call.output.type
    if udf.arg_type is UDFArgType.QUERY:
        values = rows_of_tables(values, kind.value_type, call.refuse, first_row)
    if udf.unpacks:
        optional = udf.optional_fields
        array = records_to_array(values, kind, call.refuse, first_row, optional=optional)
    else:
        array = values_to_array(values, kind, call.refuse, first_row)
    call.check_nulls(array, first_row)
    return array


def row_steps(call: BatchCall, row: int, args: tuple[Any, ...]) -> Steps[Any]:
    """Call the function for one row, and do what the policy says when it fails."""

    def check(value: Any) -> None:
        # Under fail-fast the values of a batch are checked together, which is much faster.
        if not call.udf.on_error.is_fail_fast:
            fitting(call, [value], row)

    try:
        value = taken((yield Call(args)))
        check(value)
        return value
    except USER_FAILURES as error:
        failed = error
    try:
        return (yield from settled(call, failed, row, args, check))
    finally:
        del failed  # its traceback has this frame: the batch would wait for a garbage collection


def settled(
    call: BatchCall,
    error: BaseException,
    row: int,
    args: tuple[Any, ...],
    check: Check = lambda value: None,
) -> Steps[Any]:
    """Do what the policy makes of a failed row: a value after all, or None; or raise."""
    for attempt in itertools.count(1):
        delay = call.delay(error, row, attempt)
        if delay is None:
            break
        if not (yield call.again(delay)):
            call.leave_unpaid(error, row)
            break
        call.retries += 1
        try:
            value = taken((yield Call(_once_more(call, row, args))))
            check(value)
            return value
        except USER_FAILURES as again:
            error = again
    return None


def _once_more(call: BatchCall, row: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a row anew: the function may have changed a list, or read a file to its end."""
    if call.udf.arg_type is not UDFArgType.SCALAR:
        return args
    return tuple(column[0] for column in input_values(call.batch.slice(row, 1), call.udf))

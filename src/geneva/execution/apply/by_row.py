"""Calling a function once per row."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from geneva.errors import UDFError
from geneva.execution.apply.call import USER_FAILURES, BatchCall
from geneva.execution.apply.output import values_to_array
from geneva.execution.apply.row_values import python_values
from geneva.udf.policy import Action


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
        columns = [python_values(column) for column in self.call.batch.columns]
        if self.call.pool is not None:
            values = self._call_threaded(self.call.pool, function, columns)
        else:
            values = self._call_rows(function, columns)
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

    def _call_rows(self, function: Callable[..., Any], columns: list[list[Any]]) -> list[Any]:
        values = self._values
        iterators = [iter(column) for column in columns]
        while True:
            try:
                # extend keeps what it got before an exception: its length is the failing row, and
                # the iterators stand behind it.
                values.extend(map(function, *iterators))
                if len(values) == self.call.batch.num_rows:
                    return values
                # map takes a StopIteration out of the function for the end of the columns.
                raise StopIteration
            except USER_FAILURES as error:
                row = len(values)
                values.append(self._settled(error, row, function, columns))

    def _call_threaded(
        self, pool: ThreadPoolExecutor, function: Callable[..., Any], columns: list[list[Any]]
    ) -> list[Any]:
        values: list[Any] = [None] * self.call.batch.num_rows
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
                    except USER_FAILURES as error:
                        if self.call.udf.on_error.decide(error, 1)[0] is Action.FAIL:
                            raise  # at once: describing it takes long, and the others run on
                        values[row] = self._settled(error, row, function, columns)
                except BaseException as error:  # noqa: BLE001  raised below, in order
                    failures[row] = error

        workers = [pool.submit(work) for _ in range(self.call.threads)]
        try:
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
        check: Callable[[Any], None] = lambda value: None,
    ) -> Any:
        """Return what the policy makes of a failed row: a value after all, or None; or raise."""
        for attempt in itertools.count(1):
            action, delay = self.call.udf.on_error.decide(error, attempt)
            if action is Action.FAIL:
                self.call.fail(error, row, attempt)
            if action is Action.SKIP:
                self.call.skip(error, row, attempt)
                return None
            self.call.retries += 1
            time.sleep(delay)
            try:
                value = function(*(column[row] for column in columns))
                check(value)
                return value
            except USER_FAILURES as again:
                error = again
        return None

    def _fitting(self, values: list[Any]) -> pa.Array:
        array = values_to_array(values, self.call.output.type, self.call.refuse)
        self.call.check_nulls(array)
        return array

    def _fitting_row(
        self, function: Callable[..., Any], columns: list[list[Any]], row: int, value: Any
    ) -> Any:
        def check(candidate: Any) -> None:
            fitting = values_to_array([candidate], self.call.output.type, self.call.refuse, row)
            self.call.check_nulls(fitting, row)

        try:
            check(value)
            return value
        except UDFError as error:
            return self._settled(error, row, function, columns, check)

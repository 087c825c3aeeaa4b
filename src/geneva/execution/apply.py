"""A UDF over one batch: hand the inputs over, call the function, check what it returned.

An `Applier` is a live UDF in a worker process. It returns exactly the column's Arrow type, one
value per row, in memory of its own, or raises an error that says which row and why.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import pyarrow as pa

from geneva.errors import UDFError, UDFExecutionError, UDFOutputError
from geneva.execution.output import (
    ARROW_ERRORS,
    forbidden_null,
    reason_of,
    result_to_array,
    values_to_array,
)
from geneva.execution.row_values import python_values
from geneva.udf import UDF, StatefulCallable, UDFArgType

# Whatever the user's function raises is its failure. KeyboardInterrupt is not: it passes through.
_FAILURES = (Exception, SystemExit)


_GENEVA_FILES = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True, slots=True)
class CellFailure:
    """What went wrong in the user's function, without the table's coordinates."""

    row: int | None  # index in the batch; None where it concerns the batch as a whole
    kind: str  # "exception": the function raised; "output": it returned what doesn't fit
    exception_type: str
    message: str
    traceback: str  # the user's frames only; empty for "output"
    value_type: str | None  # the type of the offending value, for "output"


class Applier:
    """A live UDF: call `apply` batch by batch, and `close` at the end (or use `with`)."""

    def __init__(self, udf: UDF, output: pa.Field, threads: int = 1) -> None:
        """Prepare to compute `output` with `threads` calls at a time; nothing is called yet."""
        self.udf, self.output, self.threads = udf, output, threads
        self._pool = ThreadPoolExecutor(threads, "geneva-udf") if threads > 1 else None

    def apply(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the column's values for a batch whose columns are the inputs, in order."""
        if batch.num_rows == 0:
            return pa.array([], self.output.type)
        function = self._live_function(batch)
        if self.udf.arg_type is UDFArgType.SCALAR:
            values = self._call_rows(function, batch)
            array = values_to_array(values, self.output.type, self._refuse)
        else:
            array = self._call_batch(function, batch)
        self._check_nulls(array)
        return array

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

    # -- calling

    def _live_function(self, batch: pa.RecordBatch) -> Callable[..., Any]:
        if not isinstance(self.udf.func, StatefulCallable):
            return self.udf.func
        try:
            return self.udf.func.live()
        except _FAILURES as error:
            self._raise_failed(error, None, batch, doing="could not be set up")

    def _call_rows(self, function: Callable[..., Any], batch: pa.RecordBatch) -> list[Any]:
        columns = [python_values(column) for column in batch.columns]
        if self._pool is not None:
            return self._call_rows_threaded(self._pool, function, columns, batch)
        values: list[Any] = []
        try:
            # extend keeps what it got before an exception: its length is the failing row.
            values.extend(map(function, *columns))
            if len(values) < batch.num_rows:
                # map takes a StopIteration out of the function for the end of the columns.
                raise StopIteration
        except _FAILURES as error:
            self._raise_failed(error, len(values), batch)
        return values

    def _call_rows_threaded(
        self,
        pool: ThreadPoolExecutor,
        function: Callable[..., Any],
        columns: list[list[Any]],
        batch: pa.RecordBatch,
    ) -> list[Any]:
        values: list[Any] = [None] * batch.num_rows
        failures: dict[int, BaseException] = {}
        rows = list(zip(*columns, strict=True))
        # Rows are handed out in order, so the first failing row is the same in every run: all
        # rows before it have started by then and are waited for.
        next_row = itertools.count()

        def work() -> None:
            while not failures and (row := next(next_row)) < len(rows):
                try:
                    values[row] = function(*rows[row])
                except _FAILURES as error:
                    failures[row] = error

        workers = [pool.submit(work) for _ in range(self.threads)]
        try:
            for worker in workers:
                worker.result()
        except BaseException as interrupt:
            failures[len(rows)] = interrupt  # stops the other threads
            raise
        if failures:
            first = min(failures)
            self._raise_failed(failures[first], first, batch)
        return values

    def _call_batch(self, function: Callable[..., Any], batch: pa.RecordBatch) -> pa.Array:
        if self._pool is None or batch.num_rows == 1:
            return self._call_slice(function, batch, 0)
        size = -(-batch.num_rows // self.threads)
        calls = [
            self._pool.submit(self._call_slice, function, batch.slice(start, size), start)
            for start in range(0, batch.num_rows, size)
        ]
        concurrent.futures.wait(calls)  # all of them, so that none runs on after a failure
        parts = [call.result() for call in calls]
        try:
            return pa.concat_arrays(parts)
        except ARROW_ERRORS as error:
            self._refuse(None, parts, f"returned too much for one batch: {reason_of(error)}")

    def _call_slice(
        self, function: Callable[..., Any], batch: pa.RecordBatch, first_row: int
    ) -> pa.Array:
        is_array = self.udf.arg_type is UDFArgType.ARRAY
        try:
            result = function(*batch.columns) if is_array else function(batch)
        except _FAILURES as error:
            self._raise_failed(error, None, batch)
        array = result_to_array(result, self.output.type, self._refuse, first_row)
        if len(array) != batch.num_rows:
            self._refuse(
                None, result, f"returned {len(array)} values for a batch of {batch.num_rows} rows"
            )
        # A copy: Lance panics on sliced structs, and a view would keep the inputs in memory.
        return pa.concat_arrays([array, array[:0]])

    # -- complaining

    def _check_nulls(self, array: pa.Array) -> None:
        may_be_null = self.output.nullable and self.udf.nullable
        if not may_be_null and array.null_count:
            row = array.is_null().index(True).as_py()
            problem = f"returned None for row {row}, but the column is declared nullable=False"
            self._refuse(row, None, problem)
        path = forbidden_null(array, self.output.with_name("value").with_nullable(True))
        if path is not None:
            self._refuse(None, None, f"returned None for '{path}', which is declared not null")

    def _raise_failed(
        self,
        error: BaseException,
        row: int | None,
        batch: pa.RecordBatch,
        doing: str = "failed",
    ) -> NoReturn:
        name = type(error).__name__
        where = "" if row is None else f" on row {row} of the batch"
        if isinstance(error, TypeError):
            message = (
                f"UDF '{self.udf.name}' {doing} with type error: {error}\n"
                f"Input batch schema: {', '.join(f'{f.name}: {f.type}' for f in batch.schema)}\n"
                f"UDF expects input_columns: {list(self.udf.input_columns or ())}\n"
                f"UDF output type: {self.output.type}"
            )
        else:
            message = f"UDF '{self.udf.name}' {doing}{where}: {name}: {error}"
        failure = CellFailure(row, "exception", name, str(error), _user_traceback(error), None)
        raise _with_failure(UDFExecutionError(message), failure) from error

    def _refuse(self, row: int | None, value: Any, problem: str) -> NoReturn:
        message = f"UDF '{self.udf.name}' {problem} (declared type: {self.output.type})."
        kind = type(value).__name__
        failure = CellFailure(row, "output", UDFOutputError.__name__, message, "", kind)
        raise _with_failure(UDFOutputError(message), failure)


def _with_failure(error: UDFError, failure: CellFailure) -> UDFError:
    """Attach the facts to an error, for the caller to add table, column and fragment."""
    error.failure = failure  # type: ignore[attr-defined]
    return error


def _user_traceback(error: BaseException) -> str:
    """Format an exception without the frames of Geneva itself."""
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        kept = [f for f in part.stack if not f.filename.startswith(_GENEVA_FILES)]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(told.format())

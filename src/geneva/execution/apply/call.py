"""One batch on its way through a function: what is known of it, whatever kind of function it is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from geneva.execution.apply.compact import copied
from geneva.execution.apply.failures import (
    MAX_TRACEBACKS,
    CellFailure,
    describe_failure,
    kept_preview,
    raise_failed,
    refusal,
)
from geneva.execution.apply.layouts import Values, as_array
from geneva.execution.apply.output import forbidden_null
from geneva.execution.apply.row_values import input_values
from geneva.execution.apply.steps import Again
from geneva.udf.declare import UDF
from geneva.udf.policy import Action


@dataclass(frozen=True, slots=True)
class Applied:
    """The values of a batch, the rows among them that failed, and calls that were made again."""

    outputs: tuple[Values, ...]
    """The values of each output column."""
    failures: tuple[CellFailure, ...] = ()
    retries: int = 0
    unmatched: int = 0
    """Rows whose key was looked up and is not in the source."""

    @property
    def arrays(self) -> tuple[pa.Array, ...]:
        """One array for each output column."""
        return tuple(as_array(values) for values in self.outputs)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a call has returned, in memory that nobody else has: it may be looked at later."""

    nbytes: int
    applied: Callable[[], Applied]
    """Gives the values; raises what is wrong with them."""


Queries: TypeAlias = Callable[[pa.RecordBatch], list[Any]]
"""Makes a query over the rows of each partition that a batch describes."""


class Strategy(Protocol):
    """How functions of one kind are called on a batch."""

    def values_of(self, function: Callable[..., Any]) -> pa.Array:
        """Return the values of all rows, or raise."""

    def current_row(self) -> int | None:
        """The row that is being computed, where that is known."""


@dataclass(slots=True)
class BatchCall:
    """The inputs of a call, and what went wrong in it."""

    udf: UDF
    output: pa.Field
    batch: pa.RecordBatch
    pool: ThreadPoolExecutor | None = None
    threads: int = 1
    failures: dict[int, CellFailure] = field(default_factory=dict)
    """Rows that the policy skips."""
    retries: int = 0
    fields: tuple[str, ...] | None = None
    """The fields of the record that are wanted, each an output; None: the value itself is one."""
    first: Callable[[], Any] | None = None
    """What the first call on the whole batch gives, where that was made or prepared before."""
    queries: Queries | None = None
    """Of a table function: makes the queries that it is called with."""
    checks_nulls: bool = True
    """Whether there may be a NULL that is declared not to be."""
    rows_open: Callable[[], int] = lambda: 0
    """Counts the rows that may be called and of which no call has ended yet."""

    def row_values(self) -> list[list[Any]]:
        """What a function that is called once per row gets, column by column."""
        if self.queries is not None:
            return [self.queries(self.batch)]
        return input_values(self.batch, self.udf)

    def columns(self, values: pa.Array) -> tuple[pa.Array, ...]:
        """What the function gave, as one array per output. A record that is NULL is all NULL."""
        if self.fields is None:
            return (values,)
        whole = copied(values) if values.offset else values
        children = dict(zip((f.name for f in values.type), whole.flatten(), strict=True))
        return tuple(children[name] for name in self.fields)

    def fail(self, error: BaseException, row: int | None, attempt: int = 1) -> NoReturn:
        """Raise what a user reads about an exception in their function."""
        raise_failed(self.udf, self.output, error, row, self.batch, attempt=attempt)

    def skip(self, error: BaseException, row: int, attempt: int) -> None:
        """Keep what happened to a row that is skipped."""
        shown = kept_preview(self.udf, self.batch, row)
        in_full = len(self.failures) < MAX_TRACEBACKS
        self.failures[row] = describe_failure(error, row, attempt, shown, in_full=in_full)

    def again(self, seconds: float, rows: int = 1) -> Again:
        """Ask to call some rows again."""
        return Again(seconds, rows, max(rows, self.rows_open()))

    def leave_unpaid(self, error: BaseException, start: int, rows: int = 1) -> None:
        """Note rows that are not called again for want of money: they are neither done nor lost."""
        failure = describe_failure(error, start, 1, "", in_full=False)
        for row in range(start, start + rows):
            self.failures[row] = replace(failure, row=row, is_unpaid=True)

    def delay(self, error: BaseException, row: int, attempt: int) -> float | None:
        """Seconds to wait before a failed row is tried again; None: it is skipped; or raise."""
        action, seconds = self.udf.on_error.decide(error, attempt)
        if action is Action.FAIL:
            self.fail(error, row, attempt)
        if action is Action.SKIP:
            self.skip(error, row, attempt)
            return None
        return seconds

    def check_nulls(self, array: pa.Array, first_row: int = 0) -> None:
        """Refuse NULL where none is declared; rows that were skipped may be."""
        if not self.checks_nulls:
            return
        may_be_null = self.output.nullable and self.udf.nullable
        if not may_be_null and array.null_count:
            rows = (i + first_row for i, null in enumerate(array.is_null().to_pylist()) if null)
            row = next((row for row in rows if row not in self.failures), None)
            if row is not None:
                problem = f"returned None for row {row}, but the column is declared nullable=False"
                self.refuse(row, problem)
        if self.udf.unpacks:
            self._check_fields(array, first_row)
        path = forbidden_null(array, self.output.with_name("value").with_nullable(True))
        if path is not None:
            self.refuse(None, f"returned None for '{path}', which is declared not null")

    def _check_fields(self, array: pa.Array, first_row: int) -> None:
        """Refuse NULL in a field that is declared not null, where the record is there."""
        for made, column in zip(array.type, array.flatten(), strict=True):
            if made.nullable or column.null_count == array.null_count:
                continue
            lacking = np.asarray(column.is_null()) & np.asarray(array.is_valid())
            row = first_row + int(np.flatnonzero(lacking)[0])
            problem = f"returned None for field {made.name!r} of row {row}, declared not null"
            self.refuse(row, problem)

    def refuse(self, row: int | None, problem: str) -> NoReturn:
        """Raise what a user reads about a value that doesn't fit."""
        raise refusal(self.udf, self.output, row, self.batch, problem)

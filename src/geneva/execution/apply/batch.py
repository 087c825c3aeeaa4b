"""A UDF over one batch: hand the inputs over, call the function, check what it returned.

An `Applier` is a live UDF in a worker process. It returns exactly the column's Arrow type, one
value per row, in memory of its own, or raises an error that says which row and why. Rows that the
UDF's policy skips are NULL, and listed beside the values.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pyarrow as pa

from geneva.errors import UDFError
from geneva.execution.apply.by_batch import BatchAtOnce
from geneva.execution.apply.by_row import RowByRow
from geneva.execution.apply.call import USER_FAILURES, BatchCall, Strategy
from geneva.execution.apply.failures import CellFailure, describe_failure, raise_failed
from geneva.execution.apply.timeouts import Guard, guarded
from geneva.planning.batching import CallCost
from geneva.udf.declare import UDF, StatefulCallable, UDFArgType
from geneva.udf.policy import Action

__all__ = ["Applied", "Applier", "CellFailure"]


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
        once_per_row = udf.arg_type is UDFArgType.SCALAR
        self.cost = CallCost(once_per_row=once_per_row, timeout=udf.timeout)
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
        call = BatchCall(self.udf, self.output, batch, self._pool, self.threads)
        is_scalar = self.udf.arg_type is UDFArgType.SCALAR
        strategy: Strategy = RowByRow(call) if is_scalar else BatchAtOnce(call)
        function = self._live_function(batch)
        if self.udf.timeout is not None:
            function = guarded(function, self.udf.timeout, guard, strategy.current_row)
        values = strategy.values_of(function)
        failures = tuple(call.failures[row] for row in sorted(call.failures))
        return Applied((values,), failures, call.retries)

    def settle(self, error: UDFError, batch: pa.RecordBatch, attempt: int) -> Applied:
        """Apply the policy to a row (a batch of one) whose worker died or hung."""
        action, _ = self.udf.on_error.decide(error, attempt, again=False)
        if action is not Action.SKIP:
            raise_failed(self.udf, self.output, error, 0, batch, attempt=attempt)
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
        except USER_FAILURES as error:
            raise_failed(self.udf, self.output, error, None, batch, doing="could not be set up")

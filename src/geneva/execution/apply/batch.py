"""A UDF over one batch: hand the inputs over, call the function, check what it returned.

An `Applier` is a live UDF in a worker process. It returns exactly the column's Arrow type, one
value per row, in memory of its own, or raises an error that says which row and why. Rows that the
UDF's policy skips are NULL, and listed beside the values.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import pyarrow as pa

from geneva.errors import UDFError
from geneva.execution.apply.ahead import (
    ASYNC_LIMIT,
    CallsAhead,
    Flight,
    ForRow,
    RowUnits,
    SliceUnits,
)
from geneva.execution.apply.by_batch import BatchAtOnce, arguments, as_declared
from geneva.execution.apply.by_row import RowByRow
from geneva.execution.apply.call import Applied, BatchCall, Kept, Queries, Strategy
from geneva.execution.apply.event_loop import event_loop
from geneva.execution.apply.failures import (
    CellFailure,
    describe_failure,
    kept_preview,
    raise_failed,
)
from geneva.execution.apply.forks import CallPool, end_copy
from geneva.execution.apply.layouts import Layout
from geneva.execution.apply.limits import Limiter, TaskUsage
from geneva.execution.apply.output import may_differ, may_forbid_null, own_values
from geneva.execution.apply.ownership import is_only_here
from geneva.execution.apply.preparing import (
    PrepareDied,
    PrepareThreads,
    close_prepare_pool,
    prepare_pool,
)
from geneva.execution.apply.steps import failure_of
from geneva.execution.apply.timeouts import (
    Guard,
    end_process,
    guarded,
    guarded_async,
    is_spark_worker,
)
from geneva.planning.batching import CallCost
from geneva.udf.declare import UDF, StatefulCallable, UDFArgType
from geneva.udf.policy import Action
from geneva.udf.usage import current_meter

__all__ = ["Applied", "Applier", "CellFailure"]


_ONCE_PER_ROW = (UDFArgType.SCALAR, UDFArgType.QUERY)


class Applier:
    """A live UDF: call `apply` batch by batch, and `close` at the end (or use `with`)."""

    def __init__(
        self,
        udf: UDF,
        output: pa.Field,
        threads: int | None = None,
        queries: Queries | None = None,
        fields: tuple[str, ...] | None = None,
    ) -> None:
        """Prepare to compute `output` with `threads` calls at a time; nothing is called yet.

        None: one call at a time, and 32 of an async function. `queries`: of a table function. With
        `fields` the output is a record, and the values are those of these fields, in their order.
        """
        self.udf, self.output, self.is_async = udf, output, udf.is_async
        self._queries, self._fields = queries, fields
        self.threads = threads or (ASYNC_LIMIT if self.is_async else 1)
        once_per_row = udf.arg_type in _ONCE_PER_ROW
        self._call_cost = CallCost(once_per_row=once_per_row, timeout=udf.timeout)
        # Calls of an async function overlap: what a batch takes is a matter of its rows alone.
        self.cost = CallCost(once_per_row=True) if self.is_async else self._call_cost
        is_optional = output.nullable and udf.nullable and not udf.unpacks
        self._checks_nulls = not is_optional or may_forbid_null(output.type)
        limited = udf.timeout is not None or udf.rate_limit is not None
        checked = self._checks_nulls or fields is not None or may_differ(output.type)
        self._layout = Layout.of(output.type)
        self._own_usage = TaskUsage()
        self._is_warm = False
        with_pool = self.threads > 1 and not self.is_async
        self._pool = CallPool(self.threads, "geneva-udf") if with_pool else None
        self._is_plain = not (once_per_row or self.is_async or limited or checked or with_pool)
        """Whether a batch is one call, that nothing limits, and its values need no second look."""
        workers = udf.cpu_workers if self.threads == 1 else None
        self._preparing = CallPool(workers, "geneva-prepare") if workers else None
        self._prepare_threads = PrepareThreads(udf)
        # Some that are ready, beside those that are being prepared: batches differ.
        self.prepares = workers + max(1, workers // 2) if workers else 0

    def apply(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the column's values for a batch whose columns are the inputs, in order."""
        return self.run(batch).arrays[0]

    def warm(self, batch: pa.RecordBatch) -> None:
        """Set up a stateful function, if that was not done yet."""
        if not self._is_warm and self._prepares_apart and is_spark_worker():
            prepare_pool(self.udf)  # they start while the model is loaded
        self._live_function(batch)
        if not self._is_warm:
            end_copy()
        self._is_warm = True

    def prepare(self, batch: pa.RecordBatch, guard: Guard | None = None) -> Future[Any] | None:
        """Let the function's `prepare` begin on a batch, in a thread or process of its own."""
        if self._preparing is None:
            return None
        step = self._prepared_apart if self._prepares_apart else self._prepared_here
        return self._preparing.submit(self._guarded(step, guard, _unknown_row), batch)

    def _prepared_here(self, batch: pa.RecordBatch) -> Any:
        live: Any = self._live_function(batch)
        return live.prepare(*arguments(batch, self.udf))

    def _prepared_apart(self, batch: pa.RecordBatch) -> Any:
        """What a process prepares. Where that dies, so does the worker.

        Spark runs the task again, without preparing ahead: the row at fault is found there. Off
        Spark there are no processes but the user's own: threads do as these would.
        """
        inputs = as_declared(batch, self.udf)
        if not is_spark_worker():
            return self._prepare_threads(inputs)
        pool = prepare_pool(self.udf)
        try:
            return pool(inputs)
        except PrepareDied:
            if pool.is_closed:
                raise
            end_process()

    @property
    def _prepares_apart(self) -> bool:
        """Whether `prepare` runs on objects of its own."""
        func = self.udf.func
        if self._preparing is None or not isinstance(func, StatefulCallable):
            return False
        return func.prepares_apart

    def run(
        self,
        batch: pa.RecordBatch,
        guard: Guard | None = None,
        prepared: Future[Any] | None = None,
    ) -> Applied:
        """Return the values and what failed; `guard` is notified when a call can't be stopped.

        `prepared` is what `prepare` gave for the batch. Calls that are made again prepare anew.
        """
        called = self.call(batch, guard, prepared)
        return called if isinstance(called, Applied) else called.applied()

    def call(
        self,
        batch: pa.RecordBatch,
        guard: Guard | None = None,
        prepared: Future[Any] | None = None,
    ) -> Applied | Kept:
        """The same, but for what may be left for later of a call that went as nearly all do.

        Between two calls a device stands idle, so that this looks at as little as it can.
        """
        if batch.num_rows == 0:
            return Applied(self._batch_call(batch).columns(pa.array([], self.output.type)))
        if self.is_async:
            with self._calls(batch, guard, Flight(self.threads)) as calls:
                return calls.take(batch.num_rows)
        if not self._is_plain or prepared is not None:
            return self._run(batch, guard, prepared)
        function = self.udf.whole(self._live_function(batch))
        try:
            returned = [function(*arguments(batch, self.udf))]  # nothing else refers to it
        except BaseException as error:  # noqa: BLE001  raised on where it is no failure
            return self._run(batch, guard, first=partial(_raise, failure_of(error)))
        stays = is_only_here(returned)
        taken = partial(self._taken, returned[0], batch, guard, stays=stays)
        return Kept(returned[0].nbytes, taken) if stays else taken()

    def _taken(
        self, result: Any, batch: pa.RecordBatch, guard: Guard | None, *, stays: bool
    ) -> Applied:
        """The values that a call returned; where they are not just that, all that is to be done.

        They `stay` in their memory where nobody else has it.
        """
        values = own_values(result, self.output.type, self._layout, batch.num_rows, stays=stays)
        if values is not None:
            return Applied((values,))
        return self._run(batch, guard, first=lambda: result)

    def _run(
        self,
        batch: pa.RecordBatch,
        guard: Guard | None,
        prepared: Future[Any] | None = None,
        first: Callable[[], Any] | None = None,
    ) -> Applied:
        """Call the function by its kind; `first` gives what the first call returned or raised."""
        call = self._batch_call(batch)
        by_row = self.udf.arg_type in _ONCE_PER_ROW
        strategy: Strategy = RowByRow(call) if by_row else BatchAtOnce(call)
        live, limiter = self._live_function(batch), self._limiter()
        function = self._guarded(self.udf.whole(live), guard, strategy.current_row)
        if limiter is not None:
            function = limiter.limited(function)
        if prepared is not None:
            second = self._guarded(live, guard, strategy.current_row)
            if limiter is not None:
                second = limiter.limited(second, arguments(batch, self.udf))
            first = lambda: second(prepared.result())  # noqa: E731
        call.first = first
        values = strategy.values_of(function)
        failures = tuple(call.failures[row] for row in sorted(call.failures))
        return Applied(call.columns(values), failures, call.retries)

    def _batch_call(self, batch: pa.RecordBatch) -> BatchCall:
        threads = self.threads if not self.is_async else 1
        return BatchCall(
            self.udf,
            self.output,
            batch,
            self._pool,
            threads,
            queries=self._queries,
            fields=self._fields,
            checks_nulls=self._checks_nulls,
        )

    def ahead(
        self, batch: pa.RecordBatch, guard: Guard | None = None, flight: Flight | None = None
    ) -> CallsAhead | None:
        """Return the calls of an async function for rows that are wanted one after the other.

        None is started yet. They share the limit of a `flight`. Plain functions are called by
        `run`.
        """
        if not self.is_async:
            return None
        flight = flight or Flight()
        flight.limit = self.threads
        return self._calls(batch, guard, flight)

    def _calls(self, batch: pa.RecordBatch, guard: Guard | None, flight: Flight) -> CallsAhead:
        udf, call = self.udf, self._batch_call(batch)

        def prepare() -> ForRow:
            function, limiter = self._live_function(batch), self._limiter()

            def for_row(row: int | None) -> Callable[..., Any]:
                called = function
                if udf.timeout is not None:
                    called = guarded_async(called, udf.timeout, guard, row)
                return called if limiter is None else limiter.limited_async(called)

            return for_row

        units = RowUnits(call) if udf.arg_type is UDFArgType.SCALAR else self._slices(call)
        return CallsAhead(call, units, prepare, event_loop(), flight)

    def _limiter(self) -> Limiter | None:
        """What the function's calls have to wait for: that of the task, or one of its own."""
        if self.udf.rate_limit is None:
            return None
        usage = current_meter()
        if not isinstance(usage, TaskUsage):
            usage = self._own_usage
        return usage.limiter(self.udf.rate_limit, self.output.name)

    def _slices(self, call: BatchCall) -> SliceUnits:
        def learn(cost: CallCost) -> None:
            self._call_cost = cost

        return SliceUnits(call, lambda: self._call_cost, learn)

    def settle(self, error: UDFError, batch: pa.RecordBatch, attempt: int) -> Applied:
        """Apply the policy to a row (a batch of one) whose worker died or hung."""
        action, _ = self.udf.on_error.decide(error, attempt, again=False)
        if action is not Action.SKIP:
            raise_failed(self.udf, self.output, error, 0, batch, attempt=attempt)
        failure = describe_failure(error, 0, attempt, kept_preview(self.udf, batch, 0))
        nothing = self._batch_call(batch).columns(pa.nulls(1, self.output.type))
        return Applied(nothing, (failure,))

    @property
    def function(self) -> object:
        """What it calls."""
        return self.udf.func

    def close(self, *, keep_function: bool = False) -> None:
        """Stop the threads and close a stateful UDF, unless others call it, too."""
        for pool in (self._pool, self._preparing):
            if pool is not None:
                pool.shutdown(cancel_futures=True)
        if keep_function:
            return
        if isinstance(self.udf.func, StatefulCallable):
            close_prepare_pool(self.udf.func)
            if self.is_async:
                event_loop().run(self.udf.func.close_async())
            else:
                self.udf.func.close()
            end_copy()

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

    def _guarded(
        self,
        function: Callable[..., Any],
        guard: Guard | None,
        current_row: Callable[[], int | None],
    ) -> Callable[..., Any]:
        """The function, with the time limit of its calls."""
        if self.udf.timeout is None:
            return function
        return guarded(function, self.udf.timeout, guard, current_row)

    def _live_function(self, batch: pa.RecordBatch) -> Callable[..., Any]:
        if not isinstance(self.udf.func, StatefulCallable):
            return self.udf.func
        try:
            if self.is_async:
                return event_loop().run(self.udf.func.live_async())
            return self.udf.func.live()
        except BaseException as error:  # noqa: BLE001  raised on where it is no failure
            failed = failure_of(error)
            raise_failed(self.udf, self.output, failed, None, batch, doing="could not be set up")


def _raise(error: BaseException) -> NoReturn:
    raise error


def _unknown_row() -> None:
    """A batch is prepared as a whole: which of its rows hangs is not known."""

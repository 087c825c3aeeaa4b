"""Calling a function on a whole batch, or on a slice of it per thread."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from geneva.execution.apply.call import BatchCall
from geneva.execution.apply.compact import compact_batch, copied
from geneva.execution.apply.output import (
    ARROW_ERRORS,
    reason_of,
    result_to_array,
    result_to_records,
)
from geneva.execution.apply.steps import USER_FAILURES, Call, Steps, drive
from geneva.render.text import count
from geneva.udf.declare import UDF, UDFArgType
from geneva.udf.policy import Action


@dataclass(frozen=True, slots=True)
class BatchAtOnce:
    """The strategy for functions of arrays and of record batches."""

    call: BatchCall

    def current_row(self) -> int | None:
        """Not known: the function has all of them."""
        return None

    def values_of(self, function: Callable[..., Any]) -> pa.Array:
        """Return the values, or raise."""
        rows = self.call.batch.num_rows
        if self.call.pool is None or rows == 1:
            return drive(slice_steps(self.call, 0, rows), function)
        size = -(-rows // self.call.threads)
        starts = range(0, rows, size)
        slices = [slice_steps(self.call, at, min(size, rows - at)) for at in starts]
        run = self.call.pool.submit
        calls = [run(copy_context().run, drive, steps, function) for steps in slices]
        self.call.rows_open = lambda: size * sum(not call.done() for call in calls)
        concurrent.futures.wait(calls)  # all of them, so that none runs on after a failure
        return joined(self.call, [call.result() for call in calls])


def joined(call: BatchCall, parts: list[pa.Array]) -> pa.Array:
    """Return the values of neighbouring slices as one array."""
    try:
        return pa.concat_arrays(parts)
    except ARROW_ERRORS as error:
        call.refuse(None, f"returned too much for one batch: {reason_of(error)}")


def slice_steps(call: BatchCall, start: int, size: int) -> Steps[pa.Array]:
    """Call the function for a slice of the batch, and do what the policy says when it fails."""
    try:
        return (yield from _call_slice(call, start, size))
    except USER_FAILURES as error:
        failed = error
    try:
        values = yield from _settled_slice(call, start, size, failed, whole=True)
        failed.__traceback__ = None  # frames that have the error: the batch would wait for gc
        return values
    finally:
        del failed


def _settled_slice(
    call: BatchCall, start: int, size: int, error: BaseException, *, whole: bool
) -> Steps[pa.Array]:
    """Find the rows at fault by halves, and do with them what the policy says.

    Retries are for the slice as it was, and for the single rows that are found in the end.
    """
    for attempt in itertools.count(1):
        again = whole or size == 1
        action, delay = call.udf.on_error.decide(error, attempt, again=again)
        if action is not Action.RETRY:
            break
        if not (yield call.again(delay, size)):
            return _unpaid(call, start, size, error)
        call.retries += 1
        try:
            return (yield from _call_slice(call, start, size))
        except USER_FAILURES as failed_again:
            error = failed_again
    if action is Action.FAIL:
        call.fail(error, start if size == 1 else None, attempt)
    if size == 1:
        call.skip(error, start, attempt)
        return pa.nulls(1, call.output.type)
    halves = []
    for part, length in ((start, size // 2), (start + size // 2, size - size // 2)):
        if not (yield call.again(0.0, length)):
            halves.append(_unpaid(call, part, length, error))
            continue
        try:
            halves.append((yield from _call_slice(call, part, length)))
            continue
        except USER_FAILURES as error_of_half:
            found = error_of_half
        try:
            halves.append((yield from _settled_slice(call, part, length, found, whole=False)))
        finally:
            del found
    return joined(call, halves)


def _unpaid(call: BatchCall, start: int, size: int, error: BaseException) -> pa.Array:
    call.leave_unpaid(error, start, size)
    return pa.nulls(size, call.output.type)


def _call_slice(call: BatchCall, start: int, size: int) -> Steps[pa.Array]:
    first, call.first = call.first, None
    if first is not None:
        result = first()
    else:
        is_whole = size == call.batch.num_rows
        batch = call.batch if is_whole else call.batch.slice(start, size)
        result = yield Call(arguments(batch, call.udf))
    udf, kind = call.udf, call.output.type
    if udf.unpacks:
        optional = udf.optional_fields
        array = result_to_records(result, kind, call.refuse, start, optional=optional)
    else:
        array = result_to_array(result, kind, call.refuse, start)
    if len(array) != size:
        found, expected = count(len(array), "value"), count(size, "row")
        call.refuse(None, f"returned {found} for a batch of {expected}")
    own = copied(array)  # as `own_values` does
    call.check_nulls(own, start)
    return own


def arguments(batch: pa.RecordBatch, udf: UDF) -> tuple[Any, ...]:
    """What a function of arrays, or of a record batch, is called with."""
    return as_parameters(as_declared(compact_batch(batch), udf), udf.arg_type)


def as_declared(batch: pa.RecordBatch, udf: UDF) -> pa.RecordBatch:
    """A batch with the names that its function knows, whatever the columns are called by now."""
    names = udf.input_columns
    if udf.arg_type is UDFArgType.ARRAY or names is None or batch.schema.names == names:
        return batch
    return batch.rename_columns(names)


def as_parameters(batch: pa.RecordBatch, kind: UDFArgType) -> tuple[Any, ...]:
    """Arrays one by one, or the whole batch."""
    return tuple(batch.columns) if kind is UDFArgType.ARRAY else (batch,)

"""Calling a function on a whole batch, or on a slice of it per thread."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from geneva.execution.apply.call import USER_FAILURES, BatchCall
from geneva.execution.apply.compact import compact_batch
from geneva.execution.apply.output import ARROW_ERRORS, reason_of, result_to_array
from geneva.udf.declare import UDFArgType
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
            return self._slice(function, 0, rows)
        size = -(-rows // self.call.threads)
        calls = [
            self.call.pool.submit(self._slice, function, start, min(size, rows - start))
            for start in range(0, rows, size)
        ]
        concurrent.futures.wait(calls)  # all of them, so that none runs on after a failure
        return self._joined([call.result() for call in calls])

    def _joined(self, parts: list[pa.Array]) -> pa.Array:
        try:
            return pa.concat_arrays(parts)
        except ARROW_ERRORS as error:
            self.call.refuse(None, f"returned too much for one batch: {reason_of(error)}")

    def _slice(self, function: Callable[..., Any], start: int, size: int) -> pa.Array:
        try:
            return self._call_slice(function, start, size)
        except USER_FAILURES as error:
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
            action, delay = self.call.udf.on_error.decide(error, attempt, again=again)
            if action is not Action.RETRY:
                break
            self.call.retries += 1
            time.sleep(delay)
            try:
                return self._call_slice(function, start, size)
            except USER_FAILURES as failed_again:
                error = failed_again
        if action is Action.FAIL:
            self.call.fail(error, start if size == 1 else None, attempt)
        if size == 1:
            self.call.skip(error, start, attempt)
            return pa.nulls(1, self.call.output.type)
        halves = []
        for part, length in ((start, size // 2), (start + size // 2, size - size // 2)):
            try:
                halves.append(self._call_slice(function, part, length))
            except USER_FAILURES as found:
                halves.append(self._settled_slice(function, part, length, found, whole=False))
        return self._joined(halves)

    def _call_slice(self, function: Callable[..., Any], start: int, size: int) -> pa.Array:
        is_array = self.call.udf.arg_type is UDFArgType.ARRAY
        batch = compact_batch(self.call.batch.slice(start, size))
        result = function(*batch.columns) if is_array else function(batch)
        array = result_to_array(result, self.call.output.type, self.call.refuse, start)
        if len(array) != size:
            self.call.refuse(None, f"returned {len(array)} values for a batch of {size} rows")
        # A copy: Lance panics on sliced structs, and a view would keep the inputs in memory.
        own = pa.concat_arrays([array, array[:0]])
        self.call.check_nulls(own, start)
        return own

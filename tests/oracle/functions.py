"""The functions of the random histories, and the log of their calls.

A UDF is pickled before it runs, so it holds nothing but its name and its factor. It finds the
recorder of the running test through `sys`, which works because the tasks run in this process.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import geneva

_RECORDER = "_geneva_oracle"

PAIR = pa.list_(pa.float32(), 2)
RECORD = pa.struct({"m": pa.int64(), "n": pa.string()})


@dataclass(frozen=True, slots=True)
class Function:
    """A function by name and factor. Another factor is another version of it."""

    kind: str
    factor: int = 1
    batches: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the function of a column for the inputs of one row."""

    role: str
    function: Function
    inputs: tuple[Hashable, ...]


class Broken(Exception):
    """What a flaky function raises on its bad rows."""


class Killed(Exception):
    """What ends a job in the middle."""


def half(factor: int, x: int | None) -> int | None:
    """NULL for some inputs, and the same value for two neighbouring inputs."""
    return None if x is None or x % 5 == 4 else x // 2 * factor


def tens(factor: int, a: int | None) -> int:
    return -factor if a is None else a * 10 + factor


def text(factor: int, x: int | None, y: int | None) -> str | None:
    return None if y == 3 else f"{x}/{y}/{factor}"


def pair(factor: int, x: int | None, y: int | None) -> list[float | None] | None:
    """A vector that may have NULL inside."""
    if x is not None and x % 6 == 5:
        return None
    return [None if x is None or x % 2 else float(x * factor), float(y or 0)]


def record(factor: int, x: int | None, y: int | None) -> dict[str, Any] | None:
    """A struct whose fields, or all of it, may be NULL."""
    if x is not None and x % 6 == 5:
        return None
    return {"m": x * factor if x is not None and x % 2 else None, "n": str(y) if y else None}


def ratio(factor: int, x: int | None, y: int | None) -> float:
    return (x or 0) * factor / y if y else math.nan


def flaky(factor: int, y: int | None) -> int | None:
    """Fails on some rows, for as long as the test says so (`evaluate`)."""
    return None if y is None else y + factor


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (half, tens, text, pair, record, ratio, flaky)
}
_TYPES: dict[str, pa.DataType] = {
    "half": pa.int64(),
    "tens": pa.int64(),
    "text": pa.string(),
    "pair": PAIR,
    "record": RECORD,
    "ratio": pa.float64(),
    "flaky": pa.int64(),
}


def evaluate(function: Function, inputs: Sequence[Any], *, failing: bool) -> Any:
    """Return the value; raise Broken where a flaky function fails."""
    if failing and function.kind == "flaky" and inputs[0] is not None and inputs[0] % 3 == 0:
        raise Broken(f"can't do {inputs[0]}")
    return _FUNCTIONS[function.kind](function.factor, *inputs)


@dataclass
class Recorder:
    """The log of all calls, and what a test wants to happen during them."""

    failing: bool = False
    calls: list[Call] = field(default_factory=list)
    _hook: Callable[[], None] | None = None
    _hook_role: str | None = None
    _calls_left: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def run(self, role: str, function: Function, inputs: tuple[Any, ...]) -> Any:
        """Log one call, do what the test wants to happen now, and return the value."""
        with self._lock:
            self.calls.append(Call(role, function, tuple(canonical(v) for v in inputs)))
            hook = self._due(role)
        if hook is not None:
            hook()
        return evaluate(function, inputs, failing=self.failing)

    def _due(self, role: str) -> Callable[[], None] | None:
        if self._hook is None or self._hook_role not in (None, role):
            return None
        self._calls_left -= 1
        if self._calls_left > 0:
            return None
        hook, self._hook = self._hook, None
        return hook

    def at_call(self, number: int, role: str | None, hook: Callable[[], None]) -> None:
        """Run the hook once, inside call `number` (from 1) of the function of this column."""
        self._hook, self._hook_role, self._calls_left = hook, role, number

    def cancel_hook(self) -> bool:
        """Forget the hook; return whether it has run."""
        ran = self._hook is None
        self._hook = None
        return ran

    def taken(self) -> Counter[Call]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return Counter(calls)


def recorder() -> Recorder:
    """Return the recorder of the running test."""
    return getattr(sys, _RECORDER)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Log the calls of everything inside."""
    before = getattr(sys, _RECORDER, None)
    made = Recorder()
    setattr(sys, _RECORDER, made)
    try:
        yield made
    finally:
        setattr(sys, _RECORDER, before)


def make_udf(role: str, function: Function, inputs: Sequence[str]) -> geneva.UDF:
    """Make the UDF of a column. Its version depends on role, kind and factor only."""
    kind, factor, batches = function.kind, function.factor, function.batches
    names, arity = list(inputs), len(inputs)
    policy = geneva.skip_on_error() if kind == "flaky" else None
    options: dict[str, Any] = {
        "data_type": _TYPES[kind],
        "input_columns": names,
        "name": kind,
        "on_error": policy,
    }
    if batches:
        return geneva.udf(_batch_function(role, kind, factor, arity), **options)
    return geneva.udf(_row_function(role, kind, factor, arity), **options)


def _row_function(role: str, kind: str, factor: int, arity: int) -> Callable[..., Any]:
    def of_one(first: Any) -> Any:
        import sys

        return sys._geneva_oracle_run(role, kind, factor, False, (first,))  # type: ignore[attr-defined]

    def of_two(first: Any, second: Any) -> Any:
        import sys

        return sys._geneva_oracle_run(role, kind, factor, False, (first, second))  # type: ignore[attr-defined]

    return of_one if arity == 1 else of_two


def _batch_function(role: str, kind: str, factor: int, arity: int) -> Callable[..., Any]:
    def of_one(first: pa.Array) -> list[Any]:
        import sys

        run = sys._geneva_oracle_run  # type: ignore[attr-defined]
        return [run(role, kind, factor, True, (v,)) for v in first.to_pylist()]

    def of_two(first: pa.Array, second: pa.Array) -> list[Any]:
        import sys

        run = sys._geneva_oracle_run  # type: ignore[attr-defined]
        rows = zip(first.to_pylist(), second.to_pylist(), strict=True)
        return [run(role, kind, factor, True, row) for row in rows]

    return of_one if arity == 1 else of_two


def _run(role: str, kind: str, factor: int, batches: bool, inputs: tuple[Any, ...]) -> Any:
    return recorder().run(role, Function(kind, factor, batches), inputs)


sys._geneva_oracle_run = _run  # type: ignore[attr-defined]


def canonical(value: Any) -> Hashable:
    """Return a value that can be compared and hashed: NaN equals NaN, lists are tuples."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, dict):
        return tuple((k, canonical(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(canonical(v) for v in value)
    return value


def plain(value: Hashable) -> Any:
    """Return the Python value that `canonical` made this of."""
    if value == "NaN":
        return math.nan
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return {name: plain(v) for name, v in value}
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return value


def some_value(kind: str, number: int) -> Hashable:
    """Return a value that a person might write into a column of this kind."""
    match kind:
        case "text":
            return f"by hand {number}"
        case "pair":
            return (None, float(number))
        case "record":
            return (("m", number), ("n", None))
        case "ratio":
            return "NaN" if number % 4 == 0 else number / 2
        case _:
            return 1000 + number

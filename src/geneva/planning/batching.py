"""How many rows go into one call: from what calls took so far. Arithmetic only.

A call costs `fixed + per_row * rows` seconds: a request to an API or a launch on a GPU is paid for
once per call, however few rows it has. A batch is as large as a quarter of a second allows, or
larger, until what is fixed is a tenth of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_TARGET_SECONDS = 0.25
"""A call of this length is long enough to hide what the engine adds to it."""
_FIXED_SHARE = 0.1
"""How much of a call may be its fixed cost, if a larger one would bring that down."""
_MAX_SECONDS = 30.0
"""A longer call is late with its result, and dear to lose ..."""
_MAX_FIXED_COSTS = 2.0
"""... unless its fixed cost alone is about that long: then it may take this many of them."""
_TIMEOUT_SHARE = 0.5
"""A call is planned to take at most this much of the function's timeout."""
_MAX_GROWTH = 8
_MIN_GROWTH = 2
_MIN_SPREAD = 1.5
"""Calls tell what is fixed when the largest of them has this many times the rows of the least."""
_MAX_CALLS = 4
"""How many calls are remembered: rows differ, and so may the speed."""


@dataclass(frozen=True, slots=True)
class CallCost:
    """What calls of a function cost, learned from the latest ones."""

    once_per_row: bool = False
    """Whether the function is called once per row: then nothing is fixed per batch."""
    timeout: float | None = None
    """Seconds that a call may take."""
    calls: tuple[tuple[int, float], ...] = ()
    """The latest calls: their rows, and their seconds."""
    line: tuple[float, float] | None = None
    """Fixed seconds and seconds per row, where calls of different sizes were made."""
    is_first: bool = True
    """Whether the only call known is the first of its process, which may have loaded things."""

    def after(self, rows: int, seconds: float) -> CallCost:
        """What is known after one more call. The first one counts until there is another."""
        call = (rows, seconds)
        if not self.calls:
            return replace(self, calls=(call,))
        kept = () if self.is_first else self.calls[1 - _MAX_CALLS :]
        calls = (*kept, call)
        line = _fitted(calls) or _scaled(self.line, call)
        return replace(self, calls=calls, line=line, is_first=False)

    def least_rows(self, most: int) -> int:
        """Rows that a batch, of at most so many, should have for its fixed cost to be small."""
        if self.line is None or self.once_per_row:
            return 1
        return max(1, int(min(_amortized_rows(*self.line), _wanted_rows(*self.line), most)))

    def next_rows(self) -> int | None:
        """How many rows the next batch should have; None while nothing is known."""
        if not self.calls:
            return None
        rows, seconds = self.calls[-1]
        if self.once_per_row:
            wanted = _rows_within(_TARGET_SECONDS, 0.0, seconds / rows)
        elif self.line is None:
            # One call doesn't tell what of it was fixed: a larger one will.
            wanted = max(_rows_within(_TARGET_SECONDS, 0.0, seconds / rows), _MIN_GROWTH * rows)
        else:
            wanted = _wanted_rows(*self.line)
            if self.timeout is not None:
                wanted = min(wanted, _rows_within(_TIMEOUT_SHARE * self.timeout, *self.line))
        largest = max(size for size, _ in self.calls)
        return max(1, int(min(wanted, _MAX_GROWTH * largest)))


def _fitted(calls: tuple[tuple[int, float], ...]) -> tuple[float, float] | None:
    """A least-squares line through calls; None where they are too much alike."""
    sizes = [rows for rows, _ in calls]
    if max(sizes) < _MIN_SPREAD * min(sizes):
        return None
    mean_rows = sum(sizes) / len(calls)
    mean_seconds = sum(seconds for _, seconds in calls) / len(calls)
    together = sum((rows - mean_rows) * (seconds - mean_seconds) for rows, seconds in calls)
    spread = sum((rows - mean_rows) ** 2 for rows in sizes)
    per_row = min(max(together / spread, 0.0), mean_seconds / mean_rows)
    return mean_seconds - per_row * mean_rows, per_row


def _scaled(
    line: tuple[float, float] | None, call: tuple[int, float]
) -> tuple[float, float] | None:
    """The line from before, with the speed of the latest call."""
    if line is None:
        return None
    (fixed, per_row), (rows, seconds) = line, call
    expected = fixed + per_row * rows
    factor = seconds / expected if expected > 0 else 1.0
    return fixed * factor, per_row * factor


def _wanted_rows(fixed: float, per_row: float) -> float:
    """The size of a call whose cost is known."""
    by_time = _rows_within(_TARGET_SECONDS, fixed, per_row)
    amortized = _amortized_rows(fixed, per_row)
    limit = _rows_within(max(_MAX_SECONDS, _MAX_FIXED_COSTS * fixed), fixed, per_row)
    return min(max(by_time, amortized), limit)


def _amortized_rows(fixed: float, per_row: float) -> float:
    """The size from which on what is fixed is a small share of a call."""
    return _rows_within(fixed / _FIXED_SHARE, fixed, per_row)


def _rows_within(seconds: float, fixed: float, per_row: float) -> float:
    """How many rows a call of so many seconds has."""
    if seconds <= fixed:
        return 1.0
    return (seconds - fixed) / per_row if per_row > 0 else float("inf")

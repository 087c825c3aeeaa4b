"""What calls of a service cost: limits that are declared, and usage that functions report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from geneva.errors import InvalidUDFError, UserInputError


@dataclass(frozen=True, slots=True)
class RateLimit:
    """How often a function may be called, over all workers of a job together.

    Calls are spread evenly over the minute. When the service refuses one as too many (status 429),
    all workers pause as long as it says, and the call is made again.
    """

    requests_per_minute: float | None = None
    """Calls in a minute; of functions that are called once per batch, batches."""
    tokens_per_minute: float | None = None
    """Tokens in a minute, as the function reports them (`geneva.report_usage`)."""
    key: str | None = None
    """All functions of the database with the same key share one limit, whichever job they run in;
    None: the function has a limit of its own in each job."""
    tokens: Callable[..., float] | None = None
    """How many tokens a call will use, by its inputs (those of `prepare`, where a class has one).
    None: as many as those before it."""
    max_attempts: int = 10
    """How often a call is made that the service refuses as too many; then it has failed."""

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not value > 0):
                raise InvalidUDFError(f"RateLimit: {name}={value!r} must be a number above 0.")
        if self.key is not None and (type(self.key) is not str or not self.key.strip()):
            raise InvalidUDFError(f"RateLimit: key={self.key!r} must be a name.")
        if self.tokens is not None and not callable(self.tokens):
            raise InvalidUDFError(
                f"RateLimit: tokens={self.tokens!r} must be a function of a call's arguments."
            )
        if type(self.max_attempts) is not int or self.max_attempts < 1:
            raise InvalidUDFError(
                f"RateLimit: max_attempts={self.max_attempts!r} must be a whole number above 0."
            )


class Meter:
    """Adds up what calls have used."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self.tokens = 0.0
        self.cost = 0.0

    def add(self, tokens: float, cost: float) -> None:
        """Count what a call has used."""
        with self._lock:
            self.tokens += tokens
            self.cost += cost

    @property
    def has_budget(self) -> bool:
        """Whether calls have to be affordable."""
        return False

    def may_call_again(self, rows: int, rows_open: int) -> bool:
        """Whether another call for some rows, after one that failed, can be paid for.

        `rows_open`: of how many rows, these among them, no call has ended yet.
        """
        return True


_METER: ContextVar[Meter | None] = ContextVar("geneva_meter", default=None)


class metered:
    """Let calls inside report to this meter."""

    __slots__ = ("_before", "_meter")

    def __init__(self, meter: Meter) -> None:
        """Change nothing yet."""
        self._meter = meter

    def __enter__(self) -> None:
        """Begin."""
        self._before = _METER.set(self._meter)

    def __exit__(self, *_: object) -> None:
        """Let them report to the one before."""
        _METER.reset(self._before)


def current_meter() -> Meter | None:
    """The meter that calls report to here."""
    return _METER.get()


def report_usage(*, tokens: float = 0, cost: float = 0) -> None:
    """Report what the call under way has used, from inside a UDF; may be called several times.

    `tokens` count for `RateLimit(tokens_per_minute=)`, `cost`, in whatever unit you like, for
    `backfill(max_cost=)`. Both are in the job's metrics. Outside of a job nothing happens.
    """
    for name, value in (("tokens", tokens), ("cost", cost)):
        if not _is_amount(value):
            raise UserInputError(f"report_usage: {name}={value!r} must be a number, 0 or more.")
    meter = _METER.get()
    if meter is not None:
        meter.add(float(tokens), float(cost))


def _is_amount(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and 0 <= float(value) < float("inf")
    except (TypeError, ValueError):
        return False

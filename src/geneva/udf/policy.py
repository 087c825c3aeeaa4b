"""What to do when a function fails on a row: an ordered list of rules, and how many may fail."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, runtime_checkable

from geneva.errors import InvalidUDFError
from geneva.flags import check_flag
from geneva.render.values import error_text

TRANSIENT: tuple[type[BaseException], ...] = (ConnectionError, TimeoutError, OSError)
"""What usually goes away by itself."""
_BACKOFFS = ("exponential", "linear", "fixed")
_MAX_DELAY_SECONDS = 60.0


class Action(StrEnum):
    """What is done about an error."""

    RETRY = "retry"
    SKIP = "skip"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do about some errors. Made by `Retry`, `Skip` and `Fail`.

    `max_attempts` counts calls, the first included. `backoff` is "exponential" (1, 2, 4 ... s),
    "linear" (1, 2, 3 ... s), "fixed" (1 s) or a number of seconds; never more than a minute.
    """

    action: Action
    exceptions: tuple[type[BaseException], ...] = (Exception,)
    match: str | None = None
    max_attempts: int = 1
    backoff: str | float = "exponential"

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        given: tuple[Any, ...] = self.exceptions
        for kind in given:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise InvalidUDFError(f"on_error: {kind!r} is no exception class.")
        if type(self.max_attempts) is not int or self.max_attempts < 1:
            raise InvalidUDFError(
                f"on_error: max_attempts={self.max_attempts!r} must be a whole number above 0."
            )
        is_seconds = isinstance(self.backoff, int | float) and self.backoff >= 0
        if self.backoff not in _BACKOFFS and not is_seconds:
            raise InvalidUDFError(
                f"on_error: backoff={self.backoff!r} must be one of {list(_BACKOFFS)}, or seconds."
            )
        if self.match is not None:
            try:
                re.compile(self.match)
            except (re.error, TypeError) as error:
                raise InvalidUDFError(
                    f"on_error: match={self.match!r} is no regular expression: {error}."
                ) from None

    def matches(self, error: BaseException) -> bool:
        """Whether the rule is about this error."""
        # exit() in a function is a failure like any other: it falls under Exception here.
        kinds = (*self.exceptions, SystemExit) if Exception in self.exceptions else self.exceptions
        says = self.match is None or re.search(self.match, error_text(error)) is not None
        return isinstance(error, kinds) and says

    def delay(self, attempt: int) -> float:
        """Seconds to wait after the attempt of that number (from 1) failed."""
        match self.backoff:
            case "exponential":
                # A little apart, so that many workers don't come back at the same moment.
                seconds = 2.0 ** min(attempt - 1, 10) * random.uniform(0.75, 1.25)
            case "linear":
                seconds = float(attempt)
            case "fixed":
                seconds = 1.0
            case _:
                seconds = float(self.backoff)
        return min(seconds, _MAX_DELAY_SECONDS)

    def to_record(self) -> dict[str, Any]:
        """The rule as a record, for the column's options and for people to read."""
        record: dict[str, Any] = {"do": self.action.value}
        record["on"] = [kind.__name__ for kind in self.exceptions]
        if self.match is not None:
            record["match"] = self.match
        if self.action is Action.RETRY:
            record |= {"max_attempts": self.max_attempts, "backoff": self.backoff}
        return record


def Retry(
    *exceptions: type[BaseException],
    match: str | None = None,
    max_attempts: int = 3,
    backoff: str | float = "exponential",
) -> Rule:
    """Call again, up to `max_attempts` calls in all; then the rules further down decide."""
    return Rule(Action.RETRY, exceptions or (Exception,), match, max_attempts, backoff)


def Skip(*exceptions: type[BaseException], match: str | None = None) -> Rule:
    """Leave the row NULL, put it down as failed, and go on."""
    return Rule(Action.SKIP, exceptions or (Exception,), match)


def Fail(*exceptions: type[BaseException], match: str | None = None) -> Rule:
    """Stop the job."""
    return Rule(Action.FAIL, exceptions or (Exception,), match)


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """Ordered rules: the first that is about an error decides; without one the job fails."""

    rules: tuple[Rule, ...] = ()
    max_failed_rows: int | None = None
    """Stop the job when more rows than this failed."""
    max_failed_fraction: float | None = None
    """Stop the job when more than this share of its rows failed."""
    store_errors: bool = True
    """Keep failed rows in the error store."""
    store_inputs: bool = True
    """Keep a short preview of a failed row's inputs there."""

    def __post_init__(self) -> None:
        """Refuse limits that can't be meant."""
        rows, share = self.max_failed_rows, self.max_failed_fraction
        if rows is not None and (type(rows) is not int or rows < 0):
            raise InvalidUDFError(f"max_failed_rows={rows!r} must be a whole number, 0 or more.")
        if share is not None and not (type(share) in (int, float) and 0 <= share <= 1):
            raise InvalidUDFError(f"max_failed_fraction={share!r} must be between 0 and 1.")
        check_flag("store_errors", self.store_errors, InvalidUDFError)
        check_flag("store_inputs", self.store_inputs, InvalidUDFError)

    def __iter__(self) -> Iterator[Rule]:
        """Its rules: `on_error=[*retry_transient(), Skip(ValueError)]`.

        Refused where it says more than its rules do, which a list of them would lose.
        """
        if replace(self, rules=()) != ErrorPolicy():
            raise InvalidUDFError(
                "A list of rules has no limits: write policy + [...], or give max_failed_rows or "
                "max_failed_fraction to udf()."
            )
        return iter(self.rules)

    def __add__(self, rules: Iterable[Rule]) -> ErrorPolicy:
        """This policy with more rules below its own."""
        return replace(self, rules=policy_of([*self.rules, *rules]).rules)

    def __radd__(self, rules: Iterable[Rule]) -> ErrorPolicy:
        """This policy with more rules above its own."""
        return replace(self, rules=policy_of([*rules, *self.rules]).rules)

    @property
    def is_fail_fast(self) -> bool:
        """Whether the first error ends the job."""
        return all(rule.action is Action.FAIL for rule in self.rules)

    def decide(
        self, error: BaseException, attempt: int, *, again: bool = True
    ) -> tuple[Action, float]:
        """What to do after that many attempts, and how long to wait first.

        `again=False`: as if every retry was used up.
        """
        for rule in self.rules:
            if not rule.matches(error):
                continue
            if rule.action is not Action.RETRY:
                return rule.action, 0.0
            if again and attempt < rule.max_attempts:
                return Action.RETRY, rule.delay(attempt)
        return Action.FAIL, 0.0

    def to_json(self) -> str:
        """The policy as it stands in a column's options; empty for the default one."""
        if self == FAIL_FAST:
            return ""
        limits = {
            name: getattr(self, name)
            for name in ("max_failed_rows", "max_failed_fraction")
            if getattr(self, name) is not None
        }
        stores = {n: False for n in ("store_errors", "store_inputs") if not getattr(self, n)}
        return json.dumps({"rules": [rule.to_record() for rule in self.rules], **limits, **stores})


FAIL_FAST = ErrorPolicy()

OnError: TypeAlias = "ErrorPolicy | Rule | Sequence[Rule] | HasPolicy | None"


def fail_fast() -> ErrorPolicy:
    """Stop the job at the first error. This is the default."""
    return FAIL_FAST


def skip_on_error(
    *, max_failed_rows: int | None = None, max_failed_fraction: float | None = None
) -> ErrorPolicy:
    """Leave rows that fail NULL, put them down as failed, and go on."""
    return ErrorPolicy((Skip(),), max_failed_rows, max_failed_fraction)


def retry_transient(max_attempts: int = 3, backoff: str | float = "exponential") -> ErrorPolicy:
    """Call again after a ConnectionError, TimeoutError or OSError; then fail."""
    return ErrorPolicy((Retry(*TRANSIENT, max_attempts=max_attempts, backoff=backoff),))


def retry_all(max_attempts: int = 3, backoff: str | float = "exponential") -> ErrorPolicy:
    """Call again after any exception; then fail."""
    return ErrorPolicy((Retry(max_attempts=max_attempts, backoff=backoff),))


@runtime_checkable
class HasPolicy(Protocol):
    """Another way to say a policy: `geneva.debug.error_store.ErrorHandlingConfig`."""

    def policy(self) -> ErrorPolicy:
        """The policy."""


def policy_of(
    on_error: Any,
    max_failed_rows: int | None = None,
    max_failed_fraction: float | None = None,
) -> ErrorPolicy:
    """A policy out of whatever `on_error` was given, with these limits where they are given."""
    match on_error:
        case None:
            policy = FAIL_FAST
        case ErrorPolicy():
            policy = on_error
        case HasPolicy():
            policy = on_error.policy()
        case Rule():
            policy = ErrorPolicy((on_error,))
        case list() | tuple() if all(isinstance(rule, Rule) for rule in on_error):
            policy = ErrorPolicy(tuple(on_error))
        case _:
            raise InvalidUDFError(
                f"on_error={on_error!r} must be fail_fast(), skip_on_error(), retry_transient(), "
                "retry_all(), or a list of Retry(...), Skip(...) and Fail(...)."
            )
    if max_failed_rows is None and max_failed_fraction is None:
        return policy
    given: dict[str, Any] = {
        "max_failed_rows": max_failed_rows,
        "max_failed_fraction": max_failed_fraction,
    }
    return replace(policy, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Limits:
    """What a driver must know of a policy, read from a column's options without its code."""

    max_failed_rows: int | None = None
    max_failed_fraction: float | None = None
    store_errors: bool = True

    @classmethod
    def from_json(cls, text: str) -> Limits:
        """Out of what `ErrorPolicy.to_json` wrote."""
        record = json.loads(text) if text else {}
        return cls(
            record.get("max_failed_rows"),
            record.get("max_failed_fraction"),
            record.get("store_errors", True),
        )

    def max_failed(self, rows: int) -> int | None:
        """How many of a job's rows may fail; None: all of them."""
        limits = []
        if self.max_failed_rows is not None:
            limits.append(self.max_failed_rows)
        if self.max_failed_fraction is not None:
            limits.append(int(self.max_failed_fraction * rows))
        return min(limits, default=None)

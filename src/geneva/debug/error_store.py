"""The error handling of a UDF as one record, under the name that Geneva's users know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from geneva.compatibility import warn_compatibility
from geneva.errors import InvalidUDFError
from geneva.udf.policy import (
    ErrorPolicy,
    Fail,
    OnError,
    Retry,
    Rule,
    Skip,
    fail_fast,
    policy_of,
    retry_all,
    retry_transient,
    skip_on_error,
)

__all__ = [
    "ErrorHandlingConfig",
    "ExceptionMatcher",
    "Fail",
    "Retry",
    "Skip",
    "UDFRetryConfig",
    "fail_fast",
    "retry_all",
    "retry_transient",
    "skip_on_error",
]

ExceptionMatcher = Rule
"""What `Retry`, `Skip` and `Fail` make, by Geneva's name."""

_WAITS: dict[str, str | float] = {
    "wait_exponential": "exponential",
    "wait_exponential_jitter": "exponential",
    "wait_incrementing": "linear",
    "wait_none": 0.0,
}
"""Of tenacity's kinds of waiting, those that are ours as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UDFRetryConfig:
    """When to call again, in tenacity's words; what is left out is as in `Retry()`.

    Only what a rule of ours can say is taken: `retry_if_exception_type` (several with `|`),
    `stop_after_attempt`, `wait_fixed`, `wait_exponential`, `wait_random_exponential`,
    `wait_exponential_jitter`, `wait_incrementing`, `wait_none`.
    """

    retry: Any = None
    stop: Any = None
    wait: Any = None
    before_sleep: Any = None

    def rule(self) -> Rule:
        """The same as a rule."""
        if self.before_sleep is not None:
            warn_compatibility(
                "UDFRetryConfig(before_sleep=...)",
                "it is not called: retries are counted in the job's metrics",
            )
        exceptions = () if self.retry is None else self._exceptions(self.retry)
        attempts = 3
        if self.stop is not None:
            attempts = _part("stop", self.stop, "stop_after_attempt", "max_attempt_number")
        return Retry(*exceptions, max_attempts=attempts, backoff=self._backoff())

    def _exceptions(self, retry: Any) -> tuple[Any, ...]:
        """The classes of `retry_if_exception_type`, or of several, put together with `|`."""
        if "retry_any" in _kinds(retry):
            return tuple(kind for each in retry.retries for kind in self._exceptions(each))
        kinds = _part("retry", retry, "retry_if_exception_type", "exception_types")
        return kinds if isinstance(kinds, tuple) else (kinds,)

    def _backoff(self) -> str | float:
        if self.wait is None:
            return "exponential"
        seconds = getattr(self.wait, "wait_fixed", None)
        if seconds is not None:
            return float(seconds)
        for kind in _kinds(self.wait):
            if kind in _WAITS:
                return _WAITS[kind]
        raise InvalidUDFError(
            f"UDFRetryConfig(wait={self.wait!r}) can't be done here: give wait_fixed(seconds), "
            "wait_exponential(), wait_incrementing() or wait_none()."
        )


def _part(word: str, given: Any, kind: str, fact: str) -> Any:
    """What one of tenacity's objects says, where it is of the kind that we know."""
    if kind not in _kinds(given):
        raise InvalidUDFError(
            f"UDFRetryConfig({word}={given!r}) can't be done here: give {kind}(...), or "
            "on_error=[Retry(...)]."
        )
    return getattr(given, fact)


def _kinds(given: Any) -> list[str]:
    """The names of an object's classes: tenacity itself need not be installed."""
    return [kind.__name__ for kind in type(given).__mro__]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorHandlingConfig:
    """What to do when rows fail, how many may, and what is kept of them.

    `@udf(error_handling=ErrorHandlingConfig(on_error=skip_on_error()))` is the same as
    `@udf(on_error=skip_on_error())`.
    """

    on_error: OnError = None
    retry_config: UDFRetryConfig | None = None
    """When to call again, in tenacity's words, in place of `on_error`."""
    store_errors: bool = True
    """Keep failed rows in the error store (`table.get_errors()`)."""
    store_inputs: bool = True
    """Keep a short preview of their inputs there."""
    max_failed_rows: int | None = None
    max_failed_fraction: float | None = None

    def policy(self) -> ErrorPolicy:
        """The same as a policy."""
        if self.retry_config is not None and self.on_error is not None:
            raise InvalidUDFError("Give on_error or retry_config, not both.")
        on_error = self.on_error if self.retry_config is None else [self.retry_config.rule()]
        policy = policy_of(on_error, self.max_failed_rows, self.max_failed_fraction)
        return replace(policy, store_errors=self.store_errors, store_inputs=self.store_inputs)

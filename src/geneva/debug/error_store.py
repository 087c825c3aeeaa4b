"""The error handling of a UDF as one record, under the name that Geneva's users know."""

from __future__ import annotations

from dataclasses import dataclass, replace

from geneva.udf.policy import ErrorPolicy, OnError, policy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorHandlingConfig:
    """What to do when rows fail, how many may, and what is kept of them.

    `@udf(error_handling=ErrorHandlingConfig(on_error=skip_on_error()))` is the same as
    `@udf(on_error=skip_on_error())`.
    """

    on_error: OnError = None
    store_errors: bool = True
    """Keep failed rows in the error store (`table.get_errors()`)."""
    store_inputs: bool = True
    """Keep a short preview of their inputs there."""
    max_failed_rows: int | None = None
    max_failed_fraction: float | None = None

    def policy(self) -> ErrorPolicy:
        """The same as a policy."""
        policy = policy_of(self.on_error, self.max_failed_rows, self.max_failed_fraction)
        return replace(policy, store_errors=self.store_errors, store_inputs=self.store_inputs)

"""The policies for rows that fail, under the name that they were first published under."""

from geneva.udf.policy import (
    Fail,
    Retry,
    Skip,
    fail_fast,
    retry_all,
    retry_transient,
    skip_on_error,
)

__all__ = ["Fail", "Retry", "Skip", "fail_fast", "retry_all", "retry_transient", "skip_on_error"]

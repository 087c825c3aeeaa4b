"""Recognising that a service refuses a call as too many, whatever client raised the error."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping
from typing import Any

TOO_MANY = 429
_MAX_PAUSE_SECONDS = 60.0


def is_throttled(error: BaseException) -> bool:
    """Whether an error says "too many requests": by its status 429, or a `retry_after`.

    requests and httpx have it as `error.response.status_code`, openai as `error.status_code`,
    aiohttp as `error.status`, urllib as `error.code`.
    """
    if getattr(error, "retry_after", None) is not None:
        return True
    answer = getattr(error, "response", None)
    found = (getattr(error, name, None) for name in ("status_code", "status", "code"))
    inside = (getattr(answer, name, None) for name in ("status_code", "status"))
    return any(status == TOO_MANY for status in (*found, *inside))


def retry_after(error: BaseException) -> float | None:
    """Seconds to wait before the next call, as the service says; None: it doesn't."""
    given = _seconds(getattr(error, "retry_after", None))
    if given is not None:
        return given
    for owner in (error, getattr(error, "response", None)):
        headers = getattr(owner, "headers", None)
        if headers is None:
            continue
        milliseconds = _seconds(_header(headers, "retry-after-ms"))
        if milliseconds is not None:
            return milliseconds / 1000
        found = _header(headers, "retry-after")
        if found is not None:
            return _seconds(found)
    return None


def pause_of(error: BaseException, attempt: int) -> float:
    """Seconds to wait after attempt `attempt` (from 1): as the service says, else ever longer."""
    said = retry_after(error)
    return said if said is not None else min(2.0 ** (attempt - 1), _MAX_PAUSE_SECONDS)


def _header(headers: Any, name: str) -> Any:
    """A header, in mappings that mind capitals and in those that don't."""
    if isinstance(headers, Mapping) or hasattr(headers, "items"):
        return next((v for k, v in headers.items() if str(k).lower() == name), None)
    return None


def _seconds(value: Any) -> float | None:
    """Seconds out of a number, its text, or a date as HTTP writes it."""
    if value is None:
        return None
    if hasattr(value, "total_seconds"):
        return max(0.0, float(value.total_seconds()))
    try:
        number = float(value)
        return max(0.0, number) if math.isfinite(number) else None
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(str(value)).timestamp() - time.time())
    except (TypeError, ValueError):
        return None

"""OpenTelemetry spans, where opentelemetry-api is installed (the extra `otel`); else nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol


class Span(Protocol):
    """What is used of OpenTelemetry's spans."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Set one attribute."""


class _NoSpan:
    def set_attribute(self, key: str, value: Any) -> None:
        """Do nothing: there is no OpenTelemetry."""


@cache
def _tracer() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("geneva")


@contextmanager
def span(name: str, attributes: Mapping[str, Any]) -> Iterator[Span]:
    """A span around what is inside; errors that leave it are recorded on it."""
    tracer = _tracer()
    if tracer is None:
        yield _NoSpan()
        return
    plain = {f"geneva.{key}": value for key, value in attributes.items() if value is not None}
    with tracer.start_as_current_span(name, attributes=plain) as current:
        yield current


def set_attributes(current: Span, numbers: Mapping[str, Any]) -> None:
    """Put a job's numbers on its span."""
    for key, value in numbers.items():
        if isinstance(value, bool | int | float | str):
            current.set_attribute(f"geneva.{key}", value)

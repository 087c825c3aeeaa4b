"""Values of a table as people and as machines read them. Pure."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from typing import Any

_LONGEST = 60
_SHOWN_ITEMS = 4


def cell(value: Any) -> str:
    """A value in a few characters."""
    match value:
        case None:
            return "NULL"
        case bytes() | bytearray() | memoryview():
            return f"<{len(value):,} bytes>"
        case float():
            return f"{value:.6g}"
        case list() | tuple():
            return _listed(value)
        case dict():
            return _cut("{" + ", ".join(f"{k}: {cell(v)}" for k, v in value.items()) + "}")
        case _:
            return _cut(" ".join(str(value).split()))


def plain(value: Any) -> Any:
    """A value as JSON can hold it: bytes as base64, NaN and infinity as null, times as ISO 8601."""
    match value:
        case None | bool() | int():
            return value
        case Enum():
            return value.value
        case str():
            return str.__str__(value)
        case float():
            return value if math.isfinite(value) else None
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(bytes(value)).decode()
        case Mapping():
            return {str(key): plain(each) for key, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(each) for each in value]
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case _:
            return str(value)


def _listed(values: list[Any] | tuple[Any, ...]) -> str:
    shown = ", ".join(cell(value) for value in values[:_SHOWN_ITEMS])
    more = f", ... {len(values):,} in all" if len(values) > _SHOWN_ITEMS else ""
    return _cut(f"[{shown}{more}]")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."

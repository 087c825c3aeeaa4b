"""Values in a few characters, for messages and tables; and as JSON holds them. Pure."""

from __future__ import annotations

import base64
import math
import reprlib
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from typing import Any

import pyarrow as pa

from geneva.render.text import shorten

MAX_LENGTH = 60
"""Characters of a value in a table, or of one input of a failed row."""
_SHOWN_ITEMS = 4
_MAX_CONSTANT = 72
_CONSTANTS = (str, bytes, int, float, complex, type(None), list, tuple, set, frozenset, dict)
_REPR = reprlib.Repr()


def cell_text(value: Any) -> str:
    """A Python value in a cell of a text table."""
    match value:
        case None:
            return "NULL"
        case bytes() | bytearray() | memoryview():
            return f"<{len(value):,} bytes>"
        case float():
            return f"{value:.6g}"
        case list() | tuple():
            shown = ", ".join(cell_text(item) for item in value[:_SHOWN_ITEMS])
            more = f", ... {len(value):,} in all" if len(value) > _SHOWN_ITEMS else ""
            return shorten(f"[{shown}{more}]", MAX_LENGTH)
        case dict():
            pairs = ", ".join(f"{key}: {cell_text(each)}" for key, each in value.items())
            return shorten("{" + pairs + "}", MAX_LENGTH)
        case _:
            return shorten(" ".join(str(value).split()), MAX_LENGTH)


def scalar_text(value: pa.Scalar) -> str:
    """An Arrow value as Python writes it; of a long one only the beginning is converted."""
    kind = value.type
    if not value.is_valid:
        return "None"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return f"<{len(value.as_buffer()):,} bytes>"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text = value.as_buffer().to_pybytes()[: 4 * MAX_LENGTH].decode(errors="ignore")
        return shorten(repr(text), MAX_LENGTH)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = value.values
        more = f", ... {len(items)} items" if len(items) > _SHOWN_ITEMS else ""
        shown = ", ".join(scalar_text(item) for item in items[:_SHOWN_ITEMS])
        return shorten(f"[{shown}{more}]", MAX_LENGTH)
    return shorten(repr(value.as_py()), MAX_LENGTH)


def error_text(error: BaseException) -> str:
    """The message of an exception, whatever its class does; one that can be written."""
    try:
        text = str(error)
    except Exception as failed:  # noqa: BLE001  it is the user's class
        text = f"<its message can't be shown: {type(failed).__name__}>"
    return writable(text)


def writable(text: str) -> str:
    """A text as UTF-8 can hold it: names of files may have bytes in them that are none."""
    return text.encode(errors="backslashreplace").decode()


def repr_text(value: Any, limit: int = 80) -> str:
    """The beginning of a value's repr; its type, where that raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a broken __repr__ must not hide what is reported
        text = f"<{type(value).__name__}>"
    return shorten(text, limit)


def constant_text(value: Any) -> str:
    """A constant of a function: built-in values as they are written, others by their type."""
    text = f"{type(value).__qualname__} object"
    if type(value) in _CONSTANTS:
        try:
            text = " ".join(_REPR.repr(value).split())
        except Exception:  # noqa: BLE001 - an item's own repr may raise anything
            return text
    return shorten(text, _MAX_CONSTANT)


def json_value(value: Any) -> Any:
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
            return {str(key): json_value(each) for key, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [json_value(each) for each in value]
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case _:
            return str(value)

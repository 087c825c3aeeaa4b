"""Values of a table as HTML: pictures, vectors as strips, long text cut. Everything escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from geneva.console.layout import cut, path
from geneva.render.html import Html, tag
from geneva.render.text import size
from geneva.storage.lance.preview import Binary, Preview

MAX_PICTURE_BYTES = 8 * 2**20
_MAX_TEXT = 160
_MAX_BINS = 64
_MIN_VECTOR = 4
_STRIP = (128, 22)
_SHADES = 8


def cell(value: Any, kind: pa.DataType, where: str) -> Html:
    """One value; `where` is the address of its picture, should it be one."""
    if value is None:
        return tag("span", "NULL", class_="null")
    if isinstance(value, Binary):
        return _binary(value, where)
    if _is_vector(kind) and len(value) >= _MIN_VECTOR:
        return vector(value)
    if isinstance(value, bool):
        return tag("code", str(value).lower())
    if isinstance(value, int | float):
        return tag("span", _number(value), class_="number")
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict | list):
        return _text(json.dumps(value, default=str, ensure_ascii=False), code=True)
    return _text(str(value))


def picture_address(table: str, preview: Preview, column: str, row: int) -> str:
    """Where a cell's picture is: at a fixed version, so that it never is another one."""
    return path(
        "tables", table, "picture", column=column, row=preview.start + row, version=preview.version
    )


def vector(values: Sequence[float | None]) -> Html:
    """A vector as a strip: light is low, dark is high; many values share a stripe."""
    numbers = [v for v in values if v is not None and math.isfinite(v)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
    width, height = _STRIP
    bins = _binned(values)
    step = width / len(bins)
    bars = [
        tag(
            "rect",
            x=f"{i * step:.2f}",
            y=0,
            width=f"{step + 0.2:.2f}",
            height=height,
            class_=f"shade{_shade(value, low, high)}",
        )
        for i, value in enumerate(bins)
    ]
    label = f"vector of {len(values)} values from {_number(low)} to {_number(high)}"
    return tag(
        "span",
        tag(
            "svg",
            tag("title", label),
            bars,
            viewBox=f"0 0 {width} {height}",
            width=width,
            height=height,
            role="img",
            aria_label=label,
            preserveAspectRatio="none",
            class_="strip",
        ),
        tag("span", f"{len(values)} in [{_number(low)}, {_number(high)}]", class_="dim small"),
        class_="vector",
    )


def _binned(values: Sequence[float | None]) -> list[float | None]:
    if len(values) <= _MAX_BINS:
        return list(values)
    bins: list[float | None] = []
    for i in range(_MAX_BINS):
        start, end = i * len(values) // _MAX_BINS, (i + 1) * len(values) // _MAX_BINS
        own = [v for v in values[start:end] if v is not None and math.isfinite(v)]
        bins.append(sum(own) / len(own) if own else None)
    return bins


def _shade(value: float | None, low: float, high: float) -> str:
    if value is None or not math.isfinite(value):
        return "-none"
    share = 0.5 if high == low else (value - low) / (high - low)
    return str(min(_SHADES - 1, int(share * _SHADES)))


def _binary(value: Binary, where: str) -> Html:
    if value.picture is None:
        return tag("span", f"{size(value.size)} of bytes", class_="dim")
    label = f"{value.picture.removeprefix('image/').upper()}, {size(value.size)}"
    if value.size > MAX_PICTURE_BYTES:
        return tag("span", f"{label}: too big to show", class_="dim")
    picture = tag("img", src=where, alt=f"picture ({label})", loading="lazy", class_="thumb")
    return tag("a", picture, href=where)


def _text(text: str, *, code: bool = False) -> Html:
    short = cut(text, _MAX_TEXT)
    title = cut(text, 1000) if short != text else None
    return tag("code" if code else "span", short, title=title, class_="text")


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}"


def _is_vector(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_list(kind) for is_list in lists):
        return False
    return bool(pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))

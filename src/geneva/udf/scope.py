"""The names that annotations of a function or class may use, beside those of its module."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any


def enclosing_names(defined: Any) -> dict[str, Any]:
    """Return the names of the functions and classes that define this one, while these run.

    An annotation that is a text (`from __future__ import annotations`) may name what is imported or
    defined in the function around it: only that function's frame knows it, and only until it ends.
    """
    path = getattr(defined, "__qualname__", "")
    if "." not in path:
        return {}
    names: dict[str, Any] = {}
    frames = [f for f in _frames() if path.startswith(f"{f.f_code.co_qualname}.")]
    for frame in reversed(frames):  # the innermost one has the last word
        if frame.f_globals is _module_names(defined):
            names.update(frame.f_locals)
    return names


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_names(defined: Any) -> Mapping[str, Any]:
    module = sys.modules.get(getattr(defined, "__module__", None) or "")
    found: Mapping[str, Any] = getattr(defined, "__globals__", vars(module) if module else {})
    return found


def closure_values(function: Any) -> dict[str, Any]:
    """Return the names of enclosing functions that a function uses itself, by their values."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    values = {}
    for name, cell in zip(names, cells, strict=False):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return values

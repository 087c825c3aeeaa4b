"""Tracebacks for people: their own lines, without those of the libraries in between. Pure."""

from __future__ import annotations

import traceback
from pathlib import Path

from geneva.render.plain import plain

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ")


def own_lines(error: BaseException) -> list[str]:
    """An error as a notebook shows it: the user's lines, what happened, and its notes."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_PACKAGE)
        and not any(part in frame.filename.replace("\\", "/") for part in _LIBRARIES)
    ]
    text = "".join(traceback.StackSummary.from_list(own).format())
    lines = [*text.splitlines(), f"{type(error).__name__}: {error}"]
    for note in getattr(error, "__notes__", ()):
        lines += ["", *str(note).rstrip().splitlines()]
    return [plain(line, lines=True) for line in lines]

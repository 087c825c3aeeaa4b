"""Text of strangers, made safe to show: the one home of it. Imports nothing of Geneva.

Names, values and messages come from tables that others wrote. In a terminal some characters are
commands (ESC, BEL, the C1 controls), in any text some turn its order around or hide parts of it.
They are written out, as Python's `repr` does; all else stays as it is.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories: controls, invisible formatting, surrogates, separators of lines."""
_JOINERS = "\u200c\u200d"
"""Formatting that is harmless, and part of how Persian, Hindi and emoji are written."""


def plain(text: object, *, lines: bool = False) -> str:
    """A text that acts on no terminal; `lines`: its line ends and tabs stay what they are."""
    shown = str(text)
    if shown.isprintable():
        return shown
    if lines:
        shown = shown.replace("\r\n", "\n")
    kept = "\n\t" if lines else ""
    return "".join(c if c in kept or not _is_unsafe(c) else _escaped(c) for c in shown)


def json_text(document: Any, *, unicode: bool = True) -> str:
    """A JSON document that acts on no terminal, and holds the same values.

    Without `unicode`, all that is not ASCII is written out.
    """
    text = json.dumps(document, indent=2, ensure_ascii=not unicode)
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or not _is_unsafe(c) else json.dumps(c)[1:-1] for c in text)


def _is_unsafe(character: str) -> bool:
    return (
        not character.isprintable()
        and unicodedata.category(character) in _UNSAFE
        and character not in _JOINERS
    )


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]

"""HTML and SVG as values. What is not `Html` already is escaped, so that none is forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Html(str):
    """Text that is markup. Only this module and literals of the console's own make one."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Html | Iterable[Child] | None"
Attribute: TypeAlias = str | int | float | bool | None


def tag(element: str, /, *children: Child, **attributes: Attribute) -> Html:
    """An element. `class_` is class, `aria_label` aria-label; None and False leave one out."""
    told = "".join(_attribute(key, value) for key, value in attributes.items())
    if element in _VOID:
        return Html(f"<{element}{told}>")
    return Html(f"<{element}{told}>{join(children)}</{element}>")


def join(children: Child) -> Html:
    """The markup of some children, one after the other; plain text is escaped."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return Html(escape(_visible(children)))
    if isinstance(children, int | float):
        return Html(escape(str(children)))
    return Html("".join(join(child) for child in children))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(_visible(str(value)))}"'


def _visible(text: str) -> str:
    """Control characters as signs: markup can't carry them, and they hide things."""
    if text.isprintable():
        return text
    return "".join(c if ord(c) >= 32 or c in "\n\t" else chr(0x2400 + ord(c)) for c in text)

"""HTML and SVG as values, and the small tables and bars that a notebook shows.

What is not `Html` already is escaped, so that escaping can't be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TypeAlias

from geneva.render.plain import plain

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})

_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"
_BAR = "height:10px;border-radius:3px;background:#4c8dd6"
_TRACK = "width:220px;height:10px;border-radius:3px;background:rgba(128,128,128,.3)"
_DIM = "opacity:.65"


class Html(str):
    """Text that is markup. Only `tag`, `join` and literals of Geneva's own make one."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Show it in a notebook as what it is."""
        return str(self)


Child: TypeAlias = "str | int | float | Html | Iterable[Child] | None"
Attribute: TypeAlias = str | int | float | bool | None


def tag(element: str, /, *children: Child, **attributes: Attribute) -> Html:
    """An element. `class_` is class, `aria_label` aria-label; None and False leave one out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if element in _VOID:
        return Html(f"<{element}{written}>")
    return Html(f"<{element}{written}>{join(children)}</{element}>")


def join(children: Child) -> Html:
    """The markup of some children, one after the other; plain text is escaped."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return Html(escape(plain(children, lines=True)))
    if isinstance(children, int | float):
        return Html(escape(str(children)))
    return Html("".join(join(child) for child in children))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(plain(value, lines=True))}"'


# ------------------------------------------------------------------------------- for notebooks
# Styled in place: a notebook has no style sheet of ours.


def grid(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """A table with a heading for each column."""
    head = tag("tr", [tag("th", name, scope="col", style=_CELL) for name in headers])
    body = [tag("tr", [_cell(value) for value in row]) for row in rows]
    return tag("table", tag("thead", head), tag("tbody", body))


def facts(pairs: Iterable[tuple[str, Any]]) -> Html:
    """A table of names and values; what is None is left out."""
    rows = [tag("tr", _name(name), _cell(value)) for name, value in pairs if value is not None]
    return tag("table", tag("tbody", rows))


def section(title: str, *parts: Child) -> Html:
    """A title and the parts below it."""
    return tag("div", tag("strong", title), parts)


def note(text: Any) -> Html:
    """A line of small print."""
    return tag("div", str(text), style=_DIM)


def bars(title: str, states: Iterable[tuple[str, int]], total: int) -> Html:
    """Progress: one bar per state, each out of the same total."""
    rows = [_bar(name, done, total) for name, done in states]
    return section(title, tag("table", tag("tbody", rows)))


def _bar(name: str, done: int, total: int) -> Html:
    percent = 100 if total <= 0 else max(0, min(100, round(100 * done / total)))
    filled = tag("div", style=f"{_BAR};width:{percent}%")
    track = tag(
        "div",
        filled,
        role="progressbar",
        aria_valuemin=0,
        aria_valuemax=100,
        aria_valuenow=percent,
        aria_label=name,
        style=_TRACK,
    )
    return tag("tr", _name(name), tag("td", track, style=_CELL), _cell(f"{done:,} / {total:,}"))


def _name(name: str) -> Html:
    return tag("th", name, scope="row", style=_CELL)


def _cell(value: Any) -> Html:
    return tag("td", None if value is None else str(value), style=_CELL)

"""Small escaped HTML for notebooks: facts, tables and bars. Pure text in, text out."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

Pairs = Iterable[tuple[str, Any]]

_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"
_BAR = "height:10px;border-radius:3px;background:#4c8dd6"
_TRACK = "width:220px;height:10px;border-radius:3px;background:rgba(128,128,128,.3)"
_DIM = "opacity:.65"


def escape(value: Any) -> str:
    """A value as text that no browser takes for markup; None is an empty text."""
    return html.escape("" if value is None else str(value), quote=True)


def grid(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a heading for each column."""
    head = "".join(f'<th scope="col" style="{_CELL}">{escape(name)}</th>' for name in headers)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{_rows(rows)}</tbody></table>"


def facts(pairs: Pairs) -> str:
    """A table of names and values; what is None is left out."""
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL}">{escape(name)}</th>'
        f'<td style="{_CELL}">{escape(value)}</td></tr>'
        for name, value in pairs
        if value is not None
    )
    return f"<table><tbody>{rows}</tbody></table>"


def section(title: str, *parts: str) -> str:
    """A title and the parts below it, which are HTML already."""
    return f"<div><strong>{escape(title)}</strong>{''.join(parts)}</div>"


def note(text: Any) -> str:
    """A line of small print."""
    return f'<div style="{_DIM}">{escape(text)}</div>'


def bars(title: str, states: Iterable[tuple[str, int]], total: int) -> str:
    """Progress: one bar a state, each out of the same total."""
    rows = "".join(_bar(name, done, total) for name, done in states)
    return section(title, f"<table><tbody>{rows}</tbody></table>")


def _bar(name: str, done: int, total: int) -> str:
    percent = 100 if total <= 0 else max(0, min(100, round(100 * done / total)))
    return (
        f'<tr><th scope="row" style="{_CELL}">{escape(name)}</th>'
        f'<td style="{_CELL}"><div role="progressbar" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{percent}" aria-label="{escape(name)}" style="{_TRACK}">'
        f'<div style="{_BAR};width:{percent}%"></div></div></td>'
        f'<td style="{_CELL}">{done:,} / {total:,}</td></tr>'
    )


def _rows(rows: Iterable[Sequence[Any]]) -> str:
    return "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )

"""The page of errors: grouped by exception, each with some of its rows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from geneva.console.layout import cut, grid, heading, nothing, path, pill, row
from geneva.console.queries import ErrorRow
from geneva.render.html import Child, Html, tag
from geneva.render.text import count

_SAMPLES = 5
_VARYING = re.compile(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"", re.IGNORECASE)


def errors_page(errors: Sequence[ErrorRow], table: str | None) -> list[Child]:
    """Errors in groups, the biggest first."""
    of = f" of {table}" if table else ""
    groups = group_errors(errors)
    under = f"{count(len(errors), 'error')} in {count(len(groups), 'group')}, by exception."
    everything = tag("a", "Errors of all tables", href="/errors") if table else None
    parts: list[Child] = [heading(f"Errors{of}", under), everything]
    if not groups:
        return [
            *parts,
            nothing("No error is on record.", "Rows that fail show here, with what was wrong."),
        ]
    return [*parts, [_group(kind, rows) for (kind, _), rows in groups]]


def group_errors(errors: Sequence[ErrorRow]) -> list[tuple[tuple[str, str], list[ErrorRow]]]:
    """Errors of one exception whose messages differ only in numbers and quoted words."""
    groups: dict[tuple[str, str], list[ErrorRow]] = defaultdict(list)
    for error in errors:
        groups[(error.exception, _VARYING.sub("…", error.message))].append(error)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _group(kind: str, rows: Sequence[ErrorRow]) -> Html:
    first = rows[0]
    summary = tag(
        "summary",
        tag("h2", kind),
        pill(count(len(rows), "time"), "failed"),
        tag("span", cut(first.message, 200), class_="message"),
    )
    labels = ("Table", "Column", "Message", "Inputs", "Attempt", "Job")
    samples = [_sample(error, labels) for error in rows[:_SAMPLES]]
    more = len(rows) - _SAMPLES
    return tag(
        "details",
        summary,
        grid(f"Rows that failed with {kind}", ("Row", *labels), samples),
        tag("p", f"and {count(more, 'more row')}", class_="dim") if more > 0 else None,
        _traceback(first),
        class_="card error",
        open=True,
    )


def _sample(error: ErrorRow, labels: Sequence[str]) -> Html:
    job = error.job_id
    return row(
        tag("span", error.row or "whole job", class_="nowrap"),
        tag("a", error.table, href=path("tables", error.table)),
        tag("code", error.column),
        tag("span", cut(error.message, 500), class_="text"),
        tag("code", cut(error.inputs, 300), class_="text") if error.inputs else "-",
        error.attempt or "-",
        tag("a", tag("code", job[:8]), href=path("jobs", job)) if job else "-",
        labels=labels,
    )


def _traceback(error: ErrorRow) -> Html | None:
    if not error.traceback:
        return None
    text = tag("pre", cut(error.traceback, 8000), tabindex="0")
    return tag("details", tag("summary", "Traceback of the first"), text)

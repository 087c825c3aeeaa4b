"""A plan as text for people."""

from __future__ import annotations

from geneva.planning.backfill import Action, BackfillPlan
from geneva.render.plain import plain
from geneva.render.text import count

_SHOWN_FRAGMENTS = 12
_SHOWN_INPUTS = 20
_MIN_SHOWN_SECONDS = 1.0
"""Nobody waits for less."""


def explain(plan: BackfillPlan) -> str:
    """Say what the plan will do and why, in a few lines."""
    first = [explain(upstream) for upstream in plan.upstream]
    lines = [
        *first,
        f"Backfill of {named_columns(plan.columns or (plan.column,))} of table {plan.table!r} at "
        f"version {plan.version}",
        f"  UDF        {plain(plan.udf_name)} (version {plain(plan.udf_version)})",
        f"  reads      {plain(_listed(plan.inputs))}",
        f"  where      {plain(_rows(plan))}",
    ]
    if plan.is_empty:
        lines.append(f"  nothing to do: {_why_nothing(plan)}")
    else:
        lines.append(
            f"  compute    {plan.rows_to_compute:,} of {count(plan.total_rows, 'row')} in "
            f"{count(len(plan.fragments), 'fragment')}; "
            f"{count(plan.skipped_fragments, 'fragment')} skipped"
        )
        if plan.rows_reused:
            lines.append(
                f"  reuse      {count(plan.rows_reused, 'row')} computed by an earlier run"
            )
        if plan.rows_to_adopt:
            lines.append(
                f"  keep       {count(plan.rows_to_adopt, 'row')} as written; receipts are added"
            )
        if plan.estimate is not None and plan.estimate.seconds >= _MIN_SHOWN_SECONDS:
            lines.append(f"  time       {plan.estimate}")
        lines.extend(
            f"  because    {reason.value}: {count(rows, 'row')}"
            for reason, rows in sorted(plan.reasons().items(), key=lambda item: -item[1])
        )
        for fragment in plan.fragments[:_SHOWN_FRAGMENTS]:
            action = fragment.action.value
            if fragment.action is Action.COMPUTE:
                action = f"run the UDF on {count(fragment.rows_to_run, 'row')}"
            lines.append(f"    fragment {fragment.fragment_id}: {action} ({fragment.reason.value})")
        if len(plan.fragments) > _SHOWN_FRAGMENTS:
            more = len(plan.fragments) - _SHOWN_FRAGMENTS
            lines.append(f"    ... and {count(more, 'more fragment')}")
    if plan.checked_rows:
        lines.append(f"  checked    {count(plan.checked_rows, 'row')} by receipt")
    lines.extend(f"  note       {plain(note)}" for note in plan.notes)
    return "\n".join(lines)


def named_columns(names: tuple[str, ...]) -> str:
    """One column, or several that are filled together."""
    if len(names) == 1:
        return f"column {names[0]!r}"
    return f"columns {', '.join(map(repr, names))} (one call fills them all)"


def _rows(plan: BackfillPlan) -> str:
    """Which rows are looked at."""
    if plan.retry_failed:
        return "rows that failed before" + ("" if plan.where is None else f", and {plan.where}")
    return "rows not yet computed, or stale" if plan.where is None else plan.where


def _why_nothing(plan: BackfillPlan) -> str:
    rows = f"{count(plan.total_rows, 'row')} in {count(plan.skipped_fragments, 'fragment')}"
    if plan.retry_failed:
        return f"of {rows} none failed before" + ("" if plan.where is None else " and is selected")
    if plan.where is not None:
        return f"of {rows} none is selected"
    return f"{rows} up to date"


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN_INPUTS} more" if len(names) > _SHOWN_INPUTS else ""
    return ", ".join(names[:_SHOWN_INPUTS]) + more

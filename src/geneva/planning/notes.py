"""Remarks shown with a plan: what it leaves as it is, and what it can't know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from geneva.model.tables import Reason
from geneva.planning.backfill import FragmentPlan, FragmentState
from geneva.render.text import agree, count

UPPER_BOUNDS = "inputs that come out the same make no call: the numbers are upper bounds"


def stale_outside_clause(states: Iterable[FragmentState]) -> str | None:
    """That rows which a clause doesn't select stay stale."""
    stale = sum(
        state.stale.intersect(state.live).minus(state.selected).count
        for state in states
        if state.selected is not None and not state.retry_failed
    )
    if not stale:
        return None
    return (
        f"{count(stale, 'row')} outside the where clause {agree(stale, 'are')} stale (their UDF or "
        f"an input changed) and {agree(stale, 'stay')} so; leave the clause out to compute them "
        'too, or use where="1=1" for all rows'
    )


def failed_before(states: Iterable[FragmentState]) -> str | None:
    """That rows which failed are not tried again."""
    waiting = sum(
        state.live.intersect(state.failed).count
        for state in states
        if not state.retry_failed and state.selected is None
    )
    if not waiting:
        return None
    them = "it" if waiting == 1 else "them"
    return (
        f"{count(waiting, 'row')} failed before with this UDF and these inputs, and "
        f"{agree(waiting, 'stay')} NULL; use retry_failed=True to try {them} again"
    )


def unproven_rows(rows: int, *, compute: bool) -> str | None:
    """What becomes of values from before receipts."""
    if not rows:
        return None
    decided = (
        'computed again; use unproven="keep" to take them for right'
        if compute
        else 'taken for right; use unproven="compute" to compute them again'
    )
    return (
        f"unproven: {count(rows, 'row')} {agree(rows, 'were')} computed before there were "
        f"receipts, and {agree(rows, 'are')} {decided}"
    )


def assumed_inputs(column: str, assumed: Sequence[tuple[str, str]]) -> str | None:
    """That inputs are read whose names are gone, by their field ids alone."""
    if not assumed:
        return None
    read = ", ".join(f"{path!r} is read for {name!r}" for name, path in assumed)
    return (
        f"{read}, whose field it was: that name is gone, and neither the history nor receipts say "
        f'more. If it is wrong, use alter_columns({{"path": {column!r}, "udf": ..., '
        '"input_columns": [...]})'
    )


def shared_calls(needed: Sequence[FragmentPlan]) -> str | None:
    """That a function which memoizes may be called for fewer rows than planned."""
    if not needed:
        return None
    return "rows with equal inputs share a call, so that there may be fewer calls"


def upper_bounds(needed: Iterable[FragmentPlan]) -> str | None:
    """That inputs which are computed first may come out as they were."""
    if not any(plan.reason is Reason.UPSTREAM for plan in needed):
        return None
    return UPPER_BOUNDS


def unreadable_fragments(fragments: Mapping[int, str]) -> str | None:
    """That fragments can't be read."""
    if not fragments:
        return None
    named = "; ".join(f"{fragment} ({why})" for fragment, why in [*fragments.items()][:3])
    more = ", ..." if len(fragments) > 3 else ""
    found = count(len(fragments), "fragment")
    return f"{found} can't be read, and {agree(len(fragments), 'are')} left out: {named}{more}"


def overtaken_fragments(fragments: int, version: int) -> str | None:
    """That fragments of an older version can't be filled any more."""
    if not fragments:
        return None
    return (
        f"{count(fragments, 'fragment')} of version {version} {agree(fragments, 'were')} rewritten "
        f"or computed since, and {agree(fragments, 'are')} left out"
    )

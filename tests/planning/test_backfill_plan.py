"""What is planned for a fragment, for any state of it; and what the plan says of itself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.model.rows import RowRange, RowSet
from geneva.model.tables import Reason
from geneva.planning.backfill import (
    Action,
    BackfillPlan,
    FragmentState,
    OutputState,
    choose_fragments,
    plan_fragment,
)
from geneva.planning.notes import failed_before


@st.composite
def states(draw: st.DrawFn, fragment_id: int = 0) -> FragmentState:
    size = draw(st.integers(1, 30))
    rows = st.sets(st.integers(0, size - 1))

    def row_set() -> RowSet:
        return RowSet.from_offsets(size, np.array(sorted(draw(rows)), dtype=np.int64))

    valid = row_set()
    starts = draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, 9)), max_size=3))
    return FragmentState(
        fragment_id=fragment_id,
        physical_rows=size,
        live=row_set(),
        outputs=(
            OutputState(
                valid=valid,
                reason=draw(st.sampled_from(list(Reason))),
                has_output=bool(valid) or draw(st.booleans()),
                adopt=row_set(),
                failed=row_set().minus(valid),
            ),
        ),
        selected=row_set() if draw(st.booleans()) else None,
        only_stale=draw(st.booleans()),
        retry_failed=draw(st.booleans()),
        checkpointed=tuple(RowRange(s, s + n) for s, n in starts),
        staged=draw(st.booleans()),
    )


def members(rows: RowSet) -> set[int]:
    return set(rows.offsets().tolist())


@st.composite
def several(draw: st.DrawFn) -> FragmentState:
    """A state of up to three outputs."""
    state = draw(states())
    size = state.physical_rows
    others = [
        replace(
            output,
            valid=_resized(output.valid, size),
            adopt=_resized(output.adopt, size),
            failed=_resized(output.failed, size),
        )
        for other in draw(st.lists(states(), max_size=2))
        for output in other.outputs
    ]
    return replace(state, outputs=(*state.outputs, *others))


def _resized(rows: RowSet, size: int) -> RowSet:
    return RowSet.from_offsets(size, rows.offsets()[rows.offsets() < size])


@given(several())
def test_each_output_gets_what_it_needs_and_keeps_the_rest(state: FragmentState) -> None:
    """A row is called for once, where any output needs it; an output that needs none is not new."""
    plan = plan_fragment(state)
    alone = [plan_fragment(replace(state, outputs=(output,))) for output in state.outputs]
    called = set().union(*(members(each.compute) for each in alone))
    assert members(plan.compute) == called
    written = {output.place: output for output in plan.outputs}
    for place, (output, own) in enumerate(zip(state.outputs, alone, strict=True)):
        compute = members(own.compute) | (called & members(output.failed))
        assert members(plan.computed_in(place)) == compute
        assert (place in written) == bool(compute or own.adopt)
        if place in written:
            assert written[place].adopt == own.adopt
            # What the file says is right, is so for every output in it.
            right = members(output.valid) | compute | members(own.adopt)
            assert members(plan.valid_after) <= right & members(state.live)
    assert members(plan.adopt) == set().union(*(members(each.adopt) for each in alone))
    assert plan.complete == (members(plan.valid_after) == members(state.live))


@given(states())
def test_a_fragment_computes_what_was_asked_or_what_is_not_valid(state: FragmentState) -> None:
    plan, (output,) = plan_fragment(state), state.outputs
    live, valid, failed = members(state.live), members(state.valid), members(state.failed)
    selected = live if state.selected is None else members(state.selected) & live
    asked = state.selected is not None and not state.only_stale
    adopted: set[int] = set()
    if state.retry_failed:
        wanted, reason = selected & failed, Reason.FAILED
    elif asked:
        wanted, reason = selected, Reason.ASKED
    else:
        adopted = members(output.adopt) & selected
        wanted, reason = selected - valid - failed - adopted, output.reason
    assert members(plan.compute) == wanted
    assert members(plan.adopt) == adopted
    assert members(plan.valid_after) == (valid | wanted | adopted) & live
    assert plan.complete == (live <= valid | wanted | adopted)
    assert plan.keeps_old == (output.has_output and bool(live - wanted))
    assert (plan.action is Action.SKIP) == (not wanted and not adopted)
    assert (plan.action is Action.ADOPT) == (not wanted and bool(adopted))
    if wanted:
        assert (plan.action is Action.REUSE) == state.staged
        assert plan.reason is reason
    assert (
        members(plan.failed_after or RowSet.empty(state.physical_rows)) == (failed & live) - wanted
    )
    covered = [i for r in plan.covered for i in range(r.start, r.end)]
    assert covered == sorted(set(covered))
    assert all(i < state.physical_rows for i in covered)
    runs = len(wanted - set(covered)) if plan.action is Action.COMPUTE else 0
    assert plan.rows_to_run == runs


def plan_of(**facts: Any) -> BackfillPlan:
    """A plan of nothing, but for these facts."""
    nothing = BackfillPlan(
        table="t",
        version=7,
        column="c",
        udf_name="f",
        udf_version="v1",
        where=None,
        fragments=(),
        skipped_fragments=0,
        total_rows=0,
    )
    return replace(nothing, **facts)


@pytest.mark.parametrize(
    ("where", "retry_failed", "said"),
    [
        (None, False, "rows not yet computed, or stale"),
        ("a > 1", False, "a > 1"),
        (None, True, "rows that failed before"),
        ("a > 1", True, "rows that failed before, and a > 1"),
    ],
)
def test_a_plan_says_which_rows(where: str | None, said: str, *, retry_failed: bool) -> None:
    plan = plan_of(where=where, retry_failed=retry_failed)
    assert f"  where      {said}\n" in str(plan)


@pytest.mark.parametrize(("rows", "said"), [(1, "stays NULL; .* try it "), (2, "try them ")])
def test_rows_that_failed_before_are_counted(rows: int, said: str) -> None:
    failed = RowSet.from_offsets(4, np.arange(rows))
    none = RowSet.empty(4)
    output = OutputState(valid=none, reason=Reason.NEW, has_output=True, adopt=none, failed=failed)
    state = FragmentState(
        fragment_id=0, physical_rows=4, live=RowSet.full(4), outputs=(output,), selected=None
    )
    assert re.search(f"{said}again$", failed_before([state]) or "")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "nothing to do: 9 rows in 2 fragments up to date"),
        ({"where": "id < 0"}, "nothing to do: of 9 rows in 2 fragments none is selected"),
        ({"retry_failed": True}, "nothing to do: of 9 rows in 2 fragments none failed before"),
    ],
)
def test_a_plan_says_why_there_is_nothing_to_do(asked: dict[str, Any], words: str) -> None:
    plan = plan_of(**{"where": None, **asked}, fragments=(), skipped_fragments=2, total_rows=9)
    assert words in str(plan)


@given(st.data(), st.one_of(st.none(), st.integers(1, 5)))
def test_a_plan_adds_up_and_says_so(data: st.DataObject, limit: int | None) -> None:
    count = data.draw(st.integers(0, 6))
    plans = [plan_fragment(data.draw(states(i))) for i in range(count)]
    needed = choose_fragments(plans, limit)
    skipped = count - len(needed)
    assert needed == tuple(p for p in plans if p.action is not Action.SKIP)[:limit]
    plan = plan_of(where="a > 1", fragments=needed, skipped_fragments=skipped, total_rows=1_234)
    assert plan.rows_to_compute == sum(p.compute.count for p in needed)
    assert plan.rows_to_run + plan.rows_reused == plan.rows_to_compute
    assert sum(plan.reasons().values()) == plan.rows_to_compute
    text = str(plan)
    for said in ("'t'", "version 7", "'c'", "f (version v1)", "a > 1"):
        assert said in text
    if plan.is_empty:
        assert "nothing to do" in text
    for fragment in needed:
        assert f"fragment {fragment.fragment_id}: " in text
        assert fragment.reason.value in text

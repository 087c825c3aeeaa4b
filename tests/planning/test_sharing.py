"""Columns that are computed for the same rows share one read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from geneva.model.rows import RowRange, RowSet
from geneva.model.tables import Reason
from geneva.planning.backfill import Action, FragmentPlan, OutputPlan
from geneva.planning.sharing import MAX_COLUMNS, gains_by_sharing, shared_reads

_ROWS = 4


def plan(
    fragment: int,
    rows: frozenset[int],
    action: Action = Action.COMPUTE,
    covered: tuple[RowRange, ...] = (),
    run: frozenset[int] | None = None,
) -> FragmentPlan:
    compute = RowSet.from_offsets(_ROWS, sorted(rows))
    return FragmentPlan(
        fragment_id=fragment,
        physical_rows=_ROWS,
        action=action,
        reason=Reason.NEW,
        outputs=(OutputPlan(place=0, compute=compute, adopt=RowSet.empty(_ROWS)),),
        compute=compute,
        valid_after=compute,
        complete=False,
        keeps_old=False,
        adopt=RowSet.empty(_ROWS),
        covered=covered,
        run=RowSet.from_offsets(_ROWS, sorted(run)) if run is not None else None,
    )


plans = st.builds(
    plan,
    st.just(0),
    st.frozensets(st.integers(0, _ROWS - 1), min_size=1),
    st.sampled_from([Action.COMPUTE, Action.COMPUTE, Action.REUSE, Action.ADOPT]),
    st.sampled_from([(), (), (RowRange(0, 1),)]),
    st.sampled_from([None, None, frozenset[int]()]),
)


@given(st.lists(st.lists(plans, max_size=1), max_size=7))
def test_a_column_is_in_one_group_of_its_own_rows(columns: list[list[FragmentPlan]]) -> None:
    groups = shared_reads(columns).get(0, [])
    every = [place for group in groups for place in group]
    assert len(every) == len(set(every))
    for group in groups:
        assert 1 < len(group) <= MAX_COLUMNS
        members = [columns[place][0] for place in group]
        assert len({tuple(p.compute.offsets().tolist()) for p in members}) == 1
        for member in members:
            assert member.action is Action.COMPUTE
            assert member.rows_to_run == member.compute.count
    left = [p for place, own in enumerate(columns) for p in own if place not in every]
    fresh = [
        tuple(p.compute.offsets().tolist())
        for p in left
        if p.action is Action.COMPUTE and p.rows_to_run == p.compute.count
    ]
    # Two that could share are left alone only where the groups of these rows are full.
    full = {
        tuple(columns[group[0]][0].compute.offsets().tolist())
        for group in groups
        if len(group) == MAX_COLUMNS
    }
    assert all(fresh.count(rows) == 1 or rows in full for rows in fresh)


def test_each_fragment_has_its_own_groups() -> None:
    every, some = frozenset(range(_ROWS)), frozenset({1})
    columns = [
        [plan(0, every), plan(1, some)],
        [plan(0, some), plan(1, some), plan(2, every)],
        [plan(0, every), plan(2, every)],
    ]
    assert shared_reads(columns) == {0: [[0, 2]], 1: [[0, 1]], 2: [[1, 2]]}


def test_who_computes_for_long_goes_alone() -> None:
    assert gains_by_sharing(read_seconds=1.0, computing_seconds=5.0)
    assert not gains_by_sharing(read_seconds=0.1, computing_seconds=5.0)
    assert gains_by_sharing(read_seconds=0.0, computing_seconds=0.1)

"""Sets of rows, against Python's own sets."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from geneva.model.rows import RowRange, RowSet, bounded_runs

SIZES = st.integers(0, 70)


@st.composite
def row_sets(draw: st.DrawFn, size: int | None = None) -> tuple[RowSet, set[int]]:
    size = draw(SIZES) if size is None else size
    members = draw(st.sets(st.integers(0, size - 1))) if size else set()
    return RowSet.from_offsets(size, np.array(sorted(members), dtype=np.int64)), members


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[RowSet, set[int]], tuple[RowSet, set[int]]]:
    size = draw(SIZES)
    return draw(row_sets(size)), draw(row_sets(size))


@st.composite
def ranges_in(draw: st.DrawFn, size: int) -> RowRange:
    start = draw(st.integers(0, size))
    return RowRange(start, draw(st.integers(start, size)))


@given(row_sets())
def test_a_set_is_its_members(drawn: tuple[RowSet, set[int]]) -> None:
    rows, members = drawn
    assert rows.offsets().tolist() == sorted(members)
    assert np.flatnonzero(rows.mask()).tolist() == sorted(members)
    assert len(rows.mask()) == rows.size
    assert rows.count == len(members)
    assert bool(rows) == bool(members)
    assert rows.is_full == (len(members) == rows.size)
    assert pickle.loads(pickle.dumps(rows)) == rows


@given(pairs())
def test_union_intersection_and_difference(
    drawn: tuple[tuple[RowSet, set[int]], tuple[RowSet, set[int]]],
) -> None:
    (rows, members), (other_rows, others) = drawn
    for ours, theirs in (
        (rows.union(other_rows), members | others),
        (rows.intersect(other_rows), members & others),
        (rows.minus(other_rows), members - others),
    ):
        assert set(ours.offsets().tolist()) == theirs
        assert ours.count == len(theirs)
        assert ours.size == rows.size


@given(pairs())
def test_equal_members_are_equal_sets_however_they_came_about(
    drawn: tuple[tuple[RowSet, set[int]], tuple[RowSet, set[int]]],
) -> None:
    (rows, members), (other_rows, others) = drawn
    assert (rows == other_rows) == (members == others)
    assert rows.union(other_rows) == other_rows.union(rows)
    assert rows.minus(other_rows).union(rows.intersect(other_rows)) == rows
    assert RowSet.from_ranges(rows.size, rows.ranges()) == rows


@given(st.data())
def test_a_slice_counts_from_its_start(data: st.DataObject) -> None:
    rows, members = data.draw(row_sets())
    cut = data.draw(ranges_in(rows.size))
    inside = rows.slice(cut)
    assert inside.size == len(cut)
    assert inside.offsets().tolist() == sorted(
        m - cut.start for m in members if cut.start <= m < cut.end
    )


@given(row_sets())
def test_ranges_are_maximal_runs(drawn: tuple[RowSet, set[int]]) -> None:
    rows, members = drawn
    runs = list(rows.ranges())
    assert [i for run in runs for i in range(run.start, run.end)] == sorted(members)
    assert all(before.end < after.start for before, after in itertools.pairwise(runs))
    assert all(len(run) for run in runs)


@given(row_sets())
def test_text_round_trip(drawn: tuple[RowSet, set[int]]) -> None:
    rows, _ = drawn
    assert RowSet.decode(rows.encode()) == rows


@given(st.text())
@example("3:")
@example("x:all")
@example("-1:all")
@example("8:AAAA")
@example("100:eJwDAAAAAAE=")
def test_other_text_is_a_value_error_or_a_set(text: str) -> None:
    try:
        rows = RowSet.decode(text)
    except ValueError:
        return
    assert rows.size >= 0
    assert RowSet.decode(rows.encode()) == rows


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (3, 2), (-2, -1)])
def test_a_range_that_can_not_be(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="not a row range"):
        RowRange(start, end)


@given(st.lists(st.integers(0, 9)), st.integers(1, 20), st.none() | st.integers(1, 4))
def test_runs_are_as_long_as_they_may_be(
    sizes: list[int], max_size: int, max_items: int | None
) -> None:
    runs = list(bounded_runs(np.array(sizes, dtype=np.int64), max_size, max_items))
    assert [i for first, last in runs for i in range(first, last)] == list(range(len(sizes)))

    def fits(first: int, last: int) -> bool:
        few = max_items is None or last - first <= max_items
        return last - first == 1 or (few and sum(sizes[first:last]) <= max_size)

    assert all(fits(first, last) for first, last in runs)
    assert not any(fits(first, last + 1) for first, last in runs[:-1])

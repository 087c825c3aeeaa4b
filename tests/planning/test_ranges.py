"""Interval arithmetic, against sets of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from geneva.model.rows import RowRange
from geneva.planning.ranges import disjoint, gaps

SIZE = 40


@st.composite
def row_ranges(draw: st.DrawFn, most: int = SIZE + 5) -> RowRange:
    start = draw(st.integers(0, most))
    return RowRange(start, draw(st.integers(start, most)))


def covered(ranges: tuple[RowRange, ...]) -> list[int]:
    return [i for r in ranges for i in range(r.start, r.end)]


@given(st.lists(row_ranges()))
def test_disjoint_keeps_whole_ranges_that_do_not_overlap(ranges: list[RowRange]) -> None:
    kept = disjoint(ranges, SIZE)
    rows = covered(kept)
    assert rows == sorted(set(rows))
    assert set(kept) <= set(ranges)
    assert all(len(r) and r.end <= SIZE for r in kept)
    # Greedy: whatever was left out is empty, too long, or overlaps something that was kept.
    for left_out in set(ranges) - set(kept):
        if len(left_out) and left_out.end <= SIZE:
            assert set(covered((left_out,))) & set(rows)


@given(st.lists(row_ranges()), row_ranges(SIZE))
def test_gaps_are_what_is_not_covered(ranges: list[RowRange], within: RowRange) -> None:
    taken = disjoint(ranges, SIZE)
    open_ranges = gaps(taken, within)
    rows = covered(open_ranges)
    assert rows == sorted(set(range(within.start, within.end)) - set(covered(taken)))
    assert all(len(r) for r in open_ranges)


@given(st.permutations([RowRange(i, i + 3) for i in range(0, SIZE - 3, 2)]))
def test_the_order_of_the_ranges_does_not_matter(ranges: list[RowRange]) -> None:
    assert disjoint(ranges, SIZE) == disjoint(sorted(ranges, key=lambda r: r.start), SIZE)

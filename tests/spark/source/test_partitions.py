"""Which parts of a table tasks read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from geneva.spark.source.partitions import FRAGMENTS_PER_PART, PART_BYTES, PART_ROWS, plan_parts
from geneva.storage.lance.scans import FragmentSize, ScanPart

SIZES = st.lists(
    st.tuples(st.integers(1, 10 * PART_ROWS), st.integers(0, 10 * PART_BYTES)), max_size=40
)


def rows_of(part: ScanPart, sizes: dict[int, FragmentSize]) -> list[tuple[int, int, int]]:
    if part.rows is not None:
        (only,) = part.fragment_ids
        return [(only, part.rows.start, part.rows.end)]
    return [(i, 0, sizes[i].live_rows) for i in part.fragment_ids]


@given(SIZES)
def test_every_row_is_read_once_and_in_order(sizes: list[tuple[int, int]]) -> None:
    fragments = [FragmentSize(i, rows, size) for i, (rows, size) in enumerate(sizes)]
    by_id = {f.id: f for f in fragments}
    ranges = [r for part in plan_parts(fragments) for r in rows_of(part, by_id)]
    at = 0
    for fragment in fragments:
        end = 0
        while end < fragment.live_rows:
            found, start, stop = ranges[at]
            assert (found, start) == (fragment.id, end)
            assert stop > start
            end, at = stop, at + 1
    assert at == len(ranges)


@given(SIZES)
def test_no_part_is_too_large(sizes: list[tuple[int, int]]) -> None:
    fragments = [FragmentSize(i, rows, size) for i, (rows, size) in enumerate(sizes)]
    by_id = {f.id: f for f in fragments}
    for part in plan_parts(fragments):
        assert len(part.fragment_ids) <= FRAGMENTS_PER_PART
        assert sum(stop - start for _, start, stop in rows_of(part, by_id)) <= PART_ROWS + 1


def test_ten_thousand_small_fragments_are_few_tasks() -> None:
    parts = plan_parts(FragmentSize(i, 10, 2_000) for i in range(10_000))
    assert len(parts) == -(-10_000 // FRAGMENTS_PER_PART)


def test_one_huge_fragment_is_many_tasks() -> None:
    assert len(plan_parts([FragmentSize(0, 10 * PART_ROWS, 1)])) == 10
    assert len(plan_parts([FragmentSize(0, 1_000, 10 * PART_BYTES)])) == 10
    assert len(plan_parts([FragmentSize(0, 3, 10 * PART_BYTES)])) == 3

"""Interval arithmetic on row ranges: pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from geneva.model.rows import RowRange


def disjoint(ranges: Iterable[RowRange], size: int) -> tuple[RowRange, ...]:
    """Non-overlapping ranges out of possibly overlapping ones, ascending, within [0, size).

    Ranges are kept or dropped whole, because a checkpoint can't be cut; earlier starts win, then
    longer ones.
    """
    kept: list[RowRange] = []
    at = 0
    for row_range in sorted(ranges, key=lambda r: (r.start, -r.end)):
        if row_range.start >= at and row_range.end <= size and len(row_range):
            kept.append(row_range)
            at = row_range.end
    return tuple(kept)


def gaps(covered: Iterable[RowRange], within: RowRange) -> tuple[RowRange, ...]:
    """What `covered` (disjoint, ascending) leaves open of `within`."""
    open_ranges: list[RowRange] = []
    at = within.start
    for row_range in covered:
        if row_range.start > at:
            open_ranges.append(RowRange(at, min(row_range.start, within.end)))
        at = max(at, row_range.end)
        if at >= within.end:
            break
    if at < within.end:
        open_ranges.append(RowRange(at, within.end))
    return tuple(r for r in open_ranges if len(r))

"""Which parts of a table Spark's tasks read: not too large, and not too many. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from geneva.model.rows import RowRange
from geneva.storage.lance.scans import FragmentSize, ScanPart

PART_BYTES = 64 << 20
PART_ROWS = 1 << 19
"""What a task reads at most: a fragment that is larger is cut into ranges of rows."""
FRAGMENTS_PER_PART = 64
"""Opening a fragment costs as much as reading this share of a part."""


def plan_parts(fragments: Iterable[FragmentSize]) -> list[ScanPart]:
    """Cut large fragments into ranges, and put small ones together, in the table's order."""
    parts: list[ScanPart] = []
    together: list[int] = []
    load = 0.0
    for fragment in fragments:
        share = _share(fragment)
        if together and load + share > 1:
            parts.append(ScanPart(tuple(together)))
            together, load = [], 0.0
        if share > 1:
            parts.extend(_ranges(fragment, math.ceil(share)))
        else:
            together.append(fragment.id)
            load += share
    if together:
        parts.append(ScanPart(tuple(together)))
    return parts


def _share(fragment: FragmentSize) -> float:
    """How much of one part a fragment is."""
    most = max(fragment.size_bytes / PART_BYTES, fragment.live_rows / PART_ROWS)
    return max(most, 1 / FRAGMENTS_PER_PART)


def _ranges(fragment: FragmentSize, count: int) -> Iterator[ScanPart]:
    count = min(count, fragment.live_rows)
    cuts = [fragment.live_rows * i // count for i in range(count + 1)]
    for start, end in itertools.pairwise(cuts):
        yield ScanPart((fragment.id,), RowRange(start, end))

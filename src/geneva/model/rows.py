"""Sets of rows of one fragment, as physical offsets.

Every offset in Geneva is a PHYSICAL offset in one fragment at one pinned version: deleted rows
count. One domain for planning, reading and writing means that nothing ever has to be translated.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Mask: TypeAlias = npt.NDArray[np.bool_]
Offsets: TypeAlias = npt.NDArray[np.int64]
RowIds: TypeAlias = npt.NDArray[np.uint64]
"""Stable row ids of a table, or row addresses where it has none."""


def bounded_runs(
    sizes: npt.NDArray[np.int64], max_size: int, max_items: int | None = None
) -> Iterator[tuple[int, int]]:
    """Cut items into runs [first, last) of a bounded size; one that is larger is a run by itself.

    `max_items`: nor does a run have more items than that.
    """
    ends = np.cumsum(sizes)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + max_size, side="right"))
        last = max(last if max_items is None else min(last, first + max_items), first + 1)
        yield first, last
        first = last


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows [start, end) of a fragment."""

    start: int
    end: int

    def __post_init__(self) -> None:
        """Refuse ranges that can't be."""
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not a row range: [{self.start}, {self.end})")

    def __len__(self) -> int:
        """Return how many rows the range covers."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RowSet:
    """An immutable subset of the `size` rows of a fragment.

    `bits` is the packed membership (little bit order), and None for the two sets that need no bits:
    all rows and none.
    """

    size: int
    count: int
    bits: bytes | None = None

    @staticmethod
    @lru_cache(maxsize=4_096)
    def full(size: int) -> RowSet:
        """Every row."""
        return RowSet(size, size)

    @staticmethod
    @lru_cache(maxsize=4_096)
    def empty(size: int) -> RowSet:
        """No row."""
        return RowSet(size, 0)

    @classmethod
    def from_mask(cls, mask: Mask) -> RowSet:
        """The rows where `mask` is true."""
        size, count = len(mask), int(np.count_nonzero(mask))
        if count in (0, size):
            return cls.full(size) if count else cls.empty(size)
        return cls(size, count, np.packbits(mask, bitorder="little").tobytes())

    @classmethod
    def from_offsets(cls, size: int, offsets: Offsets) -> RowSet:
        """The rows at `offsets`."""
        mask = np.zeros(size, dtype=np.bool_)
        mask[offsets] = True
        return cls.from_mask(mask)

    @classmethod
    def from_ranges(cls, size: int, ranges: Iterable[RowRange]) -> RowSet:
        """The rows that any of `ranges` covers."""
        mask = np.zeros(size, dtype=np.bool_)
        for row_range in ranges:
            mask[row_range.start : row_range.end] = True
        return cls.from_mask(mask)

    @property
    def is_full(self) -> bool:
        """Whether every row is in the set."""
        return self.count == self.size

    def __bool__(self) -> bool:
        """Whether there is any row in the set."""
        return self.count > 0

    def mask(self) -> Mask:
        """Membership as a boolean array (a fresh one: the caller may write to it)."""
        if self.bits is None:
            return np.full(self.size, self.count > 0, dtype=np.bool_)
        packed = np.frombuffer(self.bits, dtype=np.uint8)
        return np.unpackbits(packed, count=self.size, bitorder="little").astype(np.bool_)

    def offsets(self) -> Offsets:
        """The members, ascending."""
        if self.bits is None:
            return np.arange(self.count, dtype=np.int64)
        return np.flatnonzero(self.mask())

    def union(self, other: RowSet) -> RowSet:
        """Rows in either set."""
        if self.is_full or not other:
            return self
        if other.is_full or not self:
            return other
        return RowSet.from_mask(self.mask() | other.mask())

    def intersect(self, other: RowSet) -> RowSet:
        """Rows in both sets."""
        if self.is_full or not other:
            return other
        if other.is_full or not self:
            return self
        return RowSet.from_mask(self.mask() & other.mask())

    def minus(self, other: RowSet) -> RowSet:
        """Rows in this set and not in the other."""
        if not other or not self:
            return self
        if other.is_full:
            return RowSet.empty(self.size)
        return RowSet.from_mask(self.mask() & ~other.mask())

    def slice(self, row_range: RowRange) -> RowSet:
        """The members in `row_range`, as a set of its rows (offsets count from its start)."""
        if self.bits is None:
            return (RowSet.full if self.count else RowSet.empty)(len(row_range))
        if len(row_range) == self.size:
            return self
        first = row_range.start // 8
        packed = np.frombuffer(self.bits, dtype=np.uint8)[first : (row_range.end + 7) // 8]
        mask = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        start = row_range.start - 8 * first
        return RowSet.from_mask(mask[start : start + len(row_range)])

    def ranges(self) -> Iterator[RowRange]:
        """The members as maximal runs, ascending."""
        if self.bits is None:
            if self.count:
                yield RowRange(0, self.size)
            return
        edges = np.flatnonzero(np.diff(self.mask().astype(np.int8), prepend=0, append=0))
        for start, end in edges.reshape(-1, 2).tolist():
            yield RowRange(start, end)

    def encode(self) -> str:
        """A short text that `decode` turns back into this set."""
        if self.bits is None:
            return f"{self.size}:{'all' if self.count else 'none'}"
        return f"{self.size}:{base64.b64encode(zlib.compress(self.bits, 1)).decode('ascii')}"

    @classmethod
    def decode(cls, text: str) -> RowSet:
        """The set that `encode` wrote; ValueError when the text is not one."""
        head, _, body = text.partition(":")
        size = int(head)
        if size < 0:
            raise ValueError("not a row set: negative size")
        if body == "all":
            return cls.full(size)
        if body == "none":
            return cls.empty(size)
        try:
            bits = zlib.decompress(base64.b64decode(body, validate=True))
        except zlib.error as error:
            raise ValueError(f"not a row set: {error}") from error
        if len(bits) != (size + 7) // 8:
            raise ValueError("not a row set: wrong number of bits")
        packed = np.frombuffer(bits, dtype=np.uint8)
        return cls.from_mask(np.unpackbits(packed, count=size, bitorder="little").astype(np.bool_))

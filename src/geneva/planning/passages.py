"""Which rows of a chunked view stay when the lists that they are laid out from have changed.

Any pairing of old and new rows of one source row is right, as long as what differs between the two
is rewritten: it only decides what has to be computed again. So rows are told apart by digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from geneva.model.digests import Digests
from geneva.model.rows import Offsets, RowIds

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True, slots=True, eq=False)
class RowDigests:
    """Rows of a chunked view: the source row that each is of, and a digest of each column.

    The rows of one source row are in order.
    """

    source_ids: RowIds
    columns: dict[str, Digests]

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.source_ids)


def pair_rows(
    old: RowDigests, new: RowDigests, content: Sequence[str], main: str
) -> tuple[Offsets, Offsets]:
    """Pair rows that are there with rows to be: their places in `old` and in `new`.

    A row is paired within its source row: first with one that has the same content, then with one
    that has the same value in the main column (the text of a passage whose number changed). Of
    several equal ones the first goes with the first, the second with the second.
    """
    pairs = [_equal(old, new, content, np.arange(len(old)), np.arange(len(new)))]
    if len(content) > 1:
        left = _others(len(old), pairs[0][0]), _others(len(new), pairs[0][1])
        pairs.append(_equal(old, new, (main,), *left))
    first, second = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return first, second


def differing(
    old: RowDigests, new: RowDigests, pairs: tuple[Offsets, Offsets]
) -> dict[str, np.ndarray]:
    """Per column, which pairs have different values."""
    return {
        name: digests[pairs[0]] != new.columns[name][pairs[1]]
        for name, digests in old.columns.items()
    }


def _others(size: int, places: Offsets) -> Offsets:
    mask = np.ones(size, dtype=np.bool_)
    mask[places] = False
    return np.flatnonzero(mask)


def _equal(
    old: RowDigests, new: RowDigests, columns: Sequence[str], olds: Offsets, news: Offsets
) -> tuple[Offsets, Offsets]:
    """Pair rows that have the same source row and the same values in some columns."""
    sources = np.concatenate([old.source_ids[olds], new.source_ids[news]])
    values = np.concatenate([_together(old, columns)[olds], _together(new, columns)[news]])
    is_new = np.repeat([False, True], [len(olds), len(news)])
    repeats = np.concatenate(
        [
            _repeats(sources[: len(olds)], values[: len(olds)]),
            _repeats(sources[len(olds) :], values[len(olds) :]),
        ]
    )
    # Equal rows next to each other, the old one first.
    order = np.lexsort((is_new, repeats, values, sources))
    a, b = order[:-1], order[1:]
    same = (
        (sources[a] == sources[b])
        & (values[a] == values[b])
        & (repeats[a] == repeats[b])
        & (is_new[a] != is_new[b])
    )
    return olds[a[same]], news[b[same] - len(olds)]


def _together(rows: RowDigests, columns: Sequence[str]) -> Digests:
    total = np.zeros(len(rows), dtype=np.uint64)
    for name in columns:
        total = (total ^ rows.columns[name]) * _FACTOR
        total ^= total >> _SHIFT
    return total


def _repeats(sources: RowIds, values: Digests) -> Offsets:
    """How many rows before each one are equal to it."""
    order = np.lexsort((values, sources))  # stable
    starts = np.ones(len(order), dtype=np.bool_)
    a, b = order[:-1], order[1:]
    starts[1:] = (sources[a] != sources[b]) | (values[a] != values[b])
    places = np.arange(len(order))
    firsts = np.maximum.accumulate(np.where(starts, places, 0)) if len(order) else places
    repeats = np.empty(len(order), dtype=np.int64)
    repeats[order] = places - firsts
    return repeats

"""Which source rows a view holds, and in which order: pure functions of sets of row ids.

A row's place doesn't depend on when it came: without a shuffle it is its id, with one it is a hash
of seed and id. So `limit` picks the same rows whether a view is built at once or kept up to date
through any number of inserts and deletes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geneva.model.rows import RowIds

_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15


def choose_rows(
    ids: RowIds, *, shuffle_seed: int | None, offset: int | None, limit: int | None
) -> RowIds:
    """The rows of a view in its order, out of all `ids` that match, which are ascending.

    Without a shuffle (`shuffle_seed=None`) the order is that of the ids: the order of insertion,
    which compaction and updates leave alone when ids are stable. With one, it is that of
    `shuffle_rank`, which no two ids share.
    """
    start = min(offset or 0, len(ids))
    stop = len(ids) if limit is None else min(start + limit, len(ids))
    if shuffle_seed is None:
        return ids[start:stop]
    ranks = shuffle_rank(ids, shuffle_seed)
    if stop < len(ranks):
        ranks = np.partition(ranks, stop)[:stop]
    ranks.sort()
    # Sorting the ranks and turning them back is twice as fast as an argsort.
    return _unranked(ranks[start:], shuffle_seed)


def shuffle_rank(ids: RowIds, seed: int) -> RowIds:
    """A number for each id that decides its place in the shuffle `seed`; different for each id."""
    return _mixed(ids ^ _key(seed))


def _unranked(ranks: RowIds, seed: int) -> RowIds:
    ids = _unmixed(ranks)
    ids ^= _key(seed)
    return ids


def _key(seed: int) -> np.uint64:
    spread = np.array([(seed + _GOLDEN) % _WORD], dtype=np.uint64)
    return np.uint64(_mixed(spread)[0])


def _mixed(values: RowIds) -> RowIds:
    """SplitMix64's finalizer: every bit of the input moves every bit of the output."""
    mixed = values.copy()
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        mixed ^= mixed >> np.uint64(shift)
        if factor != 1:
            mixed *= np.uint64(factor)
    return mixed


def _unmixed(values: RowIds) -> RowIds:
    """What `_mixed` was given."""
    plain = values.copy()
    for shift, factor in zip(_SHIFTS[::-1], (1, *_FACTORS[::-1]), strict=True):
        if factor != 1:
            plain *= np.uint64(pow(factor, -1, _WORD))
        once = plain >> np.uint64(shift)
        plain ^= once ^ (once >> np.uint64(shift))  # all shifts are above 64 / 3
    return plain


def rows_that_enter_and_leave(current: RowIds, wanted: RowIds) -> tuple[RowIds, RowIds]:
    """What turns a view of the rows `current` into one of `wanted`; neither repeats an id.

    The entering rows come in the order of `wanted`, the leaving ones in that of `current`.
    """
    if len(current) == len(wanted) and np.array_equal(current, wanted):
        return wanted[:0], current[:0]
    if not len(current) or not len(wanted):
        return wanted, current
    return wanted[_not_in(wanted, current)], current[_not_in(current, wanted)]


def _not_in(values: RowIds, others: RowIds) -> npt.NDArray[np.bool_]:
    return np.isin(values, others, assume_unique=True, invert=True)

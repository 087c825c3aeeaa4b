"""Which rows a view holds: a pure function of the rows that match."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.planning.membership import (
    RowIds,
    choose_rows,
    rows_that_enter_and_leave,
    shuffle_rank,
)

SETS = st.sets(st.integers(0, 2**63 - 1), max_size=40)
BOUNDS = st.none() | st.integers(0, 50)
SEEDS = st.none() | st.integers(-(2**70), 2**70)


def ids(values: object) -> RowIds:
    return np.array(sorted(values), dtype=np.uint64)  # type: ignore[call-overload]


def test_without_a_shuffle_rows_come_in_the_order_of_their_ids() -> None:
    rows = np.arange(10, 20, dtype=np.uint64)
    chosen = choose_rows(rows, shuffle_seed=None, offset=2, limit=3)
    assert chosen.tolist() == [12, 13, 14]
    assert choose_rows(rows, shuffle_seed=None, offset=None, limit=None).tolist() == rows.tolist()
    assert choose_rows(rows, shuffle_seed=None, offset=50, limit=3).tolist() == []
    assert choose_rows(rows, shuffle_seed=None, offset=None, limit=0).tolist() == []


@given(SETS, SEEDS, BOUNDS, BOUNDS)
def test_the_view_is_a_part_of_the_ranking(
    rows: set[int], seed: int | None, offset: int | None, limit: int | None
) -> None:
    every = ids(rows)
    chosen = choose_rows(every, shuffle_seed=seed, offset=offset, limit=limit).tolist()
    ranks = every if seed is None else shuffle_rank(every, seed)
    ordered = every[np.argsort(ranks)].tolist()
    start = offset or 0
    assert chosen == ordered[start : None if limit is None else start + limit]


@given(SETS, SETS, st.integers(), st.integers(0, 30))
def test_under_a_limit_inserts_and_deletes_move_only_rows_at_the_edge(
    before: set[int], after: set[int], seed: int, limit: int
) -> None:
    """What stays in the set keeps its order, whatever else comes and goes."""
    old = choose_rows(ids(before), shuffle_seed=seed, offset=None, limit=limit).tolist()
    new = choose_rows(ids(after), shuffle_seed=seed, offset=None, limit=limit).tolist()
    both = [row for row in old if row in new]
    assert both == [row for row in new if row in old]
    assert len(new) == min(limit, len(after))
    left = [row for row in old if row in after and row not in new]
    came = [row for row in new if row not in before]
    assert len(left) <= len(came), "a row that still matches goes only for one that came"


def test_seeds_give_different_orders_and_the_same_one_again() -> None:
    rows = np.arange(1_000, dtype=np.uint64)
    orders = {
        seed: choose_rows(rows, shuffle_seed=seed, offset=None, limit=None).tolist()
        for seed in (0, 1, 2, -1, 2**64 + 5)
    }
    assert len({tuple(order) for order in orders.values()}) == len(orders)
    assert all(sorted(order) == rows.tolist() for order in orders.values())
    # Stored views depend on it (SplitMix64 of the id, and of the seed).
    first = choose_rows(rows[:10], shuffle_seed=42, offset=None, limit=None).tolist()
    assert first == [5, 8, 4, 2, 3, 7, 9, 0, 1, 6]


def test_a_shuffle_is_even() -> None:
    """Each tenth of the shuffled rows has about a tenth of each tenth of the table."""
    rows = np.arange(100_000, dtype=np.uint64)
    order = choose_rows(rows, shuffle_seed=7, offset=None, limit=None).astype(np.int64)
    counts = np.histogram2d(np.arange(len(order)), order, bins=10)[0]
    assert abs(counts - 1_000).max() < 5 * np.sqrt(1_000)


@given(st.lists(st.integers(0, 60), unique=True), st.lists(st.integers(0, 60), unique=True))
def test_rows_enter_in_the_views_order(current: list[int], wanted: list[int]) -> None:
    entering, leaving = rows_that_enter_and_leave(
        np.array(current, dtype=np.uint64), np.array(wanted, dtype=np.uint64)
    )
    assert entering.tolist() == [row for row in wanted if row not in current]
    assert leaving.tolist() == [row for row in current if row not in wanted]


def test_the_arguments_are_left_as_they_were() -> None:
    rows = np.arange(100, dtype=np.uint64)
    rows.flags.writeable = False
    choose_rows(rows, shuffle_seed=3, offset=1, limit=20)
    rows_that_enter_and_leave(rows, rows[::2])


@pytest.mark.long
@pytest.mark.slow
def test_ten_million_rows_take_seconds() -> None:
    rows = np.arange(10_000_000, dtype=np.uint64)
    started = time.process_time()
    wanted = choose_rows(rows, shuffle_seed=1, offset=None, limit=None)
    rows_that_enter_and_leave(wanted[100:], wanted[:-100])
    assert time.process_time() - started < 6

"""Sizes of batches, learned from what calls took."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.planning.batching import CallCost


def run(took: Callable[[int], float], rows: int, cost: CallCost | None = None) -> list[int]:
    """The sizes of the batches that so many rows are computed in."""
    cost = cost if cost is not None else CallCost()
    sizes: list[int] = []
    while rows:
        size = min(cost.next_rows() or 1, rows)
        sizes.append(size)
        cost = cost.after(size, took(size))
        rows -= size
    return sizes


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("once_per_row", [False, True])
def test_without_a_fixed_cost_batches_take_a_quarter_of_a_second(
    seconds: float, once_per_row: bool
) -> None:
    cost = CallCost(once_per_row=once_per_row)
    size = 1
    for _ in range(40):
        cost = cost.after(size, size * seconds)
        size = min(cost.next_rows() or 1, 100_000)
    wanted = 100_000 if seconds == 0 else max(1, 0.25 / seconds)
    assert wanted / 9 <= size <= max(wanted, 1) * 9


def test_a_fixed_cost_is_spread_over_many_rows() -> None:
    assert len(run(lambda rows: 0.2, 1_000)) <= 7
    assert len(run(lambda rows: 0.2 + 1e-5 * rows, 1_000)) <= 7


@given(st.floats(0, 5), st.floats(1e-7, 1), st.integers(1, 20_000))
def test_any_line_costs_little_more_than_it_has_to(fixed: float, per_row: float, rows: int) -> None:
    sizes = run(lambda size: fixed + per_row * size, rows)
    seconds = len(sizes) * fixed + per_row * rows
    # A tenth for what is fixed, and about ten calls on the way to the right size.
    assert seconds <= 1.2 * (per_row * rows + fixed) + 12 * fixed
    assert max(fixed + per_row * size for size in sizes) <= max(60.0, 9 * (fixed + per_row))


def test_a_function_that_is_called_once_per_row_is_not_given_more_to_learn() -> None:
    assert run(lambda rows: 60.0 * rows, 5, CallCost(once_per_row=True)) == [1] * 5


def test_the_first_call_may_load_a_model() -> None:
    took = iter([30.0])
    sizes = run(lambda rows: next(took, 0.01 * rows), 500)
    assert max(sizes) <= 50, "a slow first call is no fixed cost"
    assert len(sizes) <= 30


def test_steady_calls_stay_as_they_are() -> None:
    sizes = run(lambda rows: 0.001 * rows, 10_000)
    assert set(sizes[6:-1]) <= set(range(200, 300))


def test_a_timeout_is_kept_away_from() -> None:
    sizes = run(lambda rows: 0.2 + 0.01 * rows, 5_000, CallCost(timeout=1.0))
    assert max(0.2 + 0.01 * size for size in sizes[4:]) <= 0.6


def test_rows_wait_for_others_where_a_call_has_a_fixed_cost() -> None:
    assert CallCost().least_rows(1_000_000) == 1
    cheap, dear = CallCost(), CallCost()
    for size in (1, 8, 64):
        cheap = cheap.after(size, 0.001 * size)
        dear = dear.after(size, 0.1 + 0.001 * size)
    assert cheap.least_rows(1_000_000) == 1
    assert 800 <= dear.least_rows(1_000_000) <= 1_000  # of a second, a tenth is fixed
    assert dear.least_rows(100) == 100

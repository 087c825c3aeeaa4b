"""How large checkpoints are, by what was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from geneva import Connection
from geneva.errors import UDFExecutionError
from support import Calls, checkpoint_ranges, counted, make_table, tripled


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        ({"checkpoint_size": 20, "min_checkpoint_size": 5}, 20),
        ({"checkpoint_size": 20, "min_checkpoint_size": 50}, 20),
        ({"checkpoint_size": 20, "max_checkpoint_size": 50}, 20),
        ({"checkpoint_size": 20, "max_checkpoint_size": 7}, 7),
        ({"checkpoint_size": 20, "min_checkpoint_size": 7, "max_checkpoint_size": 7}, 7),
        ({"checkpoint_size": 20, "min_checkpoint_size": 2, "max_checkpoint_size": 8}, 8),
    ],
)
@pytest.mark.parametrize(
    ("whole", "on_udf"),
    [
        (True, False),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_no_checkpoint_is_larger_and_none_is_left_out(
    local_db: Connection,
    calls: Calls,
    sizes: dict[str, Any],
    largest: int,
    *,
    whole: bool,
    on_udf: bool,
) -> None:
    table = make_table(local_db, [105])
    table.add_columns({"x": tripled(calls, **(sizes if on_udf else {}))})
    # Of checkpoints that were asked for of a run, those that it made are still there.
    asked = {} if on_udf else sizes
    table.backfill("x", **({"checkpoint_size": 20} | asked), task_size=105 if whole else 30)
    ranges = checkpoint_ranges(table)[0]
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == 105
    assert max(b - a for a, b in ranges) <= largest
    assert calls.count == 105


@pytest.mark.parametrize("sizes", [{}, {"min_checkpoint_size": 2}])
def test_results_that_are_taken_over_do_not_make_one_larger(
    local_db: Connection, calls: Calls, sizes: dict[str, Any]
) -> None:
    table = make_table(local_db, [105])
    table.add_columns({"x": counted(calls, lambda id: 1 // (id - 90), data_type="int64")})
    with pytest.raises(UDFExecutionError):
        table.backfill("x", checkpoint_size=40, task_size=105, concurrency=1)
    saved = checkpoint_ranges(table)[0]
    assert max(b - a for a, b in saved) == 40
    # As work on these rows alone it is another one: what is saved is found by receipt.
    mended = counted(calls, lambda id: 0, data_type="int64")
    table.alter_columns({"path": "x", "udf": mended, "keep": "computed"})
    calls.clear()
    table.backfill("x", checkpoint_size=10, task_size=105, **sizes)
    ranges = set(checkpoint_ranges(table)[0]) - set(saved)
    assert max(b - a for a, b in ranges) <= 10
    assert sum(b - a for a, b in ranges) == 105
    assert calls.count == 105 - max(b for _, b in saved)

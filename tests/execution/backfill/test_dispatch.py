"""How many tasks there are on many slots, before anybody knows how long a row takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import geneva
from cluster import wait_for
from driving import prepared_for
from geneva.execution.backfill import dispatch
from geneva.execution.backfill.speeds import SPEEDS
from geneva.execution.runner import ANY, InProcessRunner
from geneva.model.computation import Resources
from geneva.table import Table
from support import Calls

SLOTS = 8
ROWS = 40


@pytest.fixture
def table(tmp_path: Path) -> Table:
    db = geneva.connect(tmp_path / "db", runner=lambda: InProcessRunner(SLOTS))
    return db.create_table("t", pa.table({"x": range(ROWS)}))


def test_a_quick_function_takes_few_tasks(
    table: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    @geneva.udf(data_type=pa.int64())
    def double(x: int) -> int:
        calls.note([x])
        return x * 2

    monkeypatch.setattr(dispatch, "_PROBE_SECONDS", 600.0)
    table.add_columns({"y": double})
    result = table.backfill("y")
    assert table.to_arrow()["y"].to_pylist() == [2 * x for x in range(ROWS)]
    assert calls.rows == list(range(ROWS))
    assert result.progress.tasks == 3  # the first share, the rest, and both put together


def test_a_slow_function_has_all_slots(
    table: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    @geneva.udf(data_type=pa.int64())
    def double(x: int) -> int:
        calls.note([x])
        wait_for(lambda: calls.count >= SLOTS, "a row on each slot")
        return x * 2

    monkeypatch.setattr(dispatch, "_PROBE_SECONDS", 0.01)
    table.add_columns({"y": double})
    table.backfill("y")
    assert table.to_arrow()["y"].to_pylist() == [2 * x for x in range(ROWS)]
    assert calls.rows == list(range(ROWS))


class _Counting(InProcessRunner):
    """Notes how many tasks each job of it had."""

    def __init__(self, jobs: list[int]) -> None:
        super().__init__(2)
        self.jobs = jobs

    def submit(
        self, function: Callable[[Any], str], items: Sequence[Any], resources: Resources = ANY
    ) -> Future[list[str]]:
        self.jobs.append(len(items))
        return super().submit(function, items, resources)


def test_tasks_that_take_a_moment_are_one_job_of_spark(tmp_path: Path, calls: Calls) -> None:
    @geneva.udf(data_type=pa.int64())
    def double(x: int) -> int:
        calls.note([x])
        return x * 2

    jobs: list[int] = []
    db = geneva.connect(tmp_path / "db", runner=lambda: _Counting(jobs))
    table = db.create_table("t", pa.table({"x": range(20)}))
    table.add(pa.table({"x": range(20, ROWS)}))
    table.add_columns({"blind": double})
    table.backfill("blind")
    assert jobs == [1, 1], "nobody knows how long a row takes: each is heard by itself"
    for column, speed, expected in (("quick", 1e3, [2]), ("slow", 10.0, [1, 1])):
        table.add_columns({column: double})
        SPEEDS.note(prepared_for(table, column).computation, speed)
        jobs.clear()
        calls.clear()
        table.backfill(column)
        assert jobs == expected
        assert sorted(calls.rows) == list(range(ROWS))
        assert table.to_arrow()[column].to_pylist() == [2 * x for x in range(ROWS)]

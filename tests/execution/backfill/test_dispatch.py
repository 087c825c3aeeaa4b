"""How many tasks there are on many slots, before anybody knows how long a row takes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import geneva
from cluster import wait_for
from geneva.execution.backfill import dispatch
from geneva.execution.runner import InProcessRunner
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

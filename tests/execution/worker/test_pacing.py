"""When a task is told to give back what it has not done, and how rows are cut into batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.execution.worker import pacing
from geneva.execution.worker.pacing import Deadline, Pacing
from geneva.planning.batching import CallCost
from geneva.planning.sizing import BatchRule, Limit
from worker_support import open_task


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(pacing.time, "monotonic", lambda: clock[0])
    return clock


def test_it_counts_from_the_first_call_and_asks_how_long_the_rest_takes(now: list[float]) -> None:
    deadline = Deadline(Limit(1.0, max_rest=5.0), rows=100)
    now[0] += 60  # a model is loaded
    deadline.start()
    now[0] += 2
    assert not deadline.is_over, "nobody knows how long rows take"
    deadline.ran(50)
    assert not deadline.is_over, "two seconds more"
    now[0] += 4
    assert deadline.is_over
    assert not deadline.ends_part


def test_what_is_over_stays_over(now: list[float]) -> None:
    deadline = Deadline(Limit(1.0, max_rest=1.0, in_fragments=True), rows=100)
    deadline.start()
    now[0] += 2
    deadline.ran(10)
    assert deadline.ends_part
    deadline.ran(88)  # calls that were made ahead
    assert deadline.ends_part
    assert deadline.is_over


def test_without_a_limit_nothing_is_over(now: list[float]) -> None:
    deadline = Deadline(None, rows=10)
    deadline.start()
    deadline.ran(1)
    now[0] += 1e6
    assert not deadline.is_over


@pytest.fixture(scope="module")
def new_pacing(tmp_path_factory: pytest.TempPathFactory) -> Pacing:
    folder: Path = tmp_path_factory.mktemp("pacing")
    return Pacing(open_task(folder, range(1)).work)


@given(
    size=st.integers(1, 20),
    checkpoint=st.none() | st.integers(1, 40),
    before=st.integers(0, 100),
    rows=st.integers(0, 200),
)
def test_rows_behind_batches_are_those_that_cutting_leaves(
    new_pacing: Pacing, size: int, checkpoint: int | None, before: int, rows: int
) -> None:
    rule = BatchRule(size, size, checkpoint, 1, None, 1.0)
    cost, cut = CallCost(), 0
    while cut + (batch := new_pacing.batch_rows(rule, cost, before + cut)) <= rows:
        cut += batch
    assert new_pacing.rows_behind_batches(rule, cost, before, rows) == rows - cut

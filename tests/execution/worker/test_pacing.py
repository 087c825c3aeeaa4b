"""When a task is told to give back what it has not done."""

from __future__ import annotations

import pytest

from geneva.execution.worker import pacing
from geneva.execution.worker.pacing import Deadline
from geneva.planning.sizing import Limit


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

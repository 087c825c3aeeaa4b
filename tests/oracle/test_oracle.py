"""Random histories, compared with the model after every step.

The short rounds have fixed seeds. The long ones go on for GENEVA_ORACLE_STEPS steps, from seed
GENEVA_ORACLE_SEED on, and show what failed in a form that can be replayed:

    GENEVA_ORACLE_STEPS=20000 pytest -m long tests/oracle -s
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from oracle.histories import Failure, run_history
from oracle.view_histories import run_view_history

STEPS_OF_A_HISTORY = 40
MOST_FAILURES = 20

RunHistory = Callable[[int, int], tuple[int, Failure[Any, Any] | None]]


def report(seed: int, failure: Failure[Any, Any]) -> str:
    """Say what failed, and how to see it again."""
    first = f"seed {seed}, step {len(failure.steps)}: {failure.error}"
    return f"{first}\nshrunk:\n{failure.shrunk()}"


def run_short(run: RunHistory, seed: int) -> None:
    _, failure = run(seed, 20)
    if failure is not None:
        pytest.fail(report(seed, failure))


def run_long(run: RunHistory, wanted: int) -> None:
    first = seed = int(os.environ.get("GENEVA_ORACLE_SEED", "1000"))
    done = 0
    reports: list[str] = []
    while done < wanted and len(reports) < MOST_FAILURES:
        steps, failure = run(seed, STEPS_OF_A_HISTORY)
        done += steps
        if failure is not None:
            reports.append(report(seed, failure))
            sys.stderr.write(f"{reports[-1]}\n")
        seed += 1
    sys.stderr.write(f"{done} steps, seeds {first} to {seed - 1}, {len(reports)} failures\n")
    if reports:
        pytest.fail("\n\n".join(reports))


def steps_wanted() -> int:
    return int(os.environ.get("GENEVA_ORACLE_STEPS", "100000"))


@pytest.mark.parametrize("seed", range(3))
def test_a_short_history_agrees_with_the_model(seed: int) -> None:
    run_short(run_history, seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_short_history_of_a_view_agrees_with_the_model(seed: int) -> None:
    run_short(run_view_history, seed)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)
def test_long_histories_agree_with_the_model() -> None:
    run_long(run_history, steps_wanted())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)
def test_long_histories_of_views_agree_with_the_model() -> None:
    run_long(run_view_history, steps_wanted() // 4)

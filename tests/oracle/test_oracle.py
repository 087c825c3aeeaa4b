"""Random histories of a table, compared with the model after every step.

The short round has fixed seeds. The long one goes on for GENEVA_ORACLE_STEPS steps, from seed
GENEVA_ORACLE_SEED on:

    GENEVA_ORACLE_STEPS=20000 pytest -m long tests/oracle -s
"""

from __future__ import annotations

import os
import sys

import pytest

from oracle.histories import Failure, run_history, shrunk

STEPS_OF_A_HISTORY = 40


def report(seed: int, failure: Failure) -> str:
    """Say how to see it again, in full and shrunk."""
    return (
        f"seed {seed}, step {len(failure.steps)}: {type(failure.error).__name__}: {failure.error}\n"
        f"shrunk:\n{shrunk(failure)}"
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_short_history_agrees_with_the_model(seed: int) -> None:
    _, failure = run_history(seed, 25)
    if failure is not None:
        pytest.fail(report(seed, failure))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)
def test_long_histories_agree_with_the_model() -> None:
    wanted = int(os.environ.get("GENEVA_ORACLE_STEPS", "100000"))
    first = seed = int(os.environ.get("GENEVA_ORACLE_SEED", "1000"))
    done = 0
    reports: list[str] = []
    while done < wanted and len(reports) < 20:
        steps, failure = run_history(seed, STEPS_OF_A_HISTORY)
        done += steps
        if failure is not None:
            reports.append(report(seed, failure))
            sys.stderr.write(f"{reports[-1]}\n")
        seed += 1
    sys.stderr.write(f"{done} steps, seeds {first} to {seed - 1}, {len(reports)} failures\n")
    if reports:
        pytest.fail("\n\n".join(reports))

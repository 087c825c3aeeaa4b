"""The benchmark runs, at a thousandth of its size: its numbers mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.simulate import Costs, Job, simulate

ROOT = Path(__file__).resolve().parents[2]
CASES = ("arrow_1m", "slow_2000", "small", "nothing")


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.spark
@pytest.mark.slow
def test_a_tiny_run_reports_every_case(tmp_path: Path) -> None:
    only = [word for name in CASES for word in ("--only", name)]
    file = tmp_path / "numbers.json"
    run = benchmarks("--scale", "0.001", "--repeat", "1", "--markdown", "--json", str(file), *only)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "| case | Geneva | reference | ratio | target | reached |"
    assert len([line for line in lines if line.startswith("|")]) == 2 + len(CASES)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [outcome["name"] for outcome in found["outcomes"]] == list(CASES)
    assert all(len(outcome["runs"]) == 1 for outcome in found["outcomes"])
    with_loop = [outcome for outcome in found["outcomes"] if outcome["loop_runs"]]
    assert [outcome["name"] for outcome in with_loop] == ["arrow_1m", "slow_2000"]
    assert all(outcome["ratio_to_loop"] > 0 for outcome in with_loop)


def test_an_unknown_case_is_refused() -> None:
    run = benchmarks("--only", "nonsense")
    assert run.returncode == 2
    assert "arrow_10m" in run.stderr


def test_a_job_that_is_played_through_comes_out_the_same() -> None:
    job = Job(rows=10_000_000, fragments=1_000, slots=200)
    result = simulate(job, Costs())
    assert result == simulate(job, Costs())
    assert result.seconds >= result.ideal_seconds
    assert result.commit_seconds <= 0.1 * result.seconds
    waiting = simulate(replace(job, waits_for_batches=True), Costs())
    assert waiting.seconds > 1.2 * result.seconds, "slots stand idle until their batch is done"

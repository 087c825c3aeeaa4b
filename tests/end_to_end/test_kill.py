"""Processes that die in the middle of a backfill: what is lost, what is left, what is kept.

What a crash may cost is the batches that were not checkpointed: with an explicit checkpoint size at
most that many rows on each slot, otherwise what was computed since the last flush.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from cluster import wait_for
from conftest import connect
from geneva import UDF, Table, udf
from geneva.execution.runner import InProcessRunner
from geneva.model.jobs import JobStatus
from processes import finish, kill, nothing_left_in, processes_in, start_script, workers_in
from support import Calls, column, make_table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

note = logging.getLogger(__name__).info  # measured numbers: pytest --log-cli-level=INFO

SLOTS = 2
GONE_SECONDS = 10


def slow_square(calls: Calls, seconds: float) -> UDF:
    """A UDF that takes its time, and logs each row before it starts with it."""

    @udf(data_type=pa.int64(), input_columns=["id"])
    def square(id: int) -> int:
        calls.note([id])
        time.sleep(seconds)
        return id * id

    return square


class Machine:
    """A folder in which drivers run and die; the table is beside it."""

    def __init__(self, folder: Path, calls: Calls, fragments: list[int], seconds: float) -> None:
        self.folder, self.calls, self.rows = folder / "machine", calls, sum(fragments)
        self.db = connect(folder / "db", InProcessRunner)
        self.table = make_table(self.db, fragments)
        self.table.add_columns({"y": slow_square(calls, seconds)})

    @property
    def on_spark(self) -> Table:
        """The table, to be computed on the Spark of this process."""
        return connect(Path(self.db.uri), None).open_table("t")

    def start(self, *, runner: str = "None", **options: Any) -> subprocess.Popen[str]:
        """Start a backfill in a process of its own, on an embedded Spark unless told otherwise."""
        code = f"""
            import json, signal, geneva
            from geneva.execution.runner import InProcessRunner
            db = geneva.connect({self.db.uri!r}, runner={runner})
            try:
                result = db.open_table("t").backfill("y", **{options!r})
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                signal.sigtimedwait([signal.SIGTERM], 60)
            else:
                print(json.dumps([result.status, result.rows_computed, result.rows_reused]))
            """
        return start_script(self.folder, code)

    def wait_for_calls(self, count: int, process: subprocess.Popen[str]) -> None:
        """Wait until the UDF was called that often."""
        deadline = time.monotonic() + 120
        while self.calls.count < count:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{self.calls.count} calls, then: {kill(process)}")
            time.sleep(0.02)

    def wait_gone(self) -> float:
        """Wait until no process is left; return how long that took."""
        began = time.monotonic()
        wait_for(lambda: not processes_in(self.folder), "JVM and workers to leave", GONE_SECONDS)
        return time.monotonic() - began

    def check(self) -> None:
        """Every value is right, wherever it was computed."""
        assert column(self.table, "y") == [i * i for i in range(self.rows)]
        assert set(self.calls.rows) == set(range(self.rows))
        left = [p for p in (self.folder / "tmp").rglob("*") if not p.is_dir()]
        assert left == []


@pytest.fixture
def machine(tmp_path: Path, calls: Calls, request: pytest.FixtureRequest) -> Iterator[Machine]:
    fragments, seconds = request.param
    with nothing_left_in(tmp_path / "machine"):
        yield Machine(tmp_path, calls, fragments, seconds)


def of_size(fragments: list[int], milliseconds: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "machine", [(fragments, milliseconds / 1000)], ids=[f"{len(fragments)}"], indirect=True
    )


# ------------------------------------------------------------------------------------- the driver


@pytest.mark.spark
class TestDriver:
    @pytest.mark.slow
    @of_size([60, 140], 10)
    def test_killed_and_finished_by_another_process(self, machine: Machine) -> None:
        calls, size = machine.calls, 10
        first = machine.start(checkpoint_size=size)
        machine.wait_for_calls(100, first)
        kill(first)
        gone = machine.wait_gone()
        lost_at = calls.count
        assert lost_at < machine.rows
        result = machine.on_spark.backfill("y", checkpoint_size=size)  # in a second process: this
        assert result.status is JobStatus.DONE
        assert result.rows_computed + result.rows_reused == machine.rows
        again = calls.count - machine.rows
        note("recomputed rows: %s", again)
        note("seconds until gone: %s", round(gone, 2))
        assert result.rows_computed == calls.count - lost_at
        assert again <= size * SLOTS
        machine.check()

    @pytest.mark.slow
    @of_size([60, 140], 20)
    def test_checkpoints_by_time(self, machine: Machine) -> None:
        calls, pause = machine.calls, 0.2
        options = {"batch_checkpoint_flush_interval_seconds": pause}
        first = machine.start(**options)
        machine.wait_for_calls(120, first)
        kill(first)
        machine.wait_gone()
        machine.on_spark.backfill("y", **options)
        again = calls.count - machine.rows
        note("recomputed rows: %s", again)
        # Since the last flush: the pause, and the batch of a quarter of a second that was open.
        assert again <= SLOTS * (pause + 0.25) / 0.02 * 1.2
        machine.check()

    @pytest.mark.slow
    @of_size([20, 20, 160], 10)
    def test_ctrl_c_keeps_what_is_finished(self, machine: Machine) -> None:
        calls = machine.calls
        process = machine.start(checkpoint_size=10, task_size=20)
        machine.wait_for_calls(100, process)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        assert process.stdout is not None
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - began < 5
        wait_for(lambda: not workers_in(machine.folder), "the workers to leave", GONE_SECONDS)
        at_rest = calls.count
        (job,) = machine.db.list_jobs()
        assert job.status is JobStatus.CANCELLED
        assert column(machine.table, "y")[:40] == [i * i for i in range(40)]
        assert column(machine.table, "y")[40:] == [None] * 160
        assert job.metrics["committed"] == 40
        assert lance.dataset(machine.table.ref.uri).tags.list() == {}
        process.terminate()
        assert process.communicate(timeout=20)[1] == ""
        machine.wait_gone()
        assert calls.count == at_rest
        machine.table.backfill("y", checkpoint_size=10)
        assert calls.count <= machine.rows + 10 * SLOTS
        machine.check()


# -------------------------------------------------------------------------------------- the worker


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    ("fragments", "options"),
    [
        pytest.param([50, 50], {"checkpoint_size": 10, "task_size": 50}, id="batches"),
        pytest.param([70, 30], {"checkpoint_size": 10, "task_size": 30}, id="split"),
        pytest.param([10] * 10, {"checkpoint_size": 100, "task_size": 100}, id="staged_files"),
    ],
)
def test_killed_worker_is_replaced(
    tmp_path: Path, calls: Calls, fragments: list[int], options: dict[str, Any]
) -> None:
    table = make_table(connect(tmp_path / "db", None), fragments)
    mark = str(tmp_path / "died")

    @udf(data_type=pa.int64(), input_columns=["id"])
    def square(id: int) -> int:
        calls.note([id])
        if id == 75 and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return id * id

    table.add_columns({"y": square})
    result = table.backfill("y", **options)
    assert result.status is JobStatus.DONE
    assert Path(mark).exists()
    assert column(table, "y") == [i * i for i in range(100)]
    again = calls.count - 100
    note("recomputed rows: %s", again)
    assert again <= 10


# --------------------------------------------------------------------------------------- the storm


def storm(machine: Machine, kills: int, rng: random.Random, runner: str, start: float) -> int:
    """Kill drivers at random moments, one after the other; return how many were killed at work."""
    options = {"checkpoint_size": 5, "commit_granularity": 1}
    killed = 0
    for _ in range(kills):
        process = machine.start(runner=runner, **options)
        before = machine.calls.count
        if rng.random() < 0.7:  # at work, or while committing; else at any moment from the start on
            while machine.calls.count == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.random())
        else:
            time.sleep(rng.random() * start)
        if process.poll() is None:
            killed += 1
        errors = kill(process)
        assert process.returncode in (0, -signal.SIGKILL), errors
        machine.wait_gone()
    assert json.loads(finish(machine.start(runner=runner, **options)))[0] == "DONE"
    machine.wait_gone()
    return killed


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("runner", "kills_a_round", "start_seconds"),
    [
        ("lambda: InProcessRunner(2)", 6, 2.0),
        pytest.param("None", 2, 8.0, marks=pytest.mark.spark),
    ],
    ids=["in_process", "spark"],
)
@of_size([25, 25, 7, 43, 60, 1, 39], 10)
def test_storm(
    machine: Machine,
    slow_rounds: int,
    runner: str,
    kills_a_round: int,
    start_seconds: float,
) -> None:
    seed = random.randrange(2**32)
    note("seed: %s", seed)
    killed = storm(machine, slow_rounds * kills_a_round, random.Random(seed), runner, start_seconds)
    note("recomputed rows: %s", machine.calls.count - machine.rows)
    note("kills: %s", killed)
    machine.check()
    assert machine.calls.count <= machine.rows + killed * 5 * SLOTS
    jobs = machine.db.list_jobs()
    assert jobs[0].status is JobStatus.DONE


def test_the_bounds_are_of_this_table(tmp_path: Path, calls: Calls) -> None:
    """Without a crash every row is computed once: what the bounds above allow is the crash's."""
    machine = Machine(tmp_path, calls, [5, 5], 0.0)
    machine.table.backfill("y", checkpoint_size=3)
    assert calls.rows == list(range(10))

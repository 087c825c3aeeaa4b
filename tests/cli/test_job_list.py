"""What the list of jobs says of running, waiting and idle jobs, in a shell and in the console."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from command_line import invoke
from geneva import connect
from geneva.console.job_pages import JobFilter, job_list, job_page
from geneva.execution.jobs.heartbeat import driver_identity
from geneva.model.jobs import JobStatus
from geneva.model.tables import Secrets
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.feed import JobFeed
from geneva.storage.jobs.heartbeats import JobSignals
from geneva.storage.jobs.history import JobHistory
from geneva.storage.jobs.output import OutputStore, TaskOutput

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def history(tmp_path: Path) -> JobHistory:
    return JobHistory(str(tmp_path), Secrets())


def add(history: JobHistory, job_id: str, minute: int, *more: JobEvent, column: str = "c") -> None:
    driver = {"host": socket.gethostname(), "pid": os.getpid()}
    created = {"table": "t", "column": column, "type": "BACKFILL", "driver": driver}
    at = START + timedelta(minutes=minute)
    history.append([JobEvent(job_id, "created", created, at), *more])


def ended(job_id: str, total: int) -> JobEvent:
    numbers = {"total": total, "committed": total, "seconds": float(total)}
    return JobEvent(job_id, "status", {"status": "DONE", "metrics": numbers}, START)


def shown(tmp_path: Path) -> dict[str, str]:
    result = invoke(["jobs", "list", str(tmp_path)])
    assert result.exit_code == 0, result.output
    return {line.split()[0]: line for line in result.stdout.splitlines()[2:]}


def test_rows_of_a_running_job_are_those_that_are_safe(history: JobHistory, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    metrics = {"total": 5000, "committed": 0, "checkpointed": 0, "seconds": 0.1}
    running = JobEvent("running", "status", {"status": "RUNNING", "metrics": metrics}, now)
    add(history, "running", 0, running)
    beat = {**metrics, "checkpointed": 3000, "seconds": 9.0}
    JobSignals(str(tmp_path), Secrets()).beat("running", {"metrics": beat})
    assert shown(tmp_path)["running"].endswith("3,000 of 5,000")
    db = connect(tmp_path)
    assert db.list_jobs()[0].metrics["checkpointed"] == 3000
    assert db.get_job("running").metrics["checkpointed"] == 3000
    page = str(job_list(db.list_jobs(), JobFilter()))
    assert "60 %" in page
    assert "checkpointed" in page


def test_rows_of_a_job_that_was_stopped_are_those_that_are_safe(
    history: JobHistory, tmp_path: Path
) -> None:
    metrics = {"total": 5000, "committed": 100, "checkpointed": 3000, "seconds": 9.0}
    stopped = JobEvent("stopped", "status", {"status": "CANCELLED", "metrics": metrics}, START)
    add(history, "stopped", 0, stopped)
    assert shown(tmp_path)["stopped"].split()[-1] == "3,000"
    page = str(job_list(connect(tmp_path).list_jobs(), JobFilter()))
    assert "3,000 of 5,000 rows checkpointed" in page


def test_a_lost_job_has_the_rows_that_it_had_reached(history: JobHistory, tmp_path: Path) -> None:
    """Also when it is put on record that it is lost, and what it left behind is cleared away."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = driver_identity()
    created = {"table": "t", "column": "c", "type": "BACKFILL"}
    driver = {**here, "pid": ended.pid, "started": "1"}
    metrics = {"total": 5000, "committed": 0, "checkpointed": 0, "seconds": 0.1}
    running = {"status": "RUNNING", "metrics": metrics}
    now = datetime.now(UTC)
    history.append(
        [
            JobEvent("lost", "created", {**created, "driver": driver}, now),
            JobEvent("lost", "status", running, now),
        ]
    )
    signals, db = JobSignals(str(tmp_path), Secrets()), connect(tmp_path)
    signals.beat("lost", {"metrics": {**metrics, "checkpointed": 3000, "seconds": 9.0}})
    for _ in range(2):
        assert "FAILED" in shown(tmp_path)["lost"]
        assert shown(tmp_path)["lost"].split()[-1] == "3,000"
        assert JobFeed(db._history).records()[0].rows_done == (3000, 5000)
        assert not db._history.close_lost("lost")
        signals.clear("lost")


def test_a_job_that_waits(history: JobHistory, tmp_path: Path) -> None:
    add(history, "waits", 0, JobEvent("waits", "waiting", {"for": "12345678-9"}, datetime.now(UTC)))
    assert "PENDING (waiting for 12345678)" in shown(tmp_path)["waits"]
    assert "waiting for" in str(job_list(history.list(), JobFilter()))


def test_jobs_with_nothing_to_do_take_one_line(history: JobHistory, tmp_path: Path) -> None:
    for i in range(4):
        add(history, f"idle{i}", i, ended(f"idle{i}", 0))
    add(history, "other", 4, ended("other", 0), column="d")
    add(history, "busy", 5, ended("busy", 7))
    add(history, "idle5", 6, ended("idle5", 0))
    assert next(job.job_id for job in history.list() if job.had_nothing_to_do) == "idle5"
    lines = shown(tmp_path)
    assert list(lines) == ["idle5", "busy", "other", "idle3"]
    assert lines["busy"].endswith(" 7")
    assert lines["idle5"].endswith("nothing to do")
    assert lines["idle3"].endswith("nothing to do (3 more times)")
    page = str(job_list(history.list(), JobFilter()))
    assert page.count("nothing to do") == 3
    assert "0 %" not in page.replace("100 %", "")
    assert len(connect(tmp_path).list_jobs(status=JobStatus.DONE)) == 7, "the library lists all"


def test_what_a_job_printed_is_shown_and_harmless(history: JobHistory, tmp_path: Path) -> None:
    add(history, "printed", 0, ended("printed", 3))
    text = "one\n\x1b]0;owned\x07<script>alert(1)</script>\n"
    OutputStore(str(tmp_path), Secrets()).append([TaskOutput("printed", "y, fragment 0", text)])
    result = invoke(["jobs", "logs", str(tmp_path), "print"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:2] == ["--- y, fragment 0", "one"]
    assert "\x1b" not in result.stdout
    result = invoke(["jobs", "logs", str(tmp_path), "print", "--json"])
    assert json.loads(result.stdout)["tasks"][0]["text"] == text
    job = connect(tmp_path).get_job("printed")
    assert job.logs()[0].text == text
    page = "".join(str(part) for part in job_page(job, [], None, stopping=False, output=job.logs()))
    assert "y, fragment 0" in page
    assert "<script>" not in page
    assert "\x1b" not in page


def test_a_job_that_printed_nothing(history: JobHistory, tmp_path: Path) -> None:
    add(history, "silent", 0, ended("silent", 3))
    result = invoke(["jobs", "logs", str(tmp_path), "silent"])
    assert "Nothing was printed" in result.stdout

"""The command as a process: real Spark, Ctrl-C, another process that watches and cancels."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import geneva

COMMAND = [sys.executable, "-m", "geneva.cli"]
SLOW = """
import time
import geneva

@geneva.udf
def slow(id: int) -> int:
    time.sleep(1)  # 50 s in all, with two slots: nobody waits for the end
    return id + 1

@geneva.udf
def quick(id: int) -> int:
    return id + 1
"""
READING = [
    *("tables", "describe", "sample", "plan", "view list", "view plan"),
    *("jobs list", "jobs show", "jobs watch", "errors", "doctor"),
]
EVERY = [*READING, *("backfill", "view create", "view refresh", "view drop", "jobs cancel")]
EVERY += ["console", "demo", "version"]


@geneva.udf
def more(id: int) -> int:
    return id + 1


def environment(**more: str) -> dict[str, str]:
    own = {"COLUMNS": "100", "GENEVA_JVM_ARCHIVE": "0", "GENEVA_LOCAL_SLOTS": "2"}
    return {**os.environ, **own, "PYTHONUNBUFFERED": "1", **more}


def shell(
    *arguments: str, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a database of ten fragments and a module of functions."""
    (tmp_path / "slow_functions.py").write_text(SLOW)
    table = geneva.connect(tmp_path / "db").create_table("t", [{"id": i} for i in range(10)])
    for first in range(10, 100, 10):
        table.add([{"id": i} for i in range(first, first + 10)])
    return tmp_path


@pytest.mark.slow
def test_the_help_of_every_command_has_an_example_and_the_exit_codes() -> None:
    from command_line import invoke

    for command in EVERY:
        shown = invoke([*command.split(), "--help"], env={"COLUMNS": "100"})
        assert shown.exit_code == 0, command
        assert (
            f"Example:  geneva {command} ".split()
            == shown.stdout.split()[
                (at := shown.stdout.split().index("Example:")) : at + 2 + len(command.split())
            ]
        ), command
        assert "Exit codes: 0" in shown.stdout
        assert ("--json" in shown.stdout) or command not in READING


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    program = (
        "import sys, runpy\n"
        "sys.argv = ['geneva', '--help']\n"
        "try: runpy.run_module('geneva.cli', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'lance', 'lancedb', 'pandas', 'pyspark', 'starlette', 'uvicorn'}\n"
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    started = os.times().children_user
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment()
    )
    assert run.stderr.split() == []
    # Processor time, because other tests may have the other cores.
    assert os.times().children_user - started < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("geneva jo", ["jobs"]),
        ("geneva view re", ["refresh"]),
        ("geneva describe db ", ["t"]),
        ("geneva describe nowhere ", []),
        ("geneva plan db t m", ["more"]),
    ],
)
def test_the_shell_completes_commands_and_names(
    folder: Path, words: str, offered: list[str]
) -> None:
    geneva.connect(folder / "db").open_table("t").add_columns({"more": more})
    program = "import sys; sys.argv[0] = 'geneva'; from geneva.cli import main; main()"
    asked = {
        "_GENEVA_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment(**asked),
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == offered
    assert run.stderr == ""


@pytest.mark.spark
@pytest.mark.slow
def test_a_backfill_on_spark_with_a_function_of_the_current_folder(folder: Path) -> None:
    arguments = ("backfill", "db", "t", "more", "--udf", "slow_functions:quick", "--save")
    run = shell(*arguments, "--json", cwd=folder)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "", "piped: no bars, and nothing from Spark"
    assert json.loads(run.stdout)["rows_committed"] == 100
    values = geneva.connect(folder / "db").open_table("t").to_arrow()["more"].to_pylist()
    assert sorted(values) == list(range(1, 101))


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("given", ["describe db t --json", "describe db t", "version", "--help"])
def test_an_output_that_nobody_takes(folder: Path, given: str, unbuffered: str) -> None:
    command = " ".join([*COMMAND, given])
    for place, code, said in (
        (">/dev/full", 1, "No space left on device"),
        (">&-", 0, ""),
        ("| true; exit ${PIPESTATUS[0]}", 1, ""),
    ):
        ended = subprocess.run(
            ["bash", "-c", f"{command} {place}"],
            cwd=folder,
            env={**environment(), "PYTHONUNBUFFERED": unbuffered},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert ended.returncode == code or place.startswith("|"), (place, ended.stderr)
        assert ended.stderr.count("No space left") == bool(said)
        assert "Traceback" not in ended.stderr


@pytest.mark.spark
@pytest.mark.slow
def test_the_doctor_runs_spark(folder: Path) -> None:
    run = shell("doctor", "db", cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"ok +test job +Spark and a first job in [\d.]+ s", run.stdout)


def started(folder: Path) -> subprocess.Popen[str]:
    """A slow backfill in a process of its own, once it is on record."""
    process = subprocess.Popen(
        [
            *COMMAND,
            *("backfill", "db", "t", "more", "--udf", "slow_functions:slow", "--save", "--json"),
        ],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    db = geneva.connect(folder / "db")
    deadline = time.monotonic() + 90
    while not db.list_jobs(status="RUNNING"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return process


@pytest.mark.spark
@pytest.mark.slow
def test_ctrl_c_is_exit_code_130_and_the_job_is_cancelled(folder: Path) -> None:
    process = started(folder)
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted. What was finished is kept." in errors
    assert "Traceback" not in errors
    (job,) = geneva.connect(folder / "db").list_jobs()
    assert job.status == "CANCELLED"
    error = json.loads(shown)["error"]
    assert (error["type"], error["job_id"]) == ("KeyboardInterrupt", job.job_id)
    assert error["exit_code"] == 130


@pytest.mark.spark
@pytest.mark.slow
def test_a_job_is_watched_and_cancelled_from_other_processes(folder: Path) -> None:
    process = started(folder)
    watching = subprocess.Popen(
        [*COMMAND, "jobs", "watch", "db", "--json"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)
    (job,) = geneva.connect(folder / "db").list_jobs()
    cancelled = shell("jobs", "cancel", "db", job.job_id[:8], "--wait", cwd=folder)
    assert "it is CANCELLED" in cancelled.stdout, cancelled.stderr
    process.communicate(timeout=60)
    assert process.returncode == 1
    shown, _ = watching.communicate(timeout=30)
    assert watching.returncode == 1
    assert json.loads(shown)["status"] == "CANCELLED"

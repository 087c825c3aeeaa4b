"""The JVM is killed at any moment: a typed error, no traceback of py4j's, and a next job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, subprocess, sys, threading, time
import pyarrow as pa
import geneva
from geneva.config import Settings
from geneva.errors import GenevaError

@geneva.udf
def slow(x: int) -> int:
    import time
    time.sleep(0.02)
    return x + 1

settings = Settings(local_slots=2, jvm_archive=False, progress=False)
db = geneva.connect(sys.argv[1], settings=settings)
table = db.create_table("t", pa.table({"x": list(range(60))}))
table.add(pa.table({"x": list(range(60))}))
table.add_columns({"c": slow})

def kill(delay):
    from pyspark import SparkContext
    while SparkContext._active_spark_context is None:
        time.sleep(0.005)
    time.sleep(delay)
    shell = SparkContext._gateway.proc.pid
    found = subprocess.run(["pgrep", "-P", str(shell)], capture_output=True, text=True).stdout
    for pid in found.split():
        os.kill(int(pid), signal.SIGKILL)

for delay in map(float, sys.argv[2:]):
    killer = threading.Thread(target=kill, args=(delay,))
    killer.start()
    try:
        table.backfill("c", where="1=1")
    except GenevaError as error:
        known = ("Spark went away", "Spark could not be started", "session was stopped, or died")
        print(type(error).__name__, any(words in str(error) for words in known))
    killer.join()
    print(table.backfill("c", where="x < 5").rows_computed)
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.spark
def test_a_jvm_that_is_killed_is_said_and_replaced(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "db"), "0", "0.2", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert [line for line in said if line == "10"] == ["10"] * 3, said
    assert {line for line in said if line != "10"} <= {"SparkUnavailableError True"}, said
    assert "Traceback" not in run.stderr

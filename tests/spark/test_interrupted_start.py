"""Ctrl-C, or an error, while Spark starts: no JVM is left, and the next job has a new one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pyspark.java_gateway
import pytest

from geneva.spark import sessions
from geneva.spark.embedded.java import JavaHome
from processes import finish, nothing_left_in, start_script

SCRIPT = """
import os, subprocess, time
import pyspark.java_gateway as gateways
from pyspark import SparkContext
from geneva.spark import sessions
from geneva.spark.sessions import cluster_session, embedded_session

made, make_folder = [], sessions.private_directory
sessions.private_directory = lambda: made.append(make_folder()) or made[-1]

def failing(real, error):
    # As Ctrl-C does it while the answer is waited for: the JVM has done what it was asked for.
    def call(*args, **kwargs):
        real(*args, **kwargs)
        raise error
    return call

def start(error=None):
    try:
        assert embedded_session().range(3).count() == 3
    except BaseException as raised:
        assert error is not None, raised
        assert error in repr(raised), raised
    else:
        assert error is None

def gone():
    # A JVM that was killed has its memory to give back: that takes a moment on a busy machine.
    deadline = time.monotonic() + 5
    while left()[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    return left()

def left():
    listed = subprocess.run(["ps", "axeww", "-o", "args"], capture_output=True, text=True).stdout
    own = [line for line in listed.splitlines() if f"HOME={os.environ['HOME']}" in line]
    return sum(line.split()[0].endswith("java") for line in own), made[-1].exists()

real = gateways.launch_gateway
gateways.launch_gateway = failing(real, KeyboardInterrupt())
start("KeyboardInterrupt")
gateways.launch_gateway = real
print("after the gateway", *gone())

real = SparkContext._initialize_context
for error in (KeyboardInterrupt(), OSError("some error")):
    SparkContext._initialize_context = failing(real, error)
    start("KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else "some error")
    print("after the context", *gone())
    SparkContext._initialize_context = real
    start()
    embedded_session().stop()
    print("started", *left())
    SparkContext._initialize_context = failing(real, error)
    start("KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else "some error")
    SparkContext._initialize_context = real
    print("after another context", *gone())
start()
print("started", *left())
embedded_session().stop()

SparkContext._initialize_context = failing(real, KeyboardInterrupt())
try:
    cluster_session("local[1]", {})
except KeyboardInterrupt:
    print("after a cluster", gone()[0])
SparkContext._initialize_context = real
start()
"""


@pytest.mark.slow
@pytest.mark.spark
def test_the_next_job_has_a_jvm_of_its_own(tmp_path: Path) -> None:
    with nothing_left_in(tmp_path):
        said = finish(start_script(tmp_path, SCRIPT)).splitlines()
    again = ["after the context 0 False", "started 1 True", "after another context 0 False"]
    started = ["started 1 True", "after a cluster 0"]
    assert said == ["after the gateway 0 False", *again, *again, *started]


def test_a_jvm_of_sparks_scripts_ends_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[int] = []

    def launch(conf: Any, popen: dict[str, Any]) -> None:
        proc = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, **popen)
        started.append(proc.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(pyspark.java_gateway, "launch_gateway", launch)
    with pytest.raises(KeyboardInterrupt):
        sessions._launch_by_scripts(JavaHome(tmp_path, "17"), tmp_path, {}, [])
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@pytest.mark.spark
def test_no_folder_for_its_files_is_said(tmp_path: Path) -> None:
    script = f"""
    import tempfile
    from geneva.errors import SparkUnavailableError
    from geneva.spark.sessions import embedded_session
    tempfile.tempdir = {str(tmp_path / "missing")!r}
    try:
        embedded_session()
    except SparkUnavailableError as error:
        print(error)
    """
    said = finish(start_script(tmp_path, script))
    assert "Spark could not be started here" in said
    assert "No such file or directory" in said

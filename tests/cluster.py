"""A real standalone Spark cluster on this machine, for tests, and a look at its processes.

The cluster comes out of the pip package::

    with running_cluster(workers=2) as cluster, cluster.session() as spark:
        ...
        cluster.kill_executor()

Processes are found by their working folder in /proc, so this is for Linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from geneva.spark.embedded.java import find_java
from geneva.spark.embedded.settings import LocalOptions, unchanged_interrupt_handler
from geneva.spark.sessions import embedded_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG_ON_A_CLUSTER = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
"""The marks of a module of tests that take minutes on a cluster."""
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
HOME = Path(pyspark.__file__).parent
SUBMIT = str(HOME / "bin" / "spark-submit")
QUIET = (
    *("--conf", "spark.ui.enabled=false"),
    *("--conf", "spark.driver.host=127.0.0.1"),
    *("--conf", "spark.driver.bindAddress=127.0.0.1"),
    *("--conf", "spark.executor.memory=512m"),
    *("--conf", f"spark.driver.extraJavaOptions={QUICK_JVM}"),
    *("--conf", f"spark.executor.extraJavaOptions={QUICK_JVM}"),
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A master and its workers; everything they write is in ``directory``."""

    url: str
    directory: Path
    workers: int
    cores: int
    gpus: int

    def executors(self) -> list[int]:
        """Return the process ids of the executors' JVMs."""
        return [pid for pid in self._processes() if b"CoarseGrainedExecutor" in _command(pid)]

    def kill_executor(self, sig: int = signal.SIGKILL) -> int:
        """Kill one executor as the kernel's out-of-memory killer would; return its process id."""
        victim = wait_for(self.executors, "an executor to kill")[0]
        os.kill(victim, sig)
        return victim

    def add_worker(self, number: int) -> None:
        """Let another node join, and wait until the master knows it."""
        _start_worker(self, number)
        self.wait_for_workers(number + 1)

    def lose_worker(self, number: int) -> None:
        """Kill a node with all that runs on it: the worker, its executors, their Python."""
        folder = str(self.directory / f"worker-{number}").encode()
        for pid in self._processes():
            with contextlib.suppress(OSError):
                place = os.fsencode(Path(f"/proc/{pid}/cwd").resolve())
                if folder in _command(pid) or place.startswith(folder):
                    os.kill(pid, signal.SIGKILL)

    def wait_for_workers(self, count: int) -> None:
        """Wait until so many have come, whatever has become of them."""
        log = self.directory / "master.log"
        wait_for(lambda: log.read_text().count("Registering worker") >= count, "workers", 120)

    @contextlib.contextmanager
    def session(self, **settings: str) -> Iterator[SparkSession]:
        """Start a session on this cluster. It takes the place of any other in this process."""
        from pyspark.sql import SparkSession

        # Only one context at a time; and its JVM is to be ours, which other tests go on using.
        embedded_session(LocalOptions(slots=1, class_archive=False)).stop()
        python = os.environ.get("PYSPARK_PYTHON")
        os.environ["PYSPARK_PYTHON"] = sys.executable
        try:
            builder = SparkSession.builder.master(self.url).appName("geneva-tests")
            for name, value in (self._settings() | settings).items():
                builder = builder.config(name, value)
            with unchanged_interrupt_handler():  # of the tests that follow
                spark = builder.getOrCreate()
            spark.sparkContext.pythonExec = sys.executable
        finally:
            if python is None:
                del os.environ["PYSPARK_PYTHON"]
            else:
                os.environ["PYSPARK_PYTHON"] = python
        try:
            cores = self.workers * self.cores
            wait_for(lambda: spark.sparkContext.defaultParallelism == cores, "every executor")
            yield spark
        finally:
            spark.stop()

    def _settings(self) -> dict[str, str]:
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraJavaOptions": QUICK_JVM,
            "spark.executor.extraJavaOptions": QUICK_JVM,
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.local.dir": str(self.directory / "driver"),
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
        }
        if self.gpus:
            settings["spark.executor.resource.gpu.amount"] = str(self.gpus)
        return settings

    def _processes(self) -> list[int]:
        """Return every process that works in the cluster's folder, Python workers included."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cwd").resolve().is_relative_to(
                    self.directory
                ):
                    found.append(int(entry.name))
        return found


@contextlib.contextmanager
def running_cluster(workers: int = 2, cores: int = 1, gpus: int = 0) -> Iterator[Cluster]:
    """Start a master and its workers, each with ``cores`` cores and ``gpus`` pretended GPUs."""
    if sys.platform != "linux":
        pytest.skip("the test cluster looks for its processes in /proc")
    directory = Path(tempfile.mkdtemp(prefix="geneva-cluster-")).resolve()
    cluster = Cluster(
        f"spark://127.0.0.1:{_free_port()}", directory, workers=workers, cores=cores, gpus=gpus
    )
    try:
        port = cluster.url.rpartition(":")[2]
        _spark_class(cluster, "master", MASTER, [*_address(1), "--port", port])
        _wait_for_port(int(port))
        for number in range(workers):
            _start_worker(cluster, number)
        cluster.wait_for_workers(workers)
        yield cluster
    finally:
        _kill(cluster)
        shutil.rmtree(directory, ignore_errors=True)


def run_script(code: str, cwd: Path, **extra: str) -> subprocess.Popen[str]:
    """Start a Python process in a folder and a temporary folder of its own."""
    (cwd / "tmp").mkdir(exist_ok=True)
    environ = {**os.environ, "TMPDIR": str(cwd / "tmp"), "XDG_CACHE_HOME": str(cwd / "cache")}
    head = (
        "import os, sys, time\n"
        "from geneva.spark.embedded.settings import LocalOptions\n"
        "from geneva.spark.runner import SparkRunner\n"
        "from geneva.spark.sessions import embedded_session\n"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", head + textwrap.dedent(code)],
        cwd=cwd,
        env={**environ, **extra},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def submit_environment() -> dict[str, str]:
    """What spark-submit of the installed pyspark needs to know."""
    own = {
        "SPARK_HOME": str(HOME),
        "JAVA_HOME": str(find_java().path),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    return {**os.environ, **own}


@contextlib.contextmanager
def connect_server(master: str, folder: Path, *options: str) -> Iterator[str]:
    """Run a Connect server on a master; give its address."""
    port, main = _free_port(), "org.apache.spark.sql.connect.service.SparkConnectServer"
    own = ("--conf", f"spark.connect.grpc.binding.port={port}", *QUIET, *options)
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [SUBMIT, "--class", main, "--master", master, *own, "spark-internal"],
            env=submit_environment(),
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: b"server started" in (folder / "server.log").read_bytes(), "it", 180)
        _wait_for_port(port)
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def processes_in(folder: Path) -> list[str]:
    """Return the JVMs and workers whose command or environment names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                alive = "Z" not in (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if alive and os.fsencode(folder) in text:
                found.append(text.split(b"\0")[0].decode())
    return found


def wait_for(condition, what: str, seconds: float = 30.0):  # type: ignore[no-untyped-def]
    """Return the condition's value once it is true; fail the test when it takes too long."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)
    return value


def _address(host: int) -> list[str]:
    """Each node is a host of its own: Spark runs no copy of a task beside the task itself."""
    return ["--host", f"127.0.0.{host}", "--webui-port", "0"]


def _start_worker(cluster: Cluster, number: int) -> None:
    name = f"worker-{number}"
    folder = str(cluster.directory / name)
    size = ["--cores", str(cluster.cores), "--memory", "1g", "--work-dir", folder]
    _spark_class(cluster, name, WORKER, [*_address(number + 1), *size, cluster.url])


def _spark_class(cluster: Cluster, name: str, main: str, arguments: list[str]) -> None:
    """Start one of Spark's daemons, in a process group and a folder of the cluster's."""
    environ = {
        **os.environ,
        "SPARK_HOME": str(HOME),
        "JAVA_HOME": str(find_java().path),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": f"{QUICK_JVM} -Dlog4j2.level=INFO",
        "SPARK_LOG_LEVEL": "INFO",
        "SPARK_WORKER_OPTS": _gpu_options(cluster) if main == WORKER else "",
        "SPARK_LOCAL_DIRS": str(cluster.directory / "local"),
    }
    with (cluster.directory / f"{name}.log").open("wb") as log:
        subprocess.Popen(
            [str(HOME / "bin" / "spark-class"), main, *arguments],
            cwd=cluster.directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ).returncode = 0  # ended by process id, in _kill: nobody waits for it


def _gpu_options(cluster: Cluster) -> str:
    """Return what makes a worker believe that it has GPUs."""
    if not cluster.gpus:
        return ""
    script = cluster.directory / "gpus.sh"
    found = {"name": "gpu", "addresses": [str(number) for number in range(cluster.gpus)]}
    script.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    script.chmod(0o755)
    return (
        f"-Dspark.worker.resource.gpu.amount={cluster.gpus} "
        f"-Dspark.worker.resource.gpu.discoveryScript={script}"
    )


def _kill(cluster: Cluster) -> None:
    """End every process of the cluster, by its id, until none is left."""
    deadline = time.monotonic() + 20
    while (alive := cluster._processes()) and time.monotonic() < deadline:
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in alive:
            with contextlib.suppress(OSError):  # not all of them are children of ours
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int) -> None:
    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(answers, "the master")

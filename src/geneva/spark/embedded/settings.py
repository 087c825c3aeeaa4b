"""How the Spark that Geneva starts by itself is set up: one machine, quiet, and cheap to start.

All that it writes is in one private folder, which is gone when its JVM is, and the JVM is gone
when Python is. No pyspark here: ``geneva.spark.sessions`` does the starting.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geneva.errors import SparkUnavailableError
from geneva.spark.embedded.java import supervised

APP_NAME = "geneva"
LOG_NAME = "spark.log"
PYSPARK_CONTEXT = "pyspark.core.context"
"""The module that the interrupt handler of a context is of."""
START_LIMIT_SECONDS = 120
ATTEMPTS = 4
"""How often a task may fail before its job does; plain ``local[N]`` never tries again."""

# A socket's path has to fit into sun_path: 104 bytes on macOS, 108 on Linux, with the NUL.
# Spark adds "/.<uuid>.sock" to the folder.
_LONGEST_SOCKET_FOLDER = 103 - len("/.") - 36 - len(".sock")


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How to start the embedded Spark, where the defaults don't fit.

    ``slots``: tasks at once (None: the cores this process may use). ``memory_mb``: heap of the
    JVM, which only schedules; Python workers come on top. ``class_archive``: use, and after
    the first run make, a file of preloaded classes in the user's cache folder (150 MB).
    ``jvm_flags``: flags for the JVM on top of ours. ``ui``: serve Spark's own web pages, on this
    machine only.
    """

    slots: int | None = None
    memory_mb: int = 1024
    class_archive: bool = True
    jvm_flags: tuple[str, ...] = ()
    ui: bool = False


def available_cores() -> int:
    """Return how many cores this process may use: its affinity, and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(cores, _container_cores(Path("/sys/fs/cgroup"), cores)))


def _container_cores(cgroup: Path, otherwise: int) -> int:
    """Return the CPU quota of a container (cgroup v2, then v1), rounded up."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()[:2]
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        return -(-int(quota) // int(period)) if int(quota) > 0 else otherwise
    except (OSError, ValueError):  # "max", or no cgroups here
        return otherwise


_ALLOCATOR = {"MIMALLOC_PURGE_DELAY": "1000"}
"""Arrow's memory is given back to the system after a second, not after 10 ms: results come and go
more often than that, and copying 1.5 MB into pages that were given back takes twice as long."""
WORKER_DAEMON = "geneva.spark.worker_daemon"
"""The module that Python workers are forked from: it has imported what they need."""
TASK_SETTINGS = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Our plans are one row per task: compiling Java for them costs 0.2 s and saves nothing."""
QUERY_SETTINGS = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
}
"""Spark's own values, for data frames over tables."""


def local_settings(directory: Path, options: LocalOptions) -> dict[str, str]:
    """Return the Spark settings of an embedded session that keeps its files in ``directory``."""
    sockets = os.name == "posix" and _fits_a_socket(directory)
    return {
        "spark.master": f"local[{options.slots or available_cores()},{ATTEMPTS}]",
        "spark.app.name": APP_NAME,
        "spark.driver.memory": f"{options.memory_mb}m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": str(options.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": (directory / "warehouse").as_uri(),
        "spark.pyspark.python": sys.executable,
        # A unix socket saves 25 ms per task over TCP.
        "spark.python.unix.domain.socket.enabled": str(sockets).lower(),
        "spark.python.unix.domain.socket.dir": str(directory),
        # Each job of ours is a pool: fair among jobs, first come first served within one, so
        # that its early commit groups finish early.
        "spark.scheduler.mode": "FAIR",
        # A Python worker can't be interrupted, so waiting before killing it wins nothing.
        "spark.python.task.killTimeout": "500ms",
        # A segfault then says in which line of Python it happened.
        "spark.python.worker.faulthandler.enabled": "true",
        **({"spark.python.daemon.module": WORKER_DAEMON} if _is_found_by_others() else {}),
        # Columns of times of day can be read without it, and then not even be counted.
        "spark.sql.timeType.enabled": "true",
        **TASK_SETTINGS,
    }


def _is_found_by_others() -> bool:
    """Whether a new Python process would import this package, and not only this one."""
    here = Path(__file__).resolve().parents[3]
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    places = [*installed, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    places += [line for folder in {*installed} for line in _path_lines(Path(folder))]
    return any(_is_folder(place, here) for place in places)


def _is_folder(place: str, folder: Path) -> bool:
    with suppress(OSError, ValueError):  # a line may be anything
        return bool(place) and Path(place).resolve() == folder
    return False


def _path_lines(folder: Path) -> list[str]:
    """Folders that Python adds to its path for one of packages: those of editable installs."""
    lines: list[str] = []
    for file in folder.glob("*.pth"):
        with suppress(OSError):  # as Python itself does
            lines += file.read_text(errors="replace").splitlines()
    return [line.strip() for line in lines]


def jvm_options(directory: Path, options: LocalOptions) -> list[str]:
    """Return the JVM's flags: quick to start, since all it does is schedule."""
    log4j = Path(__file__).with_name("log4j2.properties")
    return [
        *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData"),
        f"-Xmx{options.memory_mb}m",
        f"-Dlog4j2.configurationFile={log4j.as_uri()}",
        f"-Djava.io.tmpdir={directory}",
        f"-Dderby.system.home={directory}",
        *options.jvm_flags,
    ]


def private_directory() -> Path:
    """Make a folder of this user's alone, with a path short enough for a socket if possible."""
    made = Path(tempfile.mkdtemp(prefix="geneva-"))
    if os.name != "posix" or _fits_a_socket(made):
        return made
    with contextlib.suppress(OSError):
        shorter = tempfile.mkdtemp(prefix="geneva-", dir="/tmp")
        made.rmdir()
        return Path(shorter)
    return made


def _fits_a_socket(directory: Path) -> bool:
    return len(os.fsencode(directory)) <= _LONGEST_SOCKET_FOLDER


# ---------------------------------------------------------------------------- the JVM's process


@dataclass(frozen=True, slots=True)
class Jvm:
    """A running JVM that waits for Python's calls at a port of this machine."""

    process: subprocess.Popen[bytes]
    port: int
    secret: str


def start_jvm(command: Sequence[str], directory: Path) -> Jvm:
    """Start the JVM of ``gateway_command``, with its output in a log, and wait until it answers."""
    answer, log = directory / "gateway", directory / LOG_NAME
    environ = {
        **_ALLOCATOR,
        **os.environ,
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(answer),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONHASHSEED": "0",
        "SPARK_CONNECT_MODE": "0",
    }
    # SPARK_HOME stays unset: workers then import the installed pyspark, which is compiled, and
    # not the copy in pyspark.zip, which each of them would compile again. Half a second saved.
    with log.open("wb") as output:
        process = subprocess.Popen(
            supervised(command, directory),
            stdin=subprocess.PIPE,  # the JVM leaves when this pipe breaks, even after kill -9
            stdout=output,
            stderr=output,
            env=environ,
            start_new_session=True,  # Ctrl-C in a terminal is for us: we cancel, then leave
        )
    try:
        trouble = _wait_for(answer, process)
        if trouble is not None:
            raise SparkUnavailableError(f"Spark's JVM {trouble}: {command[0]}{tail(log)}")
        atexit.register(_remove_leftover, process, directory)
        port, length = struct.unpack_from("!ii", content := answer.read_bytes())
        return Jvm(process, port, content[8 : 8 + length].decode())
    except BaseException:  # Ctrl-C, too
        end_jvm(process)
        raise


def end_jvm(process: subprocess.Popen[bytes]) -> None:
    """Kill a JVM, with the shell and the workers that are of its group, and wait for its end."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):  # it may end by itself just now
            os.killpg(process.pid, signal.SIGKILL) if is_own_jvm(process) else process.kill()
    process.communicate()  # closes the pipe, and waits


def is_own_jvm(process: subprocess.Popen[bytes]) -> bool:
    """Whether we have started a JVM: each of ours leads a group of processes, a user's does not."""
    with suppress(ProcessLookupError):
        return os.name == "posix" and os.getpgid(process.pid) == process.pid
    return False


def _wait_for(answer: Path, process: subprocess.Popen[bytes]) -> str | None:
    """Wait until the JVM has written where it listens; return what happened instead, if so."""
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while not answer.is_file():
        if process.poll() is not None:
            return "ended before it was ready"
        if time.monotonic() > deadline:
            return f"was not ready after {START_LIMIT_SECONDS} s"
        time.sleep(0.01)
    return None


def _remove_leftover(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Remove the folder of a JVM that was killed together with the shell that would do it."""
    if process.poll() is not None:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def unchanged_interrupt_handler() -> Iterator[None]:
    """Keep the user's Ctrl-C while Geneva starts the session of this process.

    pyspark's handler cancels every job, and outlives its context; Geneva cancels its own jobs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if getattr(handler, "__module__", None) == PYSPARK_CONTEXT:
        # Of a context that has ended: it has no jobs to cancel, and what was there before is lost.
        handler = signal.default_int_handler
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


def tail(log: Path, lines: int = 12) -> str:
    """Return the end of a log, to be put into an error message, without the JVM's stack frames."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    said = [line for line in text.splitlines() if line.strip() and not line.startswith("\tat ")]
    return "\nIts log ends with:\n  " + "\n  ".join(said[-lines:]) if said else ""

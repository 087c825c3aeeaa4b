"""Python processes of a test's own: started in a folder, found by it, killed with their children.

::

    process = start_script(folder, "print(1)")
    ...
    kill(process)
    wait_for(lambda: not processes_in(folder), "the JVM to leave", 10)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from geneva.spark.embedded.settings import WORKER_DAEMON

RUN_LIMIT_SECONDS = 120


def start_script(folder: Path, code: str, **environ: str) -> subprocess.Popen[str]:
    """Run Python code with its home, temporary and working folders inside `folder`."""
    for name in ("home", "tmp", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(code)],
        cwd=folder / "work",
        env={
            **os.environ,
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "home" / "cache"),
            "TMPDIR": str(folder / "tmp"),
            "GENEVA_JVM_ARCHIVE": "0",
            "GENEVA_LOCAL_SLOTS": "2",
            **environ,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = RUN_LIMIT_SECONDS) -> str:
    """Wait for the end and return what was printed; the process must have said nothing else."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    assert process.returncode == 0, errors
    assert errors == ""
    return output


def kill(process: subprocess.Popen[str]) -> str:
    """Kill the process as the kernel would, without a chance to clean up; return its stderr."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    return process.communicate()[1]


def processes_in(folder: Path) -> dict[int, str]:
    """Return the live processes whose command or environment names the folder, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and os.fsencode(folder) in text:
            found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:200]
    return found


def workers_in(folder: Path) -> list[int]:
    """Return Spark's Python workers: the live forks of the process that they are forked from."""
    names = ("pyspark.daemon", WORKER_DAEMON)
    found = processes_in(folder).items()
    daemons = {pid for pid, text in found if any(name in text for name in names)}
    return [pid for pid in daemons if _parent_of(pid) in daemons]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has left since
        return 0


@contextlib.contextmanager
def nothing_left_in(folder: Path) -> Iterator[None]:
    """Whatever happens inside, end the processes that were started in the folder."""
    try:
        yield
    finally:
        for pid in processes_in(folder):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

"""What can only be timed in a process of its own: a start, and that something was not started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

_TIMED = """
import json, sys, time
import geneva
uri, table, column = sys.argv[1:]
table = geneva.connect(uri).open_table(table)
started = time.perf_counter()
result = table.backfill(column) if column else table.refresh()
seconds = time.perf_counter() - started
spark = "pyspark" in sys.modules
print(json.dumps({"seconds": seconds, "rows": result.rows_computed, "spark": spark}))
"""
_ARCHIVE_LIMIT_SECONDS = 240


def time_nothing(db: Path, table: str, column: str) -> float:
    """A backfill of a column that is up to date; it must not have touched Spark."""
    answer = _run(db, table, column, {})
    if answer["spark"] or answer["rows"]:
        raise AssertionError(f"there was nothing to do, and yet: {answer}")
    return answer["seconds"]


def time_refresh(db: Path, view: str) -> float:
    """A refresh of a view that is up to date; it must not have touched Spark."""
    return time_nothing(db, view, "")


def time_cold(db: Path, table: str, column: str, environment: dict[str, str]) -> float:
    """A first backfill in a new process, the start of Spark included."""
    answer = _run(db, table, column, environment)
    if not answer["spark"] or not answer["rows"]:
        raise AssertionError(f"Spark should have computed something: {answer}")
    return answer["seconds"]


def time_command(*arguments: str | Path) -> float:
    """A command of the shell, from its start to its end."""
    command = [sys.executable, "-m", "geneva.cli", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - started


def without_archive() -> dict[str, str]:
    """The environment of a start without a class archive."""
    return {"GENEVA_JVM_ARCHIVE": "0"}


def with_archive(folder: Path) -> dict[str, str]:
    """The environment of a start with a class archive, made first, in a cache of our own."""
    environment = {"GENEVA_JVM_ARCHIVE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    # Whoever runs Spark without an archive has one made when the process ends.
    maker = "from geneva.spark.sessions import embedded_session; embedded_session()"
    subprocess.run([sys.executable, "-c", maker], check=True, env={**os.environ, **environment})
    classes = folder / "cache" / "geneva" / "classes"
    deadline = time.monotonic() + _ARCHIVE_LIMIT_SECONDS
    while not list(classes.glob("*.jsa")):
        if list(classes.glob("*.failed")) or time.monotonic() > deadline:
            raise RuntimeError("no class archive could be made with this Java")
        time.sleep(0.5)
    return environment


def _run(db: Path, table: str, column: str, environment: dict[str, str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", _TIMED, str(db), table, column],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a timed process failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])

"""`geneva doctor`: is everything here that a job needs, and does one run?"""

from __future__ import annotations

import platform
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

import geneva
from geneva.cli.arguments import AsJson, StorageOption
from geneva.cli.database import connect, read_storage_options
from geneva.cli.terminal import FAILED, MISSING_DEPENDENCY, emit, out, readable
from geneva.cli.version import PACKAGES, installed
from geneva.errors import GenevaError, MissingDependencyError
from geneva.render.plain import plain
from geneva.render.text import count

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)
_STATES = {"ok": ("ok  ", "green"), "failed": ("FAIL", "bold red"), "skipped": ("--  ", "dim")}


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its outcome."""

    name: str
    state: str
    """ok, failed or skipped."""
    detail: str
    missing: bool = False
    """Whether it failed because something is not installed."""


def doctor(
    db: Annotated[
        str | None,
        typer.Argument(
            metavar="[DB]",
            help="A database to read from and write to; nothing of yours is touched.",
            show_default=False,
        ),
    ] = None,
    *,
    no_spark: Annotated[
        bool,
        typer.Option("--no-spark", help="Leave out the test job, which starts Spark.", metavar=""),
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Check this machine: Python, Java, Spark, the libraries, the storage, and a small job."""
    done: list[Check] = []
    for check in _checks(db, storage_option, no_spark=no_spark):
        done.append(check)
        if not as_json:
            _show(check)
    failed = [check for check in done if check.state == "failed"]
    if as_json:
        emit({"ok": not failed, "checks": [asdict(check) for check in done]})
    if failed:
        raise typer.Exit(MISSING_DEPENDENCY if any(c.missing for c in failed) else FAILED)


def _checks(db: str | None, storage_option: list[str] | None, *, no_spark: bool) -> Iterator[Check]:
    yield Check("geneva", "ok", geneva.__version__)
    yield _checked("python", _python)
    for package in PACKAGES:
        yield _checked(package, lambda package=package: _package(package))  # type: ignore[misc]
    java = _checked("java", _java)
    yield java
    if db is None:
        yield Check("storage", "skipped", "no database was given")
    else:
        yield _checked("storage", lambda: _storage(db, storage_option))
    if no_spark:
        yield Check("test job", "skipped", "--no-spark")
    elif java.state != "ok":
        yield Check("test job", "skipped", "there is no Java")
    else:
        yield _checked("test job", _test_job)


def _checked(name: str, run: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", run())
    except Exception as error:  # noqa: BLE001  whatever it is, it is what the doctor found
        missing = isinstance(error, MissingDependencyError)
        text = readable(error)
        if not isinstance(error, GenevaError):
            text = f"{type(error).__name__}: {text}"
        return Check(name, "failed", text, missing)


def _python() -> str:
    here = platform.python_version_tuple()
    if not _OLDEST_PYTHON <= (int(here[0]), int(here[1])) <= _NEWEST_PYTHON:
        raise MissingDependencyError(
            f"This is Python {platform.python_version()}; Geneva runs on 3.11 to 3.13."
        )
    return platform.python_version()


def _package(name: str) -> str:
    found = installed(name)
    if found is None:
        raise MissingDependencyError(f"{name} is not installed: pip install {name}")
    return found


def _java() -> str:
    from geneva.spark.embedded.java import find_java

    java = find_java()
    return f"{java.version} ({java.path})"


def _storage(db: str, storage_option: list[str] | None) -> str:
    from geneva.model.tables import Secrets
    from geneva.storage.jobs.heartbeats import JobSignals

    connection = connect(db, storage_option)
    tables = len(connection.table_names())
    signals = JobSignals(connection.uri, Secrets(read_storage_options(storage_option)))
    name = f"doctor-{uuid.uuid4().hex}"
    try:
        signals.beat(name, {})
        if signals.last_beat(name) is None:
            raise OSError("what was written can't be read again")
    finally:
        signals.clear(name)
    return f"read and written; {count(tables, 'table')}"


def _test_job() -> str:
    @geneva.udf
    def plus_one(id: int) -> int:
        return id + 1

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="geneva-doctor-") as folder:
        settings = _quiet()
        table = geneva.connect(folder, settings=settings).create_table("t", [{"id": 1}, {"id": 2}])
        table.add_columns({"more": plus_one})
        table.backfill("more")
        first = time.monotonic() - started
        table.add([{"id": 3}])
        result = table.backfill("more")
        values = sorted(table.to_arrow()["more"].to_pylist())
    if values != [2, 3, 4]:
        raise OSError(f"the job computed {values} in place of [2, 3, 4]")
    second = result.progress.seconds
    return f"Spark and a first job in {first:.1f} s, a second job in {second:.1f} s"


def _quiet() -> Any:
    from dataclasses import replace

    from geneva.config import Settings

    return replace(Settings.from_environment(), progress=False)


def _show(check: Check) -> None:
    from rich.text import Text

    label, style = _STATES[check.state]
    first, *rest = check.detail.splitlines() or [""]
    out.print(Text.assemble((label, style), f"  {check.name:<9} {plain(first)}"), soft_wrap=True)
    for line in rest:
        out.print(Text(f"{'':16}{plain(line)}"), soft_wrap=True)

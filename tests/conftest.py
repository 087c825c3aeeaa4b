"""Fixtures every test may use."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from support import Calls, Prototypes, RunnerFactory, connect

if TYPE_CHECKING:
    from geneva.connection import Connection
    from workshop import Workshop

# A shell's background jobs ignore Ctrl-C, and so would everything that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is collected stays: the collector need not look through it again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# Both: no deadline, because a first call may import Lance or start a session.
settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long",
    max_examples=1_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("GENEVA_HYPOTHESIS_PROFILE", "ci"))


QUICK_ON_SPARK = (
    *("test_kinds.py", "test_async.py", "test_policy.py"),
    *("test_views.py", "test_table_functions.py", "test_damaged_fragments.py"),
    "test_backfill.py::TestEveryRowOnce",
    "test_backfill.py::TestEmptyTables",
)
"""Whose tests run on Spark in the quick round as well: one of each kind of behaviour."""

OLDER_FORMATS = ("2.0", "2.1")
"""Of Lance's files. Most of what is tested in each of them is quick in the newest alone."""

QUICK_IN_EVERY_FORMAT = ("test_types.py::test_all", "test_types.py::test_what")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave other runs on Spark and in older formats to the slow round; begin with those on Spark.

    Those that come first are one process's of `pytest -n 2`: just one has to start a JVM.
    """
    for item in items:
        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec is not None else {}
        name = item.nodeid.rpartition("/")[2]
        if params.get("runner") == "spark" and not name.startswith(QUICK_ON_SPARK):
            item.add_marker(pytest.mark.slow)
        is_older = str(params.get("version")) in OLDER_FORMATS
        if is_older and not name.startswith(QUICK_IN_EVERY_FORMAT):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)


@pytest.fixture(params=["in_process", pytest.param("spark", marks=pytest.mark.spark)])
def runner(request: pytest.FixtureRequest) -> RunnerFactory | None:
    """What carries out the tasks: threads of this process, or (None) geneva's embedded Spark."""
    from geneva.execution.runner import InProcessRunner

    return InProcessRunner if request.param == "in_process" else None


@pytest.fixture
def db(tmp_path: Path, runner: RunnerFactory | None) -> Connection:
    """An empty database of this test's own; the test runs once on each runner."""
    return connect(tmp_path / "db", runner)


@pytest.fixture
def local_db(tmp_path: Path) -> Connection:
    """An empty database that runs in this process: for what no runner can make a difference to."""
    from geneva.execution.runner import InProcessRunner

    return connect(tmp_path / "db", InProcessRunner)


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    """An empty log of UDF calls, which any process can write to."""
    return Calls(str(tmp_path / "calls"))


@pytest.fixture(scope="module")
def prototypes(tmp_path_factory: pytest.TempPathFactory) -> Prototypes:
    """Databases that the tests of a module begin with."""
    return Prototypes(tmp_path_factory.mktemp("prototypes"))


@pytest.fixture(scope="session")
def slow_rounds() -> int:
    """How often a slow test repeats itself (GENEVA_SLOW_ROUNDS; .ci/run asks for 1)."""
    return int(os.environ.get("GENEVA_SLOW_ROUNDS", "5"))


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    """A folder on the import path, for modules that the test writes."""
    from workshop import Workshop

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Workshop(tmp_path)
    yield made
    made.forget()

"""What a worker process takes over from the driver: environment, import path, level of logging.

Worker processes serve one job after the other, and one function after the other. Each finds what
is meant for it, and nothing that was meant for those before it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from geneva.config import set_variable
from geneva.execution.worker.output import keep_output_in
from geneva.model.tables import Secrets
from geneva.process_memory import keep_memory
from geneva.udf.declare import UDF
from geneva.udf.job_modules import enter_modules, job_modules
from geneva.udf.shipped_modules import activate, is_shipped, put_back


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the driver tells its workers about the process that they work for."""

    env: Secrets = field(default_factory=Secrets)
    """Environment variables to set. Any of them may be a key."""
    unset: tuple[str, ...] = ()
    """Environment variables that the driver no longer has."""
    path: tuple[str, ...] = ()
    """Where to import from, for workers on the driver's machine; empty: from where they would."""
    modules: tuple[str, ...] = ()
    """Archives of modules that Spark brings for this job, by their names there."""
    log_level: int = logging.WARNING
    output_folder: str | None = None
    """Where to keep what functions print until it is reported; None: where a worker would."""
    pipe_folder: str | None = None
    """Where the pipe is by which the driver sees it at once; None: where a worker would look."""


class _Environment:
    """The variables that were set in this process, and what it had before."""

    def __init__(self) -> None:
        self._own: dict[str, str | None] = {}
        self._values: dict[str, str | None] = {}
        self.of_job: dict[str, str | None] = {}

    @property
    def key(self) -> frozenset[tuple[str, str | None]]:
        """The variables that were set, to compare them with those of another time."""
        return frozenset(self._values.items())

    def set(self, values: Mapping[str, str | None]) -> None:
        if values == self._values:
            return
        for name, value in self._own.items():
            set_variable(name, value)
        self._values = dict(values)
        self._own = {name: os.environ.get(name) for name in values}
        for name, value in values.items():
            set_variable(name, value)


_environment = _Environment()


def enter_job(surroundings: Surroundings) -> None:
    """Make this worker process like the driver of the job that it works for next."""
    keep_memory()
    unset = dict.fromkeys(surroundings.unset)
    _environment.of_job = {**unset, **surroundings.env}
    _environment.set(_environment.of_job)
    if surroundings.path:
        others = [entry for entry in sys.path if entry not in surroundings.path]
        sys.path[:] = [*surroundings.path, *others]
    enter_modules(surroundings.modules, _environment.key)
    keep_output_in(surroundings.output_folder, surroundings.pipe_folder)
    # To stderr, which is kept with the job; nothing where the user's code has set logging up.
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(surroundings.log_level)


def variables_of_job() -> Mapping[str, str | None]:
    """The variables of the job, or trial, that this process works for; None: it is to lack one."""
    return _environment.of_job


def enter_function(udf: UDF) -> None:
    """Give this process what a function came with: its modules, and its variables.

    A variable that the function came with has that value, whatever the job sets.
    """
    _environment.set({**_environment.of_job, **udf.variables})
    activate(udf.modules, (job_modules(), _environment.key))


@contextmanager
def trying_functions(env: Mapping[str, str]) -> Iterator[None]:
    """Let functions be entered in the user's own process, with the variables of its jobs.

    Afterwards it has the variables and the modules that it had before.
    """
    before, _environment.of_job = _environment.of_job, dict(env)
    # Without those of a function that another thread tries.
    loaded = {name: m for name, m in list(sys.modules.items()) if not is_shipped(name)}
    try:
        yield
    finally:
        _environment.of_job = before
        _environment.set(before)
        activate(())
        put_back({name: m for name, m in loaded.items() if sys.modules.get(name) is not m})

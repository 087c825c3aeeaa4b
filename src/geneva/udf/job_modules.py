"""Modules that a job's contexts name: a worker imports them for this job, and for no other.

Worker processes serve one job after the other, and two jobs may name modules that are called the
same. What was imported from a job's archives is put aside when another job begins, and is there
again when one with the same archives and variables does: a module may read some when it is
imported.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TypeAlias

from geneva.udf.shipped_modules import put_back, take_out

_Key: TypeAlias = tuple[tuple[str, ...], Hashable]
"""The names of a job's archives, and the variables that it sets."""


class _JobModules:
    """The archives of the job that is running, and what was imported from those of others."""

    def __init__(self) -> None:
        self.key: _Key = ((), None)
        self._places: tuple[str, ...] = ()
        self._loaded: dict[_Key, dict[str, types.ModuleType]] = {}

    def enter(self, key: _Key) -> None:
        former = self._places
        if key != self.key:
            places = tuple(_place_of(name) for name in key[0])
            self._loaded[self.key] = take_out(_imported_from(former))
            self._places, self.key = places, key
            put_back(self._loaded.pop(key, {}))
        if former or self._places:
            others = [entry for entry in sys.path if entry not in former + self._places]
            sys.path[:] = [*self._places, *others]


def _place_of(name: str) -> str:
    """Where Spark has put a file: in a folder of its own, from which workers import, too."""
    for folder in sys.path:
        place = Path(folder, name)
        if place.is_file():
            return str(place)
    raise FileNotFoundError(f"Spark has not brought {name}, which has modules of a job, here.")


def _imported_from(places: Iterable[str]) -> list[str]:
    """Return the names of the modules that were imported from archives."""
    roots = tuple(place + os.sep for place in places)
    return [
        name
        for name, module in list(sys.modules.items())
        if roots and any((file + os.sep).startswith(roots) for file in _files_of(module))
    ]


def _files_of(module: types.ModuleType) -> list[str]:
    """Return where a module came from; one of a package without an `__init__` has folders only."""
    facts = getattr(module, "__dict__", {})
    file = facts.get("__file__")
    if isinstance(file, str):
        return [file]
    return [place for place in facts.get("__path__", ()) if isinstance(place, str)]


_modules = _JobModules()


def enter_modules(names: tuple[str, ...], variables: Hashable = None) -> None:
    """Let this process import from a job's archives, before anything else, and from no others.

    A job that sets other variables imports them anew.
    """
    _modules.enter((names, variables))


def job_modules() -> tuple[str, ...]:
    """The archives of the job that is running: what was loaded for others is not for this one."""
    return _modules.key[0]

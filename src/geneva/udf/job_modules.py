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
import zipfile
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from geneva.udf.shipped_modules import PutAside, is_shipped, put_back, take_out

_Key: TypeAlias = tuple[tuple[str, ...], Hashable]
"""The names of a job's archives, and the variables that it sets."""
_MAX_PUT_ASIDE = 8


class _JobModules:
    """The archives of the job that is running, and what was imported from those of others.

    As long as a job's archives are there, the names of the modules in them are the job's. What
    else is loaded under these names is put aside meanwhile.
    """

    def __init__(self) -> None:
        self.key: _Key = ((), None)
        self._places: tuple[str, ...] = ()
        self.loaded = PutAside(_MAX_PUT_ASIDE)
        self._from_elsewhere: dict[str, types.ModuleType] = {}
        self._first: frozenset[str] | None = None
        """What was loaded before the first job: a new worker has loaded that as well."""

    def enter(self, key: _Key) -> None:
        former = self._places
        self._first = self._first or frozenset(sys.modules)
        if key != self.key:
            places = tuple(_place_of(name) for name in key[0])
            self.loaded.keep(self.key, self._taken_out())
            put_back(self._from_elsewhere)
            self._places, self.key = places, key
            self._from_elsewhere = self._taken_out()
            self.loaded.bring_back(key)
        if former or self._places:
            others = [entry for entry in sys.path if entry not in former + self._places]
            sys.path[:] = [*self._places, *others]

    def _taken_out(self) -> dict[str, types.ModuleType]:
        """Take out what is loaded under the names of modules in the archives, or from there."""
        if not self._places:
            return {}
        names = frozenset().union(*map(_modules_in, self._places)) - (self._first or frozenset())
        prefixes = tuple(f"{name}." for name in names)
        roots = tuple(place + os.sep for place in self._places)
        return take_out(
            [
                name
                for name, module in list(sys.modules.items())
                if f"{name}.".startswith(prefixes) or _is_from(module, roots)
                if not is_shipped(name)
            ]
        )


@lru_cache(maxsize=64)
def _modules_in(archive: str) -> frozenset[str]:
    """Return the modules in an archive, without those in packages that are there as well.

    Of packages without an `__init__` others may have parts: there each module is one.
    """
    with zipfile.ZipFile(archive) as opened:
        entries = [PurePosixPath(name) for name in opened.namelist()]
    files = [entry for entry in entries if entry.suffix in {".py", ".pyc"}]
    packages = {file.parent for file in files if file.stem == "__init__"}
    modules = packages | {file.with_suffix("") for file in files if file.stem != "__init__"}
    return frozenset(
        ".".join(module.parts)
        for module in modules
        if module.parts and packages.isdisjoint(module.parents[:-1])
    )


def _place_of(name: str) -> str:
    """Where Spark has put a file: in a folder of its own, from which workers import, too."""
    for folder in sys.path:
        place = Path(folder, name)
        if place.is_file():
            return str(place)
    raise FileNotFoundError(f"Spark has not brought {name}, which has modules of a job, here.")


def _is_from(module: types.ModuleType, roots: tuple[str, ...]) -> bool:
    """Whether a module was imported from archives, and from nowhere else."""
    files = _files_of(module)
    return bool(files) and all((file + os.sep).startswith(roots) for file in files)


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


def forget_modules() -> None:
    """Let go of what was imported for other jobs than the one that is running."""
    _modules.loaded.forget()

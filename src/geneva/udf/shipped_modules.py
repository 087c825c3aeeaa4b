"""Modules of the user's that a function imports in its body: they travel with the function.

A worker may have another working directory, another path, or be on another machine. It imports
these modules from what was shipped, also where it finds a file of the same name: the function's
version is that of the files that were there when it was declared.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from geneva.udf.identity.imported_files import ImportedFile, read_module, readable_source


@dataclass(frozen=True, slots=True)
class ShippedModule:
    """A module as a file: its source, or its bytecode where that is all there is."""

    name: str
    content: str | bytes | types.ModuleType
    """Source; marshalled bytecode; or a module that has no file, with all that is in it."""
    origin: str | None
    """Where it was. On the same machine its data files are still beside it."""
    search_path: tuple[str, ...] | None
    """Of a package: where modules that were not shipped may be."""


def shipped(files: dict[str, ImportedFile]) -> tuple[ShippedModule, ...]:
    """Return what has to travel of the modules that a function imports."""
    found = []
    for name, file in sorted(files.items()):
        if isinstance(file.content, types.ModuleType):
            found.append(ShippedModule(name, file.content, None, None))
        elif file.spec is not None:
            content: str | bytes | None = readable_source(file.spec)
            if content is None and isinstance(file.content, types.CodeType):
                content = marshal.dumps(file.content)
            if content is not None:
                places = file.spec.submodule_search_locations
                path = None if places is None else tuple(places)
                found.append(ShippedModule(name, content, file.spec.origin, path))
    # Packages without an `__init__` have no file.
    names = {module.name for module in found}
    above = {name[:at] for name in names for at, sign in enumerate(name) if sign == "."}
    return (*(ShippedModule(name, "", None, ()) for name in sorted(above - names)), *found)


# ------------------------------------------------------------------------------- on the worker


class _Loader(importlib.abc.InspectLoader):
    """Makes a module of what was shipped."""

    def __init__(self, module: ShippedModule) -> None:
        self._module = module

    def is_package(self, fullname: str) -> bool:
        return self._module.search_path is not None

    def get_source(self, fullname: str) -> str | None:  # also for tracebacks
        content = self._module.content
        return content if isinstance(content, str) else None

    def get_code(self, fullname: str) -> types.CodeType | None:
        content = self._module.content
        if isinstance(content, bytes):
            code: types.CodeType = marshal.loads(content)  # noqa: S302 - the function that it came with was loaded
            return code
        file = self._module.origin or f"<{fullname}>"
        return compile(str(content), file, "exec", dont_inherit=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        content = self._module.content
        return content if isinstance(content, types.ModuleType) else None

    def exec_module(self, module: types.ModuleType) -> None:
        if isinstance(self._module.content, types.ModuleType):
            return
        if self._module.origin is not None:
            module.__file__ = self._module.origin
        super().exec_module(module)


_Key: TypeAlias = tuple[tuple[ShippedModule, ...], Hashable]
"""What was shipped, and what the process was like when it was imported."""
_MAX_PUT_ASIDE = 32


class PutAside:
    """Loaded modules that are not for what runs now: the latest few sets of them."""

    def __init__(self, most: int) -> None:
        """Keep at most so many sets."""
        self._most = most
        self._sets: OrderedDict[Hashable, dict[str, types.ModuleType]] = OrderedDict()

    def keep(self, key: Hashable, modules: dict[str, types.ModuleType]) -> None:
        """Keep modules that were taken out."""
        if modules:
            self._sets[key] = modules
        while len(self._sets) > self._most:
            self._sets.popitem(last=False)

    def bring_back(self, key: Hashable) -> None:
        """Have the modules loaded that were kept under a key, if there are any."""
        put_back(self._sets.pop(key, {}))

    def forget(self) -> None:
        """Let go of all of them: of the models, too, that they hold."""
        self._sets.clear()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the function that is running, before any other finder does."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._modules: dict[str, ShippedModule] = {}
        self._asked: _Key = ((), None)
        self._active: _Key = ((), None)
        self._loaded = PutAside(_MAX_PUT_ASIDE)
        """Modules that were imported for other functions of this process."""

    def activate(self, modules: tuple[ShippedModule, ...], surroundings: Hashable) -> None:
        with self._lock:
            if (modules, surroundings) == self._asked:
                return
            self._asked = (modules, surroundings)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
            self._loaded.keep(self._active, _taken_out(self._active[0]))
            self._modules = {}
            self._active = ((), None) if _are_loaded(modules) else self._asked
            active, _ = self._active
            _taken_out(active)
            self._modules = {module.name: module for module in active}
            self._loaded.bring_back(self._active)

    def forget(self) -> None:
        with self._lock:
            self.activate((), None)
            self._loaded.forget()

    def has(self, name: str) -> bool:
        module = self._modules.get(name)
        return module is not None and not _is_shared(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        module = self._modules.get(fullname)
        if module is None:
            return None
        if _is_shared(module):
            own = importlib.machinery.PathFinder.find_spec(fullname, path)
            if own is not None and own.submodule_search_locations is not None:
                # Other parts of the package may be installed here.
                places = (*own.submodule_search_locations, *(module.search_path or ()))
                own.submodule_search_locations = list(dict.fromkeys(places))
                return own
        is_package = module.search_path is not None
        spec = importlib.util.spec_from_loader(
            fullname, _Loader(module), origin=module.origin, is_package=is_package
        )
        if spec is not None and module.search_path is not None:
            spec.submodule_search_locations = list(module.search_path)
        return spec


def _is_shared(module: ShippedModule) -> bool:
    """Whether it is a package without an `__init__`, which others may have parts of."""
    return module.search_path is not None and module.origin is None


def _taken_out(modules: Iterable[ShippedModule]) -> dict[str, types.ModuleType]:
    return take_out(module.name for module in modules if not _is_shared(module))


def take_out(names: Iterable[str]) -> dict[str, types.ModuleType]:
    """Forget the loaded modules of these names, and return them."""
    found = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    for name in found:
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(child, None)
    return found


def put_back(modules: Mapping[str, types.ModuleType]) -> None:
    """Have modules loaded that were taken out."""
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)


def _are_loaded(modules: Iterable[ShippedModule]) -> bool:
    """Whether this process has loaded such modules by itself, and they are the same.

    So it is where the function was declared: nothing is taken from under the user's feet there.
    """
    is_any_loaded = any(module.name in sys.modules for module in modules if not _is_shared(module))
    return is_any_loaded and all(_is_same_here(module) for module in modules)


def _is_same_here(module: ShippedModule) -> bool:
    here = read_module(module.name)
    return here is not None and shipped({module.name: here}) == (module,)


_finder = _Finder()


def activate(modules: tuple[ShippedModule, ...], surroundings: Hashable = None) -> None:
    """Let this process import what was shipped with the function that runs next.

    Functions may have come with different modules of the same name: each gets its own. So does a
    function that runs in other surroundings than before: what a module does when it is imported
    (it reads a variable, imports others) may be different there.
    """
    _finder.activate(modules, surroundings)


def is_shipped(name: str) -> bool:
    """Whether a module came with the function that is running, or ran last."""
    return _finder.has(name)


def forget_shipped() -> None:
    """Let go of all modules that came with functions: what runs next imports its own anew."""
    _finder.forget()

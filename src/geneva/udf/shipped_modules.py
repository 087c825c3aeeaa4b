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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the function that is running, before any other finder does."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._modules: dict[str, ShippedModule] = {}
        self._asked: tuple[ShippedModule, ...] = ()
        self._active: tuple[ShippedModule, ...] = ()
        self._loaded: dict[tuple[ShippedModule, ...], dict[str, types.ModuleType]] = {}
        """Modules that were imported for other functions of this process, by what was shipped."""

    def activate(self, modules: tuple[ShippedModule, ...]) -> None:
        with self._lock:
            if modules == self._asked:
                return
            self._asked = modules
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
            self._loaded[self._active] = _taken_out(self._active)
            self._active = () if _are_loaded(modules) else modules
            _taken_out(self._active)
            self._modules = {module.name: module for module in self._active}
            for name, module in self._loaded.pop(self._active, {}).items():
                _put(name, module)

    def forget(self) -> None:
        with self._lock:
            self.activate(())
            self._loaded.clear()

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
    """Forget the loaded modules of these names, and return them."""
    names = [module.name for module in modules if not _is_shared(module)]
    found = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    for name in found:
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(child, None)
    return found


def _put(name: str, module: types.ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


def _are_loaded(modules: Iterable[ShippedModule]) -> bool:
    """Whether this process has loaded such modules by itself, and they are the same.

    So it is where the function was declared: nothing is taken from under the user's feet there.
    """
    is_any_loaded = any(module.name in sys.modules for module in modules)
    return is_any_loaded and all(_is_same_here(module) for module in modules)


def _is_same_here(module: ShippedModule) -> bool:
    here = read_module(module.name)
    return here is not None and shipped({module.name: here}) == (module,)


_finder = _Finder()


def activate(modules: tuple[ShippedModule, ...]) -> None:
    """Let this process import what was shipped with the function that runs next.

    Functions may have come with different modules of the same name: each gets its own.
    """
    _finder.activate(modules)


def forget_modules() -> None:
    """Let modules that were shipped with functions be imported anew, with nothing kept in them."""
    _finder.forget()

"""Whose code is it: which modules and files are the user's own, and which were installed."""

from __future__ import annotations

import builtins
import csv
import functools
import hashlib
import inspect
import json
import os
import pathlib
import sys
import sysconfig
import types
from typing import Any, TypeAlias

_INSTALLED = tuple(
    os.path.realpath(sysconfig.get_paths()[key]) + os.sep
    for key in ("stdlib", "platstdlib", "purelib", "platlib")
)


# Often on the path without being installed, and never the user's.
NOT_THE_USERS = frozenset({"geneva", "pyspark", "py4j"})


def is_user_module(name: str | None) -> bool:
    """Say whether a module is the user's own: __main__, or one that nobody installed."""
    if name is None:
        return False
    root = name.partition(".")[0]
    if root in NOT_THE_USERS or root in sys.stdlib_module_names:
        return False
    # Installed packages put odd things into sys.modules, so the root package is asked as well.
    for known in (root, name):
        file = module_facts(known).get("__file__")
        if isinstance(file, str) and known != "__main__" and not is_user_file(file):
            return False
    return True  # also a notebook, exec, or a module made by hand


def module_facts(name: str) -> dict[str, Any]:
    """Return the namespace of a loaded module; empty if there is none of that name."""
    module = sys.modules.get(name)
    # Not getattr: asking a lazy module for an attribute would import it.
    return object.__getattribute__(module, "__dict__") if is_module(module) else {}


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Say whether a file is source code outside everything that was installed."""
    if file.endswith(_COMPILED) or _is_installed_file(file):
        return False
    return compiled_package(file) is None


_COMPILED = (".so", ".pyd", ".dylib")


@functools.lru_cache(maxsize=4096)
def _is_installed_file(file: str) -> bool:
    """Say whether a file belongs to Python, or to what pip or conda has installed."""
    path = os.path.realpath(file)
    packaged = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
    if packaged or path.startswith(_INSTALLED):
        return True
    root = _root_of(path)
    if root is None:
        return False
    return os.path.relpath(path, root).replace(os.sep, "/") in _files_of_distributions(root)


def _root_of(path: str) -> str | None:
    """Return the entry of `sys.path` that a file is imported from."""
    roots = [os.path.realpath(entry) for entry in sys.path if entry]
    return max((r for r in roots if path.startswith(r + os.sep)), key=len, default=None)


@functools.lru_cache(maxsize=4096)
def compiled_package(file: str) -> str | None:
    """Return the folder of the package that a file is in, if that has compiled parts.

    Only of a package that nobody installed: a copy of pandas on PYTHONPATH, a project with a
    Cython module. It can't be embedded in a pickle. Workers import it, and it counts as a whole.
    """
    path = pathlib.Path(os.path.realpath(file))
    root = None if _is_installed_file(file) else _root_of(str(path))
    if root is None:
        return None
    top = pathlib.Path(root, path.relative_to(root).parts[0])
    return str(top) if _has_compiled_code(top) else None


@functools.lru_cache(maxsize=256)
def _has_compiled_code(folder: pathlib.Path, depth: int = 2) -> bool:
    if not (folder / "__init__.py").is_file():
        return False
    entries = list(folder.iterdir())
    if any(entry.name.endswith(_COMPILED) for entry in entries):
        return True
    return depth > 1 and any(_has_compiled_code(entry, depth - 1) for entry in entries)


def compiled_package_digest(file: str) -> str | None:
    """Return a digest of all the code in the compiled package that a file is in; None: in none."""
    folder = compiled_package(file)
    if folder is None:
        return None
    found = []
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if path.name.endswith((".py", *_COMPILED)):
            facts = path.stat()
            found.append((path, facts.st_size, facts.st_mtime_ns))
    return _digest_of_files(folder, tuple(found))


@functools.lru_cache(maxsize=64)
def _digest_of_files(folder: str, files: tuple[tuple[pathlib.Path, int, int], ...]) -> str:
    """Return the digest of files. Sizes and times are only there so that a change is noticed."""
    digest = hashlib.sha256()
    for path, _, _ in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=256)
def _files_of_distributions(root: str) -> frozenset[str]:
    """Return the files that pip put into a folder or archive (`--target`, PYTHONPATH, a zip)."""
    from importlib.metadata import distributions  # slow to import, and rarely needed

    files: set[str] = set()
    for distribution in distributions(path=[root]):
        record = distribution.read_text("RECORD")  # a project's own egg-info has none
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if record and not origin.get("dir_info", {}).get("editable"):
            files.update(row[0] for row in csv.reader(record.splitlines()) if row)
    return frozenset(files)


def is_user_code(code: types.CodeType, namespace: dict[str, Any]) -> bool:
    """Say whether a function's code is the user's, by its file or, without one, its globals."""
    if not code.co_filename.startswith("<"):
        return is_user_file(code.co_filename)
    name = namespace.get("__name__")
    if not isinstance(name, str) or module_facts(name) is not namespace:
        return not code.co_filename.startswith("<frozen ")  # made by exec
    return is_user_module(name)


def is_found_by_name(value: Any) -> bool:
    """Say whether a function or class is what its module has under its name."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in (getattr(value, "__qualname__", None) or "?").split("."):
        found = getattr(found, part, None)
    return found is value


def is_installed(value: Any) -> bool:
    """Say whether a function or class is an installed one, known by its name.

    Its `__module__` alone does not say so: `functools.wraps` copies that, and `exec` leaves none.
    """
    return not is_user_module(getattr(value, "__module__", None)) and is_found_by_name(value)


def is_user_class(cls: type) -> bool:
    """Say whether a class is the user's own, also where `exec` left it without a module."""
    if is_user_module(cls.__module__):
        return True
    # A class statement leaves a `__module__` behind, which most classes of C code don't have.
    if "__module__" not in vars(cls) or is_found_by_name(cls):
        return False
    functions = [value for value in vars(cls).values() if isinstance(value, types.FunctionType)]
    is_from_exec = cls.__module__ == "builtins"
    return is_from_exec or any(is_user_code(f.__code__, f.__globals__) for f in functions)


def is_function_of_module(value: Any) -> bool:
    """Say whether a bound method is what an installed module offers as a function.

    Such as `random.choice`: the generator behind it is the module's own affair.
    """
    if not isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return False
    module = type(value.__self__).__module__
    return not is_user_module(module) and module_facts(module).get(value.__name__) == value


def is_installed_routine(value: Any) -> bool:
    """Say whether this is a function of a C extension (Cython, pybind11), of whatever type."""
    return inspect.isroutine(value) and is_installed(value)


def qualified_name(value: Any) -> str:
    """Return a name that all Python versions agree on: `_io.open` is `builtins.open`."""
    given = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    name = str(given or type(value).__qualname__)
    if getattr(builtins, name, None) is value:
        return f"builtins.{name}"
    root, *inner = str(getattr(value, "__module__", None)).split(".")
    if root.lstrip("_") not in sys.stdlib_module_names:
        return ".".join([root, *inner, name])
    public = [part for part in inner if not part.startswith("_")]  # pathlib._local is pathlib
    return ".".join([root.lstrip("_"), *public, name])


def user_modules() -> list[types.ModuleType]:
    """Return the loaded modules that are the user's own (without __main__)."""
    theirs = []
    for name, module in list(sys.modules.items()):
        origin = _origin(name)
        if _NOT_THE_USERS_MODULES.get(name) == origin:
            continue
        if origin[0] == name and name != "__main__" and is_user_module(name):
            theirs.append(module)
        else:
            _NOT_THE_USERS_MODULES[name] = origin
    return theirs


_Origin: TypeAlias = tuple[str | None, str | None, str | None]

_NOT_THE_USERS_MODULES: dict[str, _Origin] = {}
"""What was found not to be the user's, by name, and where it came from then.

Not the module itself: a reload gives it another file, and it would live on for being listed here.
"""


def _origin(name: str) -> _Origin:
    """What a loaded module calls itself, its file, and that of its root package."""
    own, root = module_facts(name), module_facts(name.partition(".")[0])
    found = own.get("__name__"), own.get("__file__"), root.get("__file__")
    called, file, root_file = (fact if isinstance(fact, str) else None for fact in found)
    return called, file, root_file


def is_module(value: Any) -> bool:
    """Say whether a value is a module, and does not only say so, as what cffi makes does."""
    return issubclass(type(value), types.ModuleType)

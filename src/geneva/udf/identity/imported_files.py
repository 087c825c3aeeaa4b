"""The user's files that a function imports in its body: what a worker will import.

They are read, not imported: importing runs code, and they may not be loaded yet. They count as
they are on disk (or in an archive) now, also if this process has loaded them before: a worker
imports what is there.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

from geneva.udf.identity.bytecode import all_codes, plain_steps
from geneva.udf.identity.user_code import NOT_THE_USERS, is_user_file, is_user_module

Content = types.CodeType | types.ModuleType | str
"""A file's code, or its text where that can't be compiled; or a loaded module without a file."""


def imported_files(
    code: types.CodeType, package: str, texts: Collection[str] = ()
) -> dict[str, Content]:
    """Return, by name, the user's modules that some code imports, and those they import.

    `texts` are strings that the code knows besides its own: `import_module(NAME)`.
    """
    found: dict[str, Content] = {}
    seen: set[str] = set()
    waiting = list(_imports(code, package, texts))
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        spec = _found_spec(name)
        if spec is None and name in sys.modules and is_user_module(name):
            found[name] = sys.modules[name]
        content = _content(spec) if spec is not None and _is_users(spec) else None
        if spec is None or content is None:
            continue
        found[name] = content
        if isinstance(content, types.CodeType):
            is_package = spec.submodule_search_locations is not None
            waiting += _imports(content, name if is_package else spec.parent or "")
    return found


def package_of(namespace: Mapping[str, Any]) -> str:
    """Return the package that relative imports in a module start from."""
    package = namespace.get("__package__")
    if isinstance(package, str):
        return package
    name = str(namespace.get("__name__", ""))
    return name if "__path__" in namespace else name.rpartition(".")[0]


def _imports(code: types.CodeType, package: str, texts: Collection[str] = ()) -> Iterator[str]:
    """Yield the full names of what may be modules in the import statements of some code."""
    for inner in all_codes(code):
        steps = plain_steps(inner)
        for at, step in enumerate(steps):
            if step.op == "IMPORT_NAME":
                level, names = (s.arg for s in steps[at - 2 : at])
                yield from _module_names(step.arg, level, names or (), package)
        if _BY_STRING & {step.arg for step in steps if _is_name(step.arg)}:
            # Which string is the name of a module is not known: all may be.
            for text in (*inner.co_consts, *texts):
                if _is_name(text):
                    yield from _parents(text)


# What takes the name of a module as a string; `modules` is that of sys.
_BY_STRING = frozenset({"import_module", "__import__", "modules", "run_module"})


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))


def _module_names(name: str, level: int, names: tuple[str, ...], package: str) -> Iterator[str]:
    """Yield the module of one import statement, its parents, and the names as submodules."""
    try:
        base = importlib.util.resolve_name("." * level + name, package) if level else name
    except ImportError:  # relative, and not in a package: it will fail when it is run
        return
    yield from _parents(base)
    for inner in names:
        if inner == "*":
            spec = _found_spec(base)
            for _, child, _ in pkgutil.iter_modules(_search_path(spec)):
                yield f"{base}.{child}"
        else:
            yield f"{base}.{inner}"


def _parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _found_spec(name: str) -> ModuleSpec | None:
    """Find a module without importing its parents, as importlib.util.find_spec would."""
    spec: ModuleSpec | None = None
    for part in _parents(name):
        if part.partition(".")[0] in sys.stdlib_module_names | NOT_THE_USERS:
            return None
        path = None if spec is None else _search_path(spec)
        if spec is not None and path is None:
            return None  # not a package
        spec = _spec_on(part, path)
        if spec is None:
            return None
    return spec


def _search_path(spec: ModuleSpec | None) -> list[str] | None:
    locations = None if spec is None else spec.submodule_search_locations
    return None if locations is None else list(locations)


def _spec_on(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(name, path) if find is not None else None
        except Exception:  # noqa: BLE001 - a finder of the user's may raise anything
            continue
        if isinstance(spec, ModuleSpec):
            return spec
    return None


def _is_users(spec: ModuleSpec) -> bool:
    if spec.origin is None:
        return spec.submodule_search_locations is not None  # a package without an __init__
    return spec.origin not in ("built-in", "frozen") and is_user_file(spec.origin)


def _content(spec: ModuleSpec) -> Content | None:
    """Return a module's code, compiled from what is there now; None if it has none."""
    get_source = getattr(spec.loader, "get_source", None)
    get_code = getattr(spec.loader, "get_code", None)
    try:
        source = get_source(spec.name) if get_source is not None else None
        if source is None:
            code = get_code(spec.name) if get_code is not None else None
            return code if isinstance(code, types.CodeType) else None
    except (ImportError, OSError, UnicodeDecodeError):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns when it is imported
            return compile(source, "<module>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return str(source)

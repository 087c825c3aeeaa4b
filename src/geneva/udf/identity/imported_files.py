"""The user's files that a function imports in its body: what a worker will import.

They are read, not imported: importing runs code, and they may not be loaded yet. They count as
they are on disk (or in an archive) now, also if this process has loaded them before: a worker
imports what is there.
"""

from __future__ import annotations

import importlib.util
import itertools
import pkgutil
import sys
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

from geneva.udf.identity.bytecode import all_codes, plain_steps
from geneva.udf.identity.references import closure_of, defaults_of, globals_of
from geneva.udf.identity.user_code import (
    NOT_THE_USERS,
    compiled_package_digest,
    is_user_file,
    is_user_module,
)

Content = types.CodeType | types.ModuleType | str
"""A file's code, or its text where that can't be compiled; a loaded module without a file; the
digest of a compiled package."""


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A module of the user's that can be imported: what is in it, and what that imports."""

    content: Content
    imports: tuple[str, ...]
    spec: ModuleSpec | None
    """Where it was found; None for a module that is loaded and has no file."""


class ImportedFiles:
    """The user's modules as they can be imported now. Each is read once, for one walk over code."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self._known: dict[str, ImportedFile | None] = {}

    def of(self, function: types.FunctionType) -> dict[str, ImportedFile]:
        """Return, by name, the user's modules that a function imports, and those they import."""
        # Strings that the code knows besides its own may be names: `import_module(NAME)`.
        known = (closure_of(function), globals_of(function).items(), defaults_of(function).items())
        texts = {value for _, value in itertools.chain(*known) if isinstance(value, str)}
        found: dict[str, ImportedFile] = {}
        seen: set[str] = set()
        waiting = list(_imports(function.__code__, package_of(function.__globals__), texts))
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name not in self._known:
                self._known[name] = read_module(name)
            file = self._known[name]
            if file is not None:
                found[name] = file
                waiting += file.imports
        return found


def read_module(name: str) -> ImportedFile | None:
    """Return a module of the user's as it can be imported now; None if it is not the user's."""
    spec = _found_spec(name)
    if spec is None:
        is_loaded = name in sys.modules and is_user_module(name)
        return ImportedFile(sys.modules[name], (), None) if is_loaded else None
    whole = None if spec.origin is None else compiled_package_digest(spec.origin)
    if whole is not None:
        return ImportedFile(whole, (), None)
    content = _content(spec) if _is_users(spec) else None
    if content is None:
        return None
    imports: tuple[str, ...] = ()
    if isinstance(content, types.CodeType):
        is_package = spec.submodule_search_locations is not None
        imports = tuple(_imports(content, name if is_package else spec.parent or ""))
    return ImportedFile(content, imports, spec)


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
        # In a module of more than 256 names an instruction has others before it, for its argument.
        steps = [step for step in plain_steps(inner) if step.op != "EXTENDED_ARG"]
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
    source = readable_source(spec)
    if source is None:
        get_code = getattr(spec.loader, "get_code", None)
        try:
            code = get_code(spec.name) if get_code is not None else None
        except (ImportError, OSError, UnicodeDecodeError):
            return None
        return code if isinstance(code, types.CodeType) else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns when it is imported
            return compile(source, "<module>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return source


def readable_source(spec: ModuleSpec) -> str | None:
    """Return the text of a module's source as it is now; None if there is none to be had."""
    get_source = getattr(spec.loader, "get_source", None)
    try:
        source = get_source(spec.name) if get_source is not None else None
    except (ImportError, OSError, UnicodeDecodeError):
        return None
    return None if source is None else str(source)

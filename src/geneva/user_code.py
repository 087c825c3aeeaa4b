"""The user's own code: which modules are theirs, and what a function of theirs refers to."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

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
    # Installed packages put odd things into sys.modules, so the root package is asked first.
    for known in (root, name):
        # Not getattr: asking a lazy module for an attribute would import it.
        facts = (
            object.__getattribute__(sys.modules.get(known), "__dict__")
            if known in sys.modules
            else {}
        )
        file = facts.get("__file__")
        if isinstance(file, str):
            return known == "__main__" or is_user_file(file)
    return True  # a notebook, exec, or a module made by hand


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Say whether a source file lies outside everything that was installed."""
    path = os.path.realpath(file)
    packaged = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
    return not packaged and not path.startswith(_INSTALLED)


def user_modules() -> list[types.ModuleType]:
    """Return the loaded modules that are the user's own (without __main__)."""
    loaded: list[tuple[str, Any]] = list(sys.modules.items())
    return [
        module
        for name, module in loaded
        if isinstance(module, types.ModuleType)
        and name != "__main__"
        and module.__name__ == name
        and is_user_module(name)
    ]


def references(target: Any) -> dict[str, Any]:
    """Return everything a function or object brings along, by a name that can be shown."""
    if hasattr(type(target), "__geneva_meaning__"):
        meaning = target.__geneva_meaning__()
        if not isinstance(meaning, tuple):
            return {type(meaning).__name__: meaning}
        cls, args, kwargs = meaning
        return {f"class '{cls.__name__}'": cls, **_numbered("constructor argument", args), **kwargs}
    if isinstance(target, functools.partial):
        return {"partial": target.func, **_numbered("argument", target.args), **target.keywords}
    if isinstance(target, types.MethodType):
        return {"self": target.__self__, **references(target.__func__)}
    if isinstance(target, types.FunctionType):
        parts = {f"closure variable '{n}'": v for n, v in closure_of(target)}
        parts |= {f"global '{n}'": v for n, v in globals_of(target).items() if not is_module(v)}
        return parts | _numbered("default", target.__defaults__ or ())
    if isinstance(target, (list, tuple, set, frozenset)):
        return _numbered("item", target)
    if isinstance(target, dict):
        return {f"item {k!r}": v for k, v in target.items()}
    if inspect.isclass(target):
        methods = {n: v for n, v in vars(target).items() if not n.startswith("__") or callable(v)}
        found = {f"attribute '{n}'": _unwrapped(v) for n, v in methods.items()}
        return found | _numbered("base", target.__bases__)
    state = getattr(target, "__dict__", None)
    return {f"attribute '{n}'": v for n, v in state.items()} if isinstance(state, dict) else {}


def modules_used(target: Any) -> dict[str, set[str]]:
    """Return, for the user's modules that are reached from a function, the attributes it takes.

    A module that is used as a whole (`getattr(helpers, name)`) is left out: nobody knows.
    """
    taken: dict[str, set[str]] = {}
    as_a_whole: set[str] = set()
    seen: dict[int, Any] = {}  # keeps the objects: ids are reused
    waiting = [target]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not _is_followed(value):
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            for owner, attribute in _module_accesses(value):
                if attribute is None:
                    as_a_whole.add(owner)
                else:
                    taken.setdefault(owner, set()).add(attribute)
        waiting.extend(references(value).values())
    return {name: attributes for name, attributes in taken.items() if name not in as_a_whole}


def _module_accesses(function: types.FunctionType) -> Iterator[tuple[str, str | None]]:
    """Yield (module, attribute) for the user's modules; None for a module taken as a whole."""
    for chain in _global_chains(function.__code__):
        value: Any = function.__globals__.get(chain[0])
        for attribute in (*chain[1:], None):
            if not isinstance(value, types.ModuleType) or not is_user_module(value.__name__):
                break
            yield value.__name__, attribute
            value = getattr(value, attribute, None) if attribute else None


def _is_followed(value: Any) -> bool:
    """Say whether a value can lead to the user's code."""
    containers = (list, tuple, set, frozenset, dict, functools.partial, types.MethodType)
    if isinstance(value, containers) or hasattr(type(value), "__geneva_meaning__"):
        return True
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return is_user_module(owner.__module__)


def _unwrapped(member: Any) -> Any:
    """Return the function inside a static method, class method or property."""
    member = getattr(member, "fget", None) or getattr(member, "func", None) or member
    return getattr(member, "__func__", member)


def is_module(value: Any) -> bool:
    """Say whether a value is a module."""
    return isinstance(value, types.ModuleType)


def _numbered(label: str, values: Iterable[Any]) -> dict[str, Any]:
    return {f"{label} {number}": value for number, value in enumerate(values)}


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function closed over; not what it assigns itself, for that is state."""
    cells = function.__closure__ or ()
    assigned = names_in(function.__code__, "STORE_DEREF", "DELETE_DEREF")
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        if name in assigned:
            continue
        try:
            yield name, cell.cell_contents
        except ValueError:
            yield name, Missing


class Missing:
    """A name that has no value (yet)."""


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals a function refers to; of the user's modules, the attributes it takes."""
    found = {}
    assigned = names_in(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL")
    for chain in _global_chains(function.__code__):
        if chain[0] in _MODULE_FACTS or chain[0] in assigned:
            continue
        value = function.__globals__.get(chain[0], getattr(builtins, chain[0], Missing))
        used = 1
        while used < len(chain) and is_module(value) and is_user_module(value.__name__):
            value = getattr(value, chain[used], Missing)
            used += 1
        found[".".join(chain[:used])] = value
    return found


# Where code lives, not what it does. (Every class body reads __name__.)
_MODULE_FACTS = frozenset(
    {"__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__builtins__"}
)


def names_in(code: types.CodeType, *operations: str) -> set[str]:
    """Return the names that some operations in a function, or in functions inside it, refer to."""
    return {
        instruction.argval
        for inner in (code, *nested_codes(code))
        for instruction in dis.get_instructions(inner)
        if instruction.opname in operations
    }


def _global_chains(code: types.CodeType) -> set[tuple[str, ...]]:
    """Return the dotted names that start at a global: `helpers.clean(x)` -> (helpers, clean)."""
    chains: set[tuple[str, ...]] = set()
    for inner in (code, *nested_codes(code)):
        chain: tuple[str, ...] = ()
        for instruction in dis.get_instructions(inner):
            if instruction.opname in _LOADS_GLOBAL:
                chains.add(chain)
                chain = (instruction.argval,)
            elif chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = (*chain, instruction.argval)
            elif instruction.opname not in ("EXTENDED_ARG", "CACHE", "PUSH_NULL"):
                chains.add(chain)
                chain = ()
    return chains - {()}


_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of every function inside a function, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from nested_codes(constant)

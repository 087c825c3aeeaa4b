"""What a function refers to: its closure, globals, defaults and modules."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geneva.udf.identity.bytecode import all_codes, plain_steps
from geneva.udf.identity.user_code import is_module, is_user_code, is_user_module


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


@dataclass(frozen=True, slots=True)
class ModulesUsed:
    """What functions take from the user's modules."""

    attributes: Mapping[str, set[str]]
    """Of modules by name: what is taken from them by its name (`helpers.clean`)."""
    as_a_whole: set[str]
    """Modules of which nobody knows what is taken (`getattr(helpers, name)`): not in the above."""


def modules_used(*targets: Any, as_a_whole: Iterable[str] = ()) -> ModulesUsed:
    """Return what is taken from the user's modules that are reached from functions."""
    taken: dict[str, set[str]] = {}
    whole = {*as_a_whole}
    seen: dict[int, Any] = {}  # keeps the objects: ids are reused
    waiting = [*targets]
    while waiting:
        value = waiting.pop()
        if is_module(value):
            whole.add(value.__name__)
        if id(value) in seen or not _leads_to_user_code(value):
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            for owner, attribute in _module_accesses(value):
                if attribute is None:
                    whole.add(owner)
                else:
                    taken.setdefault(owner, set()).add(attribute)
        waiting.extend(references(value).values())
    attributes = {name: names for name, names in taken.items() if name not in whole}
    return ModulesUsed(attributes, whole)


def _module_accesses(function: types.FunctionType) -> Iterator[tuple[str, str | None]]:
    """Yield (module, attribute) for the user's modules; None for a module taken as a whole."""
    for chain in _global_chains(function.__code__):
        value: Any = function.__globals__.get(chain[0])
        for attribute in (*chain[1:], None):
            if not _is_user_module_object(value):
                break
            yield value.__name__, attribute
            value = getattr(value, attribute, None) if attribute else None


def _is_user_module_object(value: Any) -> bool:
    return is_module(value) and is_user_module(value.__name__)


def _leads_to_user_code(value: Any) -> bool:
    """Say whether a value can lead to the user's code."""
    containers = (list, tuple, set, frozenset, dict, functools.partial, types.MethodType)
    if isinstance(value, containers) or hasattr(type(value), "__geneva_meaning__"):
        return True
    if isinstance(value, types.FunctionType) and is_user_code(value.__code__, value.__globals__):
        return True  # whatever it says of itself: `functools.wraps` gives it another `__module__`
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return is_user_module(owner.__module__)


def _unwrapped(member: Any) -> Any:
    """Return the function inside a static method, class method or property."""
    member = getattr(member, "fget", None) or getattr(member, "func", None) or member
    return getattr(member, "__func__", member)


def _numbered(label: str, values: Iterable[Any]) -> dict[str, Any]:
    return {f"{label} {number}": value for number, value in enumerate(values)}


class Missing:
    """A name that has no value (yet)."""


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function closed over; not what it assigns itself, for that is state."""
    assigned = assigned_free_names(function.__code__)
    for name, cell in cells_of(function):
        if name in assigned:
            continue
        try:
            yield name, cell.cell_contents
        except ValueError:
            yield name, Missing


def cells_of(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    """Yield the cells of a function's closure by name."""
    yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def assigned_free_names(code: types.CodeType) -> set[str]:
    """Return the names of the function around this one that the code assigns (`nonlocal`)."""
    assigned = {
        step.arg
        for step in plain_steps(code)
        if step.op in ("STORE", "DELETE") and step.arg in code.co_freevars
    }
    # A function inside may have a variable of its own by the same name: that is not free in it.
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            assigned |= assigned_free_names(inner) & set(code.co_freevars)
    return assigned


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals a function refers to; of the user's modules, the attributes it takes."""
    found = {}
    assigned = assigned_globals(function.__code__)
    for chain in _global_chains(function.__code__):
        if chain[0] in _MODULE_FACTS or chain[0] in assigned:
            continue
        value, used = follow_chain(function, chain)
        found[".".join(chain[:used])] = value
    return found


def follow_chain(function: types.FunctionType, chain: Sequence[str]) -> tuple[Any, int]:
    """Return what a dotted name leads to, through the user's modules, and how much of it did."""
    built_in: dict[str, Any] = getattr(function, "__builtins__", {})
    value = function.__globals__.get(chain[0], built_in.get(chain[0], Missing))
    used = 1
    while used < len(chain) and _is_user_module_object(value):
        value = getattr(value, chain[used], Missing)
        used += 1
    return value, used


# Where code lives, not what it does. (Every class body reads __name__.)
_MODULE_FACTS = frozenset(
    {"__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__builtins__"}
)


def assigned_globals(code: types.CodeType) -> set[str]:
    """Return the globals that the code, or code inside it, assigns (`global`)."""
    steps = [step for inner in all_codes(code) for step in plain_steps(inner)]
    return {step.arg for step in steps if step.op in ("STORE_GLOBAL", "DELETE_GLOBAL")}


def what_is_in(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything in a module, without what its own functions assign: that is state."""
    functions = [v for v in namespace.values() if isinstance(v, types.FunctionType)]
    assigned = {name for function in functions for name in assigned_globals(function.__code__)}
    return {
        name: value
        for name, value in namespace.items()
        if name.isidentifier() and not name.startswith("__") and name not in assigned
    }


def own_assigned_attributes(function: types.FunctionType) -> set[str]:
    """Return the attributes of itself that a function assigns (`f.calls = 1` inside f)."""
    return {
        step.arg
        for inner in all_codes(function.__code__)
        for before, step in itertools.pairwise(plain_steps(inner))
        if step.op == "STORE_ATTR" and before.arg == function.__name__
    }


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the defaults by the parameter that has them."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})


def _global_chains(code: types.CodeType) -> set[tuple[str, ...]]:
    """Return the dotted names that start at a global: `helpers.clean(x)` -> (helpers, clean)."""
    chains: set[tuple[str, ...]] = set()
    for inner in all_codes(code):
        chain: tuple[str, ...] = ()
        for step in plain_steps(inner):
            if step.op in LOADS_GLOBAL:
                chains.add(chain)
                chain = (step.arg,)
            elif chain and step.op == "LOAD_ATTR":
                chain = (*chain, step.arg)
            elif step.op not in ("EXTENDED_ARG", "CACHE", "PUSH_NULL"):
                chains.add(chain)
                chain = ()
    return chains - {()}


LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")

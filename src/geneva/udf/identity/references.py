"""What a function refers to: its closure, globals, modules, imports, and the memos it fills."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geneva.udf.identity.bytecode import Step, all_codes, plain_steps
from geneva.udf.identity.user_code import is_module, is_user_module


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
        if is_module(value):
            as_a_whole.add(value.__name__)
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
            if not _is_user_module_object(value):
                break
            yield value.__name__, attribute
            value = getattr(value, attribute, None) if attribute else None


def _is_user_module_object(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and is_user_module(value.__name__)


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


def _numbered(label: str, values: Iterable[Any]) -> dict[str, Any]:
    return {f"{label} {number}": value for number, value in enumerate(values)}


class Missing:
    """A name that has no value (yet)."""


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function closed over; not what it assigns itself, for that is state."""
    assigned = _assigned_free_names(function.__code__)
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


def _assigned_free_names(code: types.CodeType) -> set[str]:
    """Return the names of the function around this one that the code assigns (`nonlocal`)."""
    assigned = {
        step.arg
        for step in plain_steps(code)
        if step.op in ("STORE", "DELETE") and step.arg in code.co_freevars
    }
    # A function inside may have a variable of its own by the same name: that is not free in it.
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            assigned |= _assigned_free_names(inner) & set(code.co_freevars)
    return assigned


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals a function refers to; of the user's modules, the attributes it takes."""
    found = {}
    assigned = assigned_globals(function.__code__)
    for chain in _global_chains(function.__code__):
        if chain[0] in _MODULE_FACTS or chain[0] in assigned:
            continue
        value, used = _followed(function, chain)
        found[".".join(chain[:used])] = value
    return found


def _followed(function: types.FunctionType, chain: Sequence[str]) -> tuple[Any, int]:
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
            if step.op in _LOADS_GLOBAL:
                chains.add(chain)
                chain = (step.arg,)
            elif chain and step.op == "LOAD_ATTR":
                chain = (*chain, step.arg)
            elif step.op not in ("EXTENDED_ARG", "CACHE", "PUSH_NULL"):
                chains.add(chain)
                chain = ()
    return chains - {()}


_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


# -- state: what calls leave behind


@dataclass(slots=True)
class State:
    """What the functions that a UDF calls by name assign or fill: memos, counters, lazy models."""

    names: set[tuple[int, str]] = field(default_factory=set)  # of globals: (id of namespace, name)
    cells: set[int] = field(default_factory=set)  # ids of closure cells
    memos: set[int] = field(default_factory=set)  # ids of containers
    kept: list[Any] = field(default_factory=list)  # keeps the objects: ids are reused

    def is_state(self, function: types.FunctionType, name: str) -> bool:
        """Say whether a name that the function refers to is assigned by one of the functions."""
        return (id(function.__globals__), name) in self.names


def state_behind(target: Any) -> State:
    """Find the state of a UDF: in the functions that it refers to by name, and their `__call__`.

    Not in methods nor in whole modules: these may be what configures it before it is used.
    """
    state = State()
    seen: set[int] = set()
    waiting = [target]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        state.kept.append(value)
        if isinstance(value, types.FunctionType):
            _add_state(state, value)
            waiting += [v for _, v in closure_of(value)]
            waiting += [*globals_of(value).values(), *defaults_of(value).values()]
        else:
            waiting += _called_parts(value)
    return state


def _called_parts(value: Any) -> list[Any]:
    """Return what a callable that is no function, or a container, may call."""
    if hasattr(type(value), "__geneva_meaning__"):
        return [value.__geneva_meaning__()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, functools._lru_cache_wrapper):
        return [value.__wrapped__]
    if type(value) in (list, tuple, dict):
        items = value.values() if type(value) is dict else value
        return [v for v in items if callable(v) or type(v) in (list, tuple, dict)]
    owner = value if isinstance(value, type) else type(value)
    call = inspect.getattr_static(owner, "__call__", None)
    return [call] if isinstance(call, types.FunctionType) else []


def _add_state(state: State, function: types.FunctionType) -> None:
    """Add what one function assigns or fills."""
    code = function.__code__
    state.names |= {(id(function.__globals__), name) for name in assigned_globals(code)}
    cells = dict(cells_of(function))
    state.cells |= {id(cells[name]) for name in _assigned_free_names(code)}
    defaults = defaults_of(function)
    for inner in all_codes(code):
        for root, *attributes in _filled_chains(plain_steps(inner)):
            if root.op in _LOADS_GLOBAL:
                value, used = _followed(function, [root.arg, *attributes])
                if used != 1 + len(attributes):
                    continue
            elif attributes:
                continue
            elif root.arg in cells and root.arg in inner.co_freevars:
                value = _contents(cells[root.arg])
            else:
                value = defaults.get(root.arg) if inner is code else None
            if isinstance(value, (dict, list, set, collections.deque)):
                state.memos.add(id(value))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return Missing


_FILLING = frozenset({"setdefault", "update", "append", "appendleft", "extend", "insert", "add"})


def _filled_chains(steps: list[Step]) -> Iterator[tuple[Any, ...]]:
    """Yield (first step, attribute, ...) of the containers that the code puts something into."""
    for at, step in enumerate(steps):
        is_method = step.op == "LOAD_ATTR" and step.arg in _FILLING
        # `memo[k] += 1` copies the container and the key first, `memo[k] = v` has them on top.
        next_ops = [(s.op, s.arg) for s in steps[at : at + 3]]
        adds = next_ops == [("COPY", 2), ("COPY", 2), ("BINARY_SUBSCR", None)]
        end: int | None = at if is_method else None
        if adds or step.op == "STORE_SUBSCR":
            end = _start_of_expression(steps, at)
        chain = None if end is None else _chain_before(steps, end)
        if chain is not None:
            yield chain


def _start_of_expression(steps: list[Step], end: int) -> int | None:
    """Return where the expression begins that ends right before a step; None: it branches."""
    height = 0
    for at in range(end - 1, -1, -1):
        if steps[at].target is not None:
            return None
        height += steps[at].grows[0]
        if height == 1:
            return at
    return None


def _chain_before(steps: list[Step], end: int) -> tuple[Any, ...] | None:
    attributes: list[str] = []
    for step in reversed(steps[:end]):
        if step.op in (*_LOADS_GLOBAL, "LOAD"):
            return (step, *reversed(attributes))
        if step.op != "LOAD_ATTR":
            return None
        attributes.append(step.arg)
    return None

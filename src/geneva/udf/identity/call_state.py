"""What calls of a UDF leave behind in its functions: memos, counters, lazily loaded models."""

from __future__ import annotations

import collections
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from geneva.udf.identity.bytecode import Step, all_codes, plain_steps
from geneva.udf.identity.references import (
    LOADS_GLOBAL,
    Missing,
    assigned_free_names,
    assigned_globals,
    cells_of,
    closure_of,
    defaults_of,
    follow_chain,
    globals_of,
)


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
    state.cells |= {id(cells[name]) for name in assigned_free_names(code)}
    defaults = defaults_of(function)
    for inner in all_codes(code):
        for root, *attributes in _filled_chains(plain_steps(inner)):
            if root.op in LOADS_GLOBAL:
                value, used = follow_chain(function, [root.arg, *attributes])
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
        if step.op in (*LOADS_GLOBAL, "LOAD"):
            return (step, *reversed(attributes))
        if step.op != "LOAD_ATTR":
            return None
        attributes.append(step.arg)
    return None

"""What compiled code does, written the same way for every file, process and Python version.

Bytecode is the only form of a function that is always there and never out of date: a file may
have been edited since it was imported, and `exec`, `python -c` and a prompt leave no source. So a
function counts by its bytecode, brought into a normal form: its instructions, in the spelling
that Python 3.11 to 3.13 share (`bytecode`), become a graph of what follows what and where
an exception goes, in which parts that do the same are merged.

Two functions with the same digest take the same steps in the same order. The converse is not
promised between Python versions: where two compilers differ by more than spelling (`except*`,
`[x async for x in y]`), the same source has one digest per Python version.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from geneva.udf.identity.bytecode import Step, exception_targets, is_inlined, steps_of

Digest = Callable[[Any], bytes]
"""Digests a constant of the code: by what it is, so that all who ask get the same."""


def node_digest(tag: str, *parts: str | bytes) -> bytes:
    """Hash a tagged list of parts; lengths keep ("ab", "c") apart from ("a", "bc")."""
    state = hashlib.blake2b(digest_size=20)
    for part in (tag, *parts):
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


_KIND_FLAGS = (
    inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
) | inspect.CO_ASYNC_GENERATOR


def code_digest(code: types.CodeType, digest: Digest) -> bytes:
    """Digest what the code does: no names of files, no lines, no docstring, no own name."""
    known = _digests.get(id(code))
    if known is not None and known[0]() is code:
        return known[1]
    made = _made_digest(code, digest)
    _digests[id(code)] = (weakref.ref(code, functools.partial(_forget, id(code))), made)
    return made


# Code never changes, so each is digested once. By id: equal code may differ in where its exceptions
# go, which Python 3.11 does not compare.
_digests: dict[int, tuple[weakref.ref[types.CodeType], bytes]] = {}


def _forget(number: int, _: object) -> None:
    _digests.pop(number, None)


def _made_digest(code: types.CodeType, digest: Digest) -> bytes:
    graph = _Graph(digest)
    graph.add(code)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    stars = sum(bool(code.co_flags & f) for f in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    parameters = code.co_varnames[: counts[0] + counts[2] + stars]
    facts = (parameters, code.co_flags & _KIND_FLAGS, counts)
    return node_digest("code", repr(facts), *graph.normal_form())


@dataclass(slots=True)
class _Node:
    """One step in the graph. Places are (number of the code, offset) until they are resolved."""

    op: str
    label: bytes
    next: tuple[Any, ...]
    handler: Any = None


# These can't raise, so that where an exception would go doesn't matter.
_NEVER_RAISE = frozenset(
    {"LOAD_CONST", "POP_TOP", "COPY", "SWAP", "STORE", "PUSH_EXC_INFO", "POP_EXCEPT", "BRANCH"}
) | {"RETURN_VALUE", "MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE"}

_ENDS = frozenset({"RETURN_VALUE", "RAISE_VARARGS", "RERAISE"})


class _Graph:
    """The steps of one code, with comprehensions as part of it, as every Python since 3.12 does."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._free: frozenset[str] = frozenset()  # names of the function around this one
        self._nodes: list[_Node] = []
        self._starts: list[list[tuple[int, int]]] = []  # of each code: (offset, where in the list)
        self._jumps: dict[int, Any] = {}  # nodes that only lead elsewhere

    def add(self, code: types.CodeType, then: Any = None, handler: Any = None) -> None:
        """Append the code's steps; `then` is where a comprehension's result goes."""
        number = len(self._starts)
        if not number:
            self._free = frozenset(code.co_freevars)
        starts: list[tuple[int, int]] = []
        self._starts.append(starts)
        targets = exception_targets(code)
        comprehensions: list[types.CodeType] = []
        steps = steps_of(code)
        for at, step in enumerate(steps):
            starts.append((step.offset, len(self._nodes)))
            raises_to = targets.get(step.offset)
            goes_to = handler if raises_to is None else (number, raises_to)
            if is_inlined(step.arg) and step.op == "MAKE_FUNCTION":
                comprehensions.append(step.arg)
            elif step.op == "CALL_COMPREHENSION" and comprehensions:
                following = (number, steps[at + 1].offset)
                self.add(comprehensions.pop(), following, goes_to)
            else:
                self._append(step, number, None if step.op in _NEVER_RAISE else goes_to, then)

    def _append(self, step: Step, number: int, handler: Any, then: Any) -> None:
        following = len(self._nodes) + 1
        if step.op == "JUMP" or (then is not None and step.op == "RETURN_VALUE"):
            self._jumps[len(self._nodes)] = (number, step.target) if step.op == "JUMP" else then
        target = (number, step.target)
        label = node_digest(step.op, self._argument(step))
        if step.op in _ENDS or len(self._nodes) in self._jumps:
            leads_to: tuple[Any, ...] = ()
        elif step.op == "BRANCH":
            leads_to = (following, target) if step.jumps_if_false else (target, following)
        else:
            leads_to = (following,) if step.target is None else (following, target)
        op = "DUPLICATE" if (step.op, step.arg) == ("COPY", 1) else step.op
        self._nodes.append(_Node(op, label, leads_to, handler))

    def _argument(self, step: Step) -> bytes:
        if isinstance(step.arg, types.CodeType):
            return code_digest(step.arg, self._digest)
        if step.op == "LOAD_CONST":
            return self._digest(step.arg)
        if step.op in ("LOAD", "STORE", "DELETE") and step.arg in self._free:
            return node_digest("free", step.arg)
        return repr(step.arg).encode("utf-8", "surrogatepass")

    def normal_form(self) -> list[bytes | str]:
        """Return the graph as parts of a digest: the same for graphs that do the same."""
        labels = [node.label for node in self._nodes]
        edges: list[tuple[int | None, ...]] = [
            (*map(self._resolved, node.next), self._resolved(node.handler)) for node in self._nodes
        ]
        self._shorten_conditions(labels, edges)
        kinds = _merged(labels, edges)
        parts: list[bytes | str] = []
        numbers: dict[int, int] = {}
        waiting = [self._resolved(0) or 0]
        while waiting:
            node = waiting.pop()
            if kinds[node] in numbers:
                parts.append(str(numbers[kinds[node]]))
                continue
            numbers[kinds[node]] = len(numbers)
            parts += [labels[node], "".join("-" if e is None else "+" for e in edges[node])]
            waiting += [e for e in reversed(edges[node]) if e is not None]
        return parts

    def _shorten_conditions(self, labels: list[bytes], edges: list[tuple[int | None, ...]]) -> None:
        """Ask of a value only once whether it is true, as Python 3.11 does in `a and b or c`."""
        ops = [node.op for node in self._nodes]

        def asks(node: int | None) -> int | None:
            """Return the branch of a node that duplicates a value to ask whether it is true."""
            if node is None or ops[node] != "DUPLICATE":
                return None
            branch = edges[node][0]
            is_plain = branch is not None and self._nodes[branch].label == _IF_TRUE
            return branch if is_plain else None

        for node in reversed(range(len(ops))):
            branch = asks(node)
            if branch is None:
                continue
            ways = list(edges[branch][:2])
            for which, way in enumerate(ways):
                again = asks(way)
                if again is not None:
                    ways[which] = edges[again][which]
            edges[branch] = (*ways, edges[branch][2])
            if all(way is not None and ops[way] == "POP_TOP" for way in ways):
                labels[node] = labels[branch]
                ops[node] = "BRANCH"
                edges[node] = (*(edges[way][0] for way in ways if way is not None), None)

    def _resolved(self, place: Any) -> int | None:
        """Return the node at a place, or the one that it leads to."""
        seen = set()
        while place is not None:
            index = self._found(*place) if isinstance(place, tuple) else place
            if index not in self._jumps or index in seen:
                return index
            seen.add(index)
            place = self._jumps[index]
        return None

    def _found(self, code: int, offset: int) -> int:
        """Return the first node at or after an offset: some instructions have no node."""
        starts = self._starts[code]
        return starts[bisect.bisect_left(starts, (offset, 0))][1]


_IF_TRUE = node_digest("BRANCH", repr("is true"))


def _merged(labels: list[bytes], edges: list[tuple[int | None, ...]]) -> list[int]:
    """Number the nodes so that two have one number exactly if they go on doing the same."""
    kinds = _numbered(labels)
    while True:
        refined = _numbered(
            [
                (kind, *(-1 if edge is None else kinds[edge] for edge in leads_to))
                for kind, leads_to in zip(kinds, edges, strict=True)
            ]
        )
        if max(refined) == max(kinds):
            return refined
        kinds = refined


def _numbered(values: list[Any]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]

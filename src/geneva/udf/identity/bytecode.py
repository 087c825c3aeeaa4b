"""Instructions in the spelling that Python 3.11, 3.12 and 3.13 share.

Newer Pythons have shorter spellings for the same thing; here the longer one is written out.
What only the interpreter needs (caches, counters, cells, NULLs under a call) is left out.
An instruction that is not known here stays as it is: then the digest of the code is that of one
Python version, but never that of other code.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that the code does. `target` is the offset that it may jump to."""

    op: str
    arg: Any
    offset: int
    target: int | None = None
    jumps_if_false: bool = False
    grows: tuple[int, int] = (0, 0)  # the stack: by how many values, without and with the jump


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of every function inside a function, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from nested_codes(constant)


def all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and the code of every function inside it."""
    yield code
    yield from nested_codes(code)


def is_inlined(code: Any) -> bool:
    """Say whether newer Pythons compile this into the code around it: [x for x in y]."""
    return isinstance(code, types.CodeType) and code.co_name in _INLINED


_INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")


def steps_of(code: types.CodeType) -> list[Step]:
    """Return what the code does, step by step."""
    plain = _conversions(_without_saved_names(code, plain_steps(code)))
    steps: list[Step] = []
    for at, step in enumerate(plain):
        steps += _written_out(step, plain, at)
    for rewrite in _REWRITES:
        steps = rewrite(steps)
    return steps


def exception_targets(code: types.CodeType) -> dict[int, int]:
    """Return the offset of the handler for every offset that has one."""
    raw = _raw_targets(code)
    steps = plain_steps(code)
    index = {step.offset: at for at, step in reversed(list(enumerate(steps)))}

    def handling(target: int | None) -> int | None:
        # Some handlers only put a comprehension's names back, dress up a StopIteration, or do for
        # `yield from` what Python 3.11 does without a handler.
        while target is not None:
            end = _end_of_pass_through(steps, index[target])
            if end is None:
                return target
            target = raw.get(end)
        return None

    real = {target: handling(target) for target in set(raw.values())}
    found = {offset: real[target] for offset, target in raw.items()}
    return {offset: target for offset, target in found.items() if target is not None}


def _raw_targets(code: types.CodeType) -> dict[int, int]:
    entries: Any = getattr(dis.Bytecode(code), "exception_entries", ())
    return {
        offset: entry.target for entry in entries for offset in range(entry.start, entry.end, 2)
    }


def _end_of_pass_through(steps: list[Step], at: int) -> int | None:
    """Return the offset at which a handler that handles nothing raises again; None: it handles."""
    for step in steps[at:]:
        if step.op in ("RERAISE", "CLEANUP_THROW"):
            return step.offset
        is_wrapping = (step.op, step.arg) == ("CALL_INTRINSIC_1", 3)
        if not is_wrapping and step.op not in ("SWAP", "POP_TOP", "STORE"):
            return None
    return None


# What these prepare or mark shows in the steps around them.
_SILENT = frozenset(
    {
        *("CACHE", "NOP", "RESUME", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "TO_BOOL", "END_FOR"),
        *("COPY_FREE_VARS", "MAKE_CELL", "END_SEND"),
    }
)

_PAIRS = {
    "LOAD_FAST_LOAD_FAST": ("LOAD", "LOAD"),
    "STORE_FAST_LOAD_FAST": ("STORE", "LOAD"),
    "STORE_FAST_STORE_FAST": ("STORE", "STORE"),
}

_RENAMED = {
    "LOAD_METHOD": "LOAD_ATTR",
    "LOAD_CLOSURE": "LOAD",
    "LOAD_FAST": "LOAD",
    "LOAD_FAST_CHECK": "LOAD",
    "LOAD_DEREF": "LOAD",
    "STORE_FAST": "STORE",
    "STORE_DEREF": "STORE",
    "DELETE_FAST": "DELETE",
    "DELETE_DEREF": "DELETE",
    "LOAD_CLASSDEREF": "LOAD_FROM_DICT_OR_DEREF",
    "JUMP_FORWARD": "JUMP",
    "JUMP_BACKWARD": "JUMP",
    "JUMP_BACKWARD_NO_INTERRUPT": "JUMP",
}

_INTRINSICS = {2: "IMPORT_STAR", 4: "ASYNC_GEN_WRAP", 5: "UNARY_POSITIVE", 6: "LIST_TO_TUPLE"}

# In 3.13 a POP_TOP after the loop drops the iterator.
_LOOPS_LEAVE_ITERATOR = "END_FOR" in dis.opmap and dis.stack_effect(dis.opmap["END_FOR"]) == -1


@functools.lru_cache(maxsize=1024)
def plain_steps(code: types.CodeType) -> list[Step]:
    """Return the instructions, one name each, with the effects on the stack. Not to be changed."""
    steps: list[Step] = []
    before = ""
    for i in dis.get_instructions(code):
        pops_iterator = before == "END_FOR" and _LOOPS_LEAVE_ITERATOR and i.opname == "POP_TOP"
        before = i.opname
        if i.opname in _PAIRS:
            for op, name in zip(_PAIRS[i.opname], i.argval, strict=True):
                grows = (1, 1) if op == "LOAD" else (-1, -1)
                steps.append(Step(op, name, i.offset, grows=grows))
            continue
        number = i.arg if i.opcode >= dis.HAVE_ARGUMENT else None
        grows = (
            dis.stack_effect(i.opcode, number, jump=False),
            dis.stack_effect(i.opcode, number, jump=True),
        )
        jumps = i.opcode in dis.hasjrel or i.opcode in dis.hasjabs
        is_shown = i.opcode in dis.hasconst or isinstance(i.argval, str)
        op = "POP_ITERATOR" if pops_iterator else _RENAMED.get(i.opname, i.opname)
        arg = i.argval if is_shown and not jumps else (None if jumps else i.arg)
        if op == "KW_NAMES":  # 3.11 does not say that it is a constant
            arg = code.co_consts[i.arg or 0]
        if op == "LOAD_SUPER_ATTR":
            arg = (i.argval, bool((i.arg or 0) & 2))
        steps.append(Step(op, arg, i.offset, i.argval if jumps else None, grows=grows))
    return steps


def _written_out(step: Step, steps: list[Step], at: int) -> list[Step]:
    """Return one instruction in the spelling that all Pythons share; most are in it already."""
    op, arg = step.op, step.arg

    def spelled(*pairs: tuple[str, Any]) -> list[Step]:
        return [Step(op, arg, step.offset) for op, arg in pairs]

    if op in _SILENT or op == "POP_ITERATOR":
        return []
    if op.startswith("POP_JUMP_"):
        return [_branch(step, op.partition("IF_")[2])]
    if op in ("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP"):
        branch = _branch(step, op.removeprefix("JUMP_IF_").removesuffix("_OR_POP"))
        return [*spelled(("COPY", 1)), branch, *spelled(("POP_TOP", None))]
    match op:
        case "RETURN_CONST":
            return spelled(("LOAD_CONST", arg), ("RETURN_VALUE", None))
        case "KW_NAMES":
            return spelled(("LOAD_CONST", arg))
        case "CALL":
            before = [s for s in steps[max(at - 3, 0) : at] if s.op not in ("PRECALL", "CACHE")]
            has_keywords = bool(before) and before[-1].op == "KW_NAMES"
            return spelled(("CALL_KW" if has_keywords else "CALL", arg))
        case "BINARY_SLICE":
            return spelled(("BUILD_SLICE", 2), ("BINARY_SUBSCR", None))
        case "STORE_SLICE":
            return spelled(("BUILD_SLICE", 2), ("STORE_SUBSCR", None))
        case "FORMAT_VALUE":
            return spelled(("FORMAT", (arg & 3, bool(arg & 4))))
        case "FORMAT_SIMPLE" | "FORMAT_WITH_SPEC":
            return spelled(("FORMAT", (arg or 0, op == "FORMAT_WITH_SPEC")))
        case "MAKE_FUNCTION":
            flags = [flag for flag in (8, 4, 2, 1) if (arg or 0) & flag]
            return spelled((op, None), *(("SET_FUNCTION_ATTRIBUTE", flag) for flag in flags))
        case "CALL_INTRINSIC_1" if arg in _INTRINSICS:
            return spelled((_INTRINSICS[arg], None))
        case "YIELD_VALUE":
            return spelled((op, None))
        case "BUILD_STRING" if arg == 0:
            return spelled(("LOAD_CONST", ""))
    return [step]


def _conversions(steps: list[Step]) -> list[Step]:
    """Make `!r` in an f-string an argument of the formatting, as Pythons before 3.13 do."""
    result = list(steps)
    for at, step in enumerate(steps):
        end = _end_of_formatting(steps, at) if step.op == "CONVERT_VALUE" else None
        if end is not None:
            result[end] = dataclasses.replace(result[end], arg=step.arg)
            result[at] = dataclasses.replace(step, op="NOP")
    return result


def _end_of_formatting(steps: list[Step], at: int) -> int | None:
    """Return which step formats the value that is converted here; None: it can't be known."""
    height = 1  # of the stack, above what was below the value
    for later in range(at + 1, len(steps)):
        step = steps[later]
        if (step.op, height) in (("FORMAT_SIMPLE", 1), ("FORMAT_WITH_SPEC", 2)):
            return later
        if step.target is not None:
            return None
        height += step.grows[0]
    return None


def _branch(step: Step, condition: str) -> Step:
    """Return a branch by what it asks for, not by which way it jumps."""
    subject = "is None" if condition.endswith("NONE") else "is true"
    negated = condition in ("FALSE", "NOT_NONE")
    return Step("BRANCH", subject, step.offset, step.target, jumps_if_false=negated)


def _super_calls(steps: list[Step]) -> list[Step]:
    """Write `super().x` out as a call and an attribute, as Python 3.11 does."""
    result: list[Step] = []
    for step in steps:
        if step.op != "LOAD_SUPER_ATTR":
            result.append(step)
            continue
        name, has_arguments = step.arg
        if not has_arguments:
            del result[-2:]  # the class and self, which super() finds by itself
        result.append(Step("CALL", 2 if has_arguments else 0, step.offset))
        result.append(Step("LOAD_ATTR", name, step.offset))
    return result


def _comprehensions(steps: list[Step]) -> list[Step]:
    """Mark the calls of comprehensions that older Pythons make functions of."""
    result: list[Step] = []
    open_calls: list[bool] = []  # of comprehensions and generators: is it to be inlined
    for step in steps:
        before = result[-1] if result else Step("", None, 0)
        name = before.arg.co_name if isinstance(before.arg, types.CodeType) else ""
        is_call = step.op == "CALL" and step.arg == 0 and bool(open_calls)
        if step.op == "MAKE_FUNCTION" and name in (*_INLINED, "<genexpr>"):
            open_calls.append(name in _INLINED)
        if step.op == "MAKE_FUNCTION" and name in _INLINED:
            result[-1] = dataclasses.replace(before, op="MAKE_FUNCTION")
        elif step.op == "SET_FUNCTION_ATTRIBUTE" and name in _INLINED:
            size = result[-2].arg  # the cells that it closes over
            del result[-2 - size : -1]
        elif is_call and before.op in ("GET_ITER", "GET_AITER"):
            op = "CALL_COMPREHENSION" if open_calls.pop() else "CALL"
            result.append(dataclasses.replace(step, op=op))
        elif step.op == "LOAD" and step.arg == ".0":
            result.append(Step("SWAP", 2, step.offset))
        else:
            result.append(step)
    return result


_CLASS_FACTS = frozenset(
    {"__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__"}
)


def _class_facts(steps: list[Step]) -> list[Step]:
    """Leave out what a class body notes about where and how it is written."""
    result: list[Step] = []
    for step in steps:
        is_fact = step.op == "STORE_NAME" and step.arg in _CLASS_FACTS
        if is_fact and result and result[-1].op in ("LOAD_CONST", "LOAD_NAME"):
            result.pop()
        else:
            result.append(step)
    return result


def _dead_stores(steps: list[Step]) -> list[Step]:
    """Drop the values of `_, _, x = ...` that the next store replaces, as Python 3.13 does."""
    targets = {step.target for step in steps}
    result = list(steps)
    for at, (step, after) in enumerate(itertools.pairwise(steps)):
        is_replaced = step.op == after.op == "STORE" and step.arg == after.arg
        if is_replaced and after.offset not in targets:
            result[at] = dataclasses.replace(step, op="POP_TOP", arg=None)
    return result


def _swapped_stores(steps: list[Step]) -> list[Step]:
    """Store `a, b = x, y` from the top of the stack, which compilers do for some variables only."""
    targets = {step.target for step in steps}
    result = list(steps)
    for at in reversed(range(len(steps))):
        step = result[at]
        stores = result[at + 1 : at + 1 + step.arg] if step.op == "SWAP" else []
        names = {store.arg for store in stores if store.op == "STORE"}
        is_plain = all(store.offset not in targets for store in stores)
        if stores and len(names) == step.arg == len(stores) and is_plain:
            ends = stores[0], stores[-1]
            result[at + 1] = dataclasses.replace(ends[0], arg=ends[1].arg)
            result[at + len(stores)] = dataclasses.replace(ends[1], arg=ends[0].arg)
            result[at] = dataclasses.replace(step, op="NOP")
    return [step for step in result if step.op != "NOP"]


def _empty_strings(steps: list[Step]) -> list[Step]:
    """Leave out the empty string that Python 3.12 puts at the end of `{x:>{width}}`."""
    result: list[Step] = []
    for step in steps:
        is_empty = bool(result) and result[-1].op == "LOAD_CONST" and result[-1].arg == ""
        if step.op == "BUILD_STRING" and is_empty:
            result.pop()
            if step.arg > 2:
                result.append(dataclasses.replace(step, arg=step.arg - 1))
        else:
            result.append(step)
    return result


_REWRITES = (
    *(_super_calls, _comprehensions, _class_facts, _dead_stores, _swapped_stores),
    _empty_strings,
)


# -- comprehensions in Python 3.12 and later


def _without_saved_names(code: types.CodeType, steps: list[Step]) -> list[Step]:
    """Leave out saving and restoring the names that an inlined comprehension uses."""
    if not any(step.op == "LOAD_FAST_AND_CLEAR" for step in steps):
        return steps
    stacks = _stacks(code, steps)
    result = []
    for at, step in enumerate(steps):
        stack = stacks.get(at)
        if stack is None or not any(stack):
            if step.op != "LOAD_FAST_AND_CLEAR":
                result.append(step)
        elif step.op == "SWAP":
            top = stack[-step.arg :]
            swapped = (top[-1], *top[1:-1], top[0])
            kept = sum(not saved for saved in top)
            if not top[0] and not top[-1]:
                result.append(dataclasses.replace(step, arg=kept))
            elif kept > 1 and [s for s in swapped if not s] != [s for s in top if not s]:
                result.append(step)
        elif step.op == "COPY":
            kept = sum(not saved for saved in stack[-step.arg :])
            result.append(dataclasses.replace(step, arg=kept))
        elif step.op == "LOAD_FAST_AND_CLEAR" or (step.op == "STORE" and stack[-1]):
            continue
        else:
            result.append(step)
    return result


def _stacks(code: types.CodeType, steps: list[Step]) -> dict[int, tuple[bool, ...]]:
    """Return, for every step, which values on the stack are saved names."""
    index: dict[int, int] = {}
    for at, step in enumerate(steps):
        index.setdefault(step.offset, at)
    entries: Any = getattr(dis.Bytecode(code), "exception_entries", ())
    stacks: dict[int, tuple[bool, ...]] = {}
    waiting: list[tuple[int, tuple[bool, ...]]] = [(0, ())]
    while waiting:
        at, stack = waiting.pop()
        if at in stacks or at >= len(steps):
            continue
        stacks[at] = stack
        step = steps[at]
        for entry in entries:
            if entry.start <= step.offset < entry.end:
                pushed = (False,) * (1 + entry.lasti)
                waiting.append((index[entry.target], stack[: entry.depth] + pushed))
        if step.target is not None:
            waiting.append((index[step.target], _grown(stack, step, step.grows[1])))
        if step.op not in ("JUMP", "RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS"):
            waiting.append((at + 1, _grown(stack, step, step.grows[0])))
    return stacks


def _grown(stack: tuple[bool, ...], step: Step, by: int) -> tuple[bool, ...]:
    if step.op == "SWAP":
        top = stack[-step.arg :]
        return (*stack[: -step.arg], top[-1], *top[1:-1], top[0])
    if step.op == "COPY":
        return (*stack, stack[-step.arg])
    if by >= 0:
        return stack + (step.op == "LOAD_FAST_AND_CLEAR",) * by
    return stack[:by]

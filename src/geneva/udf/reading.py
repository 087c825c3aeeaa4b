"""Reading a function without running it: its source, and what its pickle would import."""

from __future__ import annotations

import dis
import inspect
import pickletools
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

import pyarrow as pa

from geneva.udf.call import StatefulCallable, UDFArgType, called_function
from geneva.udf.declare import UDF

_NOT_A_FILE = "<string>"
"""Where what `eval` and `exec` made is from. From Python 3.13 on a text of that name is known, that
of `python -c`, which need not be theirs. No source is better than that of something else."""
_MAX_SOURCE = 100_000
_OWN = ("geneva.", "cloudpickle.")
_UNCLEAR = "a name that is made while it is loaded"


def source_text(udf: UDF) -> str:
    """The source of a function, for whoever has to decide whether to run it; empty: not known."""
    target = udf.func.target if isinstance(udf.func, StatefulCallable) else udf.func
    code = getattr(target, "__code__", None)
    if code is not None and code.co_filename == _NOT_A_FILE:
        return ""
    try:
        return textwrap.dedent(inspect.getsource(target))[:_MAX_SOURCE]
    except (OSError, TypeError, SyntaxError):
        return ""


def returns_only_none(udf: UDF) -> bool:
    """Whether a function that is called by row can be seen to return None, however it ends.

    False of what can't be seen into, such as a wrapper, of a column that can have nothing else, and
    of a stub that always raises: it has no end to return from.
    """
    code = getattr(called_function(udf.func), "__code__", None)
    is_by_row = udf.arg_type is UDFArgType.SCALAR and not pa.types.is_null(udf.data_type)
    if not is_by_row or not isinstance(code, CodeType):
        return False
    steps = [*dis.get_instructions(code)]
    ends = [
        (before.opname == "LOAD_CONST" and before.argval is None and not end.is_jump_target)
        or (end.opname == "RETURN_CONST" and end.argval is None)
        for before, end in pairwise(steps)
        if end.opname in ("RETURN_VALUE", "RETURN_CONST")
    ]
    return bool(ends) and all(ends)


def imported_names(data: bytes) -> tuple[str, ...]:
    """What loading a stored function would import, in order, without Geneva's own parts.

    Read off the pickle's own instructions. Nothing is imported, called or made.
    """
    found: dict[str, None] = {}
    try:
        for name in _names(data.partition(b"\n")[2]):
            found[name] = None
    except Exception as error:  # noqa: BLE001  it may be made to raise anything
        found[f"and what comes after: it can't be read ({type(error).__name__})"] = None
    return tuple(name for name in found if not name.startswith(_OWN))


def _names(pickled: bytes) -> Iterator[str]:
    """Follow the instructions of a pickle, with only texts kept on its stack."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    mark = object()
    for code, argument, _ in pickletools.genops(pickled):
        name = code.name
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo.get(argument))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            clear = isinstance(module, str) and isinstance(attribute, str)
            yield f"{module}.{attribute}" if clear else _UNCLEAR
            stack.append(None)
        else:
            if name in ("GLOBAL", "INST"):
                yield str(argument).replace(" ", ".", 1)
            elif name.startswith("EXT"):
                yield f"what is registered in copyreg as {argument}"
            _take(stack, code.stack_before, mark)
            text = argument if isinstance(argument, str) else None
            stack += [mark if made is pickletools.markobject else text for made in code.stack_after]


def _take(stack: list[Any], wanted: list[Any], mark: object) -> None:
    """Take off the stack what an instruction takes, up to a mark where it says so."""
    below = len(wanted)
    if pickletools.markobject in wanted:
        below = wanted.index(pickletools.markobject)
        while stack.pop() is not mark:
            pass
    del stack[len(stack) - below :]

"""Reading a function without running it: its source, and what its pickle would import."""

from __future__ import annotations

import inspect
import pickletools
import textwrap
from collections.abc import Iterator
from typing import Any

from geneva.udf.call import StatefulCallable
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

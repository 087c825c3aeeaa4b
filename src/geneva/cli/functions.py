"""Functions that are named on the command line: `module:function`."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from geneva.errors import UserInputError
from geneva.render.text import a_type, did_you_mean

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""How a function is named: `module:function`."""


def load_function(name: str) -> Any:
    """The UDF, chunker or table function `module:function`.

    It is imported from the current folder, or from what is installed. A plain function becomes a
    UDF; its types are read off its annotations.
    """
    if not FUNCTION.fullmatch(name):
        raise UserInputError(
            f"{name!r} names no function. Write module:function: udfs:words is `words` of udfs.py."
        )
    module_name, _, path = name.partition(":")
    found: Any = _import(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            known = [each for each in vars(found) if not each.startswith("_")]
            hint = did_you_mean(part, known)
            raise UserInputError(f"Module {module_name!r} has no {path!r}.{hint}")
        found = getattr(found, part)
    from geneva import UDF, UDTF, Chunker, udf

    if isinstance(found, UDF | Chunker | UDTF):
        return found
    if not callable(found):
        raise UserInputError(f"{name} is {a_type(found)}, not a function.")
    return udf(found)


def _import(module: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            text = f"There is no module {module!r} in {folder}, nor is one installed."
            if module.endswith(".py"):
                text += f" A module is named without .py: {module.removesuffix('.py')}:function."
        else:
            text = f"Module {module!r} needs {missing!r}, which is not installed."
        raise UserInputError(text) from error
    except Exception as error:
        place = _place(error)
        raise UserInputError(
            f"Module {module!r} can't be imported: {type(error).__name__}: {error}{place}"
        ) from error


def _place(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"

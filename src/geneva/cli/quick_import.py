"""Commands that only look: what comes before and after it takes longer than the looking.

Arrow is imported without pandas.

pyarrow imports pandas, where it is installed, at the first value that it makes, to know pandas' own
types when it is given them. Nothing that these commands do has to do with pandas.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PANDAS = "pandas"
_FIRST_VALUES = "pyarrow._dataset"
"""The module that makes the first values, as it is imported."""

process_is_ours = False
"""Whether this process was started for a command, and runs nobody else's code."""


has_only_looked = False
"""Whether this process has read, and neither written anything nor started anything to be ended."""


def leave_at_once(code: Any) -> None:
    """End a process of ours that has only looked: to take all modules apart is a tenth of its time.

    Any other process leaves as Python does.
    """
    if process_is_ours and has_only_looked and isinstance(code, int | None):
        sys.stdout.flush()  # where that fails, it is for the caller to say
        sys.stderr.flush()
        os._exit(code or 0)


def import_arrow_alone() -> None:
    """Import what Lance needs of pyarrow, and let it find no pandas meanwhile.

    Only in a process of ours: pyarrow doesn't look again, unless it is asked for a data frame.
    """
    if process_is_ours and _PANDAS not in sys.modules and _FIRST_VALUES not in sys.modules:
        with _hidden(_PANDAS):
            import pyarrow.dataset  # noqa: F401


class _Hiding:
    """A finder that finds no module of a name, wherever it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise for that name; leave all others to the finders behind this one."""
        if name == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    finder = _Hiding(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)

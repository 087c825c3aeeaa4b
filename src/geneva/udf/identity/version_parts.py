"""What is in a UDF's version, for people: the parts that the fingerprint is made of, as a tree."""

from __future__ import annotations

import pathlib
import types
from dataclasses import dataclass
from typing import Literal

from geneva.render.plain import plain

Kind = Literal["function", "class", "module", "file", "installed", "value", "memo", "opaque"]
"""How a part counts.

By its code (function, class), as a whole (module: as loaded; file: as on disk), by its name
(installed), by its contents (value), or not by its contents but its type (memo, opaque).
"""

_MEANING = {
    "module": "the whole module",
    "file": "the whole file, as it is now",
    "installed": "installed: by name",
    "memo": "filled by calls: by type, without its contents",
    "opaque": "by type only",
}


@dataclass(frozen=True, slots=True)
class VersionPart:
    """One thing that counts: how it is reached, what it is, and where in the tree it hangs."""

    depth: int
    reached_as: str
    kind: Kind
    text: str

    def __str__(self) -> str:
        """Show the part in one line."""
        reached = f"{self.reached_as}: " if self.reached_as else ""
        meaning = f" ({_MEANING[self.kind]})" if self.kind in _MEANING else ""
        return plain(f"{'  ' * self.depth}{reached}{self.text}{meaning}")


@dataclass(frozen=True, slots=True)
class VersionExplanation:
    """A UDF's version and the parts of its fingerprint. `print` shows it as a tree.

    `is_declared`: the user gave `version=`, so that the fingerprint is not used. `is_pinned`: the
    fingerprint was taken when the function was stored, and the parts are what was loaded.
    """

    name: str
    version: str
    fingerprint: str
    is_declared: bool
    is_pinned: bool
    parts: tuple[VersionPart, ...]

    def __str__(self) -> str:
        """Show the version, where it comes from, and the tree of its parts."""
        name = plain(self.name)
        if self.is_declared:
            head = f"version {self.version!r} of '{name}', given by version=: it alone counts."
            head += f"\nNot used, the fingerprint {self.fingerprint}, which is made of:"
        elif self.is_pinned:
            head = (
                f"version {plain(self.version)} of '{name}', a fingerprint taken when it was stored"
            )
            head += ".\nThe stored function is made of:"
        else:
            head = f"version {plain(self.version)} of '{name}', a fingerprint of:"
        return "\n".join([head, *map(str, self.parts)])

    __repr__ = __str__


def place_text(function: types.FunctionType) -> str:
    """Return a function's name, file and line."""
    code = function.__code__
    file = pathlib.PurePath(code.co_filename).name
    return f"function {function.__qualname__} ({file}:{code.co_firstlineno})"

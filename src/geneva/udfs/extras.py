"""Packages that functions need, and the extras that install them."""

from __future__ import annotations

from importlib.util import find_spec

from geneva.errors import MissingDependencyError
from geneva.render.text import how_to_install


def require(package: str, extra: str) -> None:
    """Refuse to go on without a package; say which extra has it."""
    if find_spec(package) is None:
        raise MissingDependencyError(
            f"{package!r} is not installed here: {how_to_install(extra)}, on every worker as well."
        )

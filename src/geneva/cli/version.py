"""`geneva version`: what is installed here, for a bug report."""

from __future__ import annotations

import platform

import typer

from geneva.cli.arguments import AsJson
from geneva.cli.terminal import emit, say

DISTRIBUTION = "geneva-spark"
PACKAGES = ("pyspark", "pylance", "lancedb", "pyarrow")
"""What Geneva builds on, for bug reports."""


def version(*, as_json: AsJson = False) -> None:
    """Print the versions of Geneva, of Python and of what it builds on."""
    if as_json:
        parts = {part: _installed(part) for part in (DISTRIBUTION, *PACKAGES)}
        return emit({**parts, "python": platform.python_version()})
    say(own_version())
    say(f"{'python':<12} {platform.python_version()}")
    for part in PACKAGES:
        say(f"{part:<12} {_installed(part)}")
    return None


def own_version() -> str:
    """Return the distribution and its version, in one line."""
    return f"{DISTRIBUTION} {_installed(DISTRIBUTION)}"


def print_and_exit(wanted: bool) -> None:  # noqa: FBT001  typer calls it with the option's value
    """Answer `--version`, and run no command."""
    if wanted:
        say(own_version())
        raise typer.Exit


def installed(distribution: str) -> str | None:
    """The version of a distribution, or of its client: that of Spark Connect alone."""
    from importlib import metadata

    for name in (distribution, f"{distribution}-client"):
        try:
            return metadata.version(name) + name.removeprefix(distribution).replace("-", " ")
        except metadata.PackageNotFoundError:
            continue
    return None


def _installed(distribution: str) -> str:
    return installed(distribution) or "not installed"

"""The `geneva` command in this process, with the list of its commands made once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import typer
from click.testing import CliRunner, Result

from geneva.cli import app


@cache
def command() -> Any:
    """The command, as a shell would call it. Typer takes longer to make it than most of them do."""
    return typer.main.get_command(app)


def invoke(arguments: Sequence[str], **options: Any) -> Result:
    """Call the command; what it printed and its exit code are in the result."""
    return CliRunner().invoke(command(), list(arguments), **options)

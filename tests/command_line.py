"""The `geneva` command in this process, with the list of its commands made once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import typer
from typer.testing import CliRunner, Result

from geneva.cli import app


@cache
def command() -> Any:
    """The command, as a shell would call it. Typer takes longer to make it than most of them do."""
    return typer.main.get_command(app)


def invoke(arguments: Sequence[str], **options: Any) -> Result:
    """Call the command; what it printed and its exit code are in the result."""
    with patch("typer.testing._get_command", lambda _: command()):
        return CliRunner().invoke(app, list(arguments), **options)

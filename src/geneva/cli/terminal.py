"""How commands talk: two consoles, and what an error looks like to somebody at a prompt."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from geneva.errors import GenevaError, MissingDependencyError, UserInputError

FAILED = 1
USER_INPUT = 2
"""The same code that a wrong option gives."""
MISSING_DEPENDENCY = 3
INTERRUPTED = 130

# Numbers and paths in our own sentences need no colours of their own.
out = Console(highlight=False)
err = Console(highlight=False, stderr=True)


def exit_code(error: GenevaError) -> int:
    """Return what a shell should see: who can do something about this error."""
    if isinstance(error, UserInputError):
        return USER_INPUT
    if isinstance(error, MissingDependencyError):
        return MISSING_DEPENDENCY
    return FAILED


def show_error(message: object) -> None:
    """Print an error as a sentence, whole paths on one line, no traceback."""
    err.print(Text.assemble(("error: ", "bold red"), str(message)), soft_wrap=True)


def say(text: str = "", style: str = "") -> None:
    """Print a line as it is: never cut, never read as markup."""
    out.print(Text(text, style), soft_wrap=True)


def heading(number: int, title: str, note: str = "") -> None:
    """Print the heading of a step, with an empty line before it."""
    out.print()
    out.print(
        Text.assemble((f"{number}. {title}", "bold cyan"), (f"  {note}" if note else "", "dim")),
        soft_wrap=True,
    )

"""How commands talk: two consoles, tables, one JSON document, and what an error looks like."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from io import StringIO
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from geneva.errors import GenevaError, JobNotFoundError, MissingDependencyError, UserInputError
from geneva.model.tables import Secrets
from geneva.render.plain import json_text, plain

FAILED = 1
USER_INPUT = 2
"""The same code that a wrong option gives."""
MISSING_DEPENDENCY = 3
INTERRUPTED = 130
INTERRUPTION = "interrupted. What was finished is kept."

EXIT_CODES = (
    "Exit codes: 0 all is well, 1 the job or check failed, 2 something in the command is wrong, "
    "3 something is not installed, 130 interrupted."
)

# Numbers and paths in our own sentences need no colours of their own.
out = Console(highlight=False)
err = Console(highlight=False, stderr=True)

_PIPED_WIDTH = 10_000
_hidden: set[Secrets] = set()


def exit_code(error: BaseException) -> int:
    """Return what a shell should see: who can do something about this error."""
    if isinstance(error, UserInputError | JobNotFoundError):
        return USER_INPUT
    if isinstance(error, MissingDependencyError):
        return MISSING_DEPENDENCY
    return FAILED


def hide(options: Secrets) -> None:
    """Show these storage options in no message from now on."""
    _hidden.add(options)


def readable(error: BaseException) -> str:
    """An error as a sentence; what other libraries say of storage without their debug lines."""
    text = str(error)
    if not isinstance(error, GenevaError):
        text = text.partition(", /")[0].partition(": /rustc")[0].strip()
    if not text or not isinstance(error, GenevaError | OSError):
        # Nobody foresaw it: whoever reports it needs to know what it was.
        name = type(error).__name__
        text = f"{name}: {text}. (geneva --debug shows where it comes from.)" if text else name
    return redact(text)


def show_traceback(error: BaseException) -> None:
    """Print where an error comes from, for whoever asked for it."""
    import traceback

    text = "".join(traceback.format_exception(error))
    err.print(Text(plain(redact(text), lines=True), "dim"), soft_wrap=True)


def redact(text: str) -> str:
    """A text without the values of storage options."""
    for options in _hidden:
        text = options.redact(text)
    return text


def show_error(message: object) -> None:
    """Print an error as a sentence, whole paths on one line, no traceback."""
    err.print(Text.assemble(("error: ", "bold red"), plain(message, lines=True)), soft_wrap=True)


def notes_of(error: BaseException) -> list[str]:
    """What an error has beside its message: where in the user's function it was raised."""
    return [redact(str(note)).rstrip() for note in getattr(error, "__notes__", ())]


def show_notes(error: BaseException) -> None:
    """Print them below the message."""
    for note in notes_of(error):
        err.print(Text(plain(note, lines=True), "dim"), soft_wrap=True)


def warn(message: object) -> None:
    """Print a warning beside the output."""
    err.print(
        Text.assemble(("warning: ", "bold yellow"), plain(message, lines=True)), soft_wrap=True
    )


class LogSentences(logging.Handler):
    """Log records as sentences, without tracebacks: at a prompt nobody asked for those.

    When Ctrl-C meets a call to Spark, py4j logs the interruption as an error of its own.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless it is py4j's."""
        if "py4j" not in record.pathname:
            warn(redact(record.getMessage()))


def say(text: str = "", style: str = "") -> None:
    """Print a line as it is: never cut, never read as markup."""
    out.print(Text(plain(text, lines=True), style), soft_wrap=True)


def heading(number: int, title: str, note: str = "") -> None:
    """Print the heading of a step, with an empty line before it."""
    out.print()
    out.print(
        Text.assemble(
            (f"{number}. {plain(title)}", "bold cyan"), (f"  {plain(note)}" if note else "", "dim")
        ),
        soft_wrap=True,
    )


documents: list[Any] = []
"""What this command has answered machines: nothing yet, or its one document."""
beside_error: dict[str, Any] = {}
"""What this command has done so far: in its document beside the error, where it fails."""
_for_documents: list[TextIO] = []
"""The standard output, while only documents go there."""


@contextmanager
def only_documents() -> Iterator[None]:
    """Keep the standard output for documents: what anybody prints meanwhile goes to the error's.

    Modules and functions of users print, and a program that reads the output expects JSON.
    """
    _for_documents.append(sys.stdout)
    try:
        with functions_print_aside():
            yield
    finally:
        _for_documents.pop()


def functions_print_aside() -> AbstractContextManager[object]:
    """Send what functions print that are called in this process to the standard error."""
    return redirect_stdout(sys.stderr)


def emit(document: Any) -> None:
    """Print one JSON document: the whole output of a command for machines."""
    from geneva.render.values import json_value

    stream = _for_documents[-1] if _for_documents else sys.stdout
    unicode = (stream.encoding or "utf-8").lower().startswith("utf")
    text = json_text(json_value(document), unicode=unicode) + "\n"
    documents.append(document)  # also where it can't be written: an error couldn't, either
    stream.write(text)
    stream.flush()


def confirm(question: str) -> None:
    """Ask before something is done that can't be undone: go on at a yes, and at nothing else.

    Question and answer leave the standard output alone. Where nobody answers it says how to go on.
    """
    import typer

    err.print(Text(f"{plain(question)} [y/N]: "), end="", soft_wrap=True)
    answer = "" if sys.stdin is None else sys.stdin.readline()
    if not answer:  # the input is at its end: there is no terminal
        err.print()
        raise UserInputError("it was not confirmed, and nothing was done: use --yes.")
    if answer.strip().lower() not in ("y", "yes"):
        raise typer.Abort


def grid(
    headers: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[str] = ()
) -> None:
    """Print a table; the columns of `numbers` are set to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in headers:
        table.add_column(
            Text(plain(name)),
            justify="right" if name in numbers else "left",
            overflow="fold",
            no_wrap=False,
        )
    for row in rows:
        table.add_row(*(Text("" if cell is None else plain(cell)) for cell in row))
    if out.is_terminal:
        out.print(table)
        return
    # Piped: nothing is folded or cut, whatever COLUMNS says.
    table.box = box.SIMPLE_HEAD.substitute(out.options)
    text = StringIO()
    Console(width=_PIPED_WIDTH, file=text, highlight=False, color_system=None).print(table)
    say("\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines()))


def facts(pairs: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, below each other; what is None is left out.

    A value of several lines is indented, so that none of them looks like another fact.
    """
    known = [(plain(name), plain(value, lines=True)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        shown = value.replace("\n", "\n" + " " * (width + 2))
        out.print(Text.assemble((f"{name:<{width}}  ", "bold"), shown), soft_wrap=True)

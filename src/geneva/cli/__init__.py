"""The `geneva` command. Each command is a module of this package; `app` lists them.

Nothing here imports Lance or Spark: a command does that when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from geneva.cli import (
    backfills,
    cleanup,
    console,
    demo,
    doctor,
    failures,
    jobs,
    loads,
    quick_import,
    refresh,
    tables,
    trust,
    version,
    views,
)
from geneva.cli.arguments import Group, epilog, group
from geneva.cli.terminal import (
    EXIT_CODES,
    FAILED,
    INTERRUPTED,
    INTERRUPTION,
    USER_INPUT,
    LogSentences,
    beside_error,
    documents,
    emit,
    exit_code,
    notes_of,
    only_documents,
    readable,
    show_error,
    show_notes,
    show_traceback,
)
from geneva.render.plain import plain

_JSON = "--json"
_HELP = ("-h", "--help")
_MADE_BEFORE_COLLECTING = 100_000
"""Objects that are made before Python looks for garbage: modules make many, and none is any."""


class Commands(Group):
    """All commands; whatever one raises becomes a message and a code."""

    answers_in_json = False
    """Whether the command that runs was asked for JSON: then its failure is a document, too."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the arguments; what typer says of wrong ones is to act on no terminal."""
        self.answers_in_json = _JSON in args[1] and not any(word in args[1] for word in _HELP)
        documents.clear()
        beside_error.clear()
        try:
            _check_text(args[1])
            return super().make_context(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  it is raised again
            self._answer(error)
            raise _made_plain(error) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command. One that answers in JSON has the standard output for that alone."""
        with only_documents() if self.answers_in_json else nullcontext():
            return self._run(ctx)

    def _run(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, typer.Exit, SystemExit, GeneratorExit):
            raise  # `geneva ... | head`: typer leaves in silence
        except (KeyboardInterrupt, typer.Abort) as error:
            self._answer(error)
            raise
        except BaseException as error:  # a panic of Lance's is no Exception
            self._answer(error)
            if _is_typers(error):
                raise _made_plain(error) from None
            if ctx.params.get("debug"):
                show_traceback(error)
            show_error(readable(error))
            if not ctx.params.get("debug"):  # they end the traceback
                show_notes(error)
            raise typer.Exit(exit_code(error)) from error

    def _answer(self, error: BaseException) -> None:
        """Print what went wrong for machines, where they asked for an answer and have none yet."""
        if not self.answers_in_json or documents or isinstance(error, typer.Exit):
            return
        kind, message, code = type(error).__name__, readable(error), exit_code(error)
        if _is_typers(error):
            kind, message = "UsageError", error.format_message()  # type: ignore[attr-defined]
            code = getattr(error, "exit_code", USER_INPUT)
        elif isinstance(error, KeyboardInterrupt):
            message, code = INTERRUPTION, INTERRUPTED
        elif isinstance(error, typer.Abort):
            message = "it was not confirmed; nothing was done."
        answer = {"type": kind, "message": message, "exit_code": code}
        more = {"job_id": getattr(error, "job_id", None), "notes": notes_of(error)}
        emit({**beside_error, "error": {**answer, **more}})


def _check_text(arguments: Sequence[str]) -> None:
    """Refuse arguments that no name, path or clause can be."""
    for argument in arguments:
        if "\0" in argument or not _is_unicode(argument):
            raise typer.BadParameter(f"{argument!r} is no text in UTF-8.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_typers(error: BaseException) -> bool:
    """Whether typer made this error of wrong arguments, and shows it itself."""
    return hasattr(error, "format_message")


def _made_plain(error: BaseException) -> BaseException:
    if _is_typers(error):
        error.message = plain(error.message, lines=True)  # type: ignore[attr-defined]
    return error


app = group(
    "Feature columns for Lance tables: Python functions, computed on Spark, only where something "
    "is new.",
    Commands,
    name="geneva",
    epilog=f"Start with:  geneva demo\n\n{EXIT_CODES}",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(_HELP)},
)
LOOK, COMPUTE, RUNS, HERE = "Look", "Compute", "Jobs and errors", "This machine"


def _command(name: str, function: Any, panel: str, *examples: str) -> None:
    app.command(name=name, rich_help_panel=panel, epilog=epilog(*examples))(function)


_command("tables", tables.tables, LOOK, "geneva tables my-database")
_command(
    "describe",
    tables.describe,
    LOOK,
    "geneva describe my-database articles",
    "geneva describe s3://bucket/path articles --json",
)
_command(
    "sample",
    tables.sample,
    LOOK,
    "geneva sample my-database articles -n 5 --where \"lang = 'en'\" --columns id,text",
)
_command(
    "preview",
    tables.preview,
    COMPUTE,
    "geneva preview my-database articles words",
    "geneva preview my-database articles --udf functions:words -n 20",
)
_command("plan", backfills.plan, COMPUTE, "geneva plan my-database articles words")
_command(
    "backfill",
    backfills.backfill,
    COMPUTE,
    "geneva backfill my-database articles words",
    "geneva backfill my-database articles words --udf functions:words --save",
)
_command(
    "refresh",
    refresh.refresh,
    COMPUTE,
    "geneva refresh my-database --dry-run",
    "geneva refresh my-database",
)
_command(
    "load-columns",
    loads.load_columns,
    COMPUTE,
    "geneva load-columns my-database articles scores.parquet --pk id --columns score",
)
_command(
    "verify",
    backfills.verify,
    LOOK,
    "geneva verify my-database articles words",
    "geneva verify my-database articles words --sample 0.01 --run",
)
app.add_typer(views.app, name="view", rich_help_panel=COMPUTE)
app.add_typer(jobs.app, name="jobs", rich_help_panel=RUNS)
app.add_typer(trust.app, name="trust", rich_help_panel=LOOK)
_command("errors", failures.errors, RUNS, "geneva errors my-database articles --column words")
_command(
    "cleanup",
    cleanup.cleanup,
    RUNS,
    "geneva cleanup my-database",
    "geneva cleanup my-database articles --older-than 0",
)
_command("console", console.console, RUNS, "geneva console my-database")
_command("demo", demo.demo, HERE, "geneva demo --dir my-database")
_command("doctor", doctor.doctor, HERE, "geneva doctor my-database", "geneva doctor --no-spark")
_command("version", version.version, HERE, "geneva version")


@app.callback()
def options(
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and leave.",
            callback=version.print_and_exit,
            is_eager=True,
            metavar="",
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show the whole traceback of an error, before its message.",
            envvar="GENEVA_DEBUG",
            metavar="",
        ),
    ] = False,
) -> None:
    """Take what comes before the command. Its help is the app's."""


def main() -> None:
    """Be the process of a command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        # A name that the terminal has no letters for is written out, and stops nothing.
        getattr(sys, name).reconfigure(errors="backslashreplace")
    code: Any = None
    try:
        try:
            run()
        except SystemExit as leaving:
            code = leaving.code
            sys.stdout.flush()
            quick_import.leave_at_once(code)
            if documents:
                sys.stdout = sys.stderr  # what users' modules print at the end is no part of it
            raise
    except OSError as error:  # of what was printed: nobody reads it, or there is no room for it
        if not code and not isinstance(error, BrokenPipeError):
            show_error(readable(error))
        os._exit(code if code and isinstance(code, int) else FAILED)


def run() -> None:
    """Run the command line, in a process that is for nothing else."""
    quick_import.process_is_ours = True
    gc.set_threshold(_MADE_BEFORE_COLLECTING)
    logging.getLogger().addHandler(LogSentences(logging.WARNING))
    try:
        app()
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:  # Ctrl-C, which typer leaves with, in silence
            show_error(INTERRUPTION)
        raise

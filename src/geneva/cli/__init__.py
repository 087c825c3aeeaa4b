"""The `geneva` command. Each command is a module of this package; `app` lists them.

Nothing here imports Lance or Spark: a command does that when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from geneva.cli import demo, version
from geneva.cli.terminal import INTERRUPTED, exit_code, show_error
from geneva.errors import GenevaError

app = typer.Typer(
    name="geneva",
    help="Feature columns for Lance tables: Python functions, computed on Spark, "
    "only where something is new.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="demo")(demo.demo)
app.command(name="version")(version.version)


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
        ),
    ] = False,
) -> None:
    """Take what comes before the command. Its help is the app's."""


def main() -> None:
    """Run the command line; what Geneva raises on purpose becomes a message and an exit code."""
    try:
        app()
    except GenevaError as error:
        show_error(error)
        sys.exit(exit_code(error))
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:  # Ctrl-C, which typer leaves with, in silence
            show_error("interrupted. What was finished is kept.")
        raise

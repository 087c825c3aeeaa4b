"""`geneva cleanup`: removing what no job will use again."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from geneva.cli.arguments import AsJson, Database, StorageOption, complete_table
from geneva.cli.database import connect
from geneva.cli.terminal import emit, grid, say
from geneva.render.text import size


def cleanup(
    db: Database,
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="[TABLE]",
            help="The table or view; by default all of them.",
            autocompletion=complete_table,
            show_default=False,
        ),
    ] = None,
    *,
    older_than: Annotated[
        float,
        typer.Option(
            help="Staged files that are younger stay, unless their job is known to be dead.",
            min=0,
            metavar="SECONDS",
        ),
    ] = 3600.0,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Remove checkpoints that nothing can use again, and what jobs that died have left behind.

    What a job that was cut off has computed stays as long as it is of use.
    """
    connection = connect(db, storage_option)
    names = [table] if table is not None else connection.all_table_names()
    age = timedelta(seconds=older_than)
    reports = {name: connection.open_table(name).cleanup_checkpoints(age) for name in names}
    signals = connection.cleanup_signals() if table is None else 0
    if as_json:
        removed = {
            name: {"checkpoints": r.checkpoints, "files": r.staged_files, "bytes": r.staged_bytes}
            for name, r in reports.items()
        }
        return emit({"tables": removed, "signals": signals})
    rows = [
        (name, f"{r.checkpoints:,}", f"{r.staged_files:,}", size(r.staged_bytes))
        for name, r in reports.items()
        if r.checkpoints or r.staged_files
    ]
    if not rows and not signals:
        return say("There was nothing to remove.")
    if rows:
        headers = ("table", "checkpoints", "files", "size")
        grid(headers, rows, numbers=headers[1:])
    if signals:
        say(f"Signals of {signals} jobs that have ended were removed.")
    return None

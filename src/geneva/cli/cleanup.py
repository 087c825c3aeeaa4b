"""`geneva cleanup`: removing what no job will use again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geneva.cli.arguments import AsJson, Database, StorageOption, complete_table
from geneva.cli.database import connect
from geneva.cli.terminal import emit, grid, redact, say, show_error
from geneva.render.text import one_line, size

if TYPE_CHECKING:
    from geneva.storage.checkpoints.cleanup import CleanupReport


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
    age = timedelta(seconds=older_than)
    if table is not None:
        removed = {table: connection.open_table(table).cleanup_checkpoints(age)}
        return _report(removed, troubles={}, signals=0, as_json=as_json)
    reports: dict[str, CleanupReport] = {}
    troubles: dict[str, str] = {}
    for name in connection.all_table_names():
        try:
            reports[name] = connection.open_table(name).cleanup_checkpoints(age)
        except BaseException as error:  # noqa: BLE001  one bad table keeps no other from it
            troubles[name] = redact(one_line(error))
    _report(reports, troubles, signals=connection.cleanup_signals(), as_json=as_json)
    if troubles:
        raise typer.Exit(1)
    return None


def _report(
    reports: Mapping[str, CleanupReport],
    troubles: Mapping[str, str],
    *,
    signals: int,
    as_json: bool,
) -> None:
    """Say what was removed, table by table, and where nothing could be."""
    if as_json:
        removed: dict[str, Any] = {
            name: {"checkpoints": r.checkpoints, "files": r.staged_files, "bytes": r.staged_bytes}
            for name, r in reports.items()
        }
        failed = {name: {"error": why} for name, why in troubles.items()}
        return emit({"tables": {**removed, **failed}, "signals": signals})
    for name, why in troubles.items():
        show_error(f"{name}: {why}")
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

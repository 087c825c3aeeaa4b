"""`geneva errors`: the rows that a function failed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from geneva.cli.arguments import (
    AsJson,
    Database,
    StorageOption,
    TableName,
    complete_column,
    complete_job,
)
from geneva.cli.database import check_columns, connect_to_look
from geneva.cli.terminal import emit, grid, say
from geneva.model.addresses import offset_of

if TYPE_CHECKING:
    from geneva.storage.jobs.failures import ErrorRecord
    from geneva.table import Table


def errors(
    db: Database,
    table: TableName,
    *,
    job: Annotated[
        str | None,
        typer.Option(
            help="Only those of this job: its id, or its first characters.",
            autocompletion=complete_job,
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Only those of this column.", autocompletion=complete_column),
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", help="Show at most so many.", min=1, metavar="N")
    ] = 50,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Show the rows that a computed column's function failed on, and with what.

    The newest come first. With --json, each has its row address and its traceback too.
    """
    connection = connect_to_look(db, storage_option)
    opened = connection.open_table(table)
    job_id = connection.get_job(job).job_id if job is not None else None
    found = opened.get_errors(job_id=job_id, column_name=column)
    if column is not None and not found:
        _check_known(opened, column)
    newest = found[::-1][:limit]
    if as_json:
        records = [asdict(error) for error in newest]
        return emit({"table": table, "total": len(found), "errors": records})
    if not found:
        return say("No errors are on record.")
    _show(newest)
    if len(found) > limit:
        say(f"... and {len(found) - limit:,} older ones: --limit shows more", "dim")
    return None


def _check_known(table: Table, column: str) -> None:
    """Refuse a column that the table neither has nor had failures of."""
    if column in table.schema.names or table.get_errors(column_name=column):
        return
    if column not in [function.column for function in table.stored_functions()]:
        check_columns(table, [column])


def _show(errors: Sequence[ErrorRecord]) -> None:
    from geneva.render.values import cell_text

    grid(
        ("column", "fragment", "row", "error", "message", "attempt", "input", "job"),
        [
            (
                error.column_name,
                error.fragment_id,
                offset_of(error.row_address),
                error.exception_type,
                cell_text(error.message),
                error.attempt,
                cell_text(error.input_preview),
                error.job_id[:8],
            )
            for error in errors
        ],
        numbers=("fragment", "row", "attempt"),
    )

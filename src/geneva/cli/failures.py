"""`geneva errors`: the rows that a function failed on."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from geneva.cli import options
from geneva.cli.options import AsJson, Database, StorageOption, TableName
from geneva.cli.terminal import emit, grid, say
from geneva.errors import MissingDependencyError

_SHOWN = (
    ("column", ("column_name", "column")),
    ("row", ("row_address", "row_id")),
    ("error", ("error_type", "exception_type")),
    ("message", ("error_message", "message")),
    ("attempt", ("attempt", "attempts")),
    ("input", ("input_preview", "inputs")),
    ("job", ("job_id",)),
)


def errors(
    db: Database,
    table: TableName,
    *,
    job: Annotated[
        str | None,
        typer.Option(
            help="Only those of this job: its id, or its first characters.",
            autocompletion=options.complete_job,
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Only those of this column.", autocompletion=options.complete_column),
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", help="Show at most so many.", min=1, metavar="N")
    ] = 50,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Show the rows that a computed column's function failed on, and with what.

    With --json, each has its traceback too.
    """
    from geneva.cli.jobs import find_job

    connection = options.connect(db, storage_option)
    read = getattr(type(connection.open_table(table)), "get_errors", None)
    if read is None:
        raise MissingDependencyError("This version of Geneva does not store the errors of rows.")
    job_id = find_job(connection, job).job_id if job is not None else None
    found = read(connection.open_table(table), job_id=job_id, column_name=column)
    told = [_record(each) for each in _each(found)]
    if as_json:
        return emit({"table": table, "errors": told[:limit], "total": len(told)})
    if not told:
        return say("No errors are on record.")
    shown = [(head, key) for head, keys in _SHOWN if (key := _known(told[0], keys)) is not None]
    grid([head for head, _ in shown], [[_short(e[key]) for _, key in shown] for e in told[:limit]])
    if len(told) > limit:
        say(f"... and {len(told) - limit:,} more: --limit shows more", "dim")
    return None


def _each(found: Any) -> list[Any]:
    return list(found.to_pylist() if hasattr(found, "to_pylist") else found)


def _record(error: Any) -> dict[str, Any]:
    return dict(error) if isinstance(error, dict) else dataclasses.asdict(error)


def _known(record: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if key in record), None)


def _short(value: Any) -> str:
    from geneva.cli.cells import cell

    return "" if value is None else cell(value)

"""`geneva plan` and `geneva backfill`: what would be computed, and computing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from geneva.cli.arguments import (
    AsJson,
    ColumnName,
    Database,
    StorageOption,
    TableName,
    names,
    takes_options,
)
from geneva.cli.database import check_columns, connect, connect_to_look
from geneva.cli.functions import load_function
from geneva.cli.terminal import emit, functions_print_aside, say
from geneva.errors import UserInputError
from geneva.options import BackfillArguments, SelectionArguments
from geneva.udf.declare import UDF

if TYPE_CHECKING:
    from geneva.execution.backfill.verify import VerifyReport
    from geneva.jobs import JobResult
    from geneva.planning.backfill import BackfillPlan
    from geneva.table import Table

Function = Annotated[
    str | None,
    typer.Option(
        "--udf",
        metavar="MODULE:FUNCTION",
        help="Another function than the column's own, imported from the current folder or from "
        "what is installed.",
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="a,b",
        help="The columns that feed --udf; by default those named like its parameters.",
    ),
]


@takes_options(SelectionArguments)
def plan(
    db: Database,
    table: TableName,
    column: ColumnName,
    *,
    udf: Function = None,
    inputs: Inputs = None,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
    **options: Any,
) -> None:
    """Say what a backfill would compute, and why. Changes nothing, runs nothing."""
    look = connect_to_look if udf is None else connect  # a module of the user's may need pandas
    opened = look(db, storage_option).open_table(table)
    _check_column(opened, column)
    planned = opened.plan_backfill(column, udf=_function(udf, inputs), **options)
    return emit(plan_record(planned)) if as_json else say(str(planned))


@takes_options(BackfillArguments)
def backfill(
    db: Database,
    table: TableName,
    column: ColumnName,
    *,
    udf: Function = None,
    inputs: Inputs = None,
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="Make --udf the column's own function, and add the column if there is none. "
            "Without it, --udf counts for this run.",
            metavar="",
        ),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="With --save: keep what is computed, and run only what failed, is missing or "
            "stale with the new function.",
            metavar="",
        ),
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
    **options: Any,
) -> None:
    """Compute a column's values on Spark and put them into the table.

    Only rows that are new or stale are computed.

    Ctrl-C stops the job. What is finished is kept, and the same command goes on from there.
    """
    opened = connect(db, storage_option).open_table(table)
    function = _function(udf, inputs)
    if keep and not save:
        raise UserInputError("--keep is about the function of --udf and --save: give these too.")
    if save:
        _check_where(opened, options.get("where"), column)
        _save(opened, column, function, keep=keep)
        function = None
    else:
        _check_column(opened, column)
    result = opened.backfill(column, udf=function, **options)
    return emit(result_record(result)) if as_json else show_result(result)


def _sample(text: str) -> int | float:
    """`1` is a number of rows, `1.0` a share of them."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number.") from None


def verify(
    db: Database,
    table: TableName,
    column: ColumnName,
    *,
    sample: Annotated[
        float | None,
        typer.Option(
            help="Look at so many rows (1 is one), or at such a share of them (0.01; 1.0 is all); "
            "by default at all.",
            metavar="N",
            parser=_sample,
        ),
    ] = None,
    run: Annotated[
        bool,
        typer.Option(
            "--run", help="Call the function, too, and compare what it returns.", metavar=""
        ),
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Compare every value's receipt with its inputs, and say which rows are not right.

    Exits with 1 where a value is other than its column says. Values that people wrote are right;
    --run says how many of them the function would give otherwise.
    """
    opened = connect(db, storage_option).open_table(table)
    _check_column(opened, column)
    with functions_print_aside():
        report = opened.verify(column, sample=sample, run=run)
    if as_json:
        emit(report_record(report))
    else:
        say(str(report))
    if not report.ok:
        raise typer.Exit(1)


def _function(name: str | None, inputs: str | None) -> Any:
    columns = names(inputs)
    if name is None:
        if columns is not None:
            raise UserInputError("--inputs says what feeds --udf: give that too.")
        return None
    from geneva import UDF

    function = load_function(name)
    if not isinstance(function, UDF):
        raise UserInputError(f"{name} is a chunker: it makes a view (geneva view create --add).")
    return function if columns is None else (function, columns)


def _check_column(table: Table, column: str) -> None:
    hint = "To add it as a computed one: geneva backfill ... --udf module:function --save."
    check_columns(table, [column], hint)


def _check_where(table: Table, where: str | None, column: str) -> None:
    """Refuse a clause before anything is saved; one about a column that is to be can't be read."""
    if where is not None and (column in table.schema.names or column not in where):
        table.query().where(where)


def _save(table: Table, column: str, function: Any, *, keep: bool) -> None:
    if function is None:
        raise UserInputError("--save keeps the function of --udf: give that too.")
    if column not in table.schema.names:
        given = function[0] if isinstance(function, tuple) else function
        several = isinstance(given, UDF) and given.unpacks
        if several and column not in (made := [field.name for field in given.outputs]):
            raise UserInputError(f"{given.name!r} fills {', '.join(made)}, and not {column!r}.")
        table.add_columns(function if several else {column: function})
        return
    kept = {"keep": "computed"} if keep else {}
    table.alter_columns({"path": column, "udf": function, **kept})


# ---------------------------------------------------------------------------------- as records


def plan_record(planned: BackfillPlan) -> dict[str, Any]:
    """A plan for machines."""
    return {
        "table": planned.table,
        "version": planned.version,
        "column": planned.column,
        "columns": list(planned.columns or (planned.column,)),
        "udf": planned.udf_name,
        "udf_version": planned.udf_version,
        "where": planned.where,
        "nothing_to_do": planned.is_empty,
        "total_rows": planned.total_rows,
        "rows_to_compute": planned.rows_to_compute,
        "rows_to_run": planned.rows_to_run,
        "rows_reused": planned.rows_reused,
        "rows_to_adopt": planned.rows_to_adopt,
        "rows_checked_by_receipt": planned.checked_rows,
        "estimated_seconds": planned.estimate.seconds if planned.estimate is not None else None,
        "upstream": [plan_record(upstream) for upstream in planned.upstream],
        "reasons": {reason.value: rows for reason, rows in planned.reasons().items()},
        "fragments": [
            {
                "id": fragment.fragment_id,
                "action": fragment.action.value,
                "reason": fragment.reason.value,
                "rows_to_compute": fragment.compute.count,
                "rows_to_run": fragment.rows_to_run,
            }
            for fragment in planned.fragments
        ],
        "skipped_fragments": planned.skipped_fragments,
        "notes": list(planned.notes),
    }


def report_record(report: VerifyReport) -> dict[str, Any]:
    """What a verification found, for machines."""
    return {
        "table": report.table,
        "column": report.column,
        "version": report.version,
        "rows": report.rows,
        "total_rows": report.total_rows,
        "ok": report.ok,
        "counts": {state.value: rows for state, rows in report.counts.items()},
        "kept_values": report.kept_values,
        "examples": [
            {"row_address": found.address, "state": found.state.value} for found in report.examples
        ],
    }


def result_record(result: JobResult) -> dict[str, Any]:
    """A job's outcome for machines."""
    return {
        "job_id": result.job_id,
        "status": result.status.value,
        "followed": list(result.followed),
        "rows_computed": result.rows_computed,
        "rows_reused": result.rows_reused,
        "rows_failed": result.rows_failed,
        "rows_committed": result.rows_committed,
        "fragments_committed": result.fragments_committed,
        "metrics": result.progress.metrics(),
    }


def show_result(result: JobResult) -> None:
    """Print a job's outcome in a line."""
    say(str(result))

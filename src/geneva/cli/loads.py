"""`geneva load-columns`: columns of a table, loaded from files by key."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from geneva.cli.arguments import AsJson, Database, StorageOption, TableName, names, takes_options
from geneva.cli.backfills import result_record, show_result
from geneva.cli.database import connect
from geneva.cli.terminal import emit
from geneva.options import LoadArguments


@takes_options(LoadArguments)
def load_columns(
    db: Database,
    table: TableName,
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A file, a folder, or several files: paths or URIs, of Parquet, Lance or Arrow.",
            show_default=False,
        ),
    ],
    *,
    pk: Annotated[
        str,
        typer.Option("--pk", metavar="COLUMN", help="The key, of the same name on both sides."),
    ],
    columns: Annotated[
        str,
        typer.Option(
            "--columns",
            metavar="a,b",
            help="The columns to load; those that the table doesn't have are added.",
        ),
    ],
    source_format: Annotated[
        str | None,
        typer.Option(
            "--source-format",
            metavar="parquet|lance|ipc",
            help="What the source is stored as; by default by its suffix.",
        ),
    ] = None,
    on_missing: Annotated[
        str,
        typer.Option(
            "--on-missing",
            metavar="carry|null|error",
            help="What to do with rows whose key is not in the source: keep their value, make it "
            "NULL, or load nothing.",
        ),
    ] = "carry",
    as_json: AsJson = False,
    storage_option: StorageOption = None,
    **options: Any,
) -> None:
    """Load columns from files, joined by key, on Spark.

    A load that is run again does what is left: rows that came since, or what was not finished.
    """
    result = (
        connect(db, storage_option)
        .open_table(table)
        .load_columns(
            source if len(source) > 1 else source[0],
            pk,
            names(columns) or [],
            source_format=source_format,
            on_missing=on_missing,
            **options,
        )
    )
    return emit(result_record(result)) if as_json else show_result(result)

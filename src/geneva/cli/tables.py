"""`geneva tables`, `geneva describe` and `geneva sample`: looking, without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geneva.cli.arguments import AsJson, Database, StorageOption, TableName, Where, names
from geneva.cli.database import check_columns, connect, connect_to_look
from geneva.cli.functions import load_function
from geneva.cli.terminal import emit, facts, functions_print_aside, grid, say
from geneva.errors import UserInputError
from geneva.render.plain import plain
from geneva.render.text import count

if TYPE_CHECKING:
    from geneva.table import Table


def tables(
    db: Database,
    *,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """List the tables and views of a database, with their branches and those in namespaces."""
    from geneva.cli.summaries import list_tables

    found = list_tables(connect_to_look(db, storage_option))
    if as_json:
        return emit({"tables": found})
    if not found:
        return say("There are no tables in this database.")
    return grid(
        ("name", "kind", "rows", "version", "fragments", "computed columns"),
        [
            (table["name"], "unreadable", "", "", "", table["error"])
            if table["error"] is not None
            else (
                table["name"],
                table["kind"],
                f"{table['rows']:,}",
                table["version"],
                table["fragments"],
                ", ".join(table["computed_columns"]),
            )
            for table in found
        ],
        numbers=("rows", "version", "fragments"),
    )


def preview(
    db: Database,
    table: TableName,
    column: Annotated[
        str | None, typer.Argument(help="A computed column, whose function is tried.")
    ] = None,
    *,
    udf: Annotated[
        str | None,
        typer.Option("--udf", metavar="MODULE:FUNCTION", help="A function to try instead."),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option("--inputs", metavar="a,b", help="The columns that feed --udf."),
    ] = None,
    rows: Annotated[int, typer.Option("-n", "--rows", metavar="N", help="How many rows.")] = 5,
    where: Where = None,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Try a function on a few rows, here: values, failures, time, and the time for the table.

    No Spark is started and nothing is written.
    """
    if (column is None) == (udf is None):
        raise UserInputError("Name a computed column, or a function with --udf: one of the two.")
    tried: Any = column
    if udf is not None:
        function = load_function(udf)
        tried = (function, names(inputs)) if inputs else function
    opened = connect(db, storage_option).open_table(table)
    with functions_print_aside():
        shown = opened.preview(tried, rows, where=where)
    return emit(shown.to_record()) if as_json else say(str(shown))


def describe(
    db: Database,
    table: TableName,
    *,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Show a table's columns, how each is computed, and how many rows are stale and why.

    Of a view also its query, and whether it is up to date with its source. Nothing is computed.
    """
    from geneva.cli.summaries import table_description

    description = table_description(connect_to_look(db, storage_option).open_table(table))
    if as_json:
        return emit(description)
    facts(
        (
            ("view" if description["is_view"] else "table", description["name"]),
            ("rows", f"{description['rows']:,} in {count(description['fragments'], 'fragment')}"),
            ("version", description["version"]),
            ("row ids", "stable" if description["stable_row_ids"] else "not stable"),
        )
    )
    say()
    grid(
        ("column", "type", "computed"),
        [(c["name"], c["type"], "yes" if c["computed"] else "") for c in description["columns"]],
    )
    if description["computed_columns"]:
        _show_computed(description["computed_columns"])
    if description["view"] is not None:
        _show_view(description["view"])
    return None


def _show_computed(columns: list[dict[str, Any]]) -> None:
    say()
    grid(
        ("computed column", "function", "version", "stale rows", "because"),
        [
            (
                c["name"],
                _call(c),
                c["udf_version"][:12],
                "" if c["stale_rows"] is None else f"{c['stale_rows']:,}",
                _because(c),
            )
            for c in columns
        ],
        numbers=("stale rows",),
    )
    for column in columns:
        for note in column["notes"]:
            say(plain(f"{column['name']}: {note}"), "dim")


def _call(column: Mapping[str, Any]) -> str:
    """How a column is computed, and which others the same call fills."""
    others = f" with {', '.join(column['filled_with'])}" if column["filled_with"] else ""
    return f"{column['udf']}({', '.join(column['inputs'])}){others}"


def _because(column: Mapping[str, Any]) -> str:
    if column["error"] is not None:
        return f"not known: {column['error']}"
    parts = [reasons(column["reasons"])] if column["reasons"] else []
    if column["failed_rows"]:
        parts.append(f"failed and skipped: {column['failed_rows']:,}")
    return "; ".join(parts) or "up to date"


def _show_view(view: Mapping[str, Any]) -> None:
    say()
    latest = view["latest_source_version"]
    if view["error"] is not None:
        state = f"can't be refreshed: {view['error']}"
    elif view["up_to_date"]:
        state = "up to date"
    elif view["source_version"] == latest:
        state = "not refreshed yet, or not to the end"
    else:
        state = f"behind: the source is at version {latest}"
    facts(
        (
            ("source", f"{view['source']} at version {view['source_version']}"),
            ("state", state),
            ("where", view["where"]),
            ("shuffle seed", view["shuffle_seed"]),
            ("limit", view["limit"]),
            ("offset", view["offset"]),
        )
    )
    say()
    grid(
        ("view column", "kind", "from"),
        [
            (
                c["name"],
                c["kind"],
                f"{c['udf']}({', '.join(c['inputs'])})" if c["udf"] else c["expression"],
            )
            for c in view["columns"]
        ],
    )


def reasons(counts: Mapping[str, int]) -> str:
    """Reasons with their rows, the commonest first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason}: {rows:,}" for reason, rows in ordered)


def sample(
    db: Database,
    table: TableName,
    *,
    rows: Annotated[
        int,
        typer.Option(
            "-n", "--rows", help="At most so many rows.", min=1, max=2**31 - 1, metavar="N"
        ),
    ] = 10,
    where: Where = None,
    columns: Annotated[
        str | None, typer.Option(metavar="a,b", help="Only these columns; by default all.")
    ] = None,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Show a few rows of a table."""
    opened = connect_to_look(db, storage_option).open_table(table)
    from geneva.render.values import cell_text
    from geneva.storage.lance.dataset import open_dataset
    from geneva.storage.lance.fragments import is_blob

    chosen = names(columns)
    check_columns(opened, chosen or ())
    wanted = chosen or list(opened.schema.names)
    if where is not None:
        found = _matching(opened, where, wanted, rows)
    else:
        # A document has the bytes of blobs, as of all bytes; people are shown how many there are.
        blob_handling = "all_binary" if as_json else "blobs_descriptions"
        scanner = open_dataset(opened.ref).scanner(wanted, limit=rows, blob_handling=blob_handling)
        found = scanner.to_table().to_pylist()
    if as_json:
        return emit({"table": table, "columns": wanted, "rows": found})
    if not found:
        return say("There are no such rows.")
    blobs = {field.name for field in opened.schema if is_blob(field)}

    def shown(name: str, value: Any) -> str:
        is_place = name in blobs and isinstance(value, dict)  # where Lance has the bytes
        return f"<{value['size']:,} bytes>" if is_place else cell_text(value)

    return grid(wanted, [[shown(name, row[name]) for name in wanted] for row in found])


def _matching(table: Table, where: str, columns: list[str], limit: int) -> list[dict[str, Any]]:
    """Rows by the SQL of queries and backfills; LanceDB's own reads quotes in another way."""
    from geneva.storage.lance.dataset import open_dataset
    from geneva.storage.lance.expressions import RowReader
    from geneva.storage.lance.row_ids import read_row_ids

    dataset = open_dataset(table.ref)
    values = RowReader(dataset, columns).take(read_row_ids(dataset, where)[:limit])
    rows = zip(*(array.to_pylist() for array in values), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]

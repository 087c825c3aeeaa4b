"""`geneva demo`: a table, three computed columns, and only the work that is needed."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from geneva.cli.arguments import AsJson
from geneva.cli.terminal import emit, heading, out, say
from geneva.errors import UserInputError
from geneva.model.uris import resolve, table_uri
from geneva.render.text import agree, count

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.jobs import JobResult
    from geneva.table import Table
    from geneva.udf.declare import UDF

TABLE = "pictures"
FRAGMENTS = 4
_SHOWN = ("id", "caption", "words", "kilopixels", "embedding")


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Where to make the database; by default a new temporary folder.",
            file_okay=False,
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", help="How many pictures to start with.", min=8, max=1_000_000)
    ] = 4_000,
    *,
    as_json: AsJson = False,
) -> None:
    """Make a table of pictures, add three computed columns, and watch them fill on local Spark."""
    out.quiet = as_json
    try:
        document = _demonstrate(directory, rows)
    finally:
        out.quiet = False
    if as_json:
        emit(document)


def _demonstrate(directory: Path | None, rows: int) -> dict[str, Any]:
    """Run the steps; return what they did, for machines."""
    from geneva.spark.embedded.java import find_java

    find_java()  # Without one nothing below can end well: say so before anything is written.
    import geneva
    from geneva.cli.demo_udfs import Embedding, kilopixels, words

    columns: dict[str, UDF] = {
        "words": words,
        "kilopixels": kilopixels,
        "embedding": cast("UDF", Embedding),  # a type checker sees the class, not its decorator
    }
    db = geneva.connect(_folder(directory))
    table = _create(db, rows)
    _declare(table, columns)
    results = [
        *_fill(table, columns),
        *_append(table, columns, rows // 4),
        *_compact(table, columns),
    ]
    _show(table)
    _next_steps(db)
    return {
        "database": str(db.uri),
        "table": TABLE,
        "rows": table.count_rows(),
        "columns": table.schema.names,
        "jobs": [
            {"job_id": r.job_id, "status": r.status, "rows_computed": r.rows_computed}
            for r in results
        ],
    }


def _folder(directory: Path | None) -> Path:
    """Return the folder to work in, and refuse one that holds such a table already."""
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="geneva-demo-"))
    folder = Path(resolve(directory))
    if Path(table_uri(str(folder), TABLE)).exists():
        raise UserInputError(
            f"There is a table {TABLE!r} in {folder} already. Give another --dir, or remove it."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(f"{folder} can't be made: {error.strerror}.") from error
    return folder


def _create(db: Connection, rows: int) -> Table:
    from geneva.cli.demo_udfs import make_pictures

    heading(1, f"A table of {rows:,} generated pictures with captions")
    size = -(-rows // FRAGMENTS)
    table = db.create_table(TABLE, make_pictures(0, size))
    for first in range(size, rows, size):
        table.add(make_pictures(first, min(size, rows - first)))
    say(
        f"   {count(table.count_rows(), 'row')} in {count(_fragments(table), 'fragment')}: "
        f"{', '.join(table.schema.names)}"
    )
    return table


def _declare(table: Table, columns: dict[str, UDF]) -> None:
    heading(2, "Three columns, each the result of a Python function", "(only metadata is written)")
    _code("\n\n".join(_source(udf) for udf in columns.values()))
    names = ", ".join(f'"{column}": {udf.name}' for column, udf in columns.items())
    say()
    _code(f"table.add_columns({{{names}}})")
    table.add_columns(columns)


def _fill(table: Table, columns: dict[str, UDF]) -> list[JobResult]:
    heading(3, "Backfill, on a Spark of this machine", "(its start takes a few seconds)")
    return _backfill(table, columns)


def _append(table: Table, columns: dict[str, UDF], rows: int) -> list[JobResult]:
    from geneva.cli.demo_udfs import make_pictures

    first = table.count_rows()
    heading(4, f"{count(rows, 'row')} {agree(rows, 'are')} appended: only they are computed")
    table.add(make_pictures(first, rows))
    _plan(table, "embedding")
    return _backfill(table, columns)


def _compact(table: Table, columns: dict[str, UDF]) -> list[JobResult]:
    before = _fragments(table)
    table.optimize()
    heading(5, f"{before} fragments are compacted into {_fragments(table)}: nothing is computed")
    _plan(table, "embedding")
    return _backfill(table, columns)


def _show(table: Table) -> None:
    from rich.table import Column
    from rich.table import Table as Grid

    first = table.search().where("id = 0").to_list()[0]
    alike = table.search(first["embedding"], vector_column_name="embedding").limit(5).to_list()
    heading(6, f"The pictures most like the first one, {first['caption']!r}")
    grid = Grid(*(Column(name, no_wrap=True) for name in _SHOWN))
    for row in alike:
        grid.add_row(
            str(row["id"]),
            row["caption"],
            str(row["words"]),
            f"{row['kilopixels']:.2f}",
            f"{len(row['embedding'])} floats",
        )
    out.print(grid)


def _next_steps(db: Connection) -> None:
    heading(7, "The data is yours")
    say(f"   {db.uri}")
    say("   Look at it with Python:")
    _code(
        f"import geneva\n"
        f"db = geneva.connect({str(db.uri)!r})\n"
        f"table = db.open_table({TABLE!r})\n"
        f"table.update(where='id < 10', values={{'caption': 'a picture of nothing at all'}})\n"
        f"print(table.plan_backfill('words'))\n"
        f"print(repr(table.backfill('words')))\n"
        f"for job in db.list_jobs():\n"
        f"    print(job.created_at, job.column_name, job.status, job.metrics['udf_rows'], 'rows')"
    )


# ------------------------------------------------------------------------------------- pieces


def _backfill(table: Table, columns: dict[str, UDF]) -> list[JobResult]:
    results = []
    for column in columns:
        results.append(table.backfill(column))
        _show_outcome(column, results[-1], table.count_rows())
    return results


def _show_outcome(column: str, result: JobResult, total: int) -> None:
    say(
        f"   {column:<12} {result.status}: {result.rows_computed:,} of {count(total, 'row')} "
        f"computed, {result.progress.seconds:.1f} s"
    )


def _plan(table: Table, column: str) -> None:
    _code(f"print(table.plan_backfill({column!r}))")
    say("\n".join(f"   | {line}" for line in str(table.plan_backfill(column)).splitlines()), "dim")


def _fragments(table: Table) -> int:
    return len(table.to_lance().get_fragments())


def _source(udf: UDF) -> str:
    target: Any = udf.__dict__["__wrapped__"]
    return inspect.getsource(target).rstrip()


def _code(text: str) -> None:
    """Print Python, coloured where there are colours, and never wrapped: it is to be copied."""
    from rich.syntax import Syntax

    indented = "\n".join(f"   {line}" if line else line for line in text.splitlines())
    if not out.is_terminal:
        say(indented)
        return
    coloured = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(
        indented
    )
    coloured.rstrip()
    out.print(coloured, soft_wrap=True)

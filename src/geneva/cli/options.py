"""What commands share: their arguments, the connection, and functions named on the command line."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geneva.cli.terminal import EXIT_CODES, hide
from geneva.errors import ColumnNotFoundError, UserInputError

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.table import Table

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""How a function is named: `module:function`."""


def epilog(*examples: str) -> str:
    """The end of a command's help: examples, and what its exit codes mean."""
    lines = [f"Example:  {example}".replace("[", "\\[") for example in examples]
    return "\n\n".join([*lines, EXIT_CODES])


# ------------------------------------------------------------------------ completion, arguments


def complete_table(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of tables, for the shell; in trouble none, and no message."""
    return _offered(lambda db: db.table_names(), ctx, incomplete)


def complete_view(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of views, for the shell."""
    return _offered(lambda db: db.list_materialized_views(), ctx, incomplete)


def complete_column(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the table's computed columns, for the shell."""
    table = str(ctx.params.get("table"))
    return _offered(lambda db: list(db.open_table(table).computed_columns()), ctx, incomplete)


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of jobs, newest first, for the shell."""
    return _offered(lambda db: [job.job_id for job in db.list_jobs()], ctx, incomplete)


def _offered(names: Any, ctx: typer.Context, incomplete: str) -> list[str]:
    try:
        db = connect(str(ctx.params["db"]), ctx.params.get("storage_option"))
        return [name for name in names(db) if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001  a prompt is no place for an error
        return []


Database = Annotated[
    str,
    typer.Argument(
        metavar="DB",
        help="The database: a folder, or a URI such as s3://bucket/path.",
        show_default=False,
    ),
]
TableName = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="The table's name, or a view's.",
        autocompletion=complete_table,
        show_default=False,
    ),
]
ColumnName = Annotated[
    str,
    typer.Argument(
        metavar="COLUMN",
        help="The computed column.",
        autocompletion=complete_column,
        show_default=False,
    ),
]
ViewName = Annotated[
    str,
    typer.Argument(
        metavar="VIEW", help="The view's name.", autocompletion=complete_view, show_default=False
    ),
]
JobId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The job's id, or its first characters.",
        autocompletion=complete_job,
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, for programs.", metavar="")
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="A key or setting of the object store; can be given several times, and is never "
        "shown. In the variable they are separated by spaces. What the store's own variables say "
        "(AWS_ACCESS_KEY_ID, ...) counts too.",
        envvar="GENEVA_STORAGE_OPTIONS",
        show_default=False,
    ),
]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="SQL", help="Only rows that satisfy this condition."),
]
Concurrency = Annotated[
    int | None,
    typer.Option(help="Tasks at once; by default one a slot of Spark.", min=1, metavar="N"),
]
Threads = Annotated[
    int,
    typer.Option(
        "--intra-applier-concurrency",
        help="Threads in each task, for functions that wait.",
        min=1,
        metavar="N",
    ),
]
CheckpointSize = Annotated[
    int | None,
    typer.Option(help="Rows a checkpoint holds; by default made by time.", min=1, metavar="N"),
]
TaskSize = Annotated[
    int | None,
    typer.Option(help="Rows a task computes; by default by measured speed.", min=1, metavar="N"),
]
CommitGranularity = Annotated[
    int, typer.Option(help="Fragments a commit publishes.", min=1, metavar="N")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        help="Stop after so many seconds; what is finished is kept.", min=0, metavar="SECONDS"
    ),
]


# ------------------------------------------------------------------------------ the connection


def connect(db: str, storage_option: Iterable[str] | None, *, make: bool = False) -> Connection:
    """Open the database. A local folder has to be there, unless it is to be made."""
    options = read_storage_options(storage_option)
    if "://" not in db and not make and not Path(db).expanduser().is_dir():
        raise UserInputError(f"There is no folder {db!r}: give that of a database, or a URI.")
    import geneva

    return geneva.connect(db, storage_options=options)


def read_storage_options(given: Iterable[str] | None) -> dict[str, str]:
    """Pairs of KEY=VALUE as a dict; a wrong one is refused without being repeated."""
    options: dict[str, str] = {}
    for position, pair in enumerate(given or (), start=1):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UserInputError(f"Storage option number {position} is not of the form KEY=VALUE.")
        options[key.strip()] = value
    hide(options.values())
    return options


def names(text: str | None) -> list[str] | None:
    """The names in `a,b,c`; None when nothing was given."""
    if text is None:
        return None
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise UserInputError(f"{text!r} names no column. Write them as a,b,c.")
    return found


def pairs(given: Iterable[str] | None, option: str) -> dict[str, str]:
    """Pairs of NAME=WHAT, in order."""
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, what = text.partition("=")
        if not equals or not name.strip() or not what.strip():
            raise UserInputError(f"{option} {text!r} is not of the form NAME=WHAT.")
        found[name.strip()] = what.strip()
    return found


def check_columns(table: Table, columns: Iterable[str], hint: str = "") -> None:
    """Refuse names that the table doesn't have, with the one that was probably meant."""
    known = table.schema.names
    for name in columns:
        if name not in known:
            close = get_close_matches(name, known, 1)
            meant = [f"Did you mean {close[0]!r}?"] if close else []
            raise ColumnNotFoundError(
                " ".join(
                    [
                        f"Table {table.name!r} has no column {name!r}.",
                        *meant,
                        f"It has: {', '.join(known)}.",
                        *([hint] if hint else []),
                    ]
                )
            )


# ------------------------------------------------------------------------------- user functions


def load_function(name: str) -> Any:
    """The UDF or chunker `module:function`, imported from the current folder or what is installed.

    A plain function becomes a UDF; its types are read off its annotations.
    """
    if not FUNCTION.fullmatch(name):
        raise UserInputError(f"{name!r} names no function. Write module:function.")
    module_name, _, path = name.partition(":")
    found: Any = _import(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise UserInputError(f"Module {module_name!r} has no {path!r}.")
        found = getattr(found, part)
    from geneva import UDF, Chunker, udf

    if isinstance(found, UDF | Chunker):
        return found
    if not callable(found):
        raise UserInputError(f"{name} is a {type(found).__name__}, not a function.")
    return udf(found)


def _import(module: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            text = f"There is no module {module!r} in {folder}, nor is one installed."
        else:
            text = f"Module {module!r} needs {missing!r}, which is not installed."
        raise UserInputError(text) from error
    except Exception as error:
        place = _place(error)
        raise UserInputError(
            f"Module {module!r} can't be imported: {type(error).__name__}: {error}{place}"
        ) from error


def _place(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"

"""`geneva view ...`: making, refreshing and dropping materialized views."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geneva.cli.arguments import (
    AsJson,
    Database,
    StorageOption,
    ViewName,
    Where,
    complete_table,
    epilog,
    group,
    names,
    pairs,
    takes_options,
)
from geneva.cli.backfills import result_record, show_result
from geneva.cli.database import connect, connect_to_look
from geneva.cli.functions import FUNCTION, load_function
from geneva.cli.summaries import planned_refresh, what_is_wrong
from geneva.cli.terminal import confirm, emit, grid, say, warn
from geneva.errors import UserInputError
from geneva.options import RefreshArguments

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.planning.refresh import RefreshPlan
    from geneva.query import Query
    from geneva.storage.views.definition import ViewName as ListedView
    from geneva.view import MaterializedView

app = group("Materialized views: queries whose results are kept as tables.")

SourceVersion = Annotated[
    int | None,
    typer.Option(
        "--src-version",
        help="The source's version to go to, also an older one; by default the latest.",
        min=1,
        metavar="N",
    ),
]


NewName = Annotated[
    str, typer.Argument(metavar="NAME", help="The new view's name.", show_default=False)
]
Source = Annotated[
    str,
    typer.Option(
        metavar="TABLE",
        help="The table or view to make it of.",
        autocompletion=complete_table,
        show_default=False,
    ),
]
Select = Annotated[
    str | None, typer.Option(metavar="a,b", help="Only these columns; by default all.")
]
Add = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=WHAT",
        help="A column to add: module:function from the current folder, or SQL. Can be given "
        "several times. A chunker gives several rows for one.",
    ),
]
TableFunction = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="A table function (@udtf) from the current folder: the view has the rows that it "
        "makes of the query's, or of each partition of them.",
    ),
]
Shuffle = Annotated[
    int | None, typer.Option(metavar="SEED", help="Shuffle the rows, as this seed says.")
]
Limit = Annotated[int | None, typer.Option(help="At most so many rows.", min=0, metavar="N")]
Offset = Annotated[
    int | None, typer.Option(help="Leave out the first so many rows.", min=0, metavar="N")
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Refuse a source without stable row ids, not just warn.", metavar=""
    ),
]


@app.command(
    epilog=epilog(
        "geneva view create my-database english --source articles --where \"lang = 'en'\" "
        "--select id,text --add words=functions:words"
    )
)
def create(
    db: Database,
    name: NewName,
    *,
    source: Source,
    where: Where = None,
    select: Select = None,
    add: Add = None,
    udtf: TableFunction = None,
    shuffle: Shuffle = None,
    limit: Limit = None,
    offset: Offset = None,
    strict: Strict = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Make a view. Its values come with `geneva view refresh`."""
    connection = connect(db, storage_option)
    query: Query = connection.open_table(source).query()
    if where is not None:
        query = query.where(where)
    if (columns := names(select)) is not None:
        query = query.select(columns)
    for column, what in pairs(add, "--add").items():
        made = load_function(what) if FUNCTION.fullmatch(what) else what
        query = query.add_column({column: made})
    if shuffle is not None:
        query = query.shuffle(shuffle)
    query = query.limit(limit).offset(offset)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        if udtf is None:
            view = connection.create_materialized_view(name, query, strict=strict)
        else:
            view = connection.create_udtf_view(name, query, load_function(udtf), strict=strict)
    for warning in caught:
        warn(warning.message)
    if as_json:
        return emit(view_summary(view))
    return say(f"View {name!r} is made. Fill it with: geneva view refresh {db} {name}")


@app.command(
    name="refresh",
    epilog=epilog(
        "geneva view refresh my-database english",
        "geneva view refresh my-database english --src-version 5",
    ),
)
@takes_options(RefreshArguments)
def refresh(
    db: Database,
    view: ViewName,
    *,
    src_version: SourceVersion = None,
    max_rows_per_fragment: Annotated[
        int | None,
        typer.Option(help="Rows of a fragment of new rows; by default 65,536.", min=1, metavar="N"),
    ] = None,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
    **options: Any,
) -> None:
    """Bring a view up to date with its source, at the cost of what changed."""
    opened = _view(connect(db, storage_option), view)
    result = opened.refresh(src_version, max_rows_per_fragment=max_rows_per_fragment, **options)
    return emit(result_record(result)) if as_json else show_result(result)


@app.command(name="plan", epilog=epilog("geneva view plan my-database english"))
def plan(
    db: Database,
    view: ViewName,
    *,
    src_version: SourceVersion = None,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Say what a refresh would do. Changes nothing, runs nothing."""
    planned = _view(connect_to_look(db, storage_option), view).plan_refresh(src_version)
    return emit(plan_record(planned)) if as_json else say(str(planned))


@app.command(name="list", epilog=epilog("geneva view list my-database"))
def list_views(
    db: Database, *, as_json: AsJson = False, storage_option: StorageOption = None
) -> None:
    """List the views of a database, and which are up to date."""
    connection = connect_to_look(db, storage_option)
    lines = [_listed(connection, name) for name in connection.list_materialized_views()]
    if as_json:
        return emit({"views": lines})
    if not lines:
        return say("There are no views in this database.")
    return grid(
        ("name", "kind", "source", "source version", "rows", "state"),
        [
            (line["name"], "", "", "", "", f"unreadable: {line['error']}")
            if line["kind"] is None
            else (
                line["name"],
                line["kind"],
                line["source"],
                line["source_version"],
                f"{line['rows']:,}",
                _state(line),
            )
            for line in lines
        ],
        numbers=("source version", "rows"),
    )


def _listed(connection: Connection, name: ListedView) -> dict[str, Any]:
    """A view in a line. One that can't be read says why, and hides no other."""
    try:
        view: Any = connection.open_table(name)
        if name.kind == "lancedb":
            return {**dict.fromkeys(_LINE), "name": name, "kind": name.kind, "rows": len(view)}
        return view_summary(view)
    except BaseException as error:  # noqa: BLE001
        return {**dict.fromkeys(_LINE), "name": name, "error": what_is_wrong(error)}


_LINE = ("name", "kind", "source", "source_version", "rows", "up_to_date", "error")
"""What is said of a view in a line; None where that can't be read, or is not Geneva's."""


def _state(line: Mapping[str, Any]) -> str:
    if line["kind"] == "lancedb":
        return "LanceDB's own"
    if line["error"] is not None:
        return f"can't be refreshed: {line['error']}"
    return "up to date" if line["up_to_date"] else "to be refreshed"


@app.command(epilog=epilog("geneva view drop my-database english --yes"))
def drop(
    db: Database,
    view: ViewName,
    *,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Don't ask before dropping.", metavar="")
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Drop a view. Its source stays."""
    connection = connect(db, storage_option)
    connection.open_materialized_view(view)
    if not yes:
        confirm(f"Drop view {view!r} and its computed values?")
    connection.drop_materialized_view(view)
    return emit({"dropped": view}) if as_json else say(f"View {view!r} is dropped.")


def _view(connection: Connection, name: str) -> MaterializedView:
    from geneva.view import MaterializedView

    found = connection.open_table(name)
    if not isinstance(found, MaterializedView):
        raise UserInputError(f"{name!r} is a table, not a view.")
    return found


# ---------------------------------------------------------------------------------- as records


def view_summary(view: MaterializedView) -> dict[str, Any]:
    """A view in a line, for machines; one that can't be refreshed says why."""
    found = planned_refresh(view)
    return {
        "name": view.ref.name,
        "kind": "geneva" if view.definition.udtf is None else "udtf",
        "source": view.definition.base_table,
        "source_version": view.source_version,
        "rows": len(view),
        "up_to_date": None if isinstance(found, str) else found.is_empty,
        "error": found if isinstance(found, str) else None,
    }


def plan_record(planned: RefreshPlan) -> dict[str, Any]:
    """A refresh's plan for machines."""
    return {
        "view": planned.view,
        "source": planned.source,
        "from_version": planned.from_version,
        "to_version": planned.to_version,
        "nothing_to_do": planned.is_empty,
        "rows_entering": planned.rows_entering,
        "rows_leaving": planned.rows_leaving,
        "columns": [
            {"name": c.name, "rows": c.rows, "runs_udf": c.runs_udf} for c in planned.columns
        ],
        "partitions": None if planned.partitions is None else asdict(planned.partitions),
        "notes": list(planned.notes),
    }

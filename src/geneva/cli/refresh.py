"""`geneva refresh`: everything that is computed in a database brought up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from geneva.cli.arguments import AsJson, Database, StorageOption, takes_options
from geneva.cli.backfills import result_record
from geneva.cli.database import connect, connect_to_look
from geneva.cli.terminal import beside_error, emit, notes_of, readable, redact, say
from geneva.errors import IncompleteRefreshError
from geneva.options import WorkArguments

if TYPE_CHECKING:
    from geneva.jobs import JobResult
    from geneva.planning.database import DatabasePlan
    from geneva.planning.graph import Step


@takes_options(WorkArguments)
def refresh(
    db: Database,
    *,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what there is to do, and do nothing.", metavar=""),
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
    **options: Any,
) -> None:
    """Bring all computed columns and views up to date, sources before what is made from them.

    Each is a job of its own; what has nothing to do gets none. Where one fails, what is made from
    it is left out and all else is done. Branches are left alone.
    """
    from geneva.database_refresh import plan_database, refresh_database

    if dry_run:
        planned = plan_database(connect_to_look(db, storage_option))
        return emit(plan_record(planned)) if as_json else say(redact(str(planned)))
    jobs: list[dict[str, Any]] = []
    beside_error["jobs"] = jobs

    def show(step: Step, result: JobResult) -> None:
        jobs.append({**_named(step), **result_record(result)})
        if not as_json:
            say(f"{step}: {result!s}")  # its format is that of its id

    try:
        refresh_database(connect(db, storage_option), options, show)
    except IncompleteRefreshError as error:
        beside_error["failed"] = {what: readable(e) for what, e in error.failed.items()}
        beside_error["left_out"] = list(error.left_out)
        for what, cause in error.failed.items():
            for note in notes_of(cause):
                error.add_note(f"{what}:\n{note}")
        raise
    if as_json:
        return emit({"jobs": jobs})
    return None if jobs else say("Everything is up to date.")


def plan_record(planned: DatabasePlan) -> dict[str, Any]:
    """What there is to do, for machines."""
    return {
        "nothing_to_do": planned.is_empty,
        "steps": [
            {
                **_named(each.step),
                "nothing_to_do": each.is_empty,
                "rows_to_run": None if each.plan is None else each.plan.rows_to_run,
                "waits_for": list(each.waits_for),
                "error": redact(each.trouble) or None,
            }
            for each in planned.steps
        ],
        "unreadable": {name: redact(why) for name, why in planned.unreadable},
    }


def _named(step: Step) -> dict[str, Any]:
    return {"table": step.table, "columns": list(step.columns) or None}

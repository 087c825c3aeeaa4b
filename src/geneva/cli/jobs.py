"""`geneva jobs ...`: what runs, what ran, how far it is, and stopping it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geneva.cli.arguments import (
    AsJson,
    Database,
    JobId,
    StorageOption,
    complete_job,
    complete_table,
    epilog,
    group,
)
from geneva.cli.database import connect, connect_to_look
from geneva.cli.terminal import FAILED, emit, err, facts, grid, say
from geneva.errors import UserInputError
from geneva.model.jobs import metric
from geneva.render.plain import plain
from geneva.render.text import count, shorten, timestamp

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.storage.jobs.records import JobRecord

app = group("Jobs: backfills and refreshes, running and past, of all processes.")

SHORT_ID = 8
_WATCH_SECONDS = 0.5
_BARS = ("checkpointed", "ready_to_commit", "committed")


@app.command(
    name="list",
    epilog=epilog(
        "geneva jobs list my-database",
        "geneva jobs list my-database --table articles --status failed",
    ),
)
def list_jobs(
    db: Database,
    *,
    table: Annotated[
        str | None,
        typer.Option(help="Only jobs of this table.", autocompletion=complete_table),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(help="Only jobs that are pending, running, done, failed or cancelled."),
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", help="At most so many.", min=1, metavar="N")
    ] = 20,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """List jobs, newest first."""
    found = _listed(connect_to_look(db, storage_option), table, status)
    if as_json:
        return emit({"jobs": [job_record(job) for job in found[:limit]]})
    if not found:
        return say("There are no such jobs.")
    from geneva.storage.jobs.records import without_repeats

    listed = without_repeats(found)
    grid(
        ("job", "type", "table", "column", "status", "started", "seconds", "rows"),
        [
            (
                job.job_id[:SHORT_ID],
                job.job_type.lower(),
                job.table_name,
                job.column_name,
                job.state,
                f"{job.created_at:%Y-%m-%d %H:%M:%S}",
                f"{_seconds(job):.1f}",
                _rows(job, more),
            )
            for job, more in listed[:limit]
        ],
        numbers=("seconds", "rows"),
    )
    if len(listed) > limit:
        say(f"... and {len(listed) - limit:,} older ones: --limit shows more", "dim")
    return None


@app.command(epilog=epilog("geneva jobs show my-database 3f2a91c0"))
def show(
    db: Database, job: JobId, *, as_json: AsJson = False, storage_option: StorageOption = None
) -> None:
    """Show a job: how it stands, its settings, its numbers and what happened when."""
    found = connect_to_look(db, storage_option).get_job(job)
    if as_json:
        return emit(job_record(found, events=True))
    facts(
        (
            ("job", plain(found.job_id)),
            ("type", plain(found.job_type.lower())),
            ("table", plain(found.table_name)),
            ("column", plain(found.column_name)),
            ("status", plain(found.state)),
            ("started", timestamp(found.created_at)),
            ("seconds", f"{_seconds(found):.1f}"),
            ("driver", _driver(found)),
            ("spark", _spark(found)),
            ("error", found.error),
        )
    )
    for title, values in (("setting", found.config), ("number", found.metrics)):
        if shown := [(name, _number(value)) for name, value in values.items() if value is not None]:
            say()
            grid((title, "value"), shown, numbers=("value",))
    say()
    return grid(
        ("when", "event", "status"),
        [(f"{e.at:%H:%M:%S.%f}"[:-3], e.kind, e.payload.get("status", "")) for e in found.events],
    )


@app.command(epilog=epilog("geneva jobs logs my-database 3f2a91c0"))
def logs(
    db: Database, job: JobId, *, as_json: AsJson = False, storage_option: StorageOption = None
) -> None:
    """Show what the functions of a job printed and logged: the end of it, task by task."""
    connection = connect_to_look(db, storage_option)
    found = connection.get_job(job).logs()
    if as_json:
        return emit({"tasks": [{"at": o.at, "task": o.task, "text": o.text} for o in found]})
    if not found:
        return say("Nothing was printed, or it was not kept.")
    for line in str(found).splitlines():
        say(line)
    return None


@app.command(epilog=epilog("geneva jobs cancel my-database 3f2a91c0"))
def cancel(
    db: Database,
    job: JobId,
    *,
    wait: Annotated[
        bool, typer.Option("--wait", help="Come back when the job has ended.", metavar="")
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Ask a job to stop, whichever process runs it. What is finished is committed first."""
    connection = connect(db, storage_option)
    found = connection.get_job(job)
    if found.status.is_final:
        raise UserInputError(f"Job {found.job_id} has ended already: it is {found.status}.")
    connection.cancel_job(found.job_id)
    if not wait:
        asked = connection.get_job(found.job_id)
        return emit(job_record(asked)) if as_json else say(f"Job {found.job_id} is asked to stop.")
    while not (found := connection.get_job(found.job_id)).status.is_final:
        time.sleep(_WATCH_SECONDS)
    if as_json:
        return emit(job_record(found))
    return say(f"Job {found.job_id} has ended: it is {found.status}.")


@app.command(
    epilog=epilog("geneva jobs watch my-database", "geneva jobs watch my-database 3f2a91c0 --json")
)
def watch(
    db: Database,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="The job's id, or its first characters; by default the newest that runs.",
            autocompletion=complete_job,
            show_default=False,
        ),
    ] = None,
    *,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Follow a job until it ends: bars in a terminal, then its outcome.

    Ctrl-C stops the watching, not the job.

    The exit code is 0 when the job is done, and 1 when it failed or was cancelled.
    """
    connection = connect_to_look(db, storage_option)
    found = connection.get_job(job) if job is not None else _newest_running(connection)
    found = _follow(connection, found.job_id)
    if as_json:
        emit(job_record(found, events=True))
    else:
        committed, saved = (metric(found.metrics, n) for n in ("committed", "checkpointed"))
        more = f", {saved - committed:,} more saved" if saved > committed else ""
        say(
            f"{found.status}: {count(committed, 'row')} committed{more} in "
            f"{_seconds(found):.1f} s (job {found.job_id})"
        )
        if found.error:
            say(found.error)
    if found.status.value != "DONE":
        raise typer.Exit(FAILED)


def _follow(connection: Connection, job_id: str) -> JobRecord:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<30}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    job = connection.get_job(job_id)
    with Progress(*columns, console=err, disable=not err.is_terminal) as display:
        title = plain(job.column_name or job.table_name)
        bars = {name: display.add_task(f"{title} {name.replace('_', ' ')}") for name in _BARS}
        while True:
            metrics = job.metrics
            for name, bar in bars.items():
                total = metrics.get("total") or None
                display.update(bar, completed=metrics.get(name, 0), total=total)
            if job.status.is_final:
                return job
            time.sleep(_WATCH_SECONDS)
            job = connection.get_job(job_id)


# -------------------------------------------------------------------------------------- finding


def _listed(connection: Connection, table: str | None, status: str | None) -> list[JobRecord]:
    found = connection.list_jobs(table, status)
    if table is not None and not found and not connection.list_jobs(table):
        connection.open_table(table)  # where there is none, and never were jobs of it, says so
    return found


def _newest_running(connection: Connection) -> JobRecord:
    for job in connection.list_jobs():
        if not job.status.is_final:
            return job
    raise UserInputError("No job is running in this database: give the id of one.")


def _rows(job: JobRecord, more: int) -> str:
    """Rows that are safe; of a job that runs, of how many."""
    if job.had_nothing_to_do:
        return "nothing to do" + (f" ({count(more, 'more time')})" if more else "")
    saved, total = job.rows_done
    return f"{saved:,}" if job.status.is_final else f"{saved:,} of {total:,}"


def _seconds(job: JobRecord) -> float:
    """Between two events by the job's own clock; of a running job by ours, if that can be."""
    end = job.updated_at if job.status.is_final else datetime.now(UTC)
    ran = float(job.metrics.get("seconds") or 0.0)
    return max((end - job.created_at).total_seconds(), ran, 0.0)


def _driver(job: JobRecord) -> str | None:
    """Where the job was started, in one line; `--json` has what tells its process from others."""
    known = [f"{name} {job.driver[name]}" for name in ("host", "user", "pid") if name in job.driver]
    return plain(", ".join(known)) or None


def _spark(job: JobRecord) -> str | None:
    """What Spark calls the job, in one line."""
    parts = [
        f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in job.spark.items()
        if value
    ]
    return shorten("; ".join(parts), 300) or None


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def job_record(job: JobRecord, *, events: bool = False) -> dict[str, Any]:
    """A job for machines."""
    record: dict[str, Any] = {
        "job_id": job.job_id,
        "type": job.job_type,
        "table": job.table_name,
        "column": job.column_name,
        "status": job.status.value,
        "waiting_for": job.waiting_for,
        "created_at": job.created_at,
        "updated_at": job.updated_at,
        "seconds": round(_seconds(job), 3),
        "error": job.error,
        "config": dict(job.config),
        "metrics": job.metrics,
        "driver": job.driver,
        "spark": job.spark,
    }
    if events:
        record["events"] = [{"at": e.at, "kind": e.kind, "payload": e.payload} for e in job.events]
    return record

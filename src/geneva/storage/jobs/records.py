"""What is known of jobs: each one's record is the fold of its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from geneva.model.jobs import JobStatus, metric
from geneva.render import html
from geneva.render.text import count, timestamp
from geneva.storage.jobs.events import (
    FINAL_STATUSES,
    LOST_MARK,
    NO_TIME,
    UNREADABLE,
    JobEvent,
    mapping_in,
)

_LOST = (
    f"{LOST_MARK}the process that drove the job died or was not heard of for minutes. What it "
    "finished is kept; run the same again to go on."
)
_MAX_NUMBER = 2**63
_SHOWN_RECORDS = 50


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job, folded from its events."""

    job_id: str
    table_name: str
    column_name: str
    job_type: str
    status: JobStatus
    created_at: datetime
    updated_at: datetime
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What was asked for; of `get_job` and `list_jobs` also as JSON text (`JobConfig`)."""
    metrics: dict[str, Any] = field(default_factory=dict, repr=False)
    error: str | None = None
    driver: dict[str, Any] = field(default_factory=dict, repr=False)
    """Host and process id of the driver."""
    spark: dict[str, Any] = field(default_factory=dict, repr=False)
    """What Spark calls it: application and job ids, or session and operations on Connect; and the
    group that its jobs are in. Known when the job has ended."""
    events: tuple[JobEvent, ...] = field(default=(), repr=False)
    """In the order in which they happened, whatever order their rows are in."""
    waiting_for: str | None = None
    """The job that this one waits for: one of the same work that was there before it."""

    @property
    def launched_at(self) -> datetime:
        """When it was created, by Geneva's name."""
        return self.created_at

    @property
    def completed_at(self) -> datetime | None:
        """When it ended; None while it has not."""
        return self.updated_at if self.status.is_final else None

    @property
    def launched_by(self) -> str:
        """Who started it, and where."""
        return "@".join(str(self.driver[key]) for key in ("user", "host") if self.driver.get(key))

    @property
    def cluster_name(self) -> str | None:
        """The cluster of `db.context(cluster=...)` that it ran in."""
        return self.driver.get("cluster")

    @property
    def manifest_id(self) -> str | None:
        """The manifest of its function, or else of `db.context(manifest=...)`."""
        return self.driver.get("manifest")

    @property
    def manifest_checksum(self) -> str | None:
        """The checksum of that manifest."""
        return self.driver.get("manifest_checksum")

    @property
    def object_ref(self) -> None:
        """Of Ray; there is none here."""
        return

    @property
    def output_columns(self) -> list[str]:
        """The columns that it computed."""
        return list(self.config.get("columns") or [self.column_name])

    @property
    def input_columns(self) -> list[str]:
        """The columns that its function reads."""
        return list(self.config.get("inputs") or [])

    @property
    def died(self) -> bool:
        """Whether its process died before it ended."""
        return self.status is JobStatus.FAILED and self.error == _LOST

    @property
    def had_nothing_to_do(self) -> bool:
        """Whether the job ended well because everything was up to date."""
        idle = not self.metrics.get("total") and not self.metrics.get("seconds")
        return self.status is JobStatus.DONE and idle

    @property
    def state(self) -> str:
        """The status, and what it waits for."""
        waits = f" (waiting for {self.waiting_for[:8]})" if self.waiting_for else ""
        return f"{self.status}{waits}"

    @property
    def rows_done(self) -> tuple[int, int]:
        """Rows that are safe, and rows in all: committed, or until a job is done checkpointed."""
        saved = metric(self.metrics, "committed")
        if self.status is not JobStatus.DONE:
            saved = max(saved, metric(self.metrics, "checkpointed"))
        return int(saved), int(metric(self.metrics, "total"))

    def _repr_html_(self) -> str:
        """Show the job in a notebook."""
        pairs = (
            ("status", self.status),
            ("type", self.job_type),
            ("table", self.table_name),
            ("column", self.column_name),
            ("created", timestamp(self.created_at)),
            ("updated", timestamp(self.updated_at)),
            ("rows committed", self.metrics.get("committed")),
            ("error", self.error),
        )
        return html.section(f"Job {self.job_id}", html.facts(pairs))


class JobRecords(list[JobRecord]):
    """Jobs: a list, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        """Show the first of them, the newest, and not all of many."""
        rows = [
            (
                job.job_id[:8],
                job.job_type.lower(),
                job.table_name,
                job.column_name,
                job.status,
                timestamp(job.created_at),
                f"{metric(job.metrics, 'committed'):,.0f}",
            )
            for job in self[:_SHOWN_RECORDS]
        ]
        headers = ("job", "type", "table", "column", "status", "started", "rows committed")
        more = len(self) - len(rows)
        rest = [html.note(f"... and {more:,} older ones")] if more else []
        return html.section(count(len(self), "job"), html.grid(headers, rows), *rest)


def without_repeats(records: Sequence[JobRecord]) -> list[tuple[JobRecord, int]]:
    """The jobs, newest first, and how many before each are left out because they are the same.

    Jobs that had nothing to do say little, and a timer makes many: of each column the newest is
    enough until one has something to do again.
    """
    listed: list[tuple[JobRecord, int]] = []
    places: dict[tuple[str, str], int] = {}
    for record in records:
        column = (record.table_name, record.column_name)
        place = places.pop(column, None)
        if not record.had_nothing_to_do:
            listed.append((record, 0))
            continue
        if place is None:
            place = len(listed)
            listed.append((record, 0))
        else:
            listed[place] = (listed[place][0], listed[place][1] + 1)
        places[column] = place
    return listed


def fold_events(events: Iterable[JobEvent]) -> list[JobRecord]:
    """Jobs out of their events, in whatever order these are: compaction moves rows about."""
    by_job: dict[str, list[JobEvent]] = {}
    for event in events:
        by_job.setdefault(event.job_id, []).append(event)
    return [fold_job(own) for own in by_job.values()]


def fold_job(events: Iterable[JobEvent]) -> JobRecord:
    """One job out of its events.

    Its own events go by their numbers. What an observer said of it ("it is lost") comes after the
    last one that the observer knew, and counts as long as the job has said nothing since.
    """
    ordered = sorted(events, key=_place)
    first = ordered[0]
    record = JobRecord(
        job_id=first.job_id,
        table_name="",
        column_name="",
        job_type="",
        status=JobStatus.PENDING,
        created_at=first.at,
        updated_at=first.at,
    )
    last_own = max((i for i, e in enumerate(ordered) if not e.by_observer), default=0)
    for i, event in enumerate(ordered):
        if not event.by_observer or i > last_own:
            record = _apply(record, event)
    return replace(record, events=tuple(ordered))


def _place(event: JobEvent) -> tuple[bool, int, bool, datetime]:
    """Where an event belongs among those of its job.

    Without numbers: what begins a job is first, what ends it last, the rest by its own clock.
    """
    if event.seq is not None:
        return True, event.seq, event.by_observer, NO_TIME
    if str(event.payload.get("status")) in FINAL_STATUSES:
        return False, 3 if event.by_observer else 4, False, event.at
    return False, {"created": 0, "status": 1}.get(event.kind, 2), False, event.at


def _apply(record: JobRecord, event: JobEvent) -> JobRecord:
    payload, error = event.payload, event.payload.get("error")
    record = replace(record, updated_at=event.at)
    metrics = {**record.metrics, **_numbers(payload.get("metrics"))}
    if UNREADABLE in payload:
        return _with_trouble(record, f"{event.kind} {payload[UNREADABLE]}")
    match event.kind:
        case "created":
            return replace(
                record,
                table_name=str(payload.get("table", "")),
                column_name=str(payload.get("column", "")),
                job_type=str(payload.get("type", "")),
                config=mapping_in(payload.get("config")),
                driver=mapping_in(payload.get("driver")),
            )
        case "status" if str(payload.get("status")) not in JobStatus.__members__:
            return _with_trouble(record, f"status {payload.get('status')!r:.80}")
        case "status":
            return replace(
                record,
                status=JobStatus(payload["status"]),
                error=record.error if error is None else str(error),
                metrics=metrics,
                spark=mapping_in(payload.get("spark")) or record.spark,
                waiting_for=None,
            )
        case "waiting":
            return replace(
                record, status=JobStatus.PENDING, waiting_for=str(payload.get("for", ""))
            )
        case _:
            return replace(record, metrics=metrics)


def _with_trouble(record: JobRecord, what: str) -> JobRecord:
    trouble = f"An event of this job can't be read: {what}"
    return record if record.error else replace(record, error=trouble)


def as_lost(record: JobRecord, metrics: Mapping[str, Any]) -> JobRecord:
    """The record of a job whose driver died: it has failed, unless it had ended.

    `metrics`: the last that was heard of it.
    """
    if record.status.is_final:
        return record
    return replace(
        record, status=JobStatus.FAILED, error=_LOST, waiting_for=None, metrics={**metrics}
    )


def _numbers(found: object) -> dict[str, Any]:
    """The metrics of an event: numbers of a sane size, and None for what was not known."""
    return {
        name: value
        for name, value in mapping_in(found).items()
        if value is None or (isinstance(value, int | float) and abs(value) < _MAX_NUMBER)
    }

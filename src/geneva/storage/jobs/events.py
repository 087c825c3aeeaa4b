"""Job history: an append-only table of events; a job's record is the fold of its events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from geneva.errors import JobNotFoundError
from geneva.model.jobs import JobStatus
from geneva.model.tables import Secrets
from geneva.model.uris import table_uri
from geneva.render import html
from geneva.render.text import timestamp
from geneva.storage.jobs.append_only import AppendOnlyTable, quoted

_SCHEMA = pa.schema(
    [
        pa.field("job_id", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("kind", pa.string()),
        pa.field("payload", pa.string()),
    ]
)


_LOST = (
    "lost: the process that drove the job died or was not heard of for minutes. What it finished "
    "is kept; run the same again to go on."
)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job."""

    job_id: str
    kind: str
    payload: dict[str, Any] = field(default_factory=dict)
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


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
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    driver: dict[str, Any] = field(default_factory=dict)
    """Host and process id of the driver."""
    events: tuple[JobEvent, ...] = ()

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


class JobHistory:
    """The jobs of a database. It lives beside the tables and shows in no list of them."""

    def __init__(
        self,
        database_uri: str,
        storage_options: Secrets,
        is_lost: Callable[[JobRecord], bool] = lambda job: False,
    ) -> None:
        """Point at a database; nothing is read or written yet.

        `is_lost` says of a job that has not ended whether its driver is dead. Such a job is read
        as FAILED. Reading never writes: `close_lost` makes it durable.
        """
        uri = table_uri(database_uri, "_geneva/jobs")
        self._table = AppendOnlyTable(uri, _SCHEMA, storage_options)
        self._is_lost = is_lost

    def append(self, events: Sequence[JobEvent]) -> None:
        """Write events, in one commit."""
        table = pa.Table.from_pylist(
            [
                {
                    "job_id": event.job_id,
                    "at": event.at,
                    "kind": event.kind,
                    "payload": json.dumps(event.payload, default=str),
                }
                for event in events
            ],
            schema=_SCHEMA,
        )
        self._table.append(table)

    def list(
        self, table_name: str | None = None, status: JobStatus | str | None = None
    ) -> list[JobRecord]:
        """The jobs, newest first."""
        wanted = JobStatus(str(status).upper()) if status is not None else None
        records = [self._as_of_now(record) for record in fold_events(self._read(None))]
        return [
            record
            for record in sorted(records, key=lambda r: r.created_at, reverse=True)
            if table_name in (None, record.table_name) and wanted in (None, record.status)
        ]

    def get(self, job_id: str) -> JobRecord:
        """One job; JobNotFoundError when there is none of that id."""
        return self._as_of_now(self._recorded(job_id))

    def close_lost(self, job_id: str) -> bool:
        """Whether a job is running; one whose driver died is put on record as FAILED.

        For those who write because of it: a job that releases the tags of dead ones.
        """
        try:
            recorded = self._recorded(job_id)
        except JobNotFoundError:
            return False
        now = self._as_of_now(recorded)
        if now.status is not recorded.status:
            payload = {"status": now.status.value, "error": now.error}
            with suppress(OSError):
                self.append([JobEvent(job_id, "status", payload)])
        return not now.status.is_final

    def _recorded(self, job_id: str) -> JobRecord:
        records = fold_events(self._read(str(job_id)))
        if not records:
            raise JobNotFoundError(f"There is no job {str(job_id)!r} in this database.")
        return records[0]

    def _as_of_now(self, record: JobRecord) -> JobRecord:
        """The record; a job whose driver died has failed, also when nobody wrote that down."""
        if record.status.is_final or not self._is_lost(record):
            return record
        return replace(record, status=JobStatus.FAILED, error=_LOST)

    def _read(self, job_id: str | None) -> Sequence[JobEvent]:
        condition = None if job_id is None else f"job_id = {quoted(job_id)}"
        rows = self._table.read(condition).to_pylist()
        return [
            JobEvent(row["job_id"], row["kind"], json.loads(row["payload"]), row["at"])
            for row in rows
        ]


def fold_events(events: Iterable[JobEvent]) -> list[JobRecord]:
    """Jobs out of their events, which are in the order they were written in.

    Not in that of their times: clocks of different machines differ.
    """
    by_job: dict[str, list[JobEvent]] = {}
    for event in events:
        by_job.setdefault(event.job_id, []).append(event)
    return [_fold(own) for own in by_job.values()]


def _fold(events: list[JobEvent]) -> JobRecord:
    first = events[0]
    record = JobRecord(
        job_id=first.job_id,
        table_name="",
        column_name="",
        job_type="",
        status=JobStatus.PENDING,
        created_at=first.at,
        updated_at=first.at,
    )
    for event in events:
        record = _apply(record, event)
    return replace(record, events=tuple(events))


def _apply(record: JobRecord, event: JobEvent) -> JobRecord:
    payload = event.payload
    record = replace(record, updated_at=event.at)
    match event.kind:
        case "created":
            return replace(
                record,
                table_name=payload["table"],
                column_name=payload["column"],
                job_type=payload["type"],
                config=payload.get("config", {}),
                driver=payload.get("driver", {}),
            )
        case "status":
            return replace(
                record,
                status=JobStatus(payload["status"]),
                error=payload.get("error", record.error),
                metrics={**record.metrics, **payload.get("metrics", {})},
            )
        case _:
            return replace(record, metrics={**record.metrics, **payload.get("metrics", {})})

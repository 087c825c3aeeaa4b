"""Events of jobs: what happened, and how that is stored in the table of a database's history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from geneva.model.jobs import JobStatus

EVENT_SCHEMA = pa.schema(
    [
        pa.field("job_id", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("kind", pa.string()),
        pa.field("payload", pa.string()),
    ]
)

LOST_MARK = "lost: "
"""How the error of a job begins of which somebody else says that it is dead."""
UNREADABLE = "unreadable"
"""What the payload of an event that can't be read has instead: the beginning of its text."""
FINAL_STATUSES = frozenset(status.value for status in JobStatus if status.is_final)
NO_TIME = datetime.fromtimestamp(0, UTC)
"""Of events that don't say when they happened."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job."""

    job_id: str
    kind: str
    payload: dict[str, Any] = field(default_factory=dict)
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    seq: int | None = None
    """Its place among the events of its job; None: of a release that didn't number them."""
    by_observer: bool = False
    """Whether another process says so of the job; `seq` is then the last number that it saw."""

    def __str__(self) -> str:
        """Say what happened."""
        status, numbers = self.payload.get("status"), mapping_in(self.payload.get("metrics"))
        match self.kind:
            case "created":
                what = str(self.payload.get("type", "job")).lower()
                place = f"{self.payload.get('table', '')}.{self.payload.get('column', '')}"
                return f"Job planning: {what} of {place}"
            case "status" if status == JobStatus.FAILED:
                return f"Job failed: {self.payload.get('error', '')}"
            case "status" if status in FINAL_STATUSES:
                return f"Job completed with status {status}"
            case "status":
                return "Executing" if status == JobStatus.RUNNING else f"Job is {status}"
            case "committed":
                return (
                    f"Committed {numbers.get('committed', 0):,} rows in "
                    f"{numbers.get('fragments_committed', 0):,} fragments so far"
                )
            case "waiting":
                return f"Waiting for job {self.payload.get('for', '')}"
            case _:
                return self.kind

    def __getitem__(self, key: str) -> Any:
        """`event["timestamp"]` and `event["message"]`, as Geneva's guide reads them."""
        return {"timestamp": self.at, "message": str(self), "kind": self.kind}[key]


def plain_id(job_id: object) -> str:
    """A job's id as a plain string; what a job returned is an id, too, and prints as more."""
    return str.__str__(job_id) if isinstance(job_id, str) else str(job_id)


def event_rows(events: Sequence[JobEvent]) -> pa.Table:
    """Events as rows of the table."""
    rows = []
    for event in events:
        payload = dict(event.payload)
        if event.seq is not None:
            payload["seq"] = event.seq
        if event.by_observer:
            payload["by_observer"] = True
        text = json.dumps(payload, default=str)
        rows.append({"job_id": event.job_id, "at": event.at, "kind": event.kind, "payload": text})
    return pa.Table.from_pylist(rows, schema=EVENT_SCHEMA)


def read_events(rows: pa.Table) -> list[JobEvent]:
    """Events from their rows. One that can't be read says so, and hides no other."""
    return [_event(row) for row in rows.to_pylist()]


def _event(row: dict[str, Any]) -> JobEvent:
    try:
        payload = json.loads(row["payload"])
    except (TypeError, ValueError):
        payload = None
    if not isinstance(payload, dict):
        payload = {UNREADABLE: f"{row['payload']!r:.80}"}
    seq, error = payload.pop("seq", None), payload.get("error")
    # Releases that didn't number events marked what observers said by its text alone.
    lost = isinstance(error, str) and error.startswith(LOST_MARK)
    return JobEvent(
        job_id=str(row["job_id"] or ""),
        kind=str(row["kind"] or ""),
        payload=payload,
        at=row["at"] or NO_TIME,
        seq=seq if isinstance(seq, int) else None,
        by_observer=bool(payload.pop("by_observer", lost)),
    )


def mapping_in(found: object) -> dict[str, Any]:
    """A part of a payload that should be a mapping; empty where it is none."""
    return found if isinstance(found, dict) else {}

"""Heartbeats of running jobs and requests to cancel them: small files, across machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from lance.file import LanceFileSession

from geneva.model.tables import Secrets
from geneva.storage.jobs.records import JobRecord
from geneva.storage.jobs.shared_state import delete_states, state_names

_SCHEMA = pa.schema(
    [pa.field("at", pa.timestamp("us", tz="UTC")), pa.field("payload", pa.string())]
)


@dataclass(frozen=True, slots=True)
class Signal:
    """A message of a job, and when it was written."""

    at: datetime
    payload: dict[str, Any]


class JobSignals:
    """Heartbeats of running jobs, and requests to cancel them. One file each, overwritten."""

    def __init__(self, database_uri: str, storage_options: Secrets) -> None:
        """Point at a database; nothing is read or written yet."""
        self.database_uri = database_uri
        folder = f"{database_uri.rstrip('/')}/_geneva"
        self.limits_uri = f"{folder}/limits"
        """Where the records are that jobs share for limits on calls."""
        self.live: dict[str, Callable[[], dict[str, Any]]] = {}
        """What jobs that this object was given to have to report: newer than any heartbeat."""
        self._storage_options = storage_options
        self._session = LanceFileSession(
            f"{folder}/signals", storage_options=storage_options.plain()
        )

    def beat(self, job_id: str, payload: dict[str, Any]) -> None:
        """Report that a job is alive, and how far it is."""
        self._write(f"{job_id}.beat.lance", payload)

    def last_beat(self, job_id: str) -> Signal | None:
        """The last heartbeat of a job; None when there is none."""
        return self._read(f"{job_id}.beat.lance")

    def request_cancel(self, job_id: str) -> None:
        """Ask a job to stop, wherever it runs."""
        self._write(f"{job_id}.cancel.lance", {})

    def cancel_requested(self, job_id: str) -> bool:
        """Whether somebody asked the job to stop: not one whose id can't be a file's name."""
        try:
            return bool(self._session.contains(f"{job_id}.cancel.lance"))
        except (OSError, ValueError, RuntimeError):
            return False

    def jobs(self) -> set[str]:
        """The jobs that have left a signal: they run, or died."""
        try:
            names = [path.rpartition("/")[2] for path in self._session.list()]
        except OSError:
            return set()
        return {name.partition(".")[0] for name in names if name.endswith(".lance")}

    def clear(self, job_id: str) -> None:
        """Forget a job that has ended."""
        with ThreadPoolExecutor(2, "geneva-signals") as threads:
            for name in (f"{job_id}.beat.lance", f"{job_id}.cancel.lance"):
                threads.submit(self._delete, name)

    def _delete(self, name: str) -> None:
        with suppress(OSError):  # one that is not there can't be deleted
            self._session.delete_file(name)

    def limits(self) -> set[str]:
        """The records of limits that are there."""
        return state_names(self.limits_uri, self._storage_options)

    def clear_limits(self, names: Iterable[str]) -> None:
        """Delete the records of limits that a job had for itself."""
        delete_states(self.limits_uri, names, self._storage_options)

    def _write(self, name: str, payload: dict[str, Any]) -> None:
        writer = self._session.open_writer(name, schema=_SCHEMA)
        row = {"at": datetime.now(UTC), "payload": json.dumps(payload, default=str)}
        writer.write_batch(pa.RecordBatch.from_pylist([row], schema=_SCHEMA))
        writer.close()

    def _read(self, name: str) -> Signal | None:
        try:
            row = self._session.open_reader(name).read_all().to_table().to_pylist()[0]
            return Signal(row["at"], json.loads(row["payload"]))
        except (OSError, ValueError, IndexError):
            return None


def as_it_runs(job: JobRecord, signals: JobSignals) -> JobRecord:
    """The job with its newest numbers."""
    return job if job.status.is_final else replace(job, metrics=newest_metrics(job, signals))


def newest_metrics(job: JobRecord, signals: JobSignals) -> dict[str, Any]:
    """The numbers of a job: of a running one those of its last heartbeat, if they are newer.

    Of one that this process drives through the same connection, those of this moment.
    """
    if job.status.is_final:
        return job.metrics
    report = signals.live.get(job.job_id)
    if report is not None:
        return {**job.metrics, **report()["metrics"]}
    beat = signals.last_beat(job.job_id)
    metrics = beat.payload.get("metrics") if beat is not None else None
    if not isinstance(metrics, dict) or metrics.get("seconds", 0) < job.metrics.get("seconds", 0):
        return job.metrics
    return {**job.metrics, **metrics}

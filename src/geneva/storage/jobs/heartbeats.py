"""Small files through which running jobs and those who watch them talk, across machines."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from lance.file import LanceFileSession

from geneva.model.tables import Secrets

_SCHEMA = pa.schema(
    [pa.field("at", pa.timestamp("us", tz="UTC")), pa.field("payload", pa.string())]
)


@dataclass(frozen=True, slots=True)
class Signal:
    """What was said, and when."""

    at: datetime
    payload: dict[str, Any]


class JobSignals:
    """Heartbeats of running jobs, and requests to cancel them. One file each, overwritten."""

    def __init__(self, database_uri: str, storage_options: Secrets) -> None:
        """Point at a database; nothing is read or written yet."""
        self._session = LanceFileSession(
            f"{database_uri.rstrip('/')}/_geneva/signals", storage_options=storage_options.plain()
        )

    def beat(self, job_id: str, payload: dict[str, Any]) -> None:
        """Say that a job is alive, and how far it is."""
        self._write(f"{job_id}.beat.lance", payload)

    def last_beat(self, job_id: str) -> Signal | None:
        """When a job was last heard of; None when it never was."""
        return self._read(f"{job_id}.beat.lance")

    def request_cancel(self, job_id: str) -> None:
        """Ask a job to stop, wherever it runs."""
        self._write(f"{job_id}.cancel.lance", {})

    def cancel_requested(self, job_id: str) -> bool:
        """Whether somebody asked the job to stop."""
        return bool(self._session.contains(f"{job_id}.cancel.lance"))

    def clear(self, job_id: str) -> None:
        """Forget a job that has ended."""
        for name in (f"{job_id}.beat.lance", f"{job_id}.cancel.lance"):
            with suppress(OSError):
                if self._session.contains(name):
                    self._session.delete_file(name)

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

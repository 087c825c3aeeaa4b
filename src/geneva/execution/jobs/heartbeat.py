"""The heartbeat of a job: a thread that reports that it is alive and watches for cancellation."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from geneva.storage.jobs.events import JobRecord
from geneva.storage.jobs.heartbeats import JobSignals

POLL_SECONDS = 2.0
"""How often to look for a request to cancel."""
BEAT_SECONDS = 10.0
"""How often to report that the job is alive."""
LOST_SECONDS = 180.0
"""After this long without a heartbeat a job counts as lost."""


def driver_identity() -> dict[str, Any]:
    """Which process drives a job: on the same machine its death shows at once."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "world": _pid_namespace()}


def _pid_namespace() -> str:
    """Where process ids mean the same: this boot of this machine, this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def is_lost(job: JobRecord, signals: JobSignals) -> bool:
    """Whether the driver of a job that has not ended is dead, or silent for too long."""
    if is_gone(job.driver):
        return True
    beat = signals.last_beat(job.job_id)
    last = max(job.updated_at, beat.at) if beat is not None else job.updated_at
    return (datetime.now(UTC) - last).total_seconds() > LOST_SECONDS


def is_gone(driver: dict[str, Any]) -> bool:
    """Whether a driver on this machine has died; False when it lives or can't be seen from here."""
    here = driver_identity()
    known = driver.get("host") == here["host"] and driver.get("world") == here["world"]
    if not known or not isinstance(driver.get("pid"), int):
        return False
    try:
        os.kill(driver["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class Heartbeat:
    """Reports and watches while a job runs. A job that ends within seconds never does either."""

    def __init__(
        self,
        signals: JobSignals,
        job_id: str,
        report: Callable[[], dict[str, Any]],
        cancelled: threading.Event,
    ) -> None:
        """Prepare; `report` gives the heartbeat's content, `cancelled` is set on request."""
        self._signals, self._job_id, self._report = signals, job_id, report
        self._cancelled = cancelled
        self._ended = threading.Event()
        self._used = False
        self._thread = threading.Thread(target=self._run, name="geneva-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        """Start."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop, and leave nothing behind."""
        self._ended.set()
        self._thread.join(timeout=POLL_SECONDS)
        if self._used:
            with suppress(OSError):
                self._signals.clear(self._job_id)

    def _run(self) -> None:
        since_beat = BEAT_SECONDS  # the first poll is a beat as well
        while not self._ended.wait(POLL_SECONDS):
            self._used = True
            # A store that can't be reached for a moment is no reason to stop a job.
            with suppress(OSError):
                if self._signals.cancel_requested(self._job_id):
                    self._cancelled.set()
            since_beat += POLL_SECONDS
            if since_beat >= BEAT_SECONDS:
                since_beat = 0.0
                with suppress(OSError):
                    self._signals.beat(self._job_id, self._report())

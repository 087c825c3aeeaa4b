"""The heartbeat of a job: a thread that reports that it is alive and watches for cancellation."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from geneva.config import user_name
from geneva.storage.checkpoints.pins import Behind
from geneva.storage.jobs.heartbeats import JobSignals
from geneva.storage.jobs.records import JobRecord

POLL_SECONDS = 2.0
"""How often to look for a request to cancel."""
BEAT_SECONDS = 10.0
"""How often to report that the job is alive, and how far it is; a young job does so more often."""
_BEATS_PER_AGE = 5
"""A report is never older than a fifth of the job's time so far, or than the last look."""
LOST_SECONDS = 180.0
"""After this long without a heartbeat, by the clock of who watches, a job counts as lost."""
WATCH_SECONDS = 3 * BEAT_SECONDS
"""How long to watch a job that seems to be silent, for who has to know whether it lives."""
MAX_SKEW_SECONDS = 86_400.0
"""Clocks of two machines differ by less than this, time zones that were set wrong included."""


def driver_identity() -> dict[str, Any]:
    """Which process drives a job: on the same machine its death shows at once."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "user": user_name(),
        "pid": pid,
        "world": _pid_namespace(),
        "started": _process_start(pid),
    }


def _pid_namespace() -> str:
    """Where process ids mean the same: this boot of this machine, this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """When a process was started, in ticks since boot: ids are used again, these are not.

    "" where that can't be known; "gone" for a process that has ended and was not waited for.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "gone" if state in "ZX" else rest[18]


class Liveness:
    """Tells living jobs from lost ones, as one observer sees them over time.

    Clocks of two machines are not compared. A job is lost when its process is known to be gone, or
    when nothing was heard of it for `LOST_SECONDS` in which this observer has watched, by its own
    clock. Who looks only once can't know that. It goes by the clocks only where they are more
    apart than wrong clocks are: by a day. Who has to know, because it would be refused or would
    keep something, and finds a job silent by the clocks, watches it for three heartbeats.
    """

    def __init__(
        self,
        signals: JobSignals,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Nothing was seen yet."""
        self._signals, self._monotonic, self._now = signals, monotonic, now
        self._sleep = sleep
        self._heard: dict[str, tuple[object, float]] = {}
        """Per job, what was heard of it last, and when that was new."""
        self._seen_alive: set[str] = set()
        """Jobs of which something new was heard while they were watched."""

    def is_lost(self, job: JobRecord) -> bool:
        """Whether the driver of a job that has not ended is dead, or silent for too long."""
        if is_gone(job):
            return True
        watched, by_clocks = self._silence(job)
        return watched > LOST_SECONDS or by_clocks > MAX_SKEW_SECONDS

    def watch(self, job: JobRecord) -> bool:
        """Whether a job is lost, for who has to know: takes up to three heartbeats."""
        if self.is_lost(job):
            return True
        watched, by_clocks = self._silence(job)
        if by_clocks <= LOST_SECONDS or job.job_id in self._seen_alive:
            return False
        while watched < WATCH_SECONDS:
            self._sleep(POLL_SECONDS)
            before, (watched, _) = watched, self._silence(job)
            if watched < before:
                return False
        return True

    def _silence(self, job: JobRecord) -> tuple[float, float]:
        """Seconds since something new was heard of a job: while it was watched, and by clocks."""
        beat = self._signals.last_beat(job.job_id)
        said = (len(job.events), job.updated_at, beat.at if beat is not None else None)
        known = self._heard.get(job.job_id)
        if known is None or known[0] != said:
            if known is not None:
                self._seen_alive.add(job.job_id)
            known = (said, self._monotonic())
            self._heard[job.job_id] = known
        last = max(job.updated_at, beat.at) if beat is not None else job.updated_at
        return self._monotonic() - known[1], (self._now() - last).total_seconds()


_here: set[str] = set()
"""The jobs that this process drives."""
_inside: ContextVar[frozenset[str]] = ContextVar("inside", default=frozenset())
"""The jobs that the calling code is part of: drives them, or runs in one of their tasks here."""


def will_be_driven_here(job_id: str) -> None:
    """Let this process know that one of its threads is about to drive a job."""
    _here.add(job_id)


@contextmanager
def driven_here(job_id: str) -> Iterator[None]:
    """Let this process know that the calling thread drives a job, for as long as it does."""
    _here.add(job_id)
    before = _inside.set(_inside.get() | {job_id})
    try:
        yield
    finally:
        _inside.reset(before)
        _here.discard(job_id)


def is_inside(job_id: str) -> bool:
    """Whether the calling code is part of that job: then it can't wait for its end."""
    return job_id in _inside.get()


def is_gone(job: JobRecord) -> bool:
    """Whether the driver of a job is known to have ended.

    False when it lives or can't be seen from here.
    """
    driver, here = job.driver, driver_identity()
    pid, started = driver.get("pid"), driver.get("started")
    known = driver.get("host") == here["host"] and driver.get("world") == here["world"]
    if not known or not isinstance(pid, int):
        return False
    if pid == here["pid"] and started == here["started"]:
        return job.job_id not in _here
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    now = _process_start(pid)
    return now == "gone" or bool(started and now and now != started)


class Heartbeat:
    """Reports and watches while a job runs. A job that ends within seconds never does either."""

    def __init__(
        self,
        signals: JobSignals,
        job_id: str,
        report: Callable[[], dict[str, Any]],
        cancelled: threading.Event,
        behind: Behind = lambda work: work(),
    ) -> None:
        """Prepare; `report` gives the heartbeat's content, `cancelled` is set on request.

        `behind` removes what it has left, while the job goes on.
        """
        self._signals, self._job_id, self._report = signals, job_id, report
        self._cancelled, self._behind = cancelled, behind
        self._ended = threading.Event()
        self.used = False
        """Whether the job has run for so long that others may have heard of it."""
        self._thread = threading.Thread(target=self._run, name="geneva-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        """Start."""
        self._signals.live[self._job_id] = self._report
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop, and leave nothing behind."""
        self._signals.live.pop(self._job_id, None)
        self._ended.set()
        self._thread.join(timeout=POLL_SECONDS)
        if self.used:
            self._behind(self._clear)

    def _clear(self) -> None:
        with suppress(OSError):
            self._signals.clear(self._job_id)

    def _run(self) -> None:
        age = since_beat = 0.0
        while not self._ended.wait(POLL_SECONDS):
            self.used = True
            # A store that can't be reached for a moment is no reason to stop a job.
            with suppress(OSError):
                if self._signals.cancel_requested(self._job_id):
                    self._cancelled.set()
            age, since_beat = age + POLL_SECONDS, since_beat + POLL_SECONDS
            if since_beat >= min(BEAT_SECONDS, age / _BEATS_PER_AGE):
                since_beat = 0.0
                with suppress(OSError):
                    self._signals.beat(self._job_id, self._report())

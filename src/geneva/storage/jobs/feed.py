"""The jobs of a database for somebody who looks again and again: only what is new is read."""

from __future__ import annotations

import threading
from dataclasses import replace

from geneva.storage.jobs.append_only import Cursor
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.history import JobHistory
from geneva.storage.jobs.records import JobRecord, fold_job


class JobFeed:
    """Keeps the record of every job, and the events of those that have not ended."""

    def __init__(self, history: JobHistory) -> None:
        """Nothing is read yet."""
        self._history = history
        self._lock = threading.Lock()
        self._cursor = Cursor()
        self._records: dict[str, JobRecord] = {}
        self._events: dict[str, list[JobEvent]] = {}

    def records(self) -> list[JobRecord]:
        """The jobs as of now, newest first; those that have ended without their events."""
        with self._lock:
            self._read_new()
            lost = [job_id for job_id in self._events if self._is_lost(job_id)]
            if lost:
                # What they wrote last is read after their death was seen.
                self._read_new()
            gone = frozenset(lost)
            lose = self._history.as_lost
            found = [lose(r) if r.job_id in gone else r for r in self._records.values()]
        return sorted(found, key=lambda record: record.created_at, reverse=True)

    def unfinished(self, job_id: str) -> JobRecord | None:
        """A job that has not ended, with its events; None: it has, or there is none."""
        found = next((r for r in self.records() if r.job_id == job_id), None)
        return found if found is not None and not found.status.is_final else None

    def _is_lost(self, job_id: str) -> bool:
        return self._history.is_lost(self._records[job_id])

    def _read_new(self) -> None:
        news, whole, self._cursor = self._history.read_new(self._cursor)
        if whole:
            self._records, self._events = {}, {}
        by_job: dict[str, list[JobEvent]] = {}
        for event in news:
            by_job.setdefault(event.job_id, []).append(event)
        for job_id, own in by_job.items():
            if job_id in self._records and job_id not in self._events:
                # It says something after its end: what it said before is not kept.
                own = list(self._history.events_of(job_id))
            self._take(job_id, [*self._events.get(job_id, ()), *own])

    def _take(self, job_id: str, events: list[JobEvent]) -> None:
        record = fold_job(events)
        if record.status.is_final:
            self._events.pop(job_id, None)
            record = replace(record, events=())
        else:
            self._events[job_id] = events
        self._records[job_id] = record

"""The history of a database's jobs: an append-only table of their events."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import lance

from geneva.background import in_background
from geneva.errors import JobNotFoundError, UserInputError
from geneva.model.jobs import JobStatus
from geneva.model.tables import Secrets, is_remote
from geneva.model.uris import table_uri
from geneva.storage.jobs.append_only import AppendOnlyTable, Cursor, by_file, quoted
from geneva.storage.jobs.events import (
    EVENT_SCHEMA,
    FINAL_STATUSES,
    JobEvent,
    event_rows,
    plain_id,
    read_events,
)
from geneva.storage.jobs.records import JobRecord, as_lost, fold_events


@dataclass(frozen=True, slots=True)
class SameWork:
    """Jobs on the same work that were on record before another one came."""

    unfinished: tuple[str, ...] = ()
    """Those whose end is not on record: they run, or died."""
    finished: frozenset[str] = frozenset()


class OneJob(list[JobRecord]):
    """A job as a list of one, which it is in Geneva on Ray; it reads as the job itself, too.

    It is empty where there is no such job.
    """

    def __getattr__(self, name: str) -> Any:
        """What the job has."""
        if not self:
            raise AttributeError(f"There is no such job, and so no {name!r} of it.")
        return getattr(self[0], name)


class JobHistory:
    """The jobs of a database. It lives beside the tables and shows in no list of them."""

    def __init__(
        self,
        database_uri: str,
        storage_options: Secrets,
        is_lost: Callable[[JobRecord], bool] = lambda job: False,
        watch: Callable[[JobRecord], bool] = lambda job: False,
        request_cancel: Callable[[str], None] = lambda job_id: None,
        newest_metrics: Callable[[JobRecord], dict[str, Any]] = lambda job: job.metrics,
    ) -> None:
        """Point at a database; nothing is read or written yet.

        `is_lost` says of a job that has not ended whether its driver is dead. Such a job is read
        as FAILED. Reading never writes: `close_lost` makes it durable. `watch` says it, too, and
        takes its time. `request_cancel` asks a job to stop. `newest_metrics` are the numbers of a
        job that has not ended: a lost one keeps those that it had reached.
        """
        uri = table_uri(database_uri, "_geneva/jobs")
        self._table = AppendOnlyTable(uri, EVENT_SCHEMA, storage_options)
        self._is_lost, self._watch, self._request_cancel = is_lost, watch, request_cancel
        self._newest_metrics = newest_metrics
        self._last: tuple[str, lance.LanceDataset | None] = "", None
        """The job that wrote last, and the table after that."""
        self._opening: Future[lance.LanceDataset | None] | None = None
        """Opens the table for the next job ..."""
        self._reading: Future[None] | None = None
        """... and reads what is new in it. What it forgets of what others noted is read again."""
        self._landmarks: dict[str, tuple[_Landmark, ...]] = {}
        """The beginnings and ends of jobs in files of the table that were read or written here."""

    @property
    def is_remote(self) -> bool:
        """Whether it is in an object store, where each request takes its time."""
        return is_remote(self._table.uri)

    def open_ahead(self) -> None:
        """Begin to read the table, for a job that is being planned: of a store it is requests."""
        if self.is_remote:
            self._opening = opening = in_background("geneva-history", self._table.open)
            read = partial(self._read_landmarks, opening)
            self._reading = in_background("geneva-history", read)

    def append(self, events: Sequence[JobEvent]) -> None:
        """Write events, in one commit."""
        job_id, landed = self._last
        after = landed if all(event.job_id == job_id for event in events) else None
        self._append(events, after)

    def _append(
        self, events: Sequence[JobEvent], after: lance.LanceDataset | None = None
    ) -> lance.LanceDataset:
        """Write events; remember the table as it was then, for the next ones of that job."""
        landed = self._table.append(event_rows(events), after)
        self._last = events[-1].job_id, landed
        *_, own = by_file(landed)
        self._landmarks[own] = tuple(found for event in events for found in _landmark(event))
        return landed

    def announce(self, events: Sequence[JobEvent], work: str | None) -> SameWork:
        """Write the first events of a job; return the jobs of the same work before it.

        Which job was first is decided by the order of commits, which is the same for everybody,
        and not by clocks. `work` is what the "created" event of such jobs says under that name.
        """
        landed = self._append(events, self._opened())
        if work is None:
            return SameWork()
        own = {event.job_id for event in events}
        same: dict[str, None] = {}
        over: set[str] = set()
        if self._reading is not None:
            wait([self._reading])
        for found in self._landmarks_in(landed):
            if found.work == work and found.job_id not in own:
                same[found.job_id] = None
            elif found.work is None:
                over.add(found.job_id)
        return SameWork(
            unfinished=tuple(job_id for job_id in same if job_id not in over),
            finished=frozenset(job_id for job_id in same if job_id in over),
        )

    def _opened(self) -> lance.LanceDataset | None:
        """The table as it was when the job was planned; None: nobody has opened it."""
        opening, self._opening = self._opening, None
        if opening is None or opening.exception() is not None:
            return None  # a store that did not answer is asked again
        return opening.result()

    def _read_landmarks(self, opening: Future[lance.LanceDataset | None]) -> None:
        opened = opening.result()
        if opened is not None:
            deque(self._landmarks_in(opened), maxlen=0)

    def _landmarks_in(self, landed: lance.LanceDataset) -> Iterator[_Landmark]:
        """The beginnings and ends of jobs in the table; only files that are new here are read."""
        fragments, known = by_file(landed), self._landmarks
        new = {f.fragment_id: file for file, f in fragments.items() if file not in known}
        if new:
            scanner = landed.scanner(
                columns=["job_id", "at", "kind", "payload"],
                filter=_LANDMARKS,
                fragments=[fragments[file] for file in new.values()],
                with_row_address=True,
            )
            rows = scanner.to_table()
            read: dict[str, list[_Landmark]] = {file: [] for file in new.values()}
            addresses = rows["_rowaddr"].to_pylist()
            for address, event in zip(addresses, read_events(rows), strict=True):
                read[new[address >> 32]].extend(_landmark(event))
            known = known | {file: tuple(found) for file, found in read.items()}
        # What a compaction has replaced is forgotten.
        self._landmarks = known = {file: known[file] for file in fragments}
        for found in (*known.values(),):  # others may note more meanwhile
            yield from found

    def list(
        self, table_name: str | None = None, status: JobStatus | str | None = None
    ) -> list[JobRecord]:
        """The jobs, newest first."""
        wanted = JobStatus(status) if status is not None else None
        records = self.as_of_now(fold_events(self._read(None)))
        return [
            record
            for record in sorted(records, key=lambda r: r.created_at, reverse=True)
            if table_name in (None, record.table_name) and wanted in (None, record.status)
        ]

    list_jobs = list
    """The same, by Geneva's name."""

    def set_completed(self, job_id: str, status: JobStatus | str = JobStatus.CANCELLED) -> None:
        """Ask a job to stop, as programs for Geneva on Ray do; one that has ended stays as it is.

        How a job ended is for the job to say, so that CANCELLED is all that can be asked for.
        """
        if str(status).upper() != JobStatus.CANCELLED:
            raise UserInputError(
                f"set_completed({job_id!r}, status={str(status)!r}): a job says itself how it "
                "ended. status='CANCELLED' asks it to stop."
            )
        if not self.job(job_id).status.is_final:
            self._request_cancel(job_id)

    def last_measured(self, table_name: str, column: str, udf_version: str) -> JobRecord | None:
        """The newest job that called this version of the column's function; None: there is none."""
        records = [
            record
            for record in fold_events(self._read(None))
            if (record.table_name, record.column_name) == (table_name, column)
            and record.config.get("udf_version") == udf_version
            and record.metrics.get("udf_rows")
        ]
        return max(records, key=lambda record: record.created_at, default=None)

    def job(self, job_id: str) -> JobRecord:
        """One job; JobNotFoundError when there is none of that id."""
        return self.as_of_now([self._recorded(job_id)])[0]

    def get(self, job_id: str) -> OneJob:
        """One job, as `db._history` gives it; an empty list where there is none of that id."""
        return OneJob(self.as_of_now(self.jobs([job_id])))

    def jobs(self, job_ids: Iterable[str]) -> Sequence[JobRecord]:
        """Some jobs, as they are on record; those that are on none are left out."""
        wanted = [plain_id(job_id) for job_id in job_ids]
        return fold_events(self._read(*wanted)) if wanted else []

    def close_lost(self, job_id: str) -> bool:
        """Whether a job is running; one whose driver died is put on record as FAILED.

        For those who write because of it: a job that releases the tags of dead ones. The job's
        own word counts for more: what it says later takes this back.
        """
        try:
            recorded = self._recorded(job_id)
        except JobNotFoundError:
            return False
        now = self.as_of_now([recorded])[0]
        if not now.status.is_final and self._watch(now):
            now = self.as_lost(self._recorded(job_id))
        if now.died and not recorded.status.is_final:
            payload = {"status": now.status.value, "error": now.error, "metrics": now.metrics}
            seen = max((e.seq for e in now.events if e.seq is not None), default=None)
            with suppress(OSError):
                self.append([JobEvent(job_id, "status", payload, seq=seen, by_observer=True)])
        return not now.status.is_final

    def as_of_now(self, records: Sequence[JobRecord]) -> Sequence[JobRecord]:
        """The records; a job whose driver died has failed, also when nobody wrote that down.

        A driver may have died because its job was over: what it wrote last is read after its
        death was seen.
        """
        lost = {r.job_id for r in records if self.is_lost(r)}
        if not lost:
            return records
        last = {record.job_id: record for record in fold_events(self._read(*lost))}
        return [self.as_lost(last.get(r.job_id, r)) if r.job_id in lost else r for r in records]

    def as_lost(self, record: JobRecord) -> JobRecord:
        """The record of a job whose driver died, with the numbers that it had reached."""
        return as_lost(record, self._newest_metrics(record))

    def is_lost(self, record: JobRecord) -> bool:
        """Whether the driver of a job is dead, if it has not ended."""
        return not record.status.is_final and self._is_lost(record)

    def read_new(self, cursor: Cursor) -> tuple[Sequence[JobEvent], bool, Cursor]:
        """The events since `cursor`, whether they are all there are, and where reading ended."""
        rows, whole, now = self._table.read_new(cursor)
        return read_events(rows), whole, now

    def events_of(self, job_id: str) -> Sequence[JobEvent]:
        """The events of one job, in whatever order."""
        return self._read(plain_id(job_id))

    def _recorded(self, job_id: str) -> JobRecord:
        plain = plain_id(job_id)
        records = fold_events(self.events_of(plain))
        if not records:
            raise JobNotFoundError(f"There is no job {plain!r} in this database.")
        return records[0]

    def _read(self, *job_ids: str | None) -> Sequence[JobEvent]:
        """The events of some jobs; of all for None."""
        ids = ", ".join(quoted(job_id) for job_id in job_ids if job_id is not None)
        return read_events(self._table.read(f"job_id IN ({ids})" if ids else None))


@dataclass(frozen=True, slots=True)
class _Landmark:
    """The beginning or the end of a job."""

    job_id: str
    work: str | None = None
    """What it does, where it begins; None: it ends."""


def _landmark(event: JobEvent) -> Iterator[_Landmark]:
    work = event.payload.get("work")
    if event.kind == "created" and isinstance(work, str):
        yield _Landmark(event.job_id, work)
    elif event.kind == "status" and event.payload.get("status") in FINAL_STATUSES:
        yield _Landmark(event.job_id)


def _status_text(status: str) -> str:
    return f'"status": {json.dumps(status)}'


_ENDS = " OR ".join(
    f"payload LIKE {quoted(f'%{_status_text(status)}%')}" for status in FINAL_STATUSES
)
_LANDMARKS = f"kind = 'created' OR (kind = 'status' AND ({_ENDS}))"
"""The rows that may be beginnings or ends."""

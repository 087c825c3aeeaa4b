"""Job history: an append-only table of events; a job's record is the fold of its events."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import lance
import pyarrow as pa

from geneva.background import in_background
from geneva.errors import JobNotFoundError, UserInputError
from geneva.model.jobs import JobStatus, metric
from geneva.model.tables import Secrets, is_remote
from geneva.model.uris import table_uri
from geneva.render import html
from geneva.render.text import timestamp
from geneva.storage.jobs.append_only import AppendOnlyTable, Cursor, by_file, quoted

_SCHEMA = pa.schema(
    [
        pa.field("job_id", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("kind", pa.string()),
        pa.field("payload", pa.string()),
    ]
)


_LOST_MARK = "lost: "
_LOST = (
    f"{_LOST_MARK}the process that drove the job died or was not heard of for minutes. What it "
    "finished is kept; run the same again to go on."
)
_UNREADABLE = "unreadable"
_MAX_NUMBER = 2**63
_NO_TIME = datetime.fromtimestamp(0, UTC)
_FINAL = frozenset(status.value for status in JobStatus if status.is_final)


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
        status, numbers = self.payload.get("status"), _mapping(self.payload.get("metrics"))
        match self.kind:
            case "created":
                what = str(self.payload.get("type", "job")).lower()
                place = f"{self.payload.get('table', '')}.{self.payload.get('column', '')}"
                return f"Job planning: {what} of {place}"
            case "status" if status == JobStatus.FAILED:
                return f"Job failed: {self.payload.get('error', '')}"
            case "status" if status in _FINAL:
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
    config: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for; of `get_job` and `list_jobs` also as JSON text (`JobConfig`)."""
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    driver: dict[str, Any] = field(default_factory=dict)
    """Host and process id of the driver."""
    spark: dict[str, Any] = field(default_factory=dict)
    """What Spark calls it: application and job ids, or session and operations on Connect; and the
    group that its jobs are in. Known when the job has ended."""
    events: tuple[JobEvent, ...] = ()
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
        """The manifest of `db.context(manifest=...)` that it ran with."""
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
        """Rows that are safe, and rows in all: of a running job those that are checkpointed."""
        saved = metric(self.metrics, "committed")
        if not self.status.is_final:
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
    ) -> None:
        """Point at a database; nothing is read or written yet.

        `is_lost` says of a job that has not ended whether its driver is dead. Such a job is read
        as FAILED. Reading never writes: `close_lost` makes it durable. `watch` says it, too, and
        takes its time. `request_cancel` asks a job to stop.
        """
        uri = table_uri(database_uri, "_geneva/jobs")
        self._table = AppendOnlyTable(uri, _SCHEMA, storage_options)
        self._is_lost, self._watch, self._request_cancel = is_lost, watch, request_cancel
        self._last: tuple[str, lance.LanceDataset | None] = "", None
        """The job that wrote last, and the table after that."""
        self._opening: Future[lance.LanceDataset | None] | None = None
        """Opens the table for the next job ..."""
        self._reading: Future[None] | None = None
        """... and reads what is new in it. What it forgets of what others noted is read again."""
        self._landmarks: dict[str, tuple[_Landmark, ...]] = {}
        """The beginnings and ends of jobs in files of the table that were read or written here."""

    def open_ahead(self) -> None:
        """Begin to read the table, for a job that is being planned: of a store it is requests."""
        if is_remote(self._table.uri):
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
        landed = self._table.append(_rows(events), after)
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
        wanted = JobStatus(str(status).upper()) if status is not None else None
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
            now = as_lost(self._recorded(job_id))
        if now.died and not recorded.status.is_final:
            payload = {"status": now.status.value, "error": now.error}
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
        return [as_lost(last.get(r.job_id, r)) if r.job_id in lost else r for r in records]

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


def plain_id(job_id: object) -> str:
    """A job's id as a plain string; what a job returned is an id, too, and prints as more."""
    return str.__str__(job_id) if isinstance(job_id, str) else str(job_id)


# -------------------------------------------------------------------------------- on disk


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
    elif event.kind == "status" and event.payload.get("status") in _FINAL:
        yield _Landmark(event.job_id)


def _status_text(status: str) -> str:
    return f'"status": {json.dumps(status)}'


_ENDS = " OR ".join(f"payload LIKE {quoted(f'%{_status_text(status)}%')}" for status in _FINAL)
_LANDMARKS = f"kind = 'created' OR (kind = 'status' AND ({_ENDS}))"
"""The rows that may be beginnings or ends."""


def _rows(events: Sequence[JobEvent]) -> pa.Table:
    rows = []
    for event in events:
        payload = dict(event.payload)
        if event.seq is not None:
            payload["seq"] = event.seq
        if event.by_observer:
            payload["by_observer"] = True
        text = json.dumps(payload, default=str)
        rows.append({"job_id": event.job_id, "at": event.at, "kind": event.kind, "payload": text})
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def read_events(rows: pa.Table) -> list[JobEvent]:
    """Events from their rows. One that can't be read says so, and hides no other."""
    return [_event(row) for row in rows.to_pylist()]


def _event(row: dict[str, Any]) -> JobEvent:
    try:
        payload = json.loads(row["payload"])
    except (TypeError, ValueError):
        payload = None
    if not isinstance(payload, dict):
        payload = {_UNREADABLE: f"{row['payload']!r:.80}"}
    seq, error = payload.pop("seq", None), payload.get("error")
    # Releases that didn't number events marked what observers said by its text alone.
    lost = isinstance(error, str) and error.startswith(_LOST_MARK)
    return JobEvent(
        job_id=str(row["job_id"] or ""),
        kind=str(row["kind"] or ""),
        payload=payload,
        at=row["at"] or _NO_TIME,
        seq=seq if isinstance(seq, int) else None,
        by_observer=bool(payload.pop("by_observer", lost)),
    )


# ------------------------------------------------------------------------------- the fold


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
        return True, event.seq, event.by_observer, _NO_TIME
    if str(event.payload.get("status")) in _FINAL:
        return False, 3 if event.by_observer else 4, False, event.at
    return False, {"created": 0, "status": 1}.get(event.kind, 2), False, event.at


def _apply(record: JobRecord, event: JobEvent) -> JobRecord:
    payload, error = event.payload, event.payload.get("error")
    record = replace(record, updated_at=event.at)
    metrics = {**record.metrics, **_numbers(payload.get("metrics"))}
    if _UNREADABLE in payload:
        return _with_trouble(record, f"{event.kind} {payload[_UNREADABLE]}")
    match event.kind:
        case "created":
            return replace(
                record,
                table_name=str(payload.get("table", "")),
                column_name=str(payload.get("column", "")),
                job_type=str(payload.get("type", "")),
                config=_mapping(payload.get("config")),
                driver=_mapping(payload.get("driver")),
            )
        case "status" if str(payload.get("status")) not in JobStatus.__members__:
            return _with_trouble(record, f"status {payload.get('status')!r:.80}")
        case "status":
            return replace(
                record,
                status=JobStatus(payload["status"]),
                error=record.error if error is None else str(error),
                metrics=metrics,
                spark=_mapping(payload.get("spark")) or record.spark,
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


def as_lost(record: JobRecord) -> JobRecord:
    """The record of a job whose driver died: it has failed, unless it had ended."""
    if record.status.is_final:
        return record
    return replace(record, status=JobStatus.FAILED, error=_LOST)


def _mapping(found: object) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _numbers(found: object) -> dict[str, Any]:
    """The metrics of an event: numbers of a sane size, and None for what was not known."""
    return {
        name: value
        for name, value in _mapping(found).items()
        if value is None or (isinstance(value, int | float) and abs(value) < _MAX_NUMBER)
    }

"""Queries of the pages to the database. Nothing is unpickled, run or written."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from geneva.connection import Connection, connect
from geneva.errors import TableNotFoundError
from geneva.model.addresses import offset_of
from geneva.model.jobs import JobStatus, whole_id
from geneva.model.tables import ColumnDefinition, Secrets
from geneva.model.uris import joined_uri, same_place, table_uri
from geneva.model.view_query import ViewQuery
from geneva.planning.backfill import BackfillPlan
from geneva.planning.refresh import RefreshPlan
from geneva.render.text import one_line
from geneva.storage.jobs.failures import ErrorRecord, FailureStore
from geneva.storage.jobs.feed import JobFeed
from geneva.storage.jobs.heartbeats import JobSignals, as_it_runs
from geneva.storage.jobs.output import OutputStore, TaskOutput
from geneva.storage.jobs.records import JobRecord
from geneva.storage.views.definition import reads_source
from geneva.table import Table
from geneva.view import MaterializedView

_FRESH_SECONDS = 10.0
_PLANS_AT_ONCE = 2
_KEPT_JOBS = 64
_KEPT_SAMPLES = 600

_RAISED = re.compile(
    r"(?P<where>fragment \d+, row \d+).*? failed on [^:]*: (?P<kind>[\w.]+): (?P<text>.*)",
    re.DOTALL,
)
"""The row and the user's exception in the message of a failed job."""

Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table or view, described by its schema; `trouble` when it can't be opened."""

    name: str
    version: int = 0
    rows: int = 0
    columns: tuple[str, ...] = ()
    computed: Mapping[str, ColumnDefinition] = field(default_factory=dict)
    view: ViewQuery | None = None
    source_version: int | None = None
    source_is_here: bool = True
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class ColumnFreshness:
    """How many rows of a column have no right value, and why."""

    column: str
    total: int
    stale: int
    reasons: tuple[tuple[str, int], ...]
    notes: tuple[str, ...] = ()
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Freshness:
    """What a backfill of each column, and a refresh, would do."""

    columns: tuple[ColumnFreshness, ...]
    refresh: RefreshPlan | None = None
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A row that failed, or a job that did."""

    table: str
    column: str
    job_id: str
    exception: str
    message: str
    row: str = ""
    attempt: str = ""
    inputs: str = ""
    traceback: str = ""


class DatabaseReader:
    """The database behind a console. Keeps plans for seconds, and samples of running jobs."""

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None) -> None:
        """Connect."""
        self._db: Connection = connect(uri, storage_options=storage_options)
        self._secrets = Secrets(storage_options)
        self._signals = JobSignals(self._db.uri, self._secrets)
        self._failures = FailureStore(self._db.uri, self._secrets)
        self._output = OutputStore(self._db.uri, self._secrets)
        self._feed = JobFeed(self._db._history)
        self._plans: dict[tuple[str, int], tuple[float, Freshness]] = {}
        self._planning = threading.Semaphore(_PLANS_AT_ONCE)
        self._samples: OrderedDict[str, deque[Metrics]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """Where the database is."""
        return self._db.uri

    def redact(self, text: str) -> str:
        """A text from the database without the values of storage options."""
        return self._secrets.redact(text)

    # ------------------------------------------------------------------------------- tables

    def tables(self) -> list[TableInfo]:
        """Every table and view, by name."""
        return [self._listed(name) for name in self._db.all_table_names()]

    def _listed(self, name: str) -> TableInfo:
        try:
            return self.table(name)
        except TableNotFoundError as error:
            # Dropped just now, or a folder of a name that LanceDB doesn't take for a table.
            return TableInfo(name, trouble=self._trouble(error))

    def table(self, name: str) -> TableInfo:
        """What is known of a table without planning anything."""
        try:
            return self._table_info(self._db.open_table(name))
        except TableNotFoundError:
            raise
        except BaseException as error:  # noqa: BLE001
            return TableInfo(name, trouble=self._trouble(error))

    def _trouble(self, error: BaseException) -> str:
        """What is wrong with one table, column or view. The others are shown all the same."""
        return self.redact(one_line(error))

    def open(self, name: str) -> Table:
        """A table; a name that can't be one is not found either."""
        try:
            return self._db.open_table(name)
        except BaseException as error:
            why = self._trouble(error)
            raise TableNotFoundError(f"Table {name!r} can't be opened: {why}") from error

    def _table_info(self, table: Table) -> TableInfo:
        info = TableInfo(
            name=table.ref.name,
            version=table.version,
            rows=len(table),
            columns=tuple(table.schema.names),
            computed=table.computed_columns(),
        )
        if not isinstance(table, MaterializedView):
            return info
        query = table.definition
        # A page can be linked to where the source is a table of this database, in no namespace.
        place = joined_uri(self.uri, query.source_address)
        here = same_place(place, table_uri(self.uri, query.base_table))
        return replace(info, view=query, source_version=table.source_version, source_is_here=here)

    def freshness(self, name: str) -> Freshness:
        """Plan every computed column; the answer is kept for some seconds."""
        table = self.open(name)
        key = (name, table.version)
        with self._planning:
            known = self._plans.get(key)
            if known is not None and time.monotonic() - known[0] < _FRESH_SECONDS:
                return known[1]
            found = self._plan(table)
            self._plans = {k: v for k, v in self._plans.items() if k[0] != name}
            self._plans[key] = (time.monotonic(), found)
        return found

    def known_freshness(self) -> dict[str, Freshness]:
        """What was planned last, by table: for those who must not wait."""
        return {name: found for (name, _), (_, found) in list(self._plans.items())}

    def _plan(self, table: Table) -> Freshness:
        columns: list[ColumnFreshness] = []
        try:
            planned: dict[str, ColumnFreshness] = {}
            plan = table._planner()
            for name, made in table.computed_columns().items():
                if not reads_source(table.schema.field(name)):
                    # One plan for all columns that a call fills together.
                    if made.computation_id not in planned:
                        planned[made.computation_id] = self._plan_column(table, name, plan)
                    columns.append(replace(planned[made.computation_id], column=name))
            refresh = table.plan_refresh() if isinstance(table, MaterializedView) else None
            return Freshness(tuple(columns), refresh=refresh)
        except BaseException as error:  # noqa: BLE001
            return Freshness(tuple(columns), trouble=self._trouble(error))

    def _plan_column(
        self, table: Table, name: str, plan_backfill: Callable[[str], BackfillPlan]
    ) -> ColumnFreshness:
        try:
            plan = plan_backfill(name)
        except BaseException as error:  # noqa: BLE001
            return ColumnFreshness(name, len(table), 0, (), trouble=self._trouble(error))
        reasons = sorted(plan.reasons().items(), key=lambda item: -item[1])
        return ColumnFreshness(
            column=name,
            total=plan.total_rows,
            stale=plan.rows_to_compute,
            reasons=tuple((reason.value, rows) for reason, rows in reasons),
            notes=plan.notes,
        )

    # --------------------------------------------------------------------------------- jobs

    def jobs(self, table: str | None = None, status: JobStatus | None = None) -> list[JobRecord]:
        """The jobs, newest first, with the latest that is known of those that run."""
        return [
            self._live(as_it_runs(job, self._signals))
            for job in self._feed.records()
            if table in (None, job.table_name) and status in (None, job.status)
        ]

    def job(self, job_id: str) -> JobRecord:
        """One job, with the latest that is known of it."""
        job = self._feed.unfinished(job_id) or self._db._history.job(job_id)
        return self._live(as_it_runs(job, self._signals))

    def whole_id(self, start: str) -> str:
        """The id of the only job that begins so."""
        return whole_id(start, (job.job_id for job in self._feed.records()))

    def output(self, job_id: str) -> list[TaskOutput]:
        """What the tasks of a job printed, as far as it is kept."""
        found = self._output.of_job(job_id)
        return [replace(each, text=self.redact(each.text)) for each in found]

    def cancel(self, job_id: str) -> None:
        """Ask a job to stop."""
        self._db.cancel_job(job_id)

    def cancel_requested(self, job_id: str) -> bool:
        """Whether somebody asked the job to stop."""
        return self._signals.cancel_requested(job_id)

    def samples(self, job: JobRecord) -> list[Metrics]:
        """The job's metrics over time, from its events and the beats that were seen here."""
        payloads = (e.payload.get("metrics") for e in job.events)
        recorded = [metrics for metrics in payloads if isinstance(metrics, dict)]
        seen = list(self._samples.get(job.job_id, ()))
        timed = [m for m in (*seen, *recorded) if isinstance(m.get("seconds"), int | float)]
        by_time = {float(m["seconds"]): m for m in timed}
        return [by_time[at] for at in sorted(by_time)]

    def _live(self, job: JobRecord) -> JobRecord:
        job = replace(job, error=None if job.error is None else self.redact(job.error))
        if job.status.is_final:
            return job
        self._keep_sample(job)
        return job

    def _keep_sample(self, job: JobRecord) -> None:
        with self._lock:
            own = self._samples.setdefault(job.job_id, deque(maxlen=_KEPT_SAMPLES))
            if not own or own[-1].get("seconds") != job.metrics.get("seconds"):
                own.append(job.metrics)
            while len(self._samples) > _KEPT_JOBS:
                self._samples.popitem(last=False)

    # ------------------------------------------------------------------------------- errors

    def errors(self, table: str | None = None) -> list[ErrorRow]:
        """Rows that failed, newest first, and then jobs that failed without one."""
        rows = [self._error_row(error) for error in reversed(self._failures.list(table))]
        shown = {row.job_id for row in rows}
        failed = self.jobs(table, JobStatus.FAILED)
        jobs = [self._job_error(job) for job in failed if job.error and job.job_id not in shown]
        return [*rows, *jobs]

    def _error_row(self, error: ErrorRecord) -> ErrorRow:
        offset = offset_of(error.row_address)
        return ErrorRow(
            table=error.table_name,
            column=error.column_name,
            job_id=error.job_id,
            exception=error.exception_type,
            message=self.redact(error.message),
            row=f"fragment {error.fragment_id}, row {offset}",
            attempt=str(error.attempt),
            inputs=self.redact(error.input_preview),
            traceback=self.redact(error.traceback),
        )

    def _job_error(self, job: JobRecord) -> ErrorRow:
        kind, _, message = self.redact(job.error or "").partition(": ")
        where = ""
        if (raised := _RAISED.search(message)) is not None:
            where, kind, message = raised.group("where"), raised.group("kind"), raised.group("text")
        return ErrorRow(
            table=job.table_name,
            column=job.column_name,
            job_id=job.job_id,
            exception=kind,
            message=message,
            row=where,
        )

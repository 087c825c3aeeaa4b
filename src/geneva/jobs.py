"""Jobs as users meet them: running one with its history kept, its future, its result."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from typing import Any

from geneva.background import in_background
from geneva.config import Settings
from geneva.errors import (
    GenevaError,
    JobCancelledError,
    JobError,
    JobNotFoundError,
    JobTimeoutError,
    StorageFullError,
    TableChangedError,
    TableNotFoundError,
    UDFError,
    UDFIntegrityError,
)
from geneva.execution.backfill.committer import MakeCommitter, TableCommitter
from geneva.execution.backfill.work import Work
from geneva.execution.jobs.following import Patience, wait_for
from geneva.execution.jobs.heartbeat import (
    Heartbeat,
    driven_here,
    driver_identity,
    is_gone,
    will_be_driven_here,
)
from geneva.execution.jobs.notebook import NotebookBars
from geneva.execution.jobs.progress import (
    JobProgress,
    ProgressBars,
    ProgressListener,
    in_notebook,
    wants_bars,
)
from geneva.execution.jobs.tracing import set_attributes, span
from geneva.execution.runner import Runner, engine_facts, job_group
from geneva.model.computation import MakePermit, permit_any
from geneva.model.jobs import JobConfig, JobMetrics, JobStatus
from geneva.model.tables import Secrets, TableRef
from geneva.render import html
from geneva.render.plain import plain
from geneva.render.text import agree, count
from geneva.storage.checkpoints.cleanup import CleanupReport
from geneva.storage.checkpoints.dead_jobs import A_DAY, DeadJobs, remove_dead_files
from geneva.storage.jobs.events import JobEvent, JobHistory, JobRecord, SameWork
from geneva.storage.jobs.failures import ErrorRecord, FailureStore
from geneva.storage.jobs.heartbeats import JobSignals, as_it_runs
from geneva.storage.jobs.output import JobOutput, OutputStore, TaskOutput
from geneva.storage.lance.damage import damage_reason, is_damage, is_storage_full
from geneva.storage.lance.dataset import dropped_meanwhile, has_versions, is_replaced

_LOG = logging.getLogger("geneva")
_OF_DROPPED_TABLES = (JobError, TableChangedError, UDFIntegrityError)
"""What else jobs end with whose table is gone: which of its files is missed first is chance."""
_NOTE_SECONDS = 0.25
"""A commit goes on record this much later, if nothing else goes on record before."""


@contextmanager
def _logged(what: str, job_id: str) -> Iterator[None]:
    """A history that can't be written is no reason to fail a job, nor to hide its own error."""
    try:
        yield
    except OSError as error:
        _LOG.warning("Could not %s job %s: %s", what, job_id, plain(error))


class JobResult(str):
    """The outcome of a job. It is its job id, so that it goes wherever an id goes.

    Printed, it says what was done. In an f-string it is its id, as in all other uses of a string.
    """

    status: JobStatus
    """How the job ended."""
    progress: JobProgress
    """What it did, in numbers."""
    followed: tuple[str, ...]
    """Jobs of the same work that were running already: this one waited for them."""

    unit: str
    """What its function was called for: a row, or a partition."""

    __slots__ = ("followed", "progress", "status", "unit")

    def __new__(
        cls,
        job_id: str,
        status: JobStatus,
        progress: JobProgress,
        followed: Sequence[str] = (),
        unit: str = "row",
    ) -> JobResult:
        """Make a result."""
        self = super().__new__(cls, job_id)
        self.status, self.progress, self.followed = status, progress, tuple(followed)
        self.unit = unit
        return self

    @property
    def job_id(self) -> str:
        """The id, as a plain string."""
        return str.__str__(self)

    @property
    def rows_computed(self) -> int:
        """Rows for which the UDF was called."""
        return self.progress.udf_rows

    @property
    def rows_committed(self) -> int:
        """Rows whose new value is in the table."""
        return self.progress.committed

    @property
    def rows_reused(self) -> int:
        """Rows whose value an earlier run had computed already."""
        return self.progress.reused_rows

    @property
    def rows_failed(self) -> int:
        """Rows on which the UDF failed, and which were skipped: they are NULL."""
        return self.progress.failed_rows

    @property
    def fragments_committed(self) -> int:
        """Fragments that got a new column file."""
        return self.progress.fragments_committed

    def __str__(self) -> str:
        """Say what was done, in a line."""
        return f"{self.status}: {self._in_words()} (job {self.job_id})"

    def _in_words(self) -> str:
        followed = f" after job {', '.join(self.followed)}, which did the same" * bool(
            self.followed
        )
        unmatched = self.progress.unmatched_rows
        missing = f", {unmatched:,} not in the source" * bool(unmatched)
        if not self.progress.total and not self.rows_committed:
            leaving = self.progress.rows_leaving
            gone = f"{count(leaving, 'source row')} gone, " * bool(leaving)
            return f"{gone}nothing to {'compute' if gone else 'do'}{missing}{followed}"
        if self.progress.loaded_rows or unmatched:
            return (
                f"{count(self.progress.loaded_rows, 'row')} loaded{missing} in "
                f"{self.progress.seconds:.1f} s{followed}"
            )
        reused = f", {self.rows_reused:,} reused" * bool(self.rows_reused)
        failed = f", {self.rows_failed:,} failed and skipped" * bool(self.rows_failed)
        # What is committed of partitions is hidden: the rows that came of them are not counted.
        committed = f", {self.rows_committed:,} committed" * (self.unit == "row")
        return (
            f"{count(self.rows_computed, self.unit)} computed{reused}{failed}{committed} in "
            f"{self.progress.seconds:.1f} s{followed}"
        )

    def __format__(self, format_spec: str) -> str:
        """The id, formatted."""
        return format(self.job_id, format_spec)

    def __repr__(self) -> str:
        """Show the outcome at a glance."""
        return (
            f"JobResult({self.job_id!r}, {self.status}, computed={self.rows_computed}, "
            f"reused={self.rows_reused}, committed={self.rows_committed}, "
            f"seconds={self.progress.seconds:.2f})"
        )

    def _repr_html_(self) -> str:
        """Show the outcome in a notebook."""
        pairs = (
            ("status", self.status),
            ("rows computed", f"{self.rows_computed:,}"),
            ("rows reused", f"{self.rows_reused:,}"),
            ("rows failed", f"{self.rows_failed:,}" if self.rows_failed else None),
            ("rows committed", f"{self.rows_committed:,}"),
            ("seconds", f"{self.progress.seconds:.2f}"),
            ("after", ", ".join(self.followed) or None),
        )
        return html.section(f"Job {self.job_id}", html.facts(pairs))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with its numbers."""
        return JobResult, (self.job_id, self.status, self.progress, self.followed)


@dataclass(frozen=True, slots=True)
class JobServices:
    """What the jobs of a database work with."""

    history: JobHistory
    signals: JobSignals
    failures: FailureStore
    output: OutputStore
    settings: Settings
    make_runner: Callable[[], Runner]
    make_committer: MakeCommitter = TableCommitter
    context: Mapping[str, Any] = field(default_factory=dict)
    """The cluster and the manifest that the job runs with, for its record."""
    hidden: tuple[Secrets, ...] = ()
    """What must not be in anything that is kept or shown."""
    permit: MakePermit = permit_any
    """Lets a stored function run, or refuses it."""


class Job:
    """Work that is about to run, runs, or ran; its history is kept as it goes."""

    def __init__(
        self,
        work: Work,
        services: JobServices,
        on_commit: Callable[[], None],
        job_id: str | None = None,
    ) -> None:
        """Take a plan; nothing is written or run yet. `on_commit` is called after every commit."""
        for backfill in work.backfills:
            # Here, where no job is on record yet; and in each of its rounds.
            services.permit(backfill.ref, backfill.computation)
        self.job_id = job_id or str(uuid.uuid4())
        self.status = JobStatus.PENDING
        self.progress = _progress_before(work)
        self.cancelled = threading.Event()
        self.waiting_for: str | None = None
        self._work, self._services, self._on_commit = work, services, on_commit
        self._numbers = itertools.count()
        self._unwritten: deque[JobEvent] = deque()
        self._noting: Future[None] | None = None
        """Writes events of commits behind."""
        self._writes = threading.Event()
        """Set when another event is about to be written, and those of commits with it."""
        self._behind: list[Future[None]] = []
        """What is done while the job goes on; it is not over before that is."""
        self._announced = False
        self._earlier = SameWork()
        self._runners: list[Runner] = []
        self._followed: tuple[str, ...] = ()
        self._dead: set[str] = set()
        """Jobs that left tags on the table and no longer run."""
        self._waited_seconds = 0.0

    def announce(self) -> None:
        """Put the job on record as PENDING, for whoever asks before it runs."""
        will_be_driven_here(self.job_id)
        self._announce(self._created())

    def _announce(self, *events: JobEvent) -> None:
        numbered = list(map(self._numbered, events))
        work = None if self._work.is_empty else self._work.identity
        self._earlier = self._services.history.announce(numbered, work)
        self._announced = True

    def run(self) -> JobResult:
        """Run to the end in this thread. What it raises has the job's id as `job_id`."""
        try:
            with driven_here(self.job_id):
                result = self._run()
                for work in self._behind:
                    work.result()
                return result
        except BaseException as error:
            wait(self._behind)
            with suppress(AttributeError, TypeError):
                error.job_id = self.job_id  # type: ignore[attr-defined]
            if isinstance(error, UDFError):
                error.internals = error.__traceback__
                raise error.with_traceback(None) from error.__cause__
            if (cause := self._cause(error)) is not None:
                raise cause from error
            raise

    def _cause(self, error: BaseException) -> GenevaError | None:
        """What an error comes from, where it doesn't say so itself."""
        cause: GenevaError | None = None
        if not isinstance(error, GenevaError) and is_storage_full(error):
            cause = StorageFullError(
                f"No space is left to go on with the {self._work.job_type.lower()} of column "
                f"{self._work.column!r} of table {self._work.table!r}: {damage_reason(error)}. "
                "Make room and run again: what was saved before is kept."
            )
        elif is_damage(error) or isinstance(error, _OF_DROPPED_TABLES):
            cause = self._dropped()
        if cause is not None:
            cause.job_id = self.job_id
        return cause

    def _dropped(self) -> TableNotFoundError | None:
        """The error for a table that is no longer there; which file is missed first is chance."""
        backfills = self._work.backfills
        read = {b.computation.source.ref for b in backfills if b.computation.source}
        with suppress(OSError, ValueError):  # of a store that can't be reached nothing is known
            for ref in [*self._work.refs, *read]:
                if not has_versions(ref):
                    return dropped_meanwhile(ref)
            for backfill in backfills:
                if is_replaced(backfill.ref, backfill.dataset):
                    return dropped_meanwhile(backfill.ref)
        return None

    def _run(self) -> JobResult:
        for note in self._work.notes:
            _LOG.warning("%s of %r: %s.", self._work.job_type, self._work.column, plain(note))
        self._log_plans()
        if self._work.is_empty:
            self._begin(self._ended(JobStatus.DONE))
            return self._result()
        self._begin(self._changed(JobStatus.RUNNING))
        try:
            self._drive_traced()
        except (JobCancelledError, KeyboardInterrupt):
            with _logged("note the end of", self.job_id):
                self._record(self._ended(JobStatus.CANCELLED))
            raise
        except BaseException as error:
            cause = self._cause(error) or error
            with _logged("note the end of", self.job_id):
                self._record(self._ended(JobStatus.FAILED, f"{type(cause).__name__}: {cause}"))
            if cause is not error:
                raise cause from error
            raise
        self._record(self._ended(JobStatus.DONE))
        return self._result()

    def _begin(self, event: JobEvent) -> None:
        if self._announced:
            self._record(event)
        else:
            self._announce(self._created(), event)

    def _drive_traced(self) -> None:
        work = self._work
        about = {"job_id": self.job_id, "table": work.table, "column": work.column}
        with span(f"geneva.{work.job_type.lower()}", about) as current:
            try:
                self._drive()
            finally:
                set_attributes(current, self.progress.metrics())

    def _drive(self) -> None:
        # Imported when a job runs: to look at jobs and tables takes none of it.
        from geneva.execution.backfill.control import JobControl
        from geneva.execution.jobs.output import OutputKeeper

        show = wants_bars(self._services.settings.progress)
        with ExitStack() as stack:
            heartbeat = stack.enter_context(
                Heartbeat(
                    self._services.signals,
                    self.job_id,
                    self._heartbeat,
                    self.cancelled,
                    self._do_behind,
                )
            )
            self._follow_earlier()
            if self._work.is_empty:
                return
            listeners: list[ProgressListener] = [self._follow]
            make_runner = self._remembered(self._services.make_runner)
            if show:
                title = self._work.column
                bars = NotebookBars(title) if in_notebook() else ProgressBars(title)
                stack.enter_context(bars)
                listeners.append(bars)
                make_runner = _in_phase(bars, "starting Spark", make_runner)
            show_output = _show_output if self._work.config.get("logs") else None
            services = self._services
            output = stack.enter_context(
                OutputKeeper(self.job_id, services.output, services.hidden, show_output)
            )
            control = JobControl(
                job_id=self.job_id,
                make_runner=make_runner,
                make_committer=self._services.make_committer,
                listeners=tuple(listeners),
                cancelled=self.cancelled,
                max_conflict_retries=self._services.settings.version_conflict_max_retries,
                shared_uri=self._services.signals.limits_uri,
                watch_checkpoints=show,
                is_running=self._is_running,
                record_errors=self._record_errors,
                record_output=output.record,
                hidden=services.hidden,
                permit=self._services.permit,
                behind=self._do_behind,
            )
            stack.push(self._clear_limits)
            self._follow(self._work.run(control))
            before = [*self._behind]
            if not self.progress.rows_left:
                self._do_behind(partial(self._tidy, before))
            self._do_behind(partial(self._remove_dead, before, others=heartbeat.used))

    def _do_behind(self, work: Callable[[], object]) -> None:
        """Do what is many requests to a store, and for nobody to wait for but the caller."""

        def run() -> None:
            with _logged("tidy up after", self.job_id):
                work()

        self._behind = [one for one in self._behind if not one.done() or one.exception()]
        self._behind.append(in_background("geneva-tidy", partial(copy_context().run, run)))

    def _tidy(self, before: Sequence[Future[None]]) -> None:
        """Remove what is of no use any more; what `before` deletes need not be found first."""
        wait(before)
        self._work.tidy()

    def _is_running(self, job_id: str) -> bool:
        """Whether a job that has a tag on this job's table runs; one that died is remembered."""
        history = self._services.history
        if history.close_lost(job_id):
            return True
        with suppress(JobNotFoundError):
            if history.job(job_id).status is JobStatus.DONE:
                return False  # its tag is about to go
        self._dead.add(job_id)
        return False

    def _remove_dead(self, before: Sequence[Future[None]], *, others: bool) -> None:
        """Remove what jobs that died on the same table have left behind.

        Where there may be `others`; or there are, as `before` finds by their tags.
        """
        if not others:
            wait(before)  # by then it is known which jobs are dead
            if not self._dead:
                return
        services = self._services
        remove_dead(
            self._work.table,
            self._work.refs,
            services.history,
            services.signals,
            own=self.job_id,
            known=self._dead,
            ready=partial(wait, before),  # its own tag goes: nothing is removed while there is one
        )

    def _clear_limits(self, failed: type[BaseException] | None, *_: object) -> None:
        """Delete the records that workers of this job shared; of a failed one, not all report."""
        if self.progress.limit_updates or failed is not None:
            from geneva.execution.apply.limits import budget_name, rate_name

            columns = {plan.column for plan in self._work.plans}
            names = [budget_name(self.job_id), *(rate_name(self.job_id, c) for c in columns)]
            with _logged("tidy up the limits of", self.job_id):
                self._services.signals.clear_limits(names)

    def _follow_earlier(self) -> None:
        """Wait for jobs of the same work that came before, and plan what they have left."""
        started, earlier = time.monotonic(), self._earlier
        patience = Patience(self.job_id, self.cancelled, self._work.timeout)
        try:
            found = wait_for(earlier.unfinished, self._services.history, patience, self._wait)
        finally:
            self.waiting_for, self._waited_seconds = None, time.monotonic() - started
        waited_for = [job.job_id for job in found]
        # Others may have ended between this job's plan and its announcement.
        ended = self._work.overtaken_by({*earlier.finished, *earlier.unfinished} - {*waited_for})
        self._followed = (*waited_for, *ended)
        if not self._followed:
            return
        self._work = self._work.again(self._followed, self._waited_seconds)
        self.progress = _progress_before(self._work)
        rows = self._work.total_rows
        left = "nothing is"
        if not self._work.is_empty:
            left = f"{count(rows, 'row')} {agree(rows, 'are')}"
        others = ", ".join(self._followed)
        _LOG.warning("Job %s goes on after job %s: %s left to do.", self.job_id, others, left)
        if not self._work.is_empty:
            self._log_plans()
            self._record(self._changed(JobStatus.RUNNING))

    def _log_plans(self) -> None:
        for plan in self._work.plans:
            for line in plan.log_lines():
                _LOG.info("Job %s: %s.", self.job_id, line)

    def _wait(self, other: JobRecord) -> None:
        self.status, self.waiting_for = JobStatus.PENDING, other.job_id
        _LOG.warning(
            "Job %s waits for job %s, which is at the same %s of %r already; then it does what is "
            "left. (Ctrl-C stops the waiting, not that job.)",
            self.job_id,
            other.job_id,
            self._work.job_type.lower(),
            f"{self._work.table}.{self._work.column}",
        )
        with _logged("note the waiting of", self.job_id):
            self._record(JobEvent(self.job_id, "waiting", {"for": other.job_id}))

    def _record_errors(self, records: Sequence[ErrorRecord]) -> None:
        # What was computed is worth more than the record of what was not.
        try:
            self._services.failures.append(records)
        except OSError as error:
            _LOG.warning("%d errors could not be recorded: %s", len(records), plain(error))

    def _heartbeat(self) -> dict[str, Any]:
        return {"status": self.status.value, "metrics": self._metrics()}

    def _metrics(self) -> dict[str, Any]:
        waited = {"waited_seconds": round(self._waited_seconds, 1)} if self._followed else {}
        return {**self.progress.metrics(), **waited}

    def _follow(self, progress: JobProgress) -> None:
        committed = progress.commits > self.progress.commits
        self.progress = progress
        if committed:
            self._note_commit(JobEvent(self.job_id, "committed", {"metrics": self._metrics()}))

    def _created(self) -> JobEvent:
        work = self._work
        return JobEvent(
            self.job_id,
            "created",
            {
                "table": work.table,
                "column": work.column,
                "type": work.job_type,
                "config": work.config,
                "driver": {**driver_identity(), **self._services.context},
                **({"work": work.identity} if work.identity and not work.is_empty else {}),
            },
        )

    def _changed(self, status: JobStatus) -> JobEvent:
        self.status = status
        return JobEvent(self.job_id, "status", {"status": status.value})

    def _remembered(self, make_runner: Callable[[], Runner]) -> Callable[[], Runner]:
        """Make runners, and remember them: what their engine calls their jobs goes on record."""

        def make() -> Runner:
            runner = make_runner()
            self._runners.append(runner)
            return runner

        return make

    def _engine_facts(self) -> dict[str, Any]:
        """What Spark calls the jobs that it ran for this one."""
        facts: dict[str, Any] = {}
        for found in map(engine_facts, self._runners):
            for name, value in found.items():
                facts[name] = [*facts.get(name, ()), *value] if isinstance(value, list) else value
        return {"spark": {"group": job_group(self.job_id), **facts}} if facts else {}

    def _ended(self, status: JobStatus, error: str | None = None) -> JobEvent:
        event = self._changed(status)
        payload = {**event.payload, "metrics": self._metrics(), **self._engine_facts()}
        return replace(event, payload=payload if error is None else {**payload, "error": error})

    def _record(self, *events: JobEvent) -> None:
        """Write events, with those of commits that are not written yet; return when it is done."""
        self._writes.set()
        noting, self._noting = self._noting, None
        if noting is not None:
            noting.result()
        showing = in_background("geneva-show", self._show_commit) if self._unwritten else None
        self._unwritten.extend(map(self._numbered, events))
        self._write_events()
        if showing is not None:
            showing.result()

    def _note_commit(self, event: JobEvent) -> None:
        """Let others know of a commit, while the job goes on: it is several requests to a store."""
        self._unwritten.append(self._numbered(event))
        if self._noting is None or self._noting.done():
            self._writes.clear()
            self._noting = in_background("geneva-history", self._note_commits)

    def _note_commits(self) -> None:
        # The last commit of a job, or its only one, goes on record together with its end.
        while self._unwritten and not self._writes.wait(_NOTE_SECONDS):
            with _logged("note a commit of", self.job_id):
                self._write_events()
            self._show_commit()

    def _show_commit(self) -> None:
        """Let the user's own handle see what was committed. One of a dropped table can't."""
        try:
            self._on_commit()
        except Exception as error:
            if not is_damage(error):
                raise
            _LOG.warning("Could not show a commit of job %s: %s", self.job_id, plain(error))

    def _write_events(self) -> None:
        events: list[JobEvent] = []
        while self._unwritten:
            events.append(self._unwritten.popleft())
        self._services.history.append(events)

    def _numbered(self, event: JobEvent) -> JobEvent:
        return replace(event, seq=next(self._numbers))

    def _result(self) -> JobResult:
        return JobResult(self.job_id, self.status, self.progress, self._followed, self._work.unit)


def _in_phase(
    bars: ProgressBars | NotebookBars, phase: str, make_runner: Callable[[], Runner]
) -> Callable[[], Runner]:
    """Make the runner while the bars say what they wait for."""

    def make() -> Runner:
        with bars.phase(phase):
            return make_runner()

    return make


def _show_output(output: TaskOutput) -> None:
    """Show what a task printed where people look at what goes on, and machines read nothing."""
    sys.stderr.write(str(output))
    sys.stderr.flush()


def remove_dead(
    table: str,
    refs: Iterable[TableRef],
    history: JobHistory,
    signals: JobSignals,
    *,
    own: str | None = None,
    known: Set[str] = frozenset(),
    ready: Callable[[], object] = lambda: None,
    older_than: timedelta = A_DAY,
) -> CleanupReport:
    """Remove what jobs that died on a table have left, and then their signals, which tell of it.

    `own` is the job that does this, `known` are jobs that are known to have died, once `ready` has
    returned: that is called before anything is removed. Unfinished files that are older than
    `older_than` go whoever left them: workers die, too. Nothing is removed while another job is at
    work: between two rounds that has no tag, but what it has staged is still wanted.
    """
    nothing = CleanupReport(0, 0, 0)
    listing = in_background("geneva-signals", signals.jobs)
    jobs = history.list(table)
    signalling = listing.result()
    ready()
    dead = set(known)
    for job_id in signalling - dead - {own}:
        with suppress(JobNotFoundError):
            job = history.job(job_id)
            if job.status.is_final and job.table_name == table:
                history.close_lost(job_id)
                dead.add(job_id)
    if dead or any(job.died for job in jobs):
        jobs = history.list(table)  # what fresh files are removed by has to be true now
    if any(not job.status.is_final and job.job_id != own for job in jobs):
        return nothing
    lost = {job.job_id for job in jobs if job.died}  # also before it gave a signal
    died = dead | lost
    of_dead = DeadJobs(died=bool(died), died_here=any(is_gone(job) for job in history.jobs(died)))
    reports = [remove_dead_files(ref, of_dead, older_than) for ref in refs]
    if None not in reports:
        from geneva.execution.worker.output import lost_output

        for job_id in dead:
            lost_output(job_id)  # it may hold keys that are known only to the job itself
            signals.clear(job_id)
        if dead:
            remove_limits(signals, jobs)
    return sum((report for report in reports if report is not None), nothing)


def remove_limits(signals: JobSignals, jobs: Sequence[JobRecord]) -> set[str]:
    """Delete the records of limits that jobs which are over have left; return which jobs."""
    from geneva.execution.apply.limits import owner_of

    is_over = {job.job_id: job.status.is_final for job in jobs}
    owners = {name: owner_of(name, is_over) for name in signals.limits()}
    left = {name: job_id for name, job_id in owners.items() if job_id and is_over[job_id]}
    signals.clear_limits(left)
    return {*left.values()}


def _progress_before(work: Work) -> JobProgress:
    """The progress of work that has not begun."""
    return JobProgress(
        total=work.total_rows,
        skipped_fragments=sum(plan.right_fragments for plan in work.plans),
        skipped_rows=sum(plan.right_rows for plan in work.plans),
    )


class JobHandle(JobRecord):
    """A job of any process, as of when it was looked up, and what can be done with it."""

    __slots__ = ("_history", "_output", "_signals")
    _history: JobHistory
    _signals: JobSignals
    _output: OutputStore

    @classmethod
    def of(
        cls, record: JobRecord, history: JobHistory, signals: JobSignals, output: OutputStore
    ) -> JobHandle:
        """Make a record something to act on."""
        facts = {item.name: getattr(record, item.name) for item in fields(record)}
        config, metrics = JobConfig(record.config), JobMetrics(record.metrics)
        self = cls(**{**facts, "config": config, "metrics": metrics})
        object.__setattr__(self, "_history", history)
        object.__setattr__(self, "_signals", signals)
        object.__setattr__(self, "_output", output)
        return self

    def refresh(self) -> JobHandle:
        """The job as it is now."""
        job = as_it_runs(self._history.job(self.job_id), self._signals)
        return JobHandle.of(job, self._history, self._signals, self._output)

    def progress(self) -> dict[str, Any]:
        """The newest numbers: of a running job of another process, those of its last heartbeat.

        That is every 10 s; of a job of this connection they are those of this moment.
        """
        return self.refresh().metrics

    def logs(self) -> JobOutput:
        """What its functions have printed and logged: the end of it, task by task.

        Of a running job what tasks that have ended printed, up to some seconds ago.
        """
        return self._output.of_job(self.job_id)

    def wait(self, timeout: float | None = None, poll_seconds: float = 0.5) -> JobHandle:
        """Wait until the job has ended, well or not, and return it as it is then."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while not (now := self.refresh()).status.is_final:
            left = deadline - time.monotonic() if deadline is not None else poll_seconds
            if left <= 0:
                late = JobTimeoutError(
                    f"Job {self.job_id} is still {now.status} after {timeout} s of waiting. Wait "
                    "longer, or stop it with cancel()."
                )
                late.job_id = self.job_id
                raise late
            time.sleep(min(left, poll_seconds))
        return now

    def cancel(self) -> None:
        """Ask the job to stop, whichever process runs it. It commits what is finished first."""
        now = self.refresh()
        if now.status.is_final:
            raise JobError(f"Job {now.job_id} has ended already: it is {now.status}.")
        self._signals.request_cancel(self.job_id)


class JobFuture:
    """A job that runs in the background."""

    def __init__(self, job: Job) -> None:
        """Start the job in a thread of its own."""
        self._job = job
        job.announce()
        self._future: Future[JobResult] = Future()
        self._thread = threading.Thread(
            target=self._run, name=f"geneva-job-{job.job_id[:8]}", daemon=True
        )
        self._thread.start()

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self._job.job_id

    def done(self) -> bool:
        """Whether the job has ended, well or not."""
        return self._future.done()

    def status(self) -> JobStatus:
        """Where the job stands."""
        return self._job.status

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, well or not; whether it came."""
        self._thread.join(timeout)
        return self._future.done()

    def ended_well(self) -> bool:
        """Whether the job has ended, and without an error."""
        return self._future.done() and self._future.exception() is None

    def progress(self) -> JobProgress:
        """How far the job is."""
        return self._job.progress

    def result(self, timeout: float | None = None) -> JobResult:
        """Wait for the end and return the outcome, or raise what the job raised."""
        try:
            return self._future.result(timeout)
        except FutureTimeoutError as error:
            if self._future.done():
                raise
            late = JobTimeoutError(
                f"Job {self.job_id} is still running after {timeout} s of waiting."
            )
            late.job_id = self.job_id
            raise late from error

    def cancel(self) -> None:
        """Ask the job to stop; finished fragments are committed. `result()` then raises."""
        self._job.cancelled.set()

    def __repr__(self) -> str:
        """Show the job and where it stands."""
        return f"JobFuture({self.job_id!r}, {self.status()})"

    def _run(self) -> None:
        try:
            self._future.set_result(self._job.run())
        except BaseException as error:  # noqa: BLE001
            # Whatever it is belongs to the one who asks for the result.
            self._future.set_exception(error)

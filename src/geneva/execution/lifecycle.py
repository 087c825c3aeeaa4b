"""The life of a job: it is announced, waits for others, runs and ends, with its history kept."""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from geneva.background import in_background
from geneva.config import Settings
from geneva.errors import (
    GenevaError,
    JobCancelledError,
    JobError,
    JobNotFoundError,
    TableChangedError,
    TableNotFoundError,
    UDFError,
    UDFIntegrityError,
)
from geneva.execution.backfill.committer import MakeCommitter, TableCommitter
from geneva.execution.backfill.work import Work
from geneva.execution.jobs.dead_jobs import remove_dead
from geneva.execution.jobs.event_writer import EventWriter, logging_trouble
from geneva.execution.jobs.following import Patience, wait_for
from geneva.execution.jobs.heartbeat import (
    Heartbeat,
    driven_here,
    driver_identity,
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
from geneva.execution.jobs.result import JobResult
from geneva.execution.jobs.tracing import set_attributes, span
from geneva.execution.runner import Runner, engine_facts, job_group
from geneva.model.computation import MakePermit, Udf, permit_any
from geneva.model.jobs import JobStatus, filled_by_job
from geneva.model.tables import Secrets, TableRef
from geneva.render.plain import plain
from geneva.render.text import agree, count
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.failures import ErrorRecord, FailureStore
from geneva.storage.jobs.heartbeats import JobSignals
from geneva.storage.jobs.history import JobHistory, SameWork
from geneva.storage.jobs.output import OutputStore, TaskOutput
from geneva.storage.jobs.records import JobRecord
from geneva.storage.lance.damage import is_damage, unwritable
from geneva.storage.lance.dataset import dropped_meanwhile, has_versions, is_replaced
from geneva.storage.lance.own_commits import forget_own_commits

if TYPE_CHECKING:
    from geneva.execution.backfill.control import JobControl
    from geneva.execution.jobs.output import OutputKeeper

Bars: TypeAlias = ProgressBars | NotebookBars
"""What shows the progress of a job to whoever looks on."""

_LOG = logging.getLogger("geneva")
_OF_DROPPED_TABLES = (JobError, TableChangedError, TableNotFoundError, UDFIntegrityError)
"""What else jobs end with whose table is gone: which of its files is missed first is chance."""


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
        self._work, self._services = work, services
        self._events = EventWriter(self.job_id, services.history, on_commit)
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
        work = None if self._work.is_empty else self._work.identity
        self._earlier = self._events.announce(events, work)
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
        finally:
            forget_own_commits(self.job_id)

    def _cause(self, error: BaseException) -> GenevaError | None:
        """What an error comes from, where it doesn't say so itself."""
        doing = f"the {self._about}"
        cause: GenevaError | None = None
        if is_damage(error) or isinstance(error, _OF_DROPPED_TABLES):
            cause = self._dropped()
        if cause is None:
            places = [self._services.signals.database_uri, *(ref.root for ref in self._tables())]
            cause = unwritable(error, doing, "what was saved before is kept", places)
        if cause is None or str(cause) == str(error):
            return None
        cause.job_id = self.job_id
        return cause

    def _dropped(self) -> TableNotFoundError | None:
        """The error for a table that is no longer there; which file is missed first is chance."""
        with suppress(OSError, ValueError):  # of a store that can't be reached nothing is known
            for ref in self._tables():
                if not has_versions(ref):
                    return dropped_meanwhile(ref)
            for backfill in self._work.backfills:
                if is_replaced(backfill.ref, backfill.dataset):
                    return dropped_meanwhile(backfill.ref)
        return None

    def _tables(self) -> list[TableRef]:
        """The tables that the work writes and reads."""
        computations = [backfill.computation for backfill in self._work.backfills]
        return [*self._work.refs, *{c.source.ref for c in computations if c.source}]

    def _run(self) -> JobResult:
        for note in self._work.notes:
            _LOG.warning("The %s: %s.", plain(self._about), plain(note))
        self._log_plans()
        if self._work.is_empty:
            self._begin(self._ended(JobStatus.DONE))
            return self._result()
        self._begin(self._changed(JobStatus.RUNNING))
        try:
            self._drive_traced()
        except (JobCancelledError, KeyboardInterrupt):
            with logging_trouble("note the end of", self.job_id):
                self._events.record(self._ended(JobStatus.CANCELLED))
            raise
        except BaseException as error:
            cause = self._cause(error) or error
            with logging_trouble("note the end of", self.job_id):
                self._events.record(
                    self._ended(JobStatus.FAILED, f"{type(cause).__name__}: {cause}")
                )
            if cause is not error:
                raise cause from error
            raise
        self._events.record(self._ended(JobStatus.DONE))
        return self._result()

    @property
    def _about(self) -> str:
        """What the job is, for a sentence."""
        work = self._work
        if work.column == "*":
            return f"{work.job_type.lower()} of view {work.table!r}"
        return f"{work.job_type.lower()} of column {work.column!r} of table {work.table!r}"

    def _begin(self, event: JobEvent) -> None:
        if self._announced:
            self._events.record(event)
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
        from geneva.execution.jobs.output import OutputKeeper

        services = self._services
        with ExitStack() as stack:
            heartbeat = stack.enter_context(
                Heartbeat(
                    services.signals, self.job_id, self._heartbeat, self.cancelled, self._do_behind
                )
            )
            self._follow_earlier()
            if self._work.is_empty:
                return
            bars: Bars | None = None
            if wants_bars(services.settings.progress):
                title = filled_by_job(self._work.table, self._work.column)
                bars = NotebookBars(title) if in_notebook() else ProgressBars(title)
                stack.enter_context(bars)
            show_output = _show_output if self._work.config.get("logs") else None
            output = stack.enter_context(
                OutputKeeper(self.job_id, services.output, services.hidden, show_output)
            )
            control = self._control(bars, output)
            stack.push(self._clear_limits)
            self._follow(self._work.run(control))
            before = [*self._behind]
            if not self.progress.rows_left:
                self._do_behind(partial(self._tidy, before))
            self._do_behind(partial(self._remove_dead, before, others=heartbeat.used))

    def _control(self, bars: Bars | None, output: OutputKeeper) -> JobControl:
        """What the work is given to run with."""
        from geneva.execution.backfill.control import JobControl

        services = self._services
        listeners: list[ProgressListener] = [self._follow]
        make_runner = self._remembered(services.make_runner)
        if bars is not None:
            listeners.append(bars)
            make_runner = _in_phase(bars, "starting Spark", make_runner)
        return JobControl(
            job_id=self.job_id,
            make_runner=make_runner,
            make_committer=services.make_committer,
            listeners=tuple(listeners),
            cancelled=self.cancelled,
            max_conflict_retries=services.settings.version_conflict_max_retries,
            shared_uri=services.signals.limits_uri,
            watch_checkpoints=bars is not None,
            is_running=self._is_running,
            record_errors=self._record_errors,
            record_output=output.record,
            hidden=services.hidden,
            permit=services.permit,
            behind=self._do_behind,
        )

    def _do_behind(self, work: Callable[[], object]) -> None:
        """Do what is many requests to a store, and for nobody to wait for but the caller."""

        def run() -> None:
            with logging_trouble("tidy up after", self.job_id):
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
            with logging_trouble("tidy up the limits of", self.job_id):
                self._services.signals.clear_limits(names)

    def _follow_earlier(self) -> None:
        """Wait for jobs of the same work that came before, and plan what they have left."""
        started, earlier = time.monotonic(), self._earlier
        patience = Patience(self.job_id, self.cancelled, self._work.timeout)
        try:
            found = wait_for(earlier.unfinished, self._services.history, patience, self._wait)
        finally:
            self._waited_seconds = time.monotonic() - started
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
            self._events.record(self._changed(JobStatus.RUNNING))

    def _log_plans(self) -> None:
        for plan in self._work.plans:
            for line in plan.log_lines():
                _LOG.info("Job %s: %s.", self.job_id, line)

    def _wait(self, other: JobRecord) -> None:
        self.status = JobStatus.PENDING
        _LOG.warning(
            "Job %s waits for job %s, which is at the same %s of %r already; then it does what is "
            "left. (Ctrl-C stops the waiting, not that job.)",
            self.job_id,
            other.job_id,
            self._work.job_type.lower(),
            f"{self._work.table}.{self._work.column}",
        )
        with logging_trouble("note the waiting of", self.job_id):
            self._events.record(JobEvent(self.job_id, "waiting", {"for": other.job_id}))

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
            self._events.note_commit(
                JobEvent(self.job_id, "committed", {"metrics": self._metrics()})
            )

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
                "driver": {**driver_identity(), **self._services.context, **_manifest_of(work)},
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

    def _result(self) -> JobResult:
        return JobResult(self.job_id, self.status, self.progress, self._followed, self._work.unit)


def _in_phase(bars: Bars, phase: str, make_runner: Callable[[], Runner]) -> Callable[[], Runner]:
    """Make the runner while the bars say what they wait for."""

    def make() -> Runner:
        with bars.phase(phase):
            return make_runner()

    return make


def _show_output(output: TaskOutput) -> None:
    """Show what a task printed where people look at what goes on, and machines read nothing."""
    sys.stderr.write(str(output))
    sys.stderr.flush()


def _progress_before(work: Work) -> JobProgress:
    """The progress of work that has not begun."""
    return JobProgress(
        total=work.total_rows,
        skipped_fragments=sum(plan.right_fragments for plan in work.plans),
        skipped_rows=sum(plan.right_rows for plan in work.plans),
    )


def _manifest_of(work: Work) -> dict[str, Any]:
    """The manifest that a function brings along: that of the column, before those of inputs."""
    for backfill in reversed(work.backfills):
        program = backfill.computation.program
        if isinstance(program, Udf) and program.manifest is not None:
            name, checksum = program.manifest
            return {"manifest": name, "manifest_checksum": checksum}
    return {}

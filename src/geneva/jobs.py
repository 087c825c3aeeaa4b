"""Jobs as users meet them: a job of any process, and one that runs in the background."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from geneva.errors import JobError, JobTimeoutError
from geneva.execution.jobs.progress import JobProgress
from geneva.execution.jobs.result import JobResult
from geneva.execution.lifecycle import Job
from geneva.model.jobs import JobConfig, JobMetrics, JobStatus
from geneva.options import read_wait
from geneva.storage.jobs.heartbeats import JobSignals, as_it_runs
from geneva.storage.jobs.history import JobHistory
from geneva.storage.jobs.output import JobOutput, OutputStore
from geneva.storage.jobs.records import JobRecord

__all__ = ["JobFuture", "JobHandle", "JobResult"]


class JobHandle(JobRecord):
    """A job of any process, as of when it was looked up, and what can be done with it."""

    __slots__ = ("_history", "_output", "_signals")
    if TYPE_CHECKING:
        metrics: JobMetrics
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

    def wait(
        self, timeout: float | timedelta | None = None, poll_seconds: float = 0.5
    ) -> JobHandle:
        """Wait until the job has ended, well or not, and return it as it is then."""
        seconds = read_wait("timeout", timeout)
        deadline = time.monotonic() + seconds if seconds is not None else None
        while not (now := self.refresh()).status.is_final:
            left = deadline - time.monotonic() if deadline is not None else poll_seconds
            if left <= 0:
                late = JobTimeoutError(
                    f"Job {self.job_id} is still {now.status} after {seconds:g} s of waiting. Wait "
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

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the end, well or not; whether it came."""
        self._thread.join(read_wait("timeout", timeout))
        return self._future.done()

    def ended_well(self) -> bool:
        """Whether the job has ended, and without an error."""
        return self._future.done() and self._future.exception() is None

    def progress(self) -> JobProgress:
        """How far the job is."""
        return self._job.progress

    def result(self, timeout: float | timedelta | None = None) -> JobResult:
        """Wait for the end and return the outcome, or raise what the job raised."""
        seconds = read_wait("timeout", timeout)
        try:
            return self._future.result(seconds)
        except FutureTimeoutError as error:
            if self._future.done():
                raise
            late = JobTimeoutError(
                f"Job {self.job_id} is still running after {seconds:g} s of waiting."
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

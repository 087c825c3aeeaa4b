"""A job as its driver sees it: the world around it, and what its rounds share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from geneva.execution.backfill.committer import Committer, MakeCommitter, TableCommitter
from geneva.execution.backfill.dispatch import JobRunner
from geneva.execution.backfill.ledger import Ledger
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.jobs.progress import JobProgress, ProgressListener
from geneva.execution.runner import Runner
from geneva.model.computation import MakePermit, permit_any
from geneva.model.tables import Secrets
from geneva.storage.checkpoints.pins import Behind
from geneva.storage.jobs.failures import ErrorRecord


@dataclass(frozen=True, slots=True)
class JobControl:
    """What the driver needs to know of the world around it."""

    job_id: str
    make_runner: Callable[[], Runner]
    """Called when there is something to run, and not before: it may start Spark."""
    make_committer: MakeCommitter = TableCommitter
    """Makes what publishes the results; tests put their own in its place."""
    listeners: tuple[ProgressListener, ...] = ()
    cancelled: threading.Event = field(default_factory=threading.Event)
    max_conflict_retries: int = 10
    shared_uri: str = ""
    """The folder of the records that all workers of the database share, for limits on calls."""
    watch_checkpoints: bool = False
    """Look at the checkpoints of running tasks often, for somebody who watches."""
    is_running: Callable[[str], bool] = lambda job_id: True
    """Whether a job of that id still runs; versions that dead ones pinned are released."""
    record_errors: Callable[[Sequence[ErrorRecord]], None] = lambda records: None
    """Keeps what is known of rows that failed."""
    record_output: Callable[[str, str, bool], None] = lambda task, text, shown: None
    """Keeps what a task printed: which one, the text, and whether it was seen already."""
    hidden: tuple[Secrets, ...] = ()
    """What no text of the user's function may show, wherever it is kept."""
    permit: MakePermit = permit_any
    """Lets a function run, or refuses it. Asked in every round: a column may have changed."""
    behind: Behind = lambda work: work()
    """Does what the job need not wait for, while it goes on: tidying up is requests to a store."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What the rounds of a job share."""

    ledger: Ledger
    committer: Committer
    job_runner: JobRunner
    files: set[str] = field(default_factory=set)
    """Data files that the job has made so far, committed or not."""
    landed: dict[str, int] = field(default_factory=dict)
    """Those that it has committed, with how many rows of them it computed."""
    lost_files: set[str] = field(default_factory=set)
    """Data files that it has made, committed or not, and that somebody has deleted."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Fragments that can't be read, and why."""

    @classmethod
    def begin(cls, prepared: PreparedBackfill, control: JobControl) -> JobState:
        """The state before the first round."""
        plan = prepared.plan
        kept = plan.rows_reused
        progress = JobProgress(
            total=plan.rows_to_compute,
            checkpointed=kept,
            kept_rows=kept,
            fragments=len(plan.fragments),
            skipped_fragments=plan.right_fragments,
            skipped_rows=plan.right_rows,
        )
        return cls(
            ledger=Ledger(progress, control.listeners),
            committer=control.make_committer(control.job_id, control.max_conflict_retries),
            job_runner=JobRunner(control.make_runner),
            unreadable=dict(plan.unreadable),
        )

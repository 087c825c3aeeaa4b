"""Removing what jobs that died have left behind: files, tags, signals and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from datetime import timedelta

from geneva.background import in_background
from geneva.errors import JobNotFoundError
from geneva.execution.jobs.heartbeat import is_gone
from geneva.model.tables import TableRef
from geneva.storage.checkpoints.cleanup import CleanupReport
from geneva.storage.checkpoints.dead_jobs import A_DAY, DeadJobs, remove_dead_files
from geneva.storage.jobs.heartbeats import JobSignals
from geneva.storage.jobs.history import JobHistory
from geneva.storage.jobs.records import JobRecord


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

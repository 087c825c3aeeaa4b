"""The one function that is shipped to workers.

State is in storage. A task may run twice, at the same time even, and nothing breaks: staged names
are unique, checkpoints of one key hold the same rows, and only the driver publishes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from geneva.execution.apply.forks import note_worker
from geneva.execution.apply.timeouts import is_spark_worker
from geneva.execution.worker.output import Printed, captured
from geneva.execution.worker.pipeline import Pipeline, run_together
from geneva.execution.worker.program import share_surroundings
from geneva.execution.worker.records import open_task
from geneva.execution.worker.resume import is_retry, resume_task
from geneva.execution.worker.task import Task, TaskReport


def run_task(task: Task) -> str:
    """Do the parts of a task in order; return a `TaskReport` as JSON.

    A failure of the user's function is reported, not raised: Spark would run the task again.
    """
    started = time.monotonic()
    first = task.parts[0]
    place = f"{task.work.computation.id[:8]}-{first.fragment_id}-{first.rows.start}"
    capture: AbstractContextManager[Printed] = nullcontext(Printed())
    if is_spark_worker():  # the user's own process is not ours to change
        capture = captured(task.work.job_id, place)
        note_worker()
    with capture as output:
        own, *riders = _run_again(task) if is_retry(task) else _run_first(task)
        report = replace(own, output=output(), riders=tuple(riders))
    seconds = time.monotonic() - started
    return replace(
        report, seconds=seconds, memory_bytes=_peak_memory(), output_shown=output.is_shown
    ).to_json()


def _run_first(task: Task) -> list[TaskReport]:
    """Do all columns of a task at once, from one read of their rows.

    Modules and variables are the process's: functions that come with different ones go one by one.
    """
    works = [own.work for own in task.columns]
    if len(works) > 1 and not share_surroundings(works):
        return _one_by_one(
            task,
            lambda own: Pipeline(open_task(own.work), is_retry=False).run(
                own.parts, limit=task.limit
            ),
        )
    pipelines = [Pipeline(open_task(own.work), is_retry=False) for own in task.columns]
    riders = [{part.fragment_id: part for part in rider.parts} for rider in task.riders]
    legs = [(part, *(parts.get(part.fragment_id) for parts in riders)) for part in task.parts]
    run_together(pipelines, legs, task.limit)
    return [pipeline.report() for pipeline in pipelines]


def _run_again(task: Task) -> list[TaskReport]:
    """Do the columns of a task that was lost one after the other: one of them is to blame."""

    def run(own: Task) -> TaskReport:
        parts, done = resume_task(replace(own, attempt=task.attempt))
        return Pipeline(open_task(own.work), is_retry=True).run(parts, done)

    return _one_by_one(task, run)


def _one_by_one(task: Task, run: Callable[[Task], TaskReport]) -> list[TaskReport]:
    """Do the columns of a task in turn, up to a failure."""
    reports: list[TaskReport] = []
    for own in task.columns:
        failed = any(report.failure is not None for report in reports)
        reports.append(TaskReport(results=()) if failed else run(own))
    return reports


def _peak_memory() -> int:
    """The most memory that this process has had, in bytes; 0 where that can't be known."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

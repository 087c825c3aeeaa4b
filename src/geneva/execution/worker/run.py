"""The one function that is shipped to workers.

State is in storage. A task may run twice, at the same time even, and nothing breaks: staged names
are unique, checkpoints of one key hold the same rows, and only the driver publishes.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import replace

from geneva.execution.apply.timeouts import is_spark_worker
from geneva.execution.worker.output import Printed, captured
from geneva.execution.worker.pipeline import Pipeline
from geneva.execution.worker.records import open_task
from geneva.execution.worker.resume import is_retry, resume_task
from geneva.execution.worker.task import Task


def run_task(task: Task) -> str:
    """Do the parts of a task in order; return a `TaskReport` as JSON.

    A failure of the user's function is reported, not raised: Spark would run the task again.
    """
    started = time.monotonic()
    first = task.parts[0]
    place = f"{task.work.computation.id[:8]}-{first.fragment_id}-{first.rows.start}"
    # The output of the user's own process is not ours to lead elsewhere.
    capture = captured(task.work.job_id, place) if is_spark_worker() else nullcontext(Printed())
    with capture as output:
        again = is_retry(task)
        pipeline = Pipeline(open_task(task.work), is_retry=again)
        parts, done = resume_task(task)
        max_seconds = None if again else task.max_seconds
        report = replace(pipeline.run(parts, done, max_seconds), output=output())
    seconds = time.monotonic() - started
    return replace(
        report, seconds=seconds, memory_bytes=_peak_memory(), output_shown=output.is_shown
    ).to_json()


def _peak_memory() -> int:
    """The most memory that this process has had, in bytes; 0 where that can't be known."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

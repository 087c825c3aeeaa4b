"""The one function that is shipped to workers.

State is in storage. A task may run twice, at the same time even, and nothing breaks: staged names
are unique, checkpoints of one key hold the same rows, and only the driver publishes.
"""

from __future__ import annotations

from geneva.execution.worker.pipeline import Pipeline
from geneva.execution.worker.records import open_task
from geneva.execution.worker.resume import is_retry, resume_task
from geneva.execution.worker.task import Task


def run_task(task: Task) -> str:
    """Do the parts of a task in order; return a `TaskReport` as JSON.

    A failure of the user's function is reported, not raised: Spark would run the task again.
    """
    pipeline = Pipeline(open_task(task.work), is_retry=is_retry(task))
    parts, done = resume_task(task)
    return pipeline.run(parts, done).to_json()

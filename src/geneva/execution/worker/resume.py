"""What an attempt that was lost had finished of its task: Spark runs it again as it was shipped."""

from __future__ import annotations

import sys
from dataclasses import replace

from geneva.execution.worker.task import ColumnWork, PartResult, PartWork, Task
from geneva.planning.ranges import disjoint
from geneva.storage.checkpoints.staging import open_checkpoints, read_work
from geneva.storage.checkpoints.store import CheckpointKey
from geneva.storage.columns.provenance import read_provenance
from geneva.storage.columns.staged_files import StagedFile, staged_file_is_whole


def resume_task(task: Task) -> tuple[tuple[PartWork, ...], list[PartResult]]:
    """Split a task into what is left to do and what is done.

    A first attempt reads nothing: its plan knows everything. A later one finds the checkpoints and
    staged files of the worker that died, so that only its open batch is computed again.
    """
    if not is_retry(task):
        return task.parts, []
    stored = read_work(open_checkpoints(task.work.ref))
    left: list[PartWork] = []
    done: list[PartResult] = []
    for part in task.parts:
        place = (part.prefix, part.fragment_id)
        result = _staged_before(task.work, part, stored.staged.get(place))
        if result is not None:
            done.append(result)
        else:
            left.append(_with_checkpoints(part, stored.keys.get(place, [])))
    return tuple(left), done


def is_retry(task: Task) -> bool:
    """Whether an attempt at the task was lost before this one."""
    return bool(task.attempt or _spark_attempt())


def _spark_attempt() -> int:
    """How often Spark ran this task before. Off Spark there are no retries."""
    module = sys.modules.get("pyspark.taskcontext")
    context = module.TaskContext.get() if module is not None else None
    return context.attemptNumber() if context is not None else 0


def _with_checkpoints(part: PartWork, keys: list[CheckpointKey]) -> PartWork:
    rows = part.rows
    inside = [
        key.rows
        for key in keys
        if key.rows is not None and rows.start <= key.rows.start and key.rows.end <= rows.end
    ]
    return replace(part, covered=disjoint((*part.covered, *inside), part.physical_rows))


def _staged_before(work: ColumnWork, part: PartWork, found: StagedFile | None) -> PartResult | None:
    """The fragment, if its file was staged before the worker died."""
    file = part.file
    if file is None or found is None:
        return None
    if found != part.staged_file(file, work.computation.id, found.path):
        return None
    if not staged_file_is_whole(work.ref, found):
        return None
    provenance = read_provenance(work.ref, found.path)
    if provenance is None or provenance.failed or provenance.valid != file.valid_after:
        # With rows that failed it is made again, out of checkpoints: they hold what happened.
        return None
    return PartResult(
        fragment_id=part.fragment_id,
        rows=part.rows,
        staged_path=found.path,
        staged_bytes=found.size_bytes,
        rows_reused=part.compute.count,
    )

"""What an attempt that was lost had finished of its task: Spark runs it again as it was shipped."""

from __future__ import annotations

import sys
from dataclasses import replace

from geneva.execution.worker.task import ColumnWork, PartResult, PartWork, Task
from geneva.planning.ranges import disjoint
from geneva.storage.checkpoints.staging import open_checkpoints, read_staged
from geneva.storage.checkpoints.store import CheckpointKey, CheckpointStore, index_keys
from geneva.storage.columns.provenance import read_provenance


def resume_task(task: Task) -> tuple[tuple[PartWork, ...], list[PartResult]]:
    """What is left to do of a task, and what is done.

    A first attempt looks nowhere: its plan knows everything. A later one finds the checkpoints and
    staged files of the worker that died, so that only its open batch is computed again.
    """
    if not task.attempt and not attempt_number():
        return task.parts, []
    store = open_checkpoints(task.work.ref)
    index = index_keys(store.list_keys("udf-"))
    left: list[PartWork] = []
    done: list[PartResult] = []
    for part in task.parts:
        keys = index.get((part.prefix, part.fragment_id), [])
        result = _staged_before(task.work, part, keys, store)
        if result is not None:
            done.append(result)
        else:
            left.append(_with_checkpoints(part, keys))
    return tuple(left), done


def attempt_number() -> int:
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


def _staged_before(
    work: ColumnWork, part: PartWork, keys: list[CheckpointKey], store: CheckpointStore
) -> PartResult | None:
    """The fragment, if its file was staged before the worker died."""
    if not part.whole or CheckpointKey(part.prefix, part.fragment_id) not in keys:
        return None
    file = read_staged(store, work.ref, part.prefix, part.fragment_id)
    if file is None or (
        (file.column_uuid, file.physical_rows, file.field_ids, file.inputs, file.base)
        != (
            work.computation.id,
            part.physical_rows,
            part.field_ids,
            part.inputs,
            part.base,
        )
    ):
        return None
    provenance = read_provenance(work.ref, file.path)
    if provenance is None or provenance.failed or provenance.valid != part.valid_after:
        # With rows that failed it is made again, out of checkpoints: they tell what happened.
        return None
    rows = part.rows
    return PartResult(part.fragment_id, rows.start, rows.end, 0, part.compute.count, (), file.path)

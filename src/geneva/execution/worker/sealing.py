"""From what the program computed to what is written: values with their receipts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from geneva.execution.apply.layouts import as_array
from geneva.execution.worker.records import Computed, OpenTask, Result
from geneva.model.rows import RowRange
from geneva.storage.columns.receipts import receipts_for
from geneva.storage.columns.staged_files import storable
from geneva.storage.lance.pieces import Piece, concat, merged


def sealed(task: OpenTask, batches: Sequence[Computed]) -> Result:
    """Batches that follow each other as one result, each value with its receipt.

    Several at once: what is done here costs the same for one row as for a thousand.
    """
    computed = [
        concat([as_array(batch.outputs[i]) for batch in batches], task.schema.names[i])
        for i in range(len(batches[0].outputs))
    ]
    outputs = [storable(task.dataset, values) for values in computed]
    digests = None
    if task.work.computation.receipts:
        digests = np.concatenate([batch.digests for batch in batches if batch.digests is not None])
        failed = _failed(batches)
        outputs += [receipts_for(digests, [output], failed=failed) for output in outputs]
    offsets = np.concatenate([batch.offsets for batch in batches])
    values = pa.RecordBatch.from_arrays(outputs, schema=task.schema)
    known = [batch.known for batch in batches if batch.known is not None]
    piece = merged([Piece(offsets, values, digests), *known])
    rows_run = sum(batch.rows_run for batch in batches)
    return Result(
        rows=RowRange(batches[0].rows.start, batches[-1].rows.end),
        piece=piece,
        follows_gap=batches[0].follows_gap,
        failures=tuple(failure for batch in batches for failure in batch.failures),
        rows_run=rows_run,
        rows_valued=max(len(values) - values.null_count for values in computed),
        rows_reused=len(piece.offsets) - rows_run,
        rows_unmatched=sum(batch.rows_unmatched for batch in batches),
        seconds=sum(batch.seconds for batch in batches),
        durable=batches[-1].durable,
    )


def _failed(batches: Sequence[Computed]) -> list[int]:
    """Where the function failed, as places in all batches together."""
    places: list[int] = []
    start = 0
    for batch in batches:
        places.extend(start + place for place in batch.failed)
        start += len(batch.offsets)
    return places

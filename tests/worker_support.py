"""A worker's stages on a small table, without a driver: what to compute is built by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from geneva.execution.worker.records import OpenTask, Result, Window
from geneva.execution.worker.task import ColumnWork, FileWork, PartWork
from geneva.model.computation import Computation, Input, Output, Udf
from geneva.model.digests import digest_rows
from geneva.model.rows import Offsets, RowRange, RowSet
from geneva.model.tables import Sizes, TableRef
from geneva.planning.backfill import OutputPlan
from geneva.storage.checkpoints.store import InMemoryCheckpointStore
from geneva.storage.columns.receipts import RECEIPT_TYPE, receipts_for
from geneva.storage.columns.staged_files import written_schema
from geneva.storage.lance.pieces import Piece

COMPUTATION = Computation(
    id="0123456789abcdef",
    name="y",
    version="v1",
    outputs=(Output("y", (1,), pa.int64()),),
    program=Udf("triple", "0" * 64),
    inputs=(Input("x", (0,)),),
    receipts=(Output("receipt", (2,), RECEIPT_TYPE),),
)


def open_task(folder: Path, xs: Sequence[int], **sizes: int) -> OpenTask:
    """A task on a table of one fragment, whose column y is `-x` so far; checkpoints in memory."""
    x = pa.array(xs, pa.int64())
    y = pa.array([-value for value in xs], pa.int64())
    table = pa.table({"x": x, "y": y, "receipt": pa.nulls(len(xs), RECEIPT_TYPE)})
    uri = str(folder / "t.lance")
    dataset = lance.write_dataset(table, uri)
    ref = TableRef("t", uri)
    work = ColumnWork("job", ref, int(dataset.version), COMPUTATION, Sizes(**sizes))
    schema = written_schema(dataset.schema, ["y", "receipt"])
    return OpenTask(work, dataset, InMemoryCheckpointStore(), schema)


def make_part(size: int, rows: RowRange | None = None, **changes: Any) -> PartWork:
    """A part of the fragment, to be checkpointed; all of its rows are wanted."""
    rows = rows or RowRange(0, size)
    part = PartWork(
        fragment_id=0,
        physical_rows=size,
        rows=rows,
        compute=RowSet.full(len(rows)),
        covered=(),
        prefix="udf-triple",
        window=4,
    )
    return replace(part, **changes)


def make_file(size: int, **changes: Any) -> FileWork:
    """The column file of the fragment; rows that are not computed are NULL."""
    file = FileWork(
        valid_after=RowSet.full(size),
        failed_after=None,
        outputs=(OutputPlan(place=0, compute=RowSet.full(size), adopt=RowSet.empty(size)),),
        complete=True,
        keeps_old=False,
        receipts_only=False,
        field_ids=(1, 2),
        inputs=("data/x.lance",),
        base=None,
    )
    return replace(file, **changes)


def make_piece(xs: Iterable[int], failed: Sequence[int] = ()) -> Piece:
    """Tripled values of rows where x equals the offset, with receipts; NULL at `failed` places."""
    offsets = as_offsets(xs)
    inputs = [pa.array(offsets, pa.int64())]
    values = [None if i in failed else 3 * x for i, x in enumerate(offsets.tolist())]
    outputs = [pa.array(values, pa.int64())]
    digests = digest_rows(inputs, COMPUTATION.receipt_seed(), len(offsets))
    receipts = receipts_for(digests, outputs, failed=failed)
    names = ["y", "receipt"]
    return Piece(offsets, pa.RecordBatch.from_arrays([*outputs, receipts], names), digests)


def make_result(start: int, end: int, **changes: Any) -> Result:
    """The result of a range in which every row is wanted."""
    result = Result(rows=RowRange(start, end), piece=make_piece(range(start, end)))
    return replace(result, rows_run=end - start, **changes)


def as_offsets(rows: Iterable[int]) -> Offsets:
    """Rows as offsets."""
    return np.array(list(rows), dtype=np.int64)


def shown(items: Iterable[Window | Result]) -> list[tuple[str, int, int, list[int]]]:
    """What a reader gave: kind, range, and the rows."""
    return [
        (
            type(item).__name__.lower(),
            item.rows.start,
            item.rows.end,
            (item.offsets if isinstance(item, Window) else item.piece.offsets).tolist(),
        )
        for item in items
    ]

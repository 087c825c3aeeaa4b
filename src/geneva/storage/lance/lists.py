"""Lists of rows, one per row of a table, and laying them out as rows of their own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geneva.model.rows import Offsets, bounded_runs

_BATCH_BYTES = 32 * 1024 * 1024


def list_columns(lists: pa.Array) -> dict[str, pa.Array]:
    """The columns of the rows in some lists, one after the other."""
    chunks = pc.list_flatten(lists)
    names = [field.name for field in chunks.type]
    return dict(zip(names, chunks.flatten(), strict=True))


def places_in_lists(parents: Offsets) -> Offsets:
    """The place of each row in its list, given whose list each row is in."""
    starts = np.flatnonzero(np.diff(parents, prepend=-1))
    lengths = np.diff(np.append(starts, len(parents)))
    return np.arange(len(parents)) - np.repeat(starts, lengths)


def runs_by_bytes(own: pa.RecordBatch, parents: Offsets) -> Iterator[slice]:
    """Cut rows into runs, so that what each repeats of its row in `own` takes few bytes.

    `parents` says which row of `own` that is. A value of one row may be there many times: a text of
    100 kB with its forty passages.
    """
    if not len(parents):
        return
    counts = np.bincount(parents, minlength=own.num_rows)
    if own.nbytes * int(counts.max(initial=0)) <= _BATCH_BYTES:
        yield slice(0, len(parents))
        return
    widths = np.zeros(own.num_rows, dtype=np.int64)
    for row in np.flatnonzero(counts).tolist():
        widths[row] = own.slice(row, 1).nbytes
    for first, last in bounded_runs(widths[parents], _BATCH_BYTES):
        yield slice(first, last)

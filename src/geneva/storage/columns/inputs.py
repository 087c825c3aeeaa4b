"""Reading the input values of a computation: of its own table, or of the source of a view."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.model.computation import Computation
from geneva.model.rows import Offsets, RowIds, RowRange
from geneva.model.view_query import SOURCE_ROW_ID
from geneva.storage.lance.fragments import (
    RowTaker,
    fitting_window,
    read_at_once,
    read_windows,
    rows_for,
)
from geneva.storage.lance.pieces import in_parts
from geneva.storage.lance.source_rows import SourceRows
from geneva.udf.picking import picked

_SPARSE = 0.2
"""Below this share of wanted rows they are read by address instead of scanning past the others."""


class InputReader:
    """Reads the inputs of rows of one table's fragments, in bounded memory."""

    def __init__(
        self,
        dataset: lance.LanceDataset,
        computation: Computation,
        scope: str | None = None,
        *,
        skip_missing: bool = False,
    ) -> None:
        """Handles of a source are shared within a `scope`, such as a job.

        `skip_missing`: leave out rows whose row in the source is gone, instead of failing.
        """
        self._skip_missing = skip_missing
        self._dataset, self._paths = dataset, computation.read_paths
        self._source = None
        self._source_rows: int | None = None
        if computation.source is not None:
            self._source = SourceRows.of(computation.source, scope)

    def read(
        self, fragment_id: int, wanted: Offsets, rows: RowRange, window: int
    ) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        """The inputs of the `wanted` rows among `rows`, ascending, some rows at a time."""
        if not len(wanted):
            return
        if self._source is not None:
            yield from self._from_source(self._source, fragment_id, wanted, rows, window)
            return
        dataset, paths = self._dataset, self._paths
        window = fitting_window(dataset, fragment_id, paths, rows, window)
        if len(wanted) < _SPARSE * len(rows):
            taker = RowTaker(dataset, fragment_id, paths)
            for i in range(0, len(wanted), window):
                chunk = wanted[i : i + window]
                yield chunk, taker.take(chunk)
            return
        at = 0
        for start, batch in read_windows(dataset, fragment_id, paths, rows, read_at_once(window)):
            stop = int(np.searchsorted(wanted, start + batch.num_rows, side="left"))
            chunk = wanted[at:stop]
            at = stop
            if len(chunk) == batch.num_rows:
                yield chunk, batch
            elif len(chunk):
                yield chunk, picked(batch, chunk - start)

    def _from_source(
        self, source: SourceRows, fragment_id: int, wanted: Offsets, rows: RowRange, window: int
    ) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        """Inputs out of another table, at the rows that the fragment's own rows stand for."""
        for start, batch in read_windows(self._dataset, fragment_id, [SOURCE_ROW_ID], rows, window):
            low, high = np.searchsorted(wanted, (start, start + batch.num_rows))
            column = batch.column(0)
            # Rows that stand for none, deleted by now, may be among them.
            ids = (column.fill_null(-1) if column.null_count else column).to_numpy()
            for chunk, taken in self._take(source, ids, wanted[low:high] - start, window):
                yield chunk + start, taken

    def read_placeholders(
        self, ids: RowIds, wanted: Offsets, window: int
    ) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        """The inputs of `wanted` rows of a fragment to come, whose rows stand for these ids."""
        assert self._source is not None
        return self._take(self._source, ids, wanted, window)

    def _take(
        self, source: SourceRows, ids: npt.NDArray[Any], wanted: Offsets, window: int
    ) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        at = 0
        if self._source_rows is None:
            self._source_rows = source.first_rows(window)
        while at < len(wanted):
            # How wide the source's rows are is known only after reading some.
            chunk = wanted[at : at + self._source_rows]
            at += len(chunk)
            if self._skip_missing:
                chunk = chunk[source.present(ids[chunk])]
                if not len(chunk):
                    continue
            for some, taken in in_parts(lambda rows: source.take(ids[rows]), chunk):
                # Few times more at once: the next ones may be wider.
                self._source_rows = rows_for(taken.nbytes, len(some), min(window, 4 * len(some)))
                yield some, taken

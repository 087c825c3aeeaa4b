"""Reading many rows by id as a scan, where the ids are as they were given out."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.udf.picking import picked

_MIN_ROWS = 512
_MIN_SHARE = 0.2
"""Below this share of wanted rows in a range, taking them by id reads less."""
_NO_ROW = pa.scalar(2**64 - 1, pa.uint64())


class DenseRows:
    """Looks for rows where they would be if no row had ever moved, and makes sure of it.

    Ids count rows as they were written, so that in a table without updates a row's fragment and
    offset follow from its id. What was read carries its ids: where they are other ones, nothing
    of it is used, and nobody asks again.
    """

    def __init__(self, dataset: lance.LanceDataset, projection: dict[str, str]) -> None:
        """Read `projection`, whose column `row` is the row's id."""
        self._dataset, self._projection = dataset, projection
        self._misses = 0

    def read(self, ids: npt.NDArray[np.uint64]) -> pa.Table | None:
        """The rows of `ids`, in their order, without these; None: they have to be taken by id."""
        if self._misses > 1 or len(ids) < _MIN_ROWS or not bool((ids[1:] > ids[:-1]).all()):
            return None
        span = int(ids[-1]) - int(ids[0]) + 1
        if len(ids) < _MIN_SHARE * span or int(ids[-1]) >= int(self._ends[-1]):
            return None
        parts = [self._part(run, own) for run, own in self._runs(ids)]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            self._misses += 1
            return None
        return pa.concat_tables(found)

    @cached_property
    def _fragments(self) -> list[Any]:
        return list(self._dataset.get_fragments())

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([f.physical_rows for f in self._fragments] or [0])

    def _runs(self, ids: npt.NDArray[np.uint64]) -> list[tuple[range, npt.NDArray[np.uint64]]]:
        """The ids by the fragments that are scanned at once: one with deleted rows is by itself."""
        ends = self._ends
        first, last = np.searchsorted(ends, (int(ids[0]), int(ids[-1])), side="right")
        runs: list[range] = []
        for place in range(int(first), int(last) + 1):
            alone = bool(self._fragments[place].num_deletions)
            if runs and not alone and not self._fragments[runs[-1].start].num_deletions:
                runs[-1] = range(runs[-1].start, place + 1)
            else:
                runs.append(range(place, place + 1))
        cuts = np.searchsorted(ids, [int(ends[run.stop - 1]) for run in runs])
        own = zip(runs, np.split(ids, cuts[:-1]), strict=True)
        return [(run, some) for run, some in own if len(some)]

    def _part(self, run: range, ids: npt.NDArray[np.uint64]) -> pa.Table | None:
        fragments = self._fragments[run.start : run.stop]
        start = int(self._ends[run.start]) - int(fragments[0].physical_rows)
        first = int(ids[0]) - start
        rows = int(ids[-1]) - start - first + 1
        # Deleted rows have no id; what else gives ids costs a third more.
        deleted = {"include_deleted_rows": True, "with_row_id": True}
        table = self._dataset.scanner(
            columns=self._projection,
            fragments=fragments,
            offset=first,
            limit=rows,
            batch_size=rows,
            **(deleted if fragments[0].num_deletions else {}),
        ).to_table()
        offsets = ids.astype(np.int64) - int(ids[0])
        if table.num_rows <= int(offsets[-1]):
            return None
        row = table.column("row")
        found = (row.fill_null(_NO_ROW) if row.null_count else row).to_numpy()
        is_whole = len(offsets) == table.num_rows
        if not np.array_equal(found if is_whole else found[offsets], ids):
            return None
        # A table without columns has no rows, either.
        table = table.select([name for name in self._projection if name != "row"] or ["row"])
        return table if is_whole else picked(table, offsets)

"""Reading rows of another table by their ids: where a view's inputs come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.errors import TableChangedError
from geneva.model import TableRef
from geneva.storage.checkpoints import single_batch
from geneva.storage.dataset import open_pinned


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Expressions over the rows of one version of a table."""

    ref: TableRef
    version: int
    expressions: tuple[tuple[str, str], ...]
    """Names and Lance SQL, in order."""

    def take(self, ids: npt.NDArray[Any]) -> pa.RecordBatch:
        """The rows of these ids, in their order."""
        dataset = open_pinned(self.ref, self.version)
        places = {f"c{i}": text for i, (_, text) in enumerate(self.expressions)}
        table = dataset._take_rows(ids.astype(np.uint64).tolist(), places or ["_rowid"])
        if table.num_rows != len(ids):
            raise TableChangedError(
                f"Table {self.ref.name!r} at version {self.version} has only {table.num_rows} of "
                f"{len(ids)} rows that the view refers to. Refresh the view to a version that has "
                "them, or to the latest."
            )
        batch = single_batch(table)
        arrays = [batch.column(place) for place in places]
        names = [name for name, _ in self.expressions]
        return pa.RecordBatch.from_arrays(arrays, names=names)

"""Reading rows of another table by their ids: where a view's inputs come from."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.errors import SQLExecutionError, TableChangedError
from geneva.model.computation import Source
from geneva.model.partitions import Keyed, keyed_rows
from geneva.model.rows import Mask
from geneva.model.tables import TableRef
from geneva.storage.lance.dataset import open_pinned
from geneva.storage.lance.expressions import RowReader, in_column
from geneva.storage.lance.fragments import rows_for, rows_of_types
from geneva.storage.lance.pieces import concat_batches, in_parts
from geneva.storage.lance.row_ids import read_matching_ids, sorted_ids

_FIRST_ROWS, _MAX_ROWS = 32, 1_024
"""Rows to read before it is known how wide they are, and at most."""
MAX_NARROW_ROWS = 65_536
"""The same of rows that need no more than their bytes."""


def next_window(nbytes: int, rows: int, max_rows: int = _MAX_ROWS) -> int:
    """How many rows to read next, after `rows` of them took `nbytes`; 0 of them: the first."""
    return min(4 * rows, rows_for(nbytes, rows, max_rows)) if rows else _FIRST_ROWS


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Expressions over the rows of one version of a table."""

    ref: TableRef
    version: int
    expressions: tuple[tuple[str, str], ...]
    """Names and Lance SQL, in order."""
    scope: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Handles are cached and shared within a scope, such as a job, and not beyond."""
    keyed: Keyed | None = None
    """Give a key and a digest of each row, instead of what is read."""

    @classmethod
    def of(cls, source: Source, scope: str | None = None) -> SourceRows:
        """Read what a computation reads of its source."""
        scope = uuid.uuid4().hex if scope is None else scope
        return cls(source.ref, source.version, source.expressions, scope, source.keyed)

    def present(self, ids: npt.NDArray[Any]) -> Mask:
        """Which of these rows are there."""
        dataset = self.dataset()
        wanted = ids.astype(np.uint64)
        found = read_matching_ids(dataset, sorted_ids([wanted]), None)
        return np.isin(wanted, found)

    def first_rows(self, max_rows: int) -> int:
        """How many rows to read at first: few, where nobody knows how wide they are."""
        if not self.expressions:
            return max_rows
        return rows_of_types(self._open().types, max_rows) or min(_FIRST_ROWS, max_rows)

    def dataset(self) -> lance.LanceDataset:
        """The table at the version."""
        return open_pinned(self.ref, self.version, self.scope)

    def schema(self) -> pa.Schema:
        """The columns of what is read."""
        names = [name for name, _ in self.expressions]
        return pa.schema(list(zip(names, self._open().types, strict=True)))

    def _open(self) -> RowReader:
        texts = tuple(text for _, text in self.expressions)
        return _reader(self.ref, self.version, texts, self.scope)

    def take(self, ids: npt.NDArray[Any]) -> pa.RecordBatch:
        """The rows of these ids, in their order; DictionaryFull: to be read `in_parts`."""
        if not self.expressions:
            # Nothing to read, but as many rows: a batch without columns has none.
            return pa.record_batch([pa.nulls(len(ids))], names=["nothing"])
        if self.keyed is not None:
            return self._take_keyed(ids, self.keyed)
        try:
            arrays = self._open().take(ids.astype(np.uint64))
        except SQLExecutionError as error:
            column = next(name for name, text in self.expressions if text == error.sql)
            raise in_column(error, column) from None
        except OSError as error:
            if "asked for by id" not in str(error):
                raise
            raise TableChangedError(
                f"Table {self.ref.name!r} at version {self.version} lacks rows that the view "
                f"refers to ({error}). Refresh it to a version that has them, or to the latest."
            ) from error
        return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in self.expressions])

    def _take_keyed(self, ids: npt.NDArray[Any], keyed: Keyed) -> pa.RecordBatch:
        """Keys and digests, however wide the rows are that they are made of."""
        plain = replace(self, keyed=None)
        windows = plain.windows(ids, MAX_NARROW_ROWS) if len(ids) else (plain.take(ids),)
        return concat_batches([keyed_rows(batch, keyed) for batch in windows])

    def windows(
        self, ids: npt.NDArray[Any], max_rows: int = _MAX_ROWS, first_rows: int = _FIRST_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """The rows of these ids, in their order, as few at a time as memory needs."""
        at, step = 0, first_rows
        while at < len(ids):
            for some, batch in in_parts(self.take, ids[at : at + step]):
                at += len(some)
                step = next_window(batch.nbytes, batch.num_rows, max_rows)
                yield batch


@lru_cache(maxsize=8)
def _reader(ref: TableRef, version: int, expressions: tuple[str, ...], scope: str) -> RowReader:
    return RowReader(open_pinned(ref, version, scope), [], expressions)

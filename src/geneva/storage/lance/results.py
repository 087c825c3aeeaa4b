"""The rows of a query, in whatever form they are asked for."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import pyarrow as pa

from geneva.errors import QueryTimeoutError, UserInputError
from geneva.options import read_seconds
from geneva.storage.lance.blob_files import blob_values
from geneva.storage.lance.fragments import is_blob

Timeout: TypeAlias = "timedelta | float | None"
_BLOB_MODES = ("bytes", "lazy")


class Results(ABC):
    """What can be made of the rows of a query.

    `timeout` is a `timedelta`, or seconds. It is looked at whenever a batch of rows is done: a call
    of a function that takes longer is not broken off.
    """

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of the result."""

    @abstractmethod
    def to_batches(
        self, batch_size: int | None = None, timeout: Timeout = None
    ) -> pa.RecordBatchReader:
        """The rows, batch by batch."""

    def to_arrow(self, *, timeout: Timeout = None) -> pa.Table:
        """The result as an Arrow table."""
        return self.to_batches(timeout=timeout).read_all()

    def to_pandas(
        self,
        flatten: int | None = None,
        *,
        blob_mode: str = "bytes",
        timeout: Timeout = None,
        **options: Any,
    ) -> Any:
        """The result as a pandas data frame; `flatten`: so many levels of structs as columns.

        `flatten=True` is all levels, as in LanceDB. Blobs are bytes, or files over them with
        `blob_mode="lazy"`.
        """
        if blob_mode not in _BLOB_MODES:
            raise UserInputError(
                f"blob_mode must be one of {list(_BLOB_MODES)} here, not {blob_mode!r}: a query of "
                "Geneva's reads the bytes. LanceDB's own does not: table.search()."
            )
        table = _flattened(self.to_arrow(timeout=timeout), flatten)
        frame = table.to_pandas(**options)
        for field in table.schema if blob_mode == "lazy" else ():
            if is_blob(field):
                frame[field.name] = blob_values(table[field.name].combine_chunks())
        return frame

    def to_polars(self, *, timeout: Timeout = None) -> Any:
        """The result as a polars data frame."""
        polars: Any = importlib.import_module("polars")
        return polars.from_arrow(self.to_arrow(timeout=timeout))

    def to_list(self, *, timeout: Timeout = None) -> list[dict[str, Any]]:
        """The result as a list of dicts."""
        rows: list[dict[str, Any]] = self.to_arrow(timeout=timeout).to_pylist()
        return rows

    def to_pydantic(self, model: Any, *, timeout: Timeout = None) -> list[Any]:
        """The result as a list of pydantic models."""
        return [model(**row) for row in self.to_list(timeout=timeout)]


def within(batches: Iterator[pa.RecordBatch], timeout: Timeout) -> Iterator[pa.RecordBatch]:
    """The batches, as long as they come in time; the time begins now."""
    seconds = read_seconds("timeout", timeout)
    return batches if seconds is None else _in_time(batches, time.monotonic() + seconds, seconds)


def _in_time(
    batches: Iterator[pa.RecordBatch], deadline: float, seconds: float
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if time.monotonic() > deadline:
            raise QueryTimeoutError(f"The query is not done after timeout={seconds:g} s.")
        yield batch


def _flattened(table: pa.Table, levels: Any) -> pa.Table:
    """A table with the fields of its structs as columns, down to a level."""
    if levels is None or levels is False:
        return table
    if levels is not True and (type(levels) is not int or levels < 1):
        raise UserInputError("flatten must be True, or the levels to flatten: 1 or more.")
    done = 0
    while any(pa.types.is_struct(f.type) for f in table.schema) and (
        levels is True or done < levels
    ):
        table, done = table.flatten(), done + 1
    return table

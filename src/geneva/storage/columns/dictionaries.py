"""How many different values a dictionary column has, and whether its indices can count them.

Lance puts the dictionaries of rows that it writes or reads together into one. Where that has more
values than the indices can count, the file can't be read any more: after the write, or after a
compaction that puts fragments together. So the limit is one of the column, not of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from geneva.storage.lance.dataset import file_version
from geneva.storage.lance.pieces import room
from geneva.udf.picking import picked, without_nulls

_MAX_BITS = 16
"""Wider indices count more values than a column will ever have."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """One value too many."""

    row: int
    """Index in the batch that has it."""
    kind: pa.DataType
    room: int
    """How many different values there may be."""

    def __str__(self) -> str:
        """Say what happened, and what to do."""
        return (
            f"it brings more than the {self.room} different values that {self.kind.index_type} "
            f"indices of {self.kind} can tell apart in one column; nothing of it was published. "
            "Declare the column with a wider index type, or without a dictionary"
        )


@dataclass(slots=True)
class DistinctValues:
    """The different values of a batch's columns, where they are dictionaries with narrow indices.

    In the 2.0 format NULL is one of them.
    """

    dataset: lance.LanceDataset
    _found: dict[tuple[str, ...], set[Any]] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch) -> Overflow | None:
        """Take the values of more rows; return what is too much, and take none of it then."""
        found = dict(self._found)
        for path, array in _dictionaries(batch):
            found[path] = self._with(path, array)
            if len(found[path]) > room(array.type):
                return Overflow(self._first_row(batch, path), array.type, room(array.type))
        self._found = found
        return None

    def _with(self, path: tuple[str, ...], array: pa.Array) -> set[Any]:
        """The values known so far, and those of an array."""
        used = without_nulls(pc.unique(array.indices))
        values = {v for v in picked(array.dictionary, used).to_pylist() if v is not None}
        if array.null_count and file_version(self.dataset) < (2, 1):
            values.add(None)
        return values | self._found.get(path, set())

    def _first_row(self, batch: pa.RecordBatch, path: tuple[str, ...]) -> int:
        """Find the first row up to which there are too many values."""
        good, bad = 0, batch.num_rows
        while bad - good > 1:
            middle = (good + bad) // 2
            array = dict(_dictionaries(batch.slice(0, middle)))[path]
            fits = len(self._with(path, array)) <= room(array.type)
            good, bad = (middle, bad) if fits else (good, middle)
        return bad - 1


def has_dictionary(kinds: Iterable[pa.DataType]) -> bool:
    """Say whether there is a dictionary in one of these types, at any depth."""
    return any(pt.is_dictionary(inner) for kind in kinds for inner in _types(kind))


def has_narrow_dictionary(kinds: Iterable[pa.DataType]) -> bool:
    """Say whether one of these types has a dictionary that could get too many values."""
    return any(_is_narrow(inner) for kind in kinds for inner in _types(kind))


def narrow_dictionaries(schema: pa.Schema) -> list[str]:
    """The columns with a dictionary, at any depth, that could get too many values."""
    return [field.name for field in schema if has_narrow_dictionary([field.type])]


def _types(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    for index in range(kind.num_fields if pt.is_nested(kind) else 0):
        yield from _types(kind.field(index).type)


def _is_narrow(kind: pa.DataType) -> bool:
    return pt.is_dictionary(kind) and bool(kind.index_type.bit_width <= _MAX_BITS)


def _dictionaries(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, ...], pa.Array]]:
    """The dictionary arrays with narrow indices in a batch, each with its path."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if has_narrow_dictionary([column.type]):
            yield from _inside((name,), column)


def _inside(path: tuple[str, ...], array: pa.Array) -> Iterator[tuple[tuple[str, ...], pa.Array]]:
    kind = array.type
    if _is_narrow(kind):
        yield path, array
    elif pt.is_struct(kind):
        for child, inner in zip(array.flatten(), kind, strict=True):
            yield from _inside((*path, inner.name), child)
    elif pt.is_map(kind):
        entries = pa.ListArray.from_arrays(array.offsets, _entries(array))
        yield from _inside(path, entries.flatten())
    elif pt.is_nested(kind) and hasattr(array, "flatten"):
        yield from _inside((*path, "item"), array.flatten())


def _entries(array: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])

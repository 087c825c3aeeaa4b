"""Rows by partition: which one each row is in, and what a partition is made of. No storage here.

A row is reduced to a key, which says its partition, and a digest of its values. A partition is the
multiset of its rows: the sum of their digests says whether it is the one that it was, wherever its
rows are by now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from geneva.model.digests import Digests, digest_rows, seed_of
from geneva.model.rows import Mask, Offsets, RowIds, bounded_runs

KEY, DIGEST = "__key", "__digest"
"""The columns of a hidden view that has a row for each row of a source."""
KEY_PREFIX = "__key:"
"""How columns are called that say the partition of a row, before their own names."""
KEY_BYTES = 16
KEY_TYPE = pa.binary(KEY_BYTES)
DIGEST_TYPE = pa.uint64()

_MAX_PARTIAL = 4_000_000
"""Partitions that are known more than once, before their parts are added up."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """Which columns say the partition of a row, and which are its values."""

    keys: tuple[str, ...]
    values: tuple[str, ...]


def keyed_rows(batch: pa.RecordBatch, keyed: Keyed) -> pa.RecordBatch:
    """The key and the digest of each row of a batch."""
    keys = row_keys([batch.column(name) for name in keyed.keys], batch.num_rows)
    values = [batch.column(name) for name in keyed.values]
    seed = seed_of("\n".join(keyed.values))
    digests = digest_rows(values, seed, batch.num_rows)
    return pa.record_batch([keys, pa.array(digests, DIGEST_TYPE)], names=[KEY, DIGEST])


# ---------------------------------------------------------------------------------------- keys


def row_keys(columns: Sequence[pa.Array], rows: int) -> pa.Array:
    """128 bits for each row: the same for equal values, NULLs and NaNs among them."""
    parts = [_value_keys(column) for column in columns]
    if not parts:
        joined = np.zeros((rows, KEY_BYTES), np.uint8)
    elif len(parts) == 1:
        joined = parts[0]
    else:
        every, places = np.unique(np.concatenate(parts, axis=1), axis=0, return_inverse=True)
        joined = _hashes(row.tobytes() for row in every)[places.reshape(-1)]
    buffer = pa.py_buffer(np.ascontiguousarray(joined))
    return pa.Array.from_buffers(KEY_TYPE, rows, [None, buffer])


def _value_keys(column: pa.Array) -> npt.NDArray[np.uint8]:
    """A hash for each value; computed once for those that are equal."""
    values = _plain(column)
    if pa.types.is_nested(values.type):
        return _hashes(repr(value).encode() for value in values.to_pylist())
    encoded = values.dictionary_encode(null_encoding="encode")
    hashes = _hashes(_text(value) for value in encoded.dictionary.to_pylist())
    return hashes[encoded.indices.to_numpy(zero_copy_only=False)]


def _plain(column: pa.Array) -> pa.Array:
    """Values that Python tells apart just as SQL does, at any depth, of types of any width."""
    if isinstance(column, pa.ExtensionArray):
        return _plain(column.storage)
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return _plain(column.dictionary_decode())
    if types.is_floating(kind):
        return pc.add(column.cast(pa.float64()), 0.0)  # of -0.0 and 0.0 the second
    if types.is_temporal(kind) and not types.is_interval(kind):
        return column.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    if types.is_map(kind):
        entry = pa.struct([kind.key_field, kind.item_field])
        return _plain(column.cast(pa.list_(entry)))
    if types.is_struct(kind) and kind.num_fields:
        parts = [_plain(part) for part in column.flatten()]
        names = [field.name for field in kind]
        return pa.StructArray.from_arrays(parts, names, mask=column.is_null())
    if types.is_nested(kind) and kind.num_fields == 1:  # lists, of whatever kind
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        ends = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int64())
        values = _plain(column.flatten())
        return pa.LargeListArray.from_arrays(ends, values, mask=column.is_null())
    return column


def _text(value: Any) -> bytes:
    return b"None" if value is None else f"{type(value).__name__} {value!r}".encode()


def _hashes(texts: Iterable[bytes]) -> npt.NDArray[np.uint8]:
    made = b"".join(hashlib.blake2b(text, digest_size=KEY_BYTES).digest() for text in texts)
    return np.frombuffer(made, np.uint8).reshape(-1, KEY_BYTES)


def key_words(keys: pa.Array) -> tuple[Digests, Digests]:
    """Keys as two numbers each."""
    buffer = keys.buffers()[1]
    words = np.frombuffer(buffer, ">u8", 2 * len(keys), keys.offset * KEY_BYTES).reshape(-1, 2)
    return words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)


def key_texts(high: Digests, low: Digests) -> pa.Array:
    """Keys as hexadecimal digits."""
    words = np.column_stack([high, low]).astype(">u8")
    digits = words.tobytes().hex().encode()
    kind = pa.binary(2 * KEY_BYTES)
    buffers = [None, pa.py_buffer(digits)]
    return pa.Array.from_buffers(kind, len(high), buffers).cast(pa.binary()).cast(pa.string())


def key_of_texts(texts: pa.Array | pa.ChunkedArray) -> tuple[Digests, Digests]:
    """Keys that `key_texts` wrote."""
    chunks = texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]
    data = b"".join(bytes.fromhex(_characters(chunk)) for chunk in chunks)
    words = np.frombuffer(data, ">u8").reshape(-1, 2)
    return words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)


def _characters(texts: pa.Array) -> str:
    """All texts of an array as one."""
    if not len(texts):
        return ""
    wide = texts.cast(pa.large_binary())
    _, ends, data = wide.buffers()
    first, last = np.frombuffer(ends, np.int64)[[wide.offset, wide.offset + len(wide)]].tolist()
    return bytes(data[first:last]).decode()


# ---------------------------------------------------------------------------------- partitions


@dataclass(frozen=True, slots=True, eq=False)
class KeyedIds:
    """Rows of the source: their ids, and the partition and digest of each."""

    ids: RowIds
    high: Digests
    low: Digests
    digests: Digests

    def without(self, ids: RowIds) -> KeyedIds:
        """The other rows."""
        kept = ~np.isin(self.ids, ids)
        return KeyedIds(self.ids[kept], self.high[kept], self.low[kept], self.digests[kept])


@dataclass(frozen=True, slots=True, eq=False)
class Partitions:
    """Partitions, ascending by key: what the rows of each are, where they are, and how many."""

    high: Digests
    low: Digests
    digests: Digests
    """Sums over the digests of the rows."""
    places: Digests
    """The same over their ids: rows that were deleted and came again are elsewhere."""
    counts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.high)

    @classmethod
    def of(
        cls,
        high: Digests,
        low: Digests,
        digests: Digests,
        places: Digests,
        counts: npt.NDArray[np.int64],
    ) -> Partitions:
        """Add up what is known of each partition, in any order."""
        order = np.lexsort((low, high))
        high, low = high[order], low[order]
        starts = np.ones(len(order), dtype=np.bool_)
        starts[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        at = np.flatnonzero(starts)
        if not len(at):
            return cls.empty()
        return cls(
            high=high[at],
            low=low[at],
            digests=np.add.reduceat(digests[order], at),
            places=np.add.reduceat(places[order], at),
            counts=np.add.reduceat(counts[order], at),
        )

    @classmethod
    def empty(cls) -> Partitions:
        """No partition."""
        none = np.zeros(0, np.uint64)
        return cls(none, none, none, none, np.zeros(0, np.int64))

    @classmethod
    def whole(cls, parts: Iterable[Digests]) -> Partitions:
        """All rows as one partition, which is there without any row, too."""
        zero, total, rows = np.zeros(1, np.uint64), np.zeros(1, np.uint64), 0
        for digests in parts:
            total += digests.sum(dtype=np.uint64)
            rows += len(digests)
        return cls(zero, zero, total, zero, np.array([rows]))

    def plus(self, others: Sequence[Partitions]) -> Partitions:
        """The rows of all of them together."""
        parts = (self, *others)
        return Partitions.of(
            np.concatenate([part.high for part in parts]),
            np.concatenate([part.low for part in parts]),
            np.concatenate([part.digests for part in parts]),
            np.concatenate([part.places for part in parts]),
            np.concatenate([part.counts for part in parts]),
        )

    def find(self, high: Digests, low: Digests) -> Offsets:
        """Where keys are among these; -1: they are not."""
        if not len(self):
            return np.full(len(high), -1, dtype=np.int64)
        found = np.searchsorted(_joined(self.high, self.low), _joined(high, low))
        found = np.minimum(found, len(self) - 1)
        there = (self.high[found] == high) & (self.low[found] == low)
        return np.where(there, found, -1)

    def only(self, chosen: Mask | slice) -> Partitions:
        """Some of them."""
        return Partitions(
            high=self.high[chosen],
            low=self.low[chosen],
            digests=self.digests[chosen],
            places=self.places[chosen],
            counts=self.counts[chosen],
        )

    def that_changed(self, before: Partitions) -> Mask:
        """Those that were not there before, or were made of other rows."""
        found = before.find(self.high, self.low)
        return (found < 0) | (np.append(before.digests, np.uint64(0))[found] != self.digests)

    def that_moved(self, before: Partitions) -> Mask:
        """Those that changed, or whose rows are elsewhere."""
        found = before.find(self.high, self.low)
        moved: Mask = np.append(before.places, before.places.dtype.type(0))[found] != self.places
        return moved | self.that_changed(before)

    def that_lack(self, now: Partitions) -> Mask:
        """Those that are not there now."""
        return now.find(self.high, self.low) < 0

    def runs(self, max_rows: int) -> Iterator[tuple[int, int]]:
        """Neighbours that have so many rows together at most; one that has more is by itself."""
        return bounded_runs(self.counts, max_rows)


def _joined(high: Digests, low: Digests) -> npt.NDArray[Any]:
    """Keys as what numpy puts in order: bytes."""
    words = np.column_stack([high, low]).astype(">u8")
    return words.view(f"S{KEY_BYTES}").reshape(-1)


def add_up_rows(parts: Iterable[KeyedIds]) -> Partitions:
    """The partitions of rows, in memory of as many partitions."""
    total, waiting, size = Partitions.empty(), list[Partitions](), 0
    for part in parts:
        rows = len(part.ids)
        places = digest_rows([pa.array(part.ids)], 0, rows)
        one = np.ones(rows, np.int64)
        made = Partitions.of(part.high, part.low, part.digests, places, one)
        waiting.append(made)
        size += len(made)
        if size > _MAX_PARTIAL:
            total, waiting, size = total.plus(waiting), [], 0
    return total.plus(waiting)


def first_partitions(parts: Iterable[KeyedIds], n: int) -> tuple[list[RowIds], int]:
    """The rows of the `n` partitions that are met first, and how many partitions there are."""
    found: dict[bytes, list[RowIds]] = {}

    def noted() -> Iterator[KeyedIds]:
        for part in parts:
            keys = _joined(part.high, part.low)
            for at in np.sort(np.unique(keys, return_index=True)[1]):
                if len(found) < n:
                    found.setdefault(keys[at], [])
            for key, rows in found.items():
                rows.append(part.ids[keys == key])
            yield part

    total = len(add_up_rows(noted()))
    return [np.concatenate(rows) for rows in found.values()], total

"""A source by its keys, on disk: blocks of rows as they come, and an index of them by hash.

A task reads a part of the source and stages it as blocks, with the hashes of each block's keys in
order. Then each range of hashes is put together out of all blocks, which is where equal keys meet:
one sorted file per range. No process ever holds more than a block, or the hashes of a range.

Everything is in a folder of the table's checkpoints. Files appear when they are whole, and have the
same names and content in every attempt, so that a load that was cut off goes on from what is there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from lance.file import LanceFileSession

from geneva.errors import NullKeyError
from geneva.model.digests import Digests, digest_rows
from geneva.model.tables import TableRef
from geneva.model.uris import local_path
from geneva.storage.lance.casts import cast_batch
from geneva.storage.lance.pieces import concat_batches, writable
from geneva.storage.lance.values import equal_rows
from geneva.udf.picking import picked

_FOLDER = "_checkpoints/loads"
_BLOCK_ROWS = 1 << 20
_BLOCK_BYTES = 1 << 32
"""A block of wider rows has fewer of them."""
_BUCKET_BITS = 8
BUCKETS = 1 << _BUCKET_BITS
"""Ranges of hashes that are counted apart. A file of the index has one of them, or several."""
_INDEX_ROWS = 1 << 20
"""Keys in a file of the index, about, as long as there are buckets for that."""
_ROW_BITS = 32
_MAX_SHOWN = 5
_CHECKED_AT_ONCE = 4_096
_SEED = 0x6C6F6164

INDEX_SCHEMA = pa.schema([("hash", pa.uint64()), ("place", pa.uint64())])


@dataclass(frozen=True, slots=True)
class SourceSchema:
    """The columns that are taken of a source, in the types that the table has for them."""

    key: pa.Field
    values: tuple[pa.Field, ...]

    @property
    def names(self) -> list[str]:
        """The names of the columns, the key first."""
        return [self.key.name, *(field.name for field in self.values)]

    @property
    def schema(self) -> pa.Schema:
        """All of them, as blocks have them."""
        return pa.schema([self.key, *self.values])


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of the source in one file, as they came."""

    name: str
    rows: int
    nbytes: int
    """In memory."""
    buckets: tuple[int, ...]
    """How many of its keys are in each range of hashes."""


def blocks_to_text(blocks: Sequence[Block]) -> str:
    """What a worker sends back."""
    return json.dumps([asdict(block) for block in blocks])


def blocks_from_text(text: str) -> list[Block]:
    """What `blocks_to_text` wrote."""
    records: list[dict[str, Any]] = json.loads(text)
    return [Block(**{**record, "buckets": tuple(record["buckets"])}) for record in records]


class LoadFolder:
    """The files of one staged source."""

    def __init__(self, ref: TableRef, name: str) -> None:
        """Open the folder of that name; nothing is made yet."""
        root = f"{ref.uri}/{_FOLDER}/{name}"
        self._session = LanceFileSession(root, storage_options=ref.storage_options.plain())
        self._local = local_path(root)

    def has(self, name: str) -> bool:
        """Whether a file is there, and whole."""
        return bool(self._session.contains(name))

    def write(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Write a Lance file; it appears when all of it is there."""
        writer = self._session.open_writer(name, schema=schema)
        for batch in batches:
            columns = [writable(column) for column in batch.columns]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        writer.close()

    def reader(self, name: str, columns: list[str] | None = None) -> Any:
        """Open a Lance file, which can be read by range and by row."""
        return self._session.open_reader(name, columns=columns)

    def block(self, name: str, columns: list[str] | None = None) -> Any:
        """Open the keys and values of a block."""
        return self.reader(_values_name(name), columns)

    def write_arrow(self, name: str, batch: pa.RecordBatch) -> None:
        """Write an Arrow file, to be mapped into memory."""
        with tempfile.TemporaryDirectory(prefix="geneva-load-") as folder:
            path = Path(folder, "index.arrow")
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            self._session.upload_file(path, name)

    def map_arrow(self, name: str) -> pa.RecordBatch:
        """An Arrow file, mapped into memory: it is read where it is looked at, and not before.

        Out of an object store it is copied to a file of this process, which goes with it.
        """
        if self._local is not None:
            return _mapped(self._local / name)
        with tempfile.TemporaryDirectory(prefix="geneva-load-") as folder:
            path = Path(folder, "index.arrow")
            self._session.download_file(name, path)
            return _mapped(path)

    def delete(self) -> int:
        """Delete all files; return how many there were."""
        names = self._session.list()
        for name in names:
            with suppress(OSError):
                self._session.delete_file(name)
        if self._local is not None:
            with suppress(OSError):
                self._local.rmdir()
            with suppress(OSError):
                self._local.parent.rmdir()
        return len(names)


def _mapped(path: Path) -> pa.RecordBatch:
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


@lru_cache(maxsize=4)
def open_folder(ref: TableRef, name: str) -> LoadFolder:
    """The folder of a staged source, opened once per process."""
    return LoadFolder(ref, name)


def delete_loads(ref: TableRef, is_idle: Callable[[], bool]) -> int:
    """Delete all staged sources of a table, unless a job runs on it by then."""
    session = LanceFileSession(f"{ref.uri}/{_FOLDER}", storage_options=ref.storage_options.plain())
    names = {path.partition("/")[0] for path in session.list()}
    return sum(LoadFolder(ref, name).delete() for name in names) if names and is_idle() else 0


# ----------------------------------------------------------------------------------------- blocks


def stage_blocks(
    folder: LoadFolder,
    name: str,
    source: SourceSchema,
    batches: Iterable[pa.RecordBatch],
    where: str,
) -> list[Block]:
    """Stage a part of a source under a name; `where` is what messages call it.

    What an attempt before has staged is not read again.
    """
    record = f"{name}-blocks.lance"
    if folder.has(record):
        return blocks_from_text(folder.reader(record).read_all().to_table()["blocks"][0].as_py())
    rows = _Rows(source, batches, where)
    blocks: list[Block] = []
    while rows.has_more:
        block = f"{name}-{len(blocks)}"
        folder.write(_values_name(block), source.schema, rows.next_block())
        blocks.append(_stage_hashes(folder, block, rows))
    text = pa.record_batch([pa.array([blocks_to_text(blocks)])], names=["blocks"])
    folder.write(record, text.schema, [text])
    return blocks


def _values_name(block: str) -> str:
    return f"{block}-values.lance"


class _Rows:
    """The rows of a part, in the table's types, block by block; their keys' hashes are kept."""

    def __init__(self, source: SourceSchema, batches: Iterable[pa.RecordBatch], where: str) -> None:
        self._source, self._where = source, where
        self._batches = iter(batches)
        self._seen = 0
        self._ahead = self._next_batch()
        self.hashes: list[Digests] = []
        self.nbytes = 0

    @property
    def has_more(self) -> bool:
        """Whether rows are left."""
        return self._ahead is not None

    def next_block(self) -> Iterator[pa.RecordBatch]:
        """The rows of the next block."""
        self.hashes, self.nbytes = [], 0
        rows = 0
        while self._ahead is not None and rows < _BLOCK_ROWS and self.nbytes < _BLOCK_BYTES:
            batch, self._ahead = self._ahead, self._next_batch()
            rows += batch.num_rows
            self.nbytes += batch.nbytes
            self.hashes.append(hash_keys(batch.column(0)))
            yield batch

    def _next_batch(self) -> pa.RecordBatch | None:
        for batch in self._batches:
            if batch.num_rows:
                return self._cast(batch)
        return None

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        key = batch.column(self._source.key.name)
        if key.null_count:
            row = self._seen + int(np.flatnonzero(np.asarray(key.is_null()))[0])
            raise NullKeyError(
                f"Row {row} of {self._where} has no key: its {self._source.key.name!r} is NULL. "
                "Leave such rows out, or give them a key. Nothing was loaded."
            )
        self._seen += batch.num_rows
        return cast_batch(batch, self._source.schema, self._where)


def hash_keys(keys: pa.Array) -> Digests:
    """The hashes of keys: the same for the same key, and the other way round but for few."""
    return digest_rows([keys], _SEED, len(keys))


def _stage_hashes(folder: LoadFolder, block: str, rows: _Rows) -> Block:
    """Stage the hashes of a block's keys, in order, with the row that each is of."""
    hashes = np.concatenate(rows.hashes)
    order = np.argsort(hashes)
    columns = [pa.array(hashes[order]), pa.array(order.astype(np.uint64))]
    batch = pa.RecordBatch.from_arrays(columns, schema=INDEX_SCHEMA)
    folder.write(f"{block}-hashes.lance", INDEX_SCHEMA, [batch])
    buckets = np.bincount(hashes >> np.uint64(64 - _BUCKET_BITS), minlength=BUCKETS)
    return Block(block, len(hashes), rows.nbytes, tuple(buckets.tolist()))


# ------------------------------------------------------------------------------------------ index


def partitions_for(blocks: Sequence[Block]) -> int:
    """How many files the index has: a power of two, at most as many as there are buckets."""
    wanted = -(-sum(block.rows for block in blocks) // _INDEX_ROWS)
    partitions = 1
    while partitions < min(wanted, BUCKETS):
        partitions *= 2
    return partitions


@dataclass(frozen=True, slots=True)
class Slice:
    """The hashes of a block that are in one file of the index."""

    block: str
    number: int
    """Which block it is, as places in the index count them."""
    start: int
    rows: int


def slices_of(blocks: Sequence[Block], partition: int, partitions: int) -> tuple[Slice, ...]:
    """Where the hashes of one file of the index are."""
    each = BUCKETS // partitions
    first = partition * each
    found = (
        Slice(
            block.name, number, sum(block.buckets[:first]), sum(block.buckets[first : first + each])
        )
        for number, block in enumerate(blocks)
    )
    return tuple(part for part in found if part.rows)


def index_name(partition: int) -> str:
    """How a file of the index is called."""
    return f"index-{partition}.arrow"


def partition_of(hashes: Digests, partitions: int) -> Digests:
    """The file of the index that each hash is in."""
    bits = partitions.bit_length() - 1
    return hashes >> np.uint64(64 - bits) if bits else np.zeros(len(hashes), dtype=np.uint64)


def places(block: int, rows: Digests) -> Digests:
    """Rows of a block, as the index has them."""
    return rows | np.uint64(block << _ROW_BITS)


def block_of(places: Digests) -> Digests:
    """The block that each place is in."""
    return places >> np.uint64(_ROW_BITS)


def row_of(places: Digests) -> Digests:
    """The row of its block that each place is."""
    return places & np.uint64((1 << _ROW_BITS) - 1)


def stage_index(
    folder: LoadFolder, key: str, blocks: Sequence[str], slices: Sequence[Slice], partition: int
) -> list[Any]:
    """Put one file of the index together; return keys that are there more than once, a few."""
    name = index_name(partition)
    if folder.has(name):
        return []
    parts = [
        folder.reader(f"{part.block}-hashes.lance")
        .read_range(part.start, part.rows, batch_size=part.rows)
        .to_table()
        for part in slices
    ]
    hashes = _joined([part["hash"].to_numpy() for part in parts])
    every = _joined(
        [places(s.number, p["place"].to_numpy()) for s, p in zip(slices, parts, strict=True)]
    )
    order = np.argsort(hashes)
    hashes, every = hashes[order], every[order]
    twice = _equal_keys(folder, key, blocks, hashes, every)
    if not twice:
        columns = [pa.array(hashes), pa.array(every)]
        folder.write_arrow(name, pa.RecordBatch.from_arrays(columns, schema=INDEX_SCHEMA))
    return twice


def _joined(parts: Sequence[Digests]) -> Digests:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


def _equal_keys(
    folder: LoadFolder, key: str, blocks: Sequence[str], hashes: Digests, places: Digests
) -> list[Any]:
    """Keys that several places have. Equal hashes may be of different keys: they are looked at.

    Of those with the same hash each is compared with the next: where there are more than two, and
    equal ones are apart, the pairs further on are looked at, too.
    """
    twice: list[Any] = []
    distance = 1
    while True:
        first = np.flatnonzero(hashes[distance:] == hashes[:-distance])
        if not len(first):
            return twice
        for start in range(0, len(first), _CHECKED_AT_ONCE):
            some = first[start : start + _CHECKED_AT_ONCE]
            keys = [
                take_places(folder, blocks, [key], places[at]).column(0)
                for at in (some, some + distance)
            ]
            same = np.flatnonzero(equal_rows(*keys))
            twice += picked(keys[0], same).unique().to_pylist()
            if len(twice) >= _MAX_SHOWN:
                return twice[:_MAX_SHOWN]
        distance += 1


_SPARSE = 0.25
"""Below this share of wanted rows they are read one by one instead of all that are between."""


def take_places(
    folder: LoadFolder, blocks: Sequence[str], columns: list[str], wanted: Digests
) -> pa.RecordBatch:
    """The rows at some places, in that order."""
    return gather(wanted, lambda block, rows: read_rows(folder.block(blocks[block], columns), rows))


def gather(wanted: Digests, read: Callable[[int, Digests], pa.RecordBatch]) -> pa.RecordBatch:
    """Rows at some places, in that order: `read` gives ascending rows of one block."""
    distinct, back = np.unique(wanted, return_inverse=True)
    numbers = block_of(distinct)
    parts = []
    for block in np.unique(numbers):
        low, high = np.searchsorted(numbers, (block, block + np.uint64(1)))
        parts.append(read(int(block), row_of(distinct[low:high])))
    rows = concat_batches(parts)
    in_order = len(distinct) == len(wanted) and bool((wanted[1:] > wanted[:-1]).all())
    return rows if in_order else picked(rows, back)


def read_rows(reader: Any, rows: Digests) -> pa.RecordBatch:
    """Some rows of a block, ascending."""
    first, span = int(rows[0]), int(rows[-1]) - int(rows[0]) + 1
    if len(rows) < _SPARSE * span:
        return _one(reader.take_rows(rows.tolist(), batch_size=len(rows)))
    batch = _one(reader.read_range(first, span, batch_size=span))
    return batch if len(rows) == span else picked(batch, rows - np.uint64(first))


def read_block(reader: Any) -> pa.RecordBatch:
    """All rows of a block."""
    return _one(reader.read_all(batch_size=reader.num_rows()))


def _one(found: Any) -> pa.RecordBatch:
    (batch,) = found.to_table().combine_chunks().to_batches()
    return batch

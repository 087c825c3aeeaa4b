"""The checkpoint store: results that are computed but not yet published, under structured keys."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
from lance.file import LanceFileSession

from geneva.model.rows import RowRange
from geneva.model.tables import Secrets
from geneva.storage.lance.damage import is_damage
from geneva.storage.lance.pieces import writable
from geneva.udf.picking import without_nulls
from geneva.udf.types import holds_json, without_json

_MAX_NAME_LENGTH = 128
"""Longest name kept in a key; longer ones are cut, with a hash."""
_MAX_FILE_NAME = 240
"""Longest file name: file systems take 255 bytes, and writers add a suffix of their own."""
_FOLDER_NAME = 200
"""How much of a key that is longer than a file name may be goes into the name of each folder."""
_MARK_LENGTH = 12
"""Digits of a key's `srcfiles` that say which computation it is of."""
_DELETES_AT_ONCE = 16
_KEY_METADATA = "geneva.checkpoint.key"
_CHECKSUM_METADATA = "geneva.checkpoint.crc32"
_SCHEMA_METADATA = "geneva.checkpoint.schema"
"""What a batch was, where it is written as something else."""
_SEPARATOR = re.compile(r"_(?=(?:ver|col|where|uri|srcfiles|frag|range)-)")
"""Where a part of a key begins."""
_TAIL = re.compile(
    r"^(?P<prefix>udf-.*)_frag-(?P<frag>\d+)(?:_range-(?P<start>\d+)-(?P<end>\d+))?$", re.DOTALL
)


DIGEST_COLUMN = "_digest"
"""In a batch checkpoint: the whole digest of each row's inputs, of which a receipt has a part."""
ERROR_COLUMN = "_error"
"""In a batch checkpoint with rows that failed: what happened to each, as JSON; else NULL."""


def errors_of(batch: pa.RecordBatch) -> dict[int, str]:
    """The failures that a batch checkpoint reports, by place in the batch."""
    if ERROR_COLUMN not in batch.schema.names:
        return {}
    return {i: text for i, text in enumerate(batch.column(ERROR_COLUMN).to_pylist()) if text}


class CheckpointStore(ABC):
    """A key-value store of record batches that survives the process that filled it."""

    @abstractmethod
    def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
        """Store a batch; visible to others only when it is whole."""

    @abstractmethod
    def __getitem__(self, key: str) -> pa.RecordBatch:
        """Return the batch, or raise KeyError when there is none that can be trusted."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether something is stored under the key."""

    def __delitem__(self, key: str) -> None:
        """Forget a batch; KeyError when there is none.

        A store that does not say how keeps everything: that costs room, and nothing else.
        """
        if key not in self:
            raise KeyError(key)

    def discard(self, keys: Iterable[str]) -> int:
        """Forget some batches, and say how many; those that are gone already are no matter."""
        forgotten = 0
        for key in keys:
            with suppress(KeyError, OSError):
                del self[key]
                forgotten += 1
        return forgotten

    @abstractmethod
    def list_keys(self, prefix: str | None = None) -> list[str]:
        """The keys that start with `prefix`, sorted."""


class InMemoryCheckpointStore(CheckpointStore):
    """A dictionary, for tests."""

    def __init__(self) -> None:
        """Start empty."""
        self._batches: dict[str, pa.RecordBatch] = {}

    def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
        """Keep the batch."""
        self._batches[key] = value

    def __getitem__(self, key: str) -> pa.RecordBatch:
        """Return the batch."""
        return self._batches[key]

    def __contains__(self, key: object) -> bool:
        """Whether there is a batch."""
        return key in self._batches

    def __delitem__(self, key: str) -> None:
        """Drop the batch."""
        del self._batches[key]

    def list_keys(self, prefix: str | None = None) -> list[str]:
        """The keys, sorted."""
        return sorted(key for key in self._batches if key.startswith(prefix or ""))


class LanceCheckpointStore(CheckpointStore):
    """One `{key}.lance` file per batch, in a folder of the table's own object store.

    A file is believed only when it opens, carries its own key, and its content has the checksum
    that was written with it. Anything else (truncated, overwritten, copied from elsewhere) reads as
    missing.
    """

    def __init__(self, root: str, storage_options: Secrets | None = None) -> None:
        """Open the store at `root`, a path or an object-store URI; nothing is created yet."""
        self._root = root
        self._session = LanceFileSession(
            root, storage_options=(storage_options or Secrets()).plain()
        )

    def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
        """Write the file; the name appears when it is complete."""
        has_json = any(map(holds_json, value.schema.types))
        written = _readable(value) if has_json else value
        writer = self._session.open_writer(_file_name(key), schema=written.schema)
        # Never `with`: leaving the block by an exception would publish a truncated file.
        writer.add_schema_metadata(_KEY_METADATA, key)
        writer.add_schema_metadata(_CHECKSUM_METADATA, str(checksum(value)))
        if has_json:
            schema = base64.b64encode(value.schema.serialize()).decode()
            writer.add_schema_metadata(_SCHEMA_METADATA, schema)
        columns = [writable(column) for column in written.columns]
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=written.schema))
        writer.close()

    def __getitem__(self, key: str) -> pa.RecordBatch:
        """Read and verify the file."""
        try:
            reader = self._session.open_reader(_file_name(key))
            metadata = reader.metadata().schema.metadata or {}
            if _metadata_text(metadata, _KEY_METADATA) != key:
                raise KeyError(key)
            table = reader.read_all(batch_size=max(reader.num_rows(), 1)).to_table()
            batch = single_batch(table)
            if (given := _metadata_text(metadata, _SCHEMA_METADATA)) is not None:
                batch = batch.cast(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(given))))
        except KeyError:
            raise
        except BaseException as error:
            if not is_damage(error):
                raise
            raise KeyError(key) from error
        if _metadata_text(metadata, _CHECKSUM_METADATA) != str(checksum(batch)):
            raise KeyError(key)
        return batch

    def __contains__(self, key: object) -> bool:
        """Whether a file of that name is there (it may still turn out to be damaged)."""
        return isinstance(key, str) and self._session.contains(_file_name(key))

    def __delitem__(self, key: str) -> None:
        """Delete the file."""
        if key not in self:
            raise KeyError(key)
        self._session.delete_file(_file_name(key))

    def discard(self, keys: Iterable[str]) -> int:
        """Delete files, several at a time: an object store answers each after a while."""
        with ThreadPoolExecutor(_DELETES_AT_ONCE, thread_name_prefix="geneva-delete") as threads:
            return sum(threads.map(self._discard, keys))

    def _discard(self, key: str) -> bool:
        try:
            self._session.delete_file(_file_name(key))
        except OSError:
            return False
        return True

    def list_keys(self, prefix: str | None = None) -> list[str]:
        """The keys of all files, sorted."""
        keys = (_key_of(path) for path in self._session.list())
        return sorted(key for key in keys if key is not None and key.startswith(prefix or ""))


def _readable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """JSON as its texts, at any depth: Lance would write it in a form of its own, and read that."""
    fields = [field.with_type(without_json(field.type)) for field in batch.schema]
    columns = [column.cast(made.type) for column, made in zip(batch.columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _file_name(key: str) -> str:
    """A key as a safe file name; the beginning of one that is too long is that of its folder.

    Not "%": object stores quote with that themselves, some on the way in and some on the way out.
    """
    name = quote(key, safe="+~").replace("%", "=")
    folders = ""
    while len(name) + len(".lance") > _MAX_FILE_NAME:
        folders, name = f"{folders}{name[:_FOLDER_NAME]}/", name[_FOLDER_NAME:]
    return f"{folders}{name}.lance"


def _key_of(path: str) -> str | None:
    """The key that a file is for, by its path in the store; None for foreign files."""
    *folders, name = path.split("/")
    if not name.endswith(".lance") or any(len(folder) != _FOLDER_NAME for folder in folders):
        return None
    return unquote("".join((*folders, name.removesuffix(".lance"))).replace("=", "%"))


def _metadata_text(metadata: dict[bytes, bytes], key: str) -> str | None:
    value = metadata.get(key.encode())
    return value.decode() if value is not None else None


@dataclass(frozen=True, slots=True)
class WorkIdentity:
    """What a piece of work is, wherever it runs: the prefix of its checkpoints' keys."""

    udf_name: str
    udf_version: str
    column: str
    where: str
    uri: str
    source_files: tuple[str, ...]
    """The files behind the inputs, and the output's own where its values are carried over."""
    computation: str
    """The identity of what is computed, which outlives the names of its columns."""

    def prefix(self) -> str:
        """The key prefix. Names stand in it as people wrote them, other texts as their digests."""
        files = _md5(chr(10).join(sorted(self.source_files)))
        mark = _mark(self.computation)
        return "_".join(
            (
                f"udf-{_safe(self.udf_name)}",
                f"ver-{_safe(self.udf_version)}",
                f"col-{_safe(self.column)}",
                f"where-{_md5(self.where)}",
                f"uri-{_md5(self.uri.rstrip('/'))}",
                f"srcfiles-{mark}{files[len(mark) :]}",
            )
        )


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """The name of one checkpoint: a range of a fragment, or (no range) its staged data file."""

    prefix: str
    fragment_id: int
    rows: RowRange | None = None
    record: str = field(default="", compare=False)
    """Of a staged file that is on record together with others: the key of that record."""

    @property
    def stored_at(self) -> str:
        """The key in the store that it is found under."""
        return self.record or self.path()

    def path(self) -> str:
        """The key as text."""
        tail = f"_range-{self.rows.start}-{self.rows.end}" if self.rows is not None else ""
        return f"{self.prefix}_frag-{self.fragment_id}{tail}"

    @classmethod
    def parse(cls, text: str) -> CheckpointKey | None:
        """The key that `path` wrote, read from the right; None for anything else."""
        match = _TAIL.match(text)
        if match is None:
            return None
        rows = None
        if match["start"] is not None:
            start, end = int(match["start"]), int(match["end"])
            if start > end:
                return None
            rows = RowRange(start, end)
        key = cls(match["prefix"], int(match["frag"]), rows)
        return key if key.path() == text else None


def without_names(prefix: str) -> str:
    """A prefix without the names of function and columns, which may change: the work itself."""
    version = prefix.partition("_ver-")[2].partition("_col-")[0]
    return f"{version}_where-{prefix.rpartition('_where-')[2]}"


def work_of(prefix: str) -> str:
    """A prefix without names and without its where clause: what was computed from what."""
    return re.sub(r"_where-[0-9a-f]{32}_", "_", without_names(prefix))


def is_of_column(prefix: str, column: str) -> bool:
    """Whether a prefix is of work on a column of that name, by whatever function."""
    return prefix.rpartition("_where-")[0].endswith(f"_col-{_safe(column)}")


def is_of_computation(prefix: str, computation: str, version: str | None = None) -> bool:
    """Whether a prefix is of a computation, whatever its columns are called; `version`: by it."""
    if not prefix.rpartition("_srcfiles-")[2].startswith(_mark(computation)):
        return False
    return version is None or f"_ver-{_safe(version)}_col-" in prefix


def is_of_clause(prefix: str, where: str) -> bool:
    """Whether a prefix is of work on the rows that a where clause selects."""
    return f"_where-{_md5(where)}_" in prefix


def index_keys(keys: Iterable[str]) -> dict[tuple[str, int], list[CheckpointKey]]:
    """Parsed keys by (prefix, fragment id); what doesn't parse is left out."""
    index: dict[tuple[str, int], list[CheckpointKey]] = {}
    for text in keys:
        key = CheckpointKey.parse(text)
        if key is not None:
            index.setdefault((key.prefix, key.fragment_id), []).append(key)
    return index


@lru_cache(maxsize=1_024)
def _safe(text: str) -> str:
    """A user's name as part of a key: as it is, but for what could be taken for something else.

    Quoted are signs that aren't of names, and a "_" that would begin another part of the key.
    """
    readable = "".join(c if c.isalnum() or c in "_-.<> " else quote(c, safe="") for c in text)
    quoted = _SEPARATOR.sub("%5F", readable).replace("~", "%7E").replace("%", "+")
    if len(quoted) <= _MAX_NAME_LENGTH:
        return quoted
    return f"{quoted[:_MAX_NAME_LENGTH]}~{hashlib.sha256(text.encode()).hexdigest()[:10]}"


@lru_cache(maxsize=1_024)
def _mark(computation: str) -> str:
    """How the digest of the source files begins: with one of what is computed."""
    return _md5(computation)[:_MARK_LENGTH]


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def single_batch(table: pa.Table) -> pa.RecordBatch:
    """A table as one record batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def checksum(batch: pa.RecordBatch) -> int:
    """CRC-32 of a batch's logical content, whatever its buffers look like."""
    state = zlib.crc32("\0".join(batch.schema.names).encode())
    for column in batch.columns:
        state = _array_checksum(column, state)
    return state


def _array_checksum(array: pa.Array, state: int) -> int:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _array_checksum(array.storage, state)
    state = zlib.crc32(str(len(array)).encode(), state)
    if array.null_count:
        valid = array.is_valid()
        state = zlib.crc32(pc.cast(valid, pa.uint8()).buffers()[1], state)
        array = without_nulls(array)
    if pa.types.is_null(kind) or not len(array):
        return state
    if pa.types.is_dictionary(kind):
        return _array_checksum(array.dictionary_decode(), state)
    if pa.types.is_struct(kind):
        for child in array.flatten():
            state = _array_checksum(child, state)
        return state
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    if pa.types.is_nested(kind):
        if not pa.types.is_fixed_size_list(kind):
            state = _array_checksum(pc.list_value_length(array), state)
        return _array_checksum(array.flatten(), state)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif _is_variable_width(kind):
        state = _array_checksum(pc.binary_length(array), state)
        array = array.cast(pa.large_binary())
        start, end = (
            int.from_bytes(array.buffers()[1][8 * i : 8 * i + 8], "little")
            for i in (array.offset, array.offset + len(array))
        )
        return zlib.crc32(memoryview(array.buffers()[2])[start:end], state)
    width = array.type.bit_width // 8
    data = memoryview(array.buffers()[1])
    return zlib.crc32(data[array.offset * width : (array.offset + len(array)) * width], state)


def _is_variable_width(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )

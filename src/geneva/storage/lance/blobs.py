"""Blob columns, whose bytes Lance keeps out of line: how they are declared and written.

Up to format 2.1 a blob column is a `large_binary` one with a mark in its metadata, and Lance's file
writer does the rest. From 2.2 on it is of a type of its own, and a data file holds descriptors:
small values are in them, others in files beside the data file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import PurePosixPath

import lance
import pyarrow as pa
from lance.file import LanceFileSession

from geneva.storage.lance.dataset import file_version
from geneva.storage.lance.fragments import BLOB_KEY, is_blob

_INLINE_BYTES = 64 * 1024
"""Larger values are not in the data file itself. The limits are Lance's own."""
_DEDICATED_BYTES = 4 * 1024 * 1024
"""Larger values have a file of their own; others share one."""
_SHARED_BYTES = 1 << 30
"""When a shared file has as much, the next one is begun."""
_CHUNK_BYTES = 8 * 1024 * 1024


def has_descriptors(dataset: lance.LanceDataset, field: pa.Field) -> bool:
    """Whether data files of a table hold descriptors of a column, and not its values."""
    return is_blob(field) and file_version(dataset) >= (2, 2)


def stored_field(dataset: lance.LanceDataset, field: pa.Field) -> pa.Field:
    """A new column as the table's format has it: blobs are of another type from 2.2 on."""
    if not is_blob(field) or file_version(dataset) < (2, 2):
        return field
    kept = {k: v for k, v in (field.metadata or {}).items() if k != BLOB_KEY}
    made = lance.blob_field(field.name, nullable=field.nullable)
    return made.with_metadata({**(made.metadata or {}), **kept})


class BlobWriter:
    """Writes the blobs of one data file, whose descriptors go into that."""

    def __init__(self, session: LanceFileSession, data_file: str) -> None:
        """Write nothing yet. `data_file`: its path in the session's folder."""
        self._session, self._data_file = session, data_file
        self._ids: Iterator[int] = count(1)
        self._shared: lance.PackedBlobWriter | None = None
        self._shared_bytes = 0

    def write(self, name: str, values: pa.Array) -> tuple[pa.Field, pa.Array]:
        """Write the values of some rows; return their descriptors, and the field of these."""
        made = lance.BlobDescriptorArrayBuilder(name)
        for value in values:
            if not value.is_valid:
                made.append_null()
                continue
            data = memoryview(value.as_buffer())
            if len(data) <= _INLINE_BYTES:
                made.append_inline(bytes(data))
            elif len(data) <= _DEDICATED_BYTES:
                made.extend_packed(*self._write_shared(data))
            else:
                made.append(self._write_alone(data))
        return made.field, made.finish()

    def _write_shared(self, data: memoryview) -> tuple[int, list[int], list[int]]:
        if self._shared is not None and self._shared_bytes >= _SHARED_BYTES:
            self.close()
        if self._shared is None:
            blob_id = next(self._ids)
            self._shared = self._session.open_packed_blob_writer(self._data_file, blob_id)
            self._shared_bytes = 0
        self._shared.write_blob(bytes(data))
        offset, self._shared_bytes = self._shared_bytes, self._shared_bytes + len(data)
        return self._shared.blob_id, [offset], [len(data)]

    def _write_alone(self, data: memoryview) -> lance.BlobDescriptor:
        writer = self._session.open_dedicated_blob_writer(self._data_file, next(self._ids))
        for start in range(0, len(data), _CHUNK_BYTES):
            writer.write(bytes(data[start : start + _CHUNK_BYTES]))
        return writer.finish()

    def close(self) -> None:
        """Finish what is open, before the data file is closed."""
        if self._shared is not None:
            self._shared.finish()
            self._shared = None


def blobs_beside(data_file: str) -> str:
    """The folder of the files that hold a data file's blobs."""
    return str(PurePosixPath(data_file).with_suffix(""))


def data_file_of(path: str) -> str:
    """The data file that a file of a table's data folder belongs to: itself, or one with blobs."""
    folder, slash, _ = path.partition("/")
    return f"{folder}.lance" if slash else path


def delete_blobs_beside(session: LanceFileSession, data_file: str) -> int:
    """Delete the files that hold the blobs of a data file which nothing refers to; count them."""
    deleted = 0
    with suppress(OSError):  # there are none
        for path in session.list(blobs_beside(data_file)):
            session.delete_file(path)
            deleted += 1
    return deleted

"""Blobs as functions get them that ask for a `lance.blob.BlobFile`: files over bytes in memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from lance.blob import BlobFile


class BlobValue(BlobFile):  # type: ignore[misc]
    """A blob that was read: the same methods, over the bytes of an Arrow array, without a copy.

    The bytes are there because a row's receipt is made of them.
    """

    def __init__(self, data: pa.Buffer) -> None:
        """Begin at the first byte."""
        io.BufferedIOBase.__init__(self)
        self._view = memoryview(data).cast("B")
        self._at = 0
        self._is_closed = False

    def close(self) -> None:
        """Read no more."""
        self._is_closed = True

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    def size(self) -> int:
        """How many bytes there are."""
        return len(self._view)

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place: from the start, from here, or from the end."""
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence={whence!r} is none of SEEK_SET, SEEK_CUR and SEEK_END")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no byte {base + offset}")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes; all that are left, where no size is given."""
        self._check_open()
        end = len(self._view) if size is None or size < 0 else self._at + size
        data = bytes(self._view[self._at : end])
        self._at += len(data)
        return data

    def read1(self, size: int | None = -1) -> bytes:
        """The next bytes."""
        return self.read(size)

    def readall(self) -> bytes:
        """All bytes that are left."""
        return self.read()

    def readinto(self, b: Any) -> int:
        """Read into a buffer, as much as it holds."""
        self._check_open()
        target = memoryview(b).cast("B")
        data = self._view[self._at : self._at + len(target)]
        target[: len(data)] = data
        self._at += len(data)
        return len(data)

    def read_range(self, offset: int, length: int) -> bytes:
        """The bytes of a range. The place of the next read stays."""
        self._check_open()
        if offset < 0 or length < 0 or offset + length > len(self._view):
            raise ValueError(f"[{offset}, {offset + length}) is not inside of {self!r}")
        return bytes(self._view[offset : offset + length])

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of several ranges, each an offset and a length."""
        return [self.read_range(offset, length) for offset, length in ranges]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the blob was closed")


def blob_values(array: pa.Array) -> list[BlobValue | None]:
    """The rows of a binary column as files; NULL is None."""
    storage = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    return [BlobValue(value.as_buffer()) if value.is_valid else None for value in storage]

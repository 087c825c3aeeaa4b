"""Some rows of a table to show to people, and single pictures out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from geneva.model.tables import TableRef
from geneva.storage.lance.dataset import Dataset, open_dataset
from geneva.storage.lance.fragments import is_blob

_SNIFFED_BYTES = 16
_PICTURES = (
    ("image/png", b"\x89PNG\r\n\x1a\n"),
    ("image/jpeg", b"\xff\xd8\xff"),
    ("image/gif", b"GIF8"),
)


@dataclass(frozen=True, slots=True)
class Binary:
    """Bytes that are not shown as such: how many there are, and the picture they are, if any."""

    size: int
    picture: str | None
    """A media type of pictures that run no script; None: not such a picture."""


@dataclass(frozen=True, slots=True)
class Preview:
    """Some rows of one version of a table."""

    version: int
    total_rows: int
    start: int
    """How many live rows come before the first one shown."""
    fields: tuple[pa.Field, ...]
    rows: tuple[tuple[Any, ...], ...]
    """Python values; bytes are `Binary`."""


def read_preview(
    ref: TableRef, columns: Sequence[str], start: int, count: int, version: int | None = None
) -> Preview:
    """Read `count` rows from the live row `start` on, one at a time: one row bounds the memory."""
    dataset = open_dataset(ref, version)
    fields = tuple(dataset.schema.field(name) for name in columns)
    inline = [field.name for field in fields if not is_blob(field)]
    total = int(dataset.count_rows())
    first = min(start, total)
    scanned: list[dict[str, Any]] = []
    if inline:
        scanner = dataset.scanner(
            columns=inline, offset=first, limit=count, batch_size=1, scan_in_order=True
        )
        for batch in scanner.to_batches():
            scanned.extend(_summarized(row) for row in batch.to_pylist())
    else:
        scanned = [{} for _ in range(min(count, total - first))]
    for field in fields:
        if is_blob(field) and scanned:
            for row, blob in zip(
                scanned, _blobs(dataset, field.name, first, len(scanned)), strict=False
            ):
                row[field.name] = blob
    rows = tuple(tuple(row.get(field.name) for field in fields) for row in scanned)
    return Preview(int(dataset.version), total, first, fields, rows)


def read_picture(
    ref: TableRef, version: int, column: str, row: int, max_bytes: int
) -> tuple[str, bytes] | Binary | None:
    """One cell as media type and bytes; a `Binary` when it is too big or no picture; else None."""
    dataset = open_dataset(ref, version)
    if column not in dataset.schema.names or not 0 <= row < dataset.count_rows():
        return None
    field = dataset.schema.field(column)
    if is_blob(field):
        blob = dataset.take_blobs(column, indices=[row])[0]
        if blob is None:
            return None
        size = int(blob.size())
        data = blob.read(_SNIFFED_BYTES) if size > max_bytes else blob.readall()
    elif _is_binary(field.type):
        data = dataset.take([row], columns=[column]).column(0)[0].as_py()
        if data is None:
            return None
        size = len(data)
    else:
        return None
    picture = picture_type(data)
    if picture is None or size > max_bytes:
        return Binary(size, picture)
    return picture, data


def picture_type(data: bytes) -> str | None:
    """The media type of a picture that begins with `data`, of the kinds that run no script."""
    for kind, magic in _PICTURES:
        if data.startswith(magic):
            return kind
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _blobs(dataset: Dataset, column: str, start: int, count: int) -> list[Binary | None]:
    """What some blobs are; None for NULL."""
    blobs = dataset.take_blobs(column, indices=list(range(start, start + count)))
    return [
        None if blob is None else Binary(int(blob.size()), picture_type(blob.read(_SNIFFED_BYTES)))
        for blob in blobs
    ]


def _summarized(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: Binary(len(value), picture_type(value)) if isinstance(value, bytes) else value
        for name, value in row.items()
    }

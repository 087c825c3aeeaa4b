"""What `geneva demo` computes: three functions, one of each kind, and the pictures they read."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geneva.udf.declare import udf

BINS = 4
"""Brightness levels that the embedding distinguishes in each colour channel."""

PICTURES = pa.schema(
    {
        "id": pa.int64(),
        "image": pa.binary(),
        "caption": pa.string(),
        "width": pa.int32(),
        "height": pa.int32(),
    }
)
_COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 70),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 50),
    "black": (20, 20, 20),
    "white": (240, 240, 240),
}
_SHAPES = ("circle", "square", "stripe")
_SIDES = (48, 64, 96)


# ------------------------------------------------------------------------- shown by the demo


@udf
def words(caption: str) -> int:
    """Once per row, with Python values; the column's type is read off the annotation."""
    return len(caption.split())


@udf(data_type=pa.float32())
def kilopixels(width: pa.Array, height: pa.Array) -> pa.Array:
    """Once per batch, with Arrow arrays."""
    return pc.divide(pc.cast(pc.multiply(width, height), pa.float32()), 1000)


@udf(data_type=pa.list_(pa.float32(), BINS**3), input_columns=["image"])
class Embedding:
    """Made once in each worker process; takes record batches, returns vectors."""

    def setup(self) -> None:
        """Load a model here; this one is a colour histogram."""
        self.weights = np.array([BINS * BINS, BINS, 1])

    def __call__(self, batch: pa.RecordBatch) -> np.ndarray[Any, Any]:
        """Return one vector per picture."""
        return np.stack([self.histogram(png) for png in batch["image"].to_pylist()])

    def histogram(self, png: bytes) -> np.ndarray[Any, Any]:
        """Return how often each colour occurs, as a vector of length 1."""
        levels = decode_png(png) // (256 // BINS) @ self.weights
        counts = np.bincount(levels.ravel(), minlength=BINS**3).astype(np.float32)
        return counts / np.linalg.norm(counts)


# ------------------------------------------------------------------------------ the pictures


def make_pictures(first_id: int, count: int) -> pa.Table:
    """Draw pictures with captions; a picture of the same id is always the same."""
    return pa.Table.from_pylist(list(_rows(first_id, count)), schema=PICTURES)


def _rows(first_id: int, count: int) -> Iterator[dict[str, Any]]:
    for id_ in range(first_id, first_id + count):
        rng = np.random.default_rng(id_)
        front, back = rng.choice(list(_COLOURS), 2, replace=False).tolist()
        shape = str(rng.choice(_SHAPES))
        width, height = rng.choice(_SIDES, 2).tolist()
        size = int(rng.integers(8, 20))
        down, across = np.mgrid[0:height, 0:width]
        y, x = rng.integers(size, height - size), rng.integers(size, width - size)
        inside = {
            "circle": (down - y) ** 2 + (across - x) ** 2 < size**2,
            "square": np.maximum(abs(down - y), abs(across - x)) < size,
            "stripe": abs(down - y) < size // 2,
        }[shape]
        pixels = np.where(inside[..., None], _COLOURS[front], _COLOURS[back]).astype(np.uint8)
        adjective = "tiny " if size < 11 else "large bold " if size > 16 else ""
        yield {
            "id": id_,
            "image": encode_png(pixels),
            "caption": f"a {adjective}{front} {shape} on {back}",
            "width": width,
            "height": height,
        }


def encode_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return a (height, width, 3) array as the bytes of a PNG file."""
    height, width, _ = pixels.shape
    # Every row starts with the number of its filter: 0, none.
    rows = np.pad(pixels.reshape(height, width * 3), ((0, 0), (1, 0))).tobytes()
    header = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def decode_png(png: bytes) -> np.ndarray[Any, Any]:
    """Return the pixels of a PNG that `encode_png` made."""
    width, height = struct.unpack_from("!II", png, 16)
    (length,) = struct.unpack_from("!I", png, 33)
    rows = np.frombuffer(zlib.decompress(png[41 : 41 + length]), np.uint8)
    return rows.reshape(height, width * 3 + 1)[:, 1:].reshape(height, width, 3)

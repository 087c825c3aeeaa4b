"""Images: sizes, thumbnails and perceptual hashes. Needs pillow (extra `udf-images`)."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa

from geneva.udf.declare import UDF, udf

SIZE = pa.struct([("width", pa.int32()), ("height", pa.int32())])
_HASH_SIDE = 8
_SAMPLED_SIDE = 32


@udf(data_type=SIZE)
def image_size(image: bytes | None) -> dict[str, int] | None:
    """Width and height in pixels, as the image is to be shown."""
    if image is None:
        return None
    width, height = _opened(image).size
    return {"width": width, "height": height}


@udf(data_type=pa.int64())
def perceptual_hash(image: bytes | None) -> int | None:
    """64 bits that are alike for images that look alike: compare by the bits that differ.

    The signs of the 8 x 8 lowest frequencies of the image in grey, against their median.
    """
    if image is None:
        return None
    grey = _opened(image).convert("L").resize((_SAMPLED_SIDE, _SAMPLED_SIDE))
    pixels = np.asarray(grey, dtype=np.float64)
    low = (_COSINES @ pixels @ _COSINES.T)[:_HASH_SIDE, :_HASH_SIDE].ravel()
    bits = low > np.median(low[1:])
    return int.from_bytes(np.packbits(bits).tobytes(), "big", signed=True)


def thumbnail_udf(
    column: str = "image", width: int = 256, height: int = 256, format: str = "JPEG"
) -> UDF:
    """A column of small images that fit `width` x `height`, in the shape of the original."""

    def thumbnail(image: bytes | None) -> bytes | None:
        if image is None:
            return None
        small = _opened(image).convert("RGB")
        small.thumbnail((width, height))
        target = io.BytesIO()
        small.save(target, format=format)
        return target.getvalue()

    return udf(thumbnail, data_type=pa.binary(), input_columns=[column], name="thumbnail")


def _opened(image: bytes) -> Any:
    from PIL import Image, ImageOps

    return ImageOps.exif_transpose(Image.open(io.BytesIO(image)))


def _cosines(count: int) -> Any:
    """The discrete cosine transform, as a matrix."""
    places = np.arange(count)
    return np.cos(np.pi * places[:, None] * (2 * places[None, :] + 1) / (2 * count))


_COSINES = _cosines(_SAMPLED_SIDE)

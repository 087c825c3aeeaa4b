"""Text in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from geneva.udf.chunker import Chunker, chunker
from geneva.udf.declare import UDF, udf
from geneva.udfs.splitting import split_text


class Piece(NamedTuple):
    """A piece of a text."""

    chunk_id: int
    chunk: str


def split_text_udf(column: str = "text", size: int = 2048, overlap: int = 200) -> UDF:
    """A column of lists: the pieces of a text of at most `size` characters."""

    def pieces(text: str | None) -> list[str] | None:
        return None if text is None else split_text(text, size, overlap)

    kind = pa.list_(pa.string())
    return udf(pieces, data_type=kind, input_columns=[column], name="split_text")


def text_chunker(column: str = "text", size: int = 2048, overlap: int = 200) -> Chunker:
    """A row for each piece of a text, for `create_udtf_view`."""

    def pieces(text: str | None) -> Iterator[Piece]:
        for number, piece in enumerate(split_text(text or "", size, overlap)):
            yield Piece(number, piece)

    schema = pa.schema([("chunk_id", pa.int32()), ("chunk", pa.string())])
    return chunker(pieces, output_schema=schema, input_columns=[column], name="split_text")

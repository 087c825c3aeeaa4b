"""Documents: the pages of PDF files, and their text in pieces. Needs pypdf: `udf-documents`."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa

from geneva.udf.declare import udf
from geneva.udfs.splitting import split_text

PAGES = pa.list_(pa.struct([("page_number", pa.int32()), ("text", pa.string())]))
CHUNKS = pa.list_(
    pa.struct([("page_number", pa.int32()), ("chunk_id", pa.int32()), ("chunk", pa.string())])
)
CHUNK_SIZE, CHUNK_OVERLAP = 2048, 200


@udf(data_type=PAGES)
def extract_pages(pdf_bytes: bytes | None) -> list[dict[str, Any]] | None:
    """The text of each page of a PDF file; pages are numbered from 0."""
    if pdf_bytes is None:
        return None
    from pypdf import PdfReader

    pages = PdfReader(io.BytesIO(pdf_bytes)).pages
    return [
        {"page_number": number, "text": page.extract_text()} for number, page in enumerate(pages)
    ]


@udf(data_type=CHUNKS)
def chunk_pages(pages: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Pages in pieces of 2,048 characters, each beginning 200 before the end of the last."""
    if pages is None:
        return None
    return [
        {"page_number": page["page_number"], "chunk_id": number, "chunk": piece}
        for page in pages
        for number, piece in enumerate(split_text(page["text"] or "", CHUNK_SIZE, CHUNK_OVERLAP))
    ]

"""Functions that many tables need: documents, images, text, embeddings, audio, models of others.

Each module needs a package, which an extra of `geneva-spark` installs; what is missing is said when
a function is made. Providers' keys are read from the environment when a function is made, and
travel with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geneva.udfs.audio import WhisperChunkTranscriber
    from geneva.udfs.document import chunk_pages, extract_pages
    from geneva.udfs.embedding import sentence_transformer_udf, static_embedding_udf
    from geneva.udfs.gemini import gemini_embedding_udf, gemini_udf
    from geneva.udfs.image import image_size, perceptual_hash, thumbnail_udf
    from geneva.udfs.openai import openai_embedding_udf, openai_udf
    from geneva.udfs.text import split_text_udf

__all__ = [
    "WhisperChunkTranscriber",
    "chunk_pages",
    "extract_pages",
    "gemini_embedding_udf",
    "gemini_udf",
    "image_size",
    "openai_embedding_udf",
    "openai_udf",
    "perceptual_hash",
    "sentence_transformer_udf",
    "split_text_udf",
    "static_embedding_udf",
    "thumbnail_udf",
]

_HOMES = {
    "WhisperChunkTranscriber": "audio",
    "chunk_pages": "document",
    "extract_pages": "document",
    "gemini_embedding_udf": "gemini",
    "gemini_udf": "gemini",
    "image_size": "image",
    "openai_embedding_udf": "openai",
    "openai_udf": "openai",
    "perceptual_hash": "image",
    "sentence_transformer_udf": "embedding",
    "split_text_udf": "text",
    "static_embedding_udf": "embedding",
    "thumbnail_udf": "image",
}


def __getattr__(name: str) -> Any:
    """Load a function at first use: each needs other packages."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"geneva.udfs.{_HOMES[name]}"), name)

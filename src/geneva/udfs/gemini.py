"""Gemini's models, through the endpoint of theirs that speaks OpenAI's language."""

from __future__ import annotations

from dataclasses import replace

from geneva.compatibility import warn_compatibility
from geneva.udf.declare import UDF
from geneva.udfs.openai import openai_embedding_udf, openai_udf

BASE_URL = "https://generativelanguage.googleapis.com/v1beta/openai"
_KEY = "GEMINI_API_KEY"
_DIMENSIONS = {"gemini-embedding-001": 3072}


def gemini_udf(
    column: str,
    prompt: str,
    model: str = "gemini-2.5-flash",
    mime_type: str | None = None,
    api_key_env: str = _KEY,
    version: str | None = None,
    *,
    base_url: str = BASE_URL,
    timeout: float = 120.0,
    max_attempts: int = 6,
) -> UDF:
    """Ask a model about each value of a column; `mime_type` says what binary values are."""
    made = openai_udf(
        column,
        prompt,
        model,
        mime_type,
        api_key_env=api_key_env,
        version=version,
        base_url=base_url,
        timeout=timeout,
        max_attempts=max_attempts,
    )
    return replace(made, name="gemini")


def gemini_embedding_udf(
    column: str = "text",
    model: str = "gemini-embedding-001",
    task_type: str | None = None,
    output_dimensionality: int | None = None,
    normalize: bool = False,  # noqa: FBT001, FBT002
    *,
    api_key_env: str = _KEY,
    version: str | None = None,
    dimension: int | None = None,
    base_url: str = BASE_URL,
    texts_per_request: int = 100,
    timeout: float = 60.0,
    max_attempts: int = 6,
) -> UDF:
    """Embed a column of texts. `task_type` is not known to this endpoint, and not sent."""
    if task_type is not None:
        warn_compatibility(
            f"gemini_embedding_udf(task_type={task_type!r})",
            "Gemini is asked through its OpenAI endpoint, which has no such word: the vectors are "
            "for no task in particular",
        )
    made = openai_embedding_udf(
        column,
        model,
        output_dimensionality,
        normalize=normalize,
        api_key_env=api_key_env,
        version=version,
        dimension=dimension or _DIMENSIONS.get(model),
        base_url=base_url,
        texts_per_request=texts_per_request,
        timeout=timeout,
        max_attempts=max_attempts,
    )
    return replace(made, name="gemini_embedding")

"""Models behind an endpoint that speaks OpenAI's language: chats and embeddings. Needs no package.

A server that says "later" (429, 5xx), or doesn't answer, is asked again after the time that it
names, or after 1, 2, 4 ... s.
"""

from __future__ import annotations

import base64
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from geneva.errors import UserInputError
from geneva.flags import check_flag
from geneva.udf.declare import UDF, udf

BASE_URL = "https://api.openai.com/v1"
_LATER = frozenset({408, 409, 429, 500, 502, 503, 504})
_MAX_WAIT_SECONDS = 60.0
_DIMENSIONS = {"text-embedding-3-small": 1536, "text-embedding-3-large": 3072}
_KEY = "OPENAI_API_KEY"


class Endpoint:
    """An endpoint and its key. The key shows in no repr, and is not part of what a UDF means."""

    def __init__(
        self, base_url: str, key: str, *, timeout: float, max_attempts: int, wait: float = 1.0
    ) -> None:
        """Keep where to ask and how often."""
        self.base_url, self._key = base_url.rstrip("/"), key
        self.timeout, self.max_attempts, self.wait = timeout, max_attempts, wait

    def __geneva_meaning__(self) -> Any:
        """Return what a fingerprint takes for this: where, not with which key."""
        return self.base_url

    def __repr__(self) -> str:
        """Show where it is."""
        return f"Endpoint({self.base_url!r})"

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Ask, again and again where the server says "later"."""
        for attempt in range(1, self.max_attempts + 1):
            try:
                return self._ask(path, body)
            except urllib.error.HTTPError as error:
                if error.code not in _LATER or attempt == self.max_attempts:
                    said = error.read().decode(errors="replace")[:500]
                    raise RuntimeError(f"{self.base_url}{path}: {error.code}: {said}") from None
                named = error.headers.get("Retry-After")
                error.close()
            except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                if attempt == self.max_attempts:
                    raise ConnectionError(f"{self.base_url}{path}: {error}") from None
                named = None
            time.sleep(self._pause(named, attempt))
        raise AssertionError("unreachable")

    def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.base_url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
        )
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            return json.loads(answer.read())

    def _pause(self, named: str | None, attempt: int) -> float:
        try:
            seconds = float(named) if named is not None else self.wait * 2 ** (attempt - 1)
        except ValueError:  # a date
            seconds = self.wait * 2 ** (attempt - 1)
        # Not all workers at once.
        return min(seconds, _MAX_WAIT_SECONDS) * random.uniform(1.0, 1.25)


class _Embedder:
    """Embeds a batch of texts with one request for each `texts_per_request`."""

    def __init__(
        self, endpoint: Endpoint, model: str, dimensions: int | None, *, normalize: bool, size: int
    ) -> None:
        self.endpoint, self.model, self.dimensions = endpoint, model, dimensions
        self.normalize, self.size = normalize, size

    def __call__(self, text: pa.Array) -> pa.Array:
        """Embed a batch; NULL stays NULL."""
        texts = text.to_pylist()
        known = [t for t in texts if t is not None]
        vectors = [
            v for i in range(0, len(known), self.size) for v in self._ask(known[i : i + self.size])
        ]
        found = iter(vectors)
        return [None if t is None else next(found) for t in texts]

    def _ask(self, texts: Sequence[str]) -> list[list[float]]:
        body: dict[str, Any] = {"model": self.model, "input": list(texts)}
        if self.dimensions is not None:
            body["dimensions"] = self.dimensions
        data = self.endpoint.post("/embeddings", body)["data"]
        vectors = np.asarray([item["embedding"] for item in sorted(data, key=_index)], np.float32)
        if self.normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        made: list[list[float]] = vectors.tolist()
        return made


def _index(item: Mapping[str, Any]) -> int:
    return int(item.get("index", 0))  # without numbers they are in order


def openai_embedding_udf(
    column: str = "text",
    model: str = "text-embedding-3-small",
    output_dimensionality: int | None = None,
    normalize: bool = False,  # noqa: FBT001, FBT002
    api_key_env: str = _KEY,
    version: str | None = None,
    dimension: int | None = None,
    *,
    base_url: str | None = None,
    texts_per_request: int = 256,
    timeout: float = 60.0,
    max_attempts: int = 6,
) -> UDF:
    """Embed a column of texts at an endpoint.

    `output_dimensionality` is asked for; `dimension` says how long vectors are where the model is
    not one of OpenAI's.
    """
    check_flag("normalize", normalize)
    size = output_dimensionality or dimension or _DIMENSIONS.get(model)
    if size is None:
        raise UserInputError(f"Give dimension=..., the length of a vector of model {model!r}.")
    endpoint = _endpoint(base_url, api_key_env, timeout, max_attempts)
    made = _Embedder(
        endpoint, model, output_dimensionality, normalize=normalize, size=texts_per_request
    )
    return udf(
        made,
        data_type=pa.list_(pa.float32(), size),
        input_columns=[column],
        name="openai_embedding",
        version=version,
    )


class _Chat:
    """Asks a model about one value."""

    def __init__(self, endpoint: Endpoint, model: str, prompt: str, mime_type: str | None) -> None:
        self.endpoint, self.model, self.prompt, self.mime_type = endpoint, model, prompt, mime_type

    def __call__(self, value: Any) -> str | None:
        """The answer; None stays None."""
        if value is None:
            return None
        content: Any = f"{self.prompt}\n\n{value}"
        if self.mime_type is not None:
            data = base64.b64encode(value).decode()
            image = {"url": f"data:{self.mime_type};base64,{data}"}
            text = {"type": "text", "text": self.prompt}
            content = [text, {"type": "image_url", "image_url": image}]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        answer = self.endpoint.post("/chat/completions", body)
        return str(answer["choices"][0]["message"]["content"])


def openai_udf(
    column: str,
    prompt: str,
    model: str,
    mime_type: str | None = None,
    *,
    api_key_env: str = _KEY,
    version: str | None = None,
    base_url: str | None = None,
    timeout: float = 120.0,
    max_attempts: int = 6,
) -> UDF:
    """Ask a model about each value of a column; `mime_type` says what binary values are."""
    endpoint = _endpoint(base_url, api_key_env, timeout, max_attempts)
    return udf(
        _Chat(endpoint, model, prompt, mime_type),
        data_type=pa.string(),
        input_columns=[column],
        name="openai",
        version=version,
    )


def _endpoint(base_url: str | None, key_name: str, timeout: float, max_attempts: int) -> Endpoint:
    key = os.environ.get(key_name)
    if not key:
        raise UserInputError(
            f"There is no key in the environment variable {key_name}: set it, or name another one "
            "with api_key_env=."
        )
    place = base_url or os.environ.get("OPENAI_BASE_URL") or BASE_URL
    return Endpoint(place, key, timeout=timeout, max_attempts=max_attempts)

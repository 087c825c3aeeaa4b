"""Embeddings by models that run on the workers.

Extras: `udf-text-sentence-transformers`, and `udf-text-static` for model2vec.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from geneva.flags import check_flag
from geneva.udf.declare import UDF, udf
from geneva.udfs.extras import require


class _Embedder:
    """Embeds texts with a model that is loaded once in each worker."""

    def __init__(self, *, normalize: bool) -> None:
        self.normalize = normalize
        self._model: Any = None

    def setup(self) -> None:
        """Load the model."""
        self._model = self.load()

    def load(self) -> Any:
        """The model, which has `encode(texts)`."""
        raise NotImplementedError

    def __call__(self, text: pa.Array) -> pa.Array:
        """Embed a batch; NULL stays NULL."""
        texts = text.to_pylist()
        known = [t for t in texts if t is not None]
        vectors = np.asarray(self._model.encode(known), dtype=np.float32) if known else None
        if vectors is not None and self.normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        found = iter(vectors.tolist() if vectors is not None else [])
        return [None if t is None else next(found) for t in texts]


class _SentenceTransformer(_Embedder):
    def __init__(
        self, model: str, *, normalize: bool, trust_remote_code: bool, device: str | None = None
    ) -> None:
        super().__init__(normalize=normalize)
        self.model, self.trust_remote_code, self.device = model, trust_remote_code, device

    def load(self) -> Any:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(
            self.model, trust_remote_code=self.trust_remote_code, device=self.device
        )


class _Static(_Embedder):
    def __init__(self, model: str, *, normalize: bool) -> None:
        super().__init__(normalize=normalize)
        self.model = model

    def load(self) -> Any:
        from model2vec import StaticModel

        return StaticModel.from_pretrained(self.model)


def sentence_transformer_udf(
    model: str = "sentence-transformers/all-MiniLM-L6-v2",
    column: str = "text",
    normalize: bool = True,  # noqa: FBT001, FBT002
    num_gpus: float = 0.0,
    trust_remote_code: bool = False,  # noqa: FBT001, FBT002
    dimension: int | None = None,
) -> UDF:
    """Embed a column of texts with a model of sentence-transformers, by name or by folder.

    Without `dimension` the model is loaded now, to learn it.
    """
    check_flag("normalize", normalize)
    check_flag("trust_remote_code", trust_remote_code)
    require("sentence_transformers", "udf-text-sentence-transformers")
    made = _SentenceTransformer(model, normalize=normalize, trust_remote_code=trust_remote_code)
    if dimension is None:
        loaded = made.load()
        # Newer releases have renamed it.
        name = "get_embedding_dimension"
        ask = getattr(loaded, name, None) or loaded.get_sentence_embedding_dimension
        dimension = int(ask())
    return _declared(made, column, dimension, "sentence_transformer", num_gpus)


def static_embedding_udf(
    model: str = "minishlab/potion-base-8M",
    column: str = "text",
    *,
    normalize: bool = True,
    dimension: int | None = None,
) -> UDF:
    """Embed a column of texts with a static model (model2vec): a table of vectors, no GPU.

    Without `dimension` the model is loaded now, to learn it.
    """
    check_flag("normalize", normalize)
    require("model2vec", "udf-text-static")
    made = _Static(model, normalize=normalize)
    if dimension is None:
        dimension = int(made.load().dim)
    return _declared(made, column, dimension, "static_embedding", None)


def _declared(
    made: _Embedder, column: str, dimension: int, name: str, num_gpus: float | None
) -> UDF:
    return udf(
        made,
        data_type=pa.list_(pa.float32(), dimension),
        input_columns=[column],
        name=name,
        num_gpus=num_gpus or None,
    )

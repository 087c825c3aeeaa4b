"""Audio: speech to text. Needs faster-whisper (extra `udf-audio`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from geneva.udf.declare import udf
from geneva.udfs.extras import require


class _Transcriber:
    """Writes down what is said in samples of 16 kHz; the model is loaded once in each worker."""

    def __init__(
        self, model_id: str = "base", language: str | None = None, device: str = "auto"
    ) -> None:
        require("faster_whisper", "udf-audio")
        self.model_id, self.language, self.device = model_id, language, device
        self._model: Any = None

    def setup(self) -> None:
        """Load the model, by name or from a folder."""
        from faster_whisper import WhisperModel

        self._model = WhisperModel(self.model_id, device=self.device)

    def __call__(self, samples: list[float] | None) -> str | None:
        """The text of one recording; None stays None."""
        if samples is None:
            return None
        audio = np.asarray(samples, dtype=np.float32)
        segments, _ = self._model.transcribe(audio, language=self.language)
        return "".join(segment.text for segment in segments).strip()


_Transcriber.__name__ = _Transcriber.__qualname__ = "WhisperChunkTranscriber"
WhisperChunkTranscriber = udf(data_type=pa.large_string())(_Transcriber)
"""`{"said": WhisperChunkTranscriber(model_id="small")}`: of `samples`, float32 at 16 kHz."""

"""A Whisper that knows two words, and says one where it hears low tones, the other where high ones.

It is one layer of sixteen numbers, set by hand. The encoder takes the means of the low and of the
high bands of the spectrum. The decoder's attention, which looks everywhere alike, gives it their
difference, and its position says which letter comes next. All other weights are zero.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_WIDTH, _BANDS, _FRAMES, _POSITIONS = 16, 80, 1500, 448
_LOW, _HIGH = 0, 1
"""Where the encoder has the two means."""
_TONE = _WIDTH - 1
"""Where the decoder has their difference; before it is a number for each step."""
_START, _STOP, _END = "<|0.00|>", "<|1.00|>", "<|endoftext|>"
_MARKS = (
    *(_END, "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
    *(f"<|{i * 0.02:.2f}|>" for i in range(1501)),
)


def save_whisper(folder: Path, *, low: str, high: str) -> Path:
    """Write the model as faster-whisper reads it. The words are as long as each other."""
    from ctranslate2.specs import WhisperSpec

    assert len(low) == len(high)
    assert not set(low) & set(high)
    ids = _save_tokenizer(folder)
    spec = WhisperSpec(1, 2, 1, 2)
    _set_encoder(spec.encoder)
    _set_decoder(spec.decoder, ids, low, high)
    spec.register_vocabulary([token for token, _ in sorted(ids.items(), key=lambda pair: pair[1])])
    spec.config.suppress_ids = spec.config.suppress_ids_begin = []
    spec.config.lang_ids, spec.config.alignment_heads = [ids["<|en|>"]], [[0, 0]]
    spec.validate()
    spec.save(str(folder))
    return folder


def _save_tokenizer(folder: Path) -> dict[str, int]:
    """Bytes, Whisper's own marks and its 1,501 times, as a tokenizer; return the ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(_MARKS))
    made.save(str(folder / "tokenizer.json"))
    sound = {"feature_size": _BANDS, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
    facts = json.dumps({**sound, "chunk_length": 30})
    (folder / "preprocessor_config.json").write_text(facts, encoding="utf-8")
    return dict(made.get_vocab())


def _set_encoder(encoder: Any) -> None:
    encoder.conv1.weight, encoder.conv1.bias = _zeros(_WIDTH, _BANDS, 3), _zeros(_WIDTH)
    encoder.conv1.weight[_LOW, :20, 1] = 1 / 20
    encoder.conv1.weight[_HIGH, 40:, 1] = 1 / 40
    encoder.conv1.bias[[_LOW, _HIGH]] = 3  # above zero, where the activation changes nothing
    encoder.conv2.weight, encoder.conv2.bias = _zeros(_WIDTH, _WIDTH, 3), _zeros(_WIDTH)
    encoder.conv2.weight[_LOW, _LOW, 1] = encoder.conv2.weight[_HIGH, _HIGH, 1] = 1
    encoder.position_encodings.encodings = _zeros(_FRAMES, _WIDTH)
    _set_norm(encoder.layer_norm)
    for layer in encoder.layer:
        _set_attention(layer.self_attention, (3, 1))
        _set_feed_forward(layer.ffn)


def _set_decoder(decoder: Any, ids: dict[str, int], low: str, high: str) -> None:
    decoder.embeddings.weight = _zeros(len(ids), _WIDTH)
    decoder.projection.weight = scores = _zeros(len(ids), _WIDTH)
    decoder.position_encodings.encodings = places = _zeros(_POSITIONS, _WIDTH)
    _set_norm(decoder.layer_norm)
    for layer in decoder.layer:
        _set_attention(layer.self_attention, (3, 1))
        _set_attention(layer.attention, (1, 2, 1))
        _set_feed_forward(layer.ffn)
        values, output = layer.attention.linear[1].weight[_WIDTH:], layer.attention.linear[2].weight
        values[0, [_LOW, _HIGH]] = 1, -1
        output[_TONE, 0] = 300
    for word, sign in ((low, 1), (high, -1)):
        for step, token in enumerate([_START, *word, _STOP, _END]):
            places[step:, :_TONE], places[step:, step] = 0, 10
            scores[ids[token], step] = 100
            if token in word:
                scores[ids[token], _TONE] = 20 * sign


def _set_attention(attention: Any, parts: tuple[int, ...]) -> None:
    """All of an attention zero; `parts`: how many matrices each of its weights holds."""
    _set_norm(attention.layer_norm)
    for linear, matrices in zip(attention.linear, parts, strict=True):
        linear.weight = _zeros(matrices * _WIDTH, _WIDTH)
        linear.bias = _zeros(matrices * _WIDTH)


def _set_feed_forward(layer: Any) -> None:
    _set_norm(layer.layer_norm)
    for linear in (layer.linear_0, layer.linear_1):
        linear.weight, linear.bias = _zeros(_WIDTH, _WIDTH), _zeros(_WIDTH)


def _set_norm(norm: Any) -> None:
    norm.gamma, norm.beta = np.ones(_WIDTH, np.float32), _zeros(_WIDTH)


def _zeros(*shape: int) -> npt.NDArray[np.float32]:
    return np.zeros(shape, np.float32)

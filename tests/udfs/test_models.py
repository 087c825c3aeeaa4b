"""Models of sentence-transformers and faster-whisper, on weights made here: nothing is fetched.

Run where the packages are: `pip install 'geneva-spark[udf-audio,udf-text-sentence-transformers]'`,
and `transformers`, which makes the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import Connection
from geneva.udfs.audio import WhisperChunkTranscriber
from geneva.udfs.embedding import sentence_transformer_udf
from support import column

pytestmark = [
    pytest.mark.slow,
    # torch and its kin are of many minds about their own interfaces.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "blue", "sky", "grey", "sea"]
DIMENSION = 8


@pytest.fixture(scope="session")
def sentence_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of one layer with random weights, and a vocabulary of ten words."""
    st = pytest.importorskip("sentence_transformers")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    bert, folder = tmp_path_factory.mktemp("bert"), tmp_path_factory.mktemp("sentences")
    (bert / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=DIMENSION,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(bert)
    transformers.BertTokenizer.from_pretrained(bert).save_pretrained(bert)
    made = st.SentenceTransformer(str(bert), device="cpu")  # of a BERT: the mean of its tokens
    made.max_seq_length = 16
    made.save(str(folder))
    return folder


@pytest.fixture(scope="session")
def whisper_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper of one layer, as faster-whisper reads it."""
    pytest.importorskip("faster_whisper")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    converters = pytest.importorskip("ctranslate2.converters")
    source, target = tmp_path_factory.mktemp("whisper"), tmp_path_factory.mktemp("ct2")
    ids = _save_tokenizer(source)
    config = transformers.WhisperConfig(
        vocab_size=len(ids),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    torch.manual_seed(7)
    model = transformers.WhisperForConditionalGeneration(config)
    _let_texts_end_soon(model, ids)
    model.generation_config.alignment_heads = [[0, 0]]
    model.generation_config.lang_to_id = {"<|en|>": ids["<|en|>"], "<|de|>": ids["<|de|>"]}
    model.save_pretrained(source)
    files = ["tokenizer.json", "preprocessor_config.json"]
    converters.TransformersConverter(str(source), copy_files=files).convert(str(target), force=True)
    return target


def _save_tokenizer(folder: Path) -> dict[str, int]:
    """Bytes, Whisper's own marks and its 1,501 times, as a tokenizer; return the ids."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    marks = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    marks += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    marks += ["<|nospeech|>", "<|notimestamps|>", *(f"<|{i * 0.02:.2f}|>" for i in range(1501))]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(marks)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>", additional_special_tokens=marks
    )
    fast.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    return dict(made.get_vocab())


def _let_texts_end_soon(model: Any, ids: dict[str, int]) -> None:
    """Set the decoder's weights so that the end is likely, from the fourth token on."""
    import torch

    decoder = model.model.decoder
    with torch.no_grad():
        for name, weights in decoder.named_parameters():
            if not name.endswith("layer_norm.weight"):
                weights.zero_()
        decoder.embed_positions.weight[:3, 0] = 100.0
        decoder.embed_positions.weight[3:, 1] = 100.0
        decoder.embed_tokens.weight[ids["<|0.00|>"], 0] = 10.0
        decoder.embed_tokens.weight[ids["<|endoftext|>"], 1] = 10.0
    model.tie_weights()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_fetched(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let no library look for weights elsewhere."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))


class TestSentenceTransformers:
    TEXTS = ("a blue sky", "the grey sea", "")

    def test_values_are_the_models(self, local_db: Connection, sentence_model: Path) -> None:
        from sentence_transformers import SentenceTransformer

        made = sentence_transformer_udf(str(sentence_model), normalize=False)
        assert made.data_type == pa.list_(pa.float32(), DIMENSION)
        table = local_db.create_table("t", pa.table({"text": [*self.TEXTS, None]}))
        table.add_columns({"vec": made, "unit": sentence_transformer_udf(str(sentence_model))})
        table.backfill("vec")
        table.backfill("unit")
        vectors, units = column(table, "vec"), column(table, "unit")
        assert vectors[-1] is units[-1] is None
        expected = SentenceTransformer(str(sentence_model)).encode(list(self.TEXTS))
        np.testing.assert_allclose(vectors[:-1], expected, rtol=1e-5)
        lengths = np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(units[:-1], expected / lengths, rtol=1e-5)

    @pytest.mark.spark
    def test_on_spark(self, sentence_model: Path, tmp_path: Path) -> None:
        import geneva

        db = geneva.connect(tmp_path / "db")
        table = db.create_table("t", pa.table({"text": list(self.TEXTS) * 20}))
        table.add_columns({"vec": sentence_transformer_udf(str(sentence_model), column="text")})
        assert table.backfill("vec").rows_computed == 60
        vectors = np.array(column(table, "vec"))
        np.testing.assert_allclose(vectors[:3], vectors[57:], rtol=1e-5)
        assert table.backfill("vec").rows_computed == 0, "the same model is the same version"

    def test_with_a_dimension_no_model_is_loaded(self) -> None:
        pytest.importorskip("sentence_transformers")
        made = sentence_transformer_udf("/no/such/model", dimension=3)
        assert made.data_type == pa.list_(pa.float32(), 3)


class TestWhisper:
    def samples(self, seconds: float) -> list[float]:
        times = np.arange(int(16_000 * seconds)) / 16_000
        return np.sin(times * 2 * np.pi * 440).astype(np.float32).tolist()

    def rows(self) -> pa.Table:
        kind = pa.list_(pa.float32())
        return pa.table({"samples": pa.array([self.samples(1), None, []], kind)})

    def check(self, table: Any) -> None:
        heard, *others = column(table, "said")
        assert isinstance(heard, str)
        assert others == [None, ""]
        assert table.schema.field("said").type == pa.large_string()

    def test_what_is_heard(self, local_db: Connection, whisper_model: Path) -> None:
        table = local_db.create_table("t", self.rows())
        table.add_columns({"said": WhisperChunkTranscriber(model_id=str(whisper_model))})
        table.backfill("said")
        self.check(table)

    @pytest.mark.spark
    def test_on_spark(self, whisper_model: Path, tmp_path: Path) -> None:
        import geneva

        table = geneva.connect(tmp_path / "db").create_table("t", self.rows())
        said = WhisperChunkTranscriber(model_id=str(whisper_model), language="en", device="cpu")
        table.add_columns({"said": said})
        table.backfill("said")
        self.check(table)

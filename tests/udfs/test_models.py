"""Models of sentence-transformers and faster-whisper, on weights made here: nothing is fetched.

Run where the packages are: `pip install ".[udf-audio,udf-text-sentence-transformers]"`.
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
from tiny_whisper import save_whisper

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
    """A Whisper of one layer that knows two words: "deep" and "high", by the tone that it hears."""
    pytest.importorskip("faster_whisper")
    return save_whisper(tmp_path_factory.mktemp("whisper"), low="deep", high="high")


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
    def samples(self, hertz: float, seconds: float = 1) -> list[float]:
        times = np.arange(int(16_000 * seconds)) / 16_000
        return np.sin(times * 2 * np.pi * hertz).astype(np.float32).tolist()

    def rows(self) -> pa.Table:
        heard = [self.samples(440), None, [], self.samples(5_000, 2.5), self.samples(300, 0.7)]
        return pa.table({"samples": pa.array(heard, pa.list_(pa.float32()))})

    def check(self, table: Any) -> None:
        assert column(table, "said") == ["deep", None, "", "high", "deep"]
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

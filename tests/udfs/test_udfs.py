"""The functions of geneva.udfs on real documents, images, models, a server; nothing is fetched."""

from __future__ import annotations

import inspect
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import geneva.udfs
from geneva import Connection
from geneva.errors import (
    CompatibilityWarning,
    MissingDependencyError,
    UDFExecutionError,
    UserInputError,
)
from geneva.udfs import gemini
from geneva.udfs.embedding import sentence_transformer_udf, static_embedding_udf
from geneva.udfs.gemini import gemini_embedding_udf, gemini_udf
from geneva.udfs.image import image_size, perceptual_hash, thumbnail_udf
from geneva.udfs.openai import Endpoint, openai_embedding_udf, openai_udf
from geneva.udfs.splitting import split_text
from geneva.udfs.text import split_text_udf, text_chunker
from support import column
from udfs_server import Provider, provider


def filled(db: Connection, rows: dict[str, Any], **columns: Any) -> geneva.Table:
    table = db.create_table("t", pa.table(rows))
    for name, made in columns.items():
        table.add_columns({name: made})
        table.backfill(name)
    return table


class TestText:
    @given(st.text(alphabet="ab .\n", max_size=200), st.integers(2, 40), st.integers(0, 1))
    def test_all_of_a_text_is_in_its_pieces(self, text: str, size: int, overlap: int) -> None:
        pieces = split_text(text, size, overlap)
        assert all(len(piece) <= size for piece in pieces)
        place = 0
        for piece in pieces:
            found = text.find(piece, max(0, place - overlap))
            assert 0 <= found <= place
            place = found + len(piece)
        assert not text[place:].strip()

    def test_cuts_are_where_people_would_make_them(self) -> None:
        text = "One sentence. Another one here. And a third."
        assert split_text(text, 32, 0) == ["One sentence. Another one here. ", "And a third."]
        assert split_text("abcdef", 4, 2) == ["abcd", "cdef"]
        with pytest.raises(ValueError, match="overlap"):
            split_text("x", 4, 4)

    def test_as_columns_and_rows(self, local_db: Connection) -> None:
        table = filled(
            local_db, {"text": ["aa bb cc", None]}, parts=split_text_udf(size=3, overlap=0)
        )
        assert column(table, "parts") == [["aa ", "bb ", "cc"], None]
        view = local_db.create_udtf_view("v", table, text_chunker(size=3, overlap=0))
        view.refresh()
        assert column(view, "chunk") == ["aa ", "bb ", "cc"]


class TestDocuments:
    @staticmethod
    def pdf(*pages: str) -> bytes:
        """A PDF file with one line of text on each page, written by hand."""
        objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
        kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
        objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>")
        objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
        for i, text in enumerate(pages):
            stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET"
            objects.append(
                "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 400 200] "
                f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * i} 0 R >>"
            )
            objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        out, offsets = b"%PDF-1.4\n", []
        for number, body in enumerate(objects, 1):
            offsets.append(len(out))
            out += f"{number} 0 obj\n{body}\nendobj\n".encode()
        table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
        count = len(objects) + 1
        tail = f"xref\n0 {count}\n0000000000 65535 f \n{table}"
        tail += f"trailer << /Size {count} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF"
        return out + tail.encode()

    def test_pages_and_chunks(self, local_db: Connection) -> None:
        pytest.importorskip("pypdf")
        files = pa.array([self.pdf("Hello world", "Second page"), None], pa.binary())
        table = filled(
            local_db,
            {"pdf_bytes": files},
            pages=geneva.udfs.extract_pages,
            chunks=geneva.udfs.chunk_pages,
        )
        assert column(table, "pages") == [
            [{"page_number": 0, "text": "Hello world"}, {"page_number": 1, "text": "Second page"}],
            None,
        ]
        assert column(table, "chunks")[0][1] == {
            "page_number": 1,
            "chunk_id": 0,
            "chunk": "Second page",
        }
        assert column(table, "chunks")[1] is None

    def test_a_long_page(self) -> None:
        text = "word " * 1000
        chunks = geneva.udfs.chunk_pages([{"page_number": 3, "text": text}])
        assert [c["chunk_id"] for c in chunks] == list(range(len(chunks)))
        assert all(len(c["chunk"]) <= 2048 for c in chunks)


class TestImages:
    @staticmethod
    def picture(size: tuple[int, int], shift: int = 0, **options: Any) -> bytes:
        image = pytest.importorskip("PIL.Image")
        xs, ys = np.meshgrid(np.arange(size[0]) / size[0], np.arange(size[1]) / size[1])
        grey = 127 + 100 * np.sin(6 * xs + shift) * np.cos(4 * ys + shift)
        target = io.BytesIO()
        image.fromarray(grey.astype(np.uint8)).convert("RGB").save(target, "JPEG", **options)
        return target.getvalue()

    def test_columns(self, local_db: Connection) -> None:
        images = pa.array([self.picture((400, 200)), None], pa.binary())
        table = filled(
            local_db,
            {"image": images},
            size=image_size,
            look=perceptual_hash,
            small=thumbnail_udf(width=100, height=100),
        )
        assert column(table, "size") == [{"width": 400, "height": 200}, None]
        small = column(table, "small")[0]
        assert image_size(small) == {"width": 100, "height": 50}
        assert column(table, "look")[1] is None

    def test_what_looks_alike_has_like_hashes(self) -> None:
        def distance(a: bytes, b: bytes) -> int:
            return ((perceptual_hash(a) ^ perceptual_hash(b)) % 2**64).bit_count()

        original = self.picture((400, 300))
        assert distance(original, self.picture((200, 150), quality=40)) <= 6
        assert distance(original, self.picture((400, 300), shift=2)) > 16

    def test_as_it_is_to_be_shown(self) -> None:
        exif = pytest.importorskip("PIL.Image").Exif()
        exif[0x0112] = 6  # turned by a quarter
        assert image_size(self.picture((40, 20), exif=exif)) == {"width": 20, "height": 40}


class TestEmbeddings:
    def test_a_static_model(self, local_db: Connection, tmp_path: Path) -> None:
        model2vec = pytest.importorskip("model2vec")
        tokenizers = pytest.importorskip("tokenizers")
        words = {"[UNK]": 0, "red": 1, "blue": 2}
        model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        vectors = np.array([[0, 0, 1], [2, 0, 0], [0, 4, 0]], np.float32)
        made = model2vec.StaticModel(vectors=vectors, tokenizer=tokenizer, normalize=False)
        made.save_pretrained(str(tmp_path / "model"))
        embed = static_embedding_udf(str(tmp_path / "model"))
        assert embed.data_type == pa.list_(pa.float32(), 3)
        table = filled(local_db, {"text": ["red", None, "blue"]}, v=embed)
        assert column(table, "v") == [[1.0, 0.0, 0.0], None, [0.0, 1.0, 0.0]]

    def test_what_is_published_is_by_position(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("A_KEY", "k")
        made = openai_embedding_udf("text", "m", 4, True, "A_KEY", "1", None)
        assert (made.version, made.data_type) == ("1", pa.list_(pa.float32(), 4))
        for call, names in (
            (sentence_transformer_udf, "model column normalize num_gpus trust_remote_code"),
            (gemini_embedding_udf, "column model task_type output_dimensionality normalize"),
        ):
            inspect.signature(call).bind(*names.split())

    def test_what_is_missing_is_said(self) -> None:
        if _installed("sentence_transformers"):
            assert sentence_transformer_udf(dimension=3).data_type == pa.list_(pa.float32(), 3)
        else:
            with pytest.raises(MissingDependencyError, match=r"\"\.\[udf-text-sentence"):
                sentence_transformer_udf(dimension=3)
        if _installed("faster_whisper"):
            assert geneva.udfs.WhisperChunkTranscriber.data_type == pa.large_string()
        else:
            bound = geneva.udfs.WhisperChunkTranscriber(model_id="tiny")
            assert bound.input_columns == ["samples"]
            with pytest.raises(MissingDependencyError, match=r"\"\.\[udf-audio\]"):
                bound([0.0])


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


class TestEndpoint:
    @pytest.fixture
    def server(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test-key")
        with provider() as made:
            yield made

    def test_embeddings(self, local_db: Connection, server: Provider) -> None:
        embed = openai_embedding_udf(
            base_url=server.url, output_dimensionality=4, normalize=True, texts_per_request=2
        )
        rows = {"text": ["a", "bb", None, "ccc"]}
        table = filled(local_db, rows, v=embed)
        assert column(table, "v") == [[1.0, 0.0, 0.0, 0.0]] * 2 + [None, [1.0, 0.0, 0.0, 0.0]]
        assert sorted(t for r in server.requests for t in r["input"]) == ["a", "bb", "ccc"]
        assert all(len(r["input"]) <= 2 and r["dimensions"] == 4 for r in server.requests)
        assert server.keys == {"Bearer sk-test-key"}
        assert openai_embedding_udf().data_type.list_size == 1536
        with pytest.raises(UserInputError, match="dimension"):
            openai_embedding_udf(model="mine")

    def test_chats(self, local_db: Connection, server: Provider) -> None:
        ask = openai_udf("text", "What is it?", "m", base_url=server.url)
        table = filled(local_db, {"text": ["x", None]}, said=ask)
        assert column(table, "said") == ["about What is it?\n\nx", None]
        look = openai_udf("b", "Look", "m", mime_type="image/png", base_url=server.url)
        assert look(b"abc") == "about data:image/png;base64,YWJj"

    def test_gemini(
        self, local_db: Connection, server: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GEMINI_API_KEY", "g-key")
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/another")
        ask = gemini_udf("text", "What is it?", base_url=server.url)
        assert (ask.name, ask("x")) == ("gemini", "about What is it?\n\nx")
        assert server.requests[0]["model"] == "gemini-2.5-flash"
        embed = gemini_embedding_udf("text", output_dimensionality=4, base_url=server.url)
        table = filled(local_db, {"text": ["a"]}, v=embed)
        assert len(column(table, "v")[0]) == 4
        assert server.keys == {"Bearer g-key"}
        assert gemini_embedding_udf("text").data_type.list_size == 3072
        assert gemini_udf("b", "Look", "m", "image/png").func.endpoint.base_url == gemini.BASE_URL
        with pytest.warns(CompatibilityWarning, match="RETRIEVAL_QUERY"):
            gemini_embedding_udf(task_type="RETRIEVAL_QUERY")

    def test_later_is_asked_again(self, server: Provider) -> None:
        server.refusals += [(429, {"Retry-After": "0.2"}), (503, {"Retry-After": "0"})]
        ask = openai_udf("text", "p", "m", base_url=server.url)
        begun = time.monotonic()
        assert ask("x") == "about p\n\nx"
        assert time.monotonic() - begun >= 0.2, "as long as the server says"
        assert len(server.requests) == 3

    def test_no_is_no(self, local_db: Connection, server: Provider) -> None:
        server.refusals += [(401, {})]
        ask = openai_udf("text", "p", "m", base_url=server.url)
        table = local_db.create_table("t", pa.table({"text": ["x"]}))
        table.add_columns({"said": ask})
        with pytest.raises(UDFExecutionError, match=r"401.*not now") as error:
            table.backfill("said")
        assert "sk-test-key" not in str(error.value)
        assert len(server.requests) == 1

    def test_a_server_that_stays_away(self) -> None:
        gone = Endpoint("http://127.0.0.1:9/v1", "k", timeout=1, max_attempts=2, wait=0.01)
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
            gone.post("/embeddings", {})

    def test_the_key(self, server: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
        first = openai_udf("text", "p", "m", base_url=server.url)
        monkeypatch.setenv("OTHER_KEY", "sk-other")
        second = openai_udf("text", "p", "m", base_url=server.url, api_key_env="OTHER_KEY")
        assert first.version == second.version, "another key computes nothing anew"
        assert "sk-test-key" not in repr(first.func) + repr(vars(first.func)["endpoint"])
        monkeypatch.delenv("OPENAI_API_KEY")
        with pytest.raises(UserInputError, match="OPENAI_API_KEY"):
            openai_udf("text", "p", "m")

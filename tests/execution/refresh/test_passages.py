"""Chunked views keep what was computed for a passage as long as the passage is there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lancedb.index import BTree

from geneva import Connection, Table, chunker
from geneva.errors import GenevaError, UserInputError
from geneva.execution.refresh import explode, layout
from geneva.storage.lance import lists
from geneva.view import MaterializedView
from support import Calls, Prototypes, counted, slow
from view_support import STABLE

WORDS = pa.schema([("word", pa.string()), ("place", pa.int64())])


@chunker(output_schema=pa.schema([("word", pa.string())]))
def each_word(text: str) -> Iterator[tuple[str]]:
    for word in text.split():
        yield (word,)


@chunker(output_schema=WORDS)
def numbered_words(text: str) -> Iterator[tuple[str, int]]:
    for place, word in enumerate(text.split()):
        yield word, place


def documents(db: Connection, *texts: str, name: str = "docs") -> Table:
    rows = {"id": range(len(texts)), "title": [f"t{i}" for i in range(len(texts))], "text": texts}
    data = pa.table({k: list(v) for k, v in rows.items()})
    return db.create_table(name, data, storage_options=STABLE)


def with_lengths(db: Connection, source: Table, calls: Calls, made: Any) -> MaterializedView:
    """A chunked view with a computed column of its own, filled."""
    query = source.query().select(["id", "title"])
    view = db.create_udtf_view("passages", query, made)
    view.refresh()
    length = counted(calls, lambda word: len(word), data_type=pa.int64())
    view.add_columns({"length": (length, ["word"])})
    view.backfill("length")
    calls.clear()
    return view


def three_documents(db: Connection, prototypes: Prototypes, made: Any) -> None:
    source = documents(db, "d e", "a b c", "f")
    with_lengths(db, source, prototypes.calls(), made)


def row_ids(view: Table) -> dict[int, tuple[int, dict[str, Any]]]:
    """Every row's address and values, by its stable id."""
    dataset = lance.dataset(view.ref.uri)
    rows = dataset.to_table(with_row_id=True, with_row_address=True).to_pylist()
    return {row.pop("_rowid"): (row.pop("_rowaddr"), row) for row in rows}


def contents(view: Table, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row[c] for c in columns) for row in view.to_arrow().to_pylist())


class TestWhatStays:
    def test_another_title_computes_nothing(self, local_db: Connection, calls: Calls) -> None:
        source = documents(local_db, "a b c", "d e", "f g a a")
        view = with_lengths(local_db, source, calls, each_word)
        more = counted(calls, lambda word: len(word) + 1, data_type=pa.int64())
        query = view.query().select(["title", "word"]).add_column({"n": (more, ["word"])})
        over = local_db.create_materialized_view("over", query)
        over.refresh()
        before = row_ids(view)
        calls.clear()
        source.update(where="id = 2", values={"title": "other"})
        view.refresh()
        view.backfill("length")
        over.refresh()
        assert calls.count == 0
        after = row_ids(view)
        assert {i: place for i, (place, _) in after.items()} == {
            i: place for i, (place, _) in before.items()
        }
        expected = [("other" if i == 2 else f"t{i}", w, 1) for i, w in _words(source)]
        assert contents(view, "title", "word", "length") == sorted(expected)
        assert contents(over, "title", "word", "n") == sorted((t, w, 2) for t, w, _ in expected)

    @pytest.mark.parametrize(
        ("made", "text", "computed"),
        [
            (each_word, "x a b c", ["x"]),
            (numbered_words, "x a b c", ["x"]),
            (each_word, "a x b c", ["x"]),
            (numbered_words, "c b a", []),
            (each_word, "a b", []),
            (numbered_words, "a b c a", ["a"]),
            (each_word, "", []),
            (numbered_words, "x y", ["x", "y"]),
            slow(numbered_words, "a x b c", ["x"]),
            slow(each_word, "c b a", []),
            slow(numbered_words, "a b", []),
            slow(each_word, "a b c a", ["a"]),
            slow(numbered_words, "", []),
            slow(each_word, "x y", ["x", "y"]),
        ],
    )
    def test_only_new_passages_are_computed(
        self, tmp_path: Path, prototypes: Prototypes, made: Any, text: str, computed: list[str]
    ) -> None:
        db = prototypes.copy(three_documents, tmp_path / "db", made)
        source, view, calls = db.open_table("docs"), db.open_table("passages"), prototypes.calls()
        before = row_ids(view)
        source.update(where="id = 1", values={"text": text})
        view.refresh()
        view.backfill("length")
        assert calls.taken() == computed
        words = [w for _, w in _words(source)]
        assert contents(view, "word", "length") == sorted((w, 1) for w in words)
        if made is numbered_words:
            numbers = enumerate(text.split())
            places = [*enumerate(["d", "e"]), *numbers, (0, "f")]
            assert contents(view, "word", "place") == sorted((w, p) for p, w in places)
        after = row_ids(view)
        kept = [i for i in before if i in after]
        assert len(kept) == len(after) - len(computed)
        assert all(before[i][0] == after[i][0] for i in kept)

    def test_a_function_of_what_changed_runs_for_just_that(
        self, local_db: Connection, calls: Calls
    ) -> None:
        source = documents(local_db, "a b", "c", "d e")
        view = with_lengths(local_db, source, calls, numbered_words)
        both = counted(calls, lambda title, word: f"{title} {word}", data_type=pa.string())
        view.add_columns({"both": (both, ["title", "word"])})
        view.backfill("both")
        calls.clear()
        source.update(where="id = 0", values={"title": "new"})
        view.refresh()
        view.backfill("both")
        view.backfill("length")
        assert calls.count == 2
        assert contents(view, "both") == [("new a",), ("new b",), ("t1 c",), ("t2 d",), ("t2 e",)]

    def test_in_tasks(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(explode, "_MAX_ROWS_HERE", 0)
        monkeypatch.setattr(explode, "_LISTS_PER_ITEM", 1)
        source = documents(local_db, "a b", "c", "d e")
        view = with_lengths(local_db, source, calls, numbered_words)
        source.update(where="id != 1", values={"title": "new", "text": "a d"})
        view.refresh()
        view.backfill("length")
        assert calls.taken() == ["a", "d"]
        expected = [("new", "a", 0), ("new", "a", 0), ("new", "d", 1), ("new", "d", 1)]
        assert contents(view, "title", "word", "place") == [*expected, ("t1", "c", 0)]

    def test_without_the_version_that_it_was_laid_out_from(
        self, local_db: Connection, calls: Calls
    ) -> None:
        """What is there is compared with what should be, when nobody knows what changed."""
        source = documents(local_db, "a b", "c", "d e")
        view = with_lengths(local_db, source, calls, each_word)
        source.update(where="id = 0", values={"text": "a x", "title": "new"})
        source.delete("id = 1")
        inner = lance.dataset(f"{view.ref.uri}/_chunks")
        inner.update_config({"k": "v"})
        lance.dataset(f"{view.ref.uri}/_chunks").cleanup_old_versions(older_than=timedelta(0))
        view.refresh()
        view.backfill("length")
        assert calls.taken() == ["x"]
        expected = [("new", "a", 1), ("new", "x", 1), ("t2", "d", 1), ("t2", "e", 1)]
        assert contents(view, "title", "word", "length") == expected

    def test_nothing_to_do_is_no_commit_of_rows(self, local_db: Connection, calls: Calls) -> None:
        """A list that is computed again and is the same changes nothing."""
        source = documents(local_db, "a b", "c")
        view = with_lengths(local_db, source, calls, each_word)
        before = row_ids(view)
        source.update(where="id = 0", values={"text": "a  b"})
        view.refresh()
        assert row_ids(view) == before

    @pytest.mark.parametrize("kind", ["struct", "dictionary", slow("list"), slow("vector")])
    def test_carried_columns_of_any_type(
        self, local_db: Connection, calls: Calls, kind: str
    ) -> None:
        values = {
            "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "z"}]),
            "list": pa.array([[1, 2], [], None]),
            "dictionary": pa.array(["x", None, "x"]).dictionary_encode(),
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float32(), 2)),
        }[kind]
        data = pa.table({"id": [0, 1, 2], "text": ["a b", "c d", "e"], "title": values})
        source = local_db.create_table("docs", data, storage_options=STABLE)
        view = with_lengths(local_db, source, calls, each_word)
        swapped = pa.table({"id": [0, 2], "title": values.take(pa.array([2, 0]))})
        lance.dataset(source.ref.uri).merge_insert("id").when_matched_update_all().execute(
            pa.table({"id": [0, 2], "text": ["a b", "e"], "title": swapped["title"]})
        )
        source.checkout_latest()
        before = row_ids(view)
        view.refresh()
        view.backfill("length")
        assert calls.count == 0
        assert row_ids(view).keys() == before.keys()
        titles = {row["id"]: row["title"] for row in source.to_arrow().to_pylist()}
        rows = view.to_arrow().to_pylist()
        assert [row["title"] for row in rows] == [titles[row["id"]] for row in rows]
        lance.dataset(view.ref.uri).validate()


def _words(source: Table) -> list[tuple[int, str]]:
    rows = source.to_arrow().to_pylist()
    return [(row["id"], word) for row in rows for word in row["text"].split()]


class TestHistories:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(8))
    def test_any_history(
        self, local_db: Connection, calls: Calls, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Random edits, compactions and indexes: values are right, and calls the fewest."""
        rng = random.Random(seed)
        monkeypatch.setattr(lists, "_BATCH_BYTES", rng.choice([1, 64, 1 << 20]))
        source = documents(local_db, *(_text(rng) for _ in range(4)))
        view = with_lengths(local_db, source, calls, rng.choice([each_word, numbered_words]))
        over = local_db.create_materialized_view("over", view.query().select(["title", "word"]))
        over.refresh()
        view.create_index("word", config=BTree())
        view.create_index("title", config=BTree())
        known = _of_documents(view)
        for _ in range(8):
            _change(rng, source)
            if rng.random() < 0.3:
                lance.dataset(view.ref.uri).optimize.compact_files()
            if rng.random() < 0.7:
                view.refresh(max_rows_per_fragment=rng.choice([None, 3]))
                view.backfill("length")
                wanted = Counter(_titled(source))
                assert Counter(contents(view, "id", "title", "word")) == wanted
                new = _of_documents(view) - known
                assert calls.count == sum(new.values())
                known = _of_documents(view)
                calls.clear()
                for word in {word for _, _, word in wanted}:
                    expected = sum(n for (_, _, w), n in wanted.items() if w == word)
                    assert view.count_rows(f"word = '{word}'") == expected
                for title in {title for _, title, _ in wanted}:
                    expected = sum(n for (_, t, _), n in wanted.items() if t == title)
                    assert view.count_rows(f"title = '{title}'") == expected
            if rng.random() < 0.5 and view.plan_refresh().is_empty:
                over.refresh()
                assert Counter(contents(over, "title", "word")) == Counter(
                    contents(view, "title", "word")
                )
        lance.dataset(view.ref.uri).validate()


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices("abcd", k=rng.randrange(5)))


def _change(rng: random.Random, source: Table) -> None:
    ids = source.to_arrow()["id"].to_pylist()
    chosen = rng.choice(ids) if ids else 0
    match rng.randrange(5):
        case 0:
            source.update(where=f"id = {chosen}", values={"title": f"T{rng.randrange(100)}"})
        case 1 | 2:
            source.update(where=f"id = {chosen}", values={"text": _text(rng)})
        case 3:
            source.delete(f"id = {chosen}")
        case _:
            # Never an id again: another document of the same id would be a new one.
            source.add([{"id": rng.getrandbits(40), "title": "new", "text": _text(rng)}])


def _titled(source: Table) -> list[tuple[int, str, str]]:
    rows = source.to_arrow().to_pylist()
    return [(r["id"], r["title"], word) for r in rows for word in r["text"].split()]


def _of_documents(view: Table) -> Counter[tuple[int, str]]:
    return Counter((row["id"], row["word"]) for row in view.to_arrow().to_pylist())


class TestAnotherChunker:
    def test_rows_change_where_lists_do(self, local_db: Connection, calls: Calls) -> None:
        source = documents(local_db, "a b", "C d", "e")
        view = with_lengths(local_db, source, calls, each_word)
        before = row_ids(view)

        @chunker(output_schema=pa.schema([("word", pa.string())]))
        def small(text: str) -> Any:
            return [(word.lower(),) for word in text.split()]

        view.alter_columns({"path": "each_word", "udf": small})
        assert view.plan_refresh().rows_to_run == 3
        assert view.refresh().rows_computed == 3
        view.backfill("length")
        assert calls.taken() == ["c"]
        assert contents(view, "word", "length") == [(w, 1) for w in "abcde"]
        assert len(row_ids(view).keys() & before.keys()) == 4
        assert view.plan_refresh().is_empty
        source.add([{"id": 9, "title": "t9", "text": "X"}])
        view.refresh()
        assert ("x",) in contents(view, "word")

    def test_fed_from_another_column(self, local_db: Connection) -> None:
        source = documents(local_db, "a b", "c")
        view = local_db.create_udtf_view("v", source.query().select(["id"]), each_word)
        view.refresh()
        view.alter_columns({"path": "each_word", "udf": (each_word, ["title"])})
        view.refresh()
        assert contents(view, "word") == [("t0",), ("t1",)]
        view.alter_columns({"path": "each_word", "udf": each_word, "input_columns": ["text"]})
        view.refresh()
        assert contents(view, "word") == [("a",), ("b",), ("c",)]

    def test_what_does_not_fit_is_refused(self, local_db: Connection, calls: Calls) -> None:
        source = documents(local_db, "a b", "c")
        view = local_db.create_udtf_view("v", source.query().select(["id"]), each_word)
        view.refresh()
        for alteration, message in (
            ({"path": "each_word", "udf": numbered_words}, "yields word: string, place: int64"),
            ({"path": "word", "udf": each_word}, "Its chunker is 'each_word'"),
            (
                {"path": "word", "udf": counted(calls, len, data_type=pa.string())},
                "another chunker",
            ),
        ):
            with pytest.raises(GenevaError, match=message):
                view.alter_columns(alteration)
        plain = local_db.create_materialized_view("p", source.query().select(["id"]))
        with pytest.raises(UserInputError, match="not the chunker"):
            plain.alter_columns({"path": "id", "udf": each_word})
        assert view.plan_refresh().is_empty


class TestWideRows:
    @pytest.mark.slow
    @pytest.mark.parametrize("chunks", [1, 40])
    def test_what_is_repeated_is_written_by_bytes(
        self, local_db: Connection, monkeypatch: pytest.MonkeyPatch, chunks: int
    ) -> None:
        """A wide column that each chunk repeats is as many times as large as the source."""

        @chunker(output_schema=pa.schema([("n", pa.int64())]))
        def parts(id: int) -> Any:
            return [(n,) for n in range(chunks if id != 7 else 2_000)]

        body = ["x" * (50_000 if i != 7 else 10) + str(i) for i in range(40)]
        data = pa.table({"id": range(40), "body": body})
        source = local_db.create_table("docs", data, storage_options=STABLE)
        query = source.query().select(["id", "body"]).add_column(parts)
        monkeypatch.setattr(lists, "_BATCH_BYTES", 1 << 20)
        written: list[int] = []
        real = layout.write_chunk_rows

        def measuring(outer: Any, schema: Any, batches: Any, *args: Any) -> str:
            kept = []
            for batch in batches:
                written.append(batch.nbytes)
                kept.append(batch)
            return real(outer, schema, iter(kept), *args)

        monkeypatch.setattr(layout, "write_chunk_rows", measuring)
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        assert len(view) == 39 * chunks + 2_000
        assert max(written) < (1 << 20) + 100_000
        found = view.to_arrow()
        assert all(row["body"] == body[row["id"]] for row in found.to_pylist())
        evaluated = list(query.to_batches())
        assert max(batch.nbytes for batch in evaluated) < (1 << 20) + 100_000
        assert pa.Table.from_batches(evaluated).sort_by("id").equals(found.sort_by("id"))

    def test_another_value_of_a_wide_column(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = documents(local_db, "a b", "c", "d e")
        view = with_lengths(local_db, source, calls, each_word)
        source.update(where="id != 1", values={"title": "w" * 1_000_000})
        view.refresh()
        titles = [len(title) for title in view.to_arrow()["title"].to_pylist()]
        assert titles == [1_000_000, 1_000_000, 2, 1_000_000, 1_000_000]


class TestRivals:
    @pytest.mark.parametrize("rival", ["backfill", "compaction", "delete"])
    def test_others_write_to_the_view_meanwhile(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch, rival: str
    ) -> None:
        source = documents(local_db, "a b", "c", "d e", "f")
        view = with_lengths(local_db, source, calls, each_word)
        source.add([{"id": 4, "title": "t4", "text": "g"}])
        view.refresh()
        source.update(where="id = 0", values={"title": "new", "text": "b x"})
        source.delete("id = 1")
        real, turns = explode.commit_chunks, iter([True])

        def racing(*args: Any) -> None:
            if next(turns, False):
                dataset = lance.dataset(view.ref.uri)
                match rival:
                    case "backfill":
                        local_db.open_table("passages").backfill("length")
                    case "compaction":
                        dataset.optimize.compact_files()
                    case _:
                        dataset.delete("word = 'b'")
            real(*args)

        monkeypatch.setattr(explode, "commit_chunks", racing)
        view.refresh()
        view.backfill("length")
        expected = [("new", "b"), ("new", "x"), ("t2", "d"), ("t2", "e"), ("t3", "f"), ("t4", "g")]
        assert contents(view, "title", "word", "length") == [(*row, 1) for row in expected]
        assert calls.taken() == sorted([*("b" if rival == "delete" else ""), "g", "x"])
        lance.dataset(view.ref.uri).validate()

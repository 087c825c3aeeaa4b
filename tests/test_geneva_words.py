"""Words of Geneva on Ray: what a program for it may write runs here, and is told what it means."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import pickle
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import attrs
import lancedb
import numpy as np
import pyarrow as pa
import pytest
import tenacity

import geneva
from geneva import UDF, Connection, JobStatus, Retry, Skip, Table, chunker, udf
from geneva.cluster import GenevaCluster, K8sConfigMethod
from geneva.cluster.builder import KubeRayClusterBuilder
from geneva.compatibility import VARIABLES
from geneva.contexts import Context, ExitMode
from geneva.debug.error_store import ErrorHandlingConfig, ExceptionMatcher, UDFRetryConfig
from geneva.errors import (
    ColumnNotFoundError,
    CompatibilityWarning,
    FatalWorkerCrashError,
    FatalWorkerOOMError,
    FatalWorkerTransientError,
    InvalidUDFError,
    JobNotFoundError,
    JobTimeoutError,
    QueryTimeoutError,
    SparkUnavailableError,
    UDFError,
    UDFExecutionError,
    UserInputError,
    WorkerDied,
    WorkerLostError,
)
from geneva.manifest import GenevaManifest
from geneva.manifest.builder import PipManifestBuilder
from geneva.udf.policy import policy_of, skip_on_error
from support import Calls, column, tripled


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


@pytest.fixture
def table(local_db: Connection) -> Table:
    return local_db.create_table("t", rows(0, 1, 2))


class Word(NamedTuple):
    word: str
    place: int


@chunker
def letters(text: str) -> Iterator[Word]:
    for i, letter in enumerate(text):
        yield Word(letter, i)


class TestUdfs:
    def test_fields_with_dots_in_their_names(self, local_db: Connection, calls: Calls) -> None:
        rows = [{"id": i, "st": {"x.y": i, "in": {"p.q": i}}} for i in range(3)]
        table = local_db.create_table("dots", rows)

        @udf
        def plus(a: int, b: int) -> int:
            calls.note([a])
            return a + b

        inputs = ["st.`x.y`", "`st`.`in`.p.q"]
        with pytest.raises(ColumnNotFoundError):
            table.add_columns({"c": (plus, inputs)})
        inputs[1] = "`st`.`in`.`p.q`"
        table.add_columns({"c": (plus, inputs)})
        table.backfill("c")
        assert (column(table, "c"), calls.taken()) == ([0, 2, 4], [0, 1, 2])
        assert table.computed_columns()["c"].inputs == ("st.x.y", "st.in.p.q")
        assert len(table.preview((plus, inputs), n=1).to_arrow()) == 1
        calls.clear()
        table.update(where="id = 2", values={"st": {"x.y": 5, "in": {"p.q": 1}}})
        table.backfill("c")
        assert (sorted(column(table, "c")), calls.taken()) == ([0, 2, 6], [5])
        query = table.search(None).where("st.`x.y` > 0").select({"d": (plus, inputs)})
        view = query.create_materialized_view("v")
        view.refresh()
        assert sorted(column(view, "d")) == [2, 6] == sorted(r["d"] for r in query.to_list())

    def test_a_pair_feeds_parameters_with_defaults(
        self, local_db: Connection, table: Table
    ) -> None:
        @udf
        def scale(x: int, k: int = 10) -> int:
            return x * k

        table.add_columns({"a": scale.with_inputs(["id"]), "b": (scale, ["id", "id"])})
        table.backfill("a")
        table.backfill("b")
        assert (column(table, "a"), column(table, "b")) == ([0, 10, 20], [0, 1, 4])
        assert table.backfill("b").rows_computed == 0
        table.alter_columns({"path": "a", "udf": scale, "input_columns": ["id", "b"]})
        table.backfill("a")
        assert column(table, "a") == [0, 1, 8]
        query = table.search(None).select({"c": (scale, ["id", "id"])})
        view = query.create_materialized_view("v")
        view.refresh()
        assert query.to_list() == view.to_arrow().to_pylist() == [{"c": 0}, {"c": 1}, {"c": 4}]

    def test_the_words_of_the_decorator(self, local_db: Connection, table: Table) -> None:
        manifest = GenevaManifest.create_pip("m").pip(["pyarrow"]).build()
        with pytest.warns(CompatibilityWarning, match="geneva refresh DB") as told:
            f = udf(
                lambda id: id,
                data_type=pa.int64(),
                manifest=manifest,
                cuda=True,
                auto_backfill=True,
            )
        assert told[0].filename == __file__
        assert (f.manifest, f.num_gpus, f.auto_backfill) == (manifest, 1, True)
        table.add_columns({"x": f})
        stored = table.computed_columns()["x"]
        assert stored.auto_backfill is True
        assert json.loads(stored.manifest or "")["pip"] == ["pyarrow"]
        assert udf(lambda id: id, data_type=pa.int64(), cuda=True, num_gpus=0.5).num_gpus == 0.5

    def test_what_is_no_manifest_is_refused(self, calls: Calls) -> None:
        """Its variables would be set nowhere, without a word."""
        unfinished = GenevaManifest.create_pip("m").env_vars({"A": "1"})
        f = tripled(calls, manifest=unfinished.build())
        for wrong, what in ((unfinished, r"PipManifestBuilder: call its build\(\)"), ("m", "str")):
            for declare in (
                lambda wrong=wrong: tripled(calls, manifest=wrong),
                lambda wrong=wrong: attrs.evolve(f, manifest=wrong),
                lambda wrong=wrong: chunker(letters.func, manifest=wrong),
                lambda wrong=wrong: geneva.udtf(
                    lambda source: [], output_schema=TEXT, manifest=wrong
                ),
            ):
                with pytest.raises(InvalidUDFError, match=f"must be a GenevaManifest, not {what}"):
                    declare()

    def test_what_can_be_read_of_one(self, calls: Calls) -> None:
        f = tripled(calls, on_error=skip_on_error())
        assert f.input_columns == ["id"]
        assert f.error_handling is f.on_error
        assert f.func(3) == 9
        assert f.with_inputs(["other"]).input_columns == ["other"]

    def test_attrs_evolve(self, local_db: Connection, table: Table, calls: Calls) -> None:
        f = tripled(calls)
        g = attrs.evolve(f, version="2", input_columns=["other"], num_cpus=2, memory=10**9)
        assert (g.version, g.input_columns, g.num_cpus) == ("2", ["other"], 2)
        assert (f.version, f.input_columns, f.name) != ("2", ["other"], "")
        assert attrs.evolve(f).version == f.version
        assert attrs.evolve(f, error_handling=skip_on_error()).on_error == skip_on_error()
        assert attrs.fields(UDF).version.alias == "version"
        table.add_columns({"x": attrs.evolve(f, version="1")})
        table.backfill("x")
        table.alter_columns({"path": "x", "udf": attrs.evolve(f, version="2")})
        assert table.backfill("x").rows_computed == 3
        assert calls.taken() == [0, 0, 1, 1, 2, 2]

    def test_a_record_batch_has_all_columns(self, local_db: Connection) -> None:
        @udf(data_type=pa.int64())
        def total(batch: pa.RecordBatch) -> pa.Array:
            assert batch.schema.names == ["a", "b"]
            return pa.compute.add(batch["a"], batch["b"])

        table = local_db.create_table("ab", pa.table({"a": [1, 2], "b": [10, 20]}))
        table.add_columns({"total": total})
        table.backfill("total")
        assert column(table, "total") == [11, 22]
        table.update(where="a = 1", values={"b": 11})
        assert table.backfill("total").rows_computed >= 1
        assert sorted(column(table, "total")) == [12, 22]
        table.alter_columns({"path": "total", "udf": total})
        view = local_db.create_materialized_view(
            "v",
            table.search(None)
            .select(["a", "b"])
            .add_column({"sum": total.with_inputs(["a", "b"])}),
        )
        view.refresh()
        assert sorted(column(view, "sum")) == [12, 22]

    def test_variables_of_a_manifest_are_there(self, table: Table) -> None:
        os.environ.pop("GENEVA_WORDS_TEST", None)
        manifest = GenevaManifest.create_pip("m").env_vars({"GENEVA_WORDS_TEST": "7"}).build()

        @udf(data_type=pa.string(), manifest=manifest)
        def seen(id: int) -> str:
            return os.environ["GENEVA_WORDS_TEST"]

        table.add_columns({"x": seen})
        table.backfill("x")
        assert column(table, "x") == ["7"] * 3
        del os.environ["GENEVA_WORDS_TEST"]

    @pytest.mark.parametrize(
        ("annotation", "seen"),
        [
            (list[float], "list"),
            (list[float] | None, "list"),
            (Sequence[float], "list"),
            (tuple[float, float], "tuple"),
            (np.ndarray, "ndarray"),
            (Any, "ndarray"),
        ],
    )
    def test_a_list_is_what_it_is_annotated(
        self, local_db: Connection, annotation: Any, seen: str
    ) -> None:
        def look(v: Any, s: Any) -> str:
            return f"{type(v).__name__} {type(s['n']).__name__}"

        look.__annotations__.update(v=annotation, s=dict[str, Any] if seen == "list" else Any)
        vectors = pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))
        table = local_db.create_table("v", pa.table({"v": vectors, "s": [{"n": [1]}]}))
        table.add_columns({"x": udf(look, data_type=pa.string())})
        table.backfill("x")
        inner = "list" if seen == "list" else "ndarray"
        assert column(table, "x") == [f"{seen} {inner}"]

    def test_what_the_other_refuses(self, table: Table) -> None:
        @udf(data_type=pa.int64(), on_error=[Retry(OSError, backoff="fixed"), Retry(), Skip()])
        def odd(batch: pa.RecordBatch) -> pa.Array:
            return pa.compute.divide(6, batch["id"])

        rules = [Retry(OSError, backoff="fixed"), Skip()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table.add_columns({"x": attrs.evolve(odd, on_error=policy_of(rules))})
        table.backfill("x")
        assert column(table, "x") == [None, 6, 3], "rows of a batch are skipped one by one"
        with pytest.raises(TypeError, match="'retries'"):
            udf(lambda id: id, data_type=pa.int64(), retries=3)  # type: ignore[call-overload]

    def test_messages_name_columns_that_people_know(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        for call in (
            lambda: table.backfill("y"),
            lambda: table.drop_columns(["y"]),
            lambda: table.add_columns({"z": udf(lambda y: y, data_type=pa.int64())}),
            lambda: table.alter_columns({"path": "y", "udf": tripled(calls)}),
        ):
            with pytest.raises(ColumnNotFoundError, match=r"\b'?id'?, '?x\b"):
                call()

    def test_what_a_manifest_names_and_is_not_installed(
        self, local_db: Connection, table: Table, calls: Calls
    ) -> None:
        manifest = GenevaManifest.create_pip("m").pip(["no-such-package-x==1", "pyarrow"]).build()
        f = tripled(calls, manifest=manifest)
        chunked = chunker(letters.func, manifest=manifest, input_columns=["name"])
        counted = geneva.udtf(lambda source: [], output_schema=TEXT, manifest=manifest)
        query = table.search(None).select({"y": f, "name": "cast(id AS string)"})
        for declare in (
            lambda: table.add_columns({"x": f, "y": f}),
            lambda: table.alter_columns({"path": "x", "udf": f}),
            lambda: local_db.create_materialized_view("v", query),
            lambda: local_db.create_udtf_view("w", table.search(None), counted),
            lambda: local_db.create_udtf_view("c", local_db.open_table("v").search(None), chunked),
            lambda: local_db.open_table("v").alter_columns({"path": "y", "udf": f}),
            lambda: local_db.open_table("c").alter_columns({"path": "letters", "udf": chunked}),
        ):
            with pytest.warns(CompatibilityWarning, match="no-such-package-x==1") as told:
                declare()
            assert [each.filename for each in told] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table.backfill("x")

    def test_alterations_in_a_list(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        other = {"path": "x", "udf": udf(lambda id: -id, data_type=pa.int64())}
        table.alter_columns([other, {"path": "id", "rename": "key"}])
        table.backfill("x")
        assert (column(table, "x"), table.schema.names) == ([0, -1, -2], ["key", "x"])
        with pytest.raises(UserInputError, match="alter_columns takes"):
            table.alter_columns("x")


TEXT = pa.schema([("text", pa.string())])


class TestChunkers:
    def test_what_can_be_read_of_one(self) -> None:
        assert letters.input_columns == ["text"]
        assert [row.word for row in letters.func("ab")] == ["a", "b"]
        assert (letters.batch, letters.manifest) == (False, None)

    def test_attrs_evolve(self, local_db: Connection) -> None:
        source = local_db.create_table("s", pa.table({"id": [1], "body": ["ab"]}))
        other = attrs.evolve(letters, version="2", input_columns=["body"], num_cpus=2, memory=10)
        assert (other.version, other.input_columns, other.num_cpus) == ("2", ["body"], 2)
        assert (other.memory, other.num_gpus, letters.input_columns) == (10, None, ["text"])
        view = local_db.create_udtf_view("v", source, other)
        view.refresh()
        assert column(view, "word") == ["a", "b"]
        assert attrs.evolve(letters).version == letters.version
        fast = attrs.evolve(letters, version="3", num_gpus=1)
        found = attrs.evolve(other, udf=fast.udf, memory=20)
        assert (found.version, found.num_gpus, found.num_cpus, found.memory) == ("3", 1, None, 20)
        assert found.input_columns == ["text"]
        names = [field.name for field in attrs.fields(geneva.Chunker)]
        assert {"udf", "version", "input_columns", "num_gpus", "batch"} <= set(names)
        assert not [name for name in names if name.startswith("_")]
        assert attrs.asdict(other, recurse=False)["num_cpus"] == 2
        counted = geneva.udtf(lambda q: [], output_schema=TEXT, input_columns=["id"])
        again = attrs.evolve(counted, version="3", partition_by=("id",))
        assert (again.version, again.partition_by, again.input_columns) == ("3", ("id",), ["id"])

    def test_they_look_like_their_functions(self) -> None:
        @chunker
        def pieces(text: str) -> Iterator[Word]:
            """Cut a text."""
            yield Word(text, 0)

        @geneva.udtf(output_schema=TEXT)
        class Whole:
            """All of it."""

            def __call__(self, source: Any) -> Iterator[pa.Table]:
                yield source.to_arrow()

        assert str(inspect.signature(pieces)).startswith("(text: ")
        assert (inspect.getdoc(pieces), pieces.__name__) == ("Cut a text.", "pieces")
        assert inspect.getdoc(Whole) == inspect.getdoc(Whole()) == "All of it."
        again = pickle.loads(pickle.dumps(pieces))
        assert again("ab") == [("ab", 0)]
        assert (again.version, again.output_schema) == (pieces.version, pieces.output_schema)

    def test_inputs_can_be_left_out(self, local_db: Connection) -> None:
        source = local_db.create_table("s", pa.table({"id": [1, 2], "text": ["ab", "c"]}))
        lean = chunker(letters.func, inherit_input_columns=False)
        view = local_db.create_udtf_view("v", source.search(None).select(["id", "text"]), udtf=lean)
        view.refresh()
        assert view.schema.names == ["id", "word", "place"]
        assert column(view, "word") == ["a", "b", "c"]
        source.add(pa.table({"id": [3], "text": ["d"]}))
        view.refresh()
        assert column(view, "id") == [1, 1, 2, 3]
        whole = local_db.create_udtf_view("w", source=source.search().select(["id"]), udtf=letters)
        whole.refresh()
        assert column(whole, "word") == ["a", "b", "c", "d"], "inputs need not be selected"

    def test_batches(self, local_db: Connection, calls: Calls) -> None:
        schema = pa.schema([("word", pa.string())])

        @chunker(batch=True, output_schema=schema, input_columns=["text"])
        def words(batch: pa.RecordBatch) -> pa.RecordBatch:
            found = [w for text in batch["text"].to_pylist() for w in text.split()]
            return pa.record_batch({"word": found})

        assert words.batch
        source = local_db.create_table("s", pa.table({"id": [1, 2], "text": ["a b", "c"]}))
        view = local_db.create_udtf_view("v", source.search(None).select(["id"]), words)
        view.refresh()
        assert view.to_arrow().to_pydict() == {"id": [1, 1, 2], "word": ["a", "b", "c"]}
        with pytest.raises(InvalidUDFError, match="output_schema"):
            chunker(batch=True)

    def test_which_inputs_are_kept(self, local_db: Connection) -> None:
        cases: list[tuple[bool | None, Any, list[str]]] = [
            (None, None, ["id"]),
            (None, ["id", "text"], ["id", "text"]),
            (None, {"id": "id", "body": "text"}, ["id", "body"]),
            (None, ["id"], ["id"]),
            (True, None, ["id", "text"]),
            (True, ["id"], ["id", "text"]),
            (True, {"body": "text"}, ["body"]),
            (False, None, ["id"]),
            (False, ["id", "text"], ["id"]),
            (False, {"id": "id", "body": "text"}, ["id"]),
        ]
        source = local_db.create_table("s", pa.table({"id": [1, 2], "text": ["ab", "c"]}))
        for number, (inherit, select, kept) in enumerate(cases):
            query = source.query() if select is None else source.query().select(select)
            made = chunker(letters.func, inherit_input_columns=inherit)
            view = local_db.create_udtf_view(f"v{number}", query, made)
            assert view.schema.names == [*kept, "word", "place"], (inherit, select)
            if number % 3 == 0:  # each way once
                view.refresh()
                assert column(view, "word") == ["a", "b", "c"]

    def test_inputs_have_the_names_of_the_query(self, local_db: Connection) -> None:
        data = pa.table({"id": [1], "s": ["ab"], "text": ["xyz"]})
        source = local_db.create_table("s", data)
        swapped = {"id": "id", "text": "s", "s": "text"}
        names: dict[bool | None, list[str]] = {
            None: ["id", "text", "s"],
            True: ["id", "text", "s"],
            False: ["id", "s"],
        }
        for inherit, kept in names.items():
            made = chunker(letters.func, inherit_input_columns=inherit)
            view = local_db.create_udtf_view(f"v{inherit}", source.query().select(swapped), made)
            view.refresh()
            assert view.schema.names == [*kept, "word", "place"]
            assert column(view, "word") == ["a", "b"]
        added = source.query().select(swapped).add_column(letters)
        assert [row["word"] for row in added.to_list()] == ["a", "b"]
        makers: list[Any] = ["upper(s)", (udf(lambda s: s, data_type=pa.string()), ["s"])]
        for maker in makers:
            query = source.query().select({"id": "id", "text": maker})
            with pytest.raises(InvalidUDFError, match=r"'letters' reads column 'text', which the"):
                local_db.create_udtf_view("w", query, letters)

    def test_a_chunk_may_be_called_like_its_input(self, local_db: Connection) -> None:
        source = local_db.create_table("s", pa.table({"id": [1], "text": ["a b"]}))
        made = chunker(lambda text: [(t,) for t in text.split()], output_schema=TEXT)
        view = local_db.create_udtf_view("v", source, made)
        view.refresh()
        assert view.to_arrow().to_pydict() == {"id": [1, 1], "text": ["a", "b"]}

    def test_rows_name_their_parents(self, local_db: Connection, calls: Calls) -> None:
        @chunker(batch=True, output_schema=TEXT, input_columns=["body"])
        def words(batch: pa.RecordBatch) -> pa.RecordBatch:
            calls.note(batch["body"].to_pylist())
            texts = enumerate(batch["body"].to_pylist())
            found = [(i, w) for i, text in texts for w in (text or "").split()][::-1]
            rows, made = [i for i, _ in found], [w for _, w in found]
            return pa.record_batch({"text": made, "parent_row": pa.array(rows, pa.int32())})

        texts = ["a b", "", None, "c", *(f"x{i} y" for i in range(996))]
        data = pa.table({"id": range(1_000), "body": texts})
        source = local_db.create_table("s", data)
        view = local_db.create_udtf_view("v", source, words)
        view.refresh()
        expected = [(i, w) for i, t in enumerate(texts) for w in reversed((t or "").split())]
        table = view.to_arrow()
        assert [*zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)] == expected
        assert sum(calls.batches) == 1_000, "no row is computed twice"
        assert calls.batches[0] == 1, "the first call shows whether rows name their parents"
        assert calls.count < 100

    @pytest.mark.parametrize(
        ("parents", "why"),
        [
            ([0, 99], "numbers from 0 to 99"),
            ([-1, 0], "numbers from -1 to 0"),
            ([None, 0], "1 NULLs"),
            ([0.5, 0.0], "it is double"),
        ],
    )
    def test_parents_that_are_none(
        self, local_db: Connection, parents: list[Any], why: str
    ) -> None:
        made = chunker(
            lambda batch: pa.record_batch({"text": ["x", "y"], "parent_row": parents}),
            batch=True,
            output_schema=TEXT,
            input_columns=["id"],
        )
        source = local_db.create_table("s", pa.table({"id": [1, 2]}))
        with pytest.raises(UDFError, match=why):
            local_db.create_udtf_view("v", source, made).refresh()

    def test_a_parent_is_no_column(self) -> None:
        schema = pa.schema([("parent_row", pa.int64())])
        with pytest.raises(InvalidUDFError, match="which row of the batch"):
            chunker(lambda batch: batch, batch=True, output_schema=schema)

    def test_older_names(self, local_db: Connection) -> None:
        assert geneva.scalar_udtf is chunker
        assert geneva.batch_udtf is geneva.udtf
        source = local_db.create_table("s", pa.table({"id": [1], "text": ["ab"]}))
        made = local_db.create_scalar_udtf_view
        for view in (
            made("v", source=source, udtf=letters),
            made("w", source=source, scalar_udtf=letters),
            made("x", source, letters),
        ):
            view.refresh()
            assert column(view, "word") == ["a", "b"]
        with pytest.raises(UserInputError, match="needs one scalar_udtf="):
            made("y", source)

    def test_messages_name_the_chunker(self) -> None:
        with pytest.raises(TypeError, match="A chunker has no option 'wrong'"):
            chunker(letters.func, wrong=1)
        with pytest.raises(InvalidUDFError, match=r"^Chunker 'letters'.* num_cpus=-1"):
            chunker(letters.func, num_cpus=-1)
        with pytest.warns(CompatibilityWarning, match="geneva refresh DB"):
            chunker(letters.func, auto_refresh=True, manifest=None)


METRICS = {
    *("fragments", "writer_fragments", "udf_values_computed", "rows_checkpointed", "workers"),
    *("rows_ready_for_commit", "rows_committed", "tasks_completed", "plan_fragments"),
    *("cnt_geneva_workers_active", "cnt_geneva_workers_pending", "read_io_time_ms"),
    *("udf_processing_time", "batch_checkpointing_time", "writer_write_time", "commit_time_ms"),
    *("writer_queue_wait_time_ms", "commit_conflict_retries", "commit_backoff_time_ms"),
    "commit_concurrent_writer_retries",
}


class TestQueries:
    def test_fragments_and_addresses(self, local_db: Connection, table: Table) -> None:
        table.add(rows(3, 4))
        table.delete("id = 1")
        first, second = 0, 1 << 32
        for query in (table.search(None), table.search()):
            there = query.with_row_address().to_arrow()
            assert there["_rowaddr"].to_pylist() == [first, first + 2, second, second + 1]
            assert query.with_fragments(1).to_arrow()["id"].to_pylist() == [3, 4]
        query = table.search(None).enable_internal_api().with_fragments([0]).where("id > 0")
        found = query.with_row_address().with_row_id().select(["id"])
        assert found.to_list() == [{"id": 2, "_rowaddr": 2, "_rowid": 2}]
        assert found.with_row_id(False).schema.names == ["id", "_rowaddr"]
        assert query.count_rows() == 1
        for wrong in (query, table.search(None).with_row_address()):
            with pytest.raises(UserInputError, match=r"can't be (a view|read)"):
                local_db.create_materialized_view("v", wrong)
        with pytest.raises(UserInputError, match=r"no fragments \[7\] .* it has \[0, 1\]"):
            table.search(None).with_fragments([1, 7])

    def test_a_builder_by_its_name(self, local_db: Connection, table: Table) -> None:
        for query in (table.search(None), table.search(), table.search().where("id > 1")):
            assert isinstance(query, geneva.GenevaQueryBuilder)
        assert not isinstance(table, geneva.GenevaQueryBuilder)

        @geneva.udtf(output_schema=pa.schema([("n", pa.int64())]))
        def counted(query: geneva.GenevaQueryBuilder) -> Iterator[pa.Table]:
            assert isinstance(query, geneva.GenevaQueryBuilder)
            yield pa.table({"n": [query.to_arrow().num_rows]})

        view = local_db.create_udtf_view("v", source=table.search(None), udtf=counted)
        view.refresh()
        assert column(view, "n") == [3]

    def test_how_long_they_may_take(self, table: Table, calls: Calls) -> None:
        plenty = timedelta(minutes=5)
        query = table.search(None)
        assert query.to_arrow(timeout=plenty).num_rows == len(query.to_list(timeout=60)) == 3
        assert len(query.to_pandas(timeout=plenty)) == 3
        assert [b.num_rows for b in query.to_batches(2, timeout=plenty)] == [2, 1]

        @udf(data_type=pa.int64())
        def slow(id: int) -> int:
            calls.note([id])
            time.sleep(0.05)
            return id

        batches = query.select({"slow": slow}).to_batches(1, timeout=timedelta(seconds=0.01))
        with pytest.raises(QueryTimeoutError, match=r"after timeout=0\.01 s"):
            batches.read_all()
        assert calls.taken() == [0], "the rows after that are not computed"
        for wrong in ("x", -1, True):
            with pytest.raises(UserInputError, match="timeout"):
                query.to_arrow(timeout=wrong)  # type: ignore[arg-type]
        assert issubclass(QueryTimeoutError, TimeoutError)

    def test_forms_of_a_result(self, local_db: Connection) -> None:
        import lance.blob
        from lancedb.pydantic import LanceModel

        marked = {"lance-encoding:blob": "true"}
        schema = pa.schema(
            [("id", pa.int64()), pa.field("raw", pa.large_binary(), metadata=marked)]
        )
        rows = pa.table({"id": [1, 2], "raw": [b"xy", None]}, schema=schema)
        query = local_db.create_table("b", rows).search(None)
        assert list(query.to_pandas()["raw"]) == [b"xy", None]
        first, second = query.to_pandas(blob_mode="lazy")["raw"]
        assert isinstance(first, lance.blob.BlobFile)
        assert (first.read(), second) == (b"xy", None)
        with pytest.raises(UserInputError, match=r"table\.search\(\)"):
            query.to_pandas(blob_mode="descriptions")

        class Row(LanceModel):
            id: int

        assert query.select(["id"]).to_pydantic(Row) == [Row(id=1), Row(id=2)]
        frame = query.to_polars(timeout=timedelta(minutes=5))
        assert frame["raw"].to_list() == [b"xy", None]

    def test_polars_frames_and_series(self, local_db: Connection) -> None:
        polars = pytest.importorskip("polars")

        @udf(data_type=pa.int64())
        def double(x: pa.Array) -> Any:
            return 2 * polars.Series(x)

        @udf(data_type=pa.struct([("more", pa.int64()), ("text", pa.string())]))
        def record(batch: pa.RecordBatch) -> Any:
            return polars.from_arrow(batch).select(more=polars.col("x") + 1, text="s")

        table = local_db.create_table("t", polars.DataFrame({"x": [1, 2], "s": ["a", None]}))
        table.add_columns({"y": double, "z": record})
        table.backfill("y")
        table.backfill("z")
        frame = table.to_polars().collect()
        assert frame.columns == ["x", "s", "y", "z"]
        assert frame["y"].to_list() == [2, 4]
        assert frame["z"].to_list() == [{"more": 2, "text": "a"}, {"more": 3, "text": None}]

    def test_expressions_of_lancedb(self, local_db: Connection, table: Table) -> None:
        from lancedb.expr import col, lit

        query = table.search(None).where(col("id") > lit(0)).select({"more": col("id") + lit(10)})
        assert [row["more"] for row in query.to_list()] == [11, 12]
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        assert column(view, "more") == [11, 12]

    def test_what_is_no_view(self, local_db: Connection, table: Table) -> None:
        for name in ("refresh", "refresh_async", "plan_refresh"):
            with pytest.raises(AttributeError, match="'t' is a table, and no view"):
                getattr(table, name)
        with pytest.raises(UserInputError, match=r"create_materialized_view\('v', query\)"):
            local_db.create_view("v", table.search(None))

    def test_a_view_of_a_query(self, local_db: Connection, table: Table) -> None:
        query = table.search(None).where("id > 1")
        for made in (
            query.create_materialized_view(conn=local_db, view_name="a"),
            query.create_materialized_view(local_db, "b"),
            query.create_materialized_view("c"),
        ):
            made.refresh()
            assert column(made, "id") == [2]
        for wrong in (("v", "x"), (local_db,), (3,), ("v", 3)):
            with pytest.raises(UserInputError, match="takes the view's name, and the connection"):
                query.create_materialized_view(*wrong)


class TestJobs:
    WORDS: ClassVar[dict[str, Any]] = {
        "_admission_check": True,
        "_admission_strict": True,
        "use_cpu_only_pool": True,
        "num_cpus": 2,
        "num_gpus": 1,
        "memory": 10**9,
        "cluster": "c",
        "manifest": "m",
    }

    @pytest.mark.parametrize("word", list(WORDS))
    def test_a_word_is_taken_and_said(self, table: Table, calls: Calls, word: str) -> None:
        table.add_columns({"x": tripled(calls)})
        with pytest.warns(CompatibilityWarning, match=rf"backfill\({word}=") as told:
            table.backfill("x", **{word: self.WORDS[word]})
        assert told[0].filename == __file__
        assert calls.taken() == [0, 1, 2]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table.backfill("x", **{word: None})

    def test_of_a_refresh(self, local_db: Connection, table: Table) -> None:
        view = local_db.create_materialized_view("v", table)
        with pytest.warns(CompatibilityWarning) as told:
            view.refresh(where="id > 1", output_limit=3, source_task_size=2, _admission_check=True)
        assert len(told) == 3
        assert column(view, "id") == [0, 1, 2]
        assert local_db.list_jobs()[0].config["task_size"] == 2

    def test_the_id_can_be_given(self, local_db: Connection, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        assert table.backfill("x", job_id="mine-1").job_id == "mine-1"
        assert local_db.get_job("mine-1").status is JobStatus.DONE
        with pytest.raises(UserInputError, match="already"):
            table.backfill("x", job_id="mine-1")
        with pytest.raises(UserInputError, match="letters"):
            table.backfill("x", job_id="a'b")

    def test_records(self, local_db: Connection, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        job_id = table.backfill("x").job_id
        listed = local_db.list_jobs(table_name="t", status="DONE")
        assert [job.job_id for job in listed] == [job_id]
        for job in (local_db.get_job(job_id), listed[0]):
            assert job.launched_at == job.created_at
            assert job.completed_at is not None
            assert job.completed_at >= job.launched_at
            assert job.completed_at.tzinfo is not None
            assert "@" in job.launched_by or job.launched_by
            assert (job.cluster_name, job.manifest_id, job.object_ref) == (None, None, None)
            assert (job.status.value, job.output_columns) == ("DONE", ["x"])
            by_name = {m["name"]: (m["count"], m["total"]) for m in job.metrics}
            assert [job.metrics[0], *job.metrics[1:]] == list(job.metrics), "a list, too"
            assert job.metrics[-1].name == list(by_name)[-1]
            assert len(by_name) == len(list(job.metrics)), "each name once"
            assert by_name["fragments"] == (1, 1)
            assert by_name["rows_committed"] == (3, 3)
            committed = next(m for m in job.metrics if m.name == "rows_committed")
            assert (committed.n, committed.total, committed.done) == (3, 3, True)
            assert committed.desc == "rows committed"
            assert job.metrics["committed"] == job.metrics["rows_committed"] == 3
            assert {m.name for m in job.metrics} >= METRICS
            assert dict(job.metrics)["udf_rows"] == 3
            assert json.loads(json.dumps(job.metrics))["udf_rows"] == 3
            assert json.loads(job.config) == dict(job.config) == job.config
            assert job.config["udf_name"] == job.config.get("udf_name") == "triple"
            assert {**job.config} == job.config
            assert "udf_name" in job.config
            assert set(job.config) == set(job.config.keys())
            assert pickle.loads(pickle.dumps(job.config)) == job.config
            texts = [str(event) for event in job.events]
            assert texts[0].startswith("Job planning")
            assert texts[-1] == "Job completed with status DONE"
            assert "Executing" in texts
            assert [event["message"] for event in job.events] == texts
            assert all(event["timestamp"].tzinfo is not None for event in job.events)

    def test_the_history(self, local_db: Connection, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        job_id = table.backfill("x").job_id
        history = local_db._history
        found = history.get(job_id)
        (record,) = found
        assert (len(found), found.status, record.input_columns) == (1, "DONE", ["id"])
        assert [j.job_id for j in history.list_jobs(table_name="t", status="DONE")] == [job_id]
        history.set_completed(job_id, status="CANCELLED")
        assert history.get(job_id)[0].status == "DONE", "it had ended"
        assert history.get("no such job") == []
        assert not hasattr(history.get("no such job"), "status")
        with pytest.raises(UserInputError, match="says itself how it ended"):
            history.set_completed(job_id, status="DONE")

    def test_a_loop_sees_progress(self, local_db: Connection, table: Table, tmp_path: Path) -> None:
        begun, gate = tmp_path / "begun", tmp_path / "gate"

        @udf(data_type=pa.int64())
        def waits(id: int) -> int:
            import time

            begun.touch()
            while not gate.exists():
                time.sleep(0.01)
            return id

        table.add_columns({"x": waits})
        future = table.backfill_async("x")
        try:
            while not begun.exists():
                assert not future.wait(0.01)
            for job in (local_db.get_job(future.job_id), *local_db.list_jobs()):
                seen = {m["name"]: (m["count"], m["total"]) for m in job.metrics}
                assert seen["rows_committed"] == (0, 3), "at once, not with the next heartbeat"
        finally:
            gate.touch()
        assert future.result(60).rows_committed == 3

    def test_a_job_is_cancelled_by_its_record(
        self, local_db: Connection, table: Table, tmp_path: Path
    ) -> None:
        @udf(data_type=pa.int64())
        def waits(id: int) -> int:
            import time

            while not (tmp_path / "gate").exists():
                time.sleep(0.01)
            return id

        table.add_columns({"x": waits})
        future = table.backfill_async("x")
        try:
            local_db._history.set_completed(future.job_id, status="CANCELLED")
            with pytest.raises(JobNotFoundError, match="nope"):
                local_db._history.set_completed("nope")
            assert local_db._signals.cancel_requested(future.job_id)
        finally:
            (tmp_path / "gate").touch()
            assert future.wait(60)

    def test_the_manifest_of_a_function(
        self, local_db: Connection, table: Table, calls: Calls
    ) -> None:
        own = GenevaManifest.create_pip("own").pip(["pyarrow"]).build()
        other = GenevaManifest.create_pip("other").build()
        table.add_columns({"x": tripled(calls, manifest=own), "y": tripled(calls)})
        view = local_db.create_materialized_view("v", table.search(None).select({"z": "id"}))
        made = table.search(None).select({"z": tripled(calls, manifest=own)})
        computed = local_db.create_materialized_view("w", made)
        with local_db.context(manifest=other):
            ran = [table.backfill("x"), table.backfill("y"), view.refresh(), computed.refresh()]
        jobs = [local_db.get_job(job.job_id) for job in ran]
        assert [job.manifest_id for job in jobs] == ["own", "other", "other", "own"]
        assert jobs[0].manifest_checksum == own.checksum

    def test_how_long_to_wait_for_one(
        self, local_db: Connection, table: Table, tmp_path: Path
    ) -> None:
        gate = tmp_path / "gate"

        @udf(data_type=pa.int64())
        def waits(id: int) -> int:
            while not gate.exists():
                time.sleep(0.01)
            return id

        table.add_columns({"x": waits})
        future = table.backfill_async("x")
        short, plenty = timedelta(seconds=0.05), timedelta(minutes=5)
        assert not future.wait(short)
        handle = local_db.get_job(future.job_id)
        for late in (future.result, handle.wait):
            with pytest.raises(JobTimeoutError, match=r"after 0\.05 s"):
                late(timeout=short)
            with pytest.raises(UserInputError, match="timeout must be a number of seconds"):
                late(timeout="soon")  # type: ignore[arg-type]
            for none_left in (-1, timedelta(seconds=-1), np.int64(0)):  # a deadline has passed
                with pytest.raises(JobTimeoutError, match=r"after 0 s"):
                    late(timeout=none_left)
        assert not future.wait(-1)
        gate.touch()
        assert future.result(timeout=plenty).status is handle.wait(plenty).status is JobStatus.DONE

    def test_a_status_that_is_none(self, local_db: Connection) -> None:
        assert local_db.list_jobs(status="done") == []
        for listing in (local_db.list_jobs, local_db._history.list_jobs):
            with pytest.raises(UserInputError, match=r"'FOO' is no status\. They are PENDING, "):
                listing(status="FOO")

    def test_an_unknown_id_is_a_value_error(self, local_db: Connection) -> None:
        with pytest.raises(ValueError, match="no job 'x'") as error:
            local_db.get_job("x")
        assert isinstance(error.value, JobNotFoundError | KeyError)

    def test_newest_first(self, local_db: Connection, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        ids = [table.backfill("x").job_id for _ in range(3)]
        assert [job.job_id for job in local_db.list_jobs()] == ids[::-1]
        times = [job.launched_at for job in local_db.list_jobs()]
        assert times == sorted(times, reverse=True)

    def test_errors(self, local_db: Connection, table: Table) -> None:
        def fragile(id: int) -> int:
            return {0: 1}[id] if id < 2 else 1 // 0

        table.add_columns({"x": udf(fragile, on_error=skip_on_error())})
        job_id = table.backfill("x").job_id
        found = table.get_errors(job_id)
        assert [e.error_type for e in found] == ["KeyError", "ZeroDivisionError"]
        assert found[1].error_message == "integer division or modulo by zero"
        assert "fragile" in found[0].error_trace
        assert found[0].timestamp.tzinfo is not None
        assert len({e.error_id for e in found}) == 2
        assert len(table.get_errors(error_type="KeyError")) == 1
        last = found[-1]
        assert (last.table_name, last.table_uri, last.table_version) == ("t", table.uri, 2)
        assert (last.udf_name, last.input_columns) == ("fragile", ["id"])
        assert last.output_columns == ["x"]
        assert last.udf_version == local_db.get_job(job_id).config["udf_version"]
        assert (last.actor_id, last.batch_index, last.bisect_depth) == (None, None, None)
        assert (last.attempt, last.max_attempts) == (1, None)
        errors = local_db.open_table("geneva_errors", namespace=list(local_db.system_namespace))
        found_types = errors.to_arrow()["error_type"].to_pylist()
        assert sorted(found_types) == ["KeyError", "ZeroDivisionError"]

    def test_as_a_table(self, local_db: Connection, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        job_id = table.backfill("x").job_id
        jobs = local_db.open_table("geneva_jobs", namespace=local_db.system_namespace)
        assert jobs.search().where("status = 'DONE'").to_list()[0]["job_id"] == job_id
        metrics = [json.loads(m) for m in jobs.to_arrow()["metrics"].to_pylist()[0]]
        assert {m["name"]: m["count"] for m in metrics}["rows_committed"] == 3
        assert jobs.search(None).where("status = 'DONE'").select(["job_id"]).to_list() == [
            {"job_id": job_id}
        ]
        assert "geneva_jobs" not in local_db.table_names()
        with pytest.raises(UserInputError, match="no system table"):
            local_db.open_table("nope", namespace=local_db.system_namespace)

    def test_as_a_dataset(self, local_db: Connection) -> None:
        system = list(local_db.system_namespace)
        for name in ("geneva_jobs", "geneva_errors"):
            dataset = local_db.open_table(name, namespace=system).to_lance()
            folder = Path(dataset.uri.removeprefix("file://"))
            gc.collect()
            assert dataset.count_rows() == 0
            assert folder.exists(), "the dataset keeps its files"
            assert local_db.open_table(name, namespace=system).search(None).to_list() == []
            del dataset
            gc.collect()
            assert not folder.parent.exists(), "and they go with it"


class TestContexts:
    def test_here(self, local_db: Connection, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        with local_db.local_ray_context():
            table.backfill("x")
        with Connection.local_ray_context(), geneva.db.Connection.local_ray_context():
            table.backfill("x")
        assert calls.taken() == [0, 1, 2]

    def test_clusters_are_kept(self, local_db: Connection, tmp_path: Path) -> None:
        worker = KubeRayClusterBuilder.gpu_worker(2).cpus(6).memory("32Gi").replicas(3).build()
        cluster = (
            GenevaCluster.create_kuberay("big-one")
            .namespace("ns")
            .aws_config(region="eu")
            .config_method(K8sConfigMethod.EKS_AUTH)
            .head_group(service_account="a", cpus=2)
            .add_worker_group(KubeRayClusterBuilder.cpu_worker())
            .add_worker_group(worker)
            .ray_init_kwargs({"log": 1})
            .build()
        )
        local_db.define_cluster("big-one", cluster)
        local_db.define_cluster("plain", GenevaCluster.create_local("plain").build())
        other = geneva.connect(local_db.uri)
        assert [c.name for c in other.list_clusters()] == ["big-one", "plain"]
        read = other.get_cluster("big-one")
        assert read == cluster
        assert read.kuberay is not None
        assert read.kuberay.ray_init_kwargs == {"log": 1}
        assert read.spark_address is None
        assert read.spark_conf == {
            "spark.executor.instances": "4",
            "spark.executor.cores": "6",
            "spark.executor.memory": "32g",
            "spark.executor.resource.gpu.amount": "2",
        }
        other.delete_cluster("big-one")
        assert [c.name for c in local_db.list_clusters()] == ["plain"]
        with pytest.raises(UserInputError, match=r"no cluster 'plian'.*Did you mean 'plain'"):
            local_db.context(cluster="plian")
        with pytest.raises(UserInputError, match="lowercase"):
            GenevaCluster.create_local("Bad Name").build()
        with pytest.raises(UserInputError, match="4Gi"):
            KubeRayClusterBuilder.gpu_worker().memory("2Gi").build()
        for much in ("96Gi", "65Gi"):
            with pytest.warns(UserWarning, match=f"4 cores and {much}"):
                KubeRayClusterBuilder.cpu_worker().memory(much).build()
        group = KubeRayClusterBuilder.cpu_worker().idle_timeout_seconds(30).build()
        assert (group.idle_timeout_seconds, group.service_account) == (30, "geneva-service-account")

    def test_a_spark_cluster_is_its_settings(self) -> None:
        made = (
            (GenevaCluster.create_spark("s").master("spark://h:7077").executors(3).cores(4))
            .memory("8Gi")
            .gpus(1)
            .conf({"spark.task.cpus": "2"})
            .build()
        )
        assert made.spark_address == "spark://h:7077"
        assert made.spark_conf == {
            "spark.executor.instances": "3",
            "spark.executor.cores": "4",
            "spark.executor.memory": "8g",
            "spark.executor.resource.gpu.amount": "1",
            "spark.task.cpus": "2",
        }
        assert GenevaCluster.create_spark("s").remote("sc://h").build().spark_address == "sc://h"
        assert GenevaCluster.create_external("s", "sc://h").build().spark_address == "sc://h"
        assert GenevaCluster.create_external("s", "ray://h").build().spark_address is None

    def test_manifests_are_kept(self, local_db: Connection, tmp_path: Path) -> None:
        listed = tmp_path / "requirements.txt"
        listed.write_text("# a comment\nnumpy>=1\n\n-r other\npandas\n")
        manifest = (
            PipManifestBuilder.create("m")
            .requirements_path(listed)
            .py_modules(["a"])
            .add_py_module("b")
            .worker_image("i")
            .env_vars({"K": "v"})
            .build()
        )
        assert (manifest.pip, manifest.py_modules) == (["numpy>=1", "pandas"], ["a", "b"])
        local_db.define_manifest("m", manifest)
        read = geneva.connect(local_db.uri).get_manifest("m")
        assert read == manifest
        assert read.checksum == read.compute_checksum() == manifest.checksum
        assert GenevaManifest("m").name == "m"
        conda = GenevaManifest.create_conda("c").conda({"dependencies": ["x"]}).build()
        local_db.define_manifest("c", conda)
        local_db.define_manifest("s", GenevaManifest.create_site("s").build())
        assert [m.name for m in local_db.list_manifests()] == ["c", "m", "s"]
        local_db.delete_manifest("c")
        assert [m.name for m in local_db.list_manifests()] == ["m", "s"]
        for both in (
            lambda: PipManifestBuilder("m").pip(["a"]).requirements_path("b"),
            lambda: GenevaManifest.create_conda("m").conda_environment_path("b").conda({"a": 1}),
        ):
            with pytest.raises(ValueError, match="not both"):
                both()
        with pytest.raises(UserInputError, match="no manifest 'c'"):
            local_db.delete_manifest("c")

    def test_when_and_by_whom(self, local_db: Connection) -> None:
        before = datetime.now(UTC)
        local_db.define_cluster("c", GenevaCluster.create_local("c").build())
        local_db.define_manifest("m", GenevaManifest.create_pip("m").build())
        other = geneva.connect(local_db.uri)
        for made in (other.get_cluster("c"), other.get_manifest("m")):
            assert before <= made.created_at <= datetime.now(UTC)
            assert made == type(made).from_dict(json.loads(json.dumps(made.as_dict())))
        manifest = pickle.loads(pickle.dumps(other.get_manifest("m")))
        assert manifest == other.get_manifest("m")
        assert GenevaManifest("n", created_at=None).created_at >= before  # type: ignore[arg-type]

    def test_a_context(self, local_db: Connection, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        os.environ.pop("GENEVA_WORDS_TEST", None)
        manifest = (
            GenevaManifest.create_pip("m").pip(["pyarrow>=1"]).env_vars({"GENEVA_WORDS_TEST": "1"})
        )
        local_db.define_manifest("m", manifest.build())
        local_db.define_cluster("c", GenevaCluster.create_local("c").build())
        context = local_db.context(cluster="c", manifest="m")
        context.__enter__()
        assert os.environ["GENEVA_WORDS_TEST"] == "1"
        assert local_db._variables["GENEVA_WORDS_TEST"] == "1", "for workers that are elsewhere"
        future = table.backfill_async("x")
        context.__exit__(None, None, None)
        assert future.done(), "the context has waited for it"
        assert "GENEVA_WORDS_TEST" not in os.environ
        job = local_db.get_job(future.job_id)
        assert (job.cluster_name, job.manifest_id) == ("c", "m")
        assert job.manifest_checksum == manifest.build().checksum

    def test_threads_enter_contexts_of_one_connection_one_at_a_time(
        self, local_db: Connection
    ) -> None:
        os.environ.pop("GENEVA_WORDS_TEST", None)

        def of(value: str) -> Context:
            made = GenevaManifest.create_pip("m").env_vars({"GENEVA_WORDS_TEST": value})
            return local_db.context(manifest=made.build())

        def seen() -> tuple[str | None, str | None]:
            name = "GENEVA_WORDS_TEST"
            return os.environ.get(name), local_db._variables.get(name)

        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
            first, nested, second = of("1"), of("2"), of("3")
            for context in (first, nested):
                one.submit(context.__enter__).result(60)
            for enter in (second.__enter__, lambda: two.submit(second.__enter__).result(60)):
                with pytest.raises(UserInputError, match="Use a connection for each thread"):
                    enter()
                assert seen() == ("2", "2")
            assert two.submit(seen).result(60) == ("2", "2"), "a context is for all threads"
            one.submit(nested.__exit__, None, None, None).result(60)
            assert seen() == ("1", "1")
            one.submit(first.__exit__, None, None, None).result(60)
            assert seen() == (None, None)
            with second:
                one.submit(nested.__enter__).result(60)
                assert seen() == ("2", "2"), "inside of the main thread's"
                with pytest.raises(UserInputError, match="is inside a context of this connection"):
                    two.submit(first.__enter__).result(60)
                one.submit(nested.__exit__, None, None, None).result(60)
                two.submit(first.__enter__).result(60)
                two.submit(first.__exit__, None, None, None).result(60)
        assert seen() == (None, None)

    def test_a_thread_that_has_ended_inside_of_one_keeps_no_other_out(
        self, local_db: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        name = "GENEVA_WORDS_TEST"
        os.environ.pop(name, None)

        def of(value: str) -> Context:
            made = GenevaManifest.create_pip("m").env_vars({name: value})
            return local_db.context(manifest=made.build())

        left, other, third = of("1"), of("2"), of("3")
        thread = Thread(target=left.__enter__, name="left")
        thread.start()
        thread.join()
        assert local_db._variables.get(name) == "1", "a context is for all threads"
        with ThreadPoolExecutor(1) as pool:
            with other:
                assert (os.environ[name], local_db._variables.get(name)) == ("2", "2")
                assert "Thread 'left' has ended inside a context" in caplog.text
                pool.submit(third.__enter__).result(60)
                with pytest.raises(UserInputError, match="is inside a context"):
                    of("4").__enter__()
                pool.submit(third.__exit__, None, None, None).result(60)
            left.__exit__(None, None, None)
        assert name not in os.environ
        assert local_db._contexts == []
        caplog.clear()
        with of("5"):
            assert caplog.text == ""

    @pytest.mark.parametrize("first", [0, 1])
    def test_contexts_of_two_connections_leave_no_variables(
        self, local_db: Connection, first: int
    ) -> None:
        name = "GENEVA_WORDS_TEST"
        os.environ.pop(name, None)
        contexts = []
        for value in ("1", "2"):
            manifest = GenevaManifest.create_pip("m").env_vars({name: value}).build()
            contexts.append(geneva.connect(local_db.uri).context(manifest=manifest))
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
            threads = list(zip((one, two), contexts, strict=True))
            for thread, context in threads:
                thread.submit(context.__enter__).result(60)
            assert [c.connection._variables[name] for c in contexts] == ["1", "2"]
            for ended, left in ((first, "21"[first]), (1 - first, None)):
                thread, context = threads[ended]
                thread.submit(context.__exit__, None, None, None).result(60)
                assert os.environ.get(name) == left

    def test_what_can_not_be_done_is_said(self, local_db: Connection) -> None:
        local_db.define_cluster("k", GenevaCluster.create_kuberay("k").build())
        context = local_db.context(cluster="k")
        with pytest.warns(CompatibilityWarning, match="names no Spark master"), context:
            pass
        missing = (
            GenevaManifest.create_pip("m").pip(["no-such-package-x>=1", "git+https://x"]).build()
        )
        context = local_db.context(manifest=missing)
        with pytest.warns(CompatibilityWarning, match=r"\['no-such-package-x>=1'\] are"), context:
            pass
        conda = GenevaManifest.create_conda("m").conda({"dependencies": []}).build()
        context = local_db.context(manifest=conda)
        with pytest.warns(CompatibilityWarning, match="conda environment is kept"), context:
            pass

    def test_how_long_it_waits(self, local_db: Connection, table: Table, tmp_path: Path) -> None:
        gate = tmp_path / "gate"

        @udf(data_type=pa.int64())
        def waits(id: int) -> int:
            import time

            while not gate.exists():
                time.sleep(0.01)
            return id

        table.add_columns({"x": waits})
        context = local_db.context(wait_timeout=timedelta(seconds=0.1))
        with pytest.raises(JobTimeoutError, match="wait_timeout"), context:
            future = table.backfill_async("x")
        with local_db.context(on_exit=ExitMode.RETAIN):
            assert not future.done()
        gate.touch()
        assert future.result(60).status is JobStatus.DONE

    @pytest.mark.parametrize(
        "timeout", [-1, timedelta(seconds=-1), np.int64(5), np.float32(5), 1e300, None]
    )
    def test_a_deadline_may_have_passed_and_numbers_be_numpys(
        self, local_db: Connection, table: Table, timeout: Any
    ) -> None:
        table.add_columns({"x": udf(data_type=pa.int64())(lambda id: id)})
        with local_db.context(wait_timeout=timeout):
            assert table.backfill_async("x").result(np.int64(60)).rows_committed == len(table)

    @pytest.mark.parametrize("timeout", ["5", True, [5]])
    def test_what_is_no_time_is_refused_before_anything_runs(
        self, local_db: Connection, timeout: Any
    ) -> None:
        with pytest.raises(UserInputError, match="wait_timeout must be a number of seconds"):
            local_db.context(wait_timeout=timeout)


MODULES = {
    "geneva": "connect udf chunker GenevaQueryBuilder Retry Skip Fail retry_transient retry_all "
    "skip_on_error fail_fast __version__ db table",
    "geneva.transformer": "udf chunker Chunker UDF udtf UDTF",
    "geneva.query": "GenevaQuery GenevaQueryBuilder",
    "geneva.db": "Connection connect dataset_uses_stable_row_ids",
    "geneva.table": "Table JobFuture NativeTable RemoteTable",
    "geneva.manifest": "GenevaManifest",
    "geneva.manifest.mgr": "GenevaManifest",
    "geneva.manifest.builder": "PipManifestBuilder CondaManifestBuilder SiteManifestBuilder",
    "geneva.cluster": "GenevaCluster GenevaClusterType K8sConfigMethod",
    "geneva.cluster.mgr": "GenevaCluster GenevaClusterType",
    "geneva.cluster.builder": "KubeRayClusterBuilder LocalRayClusterBuilder CpuWorkerBuilder "
    "ExternalRayClusterBuilder GpuWorkerBuilder",
    "geneva.debug.error_store": "ErrorHandlingConfig UDFRetryConfig ExceptionMatcher Retry Skip "
    "Fail retry_all retry_transient skip_on_error fail_fast",
    "geneva.udfs": "gemini_udf gemini_embedding_udf",
    "geneva.errors": "FatalWorkerTransientError FatalWorkerOOMError FatalWorkerCrashError "
    "FatalWorkerExitError",
    "geneva.config": "override_config_kv",
    "geneva.partitioning": "create_ivf_flat_index",
    "geneva.runners.ray._mgr": "ray_cluster",
    "geneva.runners.ray.raycluster": "ExitMode K8sConfigMethod _HeadGroupSpec _WorkerGroupSpec "
    "get_ray_image",
}


class TestRetries:
    def test_factories_are_lists_of_rules(self, table: Table, calls: Calls) -> None:
        rules = [*geneva.retry_transient(), Skip(KeyError)]
        assert all(isinstance(rule, ExceptionMatcher) for rule in rules)
        ways = [
            rules,
            geneva.retry_transient() + [Skip(KeyError)],  # noqa: RUF005
            geneva.retry_transient() + [Skip(KeyError)] + geneva.fail_fast(),  # noqa: RUF005
        ]
        assert {policy_of(way) for way in ways} == {policy_of(rules)}
        above = [Skip(KeyError)] + geneva.retry_all(backoff="fixed")  # noqa: RUF005
        assert above.rules == (Skip(KeyError), Retry(backoff="fixed"))
        assert list(geneva.fail_fast()) == []
        limited = skip_on_error(max_failed_rows=1) + [Retry()]  # noqa: RUF005
        assert limited.max_failed_rows == 1
        for spread in (lambda: [*limited], lambda: geneva.retry_all() + limited):
            with pytest.raises(InvalidUDFError, match=r"has no limits: write policy \+ \[\.\.\.\]"):
                spread()
        with pytest.raises(InvalidUDFError, match="on_error"):
            geneva.retry_all() + ["x"]  # type: ignore[list-item]  # noqa: RUF005

        @udf(data_type=pa.int64(), on_error=rules)
        def fails(id: int) -> int:
            calls.note([id])
            return {0: 0}[id]

        table.add_columns({"x": fails})
        table.backfill("x")
        assert (column(table, "x"), calls.taken()) == ([0, None, None], [0, 1, 2])

    def test_rules_below_decide_when_retries_are_used_up(self, table: Table, calls: Calls) -> None:
        @udf(data_type=pa.int64(), on_error=[Retry(KeyError, max_attempts=2, backoff=0), Skip()])
        def fails(id: int) -> int:
            calls.note([id])
            return {0: 0}[id]

        table.add_columns({"x": fails})
        table.backfill("x")
        assert (column(table, "x"), calls.taken()) == ([0, None, None], [0, 1, 1, 2, 2])

    def made(self, **words: Any) -> UDF:
        handling = ErrorHandlingConfig(retry_config=UDFRetryConfig(**words))

        @udf(data_type=pa.int64(), error_handling=handling)
        def often(id: int) -> int:
            raise ConnectionError("not now")

        return often

    def test_in_the_words_of_tenacity(self) -> None:
        often = self.made(
            retry=tenacity.retry_if_exception_type((ConnectionError, KeyError)),
            stop=tenacity.stop_after_attempt(5),
            wait=tenacity.wait_fixed(0.25),
        )
        (rule,) = often.error_handling.rules
        assert rule == Retry(ConnectionError, KeyError, max_attempts=5, backoff=0.25)
        either = tenacity.retry_if_exception_type(OSError) | tenacity.retry_if_exception_type(
            KeyError
        )
        assert self.made(retry=either).error_handling.rules == (Retry(OSError, KeyError),)
        waits = {
            tenacity.wait_exponential(): "exponential",
            tenacity.wait_random_exponential(): "exponential",
            tenacity.wait_exponential_jitter(): "exponential",
            tenacity.wait_incrementing(): "linear",
            tenacity.wait_none(): 0.0,
        }
        for wait, backoff in waits.items():
            assert self.made(wait=wait).error_handling.rules == (Retry(backoff=backoff),)

    def test_calls_are_made_again(self, table: Table, calls: Calls) -> None:
        @udf(
            data_type=pa.int64(),
            error_handling=ErrorHandlingConfig(
                retry_config=UDFRetryConfig(
                    stop=tenacity.stop_after_attempt(2), wait=tenacity.wait_none()
                )
            ),
        )
        def failing(id: int) -> int:
            calls.note([id])
            raise ConnectionError("not now")

        table.add_columns({"y": failing})
        with pytest.raises(UDFExecutionError, match="not now"):
            table.backfill("y")
        taken = calls.taken()
        assert taken.count(taken[0]) == 2

    def test_what_cannot_be_said_is_refused(self) -> None:
        for words in (
            {"retry": tenacity.retry_if_exception_message(match="x")},
            {"retry": tenacity.retry_if_not_exception_type(KeyError)},
            {"retry": tenacity.retry_if_exception_type(KeyError) | tenacity.retry_never},
            {"stop": tenacity.stop_after_delay(3)},
            {"wait": tenacity.wait_random(1, 2)},
        ):
            with pytest.raises(UserInputError, match="can't be done here"):
                self.made(**words)
        with pytest.warns(CompatibilityWarning, match="before_sleep"):
            self.made(before_sleep=print)
        both = ErrorHandlingConfig(on_error=Skip(), retry_config=UDFRetryConfig())
        with pytest.raises(UserInputError, match="not both"):
            udf(data_type=pa.int64(), error_handling=both)(lambda id: id)

    def test_lost_workers(self) -> None:
        assert issubclass(FatalWorkerOOMError, WorkerDied)
        assert Skip(FatalWorkerCrashError).matches(WorkerDied("x"))
        assert issubclass(FatalWorkerTransientError, WorkerLostError)


class TestModules:
    @pytest.mark.parametrize("module", list(MODULES))
    def test_names_can_be_imported(self, module: str) -> None:
        found = importlib.import_module(module)
        for name in MODULES[module].split():
            named = getattr(found, name)
            own = getattr(named, "__module__", module) == module or isinstance(named, ModuleType)
            assert own or name in found.__all__, f"type checkers take {name} for private"

    def test_stable_row_ids(self, table: Table) -> None:
        assert geneva.db.dataset_uses_stable_row_ids(table.to_lance())

    def test_ray_cluster(self, table: Table, calls: Calls) -> None:
        from geneva.runners.ray import raycluster
        from geneva.runners.ray._mgr import ray_cluster

        table.add_columns({"x": tripled(calls)})
        with ray_cluster(local=True, extra_env={"A_WORD": "1"}, log_to_driver=False):
            table.backfill("x")
            assert os.environ["A_WORD"] == "1"
        assert "A_WORD" not in os.environ
        head = raycluster._HeadGroupSpec(service_account="a", num_cpus=1)
        assert repr(head) == "_HeadGroupSpec(service_account='a', num_cpus=1)"
        workers = [raycluster._WorkerGroupSpec(name="w", num_gpus=1)]
        on_kubernetes = ray_cluster("c", head_group=head, worker_groups=workers)
        with pytest.warns(CompatibilityWarning, match="Spark session"), on_kubernetes:
            pass
        image = raycluster.get_ray_image("2.44.0", "3.12.3", gpu=True)
        assert image == "rayproject/ray:2.44.0-py312-gpu"
        from geneva.config import override_config_kv

        with pytest.warns(CompatibilityWarning, match="job.checkpoint"):
            override_config_kv({"job.checkpoint.object_store.path": "x"})


class TestConnecting:
    def test_a_service_is_refused(self) -> None:
        with pytest.raises(UserInputError, match=r"db://x is a database of LanceDB's service"):
            geneva.connect("db://x", api_key="k", region="us-east-1", host_override="h")

    def test_a_namespace_that_is_a_folder(self, tmp_path: Path) -> None:
        place = {"root": str(tmp_path / "db")}
        db = geneva.connect(namespace_client_impl="dir", namespace_client_properties=place)
        made = db.create_table("t", rows(1))
        assert isinstance(db, lancedb.DBConnection) or sys.version_info >= (3, 12)
        assert isinstance(made, lancedb.table.Table)
        assert (db.namespace_client_impl, db.namespace_client_properties) == ("dir", place)
        assert list(db.namespace_client_pushdown_operations) == []
        plain = geneva.connect(tmp_path / "db")
        assert plain.table_names() == ["t"]
        assert plain.namespace_client_impl is None
        older = geneva.connect(namespace_impl="dir", namespace_properties=place)
        assert (older.table_names(), older.namespace_client_impl) == (["t"], "dir")
        for wrong in ({}, {"namespace_client_impl": "rest"}):
            with pytest.raises(UserInputError, match="needs a place"):
                geneva.connect(**wrong)

    def test_words(self, tmp_path: Path) -> None:
        with pytest.warns(CompatibilityWarning) as told:
            db = geneva.connect(
                tmp_path / "db", checkpoint="x", system_namespace=["s"], upload_dir="u"
            )
        assert len(told) == 2
        assert (db.is_remote(), db.system_namespace) == (False, ["_geneva"])
        db.close()

    def test_variables_that_change_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            geneva.connect(tmp_path / "db")
        for name in VARIABLES:
            monkeypatch.setenv(name, "3")
            with pytest.warns(CompatibilityWarning, match=f"variable {name} is taken") as told:
                geneva.connect(tmp_path / "db")
            assert [each.filename for each in told] == [__file__]
            monkeypatch.delenv(name)

    def test_memory_is_no_place(self) -> None:
        with pytest.raises(UserInputError, match=r"memory:// is inside of this process"):
            geneva.connect("memory://")

    def test_other_words_for_the_same(self, local_db: Connection, table: Table) -> None:
        assert local_db.get_table("t").count_rows() == 3
        assert [f.count_rows() for f in table.get_fragments()] == [3]
        assert table.get_reference() == table.ref
        assert local_db.user_db_uri == local_db.system_table_db_uri == local_db.uri
        local_db.create_materialized_view("v", table)
        assert local_db.refresh("v").rows_committed == 3
        with pytest.raises(UserInputError, match="no view"):
            local_db.refresh("t")
        captured = local_db.capture_local_environment()
        assert any(p.startswith("pyarrow==") for p in captured.pip)
        assert local_db.capture_local_environment(skip_site_packages=True).pip == []

    def test_a_primary_key(self, local_db: Connection) -> None:
        with pytest.warns(CompatibilityWarning, match=r"may be NULL \(\['id'\]\)"):
            local_db.create_table("a", rows(1), primary_key="id")
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
        made = local_db.create_table("b", rows(1).cast(schema), primary_key="id")
        assert any(b"primary-key" in key for key in made.schema.field("id").metadata)

    def test_no_session_beside_another(
        self, local_db: Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from geneva.spark import sessions

        monkeypatch.setattr(sessions, "active_session", lambda: object())
        cluster = GenevaCluster.create_spark("s").master("spark://nowhere:7077").build()
        context = local_db.context(cluster=cluster)
        with context, pytest.raises(SparkUnavailableError, match="already"):
            context.session()

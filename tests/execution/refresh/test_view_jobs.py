"""Views at work: direct writes, functions that fail, crashes, rivals, other processes, Spark."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lancedb.index import IvfPq

from geneva import Connection, chunker, udf, udtf
from geneva.errors import (
    GenevaError,
    JobCancelledError,
    JobTimeoutError,
    TableChangedError,
    UDFExecutionError,
    UserInputError,
)
from geneva.execution.backfill import committer
from geneva.execution.backfill.committer import TableCommitter, publish_columns
from geneva.execution.refresh import explode
from geneva.execution.refresh import rows as view_rows
from geneva.execution.refresh import run as refresh
from geneva.model.jobs import JobStatus
from support import Calls, breakable, connect, counted, publishing, slow, triple, tripled
from view_support import STABLE, make_source, make_view, numbers, values


class TestReadingAndWriting:
    def test_system_columns_are_hidden(self, local_db: Connection, calls: Calls) -> None:
        view = make_view(local_db, make_source(local_db), calls)
        view.refresh()
        assert view.schema.names == ["id", "t"]
        assert view.to_arrow().column_names == ["id", "t"]
        assert list(view.to_pandas().columns) == ["id", "t"]
        assert view.head(2).column_names == ["id", "t"]
        assert view.search().limit(3).to_arrow().column_names == ["id", "t"]
        assert view.query().to_arrow().column_names == ["id", "t"]
        *every, receipt = view.to_arrow(include_system=True).column_names
        assert every == ["__source_row_id", "__is_set", "id", "t"]
        assert receipt.startswith("__receipt_")
        assert list(view.to_pandas(include_system=True).columns) == [*every, receipt]

    def test_direct_writes_are_refused(self, local_db: Connection, calls: Calls) -> None:
        view = make_view(local_db, make_source(local_db), calls)
        view.refresh()
        before = view.version
        for attempt in (
            lambda: view.add(numbers(0, 1)),
            lambda: view.update(where="id = 0", values={"t": 1}),
            lambda: view.delete("id = 0"),
            lambda: view.merge_insert("id"),
            lambda: view.drop_columns(["t"]),
            lambda: view.drop_columns("__is_set"),
            lambda: view.alter_columns({"path": "id", "rename": "key"}),
        ):
            with pytest.raises(UserInputError, match=r"not possible on materialized view 'v'.*src"):
                attempt()
        assert view.version == before

    def test_columns_may_be_added_and_dropped(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        view.refresh()
        more = counted(calls, lambda t: t + 1, data_type=pa.int64())
        view.add_columns({"u": (more, ["t"])})
        view.backfill("u")
        calls.clear()
        source.add(numbers(10, 12))
        source.update(where="id = 4", values={"id": 40})
        view.refresh()
        calls.clear()
        view.backfill("u")
        assert calls.taken() == [30, 120]
        assert values(view, "u") == {i: i * 3 + 1 for i in (0, 2, 6, 8, 10, 40)}
        view.drop_columns(["u"])
        assert view.plan_refresh().is_empty
        assert view.schema.names == ["id", "t"]

    def test_a_vector_column_is_indexed_and_searched(self, local_db: Connection) -> None:
        rng = np.random.default_rng(1)
        vectors = rng.normal(size=(300, 8)).astype(np.float32)
        kind = pa.list_(pa.float32(), 8)
        data = pa.table(
            {"id": np.arange(300), "v": pa.FixedSizeListArray.from_arrays(vectors.ravel(), 8)}
        )
        source = local_db.create_table("src", data, storage_options=STABLE)
        negative = udf(lambda v: [-x for x in v], data_type=kind)
        query = source.query().where("id >= 10").add_column({"w": (negative, ["v"])})
        view = local_db.create_materialized_view("view", query)
        view.refresh()
        view.create_index("w", config=IvfPq(num_partitions=2, num_sub_vectors=4))
        found = view.search(-vectors[42], vector_column_name="w").nprobes(2).limit(3).to_arrow()
        assert found["id"].to_pylist()[0] == 42
        assert not [name for name in found.column_names if name.startswith("__")]
        source.add(data.slice(0, 5))
        source.delete("id = 42")
        view.refresh()
        found = view.search(-vectors[42], vector_column_name="w").nprobes(2).limit(3).to_arrow()
        assert 42 not in found["id"].to_pylist()
        assert len(view) == 289


class TestFailures:
    def test_an_error_names_the_place_and_keeps_what_is_finished(
        self, local_db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        broken = tmp_path / "broken"
        broken.write_text(json.dumps([12]))
        source = make_source(local_db, rows=6)
        query = source.query().add_column({"t": breakable(calls, broken)})
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        source.add(numbers(6, 16))
        calls.clear()
        with pytest.raises(UDFExecutionError, match=r"'v', column 't', fragment \d, row 1\b"):
            view.refresh(max_rows_per_fragment=5, commit_granularity=1, concurrency=1)
        assert local_db.list_jobs()[0].status is JobStatus.FAILED
        assert view.source_version < source.version
        done = calls.taken()
        mended = counted(calls, triple)
        view.alter_columns({"path": "t", "udf": mended})
        view.refresh()
        assert values(view) == {i: i * 3 for i in range(16)}
        assert 12 in done

    def test_a_mended_function_of_the_same_meaning_goes_on(
        self, local_db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        broken = tmp_path / "broken"
        broken.write_text(json.dumps([12]))
        source = make_source(local_db, rows=16)
        query = source.query().add_column({"t": breakable(calls, broken, version="1", name="f")})
        view = local_db.create_materialized_view("v", query)
        with pytest.raises(UDFExecutionError):
            view.refresh(checkpoint_size=2, concurrency=1)
        finished = set(calls.taken()) - {12}
        broken.unlink()
        view.alter_columns({"path": "t", "udf": counted(calls, triple, version="1", name="f")})
        view.refresh(checkpoint_size=2)
        again = calls.taken()
        assert len(finished) >= 8
        assert not finished & set(again) - {12, 13}
        assert values(view) == {i: i * 3 for i in range(16)}

    def test_it_can_be_cancelled(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db, rows=8)

        def slow(id: int) -> int:
            time.sleep(0.1)
            return id * 3

        query = source.query().add_column({"t": counted(calls, slow)})
        view = local_db.create_materialized_view("v", query)
        future = view.refresh_async(checkpoint_size=1, task_size=1, concurrency=1)
        while not calls.count:
            time.sleep(0.01)
        future.cancel()
        with pytest.raises(JobCancelledError):
            future.result(timeout=60)
        done = set(calls.taken())
        view.refresh(checkpoint_size=1)
        assert values(view) == {i: i * 3 for i in range(8)}
        assert not done & set(calls.taken())

    def test_it_ends_in_time(self, local_db: Connection) -> None:
        def slow(id: int) -> int:
            time.sleep(0.2)
            return id

        query = make_source(local_db, rows=8).query().add_column({"t": udf(slow)})
        view = local_db.create_materialized_view("v", query)
        with pytest.raises(JobTimeoutError):
            view.refresh(timeout=0.3, task_size=1)

    def test_what_a_crash_left_of_another_version_is_found(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Values of a version that no refresh ever ended at, which the next one doesn't want."""
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        view.refresh()
        old = source.version
        source.update(where="id = 2", values={"id": 100})
        source.add(numbers(10, 12))
        source.delete("id = 4")
        _cut_off(monkeypatch, refresh, "commit_refreshed", view.refresh)
        assert 100 in values(view)
        calls.clear()
        view.refresh(src_version=old)
        assert values(view) == {i: i * 3 for i in range(0, 10, 2)}
        assert calls.taken() == [2, 4]

    @pytest.mark.parametrize("refreshed", [False, True])
    def test_what_a_crash_left_of_a_source_that_was_made_anew_is_refused(
        self,
        local_db: Connection,
        calls: Calls,
        monkeypatch: pytest.MonkeyPatch,
        refreshed: bool,
    ) -> None:
        """Another table has the same name, versions and row ids, and other values."""
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        if refreshed:
            view.refresh()
            source.add(numbers(10, 12))
        _cut_off(monkeypatch, refresh, "commit_refreshed", view.refresh)
        version, before = source.version, values(view)
        local_db.drop_table("src")
        source = local_db.create_table("src", numbers(100, 110), storage_options=STABLE)
        if refreshed:
            source.add(numbers(110, 112))
        assert source.version == version
        calls.clear()
        for attempt in (view.plan_refresh, view.refresh):
            with pytest.raises(UserInputError, match="'src' was dropped and made anew"):
                attempt()
        assert values(view) == before
        assert calls.count == 0

    def test_a_source_that_is_made_anew_while_a_refresh_reads_it(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        view = make_view(local_db, make_source(local_db), calls)
        real = refresh.run_side_by_side

        def replacing(*args: Any, **kwargs: Any) -> Any:
            done = real(*args, **kwargs)
            local_db.drop_table("src")
            local_db.create_table("src", numbers(100, 110), storage_options=STABLE)
            return done

        with monkeypatch.context() as patched:
            patched.setattr(refresh, "run_side_by_side", replacing)
            with pytest.raises(UserInputError, match="'src' was dropped and made anew"):
                view.refresh()
        with pytest.raises(UserInputError, match="'src' was dropped and made anew"):
            view.refresh()

    def test_the_same_for_chunks(
        self, local_db: Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = make_source(local_db, rows=4)
        view = local_db.create_udtf_view("v", source.query().select(["id"]), _letters)
        view.refresh()
        old, before = source.version, _sorted_rows(view)
        source.update(where="id = 2", values={"name": "abc"})
        source.add(numbers(10, 12))
        source.delete("id = 1")
        _cut_off(monkeypatch, explode, "commit_chunks", view.refresh, after=True)
        assert _sorted_rows(view) != before
        view.refresh(src_version=old)
        assert _sorted_rows(view) == before
        view.refresh()
        assert len(view) == 2 + 3 + 2 + 3 + 3


def _cut_off(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, run: Any, *, after: bool = False
) -> None:
    real = getattr(owner, name)

    def dying(*args: Any, **kwargs: Any) -> None:
        if after:
            real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dying)
        with pytest.raises(KeyboardInterrupt):
            run()


@chunker(output_schema=pa.schema([("letter", pa.string())]))
def _letters(name: str) -> Iterator[dict[str, Any]]:
    for letter in name:
        yield {"letter": letter}


def _sorted_rows(view: Any) -> list[str]:
    return sorted(map(str, view.to_arrow().to_pylist()))


def test_a_chunked_view_counts_rows_of_its_source(local_db: Connection) -> None:
    source = make_source(local_db, rows=3)
    view = local_db.create_udtf_view("v", source.query().select(["id"]), _letters)
    assert view.plan_refresh().rows_entering == 3
    result = view.refresh()
    assert (result.rows_computed, result.rows_committed, result.progress.total) == (3, 3, 3)
    assert str(result).startswith("DONE: 3 source rows computed, 3 committed in ")


def test_a_row_of_some_columns_is_one_row(local_db: Connection, calls: Calls) -> None:
    data = pa.table({"id": [1, 2, 3], "other": [10, 20, 30]})
    source = local_db.create_table("src", data, storage_options=STABLE)
    query = source.query().select({"id": "id", "t": tripled(calls)})
    less = udf(lambda other: other - 1, name="less", data_type=pa.int64())
    view = local_db.create_materialized_view("v", query.add_column({"less": less}))
    view.refresh()
    source.update(where="id = 2", values={"other": 21})
    source.add(pa.table({"id": [4], "other": [40]}))
    result = view.refresh()
    assert (result.rows_computed, result.rows_committed, result.progress.total) == (3, 2, 2)
    assert "3 values of 2 functions computed, 2 rows committed" in str(result)
    source.update(where="id = 2", values={"id": 5})
    result = view.refresh(concurrency=1)
    assert (result.rows_computed, result.rows_committed) == (1, 1)
    assert str(result).startswith("DONE: 1 row computed, 1 committed in ")


class TestAltering:
    def test_the_same_function_of_other_columns(self, local_db: Connection, calls: Calls) -> None:
        data = pa.table({"id": [1, 2], "other": [10, 20]})
        source = local_db.create_table("src", data, storage_options=STABLE)
        query = source.query().select({"id": "id", "t": tripled(calls)})
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        view.alter_columns({"path": "t", "udf": (tripled(calls), ["other"])})
        view.refresh()
        assert values(view) == {1: 30, 2: 60}
        source.update(where="id = 2", values={"other": 21})
        calls.clear()
        view.refresh()
        assert calls.taken() == [21]
        assert values(view) == {1: 30, 2: 63}

    def test_a_chunker_and_a_column_beside_it(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db, rows=3)
        query = source.query().select({"id": "id", "t": tripled(calls)}).add_column(_letters)
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        assert values(view) == {0: 0, 1: 3, 2: 6}
        view.alter_columns({"path": "t", "udf": udf(lambda id: -id, data_type=pa.int64())})
        view.refresh()
        assert values(view) == {0: 0, 1: -1, 2: -2}

        @chunker(output_schema=pa.schema([("letter", pa.string())]))
        def first(name: str) -> Any:
            return [(name[0],)]

        view.alter_columns({"path": "_letters", "udf": first})
        assert not view.plan_refresh().is_empty
        view.refresh()
        assert view.to_arrow()["letter"].to_pylist() == ["n"] * 3
        for name in ("letter", "t", "id"):
            with pytest.raises(UserInputError, match="not possible"):
                view.drop_columns([name])

    def test_all_of_a_call_or_nothing(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db, rows=3)
        query = source.query().select({"id": "id", "t": tripled(calls)}).add_column(_letters)
        view = local_db.create_materialized_view("v", query)
        view.add_columns({"u": (tripled(calls), ["id"])})
        fine = {"path": "t", "udf": udf(lambda id: -id, data_type=pa.int64())}
        again = chunker(_letters.func, output_schema=_letters.output_schema, version="2")
        maker = {"path": "_letters", "udf": again}
        own = {"path": "u", "udf": udf(lambda id: -id, data_type=pa.int64())}

        def declared() -> list[Any]:
            schemas = [lance.dataset(view.ref.uri + part).schema for part in ("", "/_chunks")]
            return [field.metadata for schema in schemas for field in schema]

        before = declared()
        for wrong in (
            {"path": "u", "udf": (tripled(calls), ["nope"])},
            {"path": "u", "udf": udf(lambda id: "x", data_type=pa.string())},
            {"path": "nope", "udf": tripled(calls)},
            {"path": "u", "data_type": pa.string()},
        ):
            with pytest.raises(GenevaError):
                view.alter_columns(maker, fine, wrong)
            assert declared() == before, wrong
        view.alter_columns(maker, fine, own)
        view.refresh()
        view.backfill("u")
        assert values(view) == values(view, "u") == {0: 0, 1: -1, 2: -2}
        assert calls.count == 0

    def test_columns_added_to_chunks(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db, rows=3)
        view = local_db.create_udtf_view("v", source.query().select(["id"]), _letters)
        view.refresh()
        shout = counted(calls, lambda letter: letter.upper(), data_type=pa.string())
        view.add_columns({"shout": (shout, ["letter"])})
        view.backfill("shout")
        source.add(numbers(3, 4))
        source.delete("id = 0")
        view.refresh()
        calls.clear()
        view.backfill("shout")
        assert calls.taken() == ["3", "n"]
        rows = view.to_arrow().to_pylist()
        assert [row["shout"] for row in rows] == [row["letter"].upper() for row in rows]
        assert len(rows) == 6


class TestRivals:
    @pytest.mark.parametrize(
        "place", ["append_placeholders", slow("publish_columns"), slow("delete_view_rows")]
    )
    def test_a_compaction_of_the_view_meanwhile(
        self,
        local_db: Connection,
        calls: Calls,
        monkeypatch: pytest.MonkeyPatch,
        place: str,
    ) -> None:
        source = make_source(local_db, rows=4)
        view = make_view(local_db, source, calls)
        view.refresh()
        for start in (4, 8):
            source.add(numbers(start, start + 4))
            view.refresh()
        source.delete("id = 2")
        source.update(where="id = 4", values={"id": 44})
        source.add(numbers(12, 16))
        owners = {"publish_columns": committer, "delete_view_rows": view_rows}
        owner = owners.get(place, refresh)
        real, turns = getattr(owner, place), iter([True])

        def compacting(*args: Any, **kwargs: Any) -> Any:
            if next(turns, False):
                lance.dataset(view.ref.uri).optimize.compact_files()
            return real(*args, **kwargs)

        if owner is committer:
            local_db._make_committer = partial(TableCommitter, publish=compacting)
        else:
            monkeypatch.setattr(owner, place, compacting)
        calls.clear()
        view.refresh(concurrency=1)
        assert calls.taken() == [12, 14, 44]
        assert values(view) == {i: i * 3 for i in (0, 6, 8, 10, 12, 14, 44)}
        assert view.plan_refresh().is_empty
        lance.dataset(view.ref.uri).validate()

    def test_another_refresh_is_refused_while_one_runs(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        real, here, go_on = refresh.append_placeholders, threading.Event(), threading.Event()

        def waiting(*args: Any, **kwargs: Any) -> Any:
            here.set()
            assert go_on.wait(30)
            return real(*args, **kwargs)

        monkeypatch.setattr(refresh, "append_placeholders", waiting)
        future = view.refresh_async()
        assert here.wait(30)
        try:
            with pytest.raises(TableChangedError, match=f"refreshed by job {future.job_id}"):
                local_db.open_table("v").refresh()  # type: ignore[attr-defined]
        finally:
            go_on.set()
        future.result(timeout=60)
        assert values(view) == {i: i * 3 for i in range(0, 10, 2)}
        assert view.refresh().rows_computed == 0

    def test_the_version_that_is_read_can_not_be_cleaned_up(
        self, local_db: Connection, calls: Calls
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        seen: list[int] = []

        def looking(*args: Any, **kwargs: Any) -> Any:
            tags = lance.dataset(source.ref.uri).tags.list().values()
            seen.extend(tag["version"] for tag in tags)
            return publish_columns(*args, **kwargs)

        with publishing(local_db, looking):
            view.refresh()
        assert set(seen) == {source.version}
        assert not lance.dataset(source.ref.uri).tags.list()

    def test_a_plan_that_another_refresh_has_overtaken(
        self, local_db: Connection, calls: Calls
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        view.refresh()
        source.add(numbers(10, 14))
        prepared = view._prepare_refresh(None, None, _options())
        local_db.open_table("v").refresh()  # type: ignore[attr-defined]
        calls.clear()
        local_db._job(prepared, on_commit=lambda: None).run()
        assert calls.taken() == []
        view.checkout_latest()
        assert values(view) == {i: i * 3 for i in range(0, 14, 2)}
        assert len(view) == 7


def _options() -> Any:
    from geneva.options import JobOptions

    return JobOptions()


class TestOtherProcesses:
    NOTHING_TO_DO = """
import sys, geneva
db = geneva.connect(sys.argv[1])
view = db.open_table("v")
repr(view), view.definition, str(view.plan_refresh()), db.list_materialized_views()
result = view.refresh()
assert result.status == "DONE" and result.rows_computed == 0, result
assert "pyspark" not in sys.modules and "py4j" not in sys.modules
"""
    PLANNING = """
import sys, pickle, geneva
import geneva.udf.declare
def never(*args): raise AssertionError("user code was loaded")
geneva.udf.deserialize_udf = never
db = geneva.connect(sys.argv[1])
view = db.open_table("v")
assert view.plan_refresh().rows_to_run == 5
assert view.computed_columns()["t"].udf_name == "triple"
"""
    REFRESH = """
import sys, geneva
from geneva.execution.runner import InProcessRunner
db = geneva.connect(sys.argv[1], runner=InProcessRunner if sys.argv[2] == "here" else None)
result = db.open_table("v").refresh()
assert db.get_job(result).status == "DONE"
assert sorted(db.open_table("v").to_arrow()["t"].to_pylist()) == [0, 6, 12, 18, 24]
assert ("pyspark" in sys.modules) == (sys.argv[2] == "spark")
"""

    @pytest.mark.slow
    def test_planning_runs_no_user_code(self, local_db: Connection, calls: Calls) -> None:
        make_view(local_db, make_source(local_db), calls)
        _run_script(self.PLANNING, local_db.uri)

    @pytest.mark.slow
    def test_the_functions_are_in_the_view(self, local_db: Connection, calls: Calls) -> None:
        make_view(local_db, make_source(local_db), calls)
        _run_script(self.REFRESH, local_db.uri, "here")
        assert calls.taken() == [0, 2, 4, 6, 8]

    @pytest.mark.slow
    def test_nothing_to_do_starts_no_spark(self, local_db: Connection, calls: Calls) -> None:
        make_view(local_db, make_source(local_db), calls).refresh()
        _run_script(self.NOTHING_TO_DO, local_db.uri)

    @pytest.mark.spark
    @pytest.mark.slow
    def test_a_refresh_on_spark(self, tmp_path: Path, calls: Calls) -> None:
        db = connect(tmp_path / "db", None)
        make_view(db, make_source(db), calls)
        _run_script(self.REFRESH, db.uri, "spark")
        assert calls.taken() == [0, 2, 4, 6, 8]


def _run_script(code: str, *arguments: str) -> None:
    tests = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{code}", *arguments],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_a_refresh_that_only_lets_rows_go_says_so(local_db: Connection) -> None:
    source = make_source(local_db, rows=3)
    ends = pa.schema([("n", pa.int64())])
    views = [
        local_db.create_materialized_view("plain", source.query().select(["id"])),
        local_db.create_udtf_view(
            "chunked", source, chunker(lambda id: [(id,)], output_schema=ends)
        ),
        local_db.create_udtf_view(
            "parted", source, udtf(lambda rows: [], output_schema=ends, partition_by="id")
        ),
    ]
    for view in views:
        view.refresh()
    source.delete("id = 1")
    for view in views:
        assert str(view.refresh()).startswith("DONE: 1 source row gone, nothing to compute (job ")
        assert str(view.refresh()).startswith("DONE: nothing to do (job ")

"""The examples of the seeds as they are written there, on every runner.

Their sketches of Ray actors aside: of those, what a user can see of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from geneva import UDF, Connection, JobFuture, JobStatus, Table, udf
from geneva.checkpoint import CheckpointStore, InMemoryCheckpointStore, LanceCheckpointStore
from geneva.checkpoint_utils import CheckpointKey, WorkIdentity
from geneva.model.rows import RowRange
from support import (
    Calls,
    checkpoint_ranges,
    checkpoint_store,
    column,
    counted,
    make_table,
    uncommitted,
)

WIDTH = 768
VECTOR = pa.list_(pa.float32(), 2)


class Encoder:
    """Stands for a model."""

    def encode(self, text: str) -> list[float]:
        return [float(len(text))] + [0.0] * (WIDTH - 1)


model = Encoder()


def load_image(path: str) -> str:
    return path.removesuffix(".png")


def embedding_of(text: str) -> list[float]:
    return model.encode(text)


@pytest.fixture
def table(db: Connection) -> Table:
    """`my_table`: 6 rows in 2 fragments, the younger half of them from this month."""
    now = datetime.now(UTC).replace(tzinfo=None)
    days = [800, 700, 600, 3, 2, 1]
    data = pa.table(
        {
            "id": pa.array(range(6), pa.int64()),
            "text": ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"],
            "image_path": [f"{'x' * i}.png" for i in range(6)],
            "created_at": pa.array([now - timedelta(days=d) for d in days], pa.timestamp("us")),
        }
    )
    return make_table(db, [data.slice(0, 3), data.slice(3)], "my_table")


def widths(table: Table) -> list[float | None]:
    """The first item of each vector."""
    return [v[0] if v is not None else None for v in column(table, "embedding")]


@pytest.fixture
def embedded(table: Table, calls: Calls) -> Table:
    """`my_table` with the column of the examples, counted."""
    compute_embedding = counted(
        calls, lambda text: model.encode(text), data_type=pa.list_(pa.float32(), WIDTH)
    )
    table.add_columns({"embedding": compute_embedding})
    return table


class TestWorkflow:
    def test_defining_a_column_with_a_udf(self, db: Connection, table: Table) -> None:
        # Define the UDF
        @udf(data_type=pa.list_(pa.float32(), 768))
        def compute_embedding(text: str) -> list[float]:
            # Your embedding logic here
            return model.encode(text)

        # Connect and add the column
        table = db.open_table("my_table")
        table.add_columns({"embedding": compute_embedding})

        # At this point, the column exists in the schema but all values are NULL.
        assert table.schema.field("embedding").type == pa.list_(pa.float32(), 768)
        assert column(table, "embedding") == [None] * 6

        job_id = table.backfill("embedding", concurrency=16)
        assert db._history.get(job_id).status is JobStatus.DONE
        assert job_id.rows_computed == 6
        assert widths(table) == [1, 2, 3, 4, 5, 6]


class TestParameters:
    def test_increased_parallelism(self, embedded: Table, calls: Calls) -> None:
        embedded.backfill("embedding", concurrency=32)
        assert widths(embedded) == [1, 2, 3, 4, 5, 6]
        assert calls.count == 6

    def test_only_new_rows(self, embedded: Table, calls: Calls) -> None:
        embedded.backfill("embedding", where="created_at > '2024-01-01'")
        assert {"dddd", "eeeee", "ffffff"} <= set(calls.rows)
        assert calls.count == sum(value is not None for value in widths(embedded))

    def test_smaller_batches(self, embedded: Table, calls: Calls) -> None:
        embedded.backfill("embedding", checkpoint_size=50, concurrency=4)
        assert calls.count == 6

    def test_less_memory(self, embedded: Table, calls: Calls) -> None:
        embedded.backfill("embedding", checkpoint_size=25, task_size=100)
        assert calls.count == 6

    def test_time_travel(self, embedded: Table, calls: Calls) -> None:
        result = embedded.backfill("embedding", read_version=embedded.version)
        assert (result.rows_computed, calls.count) == (6, 6)

    def test_threads_within_fewer_workers(self, embedded: Table, calls: Calls) -> None:
        embedded.backfill("embedding", concurrency=2000, intra_applier_concurrency=5)
        assert widths(embedded) == [1, 2, 3, 4, 5, 6]
        assert calls.count == 6


class TestScenarios:
    def test_1_embeddings_for_images(self, table: Table) -> None:
        @udf(data_type=pa.list_(pa.float32(), 768), num_gpus=1)
        def image_embedding(image_path: str) -> list[float]:
            return model.encode(load_image(image_path))

        table.add_columns({"embedding": image_embedding})

        # Backfill with GPU workers
        job_id = table.backfill("embedding", concurrency=4)  # 4 GPU workers
        assert job_id.rows_computed == 6
        assert widths(table) == [0, 1, 2, 3, 4, 5]
        assert table.computed_columns()["embedding"].num_gpus == 1

    def test_2_new_rows(self, embedded: Table, calls: Calls) -> None:
        embedded.backfill("embedding")
        calls.clear()
        table, new_images_data = embedded, pa.table({"id": [6], "text": ["ggggggg"]})

        # Add new data to the table
        table.add(new_images_data)

        # Run the same backfill command - it automatically processes only new data
        job_id = table.backfill("embedding")
        assert calls.rows == ["ggggggg"]
        assert job_id.rows_computed == 1
        assert job_id.fragments_committed == 1
        assert widths(table) == [1, 2, 3, 4, 5, 6, 7]

    def test_3_rows_that_came_with_a_value(self, embedded: Table, calls: Calls) -> None:
        table = embedded
        table.backfill("embedding")
        calls.clear()
        given: dict[str, Any] = {
            "id": [6, 7],
            "text": ["external", "missing"],
            "embedding": pa.array([[99.0] * WIDTH, None], pa.list_(pa.float32(), WIDTH)),
        }
        table.add(pa.table(given))

        # Only backfill rows where embedding is NULL
        table.backfill("embedding", where="embedding IS NULL")
        assert calls.rows == ["missing"]
        assert widths(table) == [1, 2, 3, 4, 5, 6, 99, 7]

    def test_3_a_value_that_came_with_a_row_is_kept_without_a_clause(
        self, embedded: Table, calls: Calls
    ) -> None:
        table = embedded
        given: dict[str, Any] = {
            "id": [6, 7],
            "text": ["external", "missing"],
            "embedding": pa.array([[99.0] * WIDTH, None], pa.list_(pa.float32(), WIDTH)),
        }
        table.add(pa.table(given))
        table.backfill("embedding")
        assert "external" not in calls.rows
        assert calls.count == 7
        assert widths(table) == [1, 2, 3, 4, 5, 6, 99, 7]

    def test_4_resuming_a_failed_backfill(self, table: Table, calls: Calls, tmp_path: Path) -> None:
        from geneva.errors import UDFExecutionError

        broken = tmp_path / "broken"
        broken.touch()
        path = str(broken)

        def fragile(text: str) -> list[float]:
            if len(text) > 4 and Path(path).exists():
                raise RuntimeError("out of memory")
            return model.encode(text)

        table.add_columns(
            {"embedding": counted(calls, fragile, data_type=pa.list_(pa.float32(), WIDTH))}
        )
        with pytest.raises(UDFExecutionError, match="out of memory"):
            table.backfill(
                "embedding", checkpoint_size=1, task_size=3, commit_granularity=1, concurrency=1
            )
        assert widths(table) == [1, 2, 3, None, None, None]
        broken.unlink()
        calls.clear()

        # Simply run the backfill again - it will resume from checkpoints
        job_id = table.backfill("embedding")
        assert calls.rows == ["eeeee", "ffffff"]
        assert (job_id.rows_computed, job_id.rows_reused) == (2, 1)
        assert widths(table) == [1, 2, 3, 4, 5, 6]

    def test_5_recent_data(self, embedded: Table, calls: Calls) -> None:
        table = embedded

        # Or using a relative date expression
        table.backfill("embedding", where="created_at > now() - interval '30 days'")
        assert calls.rows == ["dddd", "eeeee", "ffffff"]
        assert widths(table) == [None, None, None, 4, 5, 6]
        calls.clear()

        # Phased: then expand the date range
        table.backfill("embedding", where="created_at > '2001-06-01' AND embedding IS NULL")
        assert calls.rows == ["a", "bb", "ccc"]
        assert widths(table) == [1, 2, 3, 4, 5, 6]


class TestReference:
    def test_async_usage(self, embedded: Table, calls: Calls) -> None:
        table = embedded
        # Start backfill without blocking
        fut = table.backfill_async("embedding")

        # Check status
        assert fut.status() in tuple(JobStatus)

        # Wait for completion
        job_id = fut.result()
        assert fut.status() is JobStatus.DONE
        assert (job_id.rows_computed, calls.count) == (6, 6)

    def test_job_history(self, db: Connection, embedded: Table, calls: Calls) -> None:
        job_id = embedded.backfill("embedding")
        # List recent jobs
        assert job_id in [record.job_id for record in db._history.list()]

        # Get job status
        assert db._history.get(job_id).status == "DONE"
        assert calls.count == 6

    def test_other_input_columns(self, table: Table, calls: Calls) -> None:
        my_udf = counted(calls, lambda x: len(x), data_type=pa.int64())
        with pytest.raises(ValueError, match="'x'"):
            table.add_columns({"output": my_udf})
        table.add_columns({"output": (my_udf, ["text"])})
        table.backfill("output")
        assert column(table, "output") == [1, 2, 3, 4, 5, 6]
        assert calls.count == 6

    def test_checkpoints_are_beside_the_data(self, embedded: Table, calls: Calls) -> None:
        embedded.backfill("embedding", checkpoint_size=2, task_size=3)
        folder = Path(embedded.ref.uri) / "_checkpoints"
        names = [path.name for path in folder.iterdir()]
        assert names
        for name in names:
            assert name.startswith("udf-")
            assert name.endswith(".lance")
            for part in ("_ver-", "_col-embedding_", "_where-", "_uri-", "_srcfiles-", "_frag-"):
                assert part in name
        assert calls.count == 6


def test_a_slow_model_is_loaded_once_and_vectors_arrive_whole(
    db: Connection, calls: Calls, tmp_path: Path
) -> None:
    loads = Calls(str(tmp_path / "loads"))

    class Embedder:
        def setup(self) -> None:
            time.sleep(0.05)
            loads.note([1])
            self.base = np.arange(8, dtype=np.float32)

        def __call__(self, id: int) -> np.ndarray:
            calls.note([id])
            return self.base * id

    table = make_table(db, [5, 5, 5])
    table.add_columns({"v": udf(Embedder, data_type=pa.list_(pa.float32(), 8))()})
    table.backfill("v", task_size=5)
    assert column(table, "v") == [[float(i * j) for j in range(8)] for i in range(15)]
    assert calls.rows == list(range(15))
    assert 1 <= loads.count <= 2


# ------------------------------------------------------------------------------ 000: conflicts


def times(calls: Calls, factor: int, name: str = "a", **options: Any) -> UDF:
    """A column of the scenarios: `factor` times its input."""
    function = counted(calls, lambda a: a * factor, data_type=pa.int64(), **options)
    return function if name == "a" else function.with_inputs([name])


@pytest.fixture
def numbered(db: Connection) -> Table:
    """Ten fragments of 2 rows, with the raw column `a`."""
    rows = [pa.table({"a": [2 * i, 2 * i + 1]}) for i in range(10)]
    return make_table(db, rows, "numbers")


class TestSequentialScenarios:
    def test_backfill_compact_backfill_again(self, numbered: Table, calls: Calls) -> None:
        numbered.add_columns({"b": times(calls, 3)})
        numbered.backfill("b")
        numbered.compact_files()
        calls.clear()
        assert numbered.backfill("b").rows_computed == 0
        numbered.add_columns({"c": times(calls, 5)})
        numbered.backfill("c")
        assert sorted(column(numbered, "c")) == [5 * i for i in range(20)]
        assert calls.count == 20

    def test_a_a_partial_backfill_a_compaction_and_the_rest(
        self, numbered: Table, calls: Calls
    ) -> None:
        numbered.add_columns({"b": times(calls, 3)})
        numbered.backfill("b", num_frags=3)
        numbered.compact_files()
        numbered.backfill("b")
        assert calls.rows == list(range(20)), "each row once"
        assert sorted(column(numbered, "b")) == [3 * i for i in range(20)]

    @pytest.mark.parametrize("compacted", [False, True], ids=["b", "c"])
    def test_another_udf_computes_all_rows(
        self, numbered: Table, calls: Calls, compacted: bool
    ) -> None:
        numbered.add_columns({"b": times(calls, 3)})
        numbered.backfill("b", num_frags=3)
        if compacted:
            numbered.compact_files()
        calls.clear()
        numbered.alter_columns({"path": "b", "udf": times(calls, 7)})
        numbered.backfill("b")
        assert calls.rows == list(range(20))
        assert sorted(column(numbered, "b")) == [7 * i for i in range(20)]

    def test_d_a_first_backfill(self, numbered: Table, calls: Calls) -> None:
        numbered.add_columns({"b": times(calls, 3)})
        numbered.backfill("b")
        assert calls.rows == list(range(20))

    def test_a_column_made_from_another_one(self, numbered: Table, calls: Calls) -> None:
        numbered.add_columns({"b": times(calls, 3)})
        numbered.add_columns({"c": times(calls, 10, "b")})
        numbered.backfill("b")
        numbered.backfill("c")
        numbered.alter_columns({"path": "b", "udf": times(calls, 4)})
        numbered.backfill("b")
        numbered.backfill("c")
        assert column(numbered, "c") == [40 * i for i in range(20)]

    def test_an_explicit_filter_beside_stale_rows_is_warned_of(
        self, numbered: Table, calls: Calls, caplog: pytest.LogCaptureFixture
    ) -> None:
        numbered.add_columns({"b": times(calls, 3)})
        numbered.backfill("b")
        numbered.alter_columns({"path": "b", "udf": times(calls, 7)})
        calls.clear()
        for _ in range(2):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "geneva"):
                numbered.backfill("b", where="b IS NULL")
            assert any('where="1=1"' in record.getMessage() for record in caplog.records)
        assert calls.count == 0
        numbered.backfill("b", where="1=1")
        assert column(numbered, "b") == [7 * i for i in range(20)]

    def test_struct_columns(self, numbered: Table, calls: Calls) -> None:
        kind = pa.struct([("lpad", pa.string()), ("rpad", pa.string())])

        def pads(by: str) -> UDF:
            return counted(
                calls, lambda a: {"lpad": f"{by}{a}", "rpad": None}, data_type=kind, version=by
            )

        numbered.add_columns({"s": pads(" ")})
        numbered.backfill("s", where="a % 2 = 0")
        numbered.backfill("s")
        assert calls.taken() == list(range(20)), "a partial backfill is no reason to start over"
        numbered.alter_columns({"path": "s", "udf": pads("-")})
        numbered.backfill("s")
        assert calls.taken() == list(range(20))
        assert column(numbered, "s")[1] == {"lpad": "-1", "rpad": None}

    def test_a_column_that_is_dropped_and_added_again(self, numbered: Table, calls: Calls) -> None:
        for factor in (3, 3):
            numbered.add_columns({"b": times(calls, factor)})
            numbered.backfill("b", checkpoint_size=2)
            assert column(numbered, "b") == [3 * i for i in range(20)]
            numbered.drop_columns(["b"])


class Gate:
    """A UDF that waits in its first call until it is let go on."""

    def __init__(self, folder: Path, calls: Calls) -> None:
        self._begun, self._open = folder / "begun", folder / "open"
        begun, opened = str(self._begun), str(self._open)

        def slowly(a: int) -> int:
            Path(begun).touch()
            deadline = time.monotonic() + 60
            while not Path(opened).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return a * 3

        self.udf = counted(calls, slowly, data_type=pa.int64())

    def run(self, table: Table, meanwhile: Callable[[], object]) -> None:
        """Backfill `b`, and do something while it runs."""
        fut: JobFuture = table.backfill_async("b")
        deadline = time.monotonic() + 60
        while not self._begun.exists() and not fut.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        meanwhile()
        self._open.touch()
        fut.result()
        assert fut.done()


class TestDuringABackfill:
    @pytest.fixture
    def gate(self, tmp_path: Path, calls: Calls) -> Iterator[Gate]:
        return Gate(tmp_path, calls)

    @pytest.mark.parametrize("operation", ["insert", "upsert", "append", "column", "compaction"])
    def test_others_may_write(self, numbered: Table, gate: Gate, operation: str) -> None:
        numbered.add_columns({"b": gate.udf})
        new = pa.table({"a": [100]})

        def meanwhile() -> None:
            match operation:
                case "insert":
                    numbered.merge_insert("a").when_not_matched_insert_all().execute(new)
                case "upsert":
                    numbered.merge_insert("a").when_matched_update_all().execute(
                        pa.table({"a": [3]})
                    )
                case "append":
                    numbered.add(new)
                case "column":
                    numbered.add_columns({"other": "a + 1"})
                case "compaction":
                    numbered.compact_files()

        gate.run(numbered, meanwhile)
        numbered.backfill("b")
        values = dict(zip(column(numbered, "a"), column(numbered, "b"), strict=True))
        assert values == {a: 3 * a for a in values}
        assert len(values) == (21 if operation in ("insert", "append") else 20)

    def test_rows_may_be_deleted(self, numbered: Table, gate: Gate) -> None:
        numbered.add_columns({"b": gate.udf})
        gate.run(numbered, lambda: numbered.delete("a IN (3, 4, 5)"))
        left = [i for i in range(20) if i not in (3, 4, 5)]
        assert column(numbered, "b") == [3 * i for i in left]

    @pytest.mark.slow
    def test_nine_columns_at_once(self, numbered: Table, calls: Calls) -> None:
        names = "bcdefghij"
        for place, name in enumerate(names):
            numbered.add_columns({name: times(calls, place + 2)})
        futures = [numbered.backfill_async(name, concurrency=1) for name in names]
        for fut in futures:
            # Check for errors before running subsequent operations
            fut.result()
        for place, name in enumerate(names):
            assert column(numbered, name) == [(place + 2) * i for i in range(20)]
        assert calls.count == 9 * 20


# ------------------------------------------------- 001 and 002: writers, commits, checkpoints


class TestCheckpointStores:
    @pytest.fixture(params=["memory", "lance"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
        if request.param == "memory":
            return InMemoryCheckpointStore()
        return LanceCheckpointStore(str(tmp_path / "store"))

    def test_the_operations(self, store: CheckpointStore) -> None:
        prefix = WorkIdentity(
            "video_udf", "abc123def456", "embedding", "x > 10", "/t", (), "id"
        ).prefix()
        key = CheckpointKey(prefix, 3).path()
        assert key not in store
        store[key] = pa.RecordBatch.from_pydict({"file": ["/path/to/staged/data.lance"]})
        assert key in store
        assert store[key].column("file").to_pylist() == ["/path/to/staged/data.lance"]
        assert store.list_keys("udf-video_udf_") == [key]

    def test_the_keys(self) -> None:
        where, uri = "x > 10", "/path/to/dest/table.lance"
        files = ("data/a.lance", "data/b.lance")
        prefix = WorkIdentity(
            "video_udf", "abc123def456", "embedding", where, uri, files, "id"
        ).prefix()
        md5 = [hashlib.md5(text.encode()).hexdigest() for text in (where, uri, "\n".join(files))]
        # Ours: the digest of the files begins with one of what is computed.
        assert re.fullmatch(
            "udf-video_udf_ver-abc123def456_col-embedding_"
            f"where-{md5[0]}_uri-{md5[1]}_srcfiles-[0-9a-f]{{12}}{md5[2][12:]}",
            prefix,
        )
        assert CheckpointKey(prefix, 3).path() == f"{prefix}_frag-3"
        ranged = CheckpointKey(prefix, 3, RowRange(0, 50))
        assert ranged.path() == f"{prefix}_frag-3_range-0-50"
        assert CheckpointKey.parse(ranged.path()) == ranged

    def test_names_that_look_like_the_end_of_a_key(self) -> None:
        prefix = WorkIdentity("a_range-1-2", "1", "b_frag-7", "", "", (), "id").prefix()
        parsed = CheckpointKey.parse(CheckpointKey(prefix, 4, RowRange(5, 6)).path())
        assert parsed == CheckpointKey(prefix, 4, RowRange(5, 6))


class TestCheckpointsOfABackfill:
    def test_a_staged_file_is_committed_by_the_next_run(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = make_table(local_db, [6, 6])
        table.add_columns({"x": counted(calls, lambda id: id * 3, data_type=pa.int64())})
        with uncommitted(monkeypatch):
            table.backfill("x", checkpoint_size=2)
        store = checkpoint_store(table)
        staged = [key for key in store.list_keys() if "_range-" not in key]
        record = store[staged[0]].to_pylist()[0]
        assert {"file", "src_data_files", "output_field_ids"} <= record.keys()
        assert json.loads(record["src_data_files"])
        assert table.backfill("x").rows_reused == 12
        assert calls.count == 12

    def test_rows_that_are_deleted_leave_gaps(self, numbered: Table, calls: Calls) -> None:
        numbered.delete("a % 3 = 0")
        numbered.add_columns({"b": times(calls, 3)})
        numbered.backfill("b", checkpoint_size=1, task_size=2)
        assert column(numbered, "b") == [3 * i for i in range(20) if i % 3]

    @pytest.mark.parametrize("level", ["udf", "backfill"])
    def test_bounds_of_the_adaptive_size(
        self, local_db: Connection, calls: Calls, level: str
    ) -> None:
        table = make_table(local_db, [50])
        bounds = {"checkpoint_size": 10, "min_checkpoint_size": 10, "max_checkpoint_size": 10}
        own, asked = (bounds, {}) if level == "udf" else ({}, bounds)
        table.add_columns({"x": counted(calls, lambda id: id, data_type=pa.int64(), **own)})
        table.backfill("x", task_size=50, **asked)
        ranges = checkpoint_ranges(table)
        assert ranges == {} or ranges == {0: [(i, i + 10) for i in range(0, 50, 10)]}

    def test_a_commit_every_n_fragments(self, numbered: Table, calls: Calls) -> None:
        numbered.add_columns({"b": times(calls, 3)})
        before = lance.dataset(numbered.ref.uri).version
        numbered.backfill("b", commit_granularity=2, concurrency=1)
        assert lance.dataset(numbered.ref.uri).version == before + 5


# ---------------------------------------------------------------------- 004: materialized views

STABLE_IDS = {"new_table_enable_stable_row_ids": "true"}


def people(*rows: tuple[str, int]) -> pa.Table:
    return pa.table({"name": [n for n, _ in rows], "age": pa.array([a for _, a in rows])})


@pytest.fixture
def users(db: Connection) -> Table:
    """Two fragments: Alice and Bob; Carol and Dave."""
    table = db.create_table(
        name="users", data=people(("Alice", 15), ("Bob", 25)), storage_options=STABLE_IDS
    )
    table.add(people(("Carol", 30), ("Dave", 12)))
    return table


class TestMaterializedViews:
    def test_adults(self, db: Connection, users: Table) -> None:
        mv_adults = (
            users.search(None)
            .where("age >= 18")
            .create_materialized_view(conn=db, view_name="mv_adults")
        )
        before = mv_adults.to_arrow(include_system=True)
        assert len(before["__source_row_id"]) == 2
        assert not any(before["__is_set"].to_pylist())
        mv_adults.refresh()
        after = mv_adults.to_arrow(include_system=True)
        assert after["__is_set"].to_pylist() == [True, True]
        assert after["__source_row_id"] == before["__source_row_id"]
        assert mv_adults.to_arrow().to_pylist() == people(("Bob", 25), ("Carol", 30)).to_pylist()
        users.compact_files()
        users.add(people(("Eve", 40)))
        mv_adults.refresh()
        assert mv_adults.to_arrow()["name"].to_pylist() == ["Bob", "Carol", "Eve"]

    def test_without_stable_row_ids_pointers_are_addresses(self, db: Connection) -> None:
        fragments = [people(("Alice", 15), ("Bob", 25)), people(("Carol", 30), ("Dave", 12))]
        users = make_table(db, fragments, "users")
        with pytest.warns(UserWarning, match="stable row"):
            view = users.search(None).where("age >= 18").create_materialized_view("adults")
        view.refresh()
        found = view.to_arrow(include_system=True)["__source_row_id"].to_pylist()
        assert found == [(0 << 32) | 1, (1 << 32) | 0] == [1, 4294967296]
        users.compact_files()
        with pytest.raises(ValueError, match="stable row"):
            view.refresh()
        assert view.to_arrow()["name"].to_pylist() == ["Bob", "Carol"], "it can still be read"

    @pytest.mark.parametrize(
        "option", ["new_table_enable_stable_row_ids", "enable_move_stable_row_ids"]
    )
    def test_tables_with_stable_row_ids(self, local_db: Connection, option: str) -> None:
        data = people(("Alice", 15))
        table = local_db.create_table(name="events", data=data, storage_options={option: "true"})
        assert lance.dataset(table.ref.uri).has_stable_row_ids

    def test_a_part_for_a_team(self, db: Connection) -> None:
        data = pa.table({"customer": ["a", "b", "c"], "region": ["EMEA", "APAC", "EMEA"]})
        table = db.create_table("customers", data, storage_options=STABLE_IDS)
        emea_view = (
            table.search(None)
            .where("region == 'EMEA'")
            .create_materialized_view(conn=db, view_name="emea_data")
        )
        emea_view.refresh()
        assert emea_view.to_arrow()["customer"].to_pylist() == ["a", "c"]

    def test_training_data_with_embeddings(
        self, db: Connection, users: Table, calls: Calls
    ) -> None:
        embedding_udf = counted(calls, lambda name: [float(len(name))] * 2, data_type=VECTOR)
        view = (
            users.search(None)
            .add_column({"embedding": embedding_udf})
            .shuffle(seed=42)
            .create_materialized_view(conn=db, view_name="training")
        )
        assert calls.count == 0, "nothing is computed before a refresh"
        view.refresh()
        assert calls.taken() == ["Alice", "Bob", "Carol", "Dave"]
        order = view.to_arrow()["name"].to_pylist()
        users.add(people(("Eve", 40)))
        view.refresh()
        assert calls.taken() == ["Eve"]
        assert [n for n in view.to_arrow()["name"].to_pylist() if n != "Eve"] == order
        assert view.refresh().rows_computed == 0

    def test_source_versions(self, db: Connection, users: Table) -> None:
        view = users.search(None).create_materialized_view(conn=db, view_name="v")
        first = users.version
        users.add(people(("Eve", 40)))
        view.refresh()
        assert (len(view), view.source_version) == (5, users.version)
        view.refresh(src_version=first)
        assert (len(view), view.source_version) == (4, first)

    def test_the_definition_is_in_the_schema(self, db: Connection, users: Table) -> None:
        query = users.search(None).where("age > 21").shuffle(seed=42)
        view = query.create_materialized_view(conn=db, view_name="v")
        metadata = lance.dataset(view.ref.uri).schema.metadata
        assert "age > 21" in metadata[b"geneva::view::query"].decode()
        assert metadata[b"geneva::view::base_table"] == b"users"
        assert metadata[b"geneva::view::base_table_db_uri"].decode() == db.uri
        assert metadata[b"geneva::view::base_table_version"].decode() == str(users.version)
        assert metadata[b"geneva::view::version"] == b"2"

    def test_limit_and_offset(self, db: Connection) -> None:
        data = pa.table({"id": pa.array(range(200), pa.int64())})
        table = db.create_table("t", data, storage_options=STABLE_IDS)
        first = table.limit(100).create_materialized_view(conn=db, view_name="first")
        first.refresh()
        assert column(first, "id") == list(range(100))
        page = table.offset(50).limit(100).create_materialized_view(conn=db, view_name="page")
        page.refresh()
        assert column(page, "id") == list(range(50, 150))
        assert table.limit(3).to_arrow()["id"].to_pylist() == [0, 1, 2]

    def test_fragments_of_new_rows(self, db: Connection) -> None:
        def rows(start: int, count: int) -> pa.Table:
            return pa.table({"id": pa.array(range(start, start + count), pa.int64())})

        table = db.create_table("t", rows(0, 10), storage_options=STABLE_IDS)
        mv = table.search(None).create_materialized_view(conn=db, view_name="v")
        mv.refresh(max_rows_per_fragment=5)
        old = len(lance.dataset(mv.ref.uri).get_fragments())
        table.add(rows(10, 15))
        mv.refresh(max_rows_per_fragment=7)
        table.add(rows(25, 5))
        mv.refresh()
        fragments = lance.dataset(mv.ref.uri).get_fragments()
        assert [f.count_rows() for f in fragments[old:]] == [7, 7, 1, 5]
        assert column(mv, "id") == list(range(30))

    def test_an_unrelated_column_computes_nothing(
        self, db: Connection, users: Table, calls: Calls
    ) -> None:
        decade = counted(calls, lambda age: age // 10, data_type=pa.int64())
        query = users.search(None).select(["name"]).add_column({"decade": decade})
        view = query.create_materialized_view(conn=db, view_name="v")
        view.refresh()
        users.add_columns({"extra": udf(lambda name: name.upper(), data_type=pa.string())})
        users.backfill("extra")
        calls.clear()
        assert view.refresh().rows_computed == 0
        assert calls.count == 0

    def test_a_udf_of_the_source_that_is_run_again(self, db: Connection, users: Table) -> None:
        def label(text: str) -> UDF:
            return udf(lambda name: f"{text} {name}", data_type=pa.string(), version=text)

        users.add_columns({"label": label("old")})
        users.backfill("label")
        view = users.search(None).select(["label"]).create_materialized_view("v", db)
        chained = view.search(None).create_materialized_view("w", db)
        for each in (view, chained):
            each.refresh()
        users.alter_columns({"path": "label", "udf": label("new")})
        users.backfill("label")
        for each in (view, chained):
            each.refresh()
            assert column(each, "label") == [f"new {n}" for n in ("Alice", "Bob", "Carol", "Dave")]

    def test_rows_of_a_filter_and_a_shuffle_know_their_source(
        self, db: Connection, calls: Calls
    ) -> None:
        rows = [pa.table({"x": list(range(100 * i, 100 * i + 100))}) for i in range(3)]
        source = make_table(db, rows, "src", stable_row_ids=True)
        double = counted(calls, lambda x: 2 * x, data_type=pa.int64())
        query = source.search(None).where("x > 150").shuffle(seed=42).add_column({"y": double})
        view = query.create_materialized_view(conn=db, view_name="v")
        view.refresh()
        found = view.to_arrow(include_system=True)
        xs = found["x"].to_pylist()
        assert sorted(xs) == list(range(151, 300))
        assert xs != sorted(xs)
        assert found["y"].to_pylist() == [2 * x for x in xs]
        taken = lance.dataset(source.ref.uri)._take_rows(found["__source_row_id"].to_pylist())
        assert taken["x"].to_pylist() == xs
        assert calls.count == 149

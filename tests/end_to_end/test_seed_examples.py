"""Every code example of seed 003 as it is written there, on every runner (Ray-only words aside)."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import Connection, JobStatus, Table, udf
from support import Calls, column, counted, make_table

WIDTH = 768


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

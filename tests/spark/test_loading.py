"""Columns that are loaded by tasks of Spark, from files and from data frames."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster import wait_for
from geneva import Connection, Table
from geneva.errors import (
    ColumnNotFoundError,
    DuplicateKeyError,
    JobCancelledError,
    NullKeyError,
)
from support import connect

pytestmark = pytest.mark.spark

ROWS = 120_000
"""More than are joined without Spark."""


@pytest.fixture
def spark_db(tmp_path: Path) -> Connection:
    return connect(tmp_path / "db", None)


@pytest.fixture
def table(spark_db: Connection) -> Table:
    ids = np.random.default_rng(0).permutation(ROWS)
    path = f"{spark_db.uri}/t.lance"
    lance.write_dataset(pa.table({"id": ids}), path, max_rows_per_file=ROWS // 3)
    return spark_db.open_table("t")


def test_files(table: Table, tmp_path: Path) -> None:
    ids = np.arange(ROWS // 2)
    rows = pa.table({"id": ids, "v": ids * 0.5, "name": [f"row {i}" for i in ids]})
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=ROWS // 8)
    result = table.load_columns(tmp_path / "rows.parquet", "id", ["v", "name"])
    assert (result.progress.loaded_rows, result.progress.unmatched_rows) == (ROWS // 2, ROWS // 2)
    assert table._connection.get_job(result).spark, "it was a job of Spark's"
    for row in lance.dataset(table.ref.uri).take([0, 7, ROWS - 1]).to_pylist():
        known = row["id"] < ROWS // 2
        assert row["v"] == (row["id"] * 0.5 if known else None)
        assert row["name"] == (f"row {row['id']}" if known else None)
    other = rows.set_column(1, "v", pa.array(np.where(ids == 7, -1.0, ids * 0.5)))
    pq.write_table(other, tmp_path / "rows.parquet")
    again = table.load_columns(tmp_path / "rows.parquet", "id", ["v", "name"])
    assert again.fragments_committed == 1, "the others have what the source has"
    assert lance.dataset(table.ref.uri).to_table(filter="id = 7")["v"].to_pylist() == [-1.0]
    pq.write_table(pa.concat_tables([rows, rows.slice(7, 1)]), tmp_path / "twice.parquet")
    with pytest.raises(DuplicateKeyError, match="'id': 7"):
        table.load_columns(tmp_path / "twice.parquet", "id", ["v"])


@pytest.mark.slow
def test_data_frames(table: Table) -> None:
    spark = table._connection._session()
    frame = spark.range(ROWS).selectExpr("id", "id * 2 AS v", "cast(id AS string) AS `a name`")
    table.load_columns(frame, "id", ["v", "a name"])
    found = lance.dataset(table.ref.uri).to_table()
    assert found["v"].to_pylist() == [2 * i for i in found["id"].to_pylist()]
    assert found["a name"].to_pylist() == [str(i) for i in found["id"].to_pylist()]
    with pytest.raises(ColumnNotFoundError, match="in the data frame"):
        table.load_columns(frame, "id", ["w"])
    with pytest.raises(NullKeyError, match="of the data frame has no key"):
        table.load_columns(frame.selectExpr("nullif(id, 5) AS id", "v"), "id", ["v"])


@pytest.mark.slow
def test_a_data_frame_that_takes_its_time_can_be_cancelled(table: Table, tmp_path: Path) -> None:
    started = str(tmp_path / "started")

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            Path(started).touch()
            time.sleep(60)
            yield batch

    frame = table._connection._session().range(10).selectExpr("id", "id AS v")
    future = table.load_columns_async(frame.mapInArrow(slow, frame.schema), "id", ["v"])
    wait_for(lambda: Path(started).exists(), "its rows to be made", 120)
    future.cancel()
    with pytest.raises(JobCancelledError):
        future.result()
    assert "v" not in lance.dataset(table.ref.uri).schema.names

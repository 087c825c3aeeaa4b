"""Data frames written into tables: all rows, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import geneva
from geneva import Connection, udf
from geneva.execution.runner import InProcessRunner
from geneva.spark.embedded.settings import LocalOptions
from geneva.spark.sessions import embedded_session
from support import by_id, connect, make_table

pytestmark = pytest.mark.spark


@pytest.fixture
def spark() -> SparkSession:
    session = embedded_session(LocalOptions(slots=2, class_archive=False))
    geneva.register(session)
    return session


@pytest.fixture
def db(tmp_path: Path, spark: SparkSession) -> Connection:
    return connect(tmp_path / "db", InProcessRunner)


def save(frame: DataFrame, uri: str, mode: str = "append", **options: object) -> None:
    texts = {name: str(value) for name, value in options.items()}
    frame.write.format("geneva").mode(mode).options(**texts).save(uri)


def ids_in(uri: str) -> list[int]:
    return sorted(lance.dataset(uri).to_table(columns=["id"]).column("id").to_pylist())


def test_a_table_is_created_appended_to_and_overwritten(
    db: Connection, spark: SparkSession
) -> None:
    uri = f"{db.uri}/new.lance"
    frame = spark.range(0, 10, 1, 3).withColumn("tags", F.array(F.lit("x")))
    save(frame, uri)
    assert lance.dataset(uri).has_stable_row_ids
    assert db.open_table("new").schema == pa.schema(
        [("id", pa.int64()), ("tags", pa.list_(pa.string()))]
    )
    save(spark.range(10, 12), uri)
    assert ids_in(uri) == list(range(12))
    before = lance.dataset(uri).version
    save(spark.range(0, 0), uri)
    assert lance.dataset(uri).version == before
    save(spark.range(5, 8), uri, "overwrite")
    assert ids_in(uri) == [5, 6, 7]
    assert lance.dataset(uri).schema.names == ["id", "tags"]
    save(spark.range(1).withColumn("x", F.lit(0.5)), uri, "overwrite", overwrite_schema=True)
    assert lance.dataset(uri).to_table().to_pylist() == [{"id": 0, "x": 0.5}]


def test_rows_are_computed_after_they_were_written(db: Connection, spark: SparkSession) -> None:
    @udf(data_type=pa.int64())
    def double(id: int) -> int:
        return id * 2

    table = make_table(db, [3], stable_row_ids=True)
    table.add_columns({"d": double})
    table.backfill("d")
    save(spark.range(3, 6), table.ref.uri)
    table.checkout_latest()
    assert by_id(table, "d") == {0: 0, 1: 2, 2: 4, 3: None, 4: None, 5: None}
    assert table.backfill("d").rows_computed == 3
    assert by_id(table, "d") == {i: 2 * i for i in range(6)}
    save(spark.range(7, 8), table.ref.uri, "overwrite")
    table.checkout_latest()
    table.backfill("d")
    assert by_id(table, "d") == {7: 14}


@pytest.mark.slow
def test_values_go_into_the_tables_own_types(db: Connection, spark: SparkSession) -> None:
    data = pa.table(
        {
            "id": pa.array([0], pa.int16()),
            "v": pa.array([[0.0, 0.0]], pa.list_(pa.float32(), 2)),
            "s": pa.array(["a"]).dictionary_encode(),
            "t": pa.array([0], pa.timestamp("ms", "UTC")),
            "st": pa.array([{"a": 1, "b": "x"}]),
        }
    )
    table = make_table(db, [data])
    frame = spark.range(1, 2).selectExpr(
        "named_struct('b', 'y', 'a', 5) AS st",
        "timestamp'2026-01-02 03:04:05.678 UTC' AS t",
        "'b' AS s",
        "array(0.5D, 1.5D) AS v",
        "id",
    )
    save(frame, table.ref.uri)
    row = lance.dataset(table.ref.uri).to_table().to_pylist()[1]
    assert row["t"].isoformat() == "2026-01-02T03:04:05.678000+00:00"
    assert {k: v for k, v in row.items() if k != "t"} == {
        "id": 1,
        "v": [0.5, 1.5],
        "s": "b",
        "st": {"a": 5, "b": "y"},
    }


@pytest.mark.slow
def test_what_spark_has_types_for_is_read_back(db: Connection, spark: SparkSession) -> None:
    frame = spark.sql(
        "SELECT 1Y b, 2S s, 3 i, 4L l, 1.5F f, 2.5D d, 1.23BD dec, true t, X'00FF' bin, "
        "date'2024-01-01' day, timestamp'2024-01-01 12:00:00 UTC' at, time'12:00:00' clock, "
        "timestamp_ntz'2024-01-01 12:00:00' local, interval '2' day days, interval '3' hour hours, "
        "array(interval '1' minute, null) minutes, 'x' COLLATE UTF8_LCASE text, "
        "cast('x' AS CHAR(3)) fixed, map('k', array(named_struct('z', 1, 'y', null))) nested"
    )
    save(frame, f"{db.uri}/types.lance")
    assert db.open_table("types").to_spark().collect() == frame.collect()


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    db: Connection, spark: SparkSession
) -> None:
    required = pa.schema([pa.field("id", pa.int8()), pa.field("k", pa.int64(), nullable=False)])
    table = make_table(db, [pa.table({"id": [1], "k": [1]}, schema=required)])
    uri, version = table.ref.uri, lance.dataset(table.ref.uri).version
    frame = spark.range(2).withColumn("k", F.lit(1))
    for bad, why in (
        (frame.withColumn("idd", F.lit(1)), "'idd' is not in the table. Did you mean 'id'"),
        (spark.range(1), "'k' of table 't' can't be NULL"),
        (frame.withColumn("id", F.lit("x")), "string can't be int8"),
        (frame.withColumn("id2", F.col("id")).toDF("id", "k", "k"), "two columns 'k'"),
        (frame.withColumn("k", F.expr("parse_json('1')")), "'k' is variant"),
    ):
        with pytest.raises(AnalysisException, match=why):
            save(bad, uri)
    for bad, why in (
        (frame.withColumn("id", F.col("id") + 500), "Column 'id' of the data frame.*50[01]"),
        (frame.withColumn("k", F.lit(None).cast("long")), "Column 'k'.*NULLs"),
    ):
        with pytest.raises(PythonException, match=why):
            save(bad, uri)
    with pytest.raises(AnalysisException, match="how to read"):
        save(frame, uri, where="id = 1")
    with pytest.raises(AnalysisException, match="needs an app_id"):
        save(frame, uri, batch_id=1)
    with pytest.raises(AnalysisException, match="needs a batch_id"):
        save(frame, uri, app_id="a")
    with pytest.raises(AnalysisException, match="no branch 't@no'"):
        save(frame, uri, branch="no")
    assert not Path(uri, "tree").exists()
    with pytest.raises(AnalysisException, match="Columns 'a' and 'A' can't be added together"):
        save(spark.sql("SELECT 1 AS a, 2 AS A"), f"{db.uri}/new.lance")
    assert not Path(f"{db.uri}/new.lance").exists()
    assert lance.dataset(uri).version == version
    assert len(list(Path(uri, "data").iterdir())) == 1


@pytest.mark.slow
def test_views_are_refused(db: Connection, spark: SparkSession) -> None:
    table = make_table(db, [3], stable_row_ids=True)
    view = db.create_materialized_view("v", table.query())
    for mode in ("append", "overwrite"):
        with pytest.raises(AnalysisException, match="'v' is a materialized view"):
            save(spark.range(1), view.ref.uri, mode)


@pytest.mark.slow
def test_blobs_are_written_as_bytes(db: Connection, spark: SparkSession) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("b")])
    data = pa.table([pa.array([1]), lance.blob_array([b"x"])], schema=schema)
    table = make_table(db, [data])
    save(spark.sql("SELECT 2L AS id, X'CAFE' AS b"), table.ref.uri)
    table.checkout_latest()
    rows = table.to_spark(blobs="bytes").orderBy("id").collect()
    assert [(row.id, bytes(row.b)) for row in rows] == [(1, b"x"), (2, b"\xca\xfe")]


@pytest.mark.slow
def test_blobs_go_into_tables_as_connections_create_them(
    db: Connection, spark: SparkSession
) -> None:
    """Their type has fewer parts than the one that `lance.blob_array` makes."""
    blob = pa.field("b", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([pa.field("id", pa.int64()), blob])
    table = db.create_table("blobs", pa.table([[1, 2], [b"x", None]], schema=schema))
    uri = table.ref.uri

    def found() -> list[tuple[int, bytes | None]]:
        rows = spark.read.format("geneva").option("blobs", "bytes").load(uri).collect()
        return sorted((row.id, None if row.b is None else bytes(row.b)) for row in rows)

    save(spark.sql("SELECT 3L AS id, X'CAFE' AS b UNION ALL SELECT 4L, NULL"), uri)
    assert found() == [(1, b"x"), (2, None), (3, b"\xca\xfe"), (4, None)]
    itself = spark.read.format("geneva").option("blobs", "bytes").load(uri)
    save(itself.withColumn("id", F.expr("id + 10")), uri)
    assert found()[4:] == [(11, b"x"), (12, None), (13, b"\xca\xfe"), (14, None)]
    save(spark.sql("SELECT 5L AS id, X'00' AS b UNION ALL SELECT 6L, NULL"), uri, "overwrite")
    assert found() == [(5, b"\x00"), (6, None)]


@pytest.mark.slow
def test_a_failed_write_leaves_nothing_behind(db: Connection, spark: SparkSession) -> None:
    table = make_table(db, [3])
    frame = spark.range(0, 40, 1, 4).withColumn(
        "id", F.expr("if(id = 35, raise_error('broken'), id)")
    )
    with pytest.raises(Exception, match="broken"):
        save(frame, table.ref.uri)
    assert ids_in(table.ref.uri) == [0, 1, 2]
    assert lance.dataset(table.ref.uri).version == 1


@pytest.mark.slow
def test_tasks_that_die_and_are_tried_again_write_their_rows_once(
    db: Connection, spark: SparkSession, tmp_path: Path
) -> None:
    table = make_table(db, [1])
    mark = str(tmp_path / "died")

    def die_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if not os.path.exists(mark):  # noqa: PTH110  in a worker, without the test's imports
                os.close(os.open(mark, os.O_CREAT))
                os.kill(os.getpid(), signal.SIGKILL)

    save(spark.range(1, 101, 1, 4).mapInArrow(die_once, "id long"), table.ref.uri)
    assert Path(mark).exists()
    assert ids_in(table.ref.uri) == list(range(101))


def test_a_replayed_batch_of_foreach_batch_lands_once(db: Connection, spark: SparkSession) -> None:
    uri = f"{db.uri}/stream.lance"
    for number in (0, 1, 1, 0):
        frame = spark.range(number * 10, number * 10 + 3)
        save(frame, uri, app_id="clicks", batch_id=number)
    assert ids_in(uri) == [0, 1, 2, 10, 11, 12]
    data = lance.dataset(uri)
    files = {file.path for f in data.get_fragments() for file in f.data_files()}
    assert {path.name for path in Path(uri, "data").iterdir()} == files

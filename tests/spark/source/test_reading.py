"""Tables as data frames: what Spark reads is what is in the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, InputPartition

import arrow_types
import geneva
from geneva import Connection, udf
from geneva.errors import (
    ColumnNotFoundError,
    InvalidFilterError,
    TypeMismatchError,
    UserInputError,
)
from geneva.execution.runner import InProcessRunner
from geneva.spark.embedded.settings import LocalOptions
from geneva.spark.sessions import embedded_session
from support import connect, make_table

pytestmark = pytest.mark.spark


@pytest.fixture
def spark() -> SparkSession:
    return embedded_session(LocalOptions(slots=2, class_archive=False))


@pytest.fixture
def db(tmp_path: Path, spark: SparkSession) -> Connection:
    return connect(tmp_path / "db", InProcessRunner)


def sorted_rows(table: pa.Table, by: str = "id") -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: row[by])


def test_a_frame_has_what_the_table_has(db: Connection) -> None:
    table = make_table(db, [100, 50, 3], stable_row_ids=True)
    table.delete("id % 7 = 1")
    table.delete("id >= 150")
    frame = table.to_spark()
    assert sorted_rows(frame.toArrow()) == sorted_rows(table.to_arrow())
    assert frame.count() == len(table)


def test_every_type_that_lance_stores_is_read_exactly(db: Connection, tmp_path: Path) -> None:
    dataset = arrow_types.write(f"{db.uri}/types.lance")
    stored = dataset.to_table().to_pydict()
    read = db.open_table("types").to_spark().toArrow().to_pydict()
    assert list(read) == list(stored)
    for name, values in stored.items():
        assert arrow_types.plain(read[name]) == arrow_types.plain(values), name
    assert db.open_table("types").to_spark().count() == 3  # for which Spark has rules of its own


@pytest.mark.slow
def test_digits_that_spark_lacks_are_refused_and_can_be_had_as_numbers(
    db: Connection, spark: SparkSession
) -> None:
    times = pa.array([1_600_000_000_123_456_789], pa.timestamp("ns"))
    table = make_table(db, [pa.table({"id": [0], "t": times})])
    with pytest.raises(PythonException, match=r"Column 't' of table 't' at version 1.*BIGINT"):
        table.to_spark().collect()
    geneva.register(spark)
    frame = spark.read.format("geneva").schema("t BIGINT").load(table.ref.uri)
    assert [row.t for row in frame.collect()] == [1_600_000_000_123_456_789]


def test_columns_and_where_are_applied_while_reading(db: Connection, spark: SparkSession) -> None:
    rows = pa.table({"id": np.arange(1_000), "Text": [f"t{i}" for i in range(1_000)]})
    table = make_table(db, [rows.slice(0, 600), rows.slice(600)])
    table.delete("id = 501")
    for where in ("id BETWEEN 500 AND 502", "id <> 3", "id < 0", "`Text` LIKE 't9%' OR id = 4"):
        frame = table.to_spark(columns=["Text", "id"], where=where)
        assert frame.columns == ["Text", "id"]
        assert sorted_rows(frame.toArrow()) == sorted_rows(
            table.query().where(where).select(["Text", "id"]).to_arrow()
        )
    with pytest.raises(InvalidFilterError):
        table.to_spark(where="id +")
    with pytest.raises(ColumnNotFoundError, match="Did you mean 'Text'"):
        table.to_spark(columns=["Txt"])
    with pytest.raises(UserInputError, match="list of names"):
        table.to_spark(columns="id")


@pytest.mark.slow
def test_awkward_names_and_paths_into_structs(db: Connection, spark: SparkSession) -> None:
    data = pa.table({"a,b": [1], 'q"x': [2], "st": [{"in": {"n": 3}, "m": 4}]})
    table = make_table(db, [data])
    assert table.to_spark(columns=['q"x', "a,b", "st.in.n"]).collect()[0] == (2, 1, 3)
    geneva.register(spark)
    frame = spark.read.format("geneva").option("columns", json.dumps(["a,b"]))
    assert frame.load(table.ref.uri).collect()[0] == (1,)
    plain = spark.read.format("geneva").option("columns", "st.m, st.in.n")
    assert plain.load(table.ref.uri).collect()[0] == (4, 3)
    twins = make_table(db, [pa.table({"a": [{"x": 1}], "b": [{"x": 2}], "x": [3]})], "twins")
    for columns in (["a.x", "b.x"], ["x", "b.x"]):
        with pytest.raises(UserInputError, match="Two columns would be called 'x'"):
            twins.to_spark(columns=columns)
    assert twins.to_spark(columns=["b.x", "b.x"]).collect() == [(2,)]


@pytest.mark.slow
def test_a_schema_of_ones_own_chooses_columns_and_types(
    db: Connection, spark: SparkSession
) -> None:
    table = make_table(db, [pa.table({"id": pa.array([1, 2], pa.int8()), "x": [0.5, 1.5]})])
    geneva.register(spark)
    reader = spark.read.format("geneva")
    frame = reader.schema("x DOUBLE, id BIGINT").load(table.ref.uri)
    assert [tuple(row) for row in frame.orderBy("id").collect()] == [(0.5, 1), (1.5, 2)]
    assert frame.dtypes == [("x", "double"), ("id", "bigint")]
    for schema, why in (("id STRING", "int8 can't be string"), ("no INT", "'no' is not in the")):
        with pytest.raises(AnalysisException, match=why):
            reader.schema(schema).load(table.ref.uri).collect()
    with pytest.raises(PythonException, match=r"Column 'x'.*1\.5|Column 'x'.*0\.5"):
        reader.schema("x INT").load(table.ref.uri).collect()


@pytest.mark.slow
def test_ids_and_addresses_on_request(db: Connection) -> None:
    table = make_table(db, [5, 5], stable_row_ids=True)
    table.delete("id = 2")
    table.compact_files()
    expected = lance.dataset(table.ref.uri).to_table(with_row_id=True, with_row_address=True)
    for where in (None, "id >= 0", "id = 7"):
        frame = table.to_spark(with_row_id=True, with_row_address=True, where=where)
        found = {row["id"]: row for row in frame.toArrow().to_pylist()}
        wanted = {row["id"]: row for row in expected.to_pylist()}
        assert found == (wanted if where != "id = 7" else {7: wanted[7]})


@pytest.mark.slow
def test_blobs_are_descriptors_or_bytes(db: Connection) -> None:
    blob = pa.field("b", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([pa.field("id", pa.int64()), blob])
    data = pa.table({"id": [1, 2, 3], "b": [b"x", None, b"yyy"]}, schema=schema)
    table = make_table(db, [data], storage_version="2.0")
    plain = table.to_spark().orderBy("id").collect()
    assert [row.b.size for row in plain] == [1, 0, 3]
    for where, ids in ((None, [1, 2, 3]), ("id > 1", [2, 3]), ("id = 3", [3])):
        frame = table.to_spark(blobs="bytes", where=where).orderBy("id")
        contents = {1: b"x", 2: None, 3: b"yyy"}
        assert [(row.id, row.b) for row in frame.collect()] == [(i, contents[i]) for i in ids]
    with pytest.raises(UserInputError, match="blobs must be one of"):
        table.to_spark(blobs="files")


@pytest.mark.slow
def test_columns_of_genevas_own_are_hidden(db: Connection) -> None:
    @udf(data_type=pa.int64())
    def double(id: int) -> int:
        return id * 2

    table = make_table(db, [4], stable_row_ids=True)
    table.add_columns({"d": double})
    table.backfill("d")
    assert table.to_spark().columns == ["id", "d"]
    view = db.create_materialized_view("v", table.query().where("id > 1"))
    view.refresh()
    assert view.to_spark().columns == ["id", "d"]
    assert sorted_rows(view.to_spark().toArrow()) == [{"id": 2, "d": 4}, {"id": 3, "d": 6}]


@pytest.mark.slow
def test_an_empty_table(db: Connection) -> None:
    table = make_table(db, [3])
    table.delete("true")
    assert table.to_spark().collect() == []
    assert table.to_spark(where="id > 1").count() == 0


def test_a_frame_stays_at_its_version(db: Connection, spark: SparkSession) -> None:
    table = make_table(db, [3, 3])
    geneva.register(spark)
    frames = [table.to_spark(), spark.read.format("geneva").load(table.ref.uri)]
    table.add(pa.table({"id": [100]}))
    table.delete("id = 0")
    table.compact_files()
    for frame in frames:
        assert sorted(row.id for row in frame.collect()) == list(range(6))
    first = spark.read.format("geneva").option("version", 1).load(table.ref.uri)
    assert sorted(row.id for row in first.collect()) == [0, 1, 2]
    table.tags.create("begin", 1)
    assert table.to_spark(version="begin").count() == 3
    tagged = spark.read.format("geneva").option("version", "begin").load(table.ref.uri)
    assert tagged.count() == 3
    table.checkout(1)
    assert table.to_spark().count() == 3


@pytest.mark.slow
def test_a_frame_reads_no_other_table_of_its_name(db: Connection, spark: SparkSession) -> None:
    geneva.register(spark)
    table = make_table(db, [pa.table({"id": [1]})], "x")
    table.tags.create("begin", 1)
    load = spark.read.format("geneva").load
    frames = [table.to_spark(), load(table.ref.uri), load(table.ref.uri, version="begin")]
    used = table.to_spark()
    assert used.count() == 1
    db.drop_table("x")
    anew = make_table(db, [pa.table({"id": [777], "other": [1]})], "x")
    for frame in frames:
        with pytest.raises((AnalysisException, PythonException), match="the table was dropped"):
            frame.collect()
    try:
        assert used.collect() == [(1,)]  # a worker may still have all that it needs
    except (AnalysisException, PythonException) as error:
        assert "the table was dropped" in str(error)  # noqa: PT017  one of the two
    assert anew.to_spark(columns=["other"]).collect() == [(1,)]
    with pytest.raises(AnalysisException, match="'x' has no version or tag '-1'"):
        load(anew.ref.uri, version="-1")


@pytest.mark.slow
def test_a_version_that_was_cleaned_up_is_a_clear_error(db: Connection) -> None:
    table = make_table(db, [3])
    frame, used = table.to_spark(), table.to_spark()
    assert used.count() == 3
    table.add(pa.table({"id": [100]}))
    table.delete("id < 3")
    table.compact_files()
    table.cleanup_old_versions(timedelta(0), delete_unverified=True)
    for each in (frame, used):
        with pytest.raises(
            (AnalysisException, PythonException), match=r"at version 1 is not there: .* cleaned up"
        ):
            each.collect()


@pytest.mark.slow
def test_branches(db: Connection, spark: SparkSession) -> None:
    table = make_table(db, [3])
    branch = table.branches.create("exp")
    branch.add(pa.table({"id": [100]}))
    assert branch.to_spark().count() == 4
    geneva.register(spark)
    reader = spark.read.format("geneva")
    assert reader.option("branch", "exp").load(table.ref.uri).count() == 4
    assert spark.read.format("geneva").load(f"{table.ref.uri}/tree/exp").count() == 4
    assert table.to_spark().count() == 3


@pytest.mark.slow
def test_every_session_and_thread_reads_and_writes(db: Connection, spark: SparkSession) -> None:
    """Spark looks for formats in the session of the thread, whichever session was asked."""
    table = make_table(db, [3])
    geneva.register(spark)
    other = spark.newSession()
    assert table.to_spark(other).count() == 3
    geneva.register(other)
    assert other.read.format("geneva").load(table.ref.uri).count() == 3

    def write(start: int) -> None:
        geneva.register(spark)
        frame = spark.range(start, start + 2)
        frame.write.format("geneva").mode("append").save(table.ref.uri)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, (10, 20)))
    write(30)
    assert sorted(row.id for row in db.open_table("t").to_spark().collect()) == [
        *(0, 1, 2, 10, 11, 20, 21, 30, 31)
    ]


@pytest.mark.slow
def test_relative_paths_begin_where_the_source_was_registered(
    db: Connection, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(db, [3])
    monkeypatch.chdir(Path(db.uri).parent)
    geneva.register(spark)
    assert spark.read.format("geneva").load("db/t.lance").count() == 3
    for scheme in ("file:", "file://"):
        assert spark.read.format("geneva").load(f"{scheme}{db.uri}/t.lance").count() == 3


@pytest.mark.slow
def test_options_that_are_none_are_refused(db: Connection, spark: SparkSession) -> None:
    table = make_table(db, [3])
    geneva.register(spark)
    for option, why in (
        ({"colums": "id"}, "Did you mean 'columns'"),
        ({"aws_secret_access_key": "x"}, "geneva.register"),
        ({"with_row_id": "maybe"}, "true or false"),
        ({"batch_id": "1"}, "how to write"),
        ({"version": "99"}, "at version 99 is not there"),
        ({"columns": "[1]"}, "list of names"),
    ):
        with pytest.raises(AnalysisException, match=why):
            spark.read.format("geneva").options(**option).load(table.ref.uri)
    with pytest.raises(AnalysisException, match=r"There is no table 'no' at /.*/no\.lance\.\n"):
        spark.read.format("geneva").load(f"{db.uri}/no.lance")
    with pytest.raises(AnalysisException, match=r"There is no table 't' at .* ends in \.lance"):
        spark.read.format("geneva").load(f"{db.uri}/t")
    for version in (True, 1.0):
        with pytest.raises(UserInputError, match="a number or a tag"):
            table.to_spark(version=version)  # type: ignore[arg-type]
    with pytest.raises(UserInputError, match="letters, digits"):
        geneva.register(spark, name="a b")


@pytest.mark.slow
def test_tables_and_views_by_name_in_sql(db: Connection, spark: SparkSession) -> None:
    make_table(db, [5], "texts")
    make_table(db, [pa.table({"id": [1, 9], "w": [0.5, 0.25]})], "weights-2")
    db.open_table("texts").branches.create("exp").add(pa.table({"id": [77]}))
    wide = pa.table({"id": [1], "d": pa.array([1], pa.decimal256(60, 0))})
    make_table(db, [wide], "wide")
    versions = Path(make_table(db, [1], "broken").ref.uri) / "_versions"
    for manifest in versions.iterdir():
        manifest.write_bytes(b"no manifest")
    with (
        pytest.warns(UserWarning, match="'wide' is left out: Column 'd'"),
        pytest.warns(UserWarning, match=r"'broken' is left out: .*sufficient data"),
    ):
        names = db.register_views(spark)
    assert names == ["texts", "texts@exp", "weights-2"]
    query = "SELECT t.id, w FROM texts t JOIN `weights-2` USING (id)"
    assert [tuple(row) for row in spark.sql(query).collect()] == [(1, 0.5)]
    assert spark.sql("SELECT count(*) AS n FROM `texts@exp`").collect()[0].n == 6
    db.register_views(spark, names=["wide"], columns={"wide": ["id"]})
    assert spark.table("wide").columns == ["id"]
    with pytest.raises(TypeMismatchError):
        db.register_views(spark, names=["wide"])


@pytest.mark.slow
def test_names_that_differ_in_case_only_are_no_two_views(
    db: Connection, spark: SparkSession
) -> None:
    for value, name in enumerate(["Aa", "aa", "other"]):
        make_table(db, [pa.table({"id": [value]})], name)
    with pytest.warns(UserWarning, match="'Aa' and 'aa' are left out"):
        assert db.register_views(spark) == ["other"]
    with pytest.raises(UserInputError, match="'Aa' and 'aa'"):
        db.register_views(spark, names=["Aa", "aa"])
    assert db.register_views(spark, names=["Aa"]) == ["Aa"]
    exact = spark.newSession()
    exact.conf.set("spark.sql.caseSensitive", "true")
    assert db.register_views(exact) == ["Aa", "aa", "other"]
    assert [exact.table(name).first() for name in ("Aa", "aa")] == [(0,), (1,)]


def test_one_frame_used_twice_is_filtered_twice(db: Connection) -> None:
    table = make_table(db, [100])
    frame = table.to_spark()
    assert frame.filter("id = 7").count() == 1
    assert frame.count() == 100
    left, right = frame.filter("id < 10"), frame.filter("id >= 5")
    assert left.join(right, "id").count() == 5


class Remembering(DataSourceReader):
    """A reader that keeps the filters that it was given, as Spark's documentation shows it."""

    def __init__(self) -> None:
        self.ids = range(100)

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        for each in filters:
            if isinstance(each, EqualTo):
                self.ids = range(each.value, each.value + 1)
            else:
                yield each

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        for i in self.ids:
            yield (i,)


class RememberingSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "remembering"

    def schema(self) -> str:
        return "id int, other int"

    def reader(self, schema: Any) -> DataSourceReader:
        return Remembering()


@pytest.mark.slow
def test_why_filters_are_not_pushed_down(spark: SparkSession) -> None:
    """Spark 4.3 keeps the filters of a frame's first use for its second. If this fails, it learnt
    not to: look at `TableReader` again, and at docs/spark.md."""
    from pyspark import cloudpickle

    class Source(RememberingSource):
        def schema(self) -> str:
            return "id int"

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        spark.dataSource.register(Source)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = spark.read.format("remembering").load()
        assert frame.filter("id = 7").count() == 1
        assert frame.count() == 1  # of 100
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.slow
def test_spark_prunes_no_columns(db: Connection) -> None:
    """If this fails, it learnt to: docs/spark.md can say so."""
    table = make_table(db, [pa.table({"id": [1], "x": [2]})])
    plan = table.to_spark().select("id")._jdf.queryExecution().executedPlan().toString()
    assert "BatchScan geneva:t[id" in plan
    assert ", x#" in plan.partition("BatchScan")[2]


@pytest.mark.slow
def test_keys_are_in_no_plan_page_or_log(tmp_path: Path) -> None:
    """In a process of its own, whose event log is looked through."""
    from cluster import run_script

    secret = "SeCrEtSeCrEt42"
    log = tmp_path / "events"
    log.mkdir()
    (tmp_path / "work").mkdir()
    run = run_script(
        f"""
        import geneva, pyarrow as pa
        from pyspark.sql import SparkSession
        os.environ["PYSPARK_PYTHON"] = sys.executable
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.eventLog.enabled", "true")
            .config("spark.eventLog.compress", "false")
            .config("spark.eventLog.dir", "file://{log}")
            .config("spark.ui.enabled", "false")
            .getOrCreate()
        )
        options = {{"aws_secret_access_key": "{secret}"}}
        db = geneva.connect({str(tmp_path / "db")!r}, storage_options=options, spark=spark)
        table = db.create_table("t", pa.table({{"id": [1, 2, 3]}}))
        geneva.register(spark, storage_options=options)
        for frame in (table.to_spark(), spark.read.format("geneva").load(table.ref.uri)):
            frame.collect()
            for mode in ("extended", "formatted", "codegen", "cost"):
                frame.explain(mode)
            print(frame._jdf.toString(), frame._jdf.queryExecution().toString(), repr(frame))
            try:
                frame.selectExpr("raise_error('broken')").collect()
            except Exception as error:
                print(error)
        try:
            spark.read.format("geneva").option("columns", "no").load(table.ref.uri)
        except Exception as error:
            print(error)
        spark.stop()
        """,
        tmp_path / "work",
    )
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    assert "geneva:t" in out
    written = [path for path in log.rglob("*") if path.is_file()]
    texts = [out, err, *(path.read_text() for path in written)]
    assert any("BatchScan geneva:t" in text for text in texts[2:])
    assert not any(secret in text for text in texts)


@pytest.mark.slow
def test_many_rows_are_read_by_several_tasks(db: Connection) -> None:
    table = make_table(db, [pa.table({"id": np.arange(1_200_000)})])
    frame = table.to_spark()
    parts = frame.groupBy(F.spark_partition_id()).count().collect()
    assert sorted(row["count"] for row in parts) == [151_424, 524_288, 524_288]
    assert frame.agg(F.sum("id")).collect()[0][0] == 1_200_000 * 1_199_999 // 2

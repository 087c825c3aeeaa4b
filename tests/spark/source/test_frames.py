"""What a Spark user does with tables and views, on classic sessions and on Connect."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

import geneva
from cluster import connect_server
from geneva import Connection, Table, chunker, udf, udtf
from geneva.errors import ColumnNotFoundError, UnknownFilterColumnError
from geneva.execution.runner import InProcessRunner
from geneva.spark.embedded.settings import LocalOptions
from geneva.spark.sessions import embedded_session
from processes import start_script
from support import connect, make_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@pytest.fixture(scope="module", params=["classic", "connect"])
def spark(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """A session with the format registered: the embedded one, or a client of a server."""
    if request.param == "classic":
        session = embedded_session(LocalOptions(slots=2, class_archive=False))
        geneva.register(session)
        yield session
        return
    remote: Any = pytest.importorskip("pyspark.sql.connect.session")
    with connect_server("local[2]", tmp_path_factory.mktemp("server")) as address:
        # Not `SparkSession.builder.remote`: this process may have a classic session.
        client = remote.SparkSession.builder.remote(address).create()
        geneva.register(client)
        yield client
        client.stop()


@pytest.fixture
def db(tmp_path: Path) -> Connection:
    return connect(tmp_path / "db", InProcessRunner)


def load(spark: SparkSession, table: Table, **options: object) -> DataFrame:
    texts = {name: str(value) for name, value in options.items()}
    return spark.read.format("geneva").options(**texts).load(table.ref.uri)


def rows(found: DataFrame | pa.Table) -> list[tuple[Any, ...]]:
    if isinstance(found, pa.Table):
        return sorted(tuple(row.values()) for row in found.to_pylist())
    return sorted(map(tuple, found.collect()))


@chunker(output_schema=pa.schema([("word", pa.string()), ("position", pa.int64())]))
def words(text: str) -> Iterator[dict[str, Any]]:
    for position, word in enumerate(text.split()):
        yield {"word": word, "position": position}


@udtf(output_schema=pa.schema([("album", pa.string()), ("n", pa.int64())]), partition_by="album")
def sizes(source: Any) -> Iterator[dict[str, Any]]:
    found = source.to_arrow()
    yield {"album": found["album"][0].as_py(), "n": found.num_rows}


def test_views_of_every_kind(spark: SparkSession, db: Connection) -> None:
    data = {"id": [1, 2, 3], "album": ["x", "x", "y"], "text": ["a b c", "d", "e f"]}
    docs = make_table(db, [pa.table(data)], "docs", stable_row_ids=True)
    views = [
        db.create_udtf_view("words", source=docs.query().select(["id"]), udtf=words),
        db.create_udtf_view("sizes", source=docs.query(), udtf=sizes),
        db.create_materialized_view("late", docs.query().where("id > 1").select(["id", "text"])),
    ]
    columns = [["id", "word", "position"], ["album", "n"], ["id", "text"]]
    assert [view.to_spark(spark).columns for view in views] == columns
    frames = []
    for change in ("id < 0", "id = 1"):
        if frames:
            docs.add([{"id": 4, "album": "z", "text": "g h"}])
        docs.delete(change)
        for view in views:
            view.refresh()
            stored = lance.dataset(view.ref.uri).to_table(with_row_id=True, with_row_address=True)
            shown = [*view.to_spark(spark).columns, "_rowid", "_rowaddr"]
            assert rows(view.to_spark(spark)) == rows(view.to_arrow())
            assert rows(load(spark, view)) == rows(view.to_arrow())
            ids = load(spark, view, with_row_id=True, with_row_address=True)
            assert ids.columns == shown
            assert rows(ids) == rows(stored.select(shown))
            assert load(spark, view, version=1).count() == 0
            frames.append((view.to_spark(spark), rows(view.to_arrow())))
        assert db.register_views(spark) == ["docs", "late", "sizes", "words"]
        query = "SELECT album, max(n), count(*) FROM docs JOIN words USING (id) JOIN sizes "
        found = spark.sql(f"{query} USING (album) GROUP BY album ORDER BY album").collect()
    assert [tuple(row) for row in found] == [("x", 1, 1), ("y", 1, 2), ("z", 1, 2)]
    assert rows(views[0].to_spark(spark))[0] == (2, "d", 0)
    for frame, expected in frames:  # each is of its version
        assert rows(frame) == expected


NAMES = ['q"x', "it's", "a b", "😀", "a,b", "a\nb", "SELECT", "*", "a\\b", "Ünï", "1x", "s['u']"]


def test_odd_names(spark: SparkSession, db: Connection) -> None:
    data = {name: [i, None] for i, name in enumerate(NAMES)}
    struct = pa.array([{"w z": 1, "p`q": 2, "x.y": 3}, None])
    table = make_table(db, [pa.table({**data, "st": struct})])
    frame = table.to_spark(spark)
    assert frame.columns == [*NAMES, "st"]
    assert tuple(frame.collect()[0])[:-1] == tuple(range(len(NAMES)))
    assert tuple(frame.collect()[0].st) == (1, 2, 3)
    quoted = [f"`{name}`" for name in NAMES]
    chosen = " AND ".join(f"{name} = {i}" for i, name in enumerate(quoted))
    assert rows(frame.filter(chosen).select(*quoted)) == [tuple(range(len(NAMES)))]
    given = table.to_spark(spark, columns=NAMES, where=chosen)
    assert rows(given) == [tuple(range(len(NAMES)))]
    for name in quoted:
        assert table.to_spark(spark, columns=["st"], where=f"{name} IS NULL").columns == ["st"]
    assert tuple(table.to_spark(spark, columns=["st.w z", "st.p`q"]).collect()[0]) == (1, 2)
    assert table.to_spark(spark, where="st['p`q'] = 2 AND st['x.y'] = 3").count() == 1
    frame.write.format("geneva").mode("append").save(f"{db.uri}/again.lance")
    assert lance.dataset(f"{db.uri}/again.lance").to_table() == table.to_arrow()


@udf(data_type=pa.int64())
def same(value: int) -> int:
    return value


def test_a_name_that_lance_cannot_find(spark: SparkSession, db: Connection) -> None:
    table = make_table(db, [pa.table({"a`b": [1], "k": [2]})])
    why = "'a`b' can't be read: Lance finds no column whose name has a backtick"
    for ask in (
        lambda: table.to_spark(spark),
        lambda: table.to_spark(spark, columns=["a`b"]),
        lambda: table.query().select(["a`b"]).to_arrow(),
        lambda: table.add_columns({"y": (same, ["a`b"])}),
    ):
        with pytest.raises(ColumnNotFoundError, match=why):
            ask()
    with pytest.raises(UnknownFilterColumnError, match=why):
        table.to_spark(spark, columns=["k"], where="`a``b` = 1")
    frame = table.to_spark(spark, columns=["k"])
    assert rows(frame) == [(2,)]
    with pytest.raises(AnalysisException, match=why):
        load(spark, table).collect()
    write = spark.sql("SELECT 1L AS `a``b`, 2L AS k").write.format("geneva").mode("append")
    with pytest.raises(AnalysisException, match=why):
        write.save(table.ref.uri)
    with pytest.warns(UserWarning, match="'t' is left out: Column 'a`b'"):
        assert db.register_views(spark) == []
    table.alter_columns({"path": "`a``b`", "rename": "ab"})
    assert rows(table.to_spark(spark)) == [(1, 2)]


@pytest.mark.parametrize("scheme", ["file:", "file://"])
def test_file_uris(spark: SparkSession, db: Connection, scheme: str) -> None:
    uri = f"{scheme}{db.uri}/a%2Db.lance"
    spark.range(3).write.format("geneva").mode("append").save(uri)
    assert spark.read.format("geneva").load(uri).count() == 3
    assert db.open_table("a-b").to_spark(spark).count() == 3
    with pytest.raises(AnalysisException, match="names no folder of this machine"):
        spark.read.format("geneva").load("file:a/b.lance").collect()


def test_sql_alone(spark: SparkSession, db: Connection) -> None:
    table = make_table(db, [5])
    option = f"path '{table.ref.uri}', columns 'id', where 'id > 1'"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW v USING geneva OPTIONS ({option})").collect()
    assert spark.sql("SELECT sum(id) FROM v").collect()[0][0] == 9
    for words in (f"OPTIONS (path '{table.ref.uri}')", f"LOCATION '{table.ref.uri}'"):
        with pytest.raises(AnalysisException, match="CREATE TEMPORARY VIEW"):
            spark.sql(f"CREATE TABLE c USING geneva {words}").collect()


def random_rows(chance: random.Random, ids: range) -> pa.Table:
    day, digits = datetime.date(2024, 2, 28), decimal.Decimal

    def moment() -> datetime.datetime:
        return datetime.datetime(2024, 3, 10, chance.randint(1, 10), tzinfo=datetime.UTC)

    some: dict[str, tuple[pa.DataType, Callable[[], Any]]] = {
        "i": (pa.int32(), lambda: chance.randint(-4, 4)),
        "u": (pa.uint8(), lambda: chance.randint(0, 255)),
        "f": (pa.float32(), lambda: chance.choice([-0.0, 0.0, 0.5, -1.5, float("inf")])),
        "s": (pa.string(), lambda: chance.choice(["", "a", "ab", "A", "%_", "é", "b a"])),
        "b": (pa.bool_(), lambda: chance.random() < 0.5),
        "d": (pa.decimal128(10, 2), lambda: digits(chance.randint(-300, 300)) / 100),
        "t": (pa.timestamp("ms", "UTC"), moment),
        "n": (pa.timestamp("us"), lambda: moment().replace(tzinfo=None)),
        "day": (pa.date32(), lambda: day + datetime.timedelta(days=chance.randint(0, 3))),
        "x": (pa.binary(), lambda: chance.choice([b"", b"\0", b"ab"])),
        "st": (
            pa.struct([("a", pa.int64()), ("in", pa.struct([("s", pa.string())]))]),
            lambda: {"a": chance.choice([None, 1, 2]), "in": chance.choice([None, {"s": "z"}])},
        ),
        "l": (pa.list_(pa.int16()), lambda: [chance.choice([None, 1, 2])] * chance.randint(0, 2)),
    }
    columns = {
        name: pa.array([None if chance.random() < 0.25 else make() for _ in ids], kind)
        for name, (kind, make) in some.items()
    }
    return pa.table({"id": pa.array(ids, pa.int64()), **columns})


def random_condition(chance: random.Random, depth: int = 2) -> str:
    """A condition that DataFusion and Spark read in the same way."""
    if depth and chance.random() < 0.6:
        one, other = (random_condition(chance, depth - 1) for _ in range(2))
        forms = ("({}) AND ({})", "({}) OR ({})", "NOT ({})", "CASE WHEN {} THEN {} ELSE b END")
        return chance.choice(forms).format(one, other)
    number, hour = chance.randint(-3, 3), chance.randint(1, 9)
    column = chance.choice(["i", "u", "f", "s", "b", "d", "t", "n", "day", "x", "st", "st['a']"])
    compare = chance.choice(["=", "<>", "<", "<=", ">", ">=", "IS DISTINCT FROM"])
    return chance.choice(
        [
            f"{column} IS NULL",
            f"{column} IS NOT NULL",
            f"i {compare} {number}",
            f"i % 3 {compare} {number}",
            f"i IN ({number}, 2, NULL)",
            f"u NOT IN ({abs(number)}, 7)",
            f"u BETWEEN {abs(number)} AND 100",
            f"f {compare} {number}.5",
            f"f {compare} 0",
            f"s {compare} 'a'",
            "s LIKE 'a%'",
            "s NOT LIKE '%b%'",
            "s IN ('a', '', NULL)",
            "upper(s) = 'A'",
            f"length(s) {compare} 1",
            f"d {compare} CAST({number}.25 AS DECIMAL(10, 2))",
            f"t {compare} CAST('2024-03-10T0{hour}:00:00Z' AS TIMESTAMP)",
            f"n {compare} CAST('2024-03-10T0{hour}:00:00' AS {{ntz}})",
            f"day {compare} DATE '2024-02-29'",
            "x = X'00'",
            "x <> X''",
            f"st['a'] {compare} 1",
            "st['in']['s'] = 'z'",
            "coalesce(b, i > 0)",
            "b",
        ]
    )


def test_random_rows_and_conditions(spark: SparkSession, db: Connection) -> None:
    """What Spark reads, filters or is given is what pylance has of the table."""
    chance = random.Random(15)
    table = make_table(db, [random_rows(chance, range(i, i + 40)) for i in range(0, 160, 40)])
    table.delete("id % 5 = 2")
    table.delete("id >= 80 AND id < 120")
    dataset = lance.dataset(table.ref.uri)
    frame = table.to_spark(spark)
    read = sorted(frame.toArrow().to_pylist(), key=lambda row: row["id"])
    assert read == dataset.to_table().to_pylist()
    conditions = [random_condition(chance) for _ in range(60)]
    marks = [f"({p}) IS TRUE AS p{i}" for i, p in enumerate(conditions)]
    marked = frame.selectExpr("id", *(p.format(ntz="TIMESTAMP_NTZ") for p in marks)).collect()
    for i, condition in enumerate(conditions):
        where = condition.format(ntz="TIMESTAMP")
        query = dataset.sql(f"SELECT id FROM dataset WHERE {where}").build()
        expected = sorted(n for batch in query.to_batch_records() for n in batch["id"].to_pylist())
        assert sorted(row.id for row in marked if row[f"p{i}"]) == expected, condition
        if i < 12:
            given = table.to_spark(spark, columns=["id"], where=where, with_row_address=True)
            found = sorted(given.collect())
            assert [row.id for row in found] == expected, condition
            taken = dataset._take_rows([row._rowaddr for row in found], ["id"])
            assert taken["id"].to_pylist() == expected


def test_random_writes(spark: SparkSession, db: Connection) -> None:
    """A model of rows by id, appended and overwritten, some with a few of the columns only."""
    chance = random.Random(16)
    uri, model = f"{db.uri}/w.lance", list[dict[str, Any]]()
    schema = random_rows(chance, range(1)).schema
    lance.write_dataset(schema.empty_table(), uri)
    for step in range(6):
        rows = random_rows(chance, range(step * 100, step * 100 + chance.randint(0, 30)))
        given = ["id", *chance.sample(schema.names[1:], chance.randint(1, 12))]
        lance.write_dataset(rows.select(given), f"{db.uri}/source{step}.lance")
        frame = db.open_table(f"source{step}").to_spark(spark).repartition(chance.randint(1, 4))
        mode = chance.choice(["append", "append", "overwrite"])
        frame.write.format("geneva").mode(mode).save(uri)
        new = [dict.fromkeys(schema.names) | row for row in rows.select(given).to_pylist()]
        model = new if mode == "overwrite" else [*model, *new]
        stored = lance.dataset(uri).to_table()
        assert stored.schema == schema
        assert sorted(stored.to_pylist(), key=lambda row: row["id"]) == model


@pytest.mark.long
def test_batches_of_streams_land_once_also_when_they_are_replayed(
    spark: SparkSession, db: Connection, tmp_path: Path
) -> None:
    source, uris = tmp_path / "in", {kind: f"{db.uri}/{kind}.lance" for kind in ("sink", "each")}
    source.mkdir()

    def save(frame: DataFrame, number: int) -> None:
        writer = frame.write.format("geneva").mode("append").option("app_id", "each")
        writer.option("batch_id", number).save(uris["each"])

    def run() -> None:
        for kind in uris:
            writer = spark.readStream.schema("id long").json(str(source)).writeStream
            writer = writer.option("checkpointLocation", str(tmp_path / kind))
            writer = writer.trigger(availableNow=True)
            if kind == "sink":
                query = writer.format("geneva").start(uris[kind])
            else:
                query = writer.foreachBatch(save).start()
            query.awaitTermination()
            assert query.exception() is None

    for number in range(2):
        (source / f"{number}.json").write_text(f'{{"id": {number}}}\n')
        run()
    # As if Spark had died after the last batch was committed, and before it had noted so.
    for kind in uris:
        (tmp_path / kind / "commits" / "1").unlink()
        (tmp_path / kind / "commits" / ".1.crc").unlink(missing_ok=True)
    run()
    for uri in uris.values():
        assert sorted(lance.dataset(uri).to_table()["id"].to_pylist()) == [0, 1]


WRITTEN_DOWN = """
    import json
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
    import geneva
    keys = {{"aws_secret_access_key": "SeCrEtSeCrEt42"}}
    spark = SparkSession.builder.remote({remote!r}).getOrCreate()
    db = geneva.connect({uri!r}, storage_options=keys, spark=spark)
    table = db.open_table("t")
    job = db.get_job(table.backfill("y").job_id)
    geneva.register(spark, storage_options=keys)
    for frame in (table.to_spark(), spark.read.format("geneva").load(table.ref.uri)):
        assert len(frame.collect()) == 6
        frame.explain("extended")
        try:
            frame.selectExpr("raise_error('broken')").collect()
        except PySparkException as error:
            print(error)
    print(json.dumps([job.job_id, job.spark["operations"]]))
    spark.stop()
    """


def test_what_a_server_writes_down(db: Connection, tmp_path: Path) -> None:
    """No keys; and for each of our jobs what it was, so that the two are found from each other."""
    make_table(db, [3, 3]).add_columns({"y": (same, ["id"])})
    log = tmp_path / "events"
    log.mkdir()
    options = {"enabled": "true", "compress": "false", "dir": f"file://{log}"}
    confs = [
        w for name, text in options.items() for w in ("--conf", f"spark.eventLog.{name}={text}")
    ]
    with connect_server("local[2]", tmp_path, *confs) as address:
        script = WRITTEN_DOWN.format(remote=address, uri=db.uri)
        process = start_script(tmp_path / "driver", script)
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    written = "".join(path.read_text() for path in log.rglob("*") if path.is_file())
    assert "broken" in output
    assert "SeCrEtSeCrEt42" not in output + errors + written
    job, operations = json.loads(output.splitlines()[-1])
    assert f"geneva-{job}" in written
    assert f"geneva t.y: job {job}; round 1" in written
    assert operations
    assert all(operation in written for operation in operations)

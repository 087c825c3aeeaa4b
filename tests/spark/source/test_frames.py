"""What a Spark user does with tables and views, on classic sessions and on Connect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    for i, name in enumerate(NAMES):
        quoted = f"`{name}`"
        assert [tuple(row) for row in frame.filter(f"{quoted} = {i}").select(quoted).collect()] == [
            (i,)
        ]
        read = table.to_spark(spark, columns=[name], where=f"{quoted} = {i}")
        assert [tuple(row) for row in read.collect()] == [(i,)]
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

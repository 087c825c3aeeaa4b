"""What tasks stage, and what is left of it: without a session."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DayTimeIntervalType,
    LongType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from geneva import Connection
from geneva.errors import TypeMismatchError, UserInputError
from geneva.execution.runner import InProcessRunner
from geneva.model.tables import Secrets, TableRef
from geneva.spark.source.options import WriteOptions
from geneva.spark.source.writer import RowWriter, plan_write
from support import connect

IDS = StructType([StructField("id", LongType())])


@pytest.fixture
def db(tmp_path: Path) -> Connection:
    return connect(tmp_path / "db", InProcessRunner)


def writer_of(db: Connection, name: str, schema: StructType = IDS) -> RowWriter:
    ref = TableRef(name, f"{db.uri}/{name}.lance", Secrets())
    options = WriteOptions()
    return RowWriter(ref, plan_write(ref, schema, options, overwrite=False), options)


def test_a_write_that_creates_no_table_leaves_no_name_behind(db: Connection) -> None:
    writer = writer_of(db, "new")
    rows = pa.record_batch({"id": [1, 2]})
    done, late = writer.stage(iter([rows])), writer.stage(iter([rows]))
    writer.discard([done])
    assert Path(writer.ref.uri).is_dir()  # a task was late: Spark doesn't say what it staged
    assert db.table_names() == db.all_table_names() == []
    assert "new" not in db
    writer.discard([late])
    assert not Path(writer.ref.uri).exists()


def test_what_a_late_task_left_is_in_nobodys_way(db: Connection) -> None:
    staged = writer_of(db, "new").stage(iter([pa.record_batch({"id": [1, 2]})]))
    assert staged != "[]"
    db.create_table("new", pa.table({"id": [3]}))
    assert db.table_names() == ["new"]
    assert db.open_table("new").to_arrow().column("id").to_pylist() == [3]
    writer_of(db, "other").stage(iter([pa.record_batch({"id": [1]})]))
    db.drop_table("other")
    assert not Path(db.uri, "other.lance").exists()


@pytest.mark.parametrize("kind", [TimestampType(), TimestampNTZType(), DayTimeIntervalType()])
def test_times_are_no_numbers(db: Connection, kind: DataType) -> None:
    db.create_table("t", schema=pa.schema([("n", pa.int64()), ("all", pa.list_(pa.int64()))]))
    for field in (StructField("n", kind), StructField("all", ArrayType(kind))):
        with pytest.raises(TypeMismatchError, match="can't be int64"):
            writer_of(db, "t", StructType([field]))


def test_rows_without_columns_are_refused(db: Connection) -> None:
    with pytest.raises(UserInputError, match="has no columns"):
        writer_of(db, "t", StructType([]))

"""Workers that die: the job goes on, and a row that kills them is found and treated as failed."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import Skip, skip_on_error, udf
from geneva.errors import WorkerDied, WorkerLostError
from support import Calls, by_id, checkpoint_store, connect, counted, make_table

if TYPE_CHECKING:
    from geneva import Connection

BAD = 137


@pytest.fixture
def spark_db(tmp_path: Path) -> Connection:
    return connect(tmp_path / "db", None)


def exits(id: int) -> int:
    if id == BAD:
        os._exit(3)
    return id


def segfaults(id: int) -> int:
    if id == BAD:
        ctypes.string_at(0)
    return id


def is_killed(id: int) -> int:
    if id == BAD:
        os.kill(os.getpid(), signal.SIGKILL)
    return id


def out_of_memory(id: int) -> int:
    """As the kernel does it: the process asks for too much, and is killed."""
    if id == BAD:
        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
        try:
            bytearray(2**32)
        except MemoryError:
            os.kill(os.getpid(), signal.SIGKILL)
    return id


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("function", [exits, segfaults, is_killed, out_of_memory])
def test_the_row_at_fault_is_found_and_skipped(
    spark_db: Connection, calls: Calls, function: Any
) -> None:
    table = make_table(spark_db, [300])

    def logged(id: int) -> int:
        calls.note([id])
        return int(function(id))

    table.add_columns({"c": udf(logged, on_error=skip_on_error())})
    result = table.backfill("c", concurrency=1)
    assert by_id(table, "c") == {i: None if i == BAD else i for i in range(300)}
    assert result.rows_failed == 1
    (error,) = table.get_errors()
    assert (error.exception_type, error.row_address) == ("WorkerDied", BAD)
    assert 2 <= calls.rows.count(BAD) <= 8, "found in a few deaths, not one a row"
    assert calls.count < 300 * 4
    assert checkpoint_store(table).list_keys("attempt-") == []
    calls.clear()
    assert table.backfill("c").rows_computed == 0


@pytest.mark.spark
@pytest.mark.slow
def test_by_default_the_job_fails_and_names_the_row(spark_db: Connection) -> None:
    table = make_table(spark_db, [300])
    table.add_columns({"c": udf(exits)})
    with pytest.raises(WorkerLostError, match=rf"row {BAD} .*died 2 times"):
        table.backfill("c", concurrency=1)
    assert table.get_errors()[0].exception_type == "WorkerDied"
    assert checkpoint_store(table).list_keys("attempt-") == []


@pytest.mark.spark
@pytest.mark.slow
def test_a_batch_that_kills_is_cut(spark_db: Connection, calls: Calls) -> None:
    def batches(id: pa.Array) -> pa.Array:
        if pc.any(pc.is_in(id, value_set=pa.array([BAD, BAD + 100]))).as_py():
            os._exit(3)
        return id

    table = make_table(spark_db, [512])
    table.add_columns(
        {"c": counted(calls, batches, data_type=pa.int64(), on_error=[Skip(WorkerDied)])}
    )
    result = table.backfill("c", concurrency=1)
    bad = (BAD, BAD + 100)
    assert by_id(table, "c") == {i: None if i in bad else i for i in range(512)}
    assert result.rows_failed == 2


@pytest.mark.spark
@pytest.mark.slow
def test_a_worker_that_dies_once_costs_nothing(spark_db: Connection, tmp_path: Path) -> None:
    mark = str(tmp_path / "died")

    def once(id: int) -> int:
        if id == BAD and not os.path.exists(mark):  # noqa: PTH110
            os.close(os.open(mark, os.O_CREAT))
            os._exit(3)
        return id

    table = make_table(spark_db, [300])
    table.add_columns({"c": udf(once)})
    table.backfill("c", concurrency=1)
    assert by_id(table, "c") == {i: i for i in range(300)}
    assert table.get_errors() == []


@pytest.mark.spark
@pytest.mark.slow
def test_a_setup_that_kills_is_no_rows_fault(spark_db: Connection) -> None:
    @udf(data_type=pa.int64(), on_error=skip_on_error())
    class Model:
        def setup(self) -> None:
            os._exit(3)

        def __call__(self, id: int) -> int:
            return id

    table = make_table(spark_db, [300])
    table.add_columns({"c": Model()})
    with pytest.raises(WorkerLostError):
        table.backfill("c", concurrency=1)
    assert table.get_errors() == []

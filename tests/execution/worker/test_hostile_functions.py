"""Functions that do what no function should: the job ends in a clear state, and so does the next.

What kills its worker is in test_dead_workers.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from geneva import skip_on_error, udf
from geneva.errors import UDFExecutionError
from support import Calls, by_id, connect, counted, make_table

if TYPE_CHECKING:
    from geneva import Connection

BAD = 3
ROWS = 20


@pytest.fixture
def spark_db(tmp_path: Path) -> Connection:
    return connect(tmp_path / "db", None)


def forks_and_returns(id: int) -> int:
    if id == BAD:
        os.fork()
    return id


def forks_and_exits(id: int) -> int:
    if id == BAD:
        child = os.fork()
        if child == 0:
            sys.exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return id


def forks_and_raises(id: int) -> int:
    if id == BAD and os.fork() == 0:
        raise ValueError("in the copy")
    return id


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("threads", [None, 4])
@pytest.mark.parametrize("function", [forks_and_returns, forks_and_exits, forks_and_raises])
def test_a_copy_of_the_worker_ends_where_it_comes_back(
    spark_db: Connection, function: Callable[[int], int], threads: int | None
) -> None:
    expected = {i: 7 if function is forks_and_exits and i == BAD else i for i in range(ROWS)}
    table = make_table(spark_db, [ROWS // 2] * 2)
    for column in ("x", "y", "z"):  # as what a copy said would be taken for the next task's
        own = udf(data_type=pa.int64(), on_error=skip_on_error())(function)
        table.add_columns({column: own})
        result = table.backfill(column, intra_applier_concurrency=threads)
        assert (result.rows_computed, result.rows_failed) == (ROWS, 0)
        assert by_id(table, column) == expected


@pytest.mark.spark
@pytest.mark.slow
def test_a_keyboard_interrupt_of_the_functions_own_is_its_failure(
    spark_db: Connection, calls: Calls
) -> None:
    def interrupted(id: int) -> int:
        if id == BAD:
            raise KeyboardInterrupt("nobody pressed Ctrl-C")
        return id

    table = make_table(spark_db, [ROWS])
    own = counted(calls, interrupted, data_type=pa.int64(), on_error=skip_on_error())
    table.add_columns({"x": own})
    assert table.backfill("x").rows_failed == 1
    assert by_id(table, "x") == {i: None if i == BAD else i for i in range(ROWS)}
    assert calls.rows == list(range(ROWS)), "no task was run again"
    assert "Ctrl-C" in table.get_errors(column_name="x")[0].message


def test_a_message_of_any_length_is_cut(local_db: Connection) -> None:
    @udf(data_type=pa.int64())
    def verbose(id: int) -> int:
        raise ValueError("begin" + "x" * 3_000_000)

    table = make_table(local_db, [2])
    table.add_columns({"x": verbose})
    with pytest.raises(UDFExecutionError, match="ValueError: beginx") as caught:
        table.backfill("x")
    assert len(str(caught.value)) < 50_000
    assert len(local_db.get_job(caught.value.job_id).error) < 50_000

"""A function that returned NULL for every row: most often a `return` was forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from geneva import Columns, Connection, udf
from geneva.execution.runner import InProcessRunner
from support import Calls, connect, counted, make_table


def nothing(id: int) -> Any:
    """Forget the `return`."""


def only_7(id: int) -> Any:
    return id if id == 7 else None


def filled(db: Connection, calls: Calls, function: Callable[[int], Any], rows: int = 25) -> Any:
    table = make_table(db, [rows - 5, 5])
    table.add_columns({"c": counted(calls, function, data_type=pa.int64())})
    return table.backfill("c")


def test_it_is_said_in_the_log_and_in_the_result(
    db: Connection, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    result = filled(db, calls, nothing)
    assert (result.status, calls.count) == ("DONE", 25)
    (said,) = caplog.messages
    assert said == (
        "Table 't', column 'c': function 'nothing' returned NULL for all of the 25 rows that it "
        "was called for. If that is not meant, look for a missing `return`."
    )
    assert "25 rows computed, 25 of them NULL" in str(result)
    assert result.progress.null_rows == db.get_job(result).metrics["null_rows"] == 25
    assert db.open_table("t").backfill("c").progress.null_rows == 0
    assert (calls.count, len(caplog.messages)) == (25, 1)


@pytest.mark.parametrize(("function", "rows"), [(only_7, 25), (nothing, 9)])
def test_one_value_or_few_rows_are_no_reason(
    function: Callable[[int], Any],
    rows: int,
    local_db: Connection,
    calls: Calls,
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = filled(local_db, calls, function, rows)
    assert (caplog.messages, result.progress.null_rows, calls.count) == ([], 0, rows)


def test_nor_are_rows_that_were_asked_for(
    local_db: Connection, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    table = make_table(local_db, [30])
    function = counted(calls, lambda id: id if id > 20 else None, data_type=pa.int64())
    table.add_columns({"c": function})
    assert table.backfill("c", where="id < 20").rows_computed == calls.count == 20
    assert caplog.messages == []


def test_nor_is_a_column_that_can_have_nothing_else(
    local_db: Connection, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    table = make_table(local_db, [25])
    table.add_columns({"c": counted(calls, nothing, data_type=pa.null())})
    assert table.backfill("c").rows_computed == calls.count == 25
    assert caplog.messages == []


def test_nor_are_new_rows_beside_others(
    local_db: Connection, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    filled(local_db, calls, only_7)
    table = local_db.open_table("t")
    table.add(pa.table({"id": range(100, 120)}))
    assert table.backfill("c").rows_computed == 20
    assert caplog.messages == []


def test_of_several_columns_all_are_to_be_null(
    local_db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    class Two(NamedTuple):
        a: int | None
        b: int | None

    @udf
    def second(id: int) -> Columns[Two]:
        return Two(None, id)

    @udf
    def neither(id: int) -> Columns[Two]:
        return Two(None, None)

    table = make_table(local_db, [12])
    table.add_columns(second)
    table.backfill("a")
    assert caplog.messages == []
    table.alter_columns({"path": "a", "udf": neither})
    table.backfill("a")
    assert caplog.messages[0].startswith("Table 't', column 'a, b': function 'neither' returned")


def test_a_column_of_a_view_is_told_as_well_and_sql_is_not(
    tmp_path: Any, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    db = connect(tmp_path / "db", InProcessRunner)
    table = make_table(db, [12], stable_row_ids=True)
    function = counted(calls, nothing, data_type=pa.int64())
    query = table.query().select({"n": "nullif(id, id)", "c": function})
    result = db.create_materialized_view("v", query).refresh()
    (said,) = caplog.messages
    assert said.startswith("Table 'v', column 'c': function 'nothing' returned NULL for all of the")
    assert result.progress.null_rows == calls.count == 12


def test_a_function_without_any_return_is_told_when_it_is_declared(
    local_db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    @udf(data_type=pa.int64())
    def forgets(id: int):  # type: ignore[no-untyped-def]
        id * 2

    def said() -> list[str]:
        found = list(caplog.messages)
        caplog.clear()
        return found

    words = [
        "Function 'forgets' returns nothing but None, so that all of its values will be NULL. If "
        "that is not meant, look for a missing `return`."
    ]
    table = make_table(local_db, [3], stable_row_ids=True)
    table.add_columns({"c": forgets})
    assert said() == words
    assert table.backfill("c").status == "DONE"
    assert said() == []
    right = udf(lambda id: id, data_type=pa.int64())
    table.alter_columns({"path": "c", "udf": right})
    assert said() == []
    table.alter_columns({"path": "c", "udf": forgets})
    assert said() == words
    view = local_db.create_materialized_view("v", table.query().select({"c": right}))
    assert said() == []
    view.alter_columns({"path": "c", "udf": forgets})
    assert said() == words
    local_db.create_materialized_view("w", table.query().select({"c": forgets}))
    assert said() == words

"""Copies of tables with computed columns: complete and right, or not there."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import Connection, Table
from geneva.errors import ColumnChangedError, TableNotFoundError
from geneva.storage.columns import copies
from support import Calls, by_id, counted, make_table


@pytest.fixture
def table(local_db: Connection, calls: Calls) -> Table:
    table = make_table(local_db, [pa.table({"id": [1, 2], "a": [1, 2], "b": [7, 8]})])
    table.add_columns({"y": (counted(calls, lambda a: a * 10, data_type=pa.int64()), ["a"])})
    table.backfill("y")
    calls.clear()
    return table


def test_nothing_is_copied_while_nobody_knows_what_a_column_reads(
    local_db: Connection, table: Table
) -> None:
    dataset = lance.dataset(table.ref.uri)
    dataset.alter_columns({"path": "a", "data_type": pa.int32(), "name": "old"})
    dataset.alter_columns({"path": "b", "name": "a"})
    dataset.delete("false")
    dataset.cleanup_old_versions(timedelta(0))
    with pytest.raises(ColumnChangedError, match=r"'y' of table .* computed from 'a'\. Others"):
        local_db.copy_table(table.name, "copy")
    assert local_db.table_names() == [table.name]


def test_a_copy_that_is_cut_off_reads_the_right_columns(
    local_db: Connection, table: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is not even removed: the process died."""
    table.alter_columns({"path": "a", "data_type": pa.int32(), "rename": "old"})

    def dies(*args: Any) -> None:
        raise OSError("the process dies here")

    with monkeypatch.context() as patched:
        patched.setattr(copies, "commit_rebound", dies)
        with pytest.raises(OSError, match="dies here"):
            local_db.copy_table(table.name, "copy")
        with pytest.raises(TableNotFoundError):
            local_db.open_table("copy")
        patched.setattr(lance.LanceDataset, "drop", dies)
        with pytest.raises(OSError, match="dies here"):
            local_db.copy_table(table.name, "copy")
    copy = local_db.open_table("copy")
    copy.add_columns({"new": "cast(b as int)"})  # it has the id that the input had
    assert copy.computed_columns()["y"].inputs == ("old",)
    copy.update(where="id = 1", values={"old": 5})
    copy.backfill("y")
    assert by_id(copy, "y") == {1: 50, 2: 20}
    assert calls.rows == [5]

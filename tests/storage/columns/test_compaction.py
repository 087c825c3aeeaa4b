"""Compaction of a table that others commit to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from geneva.errors import ColumnNotFoundError, TableChangedError
from geneva.storage.lance import commit
from support import by_id, make_table

if TYPE_CHECKING:
    from geneva import Connection


class Preempted:
    """LanceDB's table, whose commits of `optimize` are preempted the first times."""

    def __init__(self, table: Any, times: int) -> None:
        self._table, self.left = table, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def optimize(self, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise RuntimeError("lance error: Retryable commit conflict for version 2: preempted")
        return self._table.optimize(**options)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit.time, "sleep", lambda seconds: None)


def test_commits_of_others_are_no_errors_of_optimize(local_db: Connection) -> None:
    table = make_table(local_db, [2, 2])
    preempted = Preempted(table._table, 2)
    table._table = preempted
    table.optimize()
    assert not preempted.left
    assert len(table.to_lance().get_fragments()) == 1
    assert [*by_id(table, "id")] == [0, 1, 2, 3]


def test_optimize_gives_up_with_an_error_of_its_own(local_db: Connection) -> None:
    table = make_table(local_db, [2, 2])
    table._table = Preempted(table._table, 1000)
    with pytest.raises(TableChangedError, match=r"'t' could not be optimized.*other writers kept"):
        table.optimize()


@pytest.mark.parametrize("way", ["optimize", "compact_files"])
def test_a_column_that_lance_can_not_read_is_named(local_db: Connection, way: str) -> None:
    table = make_table(local_db, [2, 2])
    rows = pa.table({"id": [0, 1, 2], "a`b": [0, 1, 2]})
    lance.write_dataset(rows, table.ref.uri, mode="overwrite", max_rows_per_file=1)
    table = local_db.open_table("t")
    with pytest.raises(ColumnNotFoundError, match=r"'a`b' can't be read.*Rename it"):
        getattr(table, way)()
    table.alter_columns({"path": "`a``b`", "rename": "b"})
    getattr(table, way)()
    assert len(table.to_lance().get_fragments()) == 1

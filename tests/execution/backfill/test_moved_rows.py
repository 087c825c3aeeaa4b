"""What random histories found: each a short story that once ended wrong."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import Connection, Table
from geneva.execution.backfill.committer import publish_columns
from support import Calls, by_id, column, counted, make_table, publishing, slow


class Crash(BaseException):
    """The process dies here."""


def backfill_and_die(table: Table, name: str) -> None:
    """Compute and stage everything, and die before the commit."""

    def die(*_: Any) -> Any:
        raise Crash

    with publishing(table._connection, die), pytest.raises(Crash):
        table.backfill(name, checkpoint_size=2)


def triple(id: int) -> int:
    return id * 3


def tenfold(id: int) -> int:
    return id * 10


def triple_but_for_2(id: int) -> int:
    return 7 if id == 2 else id * 3


def none_for_2(id: int) -> int | None:
    return None if id == 2 else id


def successor(c: int) -> int:
    return c + 1


def opposite(c: int) -> int:
    return -c


@pytest.mark.parametrize("compacted", [True, slow(False)])
def test_rows_that_a_clause_left_alone_are_still_right_when_their_udf_comes_back(
    local_db: Connection, calls: Calls, compacted: bool
) -> None:
    table = make_table(local_db, [4, 4])
    first = counted(calls, triple, version="1")
    table.add_columns({"c": first})
    table.backfill("c")
    table.alter_columns({"path": "c", "udf": counted(calls, tenfold, version="2")})
    table.backfill("c", where="id IN (1, 6)")
    if compacted:
        table.compact_files()
    table.alter_columns({"path": "c", "udf": first})
    calls.clear()
    table.backfill("c")
    assert calls.taken() == [1, 6]
    assert by_id(table, "c") == {i: i * 3 for i in range(8)}
    table.backfill("c")
    assert calls.rows == []


def test_rows_that_a_clause_left_alone_are_stale_where_their_input_changed_since(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [4])
    first = counted(calls, successor, version="1")
    table.add_columns({"c": counted(calls, triple)})
    table.add_columns({"d": first})
    table.backfill("c")
    table.backfill("d")
    table.alter_columns({"path": "d", "udf": counted(calls, opposite, version="2")})
    table.backfill("d", where="id = 1")
    table.alter_columns({"path": "c", "udf": counted(calls, triple_but_for_2)})
    table.backfill("c")
    table.alter_columns({"path": "d", "udf": first})
    calls.clear()
    table.backfill("d")
    assert calls.rows == [3, 7]
    assert column(table, "d") == [1, 4, 8, 10]


@pytest.mark.parametrize("moved_by", ["update", slow("compaction")])
def test_results_of_rows_that_moved_are_of_no_use_once_their_input_is_rewritten(
    local_db: Connection, calls: Calls, moved_by: str
) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"other": "0"})
    table.add_columns({"c": counted(calls, triple)})
    table.add_columns({"d": counted(calls, successor)})
    table.backfill("c")
    backfill_and_die(table, "d")
    if moved_by == "compaction":
        table.compact_files()
    else:
        table.update(where="id < 6", values={"other": 1})
    table.alter_columns({"path": "c", "udf": counted(calls, tenfold)})
    table.backfill("c")
    table.backfill("d")
    assert by_id(table, "d") == {i: i * 10 + 1 for i in range(8)}


def test_a_staged_file_is_of_no_use_for_rows_that_were_deleted_when_it_was_made(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"c": counted(calls, triple)})
    before = table.version
    table.delete("id IN (1, 2)")
    backfill_and_die(table, "c")
    table.checkout(before)
    table.restore()
    table.backfill("c")
    assert by_id(table, "c") == {i: i * 3 for i in range(8)}


def test_a_file_says_nothing_of_rows_that_were_deleted_when_it_was_made(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"c": counted(calls, triple)})
    table.backfill("c")
    before = table.version
    table.delete("id = 1")
    table.backfill("c", where="1=1", checkpoint_size=2)
    table.checkout(before)
    table.restore()
    table.backfill("c", where="1=1")
    assert by_id(table, "c") == {i: i * 3 for i in range(8)}


def test_a_plan_expects_nothing_of_rows_that_moved_before_the_column_was_added(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"other": "0"})
    table.update(where="id IN (1, 5)", values={"other": 1})
    table.add_columns({"c": counted(calls, triple)})
    calls.clear()
    with publishing(local_db, _dies_at_the_second(publish_columns)), pytest.raises(Crash):
        table.backfill("c", checkpoint_size=2, commit_granularity=1, num_frags=2)
    calls.clear()
    planned = table.plan_backfill("c").rows_to_run
    table.backfill("c")
    assert len(calls.rows) == planned
    assert by_id(table, "c") == {i: i * 3 for i in range(8)}


def _dies_at_the_second(commit: Any) -> Any:
    commits: list[object] = []

    def dying(*args: Any) -> Any:
        if commits:
            raise Crash
        commits.append(args)
        return commit(*args)

    return dying


@pytest.mark.parametrize("compacted", [True, slow(False)])
def test_rewritten_inputs_are_compared_row_by_row_after_a_cleanup_too(
    local_db: Connection, calls: Calls, compacted: bool
) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"c": counted(calls, triple)})
    table.add_columns({"d": counted(calls, successor)})
    for name in ("c", "d"):
        table.backfill(name)
    if compacted:
        table.compact_files()
        table.backfill("d")
    lance.dataset(table.ref.uri).cleanup_old_versions(older_than=timedelta(0))
    table.alter_columns({"path": "c", "udf": counted(calls, triple_but_for_2)})
    table.backfill("c")
    calls.clear()
    table.backfill("d")
    assert calls.rows == [7]
    assert by_id(table, "d") == {i: 8 if i == 2 else i * 3 + 1 for i in range(8)}


def test_results_of_rows_with_equal_inputs_all_move_along_with_an_update(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"other": "0"})
    table.add_columns({"c": counted(calls, triple)})
    table.update(where="id IN (1, 2, 6)", values={"id": 1})
    backfill_and_die(table, "c")
    table.update(where="id = 1", values={"other": 1})
    calls.clear()
    table.backfill("c")
    assert calls.rows == []
    assert sorted(column(table, "c")) == [0, 3, 3, 3, 9, 12, 15, 21]


def test_a_restored_version_is_known_even_when_what_made_it_is_cleaned_up(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"c": counted(calls, none_for_2)})
    table.backfill("c")
    table.compact_files()
    table.backfill("c")
    table.delete("id = 0")
    lance.dataset(table.ref.uri).cleanup_old_versions(older_than=timedelta(0))
    before = table.version
    table.add(pa.table({"id": [8]}))
    table.compact_files()
    table.backfill("c")
    table.checkout(before)
    table.restore()
    calls.clear()
    table.backfill("c")
    assert calls.rows == []


def test_results_of_rows_that_moved_many_times_are_found_by_their_receipts(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"other": "0"})
    table.add_columns({"c": counted(calls, triple)})
    backfill_and_die(table, "c")
    for round_ in range(8):
        table.update(where="id % 4 = 1", values={"other": round_})
        table.update(where="id % 4 = 2", values={"other": round_})
        table.compact_files()
    lance.dataset(table.ref.uri).cleanup_old_versions(older_than=timedelta(0))
    calls.clear()
    assert table.plan_backfill("c").rows_to_run == 0
    table.backfill("c")
    assert calls.rows == []
    assert by_id(table, "c") == {i: i * 3 for i in range(8)}


def test_results_of_every_kind_are_taken_over(local_db: Connection, calls: Calls) -> None:
    """JSON as well, which Lance reads in another form than it was given: called for twice."""
    table = make_table(local_db, (4, 4))
    table.add_columns({"c": counted(calls, as_json, data_type=pa.json_())})
    backfill_and_die(table, "c")
    assert calls.taken() == list(range(8))
    table.compact_files()
    table.backfill("c")
    assert calls.count == 0
    assert by_id(table, "c") == {i: f'{{"id":{i}}}' for i in range(8)}


def as_json(id: int) -> str:
    return f'{{"id":{id}}}'


@pytest.mark.parametrize("meanwhile", ["nothing", "append", "add_columns", "compact"])
def test_a_column_that_is_renamed_while_it_is_computed(
    local_db: Connection, calls: Calls, meanwhile: str
) -> None:
    """It is the same column: the job goes on, whatever else happens to the table."""
    table = make_table(local_db, (4, 4))
    table.add_columns({"c": counted(calls, triple)})
    told: list[bool] = []

    def publish(*commit: Any) -> Any:
        if not told:
            told.append(True)
            table.alter_columns({"path": "c", "rename": "d"})
            if meanwhile == "append":
                table.add(pa.table({"id": [8]}))
            elif meanwhile == "add_columns":
                table.add_columns({"other": "id + 1"})
            elif meanwhile == "compact":
                table.compact_files()
        return publish_columns(*commit)

    with publishing(local_db, publish):
        table.backfill("c")
    rows = list(range(9 if meanwhile == "append" else 8))
    assert calls.taken() == rows
    assert by_id(table, "d") == {i: i * 3 for i in rows}
    assert table.plan_backfill("d").is_empty

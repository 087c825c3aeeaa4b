"""Writers that never rest: a job ends, and has done what it owed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import lance
import pyarrow as pa
import pytest

import conflict_watch
import geneva
from geneva import Connection
from geneva.errors import UserInputError
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.model.jobs import JobStatus
from support import Calls, counted

ROWS = 8


def make_table(db: Connection, *, stable: bool = True) -> geneva.Table:
    options = {"new_table_enable_stable_row_ids": str(stable).lower()}
    rows = pa.table({"k": range(ROWS), "x": [i * 100 for i in range(ROWS)]})
    return db.create_table("t", rows, storage_options=options)


def some_row(step: int) -> int:
    return random.Random(step).randrange(ROWS)


def update_one(table: geneva.Table, step: int) -> None:
    table.update(where=f"k = {some_row(step)}", values_sql={"x": "x + 1"})


def upsert_one(table: geneva.Table, step: int) -> None:
    new = pa.table({"k": [some_row(step)], "x": [1_000 + step]})
    table.merge_insert("k").when_matched_update_all().execute(new)


def update_and_compact(table: geneva.Table, step: int) -> None:
    update_one(table, step)
    if step % 4 == 3:
        lance.dataset(table.ref.uri).optimize.compact_files()


def compact_and_clean_up(table: geneva.Table, step: int) -> None:
    table.add(pa.table({"k": [1_000 + step], "x": [0]}))
    table.optimize(cleanup_older_than=timedelta(microseconds=1000))


def is_right(table: geneva.Table) -> bool:
    found = table.to_arrow()
    return found["y"].to_pylist() == [x + 1 for x in found["x"].to_pylist()]


def add_one(x: int) -> int:
    import conflict_watch

    conflict_watch.call()
    return x + 1


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Has something done in every call, given the number of the call."""

    def begin(action: Callable[[int], None]) -> None:
        steps = itertools.count()
        monkeypatch.setattr(conflict_watch, "on_call", lambda: action(next(steps)))

    return begin


Busy: TypeAlias = Callable[[Callable[[int], None]], None]


@pytest.mark.parametrize(
    "stable", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["stable", "addresses"]
)
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(update_one, marks=pytest.mark.slow),
        pytest.param(upsert_one, marks=pytest.mark.slow),
        update_and_compact,
    ],
)
def test_a_writer_as_fast_as_the_function_does_not_stop_the_job(
    local_db: Connection,
    calls: Calls,
    busy: Busy,
    write: Callable[[geneva.Table, int], None],
    stable: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = make_table(local_db, stable=stable)
    table = local_db.open_table("t")
    table.add_columns({"y": counted(calls, add_one, data_type=pa.int64(), version="1")})
    busy(lambda step: write(other, step))
    result = table.backfill("y", concurrency=1)
    assert result.status is JobStatus.DONE

    # The next job, on a table at rest, does what was left, and no more.
    monkeypatch.setattr(conflict_watch, "on_call", None)
    left, before = table.plan_backfill("y").rows_to_run, calls.count
    assert left <= local_db.get_job(result.job_id).metrics["rows_left"]
    table.backfill("y")
    assert calls.count - before == left
    assert is_right(table)


def test_clean_ups_in_a_loop_cost_no_call(local_db: Connection, calls: Calls, busy: Busy) -> None:
    other = make_table(local_db)
    table = local_db.open_table("t")
    table.add_columns({"y": counted(calls, add_one, data_type=pa.int64(), version="1")})
    busy(lambda step: compact_and_clean_up(other, step) if step < 20 else None)
    table.backfill("y", concurrency=1)
    assert table.plan_backfill("y").is_empty
    assert is_right(table)
    assert calls.count <= table.count_rows(), "nothing is computed twice"


def test_unverified_files_are_not_deleted_while_a_job_runs(
    local_db: Connection, calls: Calls, busy: Busy
) -> None:
    other = make_table(local_db)
    other.add(pa.table({"k": [ROWS], "x": [ROWS * 100]}))
    refused = []

    def clean_up(step: int) -> None:
        with pytest.raises(UserInputError, match="is running on table 't'"):
            other.optimize(cleanup_older_than=timedelta(microseconds=1000), delete_unverified=True)
        refused.append((step, len(lance.dataset(other.ref.uri).get_fragments())))

    table = local_db.open_table("t")
    table.add_columns({"y": counted(calls, add_one, data_type=pa.int64(), version="1")})
    busy(clean_up)
    table.backfill("y")
    assert len(refused) == ROWS + 1
    fragments = len(lance.dataset(other.ref.uri).get_fragments())
    assert fragments > 1
    assert {found for _, found in refused} == {fragments}, "nothing was compacted first"
    other.optimize(cleanup_older_than=timedelta(microseconds=1000), delete_unverified=True)
    assert is_right(local_db.open_table("t"))


@pytest.mark.parametrize("is_first", [True, False])
def test_rows_that_come_just_before_a_column_is_planned_have_their_inputs(
    local_db: Connection,
    calls: Calls,
    busy: Busy,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_first: bool,
) -> None:
    """Between the last look at a computed input and the plan of what is made from it."""
    table = make_table(local_db)

    @geneva.udf
    def a(x: int) -> int:
        return x + 1

    @geneva.udf
    def b(a: int | None) -> int:
        import conflict_watch

        calls.note([a])
        conflict_watch.call()
        return -1 if a is None else a + 1

    def change_one(step: int) -> None:
        if not step:  # so that there is another plan
            table.update(where="k = 7", values={"x": 7})

    table.add_columns({"a": a})
    table.add_columns({"b": b})
    if not is_first:
        table.backfill("a")
        busy(change_one)
    again, added = PreparedBackfill.again, []

    def meanwhile(self: PreparedBackfill, *given: Any, **named: Any) -> PreparedBackfill:
        if self.plan.column == "b" and len(added) < 2:
            added.append(1_000 + len(added))
            table.add(pa.table({"k": added[-1:], "x": [0]}))
        return again(self, *given, **named)

    monkeypatch.setattr(PreparedBackfill, "again", meanwhile)
    table.backfill("b")
    assert added
    table.backfill("b")
    assert None not in calls.taken()
    assert all(row["b"] == row["x"] + 2 for row in table.to_arrow().to_pylist())

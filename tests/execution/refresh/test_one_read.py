"""The columns of a view that are filled for the same rows are made from one read of the source."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import Connection, udf
from geneva.errors import SQLExecutionError, UDFExecutionError, UDFOutputError
from geneva.execution.backfill.tasks import TaskQueue
from geneva.execution.runner import ANY, InProcessRunner
from geneva.model.computation import Resources
from geneva.storage.lance.source_rows import SourceRows
from geneva.view import MaterializedView
from support import Calls, breakable, checkpoint_store, connect, counted, tripled
from view_support import make_source, numbers, values


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int]]:
    """What refreshes read of their source: the expressions, and how many rows."""
    real, found = SourceRows.take, list[tuple[tuple[str, ...], int]]()

    def noting(self: SourceRows, ids: Any) -> Any:
        found.append((tuple(text for _, text in self.expressions), len(ids)))
        return real(self, ids)

    monkeypatch.setattr(SourceRows, "take", noting)
    return found


def two_udfs(db: Connection, calls: Calls, others: Calls, rows: int = 10) -> MaterializedView:
    source = make_source(db, rows=rows)
    query = source.query().select({"id": "id", "twice": "id * 2"})
    longer = counted(others, lambda name: len(name), data_type="int64", input_columns=["name"])
    query = query.add_column({"t": tripled(calls)}).add_column({"n": longer})
    return db.create_materialized_view("v", query)


@pytest.fixture
def others(tmp_path: Path) -> Calls:
    return Calls(str(tmp_path / "other_calls"))


def test_all_columns_are_made_from_one_read(
    local_db: Connection, calls: Calls, others: Calls, read: list[tuple[tuple[str, ...], int]]
) -> None:
    view = two_udfs(local_db, calls, others)
    result = view.refresh(max_rows_per_fragment=5)
    assert sum(rows for _, rows in read) == 10
    assert {texts for texts, _ in read} == {("`id`", "`name`", "id * 2")}
    assert (calls.taken(), len(others.taken())) == (list(range(10)), 10)
    assert values(view) == {i: 3 * i for i in range(10)}
    assert values(view, "n") == dict.fromkeys(range(10), 2)
    assert values(view, "twice") == {i: 2 * i for i in range(10)}
    assert (result.rows_committed, result.progress.total, result.rows_computed) == (10, 10, 20)
    assert str(result).startswith("DONE: 20 values of 2 functions computed, 10 rows committed in ")
    assert view.plan_refresh().is_empty


def test_columns_of_other_rows_are_read_by_themselves(
    local_db: Connection, calls: Calls, others: Calls, read: list[tuple[tuple[str, ...], int]]
) -> None:
    view = two_udfs(local_db, calls, others)
    view.refresh()
    source = local_db.open_table("src")
    source.update(where="id = 3", values={"name": "longer"})
    source.add(numbers(10, 12))
    for each in (calls, others):
        each.clear()
    read.clear()
    view.refresh(task_size=100)
    assert values(view, "n") == {i: 6 if i == 3 else 2 + (i > 9) for i in range(12)}
    assert (calls.taken(), len(others.taken())) == ([10, 11], 3)
    # The new rows once for all, and the one that changed for the column that reads its name.
    assert sum(rows for _, rows in read) == 3


def test_a_function_that_fails_loses_nothing_of_the_others(
    local_db: Connection, calls: Calls, others: Calls, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text(json.dumps([7]))
    query = make_source(local_db).query().select(["id"])
    fragile, sound = breakable(calls, broken, batch_size=1), tripled(others, batch_size=1)
    query = query.add_column({"t": fragile}).add_column({"u": sound})
    view = local_db.create_materialized_view("v", query)
    with pytest.raises(UDFExecutionError):
        view.refresh(task_size=100)
    assert calls.taken() == list(range(8))
    before = others.taken()
    broken.unlink()
    view.refresh()
    assert calls.taken() == [7, 8, 9]
    assert sorted([*before, *others.taken()]) == list(range(10))
    assert values(view, "u") == values(view, "t") == {i: 3 * i for i in range(10)}


class _AfterADeath(InProcessRunner):
    """Runs every task as if its worker had died before."""

    def submit(
        self, function: Callable[[Any], str], items: Sequence[Any], resources: Resources = ANY
    ) -> Future[list[str]]:
        return super().submit(function, [replace(item, attempt=1) for item in items], resources)


def test_a_task_that_was_lost_does_its_columns_one_after_the_other(
    tmp_path: Path, calls: Calls, others: Calls, read: list[tuple[tuple[str, ...], int]]
) -> None:
    db = connect(tmp_path / "db", _AfterADeath)
    view = two_udfs(db, calls, others)
    view.refresh(max_rows_per_fragment=5)
    assert len({texts for texts, _ in read}) == 3
    assert (calls.taken(), len(others.taken())) == (list(range(10)), 10)
    assert values(view) == {i: 3 * i for i in range(10)}
    assert values(view, "n") == dict.fromkeys(range(10), 2)
    assert checkpoint_store(view).list_keys("attempt-") == []


def test_sql_that_fails_is_named(local_db: Connection, calls: Calls) -> None:
    query = make_source(local_db).query().select({"id": "id", "bad": "10 / (id - 7)"})
    view = local_db.create_materialized_view("v", query.add_column({"t": tripled(calls)}))
    with pytest.raises(SQLExecutionError, match="column 'bad'"):
        view.refresh()


@pytest.mark.parametrize("option", ["concurrency", "checkpoint_size"])
def test_where_rows_are_counted_columns_run_by_themselves(
    local_db: Connection,
    calls: Calls,
    others: Calls,
    read: list[tuple[tuple[str, ...], int]],
    option: str,
) -> None:
    view = two_udfs(local_db, calls, others)
    view.refresh(**{option: 1})
    assert sum(rows for _, rows in read) == 30
    assert (calls.taken(), len(others.taken())) == (list(range(10)), 10)
    assert values(view) == {i: 3 * i for i in range(10)}


@pytest.mark.slow
def test_a_slow_column_is_let_go(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = list[str]()
    real = TaskQueue.let_go

    def noting(self: TaskQueue, queue: TaskQueue) -> None:
        let_go.append(queue.work.computation.name)
        real(self, queue)

    monkeypatch.setattr(TaskQueue, "let_go", noting)

    @udf(data_type="int64", input_columns=["id"])
    def slow(id: int) -> int:
        time.sleep(0.02)
        return id

    query = make_source(local_db, rows=60).query().select(["id"])
    query = query.add_column({"t": tripled(calls)}).add_column({"s": slow})
    view = local_db.create_materialized_view("v", query)
    view.refresh(max_rows_per_fragment=10, task_size=10)
    assert set(let_go) == {"s"}
    assert values(view, "s") == {i: i for i in range(60)}
    assert calls.taken() == list(range(60))


def test_functions_find_their_own_variables(local_db: Connection) -> None:
    """Also those whose calls go on while another column's are made."""

    @udf(data_type="string", env={"KEY_OF": "a"})
    async def a(id: int) -> str:
        await asyncio.sleep(0.005)
        return os.environ["KEY_OF"]

    @udf(data_type="string", env={"KEY_OF": "b"})
    def b(id: int) -> str:
        return os.environ["KEY_OF"]

    db = connect(Path(local_db.uri), lambda: InProcessRunner(1))
    query = make_source(db, rows=60).query().select({"id": "id", "a": a, "b": b})
    view = db.create_materialized_view("v", query)
    view.refresh(max_rows_per_fragment=10)
    assert values(view, "a") == dict.fromkeys(range(60), "a")
    assert values(view, "b") == dict.fromkeys(range(60), "b")


def test_what_columns_behind_a_failed_one_have_done_is_committed(
    local_db: Connection, calls: Calls, others: Calls, tmp_path: Path
) -> None:
    db = connect(Path(local_db.uri), lambda: InProcessRunner(1))
    mended = tmp_path / "mended"

    @udf(data_type="int64")
    def bad(id: int) -> int:
        if id == 45 and not mended.exists():
            raise ValueError("not yet")
        return id

    columns = {"id": "id", "t": tripled(calls), "bad": bad, "u": tripled(others)}
    view = db.create_materialized_view("v", make_source(db, rows=60).query().select(columns))
    with pytest.raises(UDFExecutionError, match="not yet"):
        view.refresh(max_rows_per_fragment=10)
    mended.touch()
    view.refresh()
    assert calls.rows == others.rows == list(range(60))
    assert values(view, "u") == {i: 3 * i for i in range(60)}


def test_what_a_writer_refuses_loses_nothing_of_the_others(
    local_db: Connection, calls: Calls
) -> None:
    kind = pa.dictionary(pa.int8(), pa.string())

    @udf(data_type=kind, batch_size=20)
    def bad(id: pa.Array) -> pa.Array:
        return pc.cast(id, pa.string()).dictionary_encode().cast(kind)

    query = make_source(local_db, rows=400).query().select({"bad": bad, "t": tripled(calls)})
    with pytest.warns(UserWarning, match="int32 indices"):
        view = local_db.create_materialized_view("v", query)
    with pytest.raises(UDFOutputError, match="128"):
        view.refresh(concurrency=1)  # one task for both
    once = calls.taken()
    plan = {column.name: column.plan.rows_to_run for column in view.plan_refresh().columns}
    assert plan["t"] == 400 - len(once)

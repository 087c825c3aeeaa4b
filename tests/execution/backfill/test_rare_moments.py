"""Moments that a review found: each was wrong once, and none of them may be again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import geneva
from geneva import JobStatus, udf
from geneva.errors import (
    ColumnChangedError,
    TableChangedError,
    TableNotFoundError,
    UDFExecutionError,
    UserInputError,
)
from geneva.execution.backfill.committer import TableCommitter, publish_columns
from geneva.execution.refresh import run as refresh
from geneva.execution.runner import InProcessRunner
from geneva.model.rows import RowRange
from geneva.options import JobOptions
from geneva.storage.checkpoints import cleanup
from geneva.storage.checkpoints.cleanup import drop_leftovers
from geneva.storage.checkpoints.pins import pinned
from geneva.storage.checkpoints.staging import open_checkpoints, read_work
from geneva.storage.checkpoints.store import CheckpointKey, is_of_column
from geneva.storage.lance import history
from support import Calls, publishing

STABLE = {"new_table_enable_stable_row_ids": "true"}


@pytest.fixture
def db(tmp_path: Path) -> geneva.Connection:
    return geneva.connect(tmp_path / "db", runner=lambda: InProcessRunner(1))


def times(factor: int) -> geneva.UDF:
    return udf(
        lambda x: x * factor, data_type=pa.int64(), name=f"times_{factor}", input_columns=["x"]
    )


def values(table: geneva.Table, column: str = "c") -> list[Any]:
    table.checkout_latest()
    return table.to_arrow()[column].to_pylist()


def before_first_commit(db: geneva.Connection, action: Callable[[], object]) -> None:
    done: list[bool] = []

    def late(*args: Any) -> Any:
        if not done:
            done.append(True)
            action()
        return publish_columns(*args)

    db._make_committer = partial(TableCommitter, publish=late)


def test_a_job_does_not_overwrite_what_a_newer_udf_computed(db: geneva.Connection) -> None:
    table = db.create_table("t", pa.table({"x": [1, 2]}))
    table.add_columns({"c": times(10)})

    def altered_and_computed() -> None:
        other = db.open_table("t")
        other.alter_columns({"path": "c", "udf": times(100)})
        other.backfill("c")

    before_first_commit(db, altered_and_computed)
    with pytest.raises(ColumnChangedError, match="another UDF"):
        table.backfill("c")
    assert values(table) == [100, 200]


def test_rows_that_a_restore_brings_back_are_computed(db: geneva.Connection) -> None:
    table = db.create_table("t", pa.table({"x": [0, 1, 2, 3]}))
    table.add_columns({"c": times(10)})
    whole = table.version
    table.delete("x = 0")

    def restored() -> None:
        other = db.open_table("t", version=whole)
        other.restore()

    before_first_commit(db, restored)
    table.backfill("c")
    assert values(table) == [0, 10, 20, 30]


def test_a_store_that_answers_no_more_for_a_moment_leaves_no_wrong_verdict(
    db: geneva.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = db.create_table("t", pa.table({"id": [0, 1], "x": [1, 2]}))
    table.add_columns({"c": times(10)})
    table.backfill("c")
    table.update(where="id = 0", values={"x": 5})

    def unreachable(*args: object) -> None:
        raise OSError("503 Slow Down")

    with monkeypatch.context() as patched:
        patched.setattr(history, "read_transaction", unreachable)
        with pytest.raises(OSError, match="503"):
            table.plan_backfill("c")
    assert table.backfill("c").rows_computed == 1
    assert sorted(values(table)) == [20, 50]


def test_a_table_that_was_made_anew_is_read_as_it_is(db: geneva.Connection) -> None:
    for numbers in ([1, 2], [3, 4, 5]):
        table = db.create_table("t", pa.table({"x": numbers}))
        table.add_columns({"c": times(10)})
        table.backfill("c")
        assert values(table) == [10 * n for n in numbers]
        db.drop_table("t")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_table_that_takes_the_place_of_a_jobs_own_is_left_alone(
    db: geneva.Connection, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before its files are opened, or after they are written: the numbers of versions agree."""

    def make(first: int) -> geneva.Table:
        table = db.create_table("t", pa.table({"x": [first]}))
        table.add(pa.table({"x": [first + 1]}))
        table.add_columns({"c": times(10)})
        return table

    def replace() -> None:
        db.drop_table("t")
        make(100)

    table, submit, begun = make(1), InProcessRunner.submit, list[None]()

    def late(*args: Any, **options: Any) -> Any:
        if not begun:
            begun.append(None)
            replace()
        return submit(*args, **options)

    if when == "before":
        monkeypatch.setattr(InProcessRunner, "submit", late)
    else:
        before_first_commit(db, replace)
    with pytest.raises(TableNotFoundError, match="was dropped"):
        table.backfill("c")
    now = db.open_table("t")
    assert now.to_arrow()["x"].to_pylist() == [100, 101]
    assert now.to_arrow()["c"].null_count == 2
    now.backfill("c")
    assert values(now) == [1000, 1010]


def test_a_renamed_struct_of_one_field_is_the_same_input(db: geneva.Connection) -> None:
    table = db.create_table("t", pa.table({"s": [{"x": 1}, {"x": 2}]}))
    plus_one = udf(lambda v: v + 1, data_type=pa.int64(), input_columns=["s.x"])
    table.add_columns({"c": plus_one})
    table.backfill("c")
    table.alter_columns({"path": "s", "rename": "r"})
    table.add(pa.table({"r": [{"x": 7}]}))
    assert table.backfill("c").rows_computed == 1
    assert values(table) == [2, 3, 8]


def test_cleaning_up_leaves_a_running_jobs_files_alone(db: geneva.Connection) -> None:
    table = db.create_table("t", pa.table({"x": [1, 2]}))
    table.add_columns({"c": times(10)})
    other = db.open_table("t")
    before_first_commit(db, lambda: other.cleanup_checkpoints(older_than=timedelta(seconds=0)))
    table.backfill("c")
    assert values(table) == [10, 20]


def test_a_history_that_fails_once_fails_no_job(
    db: geneva.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = db.create_table("t", pa.table({"x": [1]}))
    table.add(pa.table({"x": [2]}))
    table.add_columns({"c": times(10)})
    plain, written = db._history.append, []

    def flaky(events: Any) -> None:
        written.append(events)
        if len(written) == 2:
            raise OSError("503 Slow Down")
        plain(events)

    monkeypatch.setattr(db._history, "append", flaky)
    assert table.backfill("c", commit_granularity=1).status == "DONE"
    assert values(table) == [10, 20]


class TestViews:
    def test_a_column_over_the_source_is_not_backfilled(self, db: geneva.Connection) -> None:
        source = db.create_table("s", pa.table({"x": [1, 2]}), storage_options=STABLE)
        view = db.create_materialized_view("v", source.query().select({"c": times(10)}))
        view.refresh()
        with pytest.raises(UserInputError, match=r"refresh\(\) fills it"):
            view.backfill("c", where="1=1")
        assert values(view) == [10, 20]

    def test_a_source_that_was_made_anew_is_refused(self, db: geneva.Connection) -> None:
        source = db.create_table("s", pa.table({"x": [1]}), storage_options=STABLE)
        view = db.create_materialized_view("v", source)
        view.refresh()
        db.drop_table("s")
        db.create_table("s", pa.table({"x": [7]}), storage_options=STABLE)
        with pytest.raises(UserInputError, match="made anew"):
            view.refresh()

    def test_a_view_of_a_view_waits_for_it(self, db: geneva.Connection) -> None:
        source = db.create_table("s", pa.table({"x": [1]}), storage_options=STABLE)
        first = db.create_materialized_view("a", source)
        second = db.create_materialized_view("b", first.query().add_column({"c": times(10)}))
        with pytest.raises(UserInputError, match="refresh that one first"):
            second.refresh()
        first.refresh()
        second.refresh()
        assert values(second) == [10]

    def test_a_refresh_that_was_taken_for_dead_leaves_nothing_behind(
        self, db: geneva.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = db.create_table("s", pa.table({"x": [0]}), storage_options=STABLE)
        view = db.create_materialized_view("v", source)
        view.refresh()
        source.add(pa.table({"x": [1]}))
        plain, done = refresh.append_placeholders, []

        def overtaken(*args: Any, **kwargs: Any) -> Any:
            if not done:
                done.append(True)
                with monkeypatch.context() as patched:
                    patched.setattr(db._history, "_is_lost", lambda job: True)
                    db.open_table("v").refresh()
            return plain(*args, **kwargs)

        monkeypatch.setattr(refresh, "append_placeholders", overtaken)
        with pytest.raises(TableChangedError, match="taken over"):
            view.refresh()
        assert sorted(values(view, "x")) == [0, 1]
        source.add(pa.table({"x": [2]}))
        view.refresh()
        assert sorted(values(view, "x")) == [0, 1, 2]


def test_two_jobs_that_are_asked_for_the_same_rows_compute_each_once(db: geneva.Connection) -> None:
    table = db.create_table("t", pa.table({"x": [1, 2, 3]}))
    table.add_columns({"c": times(10)})
    others: list[int] = []
    before_first_commit(
        db,
        lambda: others.append(db.open_table("t").backfill("c", where="1=1").rows_computed),
    )
    assert table.backfill("c", where="1=1").rows_computed == 3
    assert others == [3]
    assert values(table) == [10, 20, 30]


def test_what_goes_wrong_at_the_end_hides_no_error_and_no_other_column(
    db: geneva.Connection, calls: Calls
) -> None:
    """A function fails on its second row, and of the first one column can't be published."""

    def fails(x: int) -> int:
        calls.note([x])
        if calls.count > 1:
            raise ArithmeticError("the function's own")
        return x

    source = db.create_table("t", pa.table({"x": [1, 2]}))
    columns: dict[str, Any] = {"a": udf(fails), "b": times(10), "c": times(100)}
    view = db.create_materialized_view("v", source.query().select({"x": "x", **columns}))
    published: list[str] = []

    def publish(prepared: Any, *args: Any) -> Any:
        published.append(prepared.plan.column)
        if prepared.plan.column == "b":
            raise RuntimeError("nobody foresaw this")
        return publish_columns(prepared, *args)

    with publishing(db, publish), pytest.raises(UDFExecutionError, match="the function's own"):
        view.refresh(max_rows_per_fragment=1)
    assert {"a", "b", "c"} <= set(published)
    assert sum(value is not None for value in values(view)) == 1
    assert db.list_jobs("v")[0].status == JobStatus.FAILED


def test_a_job_that_begins_while_another_one_tidies_up_keeps_its_checkpoints(
    db: geneva.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a tag before it writes: what is listed with its checkpoints is not deleted."""
    table = db.create_table("t", pa.table({"x": [1, 2]}))
    table.add_columns({"c": times(10)})
    store = open_checkpoints(table.ref)
    chain = table._prepare("c", None, JobOptions(), planning_only=True)
    fresh = CheckpointKey(chain.own.prefixes[0], 0, RowRange(0, 1)).path()
    with ExitStack() as job:

        def listed(of: Any) -> Any:
            job.enter_context(pinned(lance.dataset(table.ref.uri), "next", lambda job_id: True))
            store[fresh] = pa.record_batch({"c": [10]})
            return read_work(of)

        with monkeypatch.context() as patched:
            patched.setattr(cleanup, "read_work", listed)
            assert drop_leftovers(table.ref, partial(is_of_column, column="c"), set()) == 0
        assert store.list_keys() == [fresh]
    assert drop_leftovers(table.ref, partial(is_of_column, column="c"), set()) == 1

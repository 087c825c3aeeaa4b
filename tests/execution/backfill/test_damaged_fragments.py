"""One bad fragment: all others are computed and committed, and the error names it."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import conflict_watch
import geneva
from geneva import Connection
from geneva.errors import StorageFullError, UnreadableFragmentsError
from geneva.execution.backfill.verify import RowState
from geneva.execution.worker.writer import PartWriter
from geneva.model.jobs import JobStatus
from support import Calls, counted, damage, slow

BAD = 2


def add_one(x: int) -> int:
    return x + 1


def make_table(db: Connection, calls: Calls) -> geneva.Table:
    options = {"new_table_enable_stable_row_ids": "true"}
    table = db.create_table("t", pa.table({"x": range(10)}), storage_options=options)
    for start in range(10, 60, 10):
        table.add(pa.table({"x": range(start, start + 10)}))
    table.add_columns({"y": counted(calls, add_one, data_type=pa.int64(), version="1")})
    return table


def committed(table: geneva.Table) -> set[int]:
    fragments = lance.dataset(table.ref.uri).get_fragments()
    return {f.fragment_id for f in fragments if len(f.data_files()) > 1}


def test_the_others_are_done_on_every_runner(db: Connection, calls: Calls) -> None:
    check_others(db, calls, "cut", None)


@pytest.mark.parametrize(
    ("how", "task_size"),
    [("gone", None), ("cut", 5), slow("noise", None), slow("gone", 5), slow("noise", 5)],
)
def test_the_others_are_done(
    local_db: Connection, calls: Calls, how: str, task_size: int | None
) -> None:
    check_others(local_db, calls, how, task_size)


def check_others(db: Connection, calls: Calls, how: str, task_size: int | None) -> None:
    table = make_table(db, calls)
    path, was = damage(table, BAD, how)
    with pytest.raises(UnreadableFragmentsError, match=r"table 't'.*column 'y'.*fragment 2") as e:
        table.backfill("y", task_size=task_size)
    assert e.value.fragments == (BAD,)
    assert committed(table) == {0, 1, 3, 4, 5}
    assert calls.count == 50
    assert db.list_jobs()[0].status is JobStatus.FAILED
    # Nothing else is tried again, and the fragment is done when its file is back.
    with pytest.raises(UnreadableFragmentsError):
        table.backfill("y")
    assert calls.count == 50
    path.write_bytes(was)
    lance.dataset(table.ref.uri).validate()
    table.backfill("y")
    assert calls.count == 60
    assert table.to_arrow()["y"].to_pylist() == [x + 1 for x in range(60)]


def test_one_that_is_damaged_while_the_job_runs_is_named(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody appends, and the new file is gone when the clause is looked at anew."""
    table = local_db.create_table("t", pa.table({"x": range(10)}))

    def append() -> None:
        monkeypatch.setattr(conflict_watch, "on_call", None)
        other = local_db.open_table("t")
        other.add(pa.table({"x": range(10, 20)}))
        damage(other, 1)

    def watched(x: int) -> int:
        import conflict_watch

        conflict_watch.call()
        return x + 1

    table.add_columns({"y": counted(calls, watched, data_type=pa.int64(), version="1")})
    monkeypatch.setattr(conflict_watch, "on_call", append)
    with pytest.raises(UnreadableFragmentsError) as e:
        table.backfill("y", where="x >= 0")
    assert e.value.fragments == (1,)
    assert calls.count == 10
    assert committed(table) == {0}


def test_a_chain_goes_on_without_it(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, calls)
    twice = Calls(f"{calls.path}-twice")

    def double(y: int) -> int:
        return 2 * y

    table.add_columns({"z": counted(twice, double, data_type=pa.int64(), version="1")})
    path, was = damage(table, BAD)
    with pytest.raises(UnreadableFragmentsError):
        table.backfill("z")
    assert calls.count == 50
    assert twice.count == 50
    path.write_bytes(was)
    table.backfill("z")
    assert (calls.count, twice.count) == (60, 60)
    assert table.to_arrow()["z"].to_pylist() == [2 * (x + 1) for x in range(60)]


def test_a_refresh_does_the_other_rows(local_db: Connection, calls: Calls) -> None:
    source = make_table(local_db, Calls(f"{calls.path}-source"))
    query = (
        source.query()
        .select(["x"])
        .add_column({"w": counted(calls, add_one, data_type=pa.int64(), version="1")})
    )
    view = local_db.create_materialized_view("v", query)
    path, was = damage(source, BAD)
    with pytest.raises(UnreadableFragmentsError):
        view.refresh(max_rows_per_fragment=10)
    path.write_bytes(was)
    view.refresh()
    assert calls.count == 60
    assert sorted(view.to_arrow()["w"].to_pylist()) == [x + 1 for x in range(60)]


def test_a_full_disk_ends_the_job_at_once(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(local_db, calls)

    def full(self: PartWriter) -> None:
        end = time.monotonic() + 0.3
        while calls.count <= 50 and time.monotonic() < end:
            time.sleep(0.01)  # as long as the program runs ahead of the writer
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "finish", full)
        with pytest.raises(StorageFullError, match=r"column 'y' of table 't'.*No space left"):
            table.backfill("y", concurrency=1)
    assert calls.count <= 50, "of six parts the last is not begun, and no task is tried again"
    table.backfill("y")
    assert table.to_arrow()["y"].to_pylist() == [x + 1 for x in range(60)]


def test_a_chain_names_the_fragments_of_all_columns(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, calls)
    lance.dataset(table.ref.uri).add_columns({"b": "x * 10"})
    table.checkout_latest()
    other, total = Calls(f"{calls.path}-other"), Calls(f"{calls.path}-total")

    def less(b: int) -> int:
        return b - 1

    def added(y: int, c: int) -> int:
        return y + c

    table.add_columns({"c": counted(other, less, data_type=pa.int64(), version="1")})
    table.add_columns({"z": counted(total, added, data_type=pa.int64(), version="1")})
    damage(table, BAD)
    file = lance.dataset(table.ref.uri).get_fragment(4).data_files()[-1]
    (Path(table.ref.uri) / "data" / file.path).unlink()
    with pytest.raises(UnreadableFragmentsError) as e:
        table.backfill("z")
    assert set(e.value.fragments) == {BAD, 4}
    assert "'y'" in str(e.value)
    assert "'c'" in str(e.value)
    assert (calls.count, other.count, total.count) == (50, 50, 40)


@pytest.mark.parametrize(
    ("how", "run"),
    [("gone", False), ("cut", True), slow("noise", False), slow("gone", True), slow("noise", True)],
)
def test_a_second_opinion_tells_which_rows_it_can_not_read(
    local_db: Connection,
    calls: Calls,
    how: str,
    run: bool,
) -> None:
    table = make_table(local_db, calls)
    table.backfill("y")
    damage(table, BAD, how)
    report = table.verify("y", run=run)
    assert not report.ok
    assert report.counts == {RowState.RIGHT: 50, RowState.UNREADABLE: 10}
    assert {e.address >> 32 for e in report.examples} == {BAD}

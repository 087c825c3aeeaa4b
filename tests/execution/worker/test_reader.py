"""The reader alone: windows of inputs, and values that are there already. It writes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from geneva.execution.apply.compact import is_compact
from geneva.execution.worker.read_ahead import ReadAhead
from geneva.execution.worker.reader import Reader
from geneva.execution.worker.records import Durable, OpenTask, Result, Window
from geneva.execution.worker.task import RowFailure
from geneva.execution.worker.threads import Halt
from geneva.execution.worker.writer import Writer
from geneva.model.rows import RowRange, RowSet
from geneva.storage.checkpoints.reuse import BatchCheckpoint, Reuse
from geneva.storage.checkpoints.store import CheckpointKey
from worker_support import as_offsets, make_part, make_piece, make_result, open_task, shown

FAILURE = RowFailure(
    offset=4, exception_type="ValueError", message="no", traceback="", attempt=1, preview="x=4"
)


@pytest.fixture
def task(tmp_path: Path) -> OpenTask:
    return open_task(tmp_path, range(10))


def save(task: OpenTask, result: Result) -> None:
    """Put a checkpoint of exactly these rows into the store."""
    writer = Writer(task).begin(make_part(10, result.rows))
    writer.add(result)
    writer.finish()


def test_a_part_is_read_window_by_window(task: OpenTask) -> None:
    items = list(Reader(task).read(make_part(10)))
    assert shown(items) == [
        ("window", 0, 4, [0, 1, 2, 3]),
        ("window", 4, 8, [4, 5, 6, 7]),
        ("window", 8, 10, [8, 9]),
    ]
    first = items[0]
    assert isinstance(first, Window)
    assert first.inputs.to_pydict() == {"x": [0, 1, 2, 3]}
    assert first.known is None
    assert task.store.list_keys() == []


def test_only_wanted_rows_of_a_range_are_read(task: OpenTask) -> None:
    chosen = RowSet.from_mask(np.array([False, True, False, True, True, False]))
    part = make_part(10, RowRange(3, 9), compute=chosen)
    items = list(Reader(task).read(part))
    assert shown(items) == [("window", 3, 7, [4, 6]), ("window", 7, 8, [7])]


def test_checkpoints_are_taken_in_their_place(task: OpenTask) -> None:
    save(task, make_result(3, 6))
    items = list(Reader(task).read(make_part(10, covered=(RowRange(3, 6),))))
    assert shown(items) == [
        ("window", 0, 3, [0, 1, 2]),
        ("result", 3, 6, [3, 4, 5]),
        ("window", 6, 10, [6, 7, 8, 9]),
    ]
    loaded = items[1]
    assert isinstance(loaded, Result)
    assert loaded.durable is Durable.ALREADY
    assert (loaded.rows_run, loaded.rows_reused) == (0, 3)
    assert loaded.piece.values.column(0).to_pylist() == [9, 12, 15]


def test_a_checkpoint_brings_its_failures(task: OpenTask) -> None:
    failed = Result(RowRange(3, 6), make_piece([3, 4, 5], failed=[1]), failures=(FAILURE,))
    save(task, failed)
    (loaded,) = Reader(task).read(make_part(10, RowRange(3, 6), covered=(RowRange(3, 6),)))
    assert isinstance(loaded, Result)
    assert loaded.failures == (FAILURE,)
    # Of rows that are not wanted any more, nothing is.
    chosen = RowSet.from_mask(np.array([True, False, True]))
    part = make_part(10, RowRange(3, 6), compute=chosen, covered=(RowRange(3, 6),))
    (loaded,) = Reader(task).read(part)
    assert isinstance(loaded, Result)
    assert (loaded.failures, loaded.piece.offsets.tolist()) == ((), [3, 5])


@pytest.mark.parametrize("damage", ["gone", "too few rows", "another type"])
def test_a_checkpoint_that_can_not_be_used_is_read_as_inputs(task: OpenTask, damage: str) -> None:
    save(task, make_result(3, 6))
    key = CheckpointKey("udf-triple", 0, RowRange(3, 6)).path()
    batch = task.store[key]
    del task.store[key]
    if damage == "too few rows":
        task.store[key] = batch.slice(0, 2)
    elif damage == "another type":
        y = batch.column(0).cast(pa.float64())
        task.store[key] = pa.record_batch([y, *batch.columns[1:]], names=batch.schema.names)
    items = list(Reader(task).read(make_part(10, covered=(RowRange(3, 6),))))
    assert [row[:3] for row in shown(items)] == [
        ("window", 0, 3),
        ("window", 3, 6),
        ("window", 6, 10),
    ]


def test_results_that_are_taken_over_come_with_their_window(task: OpenTask) -> None:
    """Rows 1, 2 and 6 to 9 have a result; the other ones are read."""
    save(task, make_result(0, 10))
    key = CheckpointKey("udf-triple", 0, RowRange(0, 10)).path()
    rows = as_offsets([1, 2, 6, 7, 8, 9])
    part = make_part(10, reuse=(Reuse(BatchCheckpoint(key), source=rows, target=rows),))
    items = list(Reader(task).read(part))
    assert shown(items) == [
        ("window", 0, 4, [0, 3]),
        ("window", 4, 6, [4, 5]),
        ("result", 6, 10, [6, 7, 8, 9]),
    ]
    window, _, rest = items
    assert isinstance(window, Window)
    assert window.known is not None
    assert window.known.offsets.tolist() == [1, 2]
    assert window.known.values.column(0).to_pylist() == [3, 6]
    assert isinstance(rest, Result)
    assert (rest.durable, rest.rows_reused) == (Durable.LATER, 4)


def test_a_reader_goes_on_with_the_next_part(task: OpenTask) -> None:
    reader = Reader(task)
    for rows in (RowRange(0, 4), RowRange(4, 10)):
        found = [row for item in shown(reader.read(make_part(10, rows))) for row in item[3]]
        assert found == list(range(rows.start, rows.end))
    assert reader.clock.read > 0


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 9, 100])
def test_batches_of_a_given_size_are_cut_ahead_each_in_buffers_of_its_own(
    task: OpenTask, batch_size: int
) -> None:
    save(task, make_result(3, 6))
    part = make_part(10, covered=(RowRange(3, 6),))
    ahead = ReadAhead([(Reader(task), batch_size)], [(part,), (make_part(10),)], Halt())
    ahead.run()
    for expected in ([[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]], [[*range(10)]]):
        items = [item for _, group in ahead.next_leg() for item in group]
        sizes = [len(rows) for *_, rows in shown(items)]
        found = [row for *_, rows in shown(items) for row in rows]
        assert found == [*range(10)]
        assert sizes == [
            size
            for rows in expected
            for size in ([3] if rows == [3, 4, 5] else _cut(len(rows), batch_size))
        ]
        for item in items:
            if isinstance(item, Window):
                assert is_compact(item.inputs.column(0))
                assert item.inputs.column(0).to_pylist() == item.offsets.tolist()
                assert item.digests is not None
                assert len(item.digests) == len(item.offsets)


def test_the_first_batch_of_a_task_waits_for_no_other_rows(
    task: OpenTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is read at once, more and more is digested; of later reads, all at once."""
    digested: list[int] = []
    digest = Reader.digested

    def noted(self: Reader, item: Window | Result) -> Window | Result:
        digested.append(len(item.offsets) if isinstance(item, Window) else 0)
        return digest(self, item)

    monkeypatch.setattr(Reader, "digested", noted)
    part = replace(make_part(10), window=10)
    ahead = ReadAhead([(Reader(task), 2)], [(part,), (part,)], Halt())
    ahead.run()
    groups = [[len(window.offsets) for window in group] for _, group in ahead.next_leg()]
    assert groups == [[2], [2, 2, 2, 2]]
    groups = [[len(window.offsets) for window in group] for _, group in ahead.next_leg()]
    assert groups == [[2] * 5]
    assert digested == [2, 8, 10]


def _cut(rows: int, size: int) -> list[int]:
    return [min(size, rows - at) for at in range(0, rows, size)]

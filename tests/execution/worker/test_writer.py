"""The writer alone: checkpoints, the column file, records, and what it acknowledges."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lance.file
import numpy as np
import pyarrow as pa
import pytest

from geneva.execution.worker.layout import Layout
from geneva.execution.worker.records import Durable, OpenTask, Result
from geneva.execution.worker.task import RowFailure
from geneva.execution.worker.writer import Writer
from geneva.model.rows import RowRange, RowSet
from geneva.planning.backfill import OutputPlan
from geneva.storage.checkpoints.store import (
    ERROR_COLUMN,
    CheckpointKey,
    InMemoryCheckpointStore,
)
from geneva.storage.columns.provenance import read_provenance
from geneva.storage.columns.receipts import is_adopted
from worker_support import make_file, make_part, make_piece, make_result, open_task

FAILURE = RowFailure(
    offset=4, exception_type="ValueError", message="no", traceback="", attempt=1, preview="x=4"
)
NOW = Durable.NOW


@pytest.fixture
def task(tmp_path: Path) -> OpenTask:
    return open_task(tmp_path, range(10))


def saved_ranges(task: OpenTask) -> list[tuple[int, int]]:
    keys = [CheckpointKey.parse(key) for key in task.store.list_keys()]
    return sorted((k.rows.start, k.rows.end) for k in keys if k is not None and k.rows is not None)


def staged(task: OpenTask, path: str | None) -> dict[str, list[int]]:
    reader = lance.file.LanceFileReader(f"{task.work.ref.uri}/data/{path}")
    table: dict[str, list[int]] = reader.read_all().to_table().to_pydict()
    return table


class TestCheckpoints:
    def test_nothing_is_durable_before_it_is_acknowledged(self, task: OpenTask) -> None:
        writer = Writer(task).begin(make_part(10))
        assert writer.add(make_result(0, 2)) is None
        assert saved_ranges(task) == []
        saved = writer.add(make_result(2, 5, durable=NOW))
        assert saved is not None
        assert saved.result(0).rows == RowRange(0, 5)
        assert saved_ranges(task) == [(0, 5)]

    def test_what_is_to_be_durable_soon_is_written_behind(self, task: OpenTask) -> None:
        written = threading.Event()

        class Waiting(InMemoryCheckpointStore):
            def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
                assert written.wait(20)
                super().__setitem__(key, value)

        task = replace(task, store=Waiting())
        writer = Writer(task).begin(make_part(10))
        saved = writer.add(make_result(0, 2, durable=Durable.SOON))
        writer.add(make_result(2, 5))
        assert saved is not None
        assert not saved.done()
        written.set()
        assert writer.finish().checkpoints == (RowRange(0, 2), RowRange(2, 10))
        assert saved.result(0).rows == RowRange(0, 2)

    @pytest.mark.parametrize("then", ["add", "finish", "abandon"])
    def test_an_error_of_what_is_written_behind_is_raised_by_what_follows(
        self, task: OpenTask, then: str
    ) -> None:
        class Broken(InMemoryCheckpointStore):
            def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
                raise OSError("gone")

        writer = Writer(replace(task, store=Broken())).begin(make_part(10, file=make_file(10)))
        writer.add(make_result(0, 2, durable=Durable.SOON))
        steps: dict[str, Callable[[], object]] = {
            "add": lambda: writer.add(make_result(2, 4, durable=Durable.SOON)),
            "finish": writer.finish,
            "abandon": writer.abandon,
        }
        with pytest.raises(OSError, match="gone"):
            steps[then]()

    def test_a_checkpoint_that_failed_ends_the_part_with_the_next_result(
        self, task: OpenTask
    ) -> None:
        class Broken(InMemoryCheckpointStore):
            def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
                raise OSError("gone")

        writer = Writer(replace(task, store=Broken())).begin(make_part(10))
        saved = writer.add(make_result(0, 2, durable=Durable.SOON))
        assert saved is not None
        assert saved.exception(20) is not None
        with pytest.raises(OSError, match="gone"):
            writer.add(make_result(2, 4))

    def test_the_end_of_a_part_is_saved_with_it(self, task: OpenTask) -> None:
        writer = Writer(task).begin(make_part(10))
        writer.add(make_result(0, 5, durable=NOW))
        writer.add(make_result(5, 8))
        result = writer.finish()
        assert result.checkpoints == (RowRange(0, 5), RowRange(5, 10))
        assert (result.staged_path, result.rows_run) == (None, 8)

    def test_a_loaded_range_is_not_saved_again(self, task: OpenTask) -> None:
        writer = Writer(task).begin(make_part(10))
        writer.add(make_result(0, 2))
        saved = writer.add(replace(make_result(4, 6), durable=Durable.ALREADY))
        assert saved is not None
        assert saved.result(0).rows == RowRange(0, 4)
        writer.add(make_result(6, 10))
        assert writer.finish().checkpoints == (RowRange(0, 4), RowRange(4, 6), RowRange(6, 10))
        assert saved_ranges(task) == [(0, 4), (6, 10)]

    def test_a_checkpoint_holds_values_addresses_and_digests(self, task: OpenTask) -> None:
        writer = Writer(task).begin(make_part(10))
        writer.add(make_result(3, 5, durable=NOW))
        (key,) = task.store.list_keys()
        batch = task.store[key]
        assert batch.schema.names == ["y", "receipt", "_rowaddr", "_digest"]
        assert batch.column(0).to_pylist() == [9, 12]
        assert batch.column(2).to_pylist() == [3, 4]
        assert np.array_equal(batch.column(3).to_numpy(), make_piece([3, 4]).digests)

    def test_failures_are_in_the_checkpoint_of_their_rows(self, task: OpenTask) -> None:
        writer = Writer(task).begin(make_part(10))
        writer.add(make_result(0, 3, durable=NOW))
        failed = make_piece([3, 4, 5], failed=[1])
        writer.add(Result(RowRange(3, 6), failed, failures=(FAILURE,), durable=NOW))
        names = [task.store[key].schema.names for key in task.store.list_keys()]
        assert [ERROR_COLUMN in found for found in names] == [False, True]
        result = writer.finish()
        assert (result.rows_failed, result.failures) == (1, (FAILURE,))

    def test_abandoning_saves_what_was_added_and_no_more(self, task: OpenTask) -> None:
        writer = Writer(task).begin(make_part(10, file=make_file(10)))
        writer.add(make_result(0, 3))
        failed = make_piece([3, 4, 5], failed=[1])
        writer.add(Result(RowRange(3, 6), failed, failures=(FAILURE,)))
        assert writer.abandon().found == {4: FAILURE}
        assert saved_ranges(task) == [(0, 6)]
        assert len(list(Path(task.work.ref.uri, "data").glob("geneva-*"))) == 0


class TestColumnFile:
    def test_gaps_are_null(self, task: OpenTask) -> None:
        part = make_part(10, file=make_file(10))
        writer = Writer(task).begin(part)
        writer.add(Result(RowRange(0, 4), make_piece([1, 3])))
        writer.add(make_result(6, 8))
        result = writer.finish()
        assert result.checkpoints == ()
        values = staged(task, result.staged_path)["y"]
        assert values == [None, 3, None, 9, None, None, 18, 21, None, None]

    def test_old_values_stay_where_nothing_is_new(self, task: OpenTask) -> None:
        part = make_part(10, file=make_file(10, keeps_old=True))
        writer = Writer(task).begin(part)
        writer.add(Result(RowRange(0, 4), make_piece([1, 3])))
        values = staged(task, writer.finish().staged_path)["y"]
        assert values == [0, 3, -2, 9, -4, -5, -6, -7, -8, -9]

    def test_adopted_rows_get_a_receipt_and_nothing_else(self, task: OpenTask) -> None:
        adopt = RowSet.from_offsets(10, np.array([2, 9]))
        outputs = (OutputPlan(place=0, compute=RowSet.empty(10), adopt=adopt),)
        file = make_file(10, keeps_old=True, receipts_only=True, outputs=outputs, field_ids=(2,))
        writer = Writer(task).begin(make_part(10, compute=RowSet.empty(10), file=file))
        table = staged(task, writer.finish().staged_path)
        assert list(table) == ["receipt"]
        receipts = pa.array(table["receipt"], pa.int64())
        assert np.flatnonzero(receipts.is_valid()).tolist() == [2, 9]
        assert np.flatnonzero(is_adopted(receipts)).tolist() == [2, 9]

    def test_rows_that_failed_are_in_the_provenance(self, task: OpenTask) -> None:
        writer = Writer(task).begin(make_part(10, file=make_file(10)))
        failed = make_piece(range(10), failed=[4])
        writer.add(Result(RowRange(0, 10), failed, failures=(FAILURE,)))
        result = writer.finish()
        assert result.staged_path is not None
        provenance = read_provenance(task.work.ref, result.staged_path)
        assert provenance is not None
        assert provenance.failed == RowSet.from_offsets(10, np.array([4]))
        assert provenance.valid.count == 9
        assert saved_ranges(task) == [(0, 10)], "a file can't hold what happened"
        assert len(list(Path(task.work.ref.uri, "data").glob("geneva-*"))) == 1

    def test_rows_that_failed_earlier_are_known_by_their_receipts(self, task: OpenTask) -> None:
        writer = Writer(task).begin(make_part(10, file=make_file(10)))
        writer.add(Result(RowRange(0, 10), make_piece(range(10), failed=[4]), rows_reused=10))
        result = writer.finish()
        assert (result.rows_failed, result.failures) == (0, ())
        assert result.staged_path is not None
        provenance = read_provenance(task.work.ref, result.staged_path)
        assert provenance is not None
        assert provenance.failed == RowSet.from_offsets(10, np.array([4]))


class TestRecords:
    def stage(self, writer: Writer, seconds: float) -> None:
        part = writer.begin(make_part(10, file=make_file(10)))
        part.add(make_result(0, 10, seconds=seconds))
        part.finish()

    def test_a_staged_file_is_recorded_once_work_hangs_on_it(self, task: OpenTask) -> None:
        writer = Writer(task)
        self.stage(writer, 0.6)
        assert (writer.recorded, task.store.list_keys()) == ([], [])
        self.stage(writer, 0.6)
        assert writer.recorded == [(0, 0)], "one record for both"
        assert task.store.list_keys() == [CheckpointKey("udf-triple", 0).path()]

    @pytest.mark.parametrize(("seconds", "recorded"), [(0.05, []), (0.2, [(0,)])])
    def test_at_the_end_of_a_task(
        self, task: OpenTask, seconds: float, recorded: list[tuple[int, ...]]
    ) -> None:
        writer = Writer(task)
        self.stage(writer, seconds)
        writer.finish()
        assert writer.recorded == recorded

    def test_at_once_where_checkpoints_have_a_size(self, tmp_path: Path) -> None:
        writer = Writer(open_task(tmp_path, range(10), checkpoint_size=10))
        self.stage(writer, 0.0)
        assert writer.recorded == [(0,)]


def test_a_layout_covers_every_row_once() -> None:
    schema = pa.schema({"y": pa.int64(), "receipt": pa.int64()})
    layout = Layout(schema, RowRange(2, 20), max_rows=3)
    batches = [*layout.add(make_piece([])), *layout.add(make_piece([7, 9, 10]))]
    batches += [*layout.add(make_piece([11, 12])), *layout.finish()]
    values = [value for batch in batches for value in batch.column(0).to_pylist()]
    new = {row: 3 * row for row in (7, 9, 10, 11, 12)}
    assert values == [new.get(row) for row in range(2, 20)]
    assert max(batch.num_rows for batch in batches) <= 4

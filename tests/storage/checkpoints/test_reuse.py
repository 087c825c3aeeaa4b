"""Results that were computed and not published: looked up by receipt, and read again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileWriter

from computed_table import ComputedTable
from geneva.model.rows import RowRange, RowSet
from geneva.storage.checkpoints.reuse import (
    BatchCheckpoint,
    DataFile,
    PublishedRows,
    ResultIndex,
    Results,
    Reuse,
    ReusedValues,
    _FileRows,
    committed_receipts,
    committed_results,
    read_results,
    reuse_within,
    reused_rows,
    stored_as,
)
from geneva.storage.checkpoints.staging import record_staged
from geneva.storage.checkpoints.store import (
    DIGEST_COLUMN,
    CheckpointKey,
    CheckpointStore,
    InMemoryCheckpointStore,
)
from geneva.storage.columns.receipts import receipts_for
from geneva.storage.columns.staged_files import written_schema

PREFIX = "udf-tripled_ver-1_col-y"


@pytest.fixture
def table(tmp_path: Path) -> ComputedTable:
    return ComputedTable.create(tmp_path)


@pytest.fixture
def store() -> CheckpointStore:
    return InMemoryCheckpointStore()


def results(origin: str, digests: Sequence[int], failed: Sequence[int] = ()) -> Results:
    """Results of a file; inputs are equal where the numbers are."""
    whole = np.array(digests, dtype=np.uint64) << np.uint64(20)
    return Results(
        origin=DataFile(origin),
        rows=np.arange(len(digests)),
        receipts=whole,
        digests=whole,
        failed=np.isin(np.arange(len(digests)), failed),
    )


def digests(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64) << np.uint64(20)


def pairs(found: Sequence[Reuse]) -> dict[object, list[tuple[int, int]]]:
    """Per origin, which of its rows serves which row of the fragment."""
    return {
        reuse.origin: list(zip(reuse.source.tolist(), reuse.target.tolist(), strict=True))
        for reuse in found
    }


class TestLookUp:
    def test_rows_take_the_results_of_their_inputs(self) -> None:
        index = ResultIndex([results("a", [7, 8]), results("b", [9])])
        found = index.take(np.array([3, 5, 6]), digests(9, 1, 7))
        assert pairs(found) == {DataFile("a"): [(0, 6)], DataFile("b"): [(0, 3)]}

    def test_one_result_serves_one_row(self) -> None:
        index = ResultIndex([results("a", [7, 7])])
        first = index.take(np.array([0]), digests(7))
        second = index.take(np.array([1, 2]), digests(7, 7))
        assert pairs(first) == {DataFile("a"): [(0, 0)]}
        assert pairs(second) == {DataFile("a"): [(1, 1)]}
        assert len(index) == 0

    def test_a_shared_result_serves_all_rows(self) -> None:
        index = ResultIndex([results("a", [7])], shared=True)
        for _ in range(2):
            found = index.take(np.array([4, 9]), digests(7, 7))
            assert pairs(found) == {DataFile("a"): [(0, 4), (0, 9)]}

    def test_digests_that_agree_in_part_only_are_not_equal(self) -> None:
        index = ResultIndex([results("a", [7])])
        assert index.take(np.array([0]), digests(7) | np.uint64(1)) == []

    def test_results_that_stand_in_the_table_are_dropped_one_by_one(self) -> None:
        index = ResultIndex([results("a", [7, 7, 8])])
        index.drop(digests(7), kept_files=())
        assert len(index) == 2
        index.drop(digests(7, 8, 9), kept_files=["a"])
        assert len(index) == 2, "the job's own files are kept"

    def test_targets_are_ascending_and_cut_to_a_range(self) -> None:
        index = ResultIndex([results("a", [1, 2, 3])])
        (found,) = index.take(np.array([9, 4, 6]), digests(1, 2, 3))
        assert found.target.tolist() == [4, 6, 9]
        (part,) = reuse_within([found], RowRange(5, 7))
        assert (part.source.tolist(), part.target.tolist()) == ([2], [6])
        assert reuse_within([found], RowRange(0, 4)) == ()
        assert reused_rows([found], 12) == RowSet.from_offsets(12, np.array([4, 6, 9]))

    def test_an_empty_index_has_nothing(self) -> None:
        assert ResultIndex([]).take(np.array([0]), digests(1)) == []


def test_values_are_known_by_the_receipts_of_their_columns() -> None:
    there = ["a", "b", "__receipt_1", "__receipt_2", "_rowaddr", "_digest"]
    assert stored_as(there, ["b", "__receipt_2"]) == ["b", "__receipt_2"]
    assert stored_as(there, ["x", "__receipt_1"]) == ["a", "__receipt_1"], "renamed since"
    swapped = ["b", "a", "__receipt_1", "__receipt_2"]
    assert stored_as(there, swapped) == ["a", "b", "__receipt_1", "__receipt_2"]
    assert stored_as(there, ["a", "__receipt_3"]) is None, "another column of the same name"
    assert stored_as(["__receipt_1"], ["a", "__receipt_1"]) is None, "receipts alone"
    assert stored_as(["a", "b"], ["b", "a"]) == ["b", "a"], "without receipts, by name"
    assert stored_as(["a"], ["a", "b"]) is None


def save_checkpoint(
    table: ComputedTable, store: CheckpointStore, inputs: Sequence[int]
) -> CheckpointKey:
    """Results for these inputs, as a task checkpoints them."""
    computation = table.computation()
    values = pa.array([3 * x for x in inputs], pa.int64())
    found = table.input_digests(inputs)
    key = CheckpointKey(PREFIX, 0, RowRange(0, len(inputs)))
    names = [*(output.name for output in computation.written), DIGEST_COLUMN]
    columns = [values, receipts_for(found, [values]), pa.array(found)]
    store[key.path()] = pa.record_batch(columns, names=names)
    return key


def read_back(
    table: ComputedTable, store: CheckpointStore, found: Sequence[Reuse], rows: int = 8
) -> list[int | None]:
    """The values that are taken over, by the row that they are for."""
    names = [output.name for output in table.computation().written]
    schema = written_schema(table.dataset.schema, names)
    reader = ReusedValues(table.ref, store, schema, table.dataset)
    opened = reader.open(found, RowSet.full(rows))
    piece = reader.between(0, rows)
    values: list[int | None] = [None] * rows
    if piece is not None:
        assert piece.offsets.tolist() == opened.offsets().tolist()
        for offset, value in zip(piece.offsets, piece.values.column(0).to_pylist(), strict=True):
            values[offset] = value
    return values


class TestOrigins:
    def test_a_checkpoint(self, table: ComputedTable, store: CheckpointStore) -> None:
        key = save_checkpoint(table, store, [10, 20, 30])
        index = read_results(table.ref, store, table.computation(), [key], {})
        found = index.take(np.array([0, 1]), table.input_digests([30, 99]))
        assert pairs(found) == {BatchCheckpoint(key.path()): [(2, 0)]}
        assert read_back(table, store, found, 2) == [90, None]

    def test_a_staged_file(self, table: ComputedTable, store: CheckpointStore) -> None:
        staged = table.stage(0, computed=[1, 2])
        record_staged(store, PREFIX, staged)
        key = CheckpointKey(PREFIX, 0)
        index = read_results(table.ref, store, table.computation(), [key], {})
        found = index.take(np.array([0, 1, 2]), table.input_digests([0, 10, 20]))
        assert pairs(found) == {DataFile(staged.path): [(1, 1), (2, 2)]}
        assert read_back(table, store, found, 4) == [None, 30, 60, None]

    def test_of_a_staged_file_only_what_is_wanted_is_read(
        self, table: ComputedTable, store: CheckpointStore
    ) -> None:
        """What the same calls filled, and was dropped since, may be large."""
        names = [output.name for output in table.computation().written]
        schema = written_schema(table.dataset.schema, names)
        there = pa.schema([schema[0], ("large", pa.binary()), schema[1], (f"{names[1]}2", "int8")])
        writer = LanceFileWriter(f"{table.ref.uri}/data/of-two.lance", there)
        writer.write_batch(pa.RecordBatch.from_pylist([{names[0]: 7, "large": b"x"}], there))
        writer.close()
        opened = ReusedValues(table.ref, store, schema, table.dataset)._opened(
            DataFile("of-two.lance"), 0
        )
        assert isinstance(opened, _FileRows)
        assert opened.reader.read_all().to_table().column_names == names
        assert opened.take(np.array([0]))[0].to_pylist() == [7]

    def test_checkpoints_of_a_staged_file_are_not_counted_twice(
        self, table: ComputedTable, store: CheckpointStore
    ) -> None:
        record_staged(store, PREFIX, table.stage(0))
        keys = [CheckpointKey(PREFIX, 0), save_checkpoint(table, store, [0, 10, 20, 30])]
        assert len(read_results(table.ref, store, table.computation(), keys, {})) == 4

    def test_some_rows_of_a_file_of_the_job(
        self, table: ComputedTable, store: CheckpointStore
    ) -> None:
        staged = table.stage(0)
        rows = {staged.path: RowSet.from_offsets(4, np.array([3]))}
        index = read_results(table.ref, store, table.computation(), [], rows)
        assert len(index) == 1
        assert (
            len(read_results(table.ref, store, table.computation(), [], {staged.path: None})) == 4
        )

    def test_failures_are_results_unless_they_are_to_be_tried_again(
        self, table: ComputedTable, store: CheckpointStore
    ) -> None:
        record_staged(store, PREFIX, table.stage(0, failed=[0]))
        keys = [CheckpointKey(PREFIX, 0)]
        for with_failed, expected in ((True, 4), (False, 3)):
            index = read_results(
                table.ref, store, table.computation(), keys, {}, with_failed=with_failed
            )
            assert len(index) == expected

    def test_rows_of_the_table_itself(self, table: ComputedTable, store: CheckpointStore) -> None:
        table.fill(0)
        computation = table.computation()
        index = committed_results(table.dataset, computation, {0: RowSet.full(4)})
        found = index.take(np.array([2, 3]), table.input_digests([30, 30]))
        assert pairs(found) == {PublishedRows(0): [(3, 2), (3, 3)]}
        assert [reuse.fragment_id for reuse in found] == [0]
        assert read_back(table, store, found, 4) == [None, None, 90, 90]

    def test_what_is_published_is_dropped(
        self, table: ComputedTable, store: CheckpointStore
    ) -> None:
        key = save_checkpoint(table, store, [0, 10, 20, 30])
        index = read_results(table.ref, store, table.computation(), [key], {})
        table.fill(0, computed=[1, 2])
        rows = {0: RowSet.from_offsets(4, np.array([1, 2]))}
        index.drop(committed_receipts(table.dataset, table.computation(), rows), ())
        found = index.take(np.arange(4), table.input_digests([0, 10, 20, 30]))
        assert pairs(found) == {BatchCheckpoint(key.path()): [(0, 0), (3, 3)]}

    def test_results_of_another_column_are_none(
        self, table: ComputedTable, store: CheckpointStore
    ) -> None:
        staged = table.stage(0)
        other = table.computation(id="0" * 32)
        assert len(read_results(table.ref, store, other, [], {staged.path: None})) == 0

    def test_what_can_not_be_read_any_more_is_left_out(
        self, table: ComputedTable, store: CheckpointStore
    ) -> None:
        rows = np.array([0, 1])
        gone = [
            Reuse(DataFile("geneva-gone.lance"), rows, rows),
            Reuse(BatchCheckpoint("udf-gone"), rows, rows),
        ]
        assert read_back(table, store, gone) == [None] * 8
        short = Reuse(DataFile(table.stage(0).path), np.array([0, 4]), rows)
        assert read_back(table, store, [short]) == [None] * 8

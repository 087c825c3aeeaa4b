"""The three proofs that a value is right: by identity of files, by history, by receipt."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from computed_table import ComputedTable
from geneva.model.rows import RowSet
from geneva.model.tables import Reason
from geneva.storage.columns.definitions import bound_output
from geneva.storage.columns.proofs import ValidityReader
from geneva.storage.columns.validity import Validity, ValueState


@pytest.fixture
def table(tmp_path: Path) -> ComputedTable:
    return ComputedTable.create(tmp_path)


def offsets(rows: RowSet) -> list[int]:
    return rows.offsets().tolist()


class TestByIdentity:
    def test_nothing_is_computed_in_a_new_column(self, table: ComputedTable) -> None:
        found = table.reader().by_files(table.fragment())
        assert (found.reason, found.rows) == (Reason.NEW, {})

    def test_a_whole_file_is_right_by_its_name(
        self, table: ComputedTable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table.fill(0)
        reader = table.reader()
        monkeypatch.delattr("geneva.storage.columns.proofs.provenance_at")
        found = reader.by_files(table.fragment(0))
        assert (found.reason, found.right.is_full) == (Reason.UP_TO_DATE, True)
        assert not found.without_receipt
        assert reader.by_files(table.fragment(1)).reason is Reason.NEW

    def test_the_file_of_a_part_names_its_rows(self, table: ComputedTable) -> None:
        table.fill(0, computed=[0, 1, 2], failed=[1])
        found = table.reader().by_files(table.fragment())
        assert found.reason is Reason.PARTIAL
        assert [offsets(r) for r in (found.right, found.failed, found.undecided)] == [
            [0, 2],
            [1],
            [3],
        ]

    def test_another_version_of_the_function(self, table: ComputedTable) -> None:
        table.fill(0)
        found = table.reader(version="2").by_files(table.fragment())
        assert (found.reason, bool(found.right)) == (Reason.UDF_CHANGED, False)

    def test_rows_of_a_part_may_be_of_the_present_version(self, table: ComputedTable) -> None:
        table.fill(0, computed=[0])
        assert table.reader(version="2").by_files(table.fragment()).undecided.is_full

    def test_the_file_of_another_column_proves_nothing(self, table: ComputedTable) -> None:
        table.fill(0)
        assert table.reader(id="0" * 32).by_files(table.fragment()).undecided.is_full

    def test_inputs_in_another_file_leave_it_undecided(self, table: ComputedTable) -> None:
        table.fill(0)
        table.dataset.update({"x": "x"}, where="id = 0")
        moved = table.fragment(-1)
        assert moved.physical_rows == 1
        assert table.reader().by_files(moved).undecided.is_full
        assert table.reader().by_files(table.fragment(0)).right.is_full, "its inputs are the same"

    def test_values_without_receipts_are_right_and_need_one(self, table: ComputedTable) -> None:
        table.fill(0)
        found = table.reader(receipts=()).by_files(table.fragment())
        assert found.right.is_full
        assert found.without_receipt.is_full


class TestByHistory:
    def test_a_compaction_of_right_rows(self, table: ComputedTable) -> None:
        table.fill(0)
        table.fill(1)
        table.dataset.optimize.compact_files()
        found = table.reader().by_files(table.fragment())
        assert (found.size, found.reason) == (8, Reason.UP_TO_DATE)
        assert found.right.is_full
        assert not found.without_receipt

    def test_a_compaction_of_right_rows_and_new_ones(self, table: ComputedTable) -> None:
        table.fill(0)
        table.dataset.optimize.compact_files()
        found = table.reader().by_files(table.fragment())
        assert (offsets(found.right), found.reason) == ([0, 1, 2, 3], Reason.NEW)
        assert not found.undecided

    def test_deleted_rows_are_left_out(self, table: ComputedTable) -> None:
        table.fill(0)
        table.dataset.delete("id IN (1, 2, 7)")
        table.dataset.optimize.compact_files()
        found = table.reader().by_files(table.fragment())
        assert (found.size, offsets(found.right)) == (5, [0, 1])

    def test_a_compaction_of_a_compaction(self, table: ComputedTable) -> None:
        table.fill(0)
        table.fill(1)
        table.dataset.optimize.compact_files()
        extra = pa.table({"id": [8], "x": [80]})
        lance.write_dataset(extra, table.ref.uri, mode="append")
        table.dataset.optimize.compact_files()
        found = table.reader().by_files(table.fragment())
        assert offsets(found.right) == list(range(8))

    def test_rows_of_a_part_with_deletions_are_undecided(self, table: ComputedTable) -> None:
        table.fill(0, computed=[0, 1, 2])
        table.dataset.delete("id = 0")
        table.dataset.optimize.compact_files()
        assert table.reader().by_files(table.fragment()).undecided.is_full

    def test_what_was_written_since_is_undecided(self, table: ComputedTable) -> None:
        table.fill(0)
        table.fill(1)
        table.dataset.optimize.compact_files()
        table.dataset.drop_columns(["x"])
        table.dataset.add_columns({"x": "id * 10"})
        reader = ValidityReader(table.dataset, table.snapshot, table.computation())
        assert reader.by_files(table.fragment()).undecided.is_full

    def test_history_that_was_cleaned_up_proves_nothing(self, table: ComputedTable) -> None:
        table.fill(0)
        table.fill(1)
        table.dataset.optimize.compact_files()
        table.dataset.delete("id = 0")
        table.dataset.cleanup_old_versions(timedelta(0))
        assert table.reader().by_files(table.fragment()).undecided.is_full


class TestByReceipt:
    def test_receipts_that_fit_are_right_wherever_rows_are(self, table: ComputedTable) -> None:
        table.fill(0)
        table.dataset.update({"id": "id + 100"}, where="id < 2")
        moved = table.fragment(-1)
        found = table.reader().by_receipt(moved, RowSet.full(2))
        assert (found.reason, found.right.is_full) == (Reason.UP_TO_DATE, True)
        assert found.checked_rows == 2

    def test_changed_inputs_make_values_stale(self, table: ComputedTable) -> None:
        table.fill(0)
        table.dataset.update({"x": "x + id % 2"}, where="id < 4")
        found = table.reader().by_receipt(table.fragment(-1), RowSet.full(4))
        assert found.reason is Reason.INPUT_CHANGED
        assert (offsets(found.right), offsets(found.stale)) == ([0, 2], [1, 3])

    def test_another_version_makes_values_stale(self, table: ComputedTable) -> None:
        table.fill(0)
        reader = table.reader(version="2", former_versions=("1",))
        found = reader.by_receipt(table.fragment(), RowSet.full(4))
        assert (found.reason, found.stale.is_full) == (Reason.UDF_CHANGED, True)

    def test_a_value_that_a_person_wrote_is_supplied(self, table: ComputedTable) -> None:
        table.fill(0)
        table.dataset.update({"y": "-1"}, where="id = 1")
        found = table.reader().by_receipt(table.fragment(-1), RowSet.full(1))
        assert offsets(found.supplied) == [0]
        assert not found.right
        assert not found.stale

    def test_a_value_from_before_receipts_is_unproven(self, table: ComputedTable) -> None:
        table.dataset.update({"y": "-1"}, where="id = 1")
        moved, row = table.fragment(-1), RowSet.full(1)
        assert table.reader().by_receipt(moved, row).supplied.is_full
        older = table.reader(older_than_receipts=True).by_receipt(moved, row)
        assert older.unproven.is_full
        assert not older.supplied

    def test_a_failure_stands_while_the_inputs_are_the_same(self, table: ComputedTable) -> None:
        table.fill(0, failed=[2])
        table.dataset.update({"id": "id"}, where="id < 4")
        moved = table.fragment(-1)
        assert offsets(table.reader().by_receipt(moved, RowSet.full(4)).failed) == [2]
        table.dataset.update({"x": "-1"}, where="id = 2")
        found = table.reader().by_receipt(table.fragment(-1), RowSet.full(1))
        assert (offsets(found.failed), offsets(found.failed_before)) == ([], [0])

    def test_only_the_rows_asked_for_are_decided(self, table: ComputedTable) -> None:
        table.fill(0)
        asked = RowSet.from_offsets(4, np.array([1, 3]))
        found = table.reader().by_receipt(table.fragment(), asked)
        assert offsets(found.right) == [1, 3]

    def test_without_a_column_of_receipts_values_are_unproven(self, table: ComputedTable) -> None:
        table.dataset.update({"y": "nullif(id, 1)"}, where="id IN (0, 1)")
        moved, rows = table.fragment(-1), RowSet.full(2)
        older = table.reader(receipts=(), older_than_receipts=True).by_receipt(moved, rows)
        assert (offsets(older.unproven), offsets(older.supplied)) == ([0], [])
        found = table.reader(receipts=()).by_receipt(moved, rows)
        assert (offsets(found.unproven), offsets(found.supplied)) == ([], [0])

    def test_a_flag_says_which_rows_of_a_view_are_filled(self, table: ComputedTable) -> None:
        table.dataset.add_columns({"done": "nullif(id > 1, false)"})
        flag = bound_output(table.snapshot, "done")
        found = table.reader(receipts=(), filled_flag=flag, outputs=(flag,)).by_receipt(
            table.fragment(), RowSet.full(4)
        )
        assert (offsets(found.right), found.checked_rows) == ([2, 3], 0)


STATES = st.lists(st.sampled_from([None, *ValueState]), min_size=1, max_size=12)


def validity_of(states: list[ValueState | None]) -> Validity:
    masks = {s: np.array([found is s for found in states]) for s in ValueState}
    rows = {s: RowSet.from_mask(mask) for s, mask in masks.items() if mask.any()}
    return Validity(len(states), Reason.PARTIAL, rows, checked_rows=3)


@given(STATES)
def test_validity_survives_the_way_back_from_a_worker(states: list[ValueState | None]) -> None:
    found = validity_of(states)
    assert Validity.from_text(found.to_text()) == found


@given(STATES, st.integers(0, 11))
def test_rows_whose_inputs_changed_are_not_right(states: list[ValueState | None], row: int) -> None:
    row %= len(states)
    found = validity_of(states).without(RowSet.from_offsets(len(states), np.array([row])))
    assert row not in offsets(found.right.union(found.failed))
    assert found.undecided == validity_of(states).undecided
    assert found.reason is Reason.INPUT_CHANGED


@given(STATES)
def test_a_check_decides_the_undecided_rows(states: list[ValueState | None]) -> None:
    found = validity_of(states)
    checked = Validity(
        found.size, Reason.UP_TO_DATE, {ValueState.RIGHT: found.undecided}, checked_rows=2
    )
    joined = found.joined(checked)
    assert joined.right == found.right.union(found.undecided)
    assert not joined.undecided
    assert (joined.reason, joined.checked_rows) == (Reason.PARTIAL, 5)

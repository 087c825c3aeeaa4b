"""What a view will be when its rows have come and gone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from geneva.execution.refresh.forecast import forecast
from geneva.execution.refresh.rows import Membership
from geneva.model.rows import RowSet
from geneva.model.tables import TableRef
from geneva.storage.lance.dataset import FieldsNow, FragmentFacts, TableSnapshot

NONE = np.zeros(0, np.uint64)


def _ids(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(ids, np.uint64)


def _snapshot(*fragments: FragmentFacts) -> TableSnapshot:
    return TableSnapshot(
        TableRef("v", "v.lance"), 7, pa.schema([]), fragments, {}, FieldsNow({}, {}, 7, None)
    )


def _fragment(fragment_id: int, rows: int, deleted: int = 0) -> FragmentFacts:
    deletions = "3-1" if deleted else ""
    return FragmentFacts(fragment_id, rows, deleted, files=(), deletions=deletions)


def _rows(size: int, *offsets: int) -> RowSet:
    return RowSet.from_offsets(size, np.array(offsets, np.int64))


def test_a_view_whose_rows_stay_is_what_it_is() -> None:
    snapshot = _snapshot(_fragment(0, 3))
    assert forecast(snapshot, Membership(NONE, NONE), None) is snapshot


def test_rows_leave_fragments_and_empty_ones_go() -> None:
    snapshot = _snapshot(_fragment(0, 3), _fragment(1, 4, deleted=1), _fragment(2, 2, deleted=1))
    places = {1: _rows(4, 0, 2), 2: _rows(2, 1)}
    later = forecast(snapshot, Membership(NONE, _ids(5, 6, 7), places), None)
    assert [f.id for f in later.fragments] == [0, 1]
    untouched, left = later.fragments
    assert untouched is snapshot.fragments[0]
    assert (left.live_rows, left.leaving) == (1, places[1])
    assert left.deletions not in ("", "3-1")


def test_rows_enter_in_fragments_of_their_own() -> None:
    snapshot = _snapshot(_fragment(4, 3))
    later = forecast(snapshot, Membership(_ids(9, 8, 7, 6, 5), NONE), 2)
    old, *new = later.fragments
    assert old is snapshot.fragments[0]
    assert [f.physical_rows for f in new] == [2, 2, 1]
    assert len({f.id for f in later.fragments}) == 4
    ids = [f.source_ids.tolist() for f in new if f.source_ids is not None]
    assert ids == [[9, 8], [7, 6], [5]]

"""The codec of row addresses, there and back."""

from __future__ import annotations

from itertools import pairwise

import lance
import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from geneva.model.addresses import (
    fragments_of,
    offset_of,
    offsets_of,
    row_address,
    row_addresses,
    split_by_fragment,
)

UINT32 = st.integers(0, 2**32 - 1)


@given(UINT32, UINT32)
def test_an_address_gives_its_parts_back(fragment_id: int, offset: int) -> None:
    address = row_address(fragment_id, offset)
    array = np.array([address], dtype=np.uint64)

    assert 0 <= address < 2**64
    assert offset_of(address) == offset
    assert (fragments_of(array).tolist(), offsets_of(array).tolist()) == ([fragment_id], [offset])


@given(UINT32, st.lists(UINT32, max_size=20))
def test_addresses_of_one_fragment_are_those_of_its_rows(fragment: int, offsets: list[int]) -> None:
    addresses = row_addresses(fragment, np.array(offsets, dtype=np.int64))

    assert addresses.tolist() == [row_address(fragment, offset) for offset in offsets]


@given(st.lists(st.tuples(st.integers(0, 3), UINT32), max_size=20))
def test_runs_of_a_fragment_are_all_rows_in_order(rows: list[tuple[int, int]]) -> None:
    addresses = np.array([row_address(*row) for row in rows], dtype=np.uint64)
    runs = [(fragment, offsets.tolist()) for fragment, offsets in split_by_fragment(addresses)]

    assert [(fragment, offset) for fragment, offsets in runs for offset in offsets] == rows
    assert all(a[0] != b[0] for a, b in pairwise(runs))


def test_lance_spells_addresses_the_same_way(tmp_path: object) -> None:
    table = pa.table({"x": range(7)})
    dataset = lance.write_dataset(table, f"{tmp_path}/t.lance", max_rows_per_file=3)
    found = dataset.scanner(columns=[], with_row_address=True).to_table()["_rowaddr"].to_numpy()

    expected = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert found.tolist() == [row_address(*row) for row in expected]

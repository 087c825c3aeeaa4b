"""Some rows of what is in memory, also of what Arrow takes wrongly."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import udf
from geneva.storage.checkpoints.store import checksum
from geneva.udf.picking import filtered, picked, without_nulls
from support import column, make_table

if TYPE_CHECKING:
    from geneva import Connection

MATRIX = pa.list_(pa.list_(pa.float32(), 2), 3)
ROWS = 40


def matrices(ids: Any) -> np.ndarray[Any, Any]:
    return (np.asarray(ids)[:, None] * 10 + np.arange(6)).astype(np.float32).reshape(-1, 3, 2)


def lists(numbers: pa.Array, *sizes: int) -> pa.Array:
    return functools.reduce(pa.FixedSizeListArray.from_arrays, sizes, numbers)


FLAT = pa.array(np.arange(60, dtype=np.int16))
KINDS = [
    FLAT,
    lists(FLAT, 3),
    lists(FLAT, 3, 2),
    lists(FLAT.slice(6), 3, 2),
    pa.FixedSizeListArray.from_arrays(lists(FLAT, 3).slice(4), 2),
    lists(FLAT, 3, 2, 2),
    lists(FLAT.cast(pa.string()), 3, 2),
    pa.StructArray.from_arrays([lists(FLAT, 3, 2)], ["a"]),
    pa.StructArray.from_arrays([lists(FLAT, 3, 2)], ["a"], mask=pa.array([True, False] * 5)),
    pa.concat_arrays([lists(FLAT, 3, 2), pa.nulls(3, lists(FLAT, 3, 2).type)]),
    pa.ListArray.from_arrays([0, 2, 4, 8, 10], lists(FLAT, 3, 2)),
    pa.array(["a", "b", "a", "c", "b"]).dictionary_encode(),
]


@pytest.mark.parametrize("array", KINDS, ids=lambda array: str(array.type))
def test_slices(array: pa.Array) -> None:
    for start in range(4):
        some = array.slice(start, len(array) - start - (start % 2))
        places, expected = np.arange(len(some))[::-1], some.to_pylist()
        assert without_nulls(some).to_pylist() == [v for v in expected if v is not None]
        mask = places % 3 == 0
        batch = pa.record_batch({"v": some, "i": places})
        for rows in (some, pa.chunked_array([some])):
            assert picked(rows, places).to_pylist() == expected[::-1]
            assert picked(rows, places[:0]).to_pylist() == []
            kept = [value for value, keep in zip(expected, mask, strict=True) if keep]
            assert filtered(rows, mask).to_pylist() == kept
        for table in (batch, pa.Table.from_batches([batch])):
            assert picked(table, places)["v"].to_pylist() == expected[::-1]
            assert picked(table, places).schema == table.schema


@pytest.mark.parametrize("array", KINDS, ids=lambda array: str(array.type))
def test_a_slice_of_a_checkpoint_has_the_checksum_of_its_values(array: pa.Array) -> None:
    some = array.slice(2, 3)
    alone = pa.concat_arrays([some, some[:0]])
    assert checksum(pa.record_batch({"v": some})) == checksum(pa.record_batch({"v": alone}))


def test_rows_that_are_not_computed_keep_their_matrices(local_db: Connection) -> None:
    @udf(data_type=MATRIX)
    def matrix(id: pa.Array) -> np.ndarray[Any, Any]:
        return matrices(id)

    table = make_table(local_db, [ROWS])
    table.add_columns({"m": matrix})
    table.backfill("m")
    table.backfill("m", where="id = 3 or id = 10")
    assert column(table, "m") == matrices(range(ROWS)).tolist()


def test_a_function_that_shares_calls_gets_the_matrices_of_its_rows(local_db: Connection) -> None:
    @udf(data_type=pa.float32(), memoize=True)
    def first(m: pa.Array) -> list[float]:
        return [value[0][0] for value in m.to_pylist()]

    ids = pa.array(range(ROWS), pa.int64())
    given = lists(pa.array(matrices(ids).reshape(-1)), 2, 3)
    table = make_table(local_db, [pa.table({"id": ids, "m": given})])
    table.add_columns({"x": first})
    table.backfill("x")
    assert column(table, "x") == [10.0 * i for i in range(ROWS)]


def test_matrices_are_known_of_rows_with_equal_inputs(local_db: Connection) -> None:
    @udf(data_type=MATRIX, memoize=True, batch_size=4)
    def matrix(n: pa.Array) -> np.ndarray[Any, Any]:
        return matrices(n)

    numbers = [*range(8), 5]
    table = make_table(local_db, [pa.table({"id": range(9), "n": numbers})])
    table.add_columns({"m": matrix})
    table.backfill("m")
    assert column(table, "m") == matrices(numbers).tolist()

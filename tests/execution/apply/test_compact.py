"""What a function of arrays gets: arrays that begin and end with their buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva.execution.apply.batch import Applier
from geneva.execution.apply.compact import compact, compact_batch, is_compact
from geneva.model.rows import RowRange
from geneva.storage.lance.fragments import read_windows
from geneva.udf.declare import udf

ROWS = 1_000
_NUMBERS = pa.array(range(4 * ROWS))
KINDS: dict[str, pa.Array] = {
    "int": pa.array([None if i % 7 == 0 else i for i in range(ROWS)]),
    "bool": pa.array([i % 3 == 0 for i in range(ROWS)]),
    "half": pa.array(np.arange(ROWS, dtype=np.float16)),
    "decimal": pa.array(list(range(ROWS)), pa.decimal128(10)),
    "string": pa.array([str(i) for i in range(ROWS)]),
    "large_binary": pa.array([b"x" * (i % 9) for i in range(ROWS)], pa.large_binary()),
    "fixed_binary": pa.array([b"ab"] * ROWS, pa.binary(2)),
    "list": pa.array([None if i % 3 == 0 else [i, None] for i in range(ROWS)]),
    "large_list": pa.array([[str(i)] * (i % 5) for i in range(ROWS)], pa.large_list(pa.string())),
    "vector": pa.FixedSizeListArray.from_arrays(_NUMBERS, 4),
    "vector_of_bools": pa.FixedSizeListArray.from_arrays(pa.array([True, False] * 2 * ROWS), 4),
    "struct": pa.array([{"a": i, "b": [str(i)], "c": {"d": i % 2 == 0}} for i in range(ROWS)]),
    "map": pa.array([[("k", i)] for i in range(ROWS)], pa.map_(pa.string(), pa.int64())),
    "dictionary": pa.array([str(i % 5) for i in range(ROWS)]).dictionary_encode(),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), [2, 2]), pa.FixedSizeListArray.from_arrays(_NUMBERS, 4)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "part", [slice(3, 17), slice(0, 64), slice(900, 1_000), slice(8, 72), slice(0, 990)]
)
def test_a_slice_is_copied_and_a_whole_array_is_not(kind: str, part: slice) -> None:
    array = KINDS[kind]
    assert compact(array) is array
    cut = array[part]
    assert not is_compact(cut)
    copied = compact(cut)
    assert is_compact(copied)
    assert copied.type == array.type
    assert copied.equals(cut)
    assert copied.offset == 0


@pytest.mark.parametrize("kind", ["list", "struct"])
def test_so_is_what_is_whole_and_has_slices_below_it(kind: str) -> None:
    if kind == "list":
        below = pa.array(range(10))
        array = pa.ListArray.from_arrays(pa.array([2, 5, 9], pa.int32()), below)
    else:
        array = pa.StructArray.from_arrays(
            [pa.array(range(10))[4:], pa.array(range(6))], ["a", "b"]
        )
    assert array.offset == 0
    assert not is_compact(array)
    copied = compact(array)
    assert copied.equals(array)
    assert is_compact(copied)


def test_values_and_buffers_mean_what_people_think() -> None:
    seen: list[Any] = []

    def norms(v: pa.Array) -> pa.Array:
        rows = np.asarray(v.values).reshape(len(v), 4)
        seen.append(np.frombuffer(v.values.buffers()[1], np.int64).tolist())
        return pa.array(rows.sum(axis=1))

    whole = pa.record_batch({"v": KINDS["vector"]})
    declared = udf(norms, data_type=pa.int64())
    for threads in (1, 3):
        with Applier(declared, pa.field("y", pa.int64()), threads) as applier:
            sums = applier.apply(whole.slice(10, 6))
        assert sums.to_pylist() == [sum(range(4 * i, 4 * i + 4)) for i in range(10, 16)]
    assert seen[0] == list(range(40, 64))


def test_a_function_of_a_record_batch_gets_the_same() -> None:
    def first(batch: pa.RecordBatch) -> pa.Array:
        assert is_compact(batch.column(0))
        return pa.array(np.frombuffer(batch.column(0).buffers()[1], np.int64))

    declared = udf(first, data_type=pa.int64(), input_columns=["x"])
    whole = pa.record_batch({"x": pa.array(range(200))})
    with Applier(declared, pa.field("y", pa.int64())) as applier:
        for start, rows in ((150, 5), (0, 199)):
            found = applier.apply(whole.slice(start, rows)).to_pylist()
            assert found == list(range(start, start + rows))


@pytest.mark.parametrize("start", [0, 1, 3, 4_000])
def test_what_lance_hands_out_is_safe_for_arrow_kernels(tmp_path: Path, start: int) -> None:
    texts = [f"row {i}" for i in range(5_000)]
    table = pa.table({"text": texts, "list": [[i] for i in range(5_000)]})
    dataset = lance.write_dataset(table, str(tmp_path / "t.lance"))
    for at, window in read_windows(
        dataset, 0, ["text", "list"], RowRange(start, start + 900), batch_rows=64
    ):
        batch = compact_batch(window)
        upper = pc.ascii_upper(batch.column(0))
        upper.validate(full=True)
        rows = range(at, at + batch.num_rows)
        assert upper.to_pylist() == [texts[i].upper() for i in rows]
        assert batch.column(1).values.to_pylist() == [*rows]

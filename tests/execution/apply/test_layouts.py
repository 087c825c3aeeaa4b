"""Numbers, and lists of them, that are taken as they lie in memory: never others than they are."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from geneva.execution.apply.layouts import Layout, as_array
from geneva.execution.apply.output import own_values

NUMBERS = [
    *(pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64()),
    *(pa.uint64(), pa.float16(), pa.float32(), pa.float64()),
]


def drawn(draw: random.Random) -> pa.Array:
    """Lists of lists of numbers: slices of slices, with and without NULLs at any depth."""
    kind, widths = draw.choice(NUMBERS), [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
    rows, before = draw.randint(1, 8), draw.choice([0, 0, 1, 5])
    count = rows * int(np.prod(widths))
    base = np.arange(before + count + 2).astype(kind.to_pandas_dtype())
    mask = np.array([draw.random() < 0.2 for _ in base]) if draw.random() < 0.2 else None
    array = pa.array(base, type=kind, mask=mask)[before : before + count]
    for width in widths:
        if draw.random() < 0.3 and len(array) > width:
            array = array[width:]
        array = array[: len(array) // width * width]
        array = pa.FixedSizeListArray.from_arrays(array, width)
        if draw.random() < 0.2:
            nulls = pa.array([draw.random() < 0.3 for _ in range(len(array))], pa.bool_())
            array = pa.FixedSizeListArray.from_arrays(array.values, width, mask=nulls)
    first = draw.randint(0, len(array))
    return array[first : draw.randint(first, len(array))]


@pytest.mark.parametrize("seed", range(8))
def test_arrays_of_arrow(seed: int) -> None:
    draw = random.Random(seed)
    taken = 0
    for _ in range(200):
        array = drawn(draw)
        layout = Layout.of(array.type)
        assert layout is not None
        packed = layout.of_arrow(array)
        if packed is not None:
            taken += 1
            found = packed.array()
            assert packed.nbytes == found.nbytes
            found.validate(full=True)
            assert (found.type, found.to_pylist()) == (array.type, array.to_pylist())
        values = own_values(array, array.type, layout, len(array), stays=False)
        assert values is not None
        own = as_array(values)
        assert (own.type, own.to_pylist()) == (array.type, array.to_pylist())
    assert taken > 50


@pytest.mark.parametrize(
    "numbers",
    [
        np.arange(3, dtype=">i4"),
        np.arange(6, dtype="i4")[::2],
        np.arange(3, dtype="u4"),
        np.arange(3, dtype="i4").reshape(3, 1),
        np.frombuffer(b"x" + np.arange(3, dtype="i4").tobytes(), dtype="i4", offset=1),
        np.broadcast_to(np.int32(4), 3),
        np.arange(4, dtype="i4"),
        np.array(3, dtype="i4"),
    ],
)
def test_arrays_of_numpy_that_lie_otherwise(numbers: np.ndarray) -> None:  # type: ignore[type-arg]
    layout = Layout.of(pa.int32())
    assert layout is not None
    assert layout.of_numpy(numbers, 3) is None


@pytest.mark.parametrize("kind", NUMBERS)
def test_arrays_of_numpy(kind: pa.DataType) -> None:
    vector = pa.list_(pa.field("x", kind, metadata={"a": "b"}), 2)
    layout, numbers = Layout.of(vector), np.arange(6).astype(kind.to_pandas_dtype()).reshape(3, 2)
    assert layout is not None
    for may_keep in (False, True):
        packed = layout.of_numpy(numbers, 3, may_keep=may_keep)
        assert packed is not None
        found = packed.array()
        assert found.type.equals(vector, check_metadata=True)
        assert found.to_pylist() == numbers.tolist()
        shares = found.values.buffers()[1].address == numbers.__array_interface__["data"][0]
        assert shares is may_keep


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.bool_(), pa.decimal128(5), pa.timestamp("s"), pa.date32(), pa.string()),
        *(pa.list_(pa.int8()), pa.list_(pa.int8(), 0), pa.list_(pa.list_(pa.int8(), 0), 2)),
        *(pa.list_(pa.bool_(), 2), pa.dictionary(pa.int8(), pa.string()), pa.null()),
    ],
)
def test_types_without_a_layout(kind: pa.DataType) -> None:
    assert Layout.of(kind) is None

"""Digests of values: equal for equal values whatever their layout, and different otherwise."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.model.digests import digest_rows, digest_values

SEED = 42


def digests(array: pa.Array) -> list[int]:
    return [int(digest) for digest in digest_rows([array], SEED, len(array))]


PAIR = pa.struct([("a", pa.int64()), ("b", pa.string())])
ARRAYS: dict[str, pa.Array] = {
    "int": pa.array([0, 1, -1, 2**62, None], pa.int64()),
    "large unsigned": pa.array([2**63, 2**64 - 1], pa.uint64()),
    "bool": pa.array([True, False, None]),
    "float": pa.array([0.0, -0.0, 1.5, float("nan"), float("inf"), None]),
    "string": pa.array(["", "a", "8 bytes.", "nine byte", "ü" * 40, None]),
    "binary": pa.array([b"", b"\x00", b"\x00\x00", None], pa.binary()),
    "list": pa.array([[], [1], [1, None], [None, 1], None], pa.list_(pa.int64())),
    "nested list": pa.array([[["a"], []], [[], ["a"]], []], pa.list_(pa.list_(pa.string()))),
    "struct": pa.array([{"a": 1, "b": "x"}, {"a": None, "b": None}, None], PAIR),
    "map": pa.array([[("k", 1)], [("k", None)], [], None], pa.map_(pa.string(), pa.int64())),
    "timestamp": pa.array([0, 1, None], pa.timestamp("us")),
    "date": pa.array([datetime.date(2026, 11, 15), None]),
    "duration": pa.array([datetime.timedelta(1)], pa.duration("ms")),
    "decimal": pa.array(
        [decimal.Decimal("1.50"), decimal.Decimal("-1.50"), None], pa.decimal128(9, 2)
    ),
    "null": pa.nulls(1),
}

GOLDEN: dict[str, list[int]] = {
    "binary": [8021315561182548066, 17918035155587841064, 17511609790540493894, 783318130591384242],
    "bool": [4475410747930635557, 3653965947888625478, 783318130591384242],
    "date": [1173338390209186493, 783318130591384242],
    "decimal": [1994067291751506864, 2492748118395710, 783318130591384242],
    "duration": [913582397724031210],
    "float": [
        7727469856209800454,
        4110538513341941917,
        10768947288588960870,
        5777386763692947078,
        8246374936119843172,
        783318130591384242,
    ],
    "int": [
        15517848566945014503,
        3280611992539417103,
        14742360405418029143,
        5704282886600008384,
        783318130591384242,
    ],
    "large unsigned": [2312681724876780468, 12445951314243626148],
    "list": [
        9385728996202394464,
        288335447742952575,
        12335033166877104843,
        4055929507663532185,
        783318130591384242,
    ],
    "map": [16129161446934954595, 14261730427190704910, 8408530737656801416, 783318130591384242],
    "nested list": [990426818347285531, 9031564957358141249, 9385728996202394464],
    "null": [783318130591384242],
    "string": [
        11957917539514315455,
        4451202000839637070,
        15208282845736736170,
        14698035768993461615,
        2354585238446040071,
        783318130591384242,
    ],
    "struct": [995627369837964189, 15340505068477608223, 783318130591384242],
    "timestamp": [7413223009074448780, 13393885293260660111, 783318130591384242],
}
"""On disk in every table that has receipts: a change here makes all computed values stale."""


@pytest.mark.parametrize("name", ARRAYS)
def test_digests_are_what_they_were_in_earlier_releases(name: str) -> None:
    assert digests(ARRAYS[name]) == GOLDEN[name]


def test_digests_of_rows_short_digests_and_long_values_are_what_they_were() -> None:
    one, two = pa.array([1]), pa.array([2])
    assert digest_values([pa.array([1, 2, None])], 3).tolist() == [46918, 46706, 45465]
    assert digest_rows([one, two], SEED, 1).tolist() == [1722510620399876834]
    assert digest_rows([two, one], SEED, 1).tolist() == [15114861998401474767]
    assert digest_rows([], SEED, 1).tolist() == [9297814886316923340]
    assert digests(pa.array([b"x" * (3 * 524288 + 5)])) == [1078812158105016041]
    assert digests(pa.array([list(range(70_000))])) == [10553368628855384432]


@pytest.mark.parametrize("name", ARRAYS)
def test_different_values_have_different_digests(name: str) -> None:
    values = digests(ARRAYS[name])
    assert len(set(values)) == len(values)


def test_the_seed_counts() -> None:
    array = pa.array([1, 2, 3])
    assert not set(digests(array)) & set(digest_rows([array], SEED + 1, 3).tolist())


SAME: dict[str, tuple[pa.Array, pa.Array]] = {
    "integer widths": (pa.array([1, -2, None], pa.int8()), pa.array([1, -2, None], pa.int64())),
    "unsigned": (pa.array([1, 200], pa.uint8()), pa.array([1, 200], pa.int32())),
    "float widths": (pa.array([1.5, None], pa.float32()), pa.array([1.5, None], pa.float64())),
    "half floats": (pa.array([1.5], pa.float16()), pa.array([1.5], pa.float64())),
    "NaNs": (
        pa.array(np.array([0x7FF8000000000001], np.uint64).view(np.float64)),
        pa.array([float("nan")]),
    ),
    "string widths": (pa.array(["a", None]), pa.array(["a", None], pa.large_string())),
    "string views": (pa.array(["a" * 20, None]), pa.array(["a" * 20, None], pa.string_view())),
    "binary widths": (pa.array([b"abc"], pa.binary(3)), pa.array([b"abc"], pa.large_binary())),
    "dictionaries": (
        pa.array(["a", "b", None, "a"]).dictionary_encode(),
        pa.array(["a", "b", None, "a"]),
    ),
    "a dictionary with NULL in it": (
        pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array(["a", None])),
        pa.array(["a", None, None]),
    ),
    "list widths": (
        pa.array([[1], None, []], pa.list_(pa.int64())),
        pa.array([[1], None, []], pa.large_list(pa.int32())),
    ),
    "fixed-size lists": (
        pa.array([[1.0, None], None], pa.list_(pa.float32(), 2)),
        pa.array([[1.0, None], None], pa.list_(pa.float64())),
    ),
    "list views": (
        pa.array([[1], None, [2, 3]], pa.list_view(pa.int64())),
        pa.array([[1], None, [2, 3]], pa.list_(pa.int64())),
    ),
    "decimal widths": (
        pa.array([decimal.Decimal("-1.50")], pa.decimal128(9, 2)),
        pa.array([decimal.Decimal("-1.50")], pa.decimal256(40, 2)),
    ),
    "run ends": (
        pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["a", None])),
        pa.array(["a", "a", None]),
    ),
    "extension types": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"], pa.binary(16))),
        pa.array([b"0123456789abcdef"]),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_layout_of_a_value_does_not_count(name: str) -> None:
    left, right = SAME[name]
    assert digests(left) == digests(right)
    assert digests(left.slice(1)) == digests(right)[1:]


DIFFERENT: dict[str, tuple[pa.Array, pa.Array]] = {
    "an integer is no float": (pa.array([1]), pa.array([1.0])),
    "a string is no bytes": (pa.array(["a"]), pa.array([b"a"])),
    "units of time": (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("ms"))),
    "time zones": (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("us", "UTC"))),
    "names of fields": (pa.array([{"a": 1}]), pa.array([{"b": 1}])),
    "a negative number and a large one": (pa.array([-1]), pa.array([2**64 - 1], pa.uint64())),
    "an empty list and NULL": (
        pa.array([[]], pa.list_(pa.int64())),
        pa.array([None], pa.list_(pa.int64())),
    ),
    "scales": (
        pa.array([decimal.Decimal("1.5")], pa.decimal128(9, 1)),
        pa.array([decimal.Decimal("1.50")], pa.decimal128(9, 2)),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_a_function_can_tell_apart_counts(name: str) -> None:
    left, right = DIFFERENT[name]
    assert digests(left) != digests(right)


def _types() -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    whole = st.integers(-(2**63), 2**63 - 1)
    base = st.sampled_from(
        [
            (pa.int64(), whole),
            (pa.float64(), st.floats(width=64)),
            (pa.bool_(), st.booleans()),
            (pa.string(), st.text(max_size=30)),
            (pa.binary(), st.binary(max_size=30)),
        ]
    )

    def nested(inner: Any) -> Any:
        return st.one_of(
            inner.map(lambda t: (pa.list_(t[0]), st.lists(st.none() | t[1], max_size=4))),
            inner.map(
                lambda t: (
                    pa.list_(t[0], 2),
                    st.lists(st.none() | t[1], min_size=2, max_size=2),
                )
            ),
            st.tuples(inner, inner).map(
                lambda ts: (
                    pa.struct([("a", ts[0][0]), ("b", ts[1][0])]),
                    st.fixed_dictionaries({"a": st.none() | ts[0][1], "b": st.none() | ts[1][1]}),
                )
            ),
        )

    return st.recursive(base, nested, max_leaves=3)


@st.composite
def arrays(draw: st.DrawFn) -> pa.Array:
    kind, values = draw(_types())
    return pa.array(draw(st.lists(st.none() | values, min_size=1, max_size=12)), kind)


@given(arrays(), st.data())
def test_slices_copies_and_joins_have_the_digests_of_their_rows(
    array: pa.Array, data: st.DataObject
) -> None:
    whole = digests(array)
    start = data.draw(st.integers(0, len(array)))
    length = data.draw(st.integers(0, len(array) - start))
    part = array.slice(start, length)
    assert digests(part) == whole[start : start + length]
    order = data.draw(st.permutations(range(len(array))))
    assert digests(array.take(pa.array(order))) == [whole[i] for i in order]
    assert digests(pa.concat_arrays([part, array])) == digests(part) + whole
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("x", array.type)])) as writer:
        writer.write_batch(pa.record_batch([part], names=["x"]))
    read = pa.ipc.open_stream(sink.getvalue()).read_all().column("x").combine_chunks()
    assert digests(read) == digests(part)


@given(arrays())
def test_equal_digests_mean_equal_values(array: pa.Array) -> None:
    found: dict[int, str] = {}
    for digest, value in zip(digests(array), array.to_pylist(), strict=True):
        assert found.setdefault(digest, repr(value)) == repr(value)
    values = {repr(value) for value in array.to_pylist()}
    assert len(found) == len(values)


def test_vectors_that_differ_in_few_bits_of_each_item_have_different_digests() -> None:
    rng = np.random.default_rng(0)
    rows, width = 100_000, 64
    signs = rng.choice(np.array([-1, 1], np.float32), (rows, width))
    powers = rng.choice(np.array([0.5, 1, 2, 4], np.float64), (rows, width))
    flags = rng.integers(0, 2, (rows, width)) * 2**56
    for items in (signs, powers, flags):
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(items.ravel()), width)
        found = digest_rows([vectors], SEED, rows) >> np.uint64(17)
        assert len(np.unique(found)) == rows
    texts = pa.array([bytes(row) for row in (flags >> 56).astype(np.uint8) * 128])
    assert len(np.unique(digest_rows([texts], SEED, rows))) == rows


@pytest.mark.slow
def test_many_values_that_are_close_to_each_other_have_different_digests() -> None:
    numbers = np.arange(300_000)
    for array in (
        pa.array(numbers),
        pa.array(numbers.astype(np.float64)),
        pa.array(numbers * 2**40),
        pa.array([f"{i:09d}" for i in numbers]),
        pa.array([f"{'x' * 20}{i}" for i in numbers]),
        pa.FixedSizeListArray.from_arrays(pa.array((numbers % 7).astype(np.float32)), 6),
    ):
        rows = len(array)
        found = digest_rows([array], SEED, rows) >> np.uint64(17)
        assert len(np.unique(found)) == len(set(map(str, array.to_pylist())))


@pytest.mark.parametrize("seed", range(3))
def test_a_text_has_the_same_digest_among_short_and_long_ones(seed: int) -> None:
    """Long ones are digested by themselves, short ones together: where they are is no matter."""
    rng = np.random.default_rng(seed)
    borders = [0, 1, 7, 8, 9, 16_383, 16_384, 16_385, 262_143, 262_144, 262_145, 524_289]
    texts = [rng.bytes(length) for length in (*borders, *rng.integers(0, 40_000, 20))]
    alone = [int(digest_rows([pa.array([text])], 7, 1)[0]) for text in texts]
    for _ in range(5):
        order = rng.permutation(len(texts))
        kind = rng.choice([pa.binary(), pa.large_binary()])
        together = digest_rows([pa.array([texts[i] for i in order], kind)], 7, len(texts))
        assert together.tolist() == [alone[i] for i in order]


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (pa.float16(), np.array([0x7C01, 0x7E00], np.uint16)),
        (pa.float32(), np.array([0x7F800001, 0x7FC00000], np.uint32)),
        (pa.float64(), np.array([0x7FF0000000000001, 0x7FF8000000000000], np.uint64)),
    ],
    ids=str,
)
def test_a_nan_is_a_nan_whatever_its_bits(kind: pa.DataType, bits: np.ndarray[Any, Any]) -> None:
    """Numpy warns of some of them, and a warning may be an error."""
    values = pa.Array.from_buffers(kind, len(bits), [None, pa.py_buffer(bits)])
    digests = digest_rows([values], 1, len(bits))
    assert digests[0] == digests[1] == digest_rows([pa.array([float("nan")])], 1, 1)[0]

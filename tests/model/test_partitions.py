"""Keys of partitions, and sums over their rows."""

from __future__ import annotations

import datetime as dt
import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import arrow_types
from geneva.model import partitions
from geneva.model.partitions import (
    DIGEST,
    KEY,
    Keyed,
    KeyedIds,
    Partitions,
    add_up_rows,
    key_of_texts,
    key_texts,
    key_words,
    keyed_rows,
    row_keys,
)

NAN = float("nan")


def struct_of(values: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([values, pa.nulls(len(values))], names=["value", "none"])


def list_of(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(range(len(values) + 1), values)


def pair_of(values: pa.Array) -> pa.Array:
    every = pa.concat_arrays([values, values]).take([i // 2 for i in range(2 * len(values))])
    return pa.FixedSizeListArray.from_arrays(every, 2)


def map_to(values: pa.Array) -> pa.Array:
    return pa.MapArray.from_arrays(range(len(values) + 1), ["k"] * len(values), values)


def deep(values: pa.Array) -> pa.Array:
    return list_of(struct_of(pair_of(values)))


WRAPPINGS = [struct_of, list_of, pair_of, map_to, deep]


def keys(*columns: pa.Array) -> list[bytes]:
    found: list[bytes] = row_keys(columns, len(columns[0])).to_pylist()
    return found


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a", "b", None, "", "None", "A"]),
        pa.array([1, 2, None, -1, 2**62]),
        pa.array([True, False, None]),
        pa.array([0.5, NAN, None, 0.0, float("inf")]),
        pa.array([b"a", b"", None]),
        pa.array([Decimal("1.5"), Decimal("2.5"), None]),
        pa.array([dt.date(2024, 1, 1), None, dt.date(2024, 1, 2)]),
        pa.array([1, 2, None], pa.timestamp("ns")),
        pa.array([1, 2, None], pa.time64("us")),
        pa.array([{"a": 1}, {"a": None}, None, {"a": 2}]),
        pa.array([[1, 2], [2, 1], [], None]),
        pa.array(["x", "y", None]).dictionary_encode(),
        pa.nulls(1),
    ],
    ids=lambda values: str(values.type),
)
def test_different_values_have_different_keys(values: pa.Array) -> None:
    found = keys(values)
    assert len(set(found)) == len(values)
    assert keys(pa.concat_arrays([values, values])) == found * 2
    assert keys(values.slice(1)) == found[1:]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([0.0, NAN]), pa.array([-0.0, -NAN])),
        (pa.array([1, None], pa.int8()), pa.array([1, None], pa.uint64())),
        (pa.array(["a", None]), pa.array(["a", None], pa.large_string())),
        (pa.array(["a", None]), pa.array(["a", None]).dictionary_encode()),
        (pa.array([0.5], pa.float32()), pa.array([0.5], pa.float64())),
    ],
)
@pytest.mark.parametrize("wrap", [lambda values: values, *WRAPPINGS])
def test_equal_values_have_one_key(one: pa.Array, other: pa.Array, wrap: Any) -> None:
    assert keys(wrap(one)) == keys(wrap(other))


@pytest.mark.parametrize("wrap", WRAPPINGS)
@pytest.mark.parametrize("kind", [name for name in arrow_types.columns() if name != "nothing"])
def test_inside_of_others_values_are_told_apart_as_well(kind: str, wrap: Any) -> None:
    values = wrap(arrow_types.columns()[kind])
    found = keys(values)
    assert len(set(found)) == len(values)
    assert keys(values.slice(1)) == found[1:]


def test_several_columns() -> None:
    first, second = pa.array(["a", "a", "b", None, "ab"]), pa.array(["b", None, "a", "a", ""])
    assert len(set(keys(first, second))) == 5
    assert keys(first, second) != keys(second, first)
    assert keys(first, second) == keys(first, second)


def test_the_keys_are_those_of_earlier_releases() -> None:
    """They are on disk: other ones would compute everything again."""
    shown = [key.hex() for key in keys(pa.array(["ann", None]))]
    assert shown == ["d726af08bdc026c6e72c38adc6256a6b", "9781e576fbd9086ba1e97c87f1bd1575"]
    batch = pa.record_batch({"k": ["ann"], "v": [1]})
    made = keyed_rows(batch, Keyed(keys=("k",), values=("k", "v")))
    assert made.schema.names == [KEY, DIGEST]
    assert made.column(DIGEST).to_pylist() == [12313632113369449309]


def test_texts_of_keys() -> None:
    found = row_keys([pa.array(range(10))], 10)
    high, low = key_words(found)
    texts = key_texts(high, low)
    assert texts.to_pylist() == [key.hex() for key in found.to_pylist()]
    for some in (texts, texts.slice(3, 4), pa.chunked_array([texts.slice(0, 2), texts.slice(5)])):
        words = key_of_texts(some)
        assert key_texts(*words).to_pylist() == some.to_pylist()


def test_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "_MAX_PARTIAL", 7)
    rng = np.random.default_rng(1)
    high, low, digests, ids = (
        rng.integers(0, top, 1_000).astype(np.uint64) for top in (3, 4, 2**63, 2**40)
    )
    cuts = [0, 1, 10, 10, 500, 1_000]
    parts = (slice(a, b) for a, b in itertools.pairwise(cuts))
    total = add_up_rows(KeyedIds(ids[p], high[p], low[p], digests[p]) for p in parts)
    expected: dict[tuple[int, int], tuple[int, int]] = {}
    for first, second, digest in zip(high.tolist(), low.tolist(), digests.tolist(), strict=True):
        total_so_far, rows = expected.get((first, second), (0, 0))
        expected[first, second] = ((total_so_far + digest) % 2**64, rows + 1)
    names = zip(total.high.tolist(), total.low.tolist(), strict=True)
    sums = zip(total.digests.tolist(), total.counts.tolist(), strict=True)
    found: Any = dict(zip(names, sums, strict=True))
    assert found == expected
    assert list(found) == sorted(expected)
    assert not total.that_moved(total).any()
    assert [b - a for a, b in total.runs(1)] == [1] * len(total)
    assert list(total.runs(10_000)) == [(0, len(total))]
    fewer = total.only(np.arange(len(total)) % 2 == 0)
    assert total.that_changed(fewer).tolist() == [i % 2 == 1 for i in range(len(total))]
    assert total.that_lack(fewer).sum() == len(total) - len(fewer)
    assert Partitions.empty().that_lack(total).tolist() == []
    assert total.that_changed(Partitions.empty()).all()

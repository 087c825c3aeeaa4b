"""Receipts: what they say of the value beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from geneva.model.digests import digest_rows
from geneva.storage.columns.receipts import (
    RECEIPT_TYPE,
    concat_receipts,
    input_part,
    is_adopted,
    is_failed,
    is_result,
    read_receipts,
    receipt_bits,
    receipts_for,
)

SEED = 7
INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.none(), min_size=1, max_size=20)


def make_receipts(
    inputs: list[pa.Array], outputs: list[pa.Array], seed: int, rows: int, **what: Any
) -> pa.Array:
    return receipts_for(digest_rows(inputs, seed, rows), outputs, **what)


def column(values: list[int | None]) -> pa.Array:
    return pa.array(values, pa.int64())


@given(INTEGERS)
def test_a_receipt_keeps_the_digest_of_its_inputs(values: list[int | None]) -> None:
    inputs = [column(values)]
    receipts = make_receipts(inputs, inputs, SEED, len(values))
    digests = digest_rows(inputs, SEED, len(values))
    assert np.array_equal(input_part(receipt_bits(receipts)), input_part(digests))
    assert is_result(receipts).all()
    assert not is_failed(receipts).any()


@given(INTEGERS)
def test_a_value_is_intact_until_somebody_writes_another(values: list[int | None]) -> None:
    outputs = [column(values)]
    receipts = make_receipts(outputs, outputs, SEED, len(values))
    assert read_receipts(receipts, outputs).intact.all()
    others = [column([None if v is not None else 1 for v in values])]
    found = read_receipts(receipts, others)
    assert not found.intact.any()
    is_null = np.array([v is not None for v in values], dtype=bool)
    assert (found.emptied == is_null).all(), "NULL in place of a value is no value"
    assert (found.supplied == ~is_null).all()


def test_a_failure_has_no_value_until_a_person_writes_one() -> None:
    inputs, outputs = [column([1, 2])], [column([None, 5])]
    receipts = make_receipts(inputs, outputs, SEED, 2, failed=[0])
    assert is_failed(receipts).tolist() == [True, False]
    found = read_receipts(receipts, outputs)
    assert (found.failed.tolist(), found.intact.tolist()) == ([True, False], [True, True])
    corrected = read_receipts(receipts, [column([9, 5])])
    assert (corrected.failed.tolist(), corrected.supplied.tolist()) == ([False] * 2, [True, False])


def test_adopted_values_are_no_results_of_the_function() -> None:
    values = [column([1])]
    adopted = make_receipts(values, values, SEED, 1, adopted=True)
    assert is_adopted(adopted).all()
    assert not is_result(adopted).any()
    assert read_receipts(adopted, values).intact.all()


def test_a_value_without_a_receipt_is_supplied() -> None:
    found = read_receipts(pa.nulls(2, RECEIPT_TYPE), [column([1, None])])
    assert found.supplied.tolist() == [True, False]
    assert not found.present.any()


def test_a_struct_of_nulls_is_no_value_in_the_oldest_format() -> None:
    structs = pa.array([{"a": None}, {"a": 1}], pa.struct([("a", pa.int64())]))
    nothing = pa.nulls(2, RECEIPT_TYPE)
    assert read_receipts(nothing, [structs]).has_value.tolist() == [True, True]
    found = read_receipts(nothing, [structs], null_structs=False)
    assert found.has_value.tolist() == [False, True]


@given(INTEGERS, st.integers(0, 20))
def test_parts_are_put_together_again(values: list[int | None], cut: int) -> None:
    outputs = column(values)
    receipts = make_receipts([outputs], [outputs], SEED, len(values))
    whole = read_receipts(receipts, [outputs])
    parts = [(receipts[:cut], outputs[:cut]), (receipts[cut:], outputs[cut:])]
    joined = concat_receipts([read_receipts(r, [o]) for r, o in parts])
    for name in ("present", "has_value", "intact", "failed", "bits"):
        assert np.array_equal(getattr(whole, name), getattr(joined, name))
    assert len(concat_receipts([]).bits) == 0


def test_null_is_never_taken_for_the_value() -> None:
    """Of the 16 bits of a value's digest, those of NULL are no other value's."""
    values = [column(list(range(300_000)))]
    receipts = make_receipts(values, values, SEED, 300_000)
    assert read_receipts(receipts, values).intact.all()
    assert read_receipts(receipts, [column([None] * 300_000)]).emptied.all()

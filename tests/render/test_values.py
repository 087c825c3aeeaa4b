"""Values in a few characters."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from geneva.render.values import MAX_LENGTH, cell_text, constant_text, repr_text, scalar_text


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "cell", "scalar"),
    [
        (None, "NULL", "None"),
        (b"abc", "<3 bytes>", "<3 bytes>"),
        ("a\n b", "a b", r"'a\n b'"),
        (0.1234567891, "0.123457", "0.1234567891"),
        ([1, 2, 3, 4, 5], "[1, 2, 3, 4, ... 5 in all]", "[1, 2, 3, 4, ... 5 items]"),
        ({"a": 1}, "{a: 1}", "{'a': 1}"),
    ],
)
def test_short_values(value: Any, cell: str, scalar: str) -> None:
    assert cell_text(value) == cell
    assert scalar_text(pa.scalar(value)) == scalar


@pytest.mark.parametrize("value", ["x" * 1000, ["x" * 1000] * 9, {"a": "x" * 1000}])
def test_long_values_are_cut(value: Any) -> None:
    for text in (cell_text(value), scalar_text(pa.scalar(value))):
        assert len(text) == MAX_LENGTH
        assert text.endswith("...")
    assert len(repr_text(value, 80)) == 80


def test_a_broken_repr_hides_nothing() -> None:
    assert repr_text(Broken()) == "<Broken>"
    assert constant_text(Broken()) == "Broken object"
    assert constant_text([1, "a"]) == "[1, 'a']"

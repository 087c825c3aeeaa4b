"""The parts that the console's pages are made of."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from geneva.console.cells import cell, vector
from geneva.console.error_pages import group_errors
from geneva.console.live import changes
from geneva.console.plots import throughput
from geneva.console.queries import ErrorRow
from geneva.render.html import Html, tag
from geneva.storage.lance.preview import Binary, picture_type


def test_markup_escapes_what_is_not_markup() -> None:
    assert tag("p", "<b>", Html("<i>"), title='"x"') == '<p title="&quot;x&quot;">&lt;b&gt;<i></p>'
    assert tag("br", class_=None, hidden=False) == "<br>"
    assert tag("p", "\x00\x1b") == r"<p>\x00\x1b</p>"


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.1, float("nan"), "<b>", {"a": ["<b>"]}, Binary(3, None)]
)
def test_any_value_can_be_shown(value: Any) -> None:
    assert "<b>" not in cell(value, pa.null(), "/x")


@pytest.mark.parametrize(
    "values", [[0.0] * 5, [None, float("nan"), float("inf"), 1.0], list(range(2000))]
)
def test_any_vector_can_be_drawn(values: list[Any]) -> None:
    drawn = vector(values)
    assert "nan" not in drawn.lower().replace("null", "")
    assert 0 < drawn.count("<rect") <= 64


def test_pictures_are_told_by_their_bytes() -> None:
    assert picture_type(b"\xff\xd8\xff\xe0") == "image/jpeg"
    assert picture_type(b"<svg onload=alert(1)>") is None
    assert picture_type(b"") is None


def test_a_burst_of_reports_is_no_peak() -> None:
    samples = [{"seconds": s, "udf_rows": r} for s, r in ((1.0, 100), (2.0, 200), (2.0001, 200))]
    assert "100 rows/s" in throughput(samples)
    assert "nothing to plot" in throughput([{"seconds": 0.0}])


def test_only_changes_are_sent() -> None:
    before = {"html": {"a": "1", "b": "2"}, "say": "x", "final": False}
    assert changes(before, {**before, "html": {"a": "1", "b": "3"}}) == {"html": {"b": "3"}}
    assert changes({}, {"final": False}) == {}


def test_errors_that_differ_in_numbers_are_one_group() -> None:
    rows = [ErrorRow("t", "c", "j", "ValueError", f"row {n}: can't do '{n}'") for n in range(3)]
    groups = group_errors([*rows, ErrorRow("t", "c", "j", "ValueError", "other")])
    assert [len(own) for _, own in groups] == [3, 1]

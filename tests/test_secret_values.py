"""Secrets are found in texts however they are written."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.secret_values import Secrets

WRITERS: list[Callable[[str], str]] = [
    str,
    repr,
    ascii,
    json.dumps,
    lambda v: json.dumps(v, ensure_ascii=False),
    lambda v: repr(v.encode()),
    lambda v: urllib.parse.quote(v, safe=""),
    urllib.parse.quote,
    urllib.parse.quote_plus,
    lambda v: repr(f"a ' and a \" {v}"),
    lambda v: v.replace("/", "\\/"),
]
CHARACTERS = st.sampled_from("abk9-_.\n\r\t\\\"' /+=%&{}éß\x07\x7f\xa0\u2028你😀")


@given(
    st.text(CHARACTERS, min_size=4, max_size=12),
    st.lists(st.sampled_from(WRITERS), max_size=3),
)
def test_a_value_is_hidden_however_it_is_written(
    value: str, writers: list[Callable[[str], str]]
) -> None:
    text = value
    for write in writers:
        text = write(text)
    kept = Secrets({"key": value}).redact(f"<<{text}>>")
    assert "***" in kept
    assert not set(kept) & set("k9é你😀")


@pytest.mark.parametrize("text", ["a.b!", "axb!!", "the other = one"])
def test_nothing_else_is_hidden(text: str) -> None:
    assert Secrets({"a": "a.b!!", "b": "another = one"}).redact(text) == text


def test_lines_of_a_value_are_hidden_one_by_one() -> None:
    key = "-----BEGIN KEY-----\n  MIIEvQIBADAN\nABCDEF012345\n-----END KEY-----\n"
    shown = Secrets({"key": key}).redact("  | MIIEvQIBADAN\n  | ABCDEF012345\n  | the end")
    assert shown == "  | ***\n  | ***\n  | the end"

"""Text of strangers: nothing of it acts on a terminal or turns text around."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.errors import GenevaError, JobNotFoundError, UDFExecutionError, UserInputError
from geneva.render.html import tag
from geneva.render.plain import json_text, plain
from geneva.render.text import one_line

ACTING = {
    "\x1b[31m": "\\x1b[31m",
    "\x9b2J": "\\x9b2J",
    "\x1b]0;title\x07": "\\x1b]0;title\\x07",
    "\x7f\x08\r": "\\x7f\\x08\\r",
    "a\nb\tc": "a\\nb\\tc",
    "\u202eexe.txt\u202c": "\\u202eexe.txt\\u202c",
    "\u2066\u2067\u2068\u2069\u200e\u200f\u061c": (
        "\\u2066\\u2067\\u2068\\u2069\\u200e\\u200f\\u061c"
    ),
    "\u2028\u2029\x85": "\\u2028\\u2029\\x85",
    "\ufeff\u200b\xad": "\\ufeff\\u200b\\xad",
    "\ud800": "\\ud800",
    "\U000e0041": "\\U000e0041",
}
HARMLESS = ("", "naïve", "日本語", "👩\u200d🔬", "\u0645\u06cc\u200c\u062e\u0648", "a\xa0b", "שלום")


@pytest.mark.parametrize("text", ACTING)
def test_what_acts_is_written_out(text: str) -> None:
    assert plain(f"<{text}>") == f"<{ACTING[text]}>"


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_harmless_stays(text: str) -> None:
    assert plain(text) == plain(text, lines=True) == text


def test_lines_stay_where_a_text_has_lines() -> None:
    assert plain("a\r\nb\tc\rd\x1b", lines=True) == "a\nb\tc\\rd\\x1b"


@pytest.mark.slow
@given(st.text())
def test_whatever_it_is_can_be_printed_and_read_as_json(text: str) -> None:
    safe = plain(text)
    safe.encode()
    assert plain(safe) == safe
    assert len(safe.splitlines()) <= 1
    shown = json_text({text: [text]})
    shown.encode()
    assert plain(shown, lines=True) == shown
    assert json.loads(shown) == {text: [text]}


def test_errors_markup_and_short_messages_pass_through_it() -> None:
    said = "column 'a\x1b]0;x\x07' of\n\u202etable"
    safe = "column 'a\\x1b]0;x\\x07' of\n\\u202etable"
    for kind in (GenevaError, UserInputError, UDFExecutionError, JobNotFoundError):
        assert str(kind(said)) == safe
    assert one_line(OSError("no \x1b[2J such\nfile")) == "no \\x1b[2J such"
    assert tag("p", said, title=said) == (f'<p title="{safe}">{safe}</p>'.replace("'", "&#x27;"))

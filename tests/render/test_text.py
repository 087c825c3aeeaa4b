"""Numbers, times and names as text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from geneva.render import text

NOW = datetime(2026, 3, 4, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("idd", " Did you mean 'id'?"),
        ("nme", " Did you mean 'Name'?"),
        ("NAME", " Did you mean 'Name'?"),
        ("something else", ""),
        ("", ""),
    ],
)
def test_did_you_mean(name: str, expected: str) -> None:
    assert text.did_you_mean(name, ["id", "Name"]) == expected
    assert text.did_you_mean(name, []) == ""


def test_shorten() -> None:
    assert text.shorten("abcdef", 6) == "abcdef"
    assert text.shorten("abcdefg", 6) == "abc..."
    assert text.shorten("abcdefg", 6, "…") == "abcde…"


def test_numbers() -> None:
    assert [text.count(n, "row") for n in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    verbs = [(n, text.agree(n, verb)) for n in (0, 1, 2) for verb in ("are", "stay")]
    assert verbs == [(0, "are"), (0, "stay"), (1, "is"), (1, "stays"), (2, "are"), (2, "stay")]
    sizes = [text.size(n) for n in (5, 2048, 3 * 2**20, 5 * 2**40)]
    assert sizes == ["5 B", "2.0 KiB", "3.0 MiB", "5,120.0 GiB"]
    durations = [text.seconds(n) for n in (0.02, 2.5, 61, 7260)]
    assert durations == ["20 ms", "2.5 s", "1 min 1 s", "2 h 1 min"]
    assert [text.rate(n) for n in (0.5, 1234)] == ["0.5 rows/s", "1,234 rows/s"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(5, "just now"), (120, "2 min ago"), (7300, "2 h ago"), (3 * 86_400, "01 Mar 2026")],
)
def test_ago(seconds: int, expected: str) -> None:
    assert text.ago(NOW - timedelta(seconds=seconds), NOW) == expected


def test_timestamps_are_in_utc() -> None:
    at = NOW.astimezone(tz=None)
    assert text.timestamp(at) == "2026-03-04 12:00:00 UTC"

"""Numbers, times and names as people read them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from difflib import get_close_matches

from geneva.render.plain import plain


def shown_columns(names: Iterable[str]) -> list[str]:
    """The columns that messages speak of: those that begin with `__` are Geneva's own."""
    return [name for name in names if not name.startswith("__")]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, of the known name that is most like this one; empty if none is."""
    by_lower_case = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), by_lower_case, 1)
    return f" Did you mean {by_lower_case[close[0]]!r}?" if close else ""


def listed(names: Iterable[object]) -> str:
    """Names for a message: `a, b`, or `none`."""
    return ", ".join(map(str, names)) or "none"


def a_type(value: object) -> str:
    """What kind of object a value is: `an int`, `a str`."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def shorten(text: str, limit: int, ellipsis: str = "...") -> str:
    """A text of at most `limit` characters; the end of a longer one is left out."""
    return text if len(text) <= limit else text[: limit - len(ellipsis)] + ellipsis


def count(number: float, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def agree(number: float, verb: str) -> str:
    """A verb for so many of something: `1 row is`, `2 rows are`, `1 row stays`, `2 rows stay`."""
    if number != 1:
        return verb
    return {"are": "is", "were": "was", "have": "has"}.get(verb, f"{verb}s")


def size(number: int) -> str:
    """Bytes, in the unit that fits."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} GiB"


def seconds(amount: float) -> str:
    """A duration, to about two digits."""
    if amount < 1:
        return f"{amount * 1000:,.0f} ms"
    if amount < 60:
        return f"{amount:,.1f} s"
    minutes, rest = divmod(round(amount), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def rate(amount: float) -> str:
    """Rows per second."""
    return f"{amount:,.0f} rows/s" if amount >= 10 else f"{amount:,.1f} rows/s"


def timestamp(at: datetime) -> str:
    """A moment in UTC, to the second."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def ago(at: datetime, now: datetime | None = None) -> str:
    """A moment as its distance from now; after a day, its date."""
    at = at.astimezone(UTC)
    past = ((now or datetime.now(UTC)) - at).total_seconds()
    if past < 60:
        return "just now"
    if past < 3600:
        return f"{past // 60:.0f} min ago"
    if past < 86_400:
        return f"{past // 3600:.0f} h ago"
    return f"{at:%d %b %Y}"


def raise_if_stopping(error: BaseException) -> None:
    """Raise a request to stop again: it is nothing that is wrong with one thing of many."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        raise error


def one_line(error: BaseException) -> str:
    """What is wrong with one thing of many, in a line: it is to hide no other.

    What damaged data makes libraries raise can't be listed, and a panic of Lance's is no Exception.
    Only requests to stop are raised again.
    """
    raise_if_stopping(error)
    text = plain(str(error).partition("\n")[0].partition(", /")[0].strip())
    kind = type(error)
    is_plain = text and (kind in (OSError, RuntimeError, ValueError) or "geneva" in kind.__module__)
    return shorten(text if is_plain else f"{type(error).__name__}: {text}", 300)


def how_to_install(extra: str) -> str:
    """The command that installs an extra of Geneva, as README.md says it: it is not on PyPI."""
    return f'pip install ".[{extra}]" in a checkout of geneva-spark'

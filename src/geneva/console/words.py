"""Numbers, times and names as people read them."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import quote, urlencode, urlsplit

from geneva.console.markup import Html, tag


def count(number: float, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


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
    """Rows a second."""
    return f"{amount:,.0f} rows/s" if amount >= 10 else f"{amount:,.1f} rows/s"


def moment(at: datetime, now: datetime | None = None) -> Html:
    """When something was, as a distance from now; the exact time is in the element."""
    at = at.astimezone(UTC)
    past = ((now or datetime.now(UTC)) - at).total_seconds()
    if past < 60:
        text = "just now"
    elif past < 3600:
        text = f"{past // 60:.0f} min ago"
    elif past < 86_400:
        text = f"{past // 3600:.0f} h ago"
    else:
        text = f"{at:%d %b %Y}"
    return tag("time", text, datetime=at.isoformat(), title=f"{at:%Y-%m-%d %H:%M:%S} UTC")


def cut(text: str, most: int) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def path(*parts: str, **query: str | int | None) -> str:
    """A path of the console, with everything quoted."""
    way = "/" + "/".join(quote(part, safe="") for part in parts)
    told = {key: value for key, value in query.items() if value is not None}
    return f"{way}?{urlencode(told)}" if told else way


def place(uri: str) -> str:
    """Where a database is, without a password or key that its URI may hold."""
    if "://" not in uri:
        return uri
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"

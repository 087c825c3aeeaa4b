"""The frame of every page, and the parts that pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from starlette.responses import Response

from geneva.model.jobs import JobStatus
from geneva.model.uris import without_credentials
from geneva.render.html import Child, Html, join, tag
from geneva.render.text import ago, shorten, timestamp

_NAVIGATION = (
    ("Tables", "/"),
    ("Views & lineage", "/views"),
    ("Jobs", "/jobs"),
    ("Errors", "/errors"),
)


@dataclass(frozen=True, slots=True)
class Frame:
    """What is the same on every page of a console."""

    database: str
    can_cancel: bool

    def page(self, title: str, *content: Child, here: str = "", status: int = 200) -> Response:
        """A whole page."""
        return html_response(self._document(title, content, here), status)

    def _document(self, title: str, content: Child, here: str) -> Html:
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{title} · Geneva"),
            tag("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
            tag("link", rel="stylesheet", href="/static/console.css"),
            tag("script", src="/static/console.js", defer=True),
        )
        body = tag(
            "body",
            tag("a", "Skip to content", href="#main", class_="skip"),
            self._header(here),
            tag("main", content, id="main", tabindex="-1"),
            self._footer(),
        )
        return join([Html("<!doctype html>"), tag("html", head, body, lang="en")])

    def _header(self, here: str) -> Html:
        links = [
            tag(
                "li", tag("a", name, href=address, aria_current="page" if address == here else None)
            )
            for name, address in _NAVIGATION
        ]
        return tag(
            "header",
            tag(
                "a",
                tag("span", class_="mark", aria_hidden="true"),
                "Geneva",
                href="/",
                class_="brand",
            ),
            tag("nav", tag("ul", links), aria_label="Main"),
            class_="top",
        )

    def _footer(self) -> Html:
        mode = "can cancel jobs" if self.can_cancel else "read-only"
        return tag(
            "footer",
            tag("span", tag("code", without_credentials(self.database))),
            tag("span", mode, " · ", tag("a", "metrics", href="/metrics")),
        )


def html_response(markup: Html, status: int = 200) -> Response:
    """Markup as an answer; what UTF-8 can't say becomes a question mark."""
    return Response(markup.encode("utf-8", "replace"), status, media_type="text/html")


def heading(title: Child, *under: Child, crumbs: Iterable[tuple[str, str]] = ()) -> Html:
    """A page's title, the way to it, and what stands under it."""
    way = [tag("li", tag("a", name, href=href)) for name, href in crumbs]
    return tag(
        "div",
        tag("nav", tag("ol", way), aria_label="Breadcrumb", class_="crumbs") if way else None,
        tag("h1", title),
        tag("p", under, class_="lead") if under else None,
        class_="heading",
    )


def card(title: str, *content: Child, id: str | None = None, note: Child = None) -> Html:
    """A section with a heading."""
    key = id or "-".join(title.lower().split())
    head = tag("div", tag("h2", title, id=f"{key}-title"), note, class_="card-head")
    return tag("section", head, content, class_="card", id=id, aria_labelledby=f"{key}-title")


def grid(caption: str, headers: Sequence[Child], rows: Iterable[Child], **body: str) -> Html:
    """A table that can be scrolled by itself; its caption is for those who can't see it."""
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption, class_="quiet"),
            tag("thead", tag("tr", [tag("th", name, scope="col") for name in headers])),
            tag("tbody", rows, **body),
        ),
        class_="scroll",
        role="region",
        aria_label=caption,
        tabindex="0",
    )


def row(first: Child, *others: Child, labels: Sequence[str] = ()) -> Html:
    """A row of a table; `labels` name the cells where a small screen stacks them."""
    names = (*labels, *[None] * len(others))
    cells = [tag("td", cell, data_label=label) for cell, label in zip(others, names, strict=False)]
    return tag("tr", tag("th", first, scope="row"), cells)


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Names and values."""
    return tag(
        "dl",
        [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs],
        class_="facts",
    )


def badge(status: JobStatus) -> Html:
    """A job's status: a word, and a colour for those who see it."""
    return tag("span", status.value.lower(), class_=f"badge {status.value.lower()}")


def pill(text: Child, kind: str = "") -> Html:
    """A short word in a coloured shape."""
    return tag("span", text, class_=f"badge {kind}".strip())


def nothing(text: str, *hint: Child) -> Html:
    """What stands where there is nothing to list."""
    return tag(
        "div", tag("p", text), tag("p", hint, class_="dim") if hint else None, class_="empty"
    )


def lines(children: Iterable[Child]) -> Html:
    """Children, one per line."""
    return join([[child, tag("br")] for child in children])


def path(*parts: str, **query: str | int | None) -> str:
    """The address of a page, with everything quoted."""
    way = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {key: value for key, value in query.items() if value is not None}
    return f"{way}?{urlencode(given)}" if given else way


def cut(text: str, limit: int) -> str:
    """The beginning of a text that is too long for its place."""
    return shorten(text, limit, "…")


def moment(at: datetime) -> Html:
    """When something was, as a distance from now; the exact time is in the element."""
    at = at.astimezone(UTC)
    return tag("time", ago(at), datetime=at.isoformat(), title=timestamp(at))

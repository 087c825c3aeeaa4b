"""Live pages: what changed on a page, sent as server-sent events while somebody looks at it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

POLL_SECONDS = 1.0
"""How often to read the job history and heartbeats."""
_KEEPALIVE_SECONDS = 15.0
MAX_STREAMS = 64

ReadPage = Callable[[], dict[str, Any]]
"""Reads what a page shows now: `html` and `bars` by element id, `say`, and if it is `final`."""


class Streams:
    """The open streams of a console: pages that are left open must not fill the machine.

    Those of the same page share one reader.
    """

    def __init__(self) -> None:
        """None is open yet."""
        self._open = 0
        self._pages: dict[Hashable, _SharedPage] = {}

    def respond(self, page: Hashable, read: ReadPage) -> Response:
        """Send what `read` returns until it is final, or nobody listens any more."""
        return _Stream(self, page, read)

    @contextmanager
    def slot(self, page: Hashable, read: ReadPage) -> Iterator[_SharedPage | None]:
        """A place among the open streams, from before the answer begins; None: all are taken."""
        if self._open >= MAX_STREAMS:
            yield None
            return
        shared = self._pages.setdefault(page, _SharedPage(read))
        self._open += 1
        shared.followers += 1
        try:
            yield shared
        finally:
            self._open -= 1
            shared.followers -= 1
            if not shared.followers and self._pages.get(page) is shared:
                del self._pages[page]


class _SharedPage:
    """A page as it was read last. However many follow it, it is read once a second."""

    def __init__(self, read: ReadPage) -> None:
        self.followers = 0
        self._read = read
        self._lock = asyncio.Lock()
        self._now: dict[str, Any] = {}
        self._read_at: float | None = None

    async def now(self) -> dict[str, Any]:
        async with self._lock:
            at = time.monotonic()
            if self._read_at is None or at - self._read_at >= 0.9 * POLL_SECONDS:
                self._now = await run_in_threadpool(self._read)
                self._read_at = time.monotonic()
            return self._now


class _Stream(StreamingResponse):
    """A stream that takes its place when it is sent."""

    def __init__(self, streams: Streams, page: Hashable, read: ReadPage) -> None:
        super().__init__((), media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._streams, self._page, self._read = streams, page, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._streams.slot(self._page, self._read) as shared:
            if shared is None:
                refusal = PlainTextResponse("Too many live pages are open.", 503)
                await refusal(scope, receive, send)
                return
            self.body_iterator = _follow(shared)
            await super().__call__(scope, receive, send)


async def _follow(page: _SharedPage) -> AsyncIterator[bytes]:
    last: dict[str, Any] = {}
    sent_at = time.monotonic()
    while True:
        now = await page.now()
        news = changes(last, now)
        if news:
            yield f"event: change\ndata: {json.dumps(news)}\n\n".encode()
            sent_at = time.monotonic()
        elif time.monotonic() - sent_at > _KEEPALIVE_SECONDS:
            yield b": still here\n\n"
            sent_at = time.monotonic()
        if now.get("final"):
            return
        last = now
        await asyncio.sleep(POLL_SECONDS)


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is new in `after`, part by part."""
    news: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict):
            changed = {
                k: v for k, v in value.items() if not isinstance(old, dict) or old.get(k) != v
            }
            if changed:
                news[key] = changed
        elif value != old and not (old is None and value is False):
            news[key] = value
    return news

"""Live pages: what changed on a page, sent as server-sent events while somebody looks at it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse

POLL_SECONDS = 1.0
"""How often to read the job history and heartbeats."""
_KEEPALIVE_SECONDS = 15.0
_MAX_STREAMS = 64

ReadPage = Callable[[], dict[str, Any]]
"""Reads what a page shows now: `html` and `bars` by element id, `say`, and if it is `final`."""


class Streams:
    """The open streams of a console: a page that is left open must not fill the machine."""

    def __init__(self) -> None:
        """None is open yet."""
        self._open = 0

    def respond(self, read: ReadPage) -> Response:
        """Send what `read` returns until it is final, or nobody listens any more."""
        if self._open >= _MAX_STREAMS:
            return PlainTextResponse("Too many live pages are open.", 503)
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(
            self._follow(read), media_type="text/event-stream", headers=headers
        )

    async def _follow(self, read: ReadPage) -> AsyncIterator[bytes]:
        self._open += 1
        last: dict[str, Any] = {}
        sent_at = time.monotonic()
        try:
            while True:
                now = await run_in_threadpool(read)
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
        finally:
            self._open -= 1


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

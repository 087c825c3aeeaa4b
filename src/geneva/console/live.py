"""Live pages: what changed on a page, sent as server-sent events while somebody looks at it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse

LOOK_SECONDS = 1.0
"""How often to look at the job history and heartbeats."""
_QUIET_SECONDS = 15.0
_MOST_STREAMS = 64

Look = Callable[[], dict[str, Any]]
"""Reads what a page shows now: `html` and `bars` by element id, `say`, and if it is `final`."""


class Streams:
    """The open streams of a console: a page that is left open must not fill the machine."""

    def __init__(self) -> None:
        """None is open yet."""
        self._open = 0

    def respond(self, look: Look) -> Response:
        """Follow what `look` sees until it is final, or nobody listens any more."""
        if self._open >= _MOST_STREAMS:
            return PlainTextResponse("Too many live pages are open.", 503)
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(
            self._follow(look), media_type="text/event-stream", headers=headers
        )

    async def _follow(self, look: Look) -> AsyncIterator[bytes]:
        self._open += 1
        last: dict[str, Any] = {}
        heard = time.monotonic()
        try:
            while True:
                seen = await run_in_threadpool(look)
                news = changes(last, seen)
                if news:
                    yield f"event: change\ndata: {json.dumps(news)}\n\n".encode()
                    heard = time.monotonic()
                elif time.monotonic() - heard > _QUIET_SECONDS:
                    yield b": still here\n\n"
                    heard = time.monotonic()
                if seen.get("final"):
                    return
                last = seen
                await asyncio.sleep(LOOK_SECONDS)
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

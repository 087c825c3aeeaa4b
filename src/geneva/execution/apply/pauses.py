"""Pauses between calls: they end with the job.

A worker process of Spark is ended with its job. In the user's own process a task is a thread, which
nothing can end from outside: there a pause looks whether the job still wants the call behind it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import ContextVar

_LOOK_SECONDS = 0.05

JOB_ENDED: ContextVar[threading.Event | None] = ContextVar("JOB_ENDED", default=None)
"""Set when the job of this task has ended; None: the process is ended with it."""


class JobEnded(BaseException):
    """The job has ended, and wants no more calls. No Exception: it is no failure of a function."""


def pause(seconds: float) -> None:
    """Wait, also for no time at all; raise JobEnded where the job ends before that."""
    ended = JOB_ENDED.get()
    if ended is None:
        if seconds > 0:
            time.sleep(seconds)
    elif ended.wait(max(0.0, seconds)):
        raise JobEnded


async def pause_async(seconds: float) -> None:
    """The same in an event loop."""
    ended, end = JOB_ENDED.get(), time.monotonic() + seconds
    if ended is None:
        await asyncio.sleep(seconds)
        return
    while not ended.is_set() and (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, _LOOK_SECONDS))
    if ended.is_set():
        raise JobEnded

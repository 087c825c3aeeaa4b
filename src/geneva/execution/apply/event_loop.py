"""The event loop of a worker: one per process, in a thread of its own, for all async functions.

One for all of them, because clients of services belong to the loop that they were first used in. A
thread of its own, because tasks come and go, and calls go on while a task saves results.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from geneva.execution.apply.forks import end_copy
from geneva.execution.apply.timeouts import Expired

T = TypeVar("T")

_STOP_SECONDS = 5.0


class EventLoop:
    """A running event loop. Use `event_loop()`."""

    def __init__(self) -> None:
        """Start it."""
        self.loop = asyncio.new_event_loop()
        self.pid = os.getpid()
        self.thread = threading.Thread(target=self._run, name="geneva-loop", daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait in this thread for what is done in the loop."""
        future = asyncio.run_coroutine_threadsafe(_ending_copies(work), self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C came while it waited; otherwise it is done, and this nothing
            raise

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        if self.pid == os.getpid() and self.thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._finish(), self.loop)
            self.thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                break
            except (Expired, SystemExit, KeyboardInterrupt):
                # Of a task that a function started and nobody awaits, or late for its call.
                continue
        self.loop.close()

    async def _finish(self) -> None:
        here = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not here]
        await cancelled(left)
        await self.loop.shutdown_asyncgens()
        with suppress(RuntimeError):  # at the end of a process no thread can be started any more
            await self.loop.shutdown_default_executor()
        self.loop.stop()


async def _ending_copies(work: Coroutine[Any, Any, T]) -> T:
    """A copy of the worker that comes back from user code ends: it would run the loop for ever."""
    try:
        made = await work
    except BaseException as error:
        end_copy(error)
        raise
    end_copy()
    return made


async def cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end, but not for those that won't."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # asked for, so that asyncio doesn't complain that nobody did


_LOCK = threading.Lock()
_loop: EventLoop | None = None


def event_loop() -> EventLoop:
    """The event loop of this process, started when it is first needed."""
    global _loop
    with _LOCK:
        if _loop is None or _loop.pid != os.getpid():  # a fork takes no threads along
            _loop = EventLoop()
        return _loop


@atexit.register
def _close() -> None:
    if _loop is not None:
        _loop.close()

"""Calls under a time limit: one that takes longer is stopped, whatever it is doing.

In a worker process of Spark a call in the main thread is stopped by an alarm, in another thread by
an exception that is set in it. A call that heeds neither (it is in native code, or swallows
everything) is noted, and its process ended: Spark starts another one. A process that can't even
note it, because the call never lets go of the interpreter, is ended by a timer outside of Python.

Off Spark the process is the user's own: there the call is made in a thread that can be left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from geneva.errors import UDFTimeoutError

_EXIT_CODE = 79
_TICK_SECONDS = 0.1


class Guard(Protocol):
    """Notified of a call that nothing but the end of its process can stop."""

    def hung(self, row: int | None) -> None:
        """Note which row of the batch hangs, so that it is known after the process has ended."""


class Expired(BaseException):
    """Raised in a call that took too long. No Exception: functions that catch those go on."""


def guarded(
    function: Callable[..., Any],
    seconds: float,
    guard: Guard | None,
    current_row: Callable[[], int | None],
) -> Callable[..., Any]:
    """Wrap a function so that each call of it is stopped after `seconds`."""
    if guard is None or not is_spark_worker():
        return lambda *args: _left_behind(function, args, seconds)

    def call(*args: Any) -> Any:
        watched = _Watched(seconds, guard, current_row, threading.get_ident())
        try:
            try:
                _WATCH.begin(watched)
                return function(*args)
            finally:
                _WATCH.end(watched)
        except Expired:
            _WATCH.end(watched)  # again: the alarm may have come in the midst of it
            raise _late(seconds) from None

    return call


def guarded_async(
    function: Callable[..., Awaitable[Any]], seconds: float, guard: Guard | None, row: int | None
) -> Callable[..., Awaitable[Any]]:
    """Wrap a coroutine so that each call of it, for that row, is cancelled after `seconds`.

    One that blocks the event loop, or goes on after that, is dealt with like any other call.
    """

    async def call(*args: Any) -> Any:
        watched = None
        if guard is not None and is_spark_worker():
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            # The loop's own limit comes first, unless it is blocked.
            late = seconds + 2 * _TICK_SECONDS
            watched = _Watched(late, guard, lambda: row, threading.get_ident())
            watched.is_blocking = lambda: asyncio.current_task(loop) is task
        try:
            if watched is not None:
                _WATCH.begin(watched)
            async with asyncio.timeout(seconds) as limit:
                return await function(*args)
        except Expired:
            raise _late(seconds) from None
        except TimeoutError:
            if limit.expired():
                raise _late(seconds) from None
            raise
        finally:
            if watched is not None:
                _WATCH.end(watched)

    return call


def _late(seconds: float) -> UDFTimeoutError:
    return UDFTimeoutError(f"the call took longer than timeout={seconds:g} s, and was stopped")


def is_spark_worker() -> bool:
    """Whether this process runs a task of Spark's."""
    module = sys.modules.get("pyspark.taskcontext")
    return module is not None and module.TaskContext.get() is not None


def end_process() -> NoReturn:
    """End this worker process at once; Spark starts another one, and the task again."""
    os._exit(_EXIT_CODE)


def grace(seconds: float) -> float:
    """How many seconds a call that was interrupted may take to end."""
    return min(max(seconds, 0.5), 5.0)


@dataclass(slots=True, eq=False)
class _Watched:
    """A call that runs."""

    seconds: float
    guard: Guard
    current_row: Callable[[], int | None]
    thread: int
    deadline: float = math.inf
    seen_late: float = math.inf
    """When it was first seen to take too long."""
    interrupted: bool = False
    is_blocking: Callable[[], bool] = lambda: True
    """Whether the thread is in this very call: an event loop has many at the same time."""


class _Watch:
    """The calls that run in this process, and the thread that watches them."""

    def __init__(self) -> None:
        self._calls: set[_Watched] = set()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._armed = False
        self._lock = threading.Lock()

    def begin(self, call: _Watched) -> None:
        """Start the clock of a call."""
        call.deadline = time.monotonic() + call.seconds
        self._calls.add(call)
        if self._pid != os.getpid():  # also after a fork, which takes no threads along
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._watch, name="geneva-watch", daemon=True)
            self._thread.start()
            self._armed = False
        if not self._armed:
            self._arm([call])
        if threading.current_thread() is threading.main_thread():
            call.interrupted = True
            if signal.getsignal(signal.SIGALRM) is not _on_alarm:
                signal.signal(signal.SIGALRM, _on_alarm)
            signal.setitimer(signal.ITIMER_REAL, call.seconds)

    def end(self, call: _Watched) -> None:
        """Stop the clock of a call."""
        with self._lock:
            self._calls.discard(call)
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif call.interrupted:
            time.sleep(0)  # an exception that was set and not raised yet is raised here

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            calls = [*self._calls]
            for call in calls:
                self._check(call)
            if calls:
                self._arm(calls)
            elif self._armed:
                self._armed = False
                faulthandler.cancel_dump_traceback_later()

    def _arm(self, calls: list[_Watched]) -> None:
        """Put off the timer that ends the process.

        It fires when the thread can't put it off again, because a call holds the interpreter.
        """
        longest = max(call.seconds + 2 * grace(call.seconds) for call in calls)
        faulthandler.dump_traceback_later(longest + 1.0, exit=True, file=2)
        self._armed = True

    def _check(self, call: _Watched) -> None:
        now = time.monotonic()
        if now <= call.deadline:
            return
        call.seen_late = min(call.seen_late, now)
        # Counted from when it was noticed: on a busy machine nobody had a chance to end before.
        if now - call.seen_late > grace(call.seconds):
            with contextlib.suppress(Exception):  # whatever it is, the process has to end
                call.guard.hung(call.current_row())
            end_process()
        with self._lock:
            if call in self._calls and call.is_blocking():
                self._interrupt(call)

    def _interrupt(self, call: _Watched) -> None:
        if call.thread == threading.main_thread().ident:
            # Its alarm may have reached another thread, and then this one sleeps on.
            signal.pthread_kill(call.thread, signal.SIGALRM)
        elif not call.interrupted:
            call.interrupted = True
            _raise_in(call.thread)


_WATCH = _Watch()


def _on_alarm(number: int, frame: Any) -> None:
    raise Expired


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Expired))


def _look_once() -> None:
    """Let the interpreter go on in full speed while an exception waits in another thread.

    All threads look for it at each call until one has found any: for as long as that thread sleeps.
    Under a profiler, Python 3.11 would come to a stand. So this thread finds one of its own. The
    other one finds its own all the same when it wakes, and threads take turns.
    """
    with contextlib.suppress(Expired):
        _raise_in(threading.get_ident())
        for _ in range(1000):  # it is raised at one of the next steps
            pass


# ---------------------------------------------------------------- off Spark: threads left behind


class _Helper:
    """A thread that makes calls for another one. Left idle, it ends."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="geneva-call", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                function, args = self.work.get(timeout=5.0)
            except queue.Empty:
                return
            try:
                self.done.put((True, function(*args)))
            except Expired:
                return
            except BaseException as error:  # noqa: BLE001  raised where the call was wanted
                self.done.put((False, error))


_LOCAL = threading.local()


def _left_behind(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    seconds: float,
) -> Any:
    helper: _Helper | None = getattr(_LOCAL, "helper", None)
    if helper is None or not helper.thread.is_alive():
        helper = _LOCAL.helper = _Helper()
    helper.work.put((copy_context().run, (function, *args)))
    try:
        worked, value = helper.done.get(timeout=seconds)
    except queue.Empty:
        _LOCAL.helper = None
        if helper.thread.ident is not None:
            _raise_in(helper.thread.ident)
            _look_once()
        raise _late(seconds) from None
    if not worked:
        raise value
    return value

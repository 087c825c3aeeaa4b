"""The threads of one task, and the queues between them.

A queue hands records on in order, and is bounded: what waits in it takes memory, and is work that
is lost with the worker. When one thread fails, or the task is over, all of them stop: whoever waits
at a queue, or comes to it next, gets `Stopped`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Stopped(Exception):
    """The threads of the task are to stop."""


class Halt:
    """Tells the threads of a task to stop, and keeps the first error that is the reason."""

    def __init__(self) -> None:
        """Let them run."""
        self.is_set = False
        self.error: BaseException | None = None
        self._waiting: list[threading.Condition] = []
        self._inner: list[Halt] = []
        self._lock = threading.Lock()

    def inner(self) -> Halt:
        """One for some of the threads only: it stops with this one, and may stop alone."""
        made = Halt()
        self._inner.append(made)
        return made

    def watched(self) -> threading.Condition:
        """A condition whose waiters wake up when the threads are to stop."""
        condition = threading.Condition()
        self._waiting.append(condition)
        return condition

    def set(self, error: BaseException | None = None) -> None:
        """Stop all threads; `error`: one of them failed."""
        with self._lock:
            if self.error is None:
                self.error = error
            self.is_set = True
        for condition in self._waiting:
            with condition:
                condition.notify_all()
        for halt in self._inner:
            halt.set()


class BoundedQueue(Generic[Item]):
    """Hands items from one thread to another one. Each takes a share of the room that there is."""

    def __init__(self, halt: Halt) -> None:
        """Start empty."""
        self._halt = halt
        self._changed = halt.watched()
        self._items: deque[tuple[Item, float]] = deque()
        self._used = 0.0

    def put(self, item: Item, share: float = 0.0) -> None:
        """Append an item, when there is room for it; one that is too large goes in alone."""
        with self._changed:
            while self._items and self._used + share > 1.0 and not self._halt.is_set:
                self._changed.wait()
            self._check()
            self._items.append((item, share))
            self._used += share
            self._changed.notify_all()

    def get(self) -> Item:
        """Take the first item, when there is one."""
        with self._changed:
            while not self._items and not self._halt.is_set:
                self._changed.wait()
            return self._pop()

    def get_now(self) -> Item | None:
        """Take the first item; None: there is none now."""
        with self._changed:
            return self._pop() if self._items else None

    def _pop(self) -> Item:
        self._check()
        item, share = self._items.popleft()
        self._used = self._used - share if self._items else 0.0
        self._changed.notify_all()
        return item

    def _check(self) -> None:
        if self._halt.is_set:
            raise Stopped


class Stage:
    """A thread beside the task's own. An error in it stops the task, and is raised there."""

    def __init__(self, name: str, work: Callable[[], None], halt: Halt) -> None:
        """Start it."""
        self._work, self._halt = work, halt
        # A daemon: the end of the process waits for no store that hangs.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for so many seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._work()
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001  raised in the task's own thread
            self._halt.set(error)

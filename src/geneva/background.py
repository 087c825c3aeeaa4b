"""Doing something once beside the thread that asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Item = TypeVar("Item")


def in_background(name: str, work: Callable[[], Item]) -> Future[Item]:
    """Begin to do something once, in a thread of its own.

    A daemon: the end of the process waits for no store that hangs.
    """
    result: Future[Item] = Future()

    def run() -> None:
        try:
            done = work()
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            result.set_exception(error)
        else:
            result.set_result(done)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result

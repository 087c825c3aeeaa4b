"""Copies of a worker that the user's function has forked, and that come back from it.

`if os.fork() == 0: work(); sys.exit()` is meant to end the copy. But whatever a function raises is
its failure, and what it returns its value: a copy would go on as a second worker, and report to
Spark over the connection of the first.

A copy ends where a call comes back. Between the calls of a row function there is no place to look,
as these are made in C: a copy finds no rows behind its own, and ends as those do.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_worker: int | None = None
"""The process that runs tasks; None: none of Spark's."""
_rows_left: list[Iterator[Any]] = []
"""The rows that calls are to be made for, in all threads."""


def note_worker() -> None:
    """Take this process for the one that runs tasks; copies of it are to end."""
    global _worker
    _worker = os.getpid()


def end_copy(error: BaseException | None = None) -> None:
    """End this process if it is a copy of the worker, as the `error` says; else do nothing."""
    if _worker is None or os.getpid() == _worker:
        return
    if error is None:
        os._exit(0)
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else int(code is not None))


def ending_copies(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function that calls the user's; a copy that comes back from it ends."""
    try:
        made = function(*args, **kwargs)
    except BaseException as error:
        end_copy(error)
        raise
    end_copy()
    return made


class CallPool(ThreadPoolExecutor):
    """Threads that call the user's function. A copy has none to wait for, and ends."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call a function in one of the threads."""
        return super().submit(partial(ending_copies, fn), *args, **kwargs)


@contextmanager
def rows_once(*rows: Iterator[Any]) -> Iterator[None]:
    """Leave no rows for a copy that is made meanwhile."""
    _rows_left.extend(rows)
    try:
        yield
    finally:
        for own in rows:
            _rows_left.remove(own)


def _take_rows() -> None:
    if _worker is not None:
        for rows in _rows_left:
            deque(rows, maxlen=0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_take_rows)

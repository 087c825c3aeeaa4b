"""Settings of the process for walks over the user's objects, shared by all threads that walk."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings


class _DeepAndQuiet:
    """Lets walks go deep, through long chains of functions, and ignores warnings of pickling.

    Both are settings of the process: the first of several threads sets them, the last resets them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._walks = 0
        self._reset = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._walks += 1
            if self._walks == 1:
                limit = sys.getrecursionlimit()
                self._reset.callback(sys.setrecursionlimit, limit)
                sys.setrecursionlimit(max(limit, _MAX_DEPTH))
                self._reset.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._walks -= 1
            if self._walks == 0:
                self._reset.close()


_MAX_DEPTH = 30_000
deep_and_quiet = _DeepAndQuiet()

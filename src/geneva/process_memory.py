"""What the C library does with memory that a process has freed: workers keep it, a driver doesn't.

By itself glibc gives large buffers back to the system at once, and keeps small pieces. Workers use
large ones all the time, for windows and results, and the system clears every page anew, which takes
longer than reading the data into it does: 153 MB of vectors were read in 0.17 s, and in 0.06 s with
memory that was kept. A driver needs many small pieces for a commit, and then none of them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of the two settings, in malloc.h."""
_KEPT_BYTES = 64 * 1024 * 1024
"""Free memory at the end of the heap beyond this goes back to the system."""
_LARGE_BYTES = 1024 * 1024 * 1024
"""Buffers beyond this are asked of the system, and go back to it, each by itself."""


@cache
def keep_memory() -> bool:
    """Let this process, a worker, keep some of the memory that it frees; False: it has its own way.

    That is so where the user has set one by a variable, and where the C library is not glibc.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if is_set or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = _of_glibc("mallopt")
    if mallopt is None or not mallopt(_TRIM_THRESHOLD, _KEPT_BYTES):
        return False
    # Older ones take no more than half of what a heap may be.
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES) or mallopt(_MMAP_THRESHOLD, 32 * 1024**2))


def give_back_memory() -> None:
    """Give back to the system what this process has freed, in pieces too small to go by themselves.

    A driver does so behind a commit of a large table: half of what the manifest and its parts took
    would stay, and more with each commit. It takes some 10 ms.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None: it is another one."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)

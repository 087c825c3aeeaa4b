"""What happens to memory that a process has freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FREED = """
import ctypes
from pathlib import Path
from geneva.process_memory import give_back_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
pieces = [libc.malloc(ctypes.c_size_t(4_000)) for _ in range(50_000)]
for piece in pieces:
    ctypes.memset(piece, 1, 4_000)
for piece in pieces[:-1]:  # the last one holds the end of the heap
    libc.free(piece)
before = resident()
give_back_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_memory_that_was_freed_in_small_pieces_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FREED], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 150

"""What a task prints: the end of it is kept, and travels with the task's report.

Both streams of the process are led to a file, so that C code and child processes are heard, too.
A file takes anything at once: a pipe would need a reader, which can't run while C code that prints
holds the interpreter. The file of a worker that was killed is found by the next attempt.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_OUTPUT_BYTES = 65_536
"""How much is kept of what a task prints: the end of it."""
_MAX_FILE_BYTES = 16 * MAX_OUTPUT_BYTES
"""Size at which the file is cut; what is in it before its end is lost."""
_LOOK_SECONDS = 0.05
_FORGOTTEN_SECONDS = 86_400.0


_place: str | None = None


def keep_output_in(folder: str | None) -> None:
    """Say in which folder the files of output are; None: in one of the system's temporary ones."""
    global _place
    _place = folder


def output_place() -> str | None:
    """The folder that this process was told to keep output in."""
    return _place


@contextlib.contextmanager
def captured(job_id: str, task: str) -> Iterator[Callable[[], str]]:
    """Lead what this process prints to a file; yield what reads the end of it so far.

    `task` is the same for all attempts at a task: what a dead one had printed comes first.
    """
    folder = _folder()
    if folder is None:
        yield lambda: ""
        return
    _tidy(folder)
    stem = f"{job_id}.{task}."
    before = _leftovers(folder, stem)
    own = f"{stem}{os.getppid()}-"
    handle, name = tempfile.mkstemp(prefix=own, suffix=".out", dir=folder)
    os.close(handle)
    path = Path(name)
    with path.open("ab", buffering=0) as file, _streams_led_to(file.fileno()):
        tail = _Tail(path)
        with tail.kept_short():
            yield lambda: before + tail.text()
    path.unlink(missing_ok=True)


def lost_output(job_id: str) -> str:
    """What tasks of a job had printed on this machine whose workers died; it is forgotten then."""
    folder = _folder()
    return "" if folder is None else _leftovers(folder, f"{job_id}.")


def _folder() -> Path | None:
    """The folder for output, which is this user's alone."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(_place or tempfile.gettempdir()) / f"geneva-output-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            return None
    except OSError:
        return None
    return folder


def _tidy(folder: Path) -> None:
    """Remove what nobody will ask for: the process that the worker was forked from is gone, too.

    That one lives as long as Spark does here. A day is for those that can't be looked up.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob("*.out"):
            parent = path.name.rsplit(".", 2)[1].partition("-")[0]
            is_gone = Path("/proc/self").exists() and not Path("/proc", parent).exists()
            with contextlib.suppress(OSError):
                if is_gone or time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
                    path.unlink()


def _leftovers(folder: Path, stem: str) -> str:
    found = []
    for path in sorted(folder.glob(f"{stem}*.out")):
        with contextlib.suppress(OSError):
            found.append(_Tail(path).text())
            path.unlink()
    return "".join(f"{text}(the worker died here)\n" for text in found)


@contextlib.contextmanager
def _streams_led_to(target: int) -> Iterator[None]:
    """Lead stdout and stderr of the process to another file for as long as the block runs."""
    _flush()
    saved = [os.dup(stream) for stream in (1, 2)]
    for stream in (1, 2):
        os.dup2(target, stream)
    try:
        yield
    finally:
        _flush()
        for stream, own in zip((1, 2), saved, strict=True):
            os.dup2(own, stream)
            os.close(own)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


class _Tail:
    """The end of a file to which others append."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = b""
        self._left_out = 0

    def text(self) -> str:
        """The last of what is there, from the beginning of a line, as text."""
        _flush()
        with contextlib.suppress(OSError):  # somebody tidied the folder up: no reason to fail
            self._take()
        content, left_out = self._kept, self._left_out
        if left_out:
            line = content.find(b"\n") + 1
            left_out, content = left_out + line, content[line:]
        text = content.decode("utf-8", "backslashreplace")
        note = f"(... {left_out:,} bytes before it are not kept)\n" if left_out else ""
        return note + text + ("\n" if text and not text.endswith("\n") else "")

    @contextlib.contextmanager
    def kept_short(self) -> Iterator[None]:
        """Cut the file again and again while the block runs, so that no print fills the disk."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_LOOK_SECONDS):
                with contextlib.suppress(OSError):
                    if self._path.stat().st_size > _MAX_FILE_BYTES:
                        self._take()

        thread = threading.Thread(target=watch, name="geneva-output", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _take(self) -> None:
        """Move what is in the file to what is kept."""
        with self._path.open("rb+") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MAX_OUTPUT_BYTES))
            content = self._kept + file.read(MAX_OUTPUT_BYTES)
            file.truncate(0)
        self._left_out += max(0, size - MAX_OUTPUT_BYTES)
        self._left_out += max(0, len(content) - MAX_OUTPUT_BYTES)
        self._kept = content[-MAX_OUTPUT_BYTES:]

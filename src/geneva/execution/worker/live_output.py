"""A pipe from tasks to their driver on the same machine: what they print is seen at once.

The driver of a job that somebody watches makes the pipe, in the folder for output. A worker that
finds it there hands whole lines over, as many as there is room for: a function never waits for
whoever reads. Elsewhere there is no pipe, and output is shown when its task ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_MAX_WAITING_BYTES = 1024 * 1024
"""What may wait for the driver to read; the oldest lines of more are left out."""
_PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.02
_READ_BYTES = 65_536


def _pipe_of(folder: Path, job_id: str) -> Path:
    return folder / f"{job_id}.live"


class LiveWriter:
    """A task's end of the pipe."""

    def __init__(self, pipe: int) -> None:
        """Write to an open pipe, which never blocks."""
        self._pipe: int | None = pipe
        self._waiting = b""
        self._left_out = 0

    @classmethod
    def find(cls, folder: Path, job_id: str) -> LiveWriter | None:
        """The pipe of a job, if somebody reads it here."""
        try:
            return cls(os.open(_pipe_of(folder, job_id), os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return None

    @property
    def waiting(self) -> int:
        """Bytes that were added and are not sent yet."""
        return len(self._waiting)

    def add(self, printed: bytes, left_out: int = 0) -> None:
        """Hand over the lines that are whole by now; so many bytes before them are gone."""
        self._left_out += left_out
        self._waiting += printed
        if len(self._waiting) > _MAX_WAITING_BYTES:
            keep = self._waiting.find(b"\n", len(self._waiting) - _MAX_WAITING_BYTES // 2) + 1
            self._left_out += keep
            self._waiting = self._waiting[keep:]
        self._send(self._waiting.rfind(b"\n") + 1)

    def finish(self) -> bool:
        """Hand over the rest, wait for the reader if need be, and close; whether all was sent."""
        if self._waiting and not self._waiting.endswith(b"\n"):
            self._waiting += b"\n"
        deadline = time.monotonic() + _PATIENCE_SECONDS
        self._send(len(self._waiting))
        while self._waiting and self._pipe is not None and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            self._send(len(self._waiting))
        is_open = self._pipe is not None
        self._close()
        return is_open and not self._waiting

    def _send(self, end: int) -> None:
        """Send what waits, up to `end`, in pieces that are never mixed with those of others."""
        if self._left_out:
            note = b"(... %d bytes before it are not shown)\n" % self._left_out
            if self._write(note):
                self._left_out = 0
        sent = 0
        while sent < end:
            line = self._waiting.rfind(b"\n", sent, min(end, sent + select.PIPE_BUF)) + 1
            stop = line or min(end, sent + select.PIPE_BUF)
            if not self._write(self._waiting[sent:stop]):
                break
            sent = stop
        self._waiting = self._waiting[sent:]

    def _write(self, piece: bytes) -> bool:
        if self._pipe is None:
            return False
        try:
            return os.write(self._pipe, piece) == len(piece)
        except BlockingIOError:
            return False
        except OSError:  # nobody reads any more
            self._close()
            return False

    def _close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


class LiveReader:
    """The driver's end: shows what comes, line by line, from `with` to its end."""

    def __init__(self, folder: Path, job_id: str, show: Callable[[str], None]) -> None:
        """Nothing is made yet. `show` is called in a thread of its own."""
        self._path, self._show = _pipe_of(folder, job_id), show
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LiveReader:
        """Make the pipe, where there are such."""
        with contextlib.suppress(OSError, AttributeError):
            os.mkfifo(self._path, mode=0o600)
            pipe = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            self._thread = threading.Thread(
                target=self._read, args=(pipe,), name="geneva-live-output", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show what is still in the pipe, and remove it."""
        if self._thread is not None:
            self._path.unlink(missing_ok=True)
            self._ended.set()
            self._thread.join()

    @property
    def is_open(self) -> bool:
        """Whether tasks on this machine can hand over what they print."""
        return self._thread is not None

    def _read(self, pipe: int) -> None:
        try:
            self._show_all(pipe)
        finally:
            os.close(pipe)  # a task that finds nobody reading shows nothing any more

    def _show_all(self, pipe: int) -> None:
        waiting = b""
        while True:
            ends = self._ended.is_set()  # what was written before that is read after it
            found = self._next(pipe)
            waiting += found
            line = waiting.rfind(b"\n") + 1
            if line:
                self._show(waiting[:line].decode("utf-8", "backslashreplace"))
                waiting = waiting[line:]
            if not found:
                if ends:
                    break
                self._ended.wait(_PAUSE_SECONDS)

    @staticmethod
    def _next(pipe: int) -> bytes:
        """What is in the pipe; nothing, also while no task has it open."""
        try:
            return os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return b""

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from geneva.execution.worker.live_output import LiveWriter

MAX_OUTPUT_BYTES = 65_536
"""How much is kept of what a task prints: the end of it."""
_MAX_FILE_BYTES = 16 * MAX_OUTPUT_BYTES
"""Size at which the file is cut; what is in it before its end is lost."""
_LOOK_SECONDS = 0.05
_FORGOTTEN_SECONDS = 86_400.0


_place: str | None = None
_pipe_place: str | None = None


def keep_output_in(folder: str | None, pipes: str | None = None) -> None:
    """Say in which folders files of output and the pipes to drivers are; None: a temporary one."""
    global _place, _pipe_place
    _place, _pipe_place = folder, pipes


def output_place() -> str | None:
    """The folder that this process was told to keep output in."""
    return _place


def pipe_place() -> str:
    """The folder in which the pipes of jobs are that this process drives.

    Not that of their Spark, which a pipe may be older than: a first job starts Spark.
    """
    return _pipe_place or tempfile.gettempdir()


class Printed:
    """What a task prints: call it, when the task ends, for the end of that."""

    is_shown = False
    """Whether somebody who watches the job has seen all of it."""

    def __call__(self) -> str:
        """Nothing, where it is not known."""
        return ""


@contextlib.contextmanager
def captured(job_id: str, task: str) -> Iterator[Printed]:
    """Lead what this process prints to a file, and also to the driver, where that watches here.

    `task` is the same for all attempts at a task: what a dead one had printed comes first.
    """
    folder = output_folder()
    if folder is None:
        yield Printed()
        return
    _tidy(folder)
    stem = f"{job_id}.{task}."
    before = _leftovers(folder, stem, _DIED)
    pipes = pipe_folder()
    live = LiveWriter.find(pipes, job_id) if pipes is not None else None
    if live is not None:
        live.add(before.unseen.encode("utf-8", "backslashreplace"))
    own = f"{stem}{os.getppid()}-"
    handle, name = tempfile.mkstemp(prefix=own, suffix=".out", dir=folder)
    os.close(handle)
    path = Path(name)
    with path.open("ab", buffering=0) as file, _streams_led_to(file.fileno()):
        tail = _Tail(path, before.text, live)
        try:
            with tail.kept_short():
                yield tail
        finally:
            tail.hand_over_rest()
    path.unlink(missing_ok=True)
    _seen_of(path).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LostOutput:
    """What workers had printed that died."""

    text: str = ""
    unseen: str = ""
    """The end of it, which nobody who watches has seen."""


def lost_output(job_id: str, *, stopped: bool = False) -> LostOutput:
    """What tasks of a job had printed on this machine whose workers died; it is forgotten then.

    `stopped`: they were stopped with their job, and have not died by themselves.
    """
    folder, mark = output_folder(), "" if stopped else _DIED
    return LostOutput() if folder is None else _leftovers(folder, f"{job_id}.", mark)


def output_folder() -> Path | None:
    """The folder for output, which is this user's alone."""
    return _own_folder(_place or tempfile.gettempdir())


def pipe_folder() -> Path | None:
    """The folder for pipes, which is this user's alone, too."""
    folder = _own_folder(pipe_place())
    if folder is not None:
        _remove_forgotten(folder.glob("*.live"))
    return folder


def _own_folder(place: str) -> Path | None:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(place) / f"geneva-output-{user}"
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
                if is_gone or _is_forgotten(path):
                    path.unlink()
                    _seen_of(path).unlink(missing_ok=True)
    _remove_forgotten(folder.glob("*.seen"))


def _remove_forgotten(paths: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in paths:
            with contextlib.suppress(OSError):
                if _is_forgotten(path):
                    path.unlink()


def _is_forgotten(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS


def _leftovers(folder: Path, stem: str, mark: str) -> LostOutput:
    """What is left of tasks that did not report, each with a `mark` behind it."""
    text = unseen = ""
    for path in sorted(folder.glob(f"{stem}*.out")):
        with contextlib.suppress(OSError):
            unseen += f"{_unseen(path)}{mark}"
            text += f"{_Tail(path)()}{mark}"
            path.unlink()
            _seen_of(path).unlink(missing_ok=True)
    return LostOutput(text, unseen)


_DIED = "(the worker died here)\n"


def _seen_of(path: Path) -> Path:
    """The file that says how much of a file of output was handed over to who watches."""
    return path.with_suffix(".seen")


def _unseen(path: Path) -> str:
    """What of a file of output was not handed over, as text."""
    try:
        start = int(_seen_of(path).read_text() or 0)
    except (OSError, ValueError):  # nobody watched
        start = 0
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - MAX_OUTPUT_BYTES))
        text = file.read().decode("utf-8", "backslashreplace")
    return text + ("\n" if text and not text.endswith("\n") else "")


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


class _Tail(Printed):
    """The end of a file to which others append, behind what was there `before` it."""

    def __init__(self, path: Path, before: str = "", live: LiveWriter | None = None) -> None:
        self._path, self._before, self._live = path, before, live
        self._lock = threading.Lock()
        self._kept = b""
        self._left_out = self._handed_over = 0

    def __call__(self) -> str:
        """The last of what is there, from the beginning of a line, as text."""
        _flush()
        with contextlib.suppress(OSError):  # somebody tidied the folder up: no reason to fail
            self._take()
        self.hand_over_rest()
        content, left_out = self._kept, self._left_out
        if left_out:
            line = content.find(b"\n") + 1
            left_out, content = left_out + line, content[line:]
        text = content.decode("utf-8", "backslashreplace")
        note = f"(... {left_out:,} bytes before it are not kept)\n" if left_out else ""
        return self._before + note + text + ("\n" if text and not text.endswith("\n") else "")

    def hand_over_rest(self) -> None:
        """Give what was printed last to who watches, and close the way to there."""
        with self._lock:
            if self._live is None:
                return
            with contextlib.suppress(OSError), self._path.open("rb") as file:
                self._hand_over(file)
            self.is_shown = self._live.finish()
            if self.is_shown:
                self._note_seen(self._handed_over)
            self._live = None

    @contextlib.contextmanager
    def kept_short(self) -> Iterator[None]:
        """Cut the file again and again while the block runs, so that no print fills the disk."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_LOOK_SECONDS):
                with contextlib.suppress(OSError):
                    size = self._path.stat().st_size
                    if size > _MAX_FILE_BYTES:
                        self._take()
                    elif size > self._handed_over and self._live is not None:
                        with self._lock, self._path.open("rb") as file:
                            self._hand_over(file)

        thread = threading.Thread(target=watch, name="geneva-output", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _take(self) -> None:
        """Move what is in the file to what is kept."""
        with self._lock, self._path.open("rb+") as file:
            self._hand_over(file)
            self._handed_over = 0
            self._note_seen(0)
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MAX_OUTPUT_BYTES))
            content = self._kept + file.read(MAX_OUTPUT_BYTES)
            file.truncate(0)
        self._left_out += max(0, size - MAX_OUTPUT_BYTES)
        self._left_out += max(0, len(content) - MAX_OUTPUT_BYTES)
        self._kept = content[-MAX_OUTPUT_BYTES:]

    def _note_seen(self, size: int) -> None:
        """Write down how much of the file was handed over, for when this process dies."""
        if self._live is not None:
            with contextlib.suppress(OSError):  # then it is shown once more
                _seen_of(self._path).write_text(str(max(0, size)))

    def _hand_over(self, file: BinaryIO) -> None:
        """Give what is new in the file to who watches."""
        if self._live is not None:
            size = os.fstat(file.fileno()).st_size
            start = max(self._handed_over, size - _MAX_FILE_BYTES)
            file.seek(start)
            self._live.add(file.read(size - start), left_out=start - self._handed_over)
            self._handed_over = size
            self._note_seen(size - self._live.waiting)

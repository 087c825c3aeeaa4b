"""Keeping what the tasks of a job print, and showing it to who wants to see it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

from geneva.errors import WorkerLostError
from geneva.execution.worker.live_output import LiveReader
from geneva.execution.worker.output import lost_output, pipe_folder
from geneva.model.tables import Secrets
from geneva.secret_values import redacted
from geneva.storage.jobs.output import OutputStore, TaskOutput

_LOG = logging.getLogger("geneva")
MAX_JOB_BYTES = 16 * 1024 * 1024
"""How much is kept of what all tasks of a job print: what comes first."""
_WRITE_SECONDS = 5.0
_WRITE_BYTES = 1024 * 1024


class OutputKeeper:
    """Takes what tasks printed, without what is secret, and writes it now and then."""

    def __init__(
        self,
        job_id: str,
        store: OutputStore,
        hidden: Sequence[Secrets],
        show: Callable[[TaskOutput], None] | None,
    ) -> None:
        """`show` is told of everything: of tasks on this machine at once, of others as they end."""
        self._job_id, self._store, self._hidden, self._show = job_id, store, hidden, show
        self._live = ExitStack()
        self._is_live = False
        """Whether tasks on this machine are seen as they print."""
        self._lock = threading.Lock()
        self._waiting: list[TaskOutput] = []
        self._waiting_bytes = self._bytes = 0
        self._written = time.monotonic()

    def __enter__(self) -> OutputKeeper:
        """Begin."""
        folder = pipe_folder() if self._show is not None else None
        if folder is not None:
            reader = LiveReader(folder, self._job_id, self._show_text)
            self._is_live = self._live.enter_context(reader).is_open
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what is left, also what tasks had printed on this machine that never reported."""
        self._live.close()
        # When a job ends with an error, its other tasks are stopped: nothing has killed them.
        stopped = kind is not None and not issubclass(kind, WorkerLostError)
        lost = lost_output(self._job_id, stopped=stopped)
        if lost.text:
            name = "workers that were stopped" if stopped else "workers that died"
            self.record(name, lost.text, self._is_live)
            if self._is_live:
                self._show_text(lost.unseen)
        with self._lock:
            self._write()

    def _show_text(self, text: str) -> None:
        """Show what a task has printed just now."""
        if self._show is not None:
            self._show(TaskOutput(self._job_id, "", self.redacted(text)))

    def redacted(self, text: str) -> str:
        """The text without the keys that the connection knows."""
        return redacted(text, self._hidden)

    def record(self, task: str, text: str, shown: bool = False) -> None:  # noqa: FBT001, FBT002
        """Take what a task printed; `shown`: it was seen as it was printed."""
        text = self.redacted(text)
        output = TaskOutput(self._job_id, task, text)
        if self._show is not None and not shown:
            self._show(output)
        with self._lock:
            if self._bytes > MAX_JOB_BYTES:
                return
            self._bytes += len(text)
            if self._bytes > MAX_JOB_BYTES:
                output = TaskOutput(self._job_id, task, "(what comes after this is not kept)\n")
            self._waiting.append(output)
            self._waiting_bytes += len(output.text)
            late = time.monotonic() - self._written > _WRITE_SECONDS
            if late or self._waiting_bytes > _WRITE_BYTES:
                self._write()

    def _write(self) -> None:
        records, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._written = time.monotonic()
        try:
            self._store.append(records)
        except OSError as error:
            _LOG.warning("What %d tasks printed could not be kept: %s", len(records), error)

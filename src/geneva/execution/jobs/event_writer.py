"""Writing the events of one job into its database's history, in order."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from geneva.background import in_background
from geneva.render.plain import plain
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.history import JobHistory, SameWork
from geneva.storage.lance.damage import is_damage

_LOG = logging.getLogger("geneva")
_NOTE_SECONDS, _NOTE_SECONDS_REMOTE = 0.25, 1.0
"""A commit goes on record this much later, if nothing else goes on record before."""


@contextmanager
def logging_trouble(what: str, job_id: str) -> Iterator[None]:
    """A history that can't be written is no reason to fail a job, nor to hide its own error."""
    try:
        yield
    except OSError as error:
        _LOG.warning("Could not %s job %s: %s", what, job_id, plain(error))


class EventWriter:
    """Numbers the events of a job and writes them: those of commits behind, others at once."""

    def __init__(self, job_id: str, history: JobHistory, on_commit: Callable[[], None]) -> None:
        """Write nothing yet. `on_commit` is called after every commit."""
        self._job_id, self._history, self._on_commit = job_id, history, on_commit
        self._numbers = itertools.count()
        self._unwritten: deque[JobEvent] = deque()
        self._noting: Future[None] | None = None
        """Writes events of commits behind."""
        self._writes = threading.Event()
        """Set when another event is about to be written, and those of commits with it."""

    def announce(self, events: Sequence[JobEvent], work: str | None) -> SameWork:
        """Write a job's first events; return the jobs of the same `work` that came before."""
        return self._history.announce(list(map(self._numbered, events)), work)

    def record(self, event: JobEvent) -> None:
        """Write an event, and those of commits that are not written yet; return when it is done."""
        self._writes.set()
        noting, self._noting = self._noting, None
        if noting is not None:
            noting.result()
        showing = in_background("geneva-show", self._show_commit) if self._unwritten else None
        self._unwritten.append(self._numbered(event))
        self._write_events()
        if showing is not None:
            showing.result()

    def note_commit(self, event: JobEvent) -> None:
        """Let others know of a commit, while the job goes on: it is several requests to a store."""
        self._unwritten.append(self._numbered(event))
        if self._noting is None or self._noting.done():
            self._writes.clear()
            self._noting = in_background("geneva-history", self._note_commits)

    def _note_commits(self) -> None:
        # The last commit of a job, or its only one, goes on record together with its end.
        pause = _NOTE_SECONDS_REMOTE if self._history.is_remote else _NOTE_SECONDS
        while self._unwritten and not self._writes.wait(pause):
            with logging_trouble("note a commit of", self._job_id):
                self._write_events()
            self._show_commit()

    def _show_commit(self) -> None:
        """Let the user's own handle see what was committed. One of a dropped table can't."""
        try:
            self._on_commit()
        except Exception as error:
            if not is_damage(error):
                raise
            _LOG.warning("Could not show a commit of job %s: %s", self._job_id, plain(error))

    def _write_events(self) -> None:
        events: list[JobEvent] = []
        while self._unwritten:
            events.append(self._unwritten.popleft())
        self._history.append(events)

    def _numbered(self, event: JobEvent) -> JobEvent:
        return replace(event, seq=next(self._numbers))

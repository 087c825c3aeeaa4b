"""Bars in a notebook: one display that is updated in place. Needs IPython, and no widgets.

(Rich's live displays in Jupyter need ipywidgets, and without it show a warning and no bars.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from geneva.execution.jobs.progress import JobProgress
from geneva.render import html
from geneva.render.plain import plain
from geneva.render.text import count

_REDRAW_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _Display:
    """Bars as HTML, and as text for what shows no HTML, such as `jupyter console`."""

    page: html.Html
    text: str

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return self.text


class NotebookBars:
    """The three bars of a job as HTML."""

    def __init__(self, title: str) -> None:
        """Prepare; nothing is shown before the first progress."""
        self._title = title
        self._last: JobProgress | None = None
        self._handle: Any = None
        self._drawn_at = 0.0
        self._phase = ""

    def __enter__(self) -> NotebookBars:
        """Start to listen."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state on the page."""
        if self._last is not None:
            self._draw(self._last)

    def __call__(self, progress: JobProgress) -> None:
        """Show, a few times a second at most."""
        self._last = progress
        if time.monotonic() - self._drawn_at >= _REDRAW_SECONDS:
            self._draw(progress)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Say, above the bars, what is going on while none of them moves."""
        self._phase = f": {text}"
        self._draw(self._last or JobProgress(total=0))
        try:
            yield
        finally:
            self._phase, self._drawn_at = "", 0.0

    def _draw(self, progress: JobProgress) -> None:
        self._drawn_at = time.monotonic()
        states = (
            ("checkpointed", progress.checkpointed),
            ("ready to commit", progress.ready_to_commit),
            ("committed", progress.committed),
        )
        title = f"{self._title}{self._phase}"
        numbers = ", ".join(f"{name} {rows:,}" for name, rows in states)
        text = f"{plain(title)}: {numbers} of {count(progress.total, 'row')}"
        shown = _Display(html.bars(title, states, progress.total), text)
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

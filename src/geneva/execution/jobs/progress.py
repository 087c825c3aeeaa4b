"""The progress of a running job: frozen snapshots, and the listeners that show them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

from geneva.execution.worker.task import Timings
from geneva.render.plain import plain

_IN_ROWS = ("total", "checkpointed", "kept_rows", "ready_to_commit", "committed", "rows_left")
"""Numbers of rows, however many columns get a value in each."""
_MAXIMA = ("slots", "worker_memory_bytes", "max_fragment_seconds", "start_seconds")
"""Numbers of which a job has the largest of its parts, and not the sum."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job is, in rows. A committed row counts as checkpointed too.

    Where a job fills several columns side by side, each of them is a part of the row.
    """

    total: int
    checkpointed: int = 0
    """Computed, and safe from a crash: by this job, or by an earlier one."""
    kept_rows: int = 0
    """Rows that were so when the job began."""
    ready_to_commit: int = 0
    """In fragments that are complete and wait for their commit."""
    committed: int = 0
    """Visible in the table."""
    udf_rows: int = 0
    """Rows the UDF was called for, in tasks that have ended; of several functions, added up."""
    functions: int = 0
    """How many functions were called, of a job that has several to call; else 0."""
    reused_rows: int = 0
    """Rows taken from an earlier run."""
    failed_rows: int = 0
    """Rows that failed and were skipped: they are NULL."""
    null_rows: int = 0
    """Rows of functions that returned NULL for every row of their column, which a missing `return`
    does; of all other functions none."""
    loaded_rows: int = 0
    """Rows that got a value which was looked up by their key."""
    unmatched_rows: int = 0
    """Rows whose key was looked up and is not in the source."""
    rows_leaving: int = 0
    """Rows of a view's source that are gone, or that its filter lets in no more."""
    retries: int = 0
    """Calls that were made again after a failure."""
    tokens: float = 0.0
    """Tokens that calls used, as the function reported them."""
    cost: float = 0.0
    """What calls cost, as the function reported it."""
    limit_updates: int = 0
    """Changes of the records by which workers share limits on calls."""
    lost_workers: int = 0
    """Times that Spark gave tasks up because their workers died."""
    fragments: int = 0
    fragments_committed: int = 0
    commits: int = 0
    tasks: int = 0
    rounds: int = 0
    skipped_fragments: int = 0
    """Fragments that were right already."""
    skipped_rows: int = 0
    """Rows that were right already, and were not computed again."""
    checkpoints: int = 0
    """Checkpoints that were made, records of whole fragments included."""
    slots: int = 0
    """Tasks that can run at once."""
    worker_seconds: float = 0.0
    """Time that tasks took, added up."""
    worker_memory_bytes: int = 0
    """The most memory that a worker had."""
    max_fragment_seconds: float = 0.0
    """The longest time that a fragment took, over all of its tasks."""
    rows_left: int = 0
    """Rows that others added or changed faster than the job could follow: left to the next."""
    seconds: float = 0.0
    start_seconds: float = 0.0
    """Seconds until the first task was handed out: Spark may have had to start."""
    commit_seconds: float = 0.0
    timings: Timings = field(default_factory=Timings)

    def __getitem__(self, name: str) -> Any:
        """One of the numbers by its name, as of a job that is looked up."""
        return self.metrics()[name]

    def plus(self, other: JobProgress) -> JobProgress:
        """This and another part of the same job; the total stays what was planned for the job."""
        numbers = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__dataclass_fields__
            if name not in ("total", "timings", "seconds", *_MAXIMA)
        }
        maxima = {name: max(getattr(self, name), getattr(other, name)) for name in _MAXIMA}
        return JobProgress(
            total=max(self.total, numbers["checkpointed"]),
            seconds=max(self.seconds, other.seconds),
            timings=self.timings.plus(other.timings),
            **numbers,
            **maxima,
        )

    def in_rows(self, rows: int, values: int) -> JobProgress:
        """The progress of columns that were added up, `values` in all, in the `rows` they are of.

        Values that came to the plan later are of as many columns.
        """
        if rows >= values:
            return self
        return replace(self, **{n: getattr(self, n) * rows // values for n in _IN_ROWS})

    def metrics(self) -> dict[str, Any]:
        """The numbers, flat, as the job history keeps them."""
        flat = asdict(self)
        timings = flat.pop("timings")
        return {
            **flat,
            "cost": round(self.cost, 9),
            **{f"{name}_seconds": round(value, 4) for name, value in timings.items()},
            "rows_per_second": self._per_second(self._rows_done, 1),
            "checkpoints_per_second": self._per_second(self.checkpoints, 3),
            "worker_utilization": self.worker_utilization,
            "fragment_seconds": round(self.worker_seconds / max(1, self.fragments), 4),
            "eta_seconds": self.eta_seconds,
        }

    @property
    def _rows_done(self) -> int:
        """Rows that this job has computed so far: those that running tasks have saved, too."""
        return max(self.udf_rows, self.checkpointed - self.kept_rows)

    def _per_second(self, number: int, digits: int) -> float:
        return round(number / self.seconds, digits) if self.seconds else 0.0

    @property
    def worker_utilization(self) -> float:
        """The share of their time that slots were busy, by the tasks that have ended; up to 1."""
        available = self.slots * self.seconds
        return round(min(1.0, self.worker_seconds / available), 3) if available else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the end, at the speed so far; None while that is not known."""
        left = self.total - self.checkpointed
        if left <= 0:
            return 0.0
        computed = self.checkpointed - self.kept_rows
        worked = self.seconds - self.start_seconds
        return round(left * worked / computed, 1) if computed > 0 else None


_STATES = ("checkpointed", "ready to commit", "committed")


class ProgressListener(Protocol):
    """Is called with every change of a job's progress."""

    def __call__(self, progress: JobProgress) -> None:
        """Take the new state. Must be quick, and must not raise."""


def wants_bars(setting: bool | None, /) -> bool:  # noqa: FBT001
    """Whether to draw bars: as set, else in a terminal or a notebook."""
    if setting is not None:
        return setting
    return sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


class ProgressBars:
    """Three live bars: checkpointed, ready to commit, committed."""

    def __init__(self, title: str) -> None:
        """Prepare; nothing is drawn before the first progress."""
        self._title = plain(title)
        self._display: Any = None
        self._bars: list[Any] = []

    def __enter__(self) -> ProgressBars:
        """Start to listen."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bars as they are, and give the terminal back."""
        if self._display is not None:
            self._display.stop()

    def __call__(self, progress: JobProgress) -> None:
        """Draw."""
        states = (progress.checkpointed, progress.ready_to_commit, progress.committed)
        if self._display is None:
            self._start(progress.total, states)
        for bar, rows in zip(self._bars, states, strict=True):
            self._display.update(bar, completed=rows, total=progress.total)
        self._display.refresh()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Say, where the first bar is, what is going on while none of them moves."""
        self._say(text)
        try:
            yield
        finally:
            self._say(_STATES[0])

    def _say(self, text: str) -> None:
        if self._display is None:
            self._start(None, (0, 0, 0))
        self._display.update(self._bars[0], description=f"{self._title} {text}")
        self._display.refresh()

    def _start(self, total: int | None, states: Sequence[int]) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._display = Progress(
            TextColumn("{task.description:<30}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._display.start()
        self._bars = [
            self._display.add_task(f"{self._title} {name}", total=total, completed=rows)
            for name, rows in zip(_STATES, states, strict=True)
        ]

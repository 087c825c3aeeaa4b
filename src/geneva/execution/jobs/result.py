"""What a job has done, as whoever ran it gets it."""

from __future__ import annotations

from collections.abc import Sequence

from geneva.execution.jobs.progress import JobProgress
from geneva.model.jobs import JobStatus
from geneva.render import html
from geneva.render.text import count


class JobResult(str):
    """The outcome of a job. It is its job id, so that it goes wherever an id goes.

    Printed, it says what was done. In an f-string it is its id, as in all other uses of a string.
    """

    status: JobStatus
    """How the job ended."""
    progress: JobProgress
    """What it did, in numbers."""
    followed: tuple[str, ...]
    """Jobs of the same work that were running already: this one waited for them."""

    unit: str
    """What its function was called for: a row, a source row of a chunker, or a partition."""

    __slots__ = ("followed", "progress", "status", "unit")

    def __new__(
        cls,
        job_id: str,
        status: JobStatus,
        progress: JobProgress,
        followed: Sequence[str] = (),
        unit: str = "row",
    ) -> JobResult:
        """Make a result."""
        self = super().__new__(cls, job_id)
        self.status, self.progress, self.followed = status, progress, tuple(followed)
        self.unit = unit
        return self

    @property
    def job_id(self) -> str:
        """The id, as a plain string."""
        return str.__str__(self)

    @property
    def rows_computed(self) -> int:
        """Rows for which the UDF was called; of several UDFs, those of each, added up."""
        return self.progress.udf_rows

    @property
    def rows_committed(self) -> int:
        """Rows whose new values are in the table, of one column or of several."""
        return self.progress.committed

    @property
    def rows_reused(self) -> int:
        """Rows whose value an earlier run had computed already."""
        return self.progress.reused_rows

    @property
    def rows_failed(self) -> int:
        """Rows on which the UDF failed, and which were skipped: they are NULL."""
        return self.progress.failed_rows

    @property
    def fragments_committed(self) -> int:
        """Fragments that got a new column file."""
        return self.progress.fragments_committed

    def __str__(self) -> str:
        """Say what was done, in a line."""
        return f"{self.status}: {self._in_words()} (job {self.job_id})"

    def _in_words(self) -> str:
        followed = f" after job {', '.join(self.followed)}, which did the same" * bool(
            self.followed
        )
        unmatched = self.progress.unmatched_rows
        missing = f", {unmatched:,} not in the source" * bool(unmatched)
        if not self.progress.total and not self.rows_committed:
            leaving = self.progress.rows_leaving
            gone = f"{count(leaving, 'source row')} gone, " * bool(leaving)
            return f"{gone}nothing to {'compute' if gone else 'do'}{missing}{followed}"
        if self.progress.loaded_rows or unmatched:
            return (
                f"{count(self.progress.loaded_rows, 'row')} loaded{missing} in "
                f"{self.progress.seconds:.1f} s{followed}"
            )
        reused = f", {self.rows_reused:,} reused" * bool(self.rows_reused)
        failed = f", {self.rows_failed:,} of them failed and skipped" * bool(self.rows_failed)
        null = self.progress.null_rows
        failed += f", {null:,} of them NULL" * bool(null)
        computed, committed = count(self.rows_computed, self.unit), f"{self.rows_committed:,}"
        if self.progress.functions > 1 and self.unit != "partition":
            computed = f"{self.rows_computed:,} values of {self.progress.functions} functions"
            committed = count(self.rows_committed, self.unit)
        # What is committed of partitions is hidden: the rows that came of them are not counted.
        committed = f", {committed} committed" * (self.unit != "partition")
        return (
            f"{computed} computed{reused}{failed}{committed} in "
            f"{self.progress.seconds:.1f} s{followed}"
        )

    def __format__(self, format_spec: str) -> str:
        """The id, formatted."""
        return format(self.job_id, format_spec)

    def __repr__(self) -> str:
        """Show the outcome at a glance."""
        return (
            f"JobResult({self.job_id!r}, {self.status}, computed={self.rows_computed}, "
            f"reused={self.rows_reused}, committed={self.rows_committed}, "
            f"seconds={self.progress.seconds:.2f})"
        )

    def _repr_html_(self) -> str:
        """Show the outcome in a notebook."""
        pairs = (
            ("status", self.status),
            ("rows computed", f"{self.rows_computed:,}"),
            ("rows reused", f"{self.rows_reused:,}"),
            ("rows failed", f"{self.rows_failed:,}" if self.rows_failed else None),
            ("rows committed", f"{self.rows_committed:,}"),
            ("seconds", f"{self.progress.seconds:.2f}"),
            ("after", ", ".join(self.followed) or None),
        )
        return html.section(f"Job {self.job_id}", html.facts(pairs))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with its numbers."""
        return JobResult, (self.job_id, self.status, self.progress, self.followed, self.unit)

"""The progress of a job: pure bookkeeping of what its tasks and commits report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from geneva.execution.jobs.progress import JobProgress, ProgressListener
from geneva.execution.worker.task import PartResult, TaskReport


class Ledger:
    """Keeps a job's progress over all of its rounds, and shows each change to the listeners."""

    def __init__(
        self,
        progress: JobProgress,
        listeners: Sequence[ProgressListener] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start from `progress`, with what a plan takes over. The job's time runs from now on."""
        self._progress, self._listeners, self._clock = progress, listeners, clock
        self._started = clock()
        self._rows_per_second: float | None = None
        self._fragment_seconds: dict[int, float] = {}
        self._max_fragment_seconds = 0.0
        self._rows_valued = 0

    @property
    def progress(self) -> JobProgress:
        """How far the job is."""
        return self._progress

    @property
    def seconds(self) -> float:
        """Seconds since the job began."""
        return self._clock() - self._started

    @property
    def rows_per_second(self) -> float | None:
        """Rows that one task computes per second, by the last report; None: none has come yet."""
        return self._rows_per_second

    def round_began(self) -> None:
        """Count a round."""
        self._set(rounds=self._progress.rounds + 1)

    def replanned(self, rows: int) -> None:
        """Set the total to what is committed and the `rows` that the new plan computes."""
        total = self._progress.committed + rows
        self._set(total=total, checkpointed=min(total, self._progress.checkpointed))

    def saved(self, rows: int) -> None:
        """Note that `rows` rows are safe by now, the committed ones included.

        The only way to count them, whoever has seen them: so the number never goes down, but with
        the total.
        """
        now = self._progress
        safe = min(now.total, max(now.checkpointed, rows))
        if safe != now.checkpointed:
            self._set(checkpointed=safe)

    @property
    def rows_all_null(self) -> int:
        """For how many rows the function was called, if it returned NULL for all of them; else 0.

        Rows on which it failed are not counted.
        """
        now = self._progress
        return 0 if self._rows_valued or now.reused_rows else now.udf_rows - now.failed_rows

    def all_null(self, rows: int) -> None:
        """Note that all values which the function returned are NULL."""
        self._set(null_rows=rows)

    def left_over(self, rows: int) -> None:
        """Note the rows that this job leaves to the next one."""
        self._set(rows_left=rows)

    def submitted(self, tasks: int) -> None:
        """Count tasks that were handed to the runner."""
        before = self._progress
        start = before.start_seconds if before.tasks else self.seconds
        self._set(tasks=before.tasks + tasks, start_seconds=start)

    def lost_workers(self) -> None:
        """Count a submission that was given up because its workers died."""
        self._set(lost_workers=self._progress.lost_workers + 1)

    def reused_file(self, rows: int) -> None:
        """Book a file that an earlier run staged, with a new value for `rows` rows."""
        now = self._progress
        self._set(
            ready_to_commit=now.ready_to_commit + rows,
            reused_rows=now.reused_rows + rows,
        )

    def reported(self, report: TaskReport) -> None:
        """Book what a task spent; its results are booked one by one."""
        rows = sum(result.rows_run for result in report.results)
        self._rows_valued += sum(result.rows_valued for result in report.results)
        # Of the rows alone: what a task costs besides them must not make tasks smaller.
        working = report.timings.of_rows + sum(rider.timings.udf for rider in report.riders)
        if rows and working > 0:
            self._rows_per_second = rows / working
        now = self._progress
        self._time_fragments(report)
        self._set(
            timings=now.timings.plus(report.timings),
            retries=now.retries + report.retries,
            tokens=now.tokens + report.tokens,
            cost=now.cost + report.cost,
            limit_updates=now.limit_updates + report.limit_updates,
            checkpoints=now.checkpoints + len(report.recorded),
            worker_seconds=now.worker_seconds + report.seconds,
            worker_memory_bytes=max(now.worker_memory_bytes, report.memory_bytes),
            max_fragment_seconds=self._max_fragment_seconds,
        )

    def _time_fragments(self, report: TaskReport) -> None:
        """Share the time of a task out among its fragments, by their rows."""
        rows = sum(result.rows.end - result.rows.start for result in report.results)
        for result in report.results:
            share = (result.rows.end - result.rows.start) / rows if rows else 0.0
            known = self._fragment_seconds.get(result.fragment_id, 0.0)
            seconds = self._fragment_seconds[result.fragment_id] = known + report.seconds * share
            self._max_fragment_seconds = max(self._max_fragment_seconds, seconds)

    def slots(self, number: int) -> None:
        """Note how many tasks can run at once."""
        if number > self._progress.slots:
            self._set(slots=number)

    def failed(self, rows: int) -> None:
        """Book rows that were skipped."""
        self._set(failed_rows=self._progress.failed_rows + rows)

    def computed(self, *results: PartResult, calls: int) -> None:
        """Book what some parts took, for `calls` rows of which the UDF was called."""
        now = self._progress
        reused = sum(result.rows_reused for result in results)
        self._set(
            udf_rows=now.udf_rows + calls,
            reused_rows=now.reused_rows + reused,
            checkpoints=now.checkpoints + sum(len(result.checkpoints) for result in results),
        )

    def assembled(self, *, calls: int) -> None:
        """Book fragments that were put together of ranges which are booked already.

        Only rows of damaged checkpoints were computed again.
        """
        self._set(udf_rows=self._progress.udf_rows + calls)

    def staged(self, rows: int) -> None:
        """Book files that are ready to be committed, with a new value for `rows` rows."""
        self._set(ready_to_commit=self._progress.ready_to_commit + rows)

    def committed(
        self, *, files: int, rows: int, lost_rows: int, seconds: float, unmatched: int = 0
    ) -> None:
        """Book a commit: `rows` are in the table now, `lost_rows` no longer fit it.

        `unmatched`: how many of those in the table have a key that is not in the source.
        """
        now = self._progress
        self._set(
            committed=now.committed + rows,
            unmatched_rows=now.unmatched_rows + unmatched,
            ready_to_commit=now.ready_to_commit - lost_rows,
            fragments_committed=now.fragments_committed + files,
            commits=now.commits + 1,
            commit_seconds=now.commit_seconds + seconds,
        )

    def deleted(self, *, files: int, rows: int) -> None:
        """Take back what was booked for files that somebody has deleted since."""
        now = self._progress
        self._set(
            committed=now.committed - rows,
            ready_to_commit=now.ready_to_commit - rows,
            fragments_committed=now.fragments_committed - files,
        )

    def _set(self, **changes: object) -> None:
        self._progress = replace(self._progress, seconds=self.seconds, **changes)  # type: ignore[arg-type]
        for listener in self._listeners:
            listener(self._progress)

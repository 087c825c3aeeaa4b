"""How many rows the next batch has, and after which batch a checkpoint is due."""

from __future__ import annotations

import time

from geneva.execution.worker.records import Computed, Durable, Result
from geneva.execution.worker.task import ColumnWork
from geneva.planning.batching import CallCost
from geneva.planning.sizing import BatchRule, Limit

MAX_UNSAVED_BYTES = 64 * 1024 * 1024
"""Results held for the next checkpoint; more are made durable early, to bound memory."""

_FILE_SECONDS = 3.0
"""Where a fragment takes no longer than this, by the speed of its rows so far, large results are
durable by its file: they are written once, and not in checkpoints as well, to bound memory."""
_FILE_ROWS = 4 * 1024 * 1024
"""Not of more rows: 16 bytes of each are held, to read them back from the file."""


class Deadline:
    """When a task has worked for as long as it may. The setting up of a function is not counted."""

    def __init__(self, limit: Limit | None = None, rows: int = 0) -> None:
        """Begin to count when the first of its `rows` are computed."""
        self._limit, self._rows, self._rows_run = limit, rows, 0
        self._began: float | None = None
        self._is_over = False

    def start(self) -> None:
        """Count from now on, if that is not so yet."""
        if self._began is None:
            self._began = time.monotonic()

    def ran(self, rows: int) -> None:
        """Count rows that are computed."""
        self._rows_run += rows

    @property
    def is_over(self) -> bool:
        """Whether no other part should be begun. Once that is so, it stays so."""
        limit = self._limit
        if limit is not None and self._began is not None and self._rows_run and not self._is_over:
            seconds = time.monotonic() - self._began
            rest = seconds * (self._rows - self._rows_run) / self._rows_run
            self._is_over = seconds > limit.seconds and rest > limit.max_rest
        return self._is_over

    @property
    def ends_part(self) -> bool:
        """Whether the rest of the part should be given back."""
        return self._limit is not None and self._limit.in_fragments and self.is_over


class Pacing:
    """Follows what batches take, over all parts of a task, and what is not durable yet.

    It decides on checkpoints before the writer sees a result, so that batches can end where
    checkpoints do.
    """

    rows: int
    """How many rows there are since a checkpoint of a given size ended, or the count began.

    One that is made before it has that size, because of its bytes or by time, doesn't change where
    the next one ends: batches are cut in advance, and end there.
    """

    def __init__(self, work: ColumnWork) -> None:
        """Know nothing of the function's speed yet."""
        self._work = work
        self._max_rows: int | None = None
        self._checkpoint_seconds = 0.0
        self.begin(1)

    def begin(self, window: int, file_rows: int = 0) -> None:
        """Go on with another part, which is read `window` rows at a time.

        `file_rows`: how many rows it has, if its column file may stand for their checkpoints.
        """
        self._rule = self.rule_for(window)
        asked_for = self._rule.largest_checkpoint is not None or self._rule.flush_is_asked_for
        self._file_rows = 0 if asked_for or file_rows > _FILE_ROWS else file_rows
        self._is_by_file = False
        self._part_rows, self._part_seconds = 0, 0.0
        self.restart()

    def rule_for(self, window: int) -> BatchRule:
        """The rule for a part that is read `window` rows at a time."""
        return BatchRule.of(self._work.sizes, window, self._work.flush_seconds)

    def restart(self) -> None:
        """Count from here: nothing waits for a checkpoint."""
        self.rows = self._unsaved_rows = self._bytes = 0
        self._seconds = 0.0

    def checkpointed(self) -> None:
        """Go on behind a checkpoint: all that was counted is in it, or in those before it."""
        rows, full = self.rows, self._rule.largest_checkpoint
        self.restart()
        self.rows = rows % full if full is not None else 0

    @property
    def has_exact_batches(self) -> bool:
        """Whether the user gave the size of batches: only the last one of a part has fewer rows."""
        return self._work.sizes.batch_size is not None

    def batch_rows(self, rule: BatchRule, cost: CallCost, rows_before: int) -> int:
        """How many of the next rows go into one batch, given what calls cost.

        `rows_before`: rows since the last checkpoint, when the batch will be run.
        """
        size, full = self._full_batch(rule, cost), rule.largest_checkpoint
        return size if full is None else min(size, full - rows_before % full)

    def rows_behind_batches(
        self, rule: BatchRule, cost: CallCost, rows_before: int, rows: int
    ) -> int:
        """How many of the next `rows` are left when as many batches as they make are cut."""
        size, full = self._full_batch(rule, cost), rule.largest_checkpoint
        if full is not None and rows >= (room := full - rows_before % full):
            rows = (rows - room) % full  # a checkpoint ends with a batch
        return rows % size

    def _full_batch(self, rule: BatchRule, cost: CallCost) -> int:
        """How many rows a batch has where no checkpoint ends it."""
        is_given = rule.first == rule.max_rows
        size = rule.first if is_given else rule.batch_rows(cost.next_rows())
        if self._max_rows is not None:
            size = max(rule.first, min(size, self._max_rows))
        return max(1, size)

    @property
    def rows_to_checkpoint(self) -> int | None:
        """How many rows the checkpoint that is being filled has room for; None: by time."""
        full = self._rule.largest_checkpoint
        return full - self.rows if full is not None else None

    def ran(self, rows: int, nbytes: int) -> None:
        """Learn from a batch that gave `nbytes`: one may give half of what may be held."""
        self._max_rows = max(1, MAX_UNSAVED_BYTES // 2 * rows // max(nbytes, 1))

    def due(self, result: Computed | Result) -> Durable:
        """Count a result; say when it and those before it should be made durable."""
        self.rows += result.num_rows
        self._unsaved_rows += result.num_rows
        self._bytes += result.nbytes
        self._seconds += result.seconds
        self._part_rows += result.num_rows
        self._part_seconds += result.seconds
        if result.failures:
            self._file_rows = 0  # what happened to rows that were skipped is in no file
        # Another one like this is not to be held on top, and none where the file stands for it.
        is_full = self._is_by_file or self._bytes + result.nbytes > MAX_UNSAVED_BYTES
        self._is_by_file = is_full and self._is_soon_in_file
        if self._is_by_file:
            return Durable.BY_FILE
        due = self._rule.is_due(
            self._unsaved_rows, self._seconds, self._checkpoint_seconds, self.rows_to_checkpoint
        )
        return Durable.SOON if due or is_full else Durable.LATER

    @property
    def _is_soon_in_file(self) -> bool:
        """Whether the part will be in its file before much work could be lost, by its speed."""
        rows = max(self._file_rows, self._part_rows)
        seconds = self._part_seconds * rows / max(1, self._part_rows)
        return self._file_rows > 0 and seconds <= _FILE_SECONDS

    def saved(self, seconds: float) -> None:
        """Learn what a checkpoint costs."""
        self._checkpoint_seconds = seconds

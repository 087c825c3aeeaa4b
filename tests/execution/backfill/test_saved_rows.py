"""The rows of a job that are safe: from its plan on, while tasks run, and when it is stopped."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from driving import InlineRunner, MemoryCommitter, outcome_of, prepared_for
from geneva import Connection, Table
from geneva.errors import JobCancelledError
from geneva.execution.backfill import rounds
from geneva.execution.backfill.committer import Commit, Committer
from geneva.execution.backfill.control import JobControl
from geneva.execution.backfill.driver import run_backfill
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.backfill.saved import SavedRows
from geneva.execution.jobs.progress import JobProgress, ProgressListener
from geneva.execution.runner import InProcessRunner, Runner
from geneva.model.rows import RowRange
from support import Calls, counted, make_table, tripled

OFTEN = {"checkpoint_size": 5}
SIZES = [40, 30, 30]


@pytest.fixture
def table(local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Table:
    """A hundred rows, and a column whose function takes five milliseconds a row."""
    monkeypatch.setattr(rounds, "_WATCHED_POLL_SECONDS", 0.0)
    monkeypatch.setattr(rounds, "_POLL_COST_RATIO", 1)
    monkeypatch.setattr(rounds, "_WAIT_SECONDS", 0.03)

    def slow(id: int) -> int:
        time.sleep(0.005)
        return id

    table = make_table(local_db, SIZES)
    table.add_columns({"c": counted(calls, slow)})
    return table


def run(
    prepared: PreparedBackfill,
    *listeners: ProgressListener,
    runner: Runner | None = None,
    committer: Committer | None = None,
    **control: Any,
) -> list[int]:
    """Run a plan; return the rows that were shown to be safe, one after the other."""
    shown: list[int] = []
    made = JobControl(
        job_id="job",
        make_runner=lambda: runner or InProcessRunner(2),
        make_committer=lambda job_id, retries: committer or MemoryCommitter(),
        listeners=(lambda progress: shown.append(progress.checkpointed), *listeners),
        watch_checkpoints=True,
        **control,
    )
    try:
        run_backfill(prepared, made)
    except JobCancelledError:
        assert made.cancelled.is_set()
    return shown


def stopped(table: Table, *, at: int) -> list[int]:
    """Run a job that is cancelled when some rows are safe."""
    cancelled = threading.Event()

    def stop(progress: JobProgress) -> None:
        if progress.checkpointed >= at:
            cancelled.set()

    prepared = prepared_for(table, "c", **OFTEN, task_size=20)
    return run(prepared, stop, cancelled=cancelled)


def test_rows_move_while_tasks_run(table: Table) -> None:
    shown = run(prepared_for(table, "c", **OFTEN, task_size=100))
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == (0, 100)
    assert len({*shown}) > 4, "one report a fragment is not all"


def test_rows_move_in_a_fragment_of_which_a_range_was_reported(table: Table) -> None:
    """A range that one task has reported hides nothing of those that others are at."""
    shown = run(prepared_for(table, "c", **OFTEN, task_size=20, num_frags=1))
    assert shown == sorted(shown)
    assert [rows for rows in shown if 20 < rows < 40 and rows % 20]
    assert shown[-1] == 40


def test_a_stopped_job_has_the_rows_that_the_next_one_takes_over(table: Table) -> None:
    shown = stopped(table, at=10)
    assert shown == sorted(shown)
    kept = prepared_for(table, "c").plan.rows_reused
    assert 10 <= shown[-1] == kept < 100


def test_a_job_that_goes_on_begins_with_what_it_takes_over(table: Table, calls: Calls) -> None:
    stopped(table, at=10)
    first = prepared_for(table, "c", **OFTEN)
    kept = first.plan.rows_reused
    shown = stopped(table, at=kept + 10)
    assert shown == sorted(shown)
    assert shown[0] == kept
    again = prepared_for(table, "c", **OFTEN)
    calls.clear()
    shown = run(again)
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == (again.plan.rows_reused, 100)
    assert len(calls.rows) == 100 - again.plan.rows_reused


class LosingCommitter(MemoryCommitter):
    """Publishes nothing, and says of the first files that they no longer fit."""

    def commit_next(self, prepared: PreparedBackfill, *, flush: bool) -> Commit | None:
        files = [*self.ready]
        done = super().commit_next(prepared, flush=flush)
        if done is None or len(self.commits) > 1:
            return done
        return Commit(outcome_of((), files, moved_on=True), seconds=0.0)


def test_no_round_takes_rows_back(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [5, 5, 5])
    table.add_columns({"c": tripled(calls)})
    ends: list[JobProgress] = []
    prepared = prepared_for(table, "c")
    shown = run(prepared, ends.append, runner=InlineRunner(), committer=LosingCommitter())
    assert shown == sorted(shown)
    assert (ends[-1].rounds, ends[-1].total, ends[-1].checkpointed) == (2, 15, 15)


def test_a_row_that_is_seen_twice_counts_once(table: Table) -> None:
    saved = SavedRows(prepared_for(table, "c"))
    seen = []
    for fragment, first, last in ((0, 0, 10), (0, 5, 20), (0, 0, 40), (0, 0, 40), (1, 29, 30)):
        saved.add(fragment, [RowRange(first, last)])
        seen.append(saved.count)
    assert seen == [10, 20, 40, 40, 41]


def test_rows_that_are_asked_for_anew_are_not_safe_because_of_old_checkpoints(
    table: Table,
) -> None:
    options: dict[str, Any] = {"where": "id >= 0", "checkpoint_size": 5}
    table.backfill("c", **options)  # with a size that was asked for, checkpoints are kept
    saved = SavedRows(prepared_for(table, "c", **options))
    before = saved.count
    saved.look()
    assert saved.count == before

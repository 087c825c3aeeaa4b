"""Rounds of a job, with a runner and a committer of the tests' own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from driving import InlineRunner, MemoryCommitter, prepared_for
from geneva import Connection, Table
from geneva.errors import JobCancelledError, JobTimeoutError, UDFExecutionError, WorkerLostError
from geneva.execution.backfill.committer import Committer
from geneva.execution.backfill.control import JobControl
from geneva.execution.backfill.dispatch import Dispatcher
from geneva.execution.backfill.driver import run_backfill
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.jobs.progress import JobProgress
from geneva.planning.backfill import Action
from support import Calls, breakable, make_table, tripled

TASKS_OF_2, TASKS_OF_5 = {"task_size": 2}, {"task_size": 5}


@pytest.fixture
def table(local_db: Connection, calls: Calls) -> Table:
    """Three fragments of five rows, and a column that is not computed."""
    table = make_table(local_db, [5, 5, 5])
    table.add_columns({"c": tripled(calls)})
    return table


def run(
    prepared: PreparedBackfill, runner: InlineRunner, committer: Committer, **control: Any
) -> JobProgress:
    made = JobControl(
        job_id="job",
        make_runner=lambda: runner,
        make_committer=lambda job_id, retries: committer,
        **control,
    )
    return run_backfill(prepared, made)


def test_every_fragment_is_computed_and_committed_once(table: Table, calls: Calls) -> None:
    runner, committer = InlineRunner(), MemoryCommitter()
    progress = run(prepared_for(table, "c"), runner, committer)
    assert [sorted(ids) for ids in committer.commits] == [[0, 1, 2]]
    assert (progress.committed, progress.udf_rows, progress.rounds) == (15, 15, 1)
    assert (progress.commits, progress.commit_seconds) == (1, 0.25)
    assert progress.tasks == len(runner.submitted)
    assert calls.rows == list(range(15))


def test_a_fragment_that_tasks_share_is_assembled_from_their_checkpoints(table: Table) -> None:
    runner, committer = InlineRunner(), MemoryCommitter()
    progress = run(prepared_for(table, "c", num_frags=1, **TASKS_OF_2), runner, committer)
    shared = [task.parts for items in runner.submitted for task in items]
    assert [[(p.rows.start, p.rows.end) for p in parts] for parts in shared] == [
        [(0, 2)],
        [(2, 4)],
        [(4, 5)],
        [(0, 5)],
    ]
    assert committer.commits == [[0]]
    assert (progress.udf_rows, progress.checkpointed, progress.committed) == (5, 5, 5)
    ranges = {(key.rows.start, key.rows.end) for key in committer.checkpoints if key.rows}
    assert ranges == {(0, 2), (2, 4), (4, 5)}


def test_staged_files_of_an_earlier_job_need_no_runner(table: Table, calls: Calls) -> None:
    run(
        prepared_for(table, "c", batch_checkpoint_flush_interval_seconds=0.0, **TASKS_OF_2),
        InlineRunner(),
        MemoryCommitter(),
    )
    calls.clear()
    prepared = prepared_for(table, "c")
    reused = [p for p in prepared.plan.fragments if p.action is Action.REUSE]
    assert reused
    control = JobControl(
        job_id="next",
        make_runner=lambda: pytest.fail("nothing is to be computed"),
        make_committer=lambda job_id, retries: MemoryCommitter(),
    )
    progress = run_backfill(prepared, control)
    assert (progress.committed, progress.reused_rows, progress.udf_rows) == (15, 15, 0)
    assert calls.rows == []


def test_a_table_that_others_change_is_planned_anew_until_rounds_run_out(table: Table) -> None:
    committer, rounds = MemoryCommitter(moved_on=True), list[int]()
    control = JobControl(
        job_id="job",
        make_runner=InlineRunner,
        make_committer=lambda job_id, retries: committer,
        max_conflict_retries=2,
    )
    progress = run_backfill(prepared_for(table, "c"), control, lambda: rounds.append(1))
    assert (progress.rounds, len(committer.commits), len(rounds)) == (3, 3, 3)
    assert progress.rows_left == 15, "nothing was published, so that all rows are new"


def test_a_bounded_job_has_one_round(table: Table) -> None:
    committer = MemoryCommitter(moved_on=True)
    progress = run(prepared_for(table, "c", num_frags=2), InlineRunner(), committer)
    assert (progress.rounds, progress.committed) == (1, 10)


def test_what_is_finished_is_committed_when_a_task_fails(
    local_db: Connection, calls: Calls, tmp_path: Any
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("[7]")
    table = make_table(local_db, [5, 5, 5])
    table.add_columns({"c": breakable(calls, broken)})
    committer = MemoryCommitter()
    with pytest.raises(UDFExecutionError, match="can't do 7"):
        run(prepared_for(table, "c", **TASKS_OF_5, concurrency=1), InlineRunner(), committer)
    assert committer.commits == [[0]]


def test_what_ended_together_with_a_failure_is_committed_too(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [5] * 10)
    table.add_columns({"c": tripled(calls)})
    broken = [WorkerLostError("all died"), *[None] * 9]
    # Before anything is heard: all are handed out, and all have ended.
    runner, committer = InlineRunner(lambda number: broken[number - 1], slots=10), MemoryCommitter()
    with pytest.raises(WorkerLostError):
        run(prepared_for(table, "c", **TASKS_OF_5), runner, committer)
    assert [len(ids) for ids in committer.commits] == [9]


def test_lost_workers_end_the_job_when_they_noted_nothing(table: Table) -> None:
    runner = InlineRunner(fail=lambda number: WorkerLostError("gone") if number == 2 else None)
    committer, shown = MemoryCommitter(), list[JobProgress]()
    prepared = prepared_for(table, "c", **TASKS_OF_5, concurrency=1)
    with pytest.raises(WorkerLostError, match="gone"):
        run(prepared, runner, committer, listeners=(shown.append,))
    assert committer.commits == [[0]]
    assert shown[-1].lost_workers == 1


@pytest.mark.parametrize(("tries", "submissions"), [(1, 201), (4, 51), (None, 51)])
def test_a_job_is_given_up_after_so_many_dead_workers_however_often_spark_tries(
    table: Table, monkeypatch: pytest.MonkeyPatch, tries: int | None, submissions: int
) -> None:
    monkeypatch.setattr(Dispatcher, "_learned", lambda *_: True)
    lost = WorkerLostError("gone")
    lost.tries = tries
    runner = InlineRunner(fail=lambda number: lost)
    shown: list[JobProgress] = []
    prepared = prepared_for(table, "c", **TASKS_OF_5, concurrency=1)
    with pytest.raises(WorkerLostError, match=r"given up after 200.*gone"):
        run(prepared, runner, MemoryCommitter(), listeners=(shown.append,))
    assert shown[-1].lost_workers == submissions


def test_a_cancelled_job_stops_before_its_next_task(table: Table) -> None:
    cancelled, committer = threading.Event(), MemoryCommitter()

    def stop(progress: JobProgress) -> None:
        if progress.ready_to_commit:
            cancelled.set()

    prepared = prepared_for(table, "c", **TASKS_OF_5, concurrency=1)
    with pytest.raises(JobCancelledError, match="Job job was cancelled"):
        run(prepared, InlineRunner(), committer, cancelled=cancelled, listeners=(stop,))
    assert sum(map(len, committer.commits)) < 3
    assert committer.commits


def test_a_job_that_takes_too_long_is_stopped(table: Table) -> None:
    with pytest.raises(JobTimeoutError, match="within 0 s"):
        run(prepared_for(table, "c", timeout=0.0), InlineRunner(), MemoryCommitter())

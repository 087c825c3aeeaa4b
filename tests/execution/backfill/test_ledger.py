"""What tasks and commits report adds up, and every change is shown."""

from __future__ import annotations

from dataclasses import dataclass

from geneva.execution.backfill.ledger import Ledger
from geneva.execution.jobs.progress import JobProgress
from geneva.execution.worker.task import PartResult, TaskReport, Timings
from geneva.model.rows import RowRange


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def part(rows_run: int, rows_reused: int = 0) -> PartResult:
    return PartResult(
        fragment_id=0,
        rows=RowRange(0, rows_run + rows_reused),
        rows_run=rows_run,
        rows_reused=rows_reused,
        checkpoints=(),
    )


def test_a_job_from_its_plan_to_its_commit() -> None:
    clock, shown = Clock(), list[JobProgress]()
    ledger = Ledger(JobProgress(total=10, fragments=2), (shown.append,), clock)
    ledger.round_began()
    ledger.reused_file(4)
    ledger.submitted(1)
    clock.now += 2
    ledger.reported(TaskReport((part(5, 1),), timings=Timings(1.0, 4.0, 7.0, 9.0), retries=3))
    ledger.failed(1)
    ledger.computed(part(5, 1), calls=5)
    ledger.saved(10)
    ledger.staged(6)
    ledger.committed(files=2, rows=10, lost_rows=0, seconds=0.5)
    assert ledger.progress == JobProgress(
        total=10,
        checkpointed=10,
        ready_to_commit=10,
        committed=10,
        udf_rows=5,
        reused_rows=5,
        failed_rows=1,
        retries=3,
        fragments=2,
        fragments_committed=2,
        commits=1,
        tasks=1,
        rounds=1,
        seconds=2.0,
        commit_seconds=0.5,
        timings=Timings(1.0, 4.0, 7.0, 9.0),
    )
    assert len(shown) == 9
    assert shown[-1] is ledger.progress


def test_rows_that_no_longer_fit_the_table_are_to_do_again() -> None:
    ledger = Ledger(JobProgress(total=10))
    ledger.saved(10)
    ledger.staged(10)
    ledger.committed(files=1, rows=6, lost_rows=4, seconds=0.0)
    assert (ledger.progress.checkpointed, ledger.progress.ready_to_commit) == (10, 6)
    ledger.replanned(4)
    assert ledger.progress.total == 10
    ledger.left_over(4)
    assert ledger.progress.rows_left == 4


def test_an_assembled_fragment_counts_what_was_computed_again() -> None:
    ledger = Ledger(JobProgress(total=10))
    for _ in range(2):
        ledger.computed(part(5), calls=5)
    ledger.assembled(calls=1)
    assert ledger.progress.udf_rows == 11


def test_speed_is_of_the_last_report_that_computed_something() -> None:
    ledger = Ledger(JobProgress(total=10))
    assert ledger.rows_per_second is None
    ledger.reported(TaskReport((part(10),), timings=Timings(read=1.0, udf=2.0, write=50.0)))
    ledger.reported(TaskReport((part(0, 5),), timings=Timings(read=1.0)))
    assert ledger.rows_per_second == 5.0


def test_rows_are_read_while_others_are_computed() -> None:
    """What takes longer is the speed of a task, not both one after the other."""
    ledger = Ledger(JobProgress(total=30))
    for timings, speed in ((Timings(read=2.0, udf=2.0), 5.0), (Timings(read=4.0, udf=1.0), 2.5)):
        ledger.reported(TaskReport((part(10),), timings=timings))
        assert ledger.rows_per_second == speed


def test_rows_that_are_safe_stay_so() -> None:
    """Whoever counts them: some see more of them than others."""
    shown: list[JobProgress] = []
    ledger = Ledger(JobProgress(total=10, checkpointed=3, kept_rows=3), (shown.append,))
    ledger.round_began()
    for rows in (0, 5, 4, 5, 50):
        ledger.saved(rows)
    ledger.submitted(1)
    assert [progress.checkpointed for progress in shown] == [3, 5, 10, 10]
    ledger.replanned(8)
    assert (ledger.progress.checkpointed, ledger.progress.total) == (8, 8)


def test_what_was_there_before_says_nothing_of_the_speed() -> None:
    assert JobProgress(total=10, checkpointed=6, kept_rows=6, seconds=2.0).eta_seconds is None
    assert JobProgress(total=10, checkpointed=8, kept_rows=6, seconds=2.0).eta_seconds == 2.0
    waited = JobProgress(total=10, checkpointed=8, kept_rows=6, seconds=9.0, start_seconds=7.0)
    assert waited.eta_seconds == 2.0, "what Spark took to start is no speed"


def test_time_runs_from_the_beginning() -> None:
    clock = Clock()
    ledger = Ledger(JobProgress(total=1), clock=clock)
    clock.now += 7
    assert ledger.seconds == 7
    assert ledger.progress.seconds == 0
    ledger.lost_workers()
    assert (ledger.progress.seconds, ledger.progress.lost_workers) == (7, 1)

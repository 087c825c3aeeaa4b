"""The same backfill started again while it runs: the later job follows the earlier one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from geneva import JobStatus, connect
from geneva.config import Settings
from geneva.connection import Connection
from geneva.errors import ColumnChangedError, JobCancelledError, JobTimeoutError, UDFExecutionError
from geneva.execution.runner import InProcessRunner
from geneva.options import JobOptions
from geneva.table import Table
from processes import kill, start_script
from support import Calls, by_id, counted, make_table, tripled

ROWS = [3, 3, 3]


def wait_until(said: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def table(local_db: Connection, calls: Calls, gate: Path) -> Table:
    path = str(gate)

    def gated(id: int) -> int:
        while not Path(path).exists():
            time.sleep(0.01)
        if Path(path).read_text() == str(id):
            raise ValueError("no")
        return id * 3

    table = make_table(local_db, ROWS)
    table.add_columns({"c": counted(calls, gated)})
    return table


def elsewhere(db: Connection) -> Table:
    """The table, as another process opens it."""
    quiet = Settings(local_slots=2, progress=False)
    return connect(db.uri, runner=InProcessRunner, settings=quiet).open_table("t")


class TestTheSecond:
    def test_waits_says_so_and_computes_nothing(
        self,
        table: Table,
        local_db: Connection,
        calls: Calls,
        gate: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        first = table.backfill_async("c")
        wait_until(lambda: first.status() is JobStatus.RUNNING)
        second = elsewhere(local_db).backfill_async("c", concurrency=1, commit_granularity=1)
        wait_until(lambda: local_db.get_job(second.job_id).waiting_for == first.job_id)
        assert local_db.get_job(second.job_id).status is JobStatus.PENDING
        assert second.status() is JobStatus.PENDING
        gate.touch()
        done, nothing = first.result(30), second.result(30)
        assert calls.rows == list(range(9))
        assert (done.rows_computed, done.followed) == (9, ())
        assert (nothing.rows_computed, nothing.followed) == (0, (first.job_id,))
        assert nothing.status is JobStatus.DONE
        assert str(nothing).startswith(f"DONE: nothing to do after job {first.job_id}")
        assert f"Job {second.job_id} waits for job {first.job_id}" in caplog.text
        record = local_db.get_job(second.job_id)
        assert (record.status, record.waiting_for) == (JobStatus.DONE, None)
        assert record.metrics["waited_seconds"] >= 0
        assert "waiting" in [event.kind for event in record.events]

    def test_does_what_a_cancelled_one_has_left(
        self, local_db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        stop = str(tmp_path / "stop")

        def halting(id: int) -> int:
            while id == 5 and not Path(stop).exists():
                time.sleep(0.01)
            return id * 3

        table = make_table(local_db, [4, 4, 4])
        table.add_columns({"c": counted(calls, halting)})
        first = table.backfill_async("c", concurrency=1, commit_granularity=1, task_size=4)
        wait_until(lambda: first.progress().committed == 4)
        second = elsewhere(local_db).backfill_async("c")
        wait_until(lambda: second.status() is JobStatus.PENDING)
        first.cancel()
        Path(stop).touch()
        with pytest.raises(JobCancelledError):
            first.result(30)
        assert 4 <= second.result(30).rows_committed < 12
        assert calls.rows.count(0) == 1, "what was committed is not done again"
        assert by_id(table, "c") == {i: 3 * i for i in range(12)}

    def test_meets_the_same_error(
        self, table: Table, local_db: Connection, calls: Calls, gate: Path
    ) -> None:
        first = table.backfill_async("c", concurrency=1, commit_granularity=1, task_size=3)
        second = elsewhere(local_db).backfill_async("c", concurrency=1, task_size=3)
        wait_until(lambda: local_db.get_job(second.job_id).waiting_for)
        gate.write_text("4")
        for future in (first, second):
            with pytest.raises(UDFExecutionError) as raised:
                future.result(30)
            assert raised.value.job_id == future.job_id
        assert calls.rows.count(0) == 1

    @pytest.mark.slow
    def test_can_be_cancelled_and_times_out(
        self, table: Table, local_db: Connection, gate: Path
    ) -> None:
        first = table.backfill_async("c")
        cancelled = elsewhere(local_db).backfill_async("c")
        wait_until(lambda: local_db.get_job(cancelled.job_id).waiting_for)
        local_db.cancel_job(cancelled.job_id)
        with pytest.raises(JobCancelledError, match=f"waited for job {first.job_id}"):
            cancelled.result(30)
        with pytest.raises(JobTimeoutError, match=r"did not begin within 0\.2 s") as late:
            elsewhere(local_db).backfill("c", timeout=0.2)
        assert local_db.get_job(late.value.job_id or "").status is JobStatus.FAILED
        gate.touch()
        assert first.result(30).rows_computed == 9

    @pytest.mark.slow
    def test_after_a_death_it_goes_on_at_once(
        self, local_db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        table = make_table(local_db, [4])
        table.add_columns({"c": tripled(calls)})
        process = start_script(
            tmp_path / "process",
            f"""
            import time, geneva
            from geneva.execution.runner import InProcessRunner
            class Hanging(InProcessRunner):
                def submit(self, *args):
                    print("hangs", flush=True)
                    time.sleep(600)
            db = geneva.connect({local_db.uri!r}, runner=Hanging)
            db.open_table("t").backfill("c")
            """,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        second = table.backfill_async("c")
        wait_until(lambda: local_db.get_job(second.job_id).waiting_for)
        killed = time.monotonic()
        kill(process)
        assert second.result(30).rows_computed == 4
        assert time.monotonic() - killed < 10, "long before heartbeats would tell"
        assert calls.rows == list(range(4))


def test_of_many_at_once_each_row_is_computed_once(
    table: Table, local_db: Connection, calls: Calls, gate: Path
) -> None:
    futures = []
    lock = threading.Lock()

    def start() -> None:
        future = elsewhere(local_db).backfill_async("c")
        with lock:
            futures.append(future)

    threads = [threading.Thread(target=start) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gate.touch()
    results = [future.result(60) for future in futures]
    assert calls.rows == list(range(9))
    assert sum(result.followed == () for result in results) == 1
    assert sum(result.rows_computed for result in results) == 9


def test_one_that_ended_between_plan_and_start(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [4])
    table.add_columns({"c": tripled(calls)})
    table.backfill("c", where="id < 0")
    planned = table._job("c", None, JobOptions())
    clause = table._job("c", None, JobOptions(where="id < 2"))
    first = elsewhere(local_db).backfill("c")
    assert planned.run().followed == (first.job_id,)
    assert calls.taken() == [0, 1, 2, 3]
    again = elsewhere(local_db).backfill("c", where="id < 2")
    assert calls.taken() == [0, 1], "a clause computes right rows again"
    assert clause.run().followed == (again.job_id,)
    assert calls.taken() == [], "but not twice for two who asked at the same time"
    table.backfill("c", where="id < 2")
    assert calls.taken() == [0, 1]


@pytest.mark.parametrize("where", ["id < 5", "1 = 1"])
def test_the_same_clause(
    table: Table, local_db: Connection, calls: Calls, gate: Path, where: str
) -> None:
    first = table.backfill_async("c", where=where)
    wait_until(lambda: first.status() is JobStatus.RUNNING)
    second = elsewhere(local_db).backfill_async("c", where=where)
    wait_until(lambda: local_db.get_job(second.job_id).waiting_for)
    gate.touch()
    assert first.result(30).rows_computed == len(calls.rows) == (5 if where == "id < 5" else 9)
    assert second.result(30).rows_computed == 0


@pytest.mark.parametrize(
    "other", [{"where": "id < 5"}, {"num_frags": 1}, {"retry_failed": True}], ids=str
)
def test_other_work_does_not_wait(
    table: Table, local_db: Connection, gate: Path, other: dict[str, object]
) -> None:
    first = table.backfill_async("c")
    wait_until(lambda: first.status() is JobStatus.RUNNING)
    second = elsewhere(local_db).backfill_async("c", **other)  # type: ignore[arg-type]
    wait_until(lambda: second.status() is not JobStatus.PENDING)
    assert local_db.get_job(second.job_id).waiting_for is None
    gate.touch()
    assert second.result(30).followed == ()
    first.result(30)


def test_a_function_of_another_version_does_not_wait(
    table: Table, local_db: Connection, calls: Calls, gate: Path
) -> None:
    first = table.backfill_async("c")
    wait_until(lambda: first.status() is JobStatus.RUNNING)
    table.alter_columns({"path": "c", "udf": tripled(calls)})
    assert elsewhere(local_db).backfill("c").followed == ()
    gate.touch()
    with pytest.raises(ColumnChangedError, match="another UDF"):
        first.result(30)

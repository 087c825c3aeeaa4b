"""Many at once on one table: backfills in processes and threads, beside appends and compactions."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import geneva
from geneva import UDF, udf
from geneva.execution.runner import InProcessRunner
from geneva.model.jobs import JobStatus
from support import Calls, by_id, connect, make_table

LIMIT_SECONDS = 120
BACKFILL = """
    import sys, time
    from pathlib import Path
    from geneva.execution.runner import InProcessRunner
    from support import connect

    folder, column, group = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    table = connect(folder / "db", lambda: InProcessRunner(1)).open_table("t")
    print("ready", flush=True)
    sys.stdin.readline()
    result = table.backfill(column, commit_granularity=group)
    print(result.status.value, result.rows_computed, flush=True)
"""


def times(calls: Calls, factor: int, seconds: float = 0.0) -> UDF:
    """`factor` times the id, noted, and NULL for every seventh."""

    @udf(data_type=pa.int64(), input_columns=["id"], version=f"times-{factor}")
    def multiply(id: int) -> int | None:
        calls.note([id])
        time.sleep(seconds)
        return None if id % 7 == 0 else id * factor

    return multiply


def expected(ids: range, factor: int) -> dict[int, int | None]:
    return {i: None if i % 7 == 0 else i * factor for i in ids}


@dataclass(frozen=True)
class Stage:
    """A table of many fragments, and the logs of its columns' calls."""

    folder: Path
    db: geneva.Connection
    table: geneva.Table
    calls: dict[str, Calls]
    rows: int

    def check(self, column: str, factor: int) -> None:
        assert by_id(self.table, column) == expected(range(self.rows), factor)

    def computed_once(self, column: str) -> bool:
        return self.calls[column].rows == list(range(self.rows))


def make_stage(
    folder: Path, columns: int, fragments: int, rows: int = 4, seconds: float = 0.0
) -> Stage:
    db = connect(folder / "db", lambda: InProcessRunner(1))
    table = make_table(db, [rows] * fragments)
    names = [f"y{i}" for i in range(1, columns + 1)]
    calls = {name: Calls(str(folder / f"{name}.calls")) for name in names}
    table.add_columns({n: times(calls[n], i, seconds) for i, n in enumerate(names, 1)})
    return Stage(folder, db, table, calls, rows * fragments)


@contextmanager
def started(folder: Path, column: str, group: int) -> Iterator[subprocess.Popen[str]]:
    """A process that is about to backfill a column: it waits for a line."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "GENEVA_VERSION_CONFLICT_MAX_RETRIES": "10",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BACKFILL), str(folder), column, str(group)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def backfill_in_processes(stage: Stage, columns: list[str], group: int) -> list[tuple[str, int]]:
    """Backfill the columns, each in a process of its own, all at once; return status and rows."""
    with ExitStack() as stack:
        running = [stack.enter_context(started(stage.folder, c, group)) for c in columns]
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outcomes = []
        for process in running:
            output, errors = process.communicate(timeout=LIMIT_SECONDS)
            assert process.returncode == 0, errors
            status, rows = output.split()
            outcomes.append((status, int(rows)))
        return outcomes


def at_once(*actions: Callable[[], object]) -> list[object]:
    """Run the actions in threads that start together."""
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], object]) -> object:
        barrier.wait(LIMIT_SECONDS)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [f.result(LIMIT_SECONDS) for f in [pool.submit(run, a) for a in actions]]


@pytest.mark.slow
def test_nine_processes_backfill_nine_columns_of_one_table(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, columns=9, fragments=64, rows=2)
    columns = list(stage.calls)
    outcomes = backfill_in_processes(stage, columns, group=16)
    assert outcomes == [("DONE", stage.rows)] * 9
    for factor, column in enumerate(columns, 1):
        stage.check(column, factor)
        assert stage.computed_once(column)
        assert stage.table.plan_backfill(column).is_empty
    jobs = stage.db.list_jobs()
    assert sorted(job.column_name for job in jobs) == columns
    assert {job.status for job in jobs} == {JobStatus.DONE}
    lance.dataset(stage.table.ref.uri).validate()


@pytest.mark.slow
def test_two_processes_backfill_the_same_column(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, columns=1, fragments=16)
    outcomes = backfill_in_processes(stage, ["y1", "y1"], group=1)
    assert [status for status, _ in outcomes] == ["DONE", "DONE"]
    stage.check("y1", 1)
    assert max(Counter(stage.calls["y1"].rows).values()) <= 2
    assert stage.table.plan_backfill("y1").is_empty


@pytest.mark.slow
def test_nine_threads_backfill_nine_columns_of_one_table(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, columns=9, fragments=16)

    def backfill(column: str) -> Callable[[], object]:
        return lambda: stage.db.open_table("t").backfill(column, commit_granularity=4).status

    assert at_once(*map(backfill, stage.calls)) == [JobStatus.DONE] * 9
    for factor, column in enumerate(stage.calls, 1):
        stage.check(column, factor)
        assert stage.computed_once(column)


def test_two_threads_backfill_the_same_column(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, columns=1, fragments=16)

    def backfill() -> object:
        return stage.db.open_table("t").backfill("y1", commit_granularity=1).status

    assert at_once(backfill, backfill) == [JobStatus.DONE] * 2
    stage.check("y1", 1)
    assert max(Counter(stage.calls["y1"].rows).values()) <= 2


class Churn(threading.Thread):
    """Appends and compacts, again and again, until told to stop."""

    def __init__(self, stage: Stage, pause: float) -> None:
        super().__init__(daemon=True)
        self.stage, self.pause, self.rows = stage, pause, stage.rows
        self.stopped = threading.Event()
        self.error: BaseException | None = None
        self.compactions = 0

    def run(self) -> None:
        try:
            while not self.stopped.wait(self.pause):
                self._append()
                self._compact()
        except BaseException as error:
            self.error = error
            raise

    def _append(self) -> None:
        table = self.stage.db.open_table("t")
        table.add(pa.table({"id": pa.array(range(self.rows, self.rows + 3), pa.int64())}))
        self.rows += 3

    def _compact(self) -> None:
        try:
            self.stage.db.open_table("t").compact_files(target_rows_per_fragment=20)
            self.compactions += 1
        except OSError as error:
            # Lance's compaction loses the race against a commit now and then, and says so.
            if "conflict" not in str(error):
                raise

    def __enter__(self) -> Churn:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.join(LIMIT_SECONDS)


def check_churned(stage: Stage, churn: Churn, column: str, factor: int) -> None:
    """Whatever was appended after the last look is found by one more backfill; nothing else is."""
    assert churn.error is None
    assert churn.compactions
    values = by_id(stage.table, column)
    assert {i: values[i] for i in range(stage.rows)} == expected(range(stage.rows), factor)
    stage.db.open_table("t").backfill(column)
    assert by_id(stage.table, column) == expected(range(churn.rows), factor)
    assert stage.calls[column].rows == list(range(churn.rows))
    lance.dataset(stage.table.ref.uri).validate()


@pytest.mark.slow
def test_a_backfill_ends_while_somebody_appends_and_compacts(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, columns=1, fragments=32, seconds=0.01)
    with Churn(stage, pause=0.1) as churn:
        result = stage.table.backfill("y1", commit_granularity=2, task_size=8)
    assert result.status is JobStatus.DONE
    check_churned(stage, churn, "y1", 1)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_storm_of_backfills_appends_and_compactions(tmp_path: Path, slow_rounds: int) -> None:
    for number in range(slow_rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        stage = make_stage(folder, columns=4, fragments=64, seconds=0.003)
        columns = list(stage.calls)
        with Churn(stage, pause=0.2) as churn:
            outcomes = backfill_in_processes(stage, columns, group=4)
        assert [status for status, _ in outcomes] == ["DONE"] * len(columns)
        for factor, column in enumerate(columns, 1):
            check_churned(stage, churn, column, factor)

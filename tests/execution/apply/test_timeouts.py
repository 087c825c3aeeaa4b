"""A call that takes too long is stopped, in any kind of UDF; its worker goes on or is replaced."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import Retry, Skip, skip_on_error, udf
from geneva.errors import UDFTimeoutError
from geneva.execution.apply import timeouts
from support import Calls, by_id, counted, make_table

if TYPE_CHECKING:
    from geneva import Connection

BAD = 5


def sleeps(id: int) -> int:
    if id == BAD:
        time.sleep(60)
    return id


def spins(id: int) -> int:
    while id == BAD:
        pass
    return id


def swallows(id: int) -> int:
    while id == BAD:
        try:
            time.sleep(60)
        except Exception:  # noqa: BLE001
            continue
    return id


def stuck_in_c(id: int) -> int:
    """Native code that lets go of the interpreter, and heeds no signal."""
    if id == BAD:
        import threading

        while True:
            try:
                threading.Lock().acquire() and threading.Event().wait(60)
            except BaseException:  # noqa: BLE001
                continue
    return id


def holds_the_gil(id: int) -> int:
    """Native code that keeps the interpreter to itself: no Python runs in the process any more."""
    if id == BAD:
        import ctypes
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        ctypes.PyDLL(None).sleep(60)
    return id


@pytest.mark.parametrize("function", [sleeps, spins, swallows])
def test_a_hung_row_is_skipped(db: Connection, calls: Calls, function: Any) -> None:
    table = make_table(db, [20])
    table.add_columns({"c": udf(function, timeout=0.5, on_error=skip_on_error())})
    started = time.monotonic()
    table.backfill("c")
    assert time.monotonic() - started < 30
    assert by_id(table, "c") == {i: None if i == BAD else i for i in range(20)}
    (error,) = table.get_errors()
    assert (error.exception_type, error.row_address) == ("TimeoutError", BAD)
    assert "timeout=0.5" in error.message


def test_a_hung_row_fails_the_job(db: Connection) -> None:
    table = make_table(db, [20])
    table.add_columns({"c": udf(sleeps, timeout=0.3)})
    with pytest.raises(UDFTimeoutError, match=rf"row {BAD} .*longer than timeout=0.3 s"):
        table.backfill("c")
    assert [e.error_type for e in table.get_errors()] == ["TimeoutError"], "as a skipped one's is"


def test_a_hung_row_is_tried_again(local_db: Connection, calls: Calls) -> None:
    def slow_once(id: int) -> int:
        calls.note([id])
        if id == BAD and calls.rows.count(id) < 2:
            time.sleep(60)
        return id

    table = make_table(local_db, [10])
    rules = [Retry(TimeoutError, max_attempts=2, backoff=0.0)]
    table.add_columns({"c": udf(slow_once, timeout=0.3, on_error=rules)})
    result = table.backfill("c")
    assert by_id(table, "c") == {i: i for i in range(10)}
    assert result.progress.retries == 1


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_hung_batch_is_halved(db: Connection, calls: Calls, threads: int) -> None:
    def batches(id: pa.Array) -> pa.Array:
        if pc.any(pc.equal(id, BAD)).as_py():
            for _ in range(600):
                time.sleep(0.1)
        return id

    table = make_table(db, [16])
    column = counted(
        calls, batches, data_type=pa.int64(), timeout=0.4, on_error=[Skip(TimeoutError)]
    )
    table.add_columns({"c": column})
    table.backfill("c", intra_applier_concurrency=threads)
    assert by_id(table, "c") == {i: None if i == BAD else i for i in range(16)}


def test_a_slow_function_within_its_time_is_left_alone(local_db: Connection, calls: Calls) -> None:
    def slow(id: int) -> int:
        time.sleep(0.02)
        return id

    table = make_table(local_db, [50])
    table.add_columns({"c": counted(calls, slow, timeout=0.5)})
    table.backfill("c")
    assert calls.taken() == list(range(50))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("function", [stuck_in_c, holds_the_gil])
def test_a_worker_that_can_not_be_stopped_is_replaced(
    tmp_path: Any, calls: Calls, function: Any
) -> None:
    from support import connect

    table = make_table(connect(tmp_path / "db", None), [20])
    table.add_columns({"c": udf(function, timeout=0.5, on_error=skip_on_error())})
    started = time.monotonic()
    result = table.backfill("c")
    assert time.monotonic() - started < 120
    assert by_id(table, "c") == {i: None if i == BAD else i for i in range(20)}
    assert result.rows_failed == 1
    (error,) = table.get_errors()
    assert error.row_address == BAD
    assert error.exception_type == ("TimeoutError" if function is stuck_in_c else "WorkerDied")


# -- calls under a time limit, without a backfill


def naps(seconds: float) -> float:
    """Sleep in short steps: an exception that is set in a thread comes between them."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)
    return seconds


AS_A_WORKER = """
import pathlib, sys, time
from concurrent.futures import ThreadPoolExecutor
from geneva.execution.apply import timeouts

class Guard:
    def hung(self, row):
        print("hung", row, flush=True)

def naps():
    for _ in range(3_000):
        time.sleep(0.01)

def stubborn():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

timeouts.is_spark_worker = lambda: True

def attempt(function, seconds):
    try:
        print("returned", timeouts.guarded(function, seconds, Guard(), lambda: 7)(), flush=True)
    except TimeoutError as error:
        print(error, flush=True)
"""


def as_a_worker(code: str) -> tuple[int, list[str]]:
    """Run code in a process of its own: alarms and exits of a worker are not for this one."""
    done = subprocess.run(
        [sys.executable, "-c", AS_A_WORKER + code],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.splitlines()


class TestGuarded:
    def test_a_call_off_spark_is_left_behind(self) -> None:
        call = timeouts.guarded(naps, 0.1, None, lambda: None)
        assert call(0.0) == 0.0
        with pytest.raises(UDFTimeoutError, match=r"timeout=0\.1 s"):
            call(30.0)
        assert call(0.01) == 0.01, "the next call gets a thread of its own"

    def test_a_call_that_sleeps_on_leaves_the_interpreter_as_it_was(self) -> None:
        """Python 3.11 came to a stand under a profiler as long as the call slept."""
        script = """if True:
            import sys, time
            from geneva.errors import UDFTimeoutError
            from geneva.execution.apply.timeouts import guarded
            try:
                guarded(time.sleep, 0.1, None, lambda: None)(60)
            except UDFTimeoutError:
                calls = []
                sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name))
                (lambda: None)()
                sys.setprofile(None)
                print(calls.count("<lambda>"), flush=True)
        """
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
        )
        assert done.stdout.split() == ["2"], done.stderr

    def test_a_loop_that_is_left_behind_ends(self) -> None:
        ended = threading.Event()

        def spin() -> None:
            try:
                while True:
                    pass
            finally:
                ended.set()

        with pytest.raises(UDFTimeoutError):
            timeouts.guarded(spin, 0.1, None, lambda: None)()
        assert ended.wait(10)

    def test_what_the_function_raises_is_raised(self) -> None:
        with pytest.raises(ZeroDivisionError):
            timeouts.guarded(lambda x: 1 / x, 1.0, None, lambda: None)(0)

    @pytest.mark.parametrize("where", ["", "ThreadPoolExecutor(1).submit("])
    def test_a_call_in_a_worker_is_interrupted(self, where: str) -> None:
        """In the main thread by an alarm, in another one by an exception; the process goes on."""
        begin, end = (f"{where}attempt, ", ").result()") if where else ("attempt(", ")")
        code, lines = as_a_worker(f"{begin}naps, 0.5{end}\n{begin}lambda: 3, 0.5{end}")
        assert lines == ["the call took longer than timeout=0.5 s, and was stopped", "returned 3"]
        assert code == 0

    def test_a_call_that_can_not_be_stopped_is_noted_and_its_process_ends(self) -> None:
        assert as_a_worker("attempt(stubborn, 0.2)") == (79, ["hung 7"])

    @pytest.mark.parametrize(("seconds", "grace"), [(0.1, 0.5), (2.0, 2.0), (60.0, 5.0)])
    def test_the_time_that_a_call_has_to_end(self, seconds: float, grace: float) -> None:
        assert timeouts.grace(seconds) == grace

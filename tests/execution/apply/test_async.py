"""Async functions: many calls at a time, in order, each with its own timeout, retries and end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import Retry, Skip, chunker, skip_on_error, udf
from geneva.errors import UDFExecutionError, UDFOutputError, UDFTimeoutError
from geneva.execution.apply.batch import Applied, Applier
from geneva.execution.apply.event_loop import event_loop
from geneva.udf.declare import UDF
from support import Calls, by_id, connect, make_table

if TYPE_CHECKING:
    from geneva import Connection


def batch_of(rows: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(range(rows), pa.int64())})


def run(declared: UDF, rows: int, threads: int | None = None) -> Applied:
    output = pa.field("out", declared.data_type, declared.nullable)
    with Applier(declared, output, threads) as applier:
        return applier.run(batch_of(rows))


def values(declared: UDF, rows: int, threads: int | None = None) -> list[Any]:
    return run(declared, rows, threads).arrays[0].to_pylist()


class Gauge:
    """How many calls are under way, and how many there were at most."""

    def __init__(self) -> None:
        self.now = self.most = self.calls = self.cancelled = 0

    @contextlib.contextmanager
    def call(self) -> Any:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1


def waiting(gauge: Gauge, **options: Any) -> UDF:
    async def tripled(id: int) -> int:
        with gauge.call():
            await asyncio.sleep(0.001 * ((id * 7) % 5))
        return id * 3

    return udf(tripled, **options)


# -------------------------------------------------------------------------------- the calls


@pytest.mark.parametrize(("threads", "most"), [(None, 32), (1, 1), (5, 5), (1000, 100)])
def test_as_many_calls_wait_as_may_and_values_come_in_order(threads: int | None, most: int):
    gauge = Gauge()
    assert values(waiting(gauge), 100, threads) == [i * 3 for i in range(100)]
    assert (gauge.calls, gauge.most, gauge.now) == (100, most, 0)


def test_no_rows_no_calls():
    gauge = Gauge()
    assert values(waiting(gauge), 0) == []
    assert gauge.calls == 0


def test_a_slow_call_holds_back_no_other_calls():
    """The next batches' calls are made while the first one's slow call waits."""
    done: list[int] = []
    slow_may_end = asyncio.Event()

    async def sometimes_slow(id: int) -> int:
        if id == 0:
            await slow_may_end.wait()
        done.append(id)
        if len(done) == 40:  # five batches further on
            slow_may_end.set()
        return id

    declared = udf(sometimes_slow)
    with Applier(declared, pa.field("out", pa.int64()), 4) as applier:
        calls = applier.ahead(batch_of(60))
        assert calls is not None
        with calls:
            taken = [calls.take(10).arrays[0].to_pylist() for _ in range(6)]
    assert taken == [[*range(i, i + 10)] for i in range(0, 60, 10)]
    assert done.index(0) >= 40


def test_what_runs_ahead_is_bounded():
    """One call that never comes back doesn't fill the memory with what came after it."""
    gauge, ended = Gauge(), threading.Event()

    async def first_is_stuck(id: int) -> int:
        with gauge.call():
            await asyncio.sleep(0 if id else 0.3)
        return id

    declared = udf(first_is_stuck)
    with Applier(declared, pa.field("out", pa.int64()), 2) as applier:
        calls = applier.ahead(batch_of(5_000))
        assert calls is not None
        with calls:
            calls.take(1)
            assert 1 < gauge.calls < 200
            assert calls.take(4_999).arrays[0].to_pylist() == [*range(1, 5_000)]
    assert gauge.calls == 5_000
    assert not ended.is_set()


def test_functions_of_arrays_and_of_record_batches():
    gauge = Gauge()

    async def doubled(id: pa.Array) -> pa.Array:
        with gauge.call():
            await asyncio.sleep(0.002)
        return pc.multiply(id, 2)

    async def summed(batch: pa.RecordBatch) -> pa.Array:
        with gauge.call():
            await asyncio.sleep(0.002)
        return pc.add(batch.column("id"), 1)

    arrays = udf(doubled, data_type=pa.int64(), batch_size=10)
    assert values(arrays, 95) == [i * 2 for i in range(95)]
    assert (gauge.calls, gauge.most) == (10, 10)
    batches = udf(summed, data_type=pa.int64(), input_columns=["id"])
    assert values(batches, 500) == [i + 1 for i in range(500)]
    assert gauge.calls < 10 + 500, "calls grow with what they cost"


def test_slices_of_batches_are_taken_in_any_size():
    async def doubled(id: pa.Array) -> pa.Array:
        return pc.multiply(id, 2)

    declared = udf(doubled, data_type=pa.int64(), batch_size=10)
    with Applier(declared, pa.field("out", pa.int64())) as applier:
        calls = applier.ahead(batch_of(45))
        assert calls is not None
        with calls:
            parts = [calls.take(n).arrays[0] for n in (3, 10, 20, 12)]
    assert [v for part in parts for v in part.to_pylist()] == [i * 2 for i in range(45)]
    assert all(part.offset == 0 for part in parts)


@pytest.mark.parametrize("limit", [1, 2])
def test_calls_that_end_at_once_make_room_for_others(limit: int):
    """The end of a call is noted later than its result is there."""

    async def at_once(id: int) -> int:
        return id

    with Applier(udf(at_once), pa.field("y", pa.int64()), threads=limit) as applier:
        calls = applier.ahead(batch_of(40))
        assert calls is not None
        with calls:
            calls.may_start = 10
            assert calls.take(10).arrays[0].to_pylist() == list(range(10))
            assert calls.take(30).arrays[0].to_pylist() == list(range(10, 40))


def test_no_call_is_made_behind_the_checkpoint_that_is_filled():
    gauge = Gauge()
    with Applier(waiting(gauge), pa.field("out", pa.int64())) as applier:
        calls = applier.ahead(batch_of(100))
        assert calls is not None
        with calls:
            for start in range(0, 100, 20):
                calls.may_start = 20
                calls.take(5)
                calls.may_start = 15
                calls.take(15)
                assert gauge.calls == start + 20


# ----------------------------------------------------------------------- classes, made in the loop


class Client:
    """A client of a service: it wants to be made, used and closed in one running loop."""

    made = closed = 0

    def __init__(self, factor: int = 3) -> None:
        self.factor = factor

    async def setup(self) -> None:
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()
        Client.made += 1

    async def close(self) -> None:
        await asyncio.sleep(0)
        assert self.loop is asyncio.get_running_loop()
        Client.closed += 1

    async def __call__(self, id: int) -> int:
        assert self.loop is asyncio.get_running_loop()
        await asyncio.sleep(0)
        return id * self.factor


def test_a_class_is_made_and_closed_once_in_the_loop_of_its_calls():
    Client.made = Client.closed = 0
    declared = udf(Client, data_type=pa.int64())
    with Applier(declared(factor=5), pa.field("out", pa.int64())) as applier:
        for _ in range(3):
            assert applier.apply(batch_of(4)).to_pylist() == [0, 5, 10, 15]
        assert (Client.made, Client.closed) == (1, 0)
    assert (Client.made, Client.closed) == (1, 1)


def test_a_setup_that_fails_says_so():
    class Broken:
        async def setup(self) -> None:
            raise ConnectionError("no service")

        async def __call__(self, id: int) -> int:
            return id

    with pytest.raises(UDFExecutionError, match=r"could not be set up.*no service"):
        run(udf(Broken), 3)


def test_a_udf_can_still_be_awaited():
    async def plain(x: int) -> int:
        return x + 1

    async def both() -> list[int]:
        return await asyncio.gather(udf(plain)(1), udf(Client, data_type=pa.int64())(2)(10))

    assert asyncio.run(both()) == [2, 20]


def test_plain_and_async_are_different_functions_and_pickle():
    async def f(x: int) -> int:
        return x + 1

    def g(x: int) -> int:
        return x + 1

    declared = udf(f)
    assert declared.fingerprint != udf(g, name="f").fingerprint
    again = pickle.loads(pickle.dumps(declared))
    assert again.is_async
    assert (again.fingerprint, asyncio.run(again(1))) == (declared.fingerprint, 2)


# ------------------------------------------------------------------------------------- failures


def test_the_first_failing_row_is_the_one_that_is_named_and_the_rest_is_cancelled():
    gauge = Gauge()

    async def fails(id: int) -> int:
        with gauge.call():
            await asyncio.sleep(0.02 if id == 3 else 0.001 if id < 8 else 30)
            if id in (3, 5, 7):
                raise ValueError(f"bad {id}")
        return id

    with pytest.raises(UDFExecutionError, match="row 3 of the batch: ValueError: bad 3") as caught:
        run(udf(fails), 200)
    assert caught.value.failure.row == 3  # type: ignore[attr-defined]
    assert gauge.now == 0, "cancelled calls were awaited"
    assert gauge.cancelled > 0
    assert gauge.calls <= 40, "nothing was started after the failure"


def test_rows_are_skipped_and_retried_one_by_one():
    tries: dict[int, int] = {}

    async def flaky(id: int) -> int:
        tries[id] = tries.get(id, 0) + 1
        await asyncio.sleep(0)
        if id % 10 == 3 and tries[id] < 3:
            raise ConnectionError("again")
        if id % 10 == 4:
            raise ValueError("never")
        return id

    policy = [Retry(ConnectionError, max_attempts=3, backoff=0.001), Skip(ValueError)]
    applied = run(udf(flaky, on_error=policy), 100)
    assert applied.arrays[0].to_pylist() == [None if i % 10 == 4 else i for i in range(100)]
    assert [f.row for f in applied.failures] == [*range(4, 100, 10)]
    assert applied.retries == 20
    assert sum(tries.values()) == 120


def test_values_that_do_not_fit_are_failures_too():
    tries: dict[int, int] = {}

    async def wrong(id: int) -> Any:
        tries[id] = tries.get(id, 0) + 1
        return "x" if id == 2 and tries[id] < 2 else "y" if id == 4 else id

    with pytest.raises(UDFOutputError, match="row 2"):
        run(udf(wrong, data_type=pa.int64()), 6)
    tries.clear()
    policy = [Retry(UDFOutputError, max_attempts=2, backoff=0), Skip()]
    applied = run(udf(wrong, data_type=pa.int64(), on_error=policy), 6)
    assert applied.arrays[0].to_pylist() == [0, 1, 2, 3, None, 5]
    assert tries == {0: 1, 1: 1, 2: 2, 3: 1, 4: 2, 5: 1}


def test_rows_of_a_batch_function_are_found_by_halves():
    calls: list[int] = []

    async def picky(id: pa.Array) -> pa.Array:
        calls.append(len(id))
        if 13 in id.to_pylist():
            raise ValueError("13")
        return id

    declared = udf(picky, data_type=pa.int64(), batch_size=16, on_error=skip_on_error())
    applied = run(declared, 32)
    assert applied.arrays[0].to_pylist() == [None if i == 13 else i for i in range(32)]
    assert [f.row for f in applied.failures] == [13]
    assert len(calls) == 1 + 1 + 2 * 4


def test_a_call_that_takes_too_long_is_cancelled():
    gauge = Gauge()

    async def sleepy(id: int) -> int:
        with gauge.call():
            await asyncio.sleep(30 if id == 5 else 0)
        return id

    applied = run(udf(sleepy, timeout=0.05, on_error=skip_on_error()), 20)
    assert applied.arrays[0].to_pylist() == [None if i == 5 else i for i in range(20)]
    assert (applied.failures[0].row, applied.failures[0].exception_type) == (5, "TimeoutError")
    assert (gauge.cancelled, gauge.calls) == (1, 20)
    with pytest.raises(UDFTimeoutError, match=r"timeout=0\.05"):
        run(udf(sleepy, timeout=0.05), 20)
    assert gauge.now == 0


def test_a_timeout_of_the_functions_own_is_not_ours():
    async def own(id: int) -> int:
        async with asyncio.timeout(0.001):
            await asyncio.sleep(30)
        return id

    with pytest.raises(UDFExecutionError, match="TimeoutError"):
        run(udf(own, timeout=20), 1)


def test_exit_and_cancellation_from_inside_are_failures():
    async def exits(id: int) -> int:
        if id == 1:
            sys.exit(3)
        if id == 2:
            raise asyncio.CancelledError
        if id == 4:
            raise GeneratorExit
        return id

    applied = run(udf(exits, on_error=skip_on_error()), 5)
    kinds = ["SystemExit", "RuntimeError", "RuntimeError"]
    assert [f.exception_type for f in applied.failures] == kinds
    assert values(udf(exits, on_error=skip_on_error()), 5) == [0, None, None, 3, None]


def test_rows_in_messages_are_counted_as_in_those_of_plain_functions(local_db: Connection):
    async def fails(id: int) -> int:
        if id == 3:
            raise ValueError("no")
        return id

    table = make_table(local_db, (4,))
    table.add_columns({"y": udf(fails, batch_size=2)})
    with pytest.raises(UDFExecutionError) as raised:
        table.backfill("y")
    assert "row 3 (of rows [2, 4)): UDF 'fails' failed: ValueError: no" in str(raised.value)


def test_nothing_is_left_in_the_loop():
    gauge = Gauge()

    async def stuck(id: int) -> int:
        with gauge.call():
            await asyncio.sleep(30)
        return id

    declared = udf(stuck)
    with Applier(declared, pa.field("out", pa.int64())) as applier:
        calls = applier.ahead(batch_of(100))
        assert calls is not None
        threading.Timer(0.1, calls.close).start()
        with pytest.raises(Exception):  # noqa: B017, PT011  whatever: it was closed under it
            calls.take(100)
    for _ in range(100):
        if gauge.now == 0:
            break
        time.sleep(0.01)
    assert (gauge.now, gauge.cancelled) == (0, 32)

    async def left() -> int:
        return len(asyncio.all_tasks())

    assert event_loop().run(left()) == 1
    gc.collect()  # asyncio would complain here of tasks that were destroyed while pending


INTERRUPTED = """
import asyncio, os, signal, sys, threading
import pyarrow as pa
from geneva import udf
from geneva.execution.apply.batch import Applier

async def stuck(id: int) -> int:
    if id == 31:
        os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(30)
    finally:
        print("ended", flush=True)
    return id

applier = Applier(udf(stuck), pa.field("out", pa.int64()))
try:
    applier.run(pa.record_batch({"id": pa.array(range(50))}))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_ends_all_calls():
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["ended"] * 32 + ["interrupted"]
    assert "destroyed" not in done.stderr
    assert "never" not in done.stderr


# ------------------------------------------------------------------------------------- chunkers

SCHEMA = pa.schema([("word", pa.string())])


async def returned(text: str) -> list[dict[str, str]]:
    await asyncio.sleep(0)
    return [{"word": word} for word in text.split()]


async def yielded(text: str) -> AsyncIterator[dict[str, str]]:
    for word in text.split():
        await asyncio.sleep(0)
        yield {"word": word}


class Splitter:
    async def setup(self) -> None:
        self.at = " "

    async def __call__(self, text: str) -> AsyncIterator[dict[str, str]]:
        for word in text.split(self.at):
            yield {"word": word}


@pytest.mark.parametrize("function", [returned, yielded, Splitter])
def test_chunkers(local_db: Connection, function: Any):
    ids = {"new_table_enable_stable_row_ids": "true"}
    data = pa.table({"text": ["a b", "c"]})
    table = local_db.create_table("t", data, storage_options=ids)
    declared = chunker(function, output_schema=SCHEMA)
    bound = declared() if function is Splitter else declared
    assert asyncio.run(bound("x y")) == [{"word": "x"}, {"word": "y"}]
    view = local_db.create_udtf_view("v", source=table.query().select(["text"]), udtf=declared)
    view.refresh()
    assert sorted(view.to_arrow()["word"].to_pylist()) == ["a", "b", "c"]


def test_a_chunker_of_batches(db: Connection):
    @chunker(batch=True, output_schema=SCHEMA, input_columns=["text"])
    async def words(batch: pa.RecordBatch) -> pa.RecordBatch:
        await asyncio.sleep(0)
        return pa.record_batch({"word": batch["text"][0].as_py().split()})

    table = db.create_table("t", pa.table({"text": ["a b", "c"]}))
    view = db.create_udtf_view("v", source=table, udtf=words)
    view.refresh()
    assert sorted(view.to_arrow()["word"].to_pylist()) == ["a", "b", "c"]


# ----------------------------------------------------------------------------------------- jobs


def logged(calls: Calls, **options: Any) -> UDF:
    async def tripled(id: int) -> int:
        await asyncio.sleep(0.001)
        calls.note([id])
        return id * 3

    return udf(tripled, **options)


def test_a_backfill_calls_once_per_row(db: Connection, calls: Calls):
    table = make_table(db, [300, 5, 40])
    table.add_columns({"c": logged(calls)})
    assert table.backfill("c", checkpoint_size=64).rows_computed == 345
    assert by_id(table, "c") == {i: i * 3 for i in range(345)}
    assert calls.taken() == [*range(345)]
    table.add(pa.table({"id": [1000]}))
    table.backfill("c")
    assert calls.taken() == [1000]


def in_the_loop() -> int:
    async def left() -> int:
        return len(asyncio.all_tasks())

    return event_loop().run(left()) - 1


def test_small_fragments_share_the_calls_at_once(local_db: Connection, calls: Calls):
    """A task of many fragments has as many calls under way as it may, also over their borders."""

    async def waits(id: int) -> int:
        started = time.monotonic()
        await asyncio.sleep(0.05)
        calls.note([id], started)
        return id * 3

    table = make_table(local_db, [4] * 40)
    table.add_columns({"c": udf(waits)})
    table.backfill("c", concurrency=1, task_size=1000)
    assert by_id(table, "c") == {i: i * 3 for i in range(160)}
    assert calls.rows == [*range(160)]
    assert 4 < calls.most_at_once <= 32
    assert in_the_loop() == 0


def test_a_failure_cancels_what_runs_for_the_next_fragments(
    local_db: Connection, calls: Calls, tmp_path: Path
):
    cancelled = Calls(str(tmp_path / "cancelled"))

    async def fails(id: int) -> int:
        try:
            await asyncio.sleep(30 if id > 9 else 0.2)
        except asyncio.CancelledError:
            cancelled.note([id])
            raise
        calls.note([id])
        if id == 9:
            raise ValueError("no")
        return id

    table = make_table(local_db, [4] * 10)
    table.add_columns({"c": udf(fails)})
    with pytest.raises(UDFExecutionError, match="fragment 2, row 1"):
        table.backfill("c", concurrency=1, task_size=1000)
    assert calls.rows == [*range(10)]
    assert {10, 11, 12} <= set(cancelled.rows), "of the next fragments, too"
    assert in_the_loop() == 0
    filled = {i: v for i, v in by_id(table, "c").items() if v is not None}
    assert filled == {i: i for i in range(8)}, "the fragments before it are committed"


def test_a_failed_job_keeps_what_is_done(local_db: Connection, calls: Calls, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.touch()

    async def fragile(id: int) -> int:
        calls.note([id])
        await asyncio.sleep(0.001)
        if id == 250 and broken.exists():
            raise ValueError("can't do it")
        return id

    table = make_table(local_db, [300])
    table.add_columns({"c": udf(fragile)})
    with pytest.raises(UDFExecutionError, match="fragment 0, row 250"):
        table.backfill("c", concurrency=1, checkpoint_size=20)
    assert calls.taken() == [*range(260)], "none is started behind the checkpoint"
    broken.unlink()
    table.backfill("c", concurrency=1, checkpoint_size=20)
    assert calls.taken() == [*range(240, 300)], "only what no checkpoint holds"
    assert by_id(table, "c") == {i: i for i in range(300)}


def test_equal_inputs_share_a_call(local_db: Connection, calls: Calls):
    table = local_db.create_table("t", pa.table({"id": [1, 2, 1, 2, 3]}))
    table.add_columns({"c": logged(calls, memoize=True)})
    table.backfill("c", concurrency=1)
    assert table.to_arrow()["c"].to_pylist() == [3, 6, 3, 6, 9]
    assert calls.rows == [1, 2, 3]


@pytest.mark.spark
@pytest.mark.slow
def test_on_spark_with_a_worker_that_dies_and_one_that_blocks(tmp_path: Path, calls: Calls):
    marker = str(tmp_path / "killed")

    async def risky(id: int) -> int:
        calls.note([id])
        await asyncio.sleep(0.005)
        if id == 150 and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if id == 60:
            time.sleep(60)  # blocks the loop, and all calls with it
        if id == 70:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        return id

    db = connect(tmp_path / "db", None)
    table = make_table(db, [200])
    table.add_columns({"c": udf(risky, timeout=1.0, on_error=skip_on_error())})
    table.backfill("c", concurrency=1)
    assert by_id(table, "c") == {i: None if i in (60, 70) else i for i in range(200)}
    assert {error.row_address for error in table.get_errors()} == {60, 70}


@pytest.mark.spark
@pytest.mark.slow
def test_on_spark(tmp_path: Path, calls: Calls):
    db = connect(tmp_path / "db", None)
    table = make_table(db, [200, 100])
    table.add_columns({"c": logged(calls)})
    job = table.backfill_async("c")
    assert job.result().status == "DONE"
    assert by_id(table, "c") == {i: i * 3 for i in range(300)}
    assert calls.rows == [*range(300)]

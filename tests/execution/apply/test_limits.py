"""Limits on calls: so many a minute over all workers, pauses that a service asks for, budgets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import geneva
from api_server import serving
from geneva import RateLimit, Retry, Skip, udf
from geneva.errors import (
    BudgetExceededError,
    InvalidUDFError,
    JobCancelledError,
    JobTimeoutError,
    UDFExecutionError,
    UserInputError,
)
from geneva.execution.apply.batch import Applier
from geneva.execution.apply.limits import (
    Limiter,
    LocalState,
    TaskUsage,
    budget_name,
    rate_name,
)
from geneva.execution.apply.throttling import is_throttled, retry_after
from geneva.model.tables import Secrets
from geneva.storage.jobs.shared_state import SharedState, state_uri
from geneva.udf.declare import UDF
from geneva.udf.usage import Meter, metered
from s3_server import Bucket, bucket, s3_endpoint  # noqa: F401  fixtures
from support import Calls, by_id, connect, make_table, slow

if TYPE_CHECKING:
    from geneva import Connection


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def starts(limiter: Limiter, clock: Clock, calls: int, *, think: float = 0.0) -> list[float]:
    """When calls are made, one after the other, each `think` seconds after the last."""
    made = []
    for _ in range(calls):
        clock.now += limiter._start(())
        made.append(clock.now)
        clock.now += think
    return made


# ------------------------------------------------------------------------------------ the pace


def test_calls_are_spread_evenly():
    clock, state = Clock(), LocalState()
    limiter = Limiter(RateLimit(requests_per_minute=61), state, Meter(), clock)
    made = starts(limiter, clock, 5)
    assert [round(b - a, 6) for a, b in itertools.pairwise(made)] == [1.0] * 4


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_no_minute_has_more_calls_than_the_limit_whatever_the_number_of_workers(workers: int):
    clock, state, limit = Clock(), LocalState(), RateLimit(requests_per_minute=600)
    limiters = [Limiter(limit, state, Meter(), clock) for _ in range(workers)]
    free = [clock.now] * workers
    made: list[float] = []
    for turn in range(1500):
        worker = min(range(workers), key=free.__getitem__)
        clock.now = max(clock.now, free[worker])
        at = clock.now + limiters[worker]._start(())
        made.append(at)
        free[worker] = at + 0.001 * (turn * 37 % 400)  # calls of different lengths
    made.sort()
    for first in made[:: max(1, len(made) // 100)]:
        assert sum(1 for t in made if first <= t < first + 60) <= 600
    assert made[-1] - made[0] < 1.1 * 1500 / 10 + 1500 * 0.2 / workers, "and not many fewer"
    assert state.updates <= 1500


def test_fast_calls_share_one_request_to_the_store():
    clock, state = Clock(), LocalState()
    limiter = Limiter(RateLimit(requests_per_minute=60_000), state, Meter(), clock)
    starts(limiter, clock, 5000)
    assert state.updates < 30


def test_tokens_are_reserved_as_said_or_as_those_before():
    clock, state, meter = Clock(), LocalState(), Meter()
    said = RateLimit(tokens_per_minute=61, tokens=lambda: 5)
    made = starts(Limiter(said, state, meter, clock), clock, 3)
    assert [round(b - a, 6) for a, b in itertools.pairwise(made)] == [5.0, 5.0]

    clock, meter = Clock(), Meter()
    limiter = Limiter(RateLimit(tokens_per_minute=61), LocalState(), meter, clock)
    made = []
    for _ in range(4):
        clock.now += limiter._start(())
        made.append(clock.now)
        meter.add(tokens=10, cost=0)
    assert made[-1] - made[0] >= 20, "what was used is made up for"


def test_a_pause_holds_for_all():
    clock, state = Clock(), LocalState()
    one, other = (
        Limiter(RateLimit(requests_per_minute=6100), state, Meter(), clock) for _ in range(2)
    )
    one._start(())
    refused = SimpleError(retry_after=7)
    assert one._pause(refused, 1) == 7
    assert round(other._start(()), 2) >= 7
    with pytest.raises(ValueError, match="no refusal"):
        one._pause(ValueError("no refusal"), 1)
    with pytest.raises(SimpleError):
        one._pause(refused, 10)


class SimpleError(Exception):
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


HEADERS = Message()
HEADERS["Retry-After"] = "3"


@pytest.mark.parametrize(
    ("error", "throttled", "seconds"),
    [
        (urllib.error.HTTPError("u", 429, "too many", HEADERS, None), True, 3.0),
        (urllib.error.HTTPError("u", 500, "broken", HEADERS, None), False, 3.0),
        (SimpleError(status_code=429), True, None),  # openai
        (SimpleError(status=429, headers={"retry-after": "1.5"}), True, 1.5),  # aiohttp
        (  # requests, httpx
            SimpleError(
                response=SimpleNamespace(status_code=429, headers={"Retry-After-Ms": "250"})
            ),
            True,
            0.25,
        ),
        (SimpleError(retry_after=2), True, 2.0),
        (
            SimpleError(status=429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
            True,
            0.0,
        ),
        (SimpleError(status=429, headers={"Retry-After": "1e400"}), True, None),
        (ValueError("429"), False, None),
    ],
)
def test_errors_of_all_clients(error: Exception, throttled: bool, seconds: float | None):
    assert is_throttled(error) is throttled
    assert retry_after(error) == seconds


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests_per_minute": 0},
        {"tokens_per_minute": "many"},
        {"key": " "},
        {"key": 3},
        {"tokens": 7},
        {"max_attempts": 0},
    ],
)
def test_limits_that_cannot_be_meant(wrong: dict[str, Any]):
    with pytest.raises(InvalidUDFError, match=next(iter(wrong))):
        RateLimit(**wrong)
    with pytest.raises(InvalidUDFError, match="RateLimit"):
        udf(lambda x: x, data_type=pa.int64(), rate_limit=5)  # type: ignore[call-overload]


def test_a_limit_is_no_part_of_the_version():
    def f(x: int) -> int:
        return x

    assert udf(f).version == udf(f, rate_limit=RateLimit(requests_per_minute=5)).version


# --------------------------------------------------------------------------- the shared record


def test_changes_of_many_threads_are_all_kept(tmp_path: Path):
    uri = str(tmp_path / "state.lance")

    def work() -> None:
        state = SharedState(uri, Secrets())
        for _ in range(10):
            state.update(lambda record: record.update(n=record.get("n", 0) + 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert SharedState(uri, Secrets()).update(lambda record: record["n"]) == 40


@pytest.mark.s3
@pytest.mark.slow
def test_changes_on_an_object_store_are_all_kept(bucket: Bucket):  # noqa: F811
    def work() -> None:
        state = SharedState(f"{bucket.uri}/_geneva/limits/x.lance", Secrets(bucket.storage_options))
        for _ in range(5):
            state.update(lambda record: record.update(n=record.get("n", 0) + 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = SharedState(f"{bucket.uri}/_geneva/limits/x.lance", Secrets(bucket.storage_options))
    assert state.update(lambda record: record["n"]) == 20


# --------------------------------------------------------------------------------- 429, for real


def asking(url: str, **options: Any) -> UDF:
    def ask(id: int) -> int:
        fetch(f"{url}/{id}")
        return id * 2

    return udf(ask, **options)


def fetch(url: str) -> None:
    try:
        with urllib.request.urlopen(url) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        error.close()
        raise


def asking_async(url: str, **options: Any) -> UDF:
    async def ask(id: int) -> int:
        await asyncio.to_thread(fetch, f"{url}/{id}")
        return id * 2

    return udf(ask, **options)


@pytest.mark.parametrize("make", [asking, asking_async])
def test_refused_calls_are_made_again_and_not_counted_as_late(local_db: Connection, make: Any):
    with serving(refuse_first=5) as service:
        table = make_table(local_db, [20, 20])
        # The pause is longer than the timeout of a call: it doesn't count.
        declared = make(service.url, timeout=5.0, rate_limit=RateLimit(requests_per_minute=60_000))
        table.add_columns({"c": declared})
        result = table.backfill("c")
        assert by_id(table, "c") == {i: i * 2 for i in range(40)}
        assert (len(service.accepted), len(service.refused)) == (40, 5)
        assert result.rows_failed == 0
        assert result.progress.retries == 0, "no failures of the function"
        limits = Path(local_db.uri) / "_geneva" / "limits"
        assert not any(limits.iterdir()), "the job's records are gone with it"


@pytest.mark.slow
def test_a_service_that_refuses_forever_is_a_failure(local_db: Connection):
    with serving(refuse_first=1000, retry_after="0.001") as service:
        table = make_table(local_db, [3])
        limit = RateLimit(requests_per_minute=60_000, max_attempts=4)
        table.add_columns({"c": asking(service.url, rate_limit=limit)})
        with pytest.raises(UDFExecutionError, match="429"):
            table.backfill("c", concurrency=1)
        assert len(service.refused) == 4
        table.alter_columns(
            {"path": "c", "udf": asking(service.url, rate_limit=limit, on_error=[Skip()])}
        )
        assert table.backfill("c").rows_failed == 3
        assert len(service.refused) == 4 + 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "async", "threads"])
@pytest.mark.parametrize("end", ["cancel", "timeout"])
def test_the_end_of_a_job_ends_its_pauses(local_db: Connection, calls: Calls, kind: str, end: str):
    """A service that says to come back tomorrow: nobody waits for it, and no call is made then."""

    def refused(id: int) -> int:
        calls.note([id])
        raise SimpleError(retry_after=86_400)

    async def refused_later(id: int) -> int:
        return refused(id)

    table = make_table(local_db, (2, 2))
    limit = RateLimit(requests_per_minute=60_000)
    table.add_columns({"y": udf(refused_later if kind == "async" else refused, rate_limit=limit)})
    threads = {"intra_applier_concurrency": 2} if kind == "threads" else {}
    job = table.backfill_async("y", **threads, **({"timeout": 0.5} if end == "timeout" else {}))
    if end == "cancel":
        while not calls.count:
            time.sleep(0.01)
        job.cancel()
    with pytest.raises(JobCancelledError if end == "cancel" else JobTimeoutError):
        job.result(timeout=20)
    assert 1 <= calls.count <= 4
    assert not local_db._signals.limits(), "the job's record is gone with it"


def test_records_of_jobs_that_are_over_are_cleaned_up(local_db: Connection, calls: Calls):
    """Left by workers that went on a moment longer than their job, or by jobs that died."""
    table = make_table(local_db, [1])
    table.add_columns({"c": priced(calls)})
    done = table.backfill("c").job_id
    of_done = {rate_name(done, "a column"), budget_name(done)}
    kept = {rate_name(f"{done}-2", "c"), "key-openai"}
    folder = local_db._signals.limits_uri
    for name in of_done | kept:
        SharedState(state_uri(folder, name), Secrets()).update(lambda state: state.update(a=1.0))
    assert local_db._signals.limits() == of_done | kept
    assert local_db.cleanup_signals() == 1
    assert local_db._signals.limits() == kept
    assert local_db.cleanup_signals() == 0


def test_all_workers_share_the_limit(local_db: Connection):
    """Two tasks at once, 32 calls at once in each: 20 calls a second over both."""
    with serving() as service:
        table = make_table(local_db, [15, 15])
        limit = RateLimit(requests_per_minute=1200)
        table.add_columns({"c": asking_async(service.url, rate_limit=limit)})
        before = time.monotonic()
        table.backfill("c", task_size=15)
        assert len(service.accepted) == 30
        # Each of them has a moment of its own, 61 / 1200 seconds after the one before.
        assert max(service.accepted) - before >= 29 * 61 / 1200 - 0.01


def test_functions_with_one_key_share_a_limit(tmp_path: Path):
    db = connect(tmp_path / "db", None)
    usages = [TaskUsage(lambda name: states.setdefault(name, LocalState()), job) for job in "ab"]
    states: dict[str, LocalState] = {}
    keyed, own = (
        RateLimit(requests_per_minute=1, key="openai"),
        RateLimit(requests_per_minute=1),
    )
    for usage, limit in itertools.product(usages, (keyed, own)):
        usage.limiter(limit, "f")
    assert sorted(states) == ["job-a-rate-f", "job-b-rate-f", "key-openai"]
    assert db.uri


# -------------------------------------------------------------------------------------- budgets


def priced(calls: Calls, price: float = 1.0, **options: Any) -> UDF:
    def costly(id: int) -> int:
        calls.note([id])
        geneva.report_usage(tokens=7, cost=price)
        return id * 2

    return udf(costly, **options)


def priced_async(calls: Calls, price: float = 1.0, **options: Any) -> UDF:
    async def costly(id: int) -> int:
        calls.note([id])
        await asyncio.sleep(0.002)
        geneva.report_usage(tokens=7, cost=price)
        return id * 2

    return udf(costly, **options)


def priced_batch(calls: Calls, price: float = 1.0, **options: Any) -> UDF:
    def costly(id: pa.Array) -> pa.Array:
        calls.note(id.to_pylist())
        geneva.report_usage(tokens=7 * len(id), cost=price * len(id))
        return pa.array([i * 2 for i in id.to_pylist()])

    return udf(costly, data_type=pa.int64(), **options)


@pytest.mark.parametrize("make", [priced, priced_async, priced_batch])
def test_usage_is_in_the_metrics(local_db: Connection, calls: Calls, make: Any):
    table = make_table(local_db, [30, 10])
    table.add_columns({"c": make(calls, 0.5)})
    progress = table.backfill("c").progress
    assert (progress.tokens, progress.cost, progress.limit_updates) == (280, 20.0, 0)


@pytest.mark.parametrize(
    ("make", "threads"),
    [
        (priced, None),
        (priced_async, 4),
        (priced_batch, None),
        slow(priced, 4),
        slow(priced_async, None),
        slow(priced_batch, 4),
    ],
)
def test_a_job_stops_at_its_budget_and_the_next_goes_on(
    local_db: Connection, calls: Calls, make: Any, threads: int | None
):
    table = make_table(local_db, [100, 100, 100])
    table.add_columns({"c": make(calls)})
    options = {"concurrency": 1, "intra_applier_concurrency": threads}
    said = r"^The budget of max_cost=120 is spent: calls for column 'c' of table 't' .*"
    with pytest.raises(BudgetExceededError, match=said) as caught:
        table.backfill("c", max_cost=120, **options)
    done = calls.taken()
    assert len(done) == 120, "exactly what was paid for"
    job = local_db.get_job(caught.value.job_id or "")
    assert (job.status, job.metrics["cost"]) == ("FAILED", 120.0)
    assert "BudgetExceededError" in (job.error or "")
    filled = {i: v for i, v in by_id(table, "c").items() if v is not None}
    assert filled == {i: i * 2 for i in done}, "all of it is committed, of unfinished fragments too"
    with pytest.raises(BudgetExceededError):
        table.backfill("c", max_cost=50, **options)
    assert len(calls.rows) == 50
    table.backfill("c", **options)
    assert sorted(done + calls.taken()) == [*range(300)], "no row was paid for twice"
    assert by_id(table, "c") == {i: i * 2 for i in range(300)}


def test_two_workers_share_the_budget(local_db: Connection, calls: Calls):
    table = make_table(local_db, [100] * 6)
    table.add_columns({"c": priced(calls)})
    with pytest.raises(BudgetExceededError):
        table.backfill("c", max_cost=200)
    done = calls.taken()
    assert 150 <= len(done) <= 202
    table.backfill("c")
    assert sorted(done + calls.taken()) == [*range(600)]


def flaky(calls: Calls, log: Calls, kind: str, *, failures_cost: bool) -> UDF:
    """Costs 1 per row. Rows of 3 fail always, those of 5 the first two times."""

    def fails(ids: list[int]) -> bool:
        tried = calls.rows
        calls.note(ids)
        bad = any(i % 7 == 3 or (i % 7 == 5 and tried.count(i) < 2) for i in ids)
        if not bad or failures_cost:
            geneva.report_usage(cost=len(ids))
        if not bad:
            log.note(ids)
        return bad

    def checked(id: int) -> int:
        if fails([id]):
            raise ConnectionError("busy")
        return id * 2

    async def awaited(id: int) -> int:
        await asyncio.sleep(0)
        return checked(id)

    def batched(id: pa.Array) -> pa.Array:
        if fails(id.to_pylist()):
            raise ConnectionError("busy")
        return pa.array([i * 2 for i in id.to_pylist()])

    function: Any = {"plain": checked, "async": awaited, "batch": batched}[kind]
    policy = [Retry(ConnectionError, max_attempts=3, backoff=0.0001), Skip()]
    return udf(function, name="flaky", data_type=pa.int64(), input_columns=["id"], on_error=policy)


@pytest.mark.parametrize("failures_cost", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "async", "batch"])
def test_calls_that_are_made_again_have_to_be_affordable(
    local_db: Connection, tmp_path: Path, kind: str, threads: int, *, failures_cost: bool
):
    """Each job spends what it may, and no row that was paid for is computed again."""
    calls, log = Calls(str(tmp_path / "calls")), Calls(str(tmp_path / "log"))
    table = make_table(local_db, [60, 20])
    table.add_columns({"c": flaky(calls, log, kind, failures_cost=failures_cost)})
    jobs, share = 0, 4 if kind == "batch" and failures_cost else 1
    for jobs, budget in enumerate(itertools.cycle([8.0 * share, 33.0 * share, 10.0 * share])):
        assert jobs < 50
        options = {"concurrency": 1, "intra_applier_concurrency": threads}
        with contextlib.suppress(BudgetExceededError):
            table.backfill("c", max_cost=budget, **options)
        job = local_db.list_jobs()[0]
        assert job.metrics["cost"] <= budget
        filled = {i for i, value in by_id(table, "c").items() if value is not None}
        assert filled == set(log.rows), "all that was paid for is there"
        if job.status == "DONE":
            break
    assert jobs
    assert by_id(table, "c") == {i: None if i % 7 == 3 else i * 2 for i in range(80)}
    assert sorted(log.rows) == [i for i in range(80) if i % 7 != 3], "each row once"


@pytest.mark.parametrize("memoize", [True, False])
@pytest.mark.parametrize(("make", "threads"), [(priced, 1), (priced, 4), (priced_async, 4)])
def test_rows_around_one_that_is_not_called_again_are_kept(
    local_db: Connection, calls: Calls, tmp_path: Path, make: Any, threads: int, *, memoize: bool
):
    """Rows are cheap, so that many are called at once; two among them are dear, and fail."""
    again = str(tmp_path / "again")
    cheap = make(calls, 0.001)

    def dear(id: int) -> None:
        if id in (30, 31, 40) and not Path(again).exists():
            geneva.report_usage(cost=50)
            raise ConnectionError("busy")

    def plain(id: int) -> int:
        dear(id)
        return cheap.func(id)

    async def awaited(id: int) -> int:
        dear(id)
        return await cheap.func(id)

    function = awaited if cheap.is_async else plain
    policy = [Retry(ConnectionError, max_attempts=3, backoff=0.0001), Skip()]
    table = make_table(local_db, [100, 100])
    table.add_columns(
        {"c": udf(function, data_type=pa.int64(), on_error=policy, memoize=memoize)}  # type: ignore[call-overload]
    )
    options = {"concurrency": 1, "intra_applier_concurrency": threads}
    with pytest.raises(BudgetExceededError):
        table.backfill("c", max_cost=10, **options)
    done = calls.taken()
    assert len(done) > 40
    assert not {30, 31, 40} & {*done}
    filled = {i: v for i, v in by_id(table, "c").items() if v is not None}
    assert filled == {i: i * 2 for i in done}
    Path(again).touch()
    table.backfill("c", **options)
    assert sorted(done + calls.taken()) == [*range(200)], "no row was paid for twice"
    assert by_id(table, "c") == {i: i * 2 for i in range(200)}


def test_a_budget_that_is_enough_changes_nothing(local_db: Connection, calls: Calls):
    table = make_table(local_db, [50])
    table.add_columns({"c": priced(calls)})
    assert table.backfill("c", max_cost=1e9).rows_computed == 50
    assert calls.rows == [*range(50)]


def test_a_stale_column_keeps_its_old_values_where_the_budget_ends(
    local_db: Connection, calls: Calls
):
    table = make_table(local_db, [40])
    table.add_columns({"c": udf(lambda id: -id, data_type=pa.int64())})
    table.backfill("c")
    table.alter_columns({"path": "c", "udf": priced(calls)})
    with pytest.raises(BudgetExceededError):
        table.backfill("c", max_cost=10, concurrency=1)
    assert by_id(table, "c") == {i: i * 2 if i < 10 else -i for i in range(40)}
    assert table.plan_backfill("c").rows_to_run == 30
    table.backfill("c")
    assert calls.rows == [*range(40)]


def test_views_and_chains_have_one_budget(local_db: Connection, calls: Calls):
    ids = {"new_table_enable_stable_row_ids": "true"}
    table = local_db.create_table("t", pa.table({"id": range(20)}), storage_options=ids)
    view = local_db.create_materialized_view("v", table.query().select({"c": priced(calls)}))
    with pytest.raises(BudgetExceededError):
        view.refresh(budget=5, concurrency=1)
    assert len(calls.rows) == 5
    view.refresh()
    assert calls.rows == [*range(20)]


@pytest.mark.parametrize("wrong", [0, -1, "much", True])
def test_a_budget_is_a_number_above_zero(local_db: Connection, calls: Calls, wrong: Any):
    table = make_table(local_db, [1])
    table.add_columns({"c": priced(calls)})
    with pytest.raises(UserInputError, match="max_cost"):
        table.backfill("c", max_cost=wrong)


def test_reports_that_cannot_be_meant():
    for wrong in ({"tokens": -1}, {"cost": "much"}, {"cost": float("nan")}):
        with pytest.raises(UserInputError, match=next(iter(wrong))):
            geneva.report_usage(**wrong)
    geneva.report_usage(tokens=5, cost=0.1)  # outside of a job: nothing happens


def test_functions_under_a_timeout_report_too():
    def reports(x: int) -> int:
        geneva.report_usage(cost=1)
        return x

    meter = TaskUsage()
    for declared in (udf(reports, timeout=5.0), udf(reports)):
        with metered(meter), Applier(declared, pa.field("out", pa.int64())) as applier:
            applier.apply(pa.record_batch({"x": [1, 2, 3]}))
    assert meter.cost == 6


@pytest.mark.spark
@pytest.mark.slow
def test_on_spark_with_a_worker_that_dies(tmp_path: Path, calls: Calls):
    """Two worker processes keep one limit and one budget, one of them is killed meanwhile."""
    marker = str(tmp_path / "killed")
    with serving(refuse_first=3) as service:
        url = service.url

        def ask(id: int) -> int:
            calls.note([id])
            if id == 11 and not Path(marker).exists():
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with urllib.request.urlopen(f"{url}/{id}") as answer:
                answer.read()
            geneva.report_usage(cost=1)
            return id * 2

        db = connect(tmp_path / "db", None)
        table = make_table(db, [20, 20])
        table.add_columns({"c": udf(ask, rate_limit=RateLimit(requests_per_minute=1200))})
        before = time.monotonic()
        table.backfill("c", max_cost=1000, task_size=20)
        assert max(service.accepted) - before >= 42 * 61 / 1200
        assert by_id(table, "c") == {i: i * 2 for i in range(40)}
        assert len(service.refused) == 3

"""The life of the embedded session, and of the user's own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from cluster import run_script, wait_for
from geneva.errors import SparkUnavailableError
from geneva.execution.runner import Resources
from geneva.spark.embedded.settings import LocalOptions
from geneva.spark.runner import SparkRunner
from geneva.spark.sessions import active_session, cluster_session, embedded_session

# Workers can't import the tests: the functions below travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPTIONS = LocalOptions(slots=2, class_archive=False)


def double(number: int) -> str:
    return str(number * 2)


def wait_then_report(seconds: float) -> str:
    time.sleep(seconds)
    return f"slept {seconds}"


MOMENTS: dict[str, Callable[[SparkRunner], tuple[Any, str]]] = {
    "before the thread has it": lambda runner: (runner._threads, "submit"),
    "before its tags are set": lambda runner: (runner._kind, "tagged"),
    "before its tasks are made": lambda runner: (runner, "_surroundings"),
    "before Spark is asked": lambda runner: (runner._kind, "run"),
    "of tasks with shares": lambda runner: (runner, "_run_apart"),
}
"""What a job calls while it starts: where it is, and its name."""


@pytest.mark.spark
class TestEmbeddedSession:
    def test_is_one_per_process(self) -> None:
        session = embedded_session(OPTIONS)
        assert embedded_session() is session
        assert active_session() is session

    def test_keeps_the_users_interrupt_handler(self) -> None:
        embedded_session(OPTIONS)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    @pytest.mark.slow
    def test_takes_over_no_interrupt_handler_of_a_session_that_ended(self) -> None:
        from pyspark.sql import SparkSession

        embedded_session(OPTIONS).stop()
        mine = SparkSession.builder.master("local[1]").appName("mine").getOrCreate()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        mine.stop()
        embedded_session(OPTIONS)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    @pytest.mark.slow
    def test_a_session_of_a_cluster_keeps_the_users_interrupt_handler(self) -> None:
        def own(*_: object) -> None: ...

        embedded_session(OPTIONS).stop()
        signal.signal(signal.SIGINT, own)
        try:
            cluster_session("local[1]", {}).stop()
            assert signal.getsignal(signal.SIGINT) is own
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @pytest.mark.slow
    def test_stopped_session_is_replaced(self) -> None:
        first = embedded_session(OPTIONS)
        stale = SparkRunner(first)
        first.stop()
        assert active_session() is None
        with pytest.raises(SparkUnavailableError, match="stopped"):
            stale.submit(double, [1]).result()
        second = embedded_session(OPTIONS)
        assert second is not first
        assert SparkRunner(second).submit(double, [1]).result() == ["2"]

    @pytest.mark.slow
    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_session_that_is_stopped_meanwhile_is_said(
        self, moment: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session = embedded_session(OPTIONS)
        runner = SparkRunner(session)
        place, name = MOMENTS[moment](runner)
        real = getattr(place, name)

        def stopped_first(*args: Any, **options: Any) -> Any:
            session.stop()
            return real(*args, **options)

        monkeypatch.setattr(place, name, stopped_first)
        wanted = Resources(num_cpus=2) if moment == "of tasks with shares" else Resources()
        with pytest.raises(SparkUnavailableError, match="session was stopped") as caught:
            runner.submit(double, [1, 2], wanted).result(timeout=60)
        assert "What was computed is kept" in str(caught.value)
        assert "NoneType" not in str(caught.value)
        for ask in (lambda: runner.slots, lambda: runner.ship_modules([__file__])):
            with pytest.raises(SparkUnavailableError, match="session was stopped"):
                ask()

    @pytest.mark.slow
    def test_a_session_that_is_stopped_while_tasks_run_is_said(self) -> None:
        session = embedded_session(OPTIONS)
        job = SparkRunner(session).submit(wait_then_report, [30.0])
        tracker = session.sparkContext.statusTracker()
        wait_for(tracker.getActiveJobsIds, "the job to run")
        session.stop()
        with pytest.raises(SparkUnavailableError, match="session was stopped"):
            job.result(timeout=60)

    @pytest.mark.slow
    @pytest.mark.parametrize("wanted", [Resources(), Resources(num_cpus=2)])
    def test_a_job_that_a_stopping_spark_has_dropped_ends(self, wanted: Resources) -> None:
        session = embedded_session(OPTIONS)
        runner = SparkRunner(session)
        assert runner.submit(double, [1]).result() == ["2"]
        # What Spark does as it begins to stop: jobs that come after it get no answer, ever.
        session.sparkContext._jsc.sc().dagScheduler().eventProcessLoop().stop()
        jobs = [runner.submit(double, [1, 2], wanted) for _ in range(2)]
        with pytest.raises(TimeoutError):
            jobs[0].result(timeout=1)
        session.stop()
        for job in jobs:
            with pytest.raises(SparkUnavailableError, match="session was stopped"):
                job.result(timeout=30)
        wait_for(lambda: not runner._is_watched, "the watch to end", 10)
        assert SparkRunner(embedded_session(OPTIONS)).submit(double, [1]).result() == ["2"]

    @pytest.mark.slow
    def test_session_of_the_user_is_preferred(self) -> None:
        from pyspark.sql import SparkSession

        embedded_session(OPTIONS).stop()
        mine = SparkSession.builder.master("local[1]").appName("mine").getOrCreate()
        try:
            mine.sparkContext.pythonExec = sys.executable
            assert embedded_session(OPTIONS) is mine
            assert SparkRunner(mine).submit(double, [1, 2]).result() == ["2", "4"]
        finally:
            mine.stop()

    @pytest.mark.slow
    def test_dead_jvm_is_replaced(self) -> None:
        session = embedded_session(OPTIONS)
        process = session.sparkContext._gateway.proc  # type: ignore[union-attr]
        runner = SparkRunner(session)
        job = runner.submit(wait_then_report, [30.0])
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(SparkUnavailableError, match="went away"):
            job.result(timeout=10)
        runner.cancel()  # has nothing to do, and says nothing
        assert SparkRunner(embedded_session(OPTIONS)).submit(double, [1]).result() == ["2"]


@pytest.mark.slow
@pytest.mark.spark
def test_a_master_that_tries_nothing_again_finds_the_row_that_kills_its_worker(
    tmp_path: Path,
) -> None:
    code = """
        import pyarrow as pa
        from pyspark.sql import SparkSession
        import geneva

        @geneva.udf(data_type=pa.int64(), on_error=geneva.skip_on_error())
        def dies(x: int) -> int:
            if x == 70:
                os._exit(9)
            return 2 * x

        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        table = geneva.connect("db", spark=spark).create_table("t", pa.table({"x": range(100)}))
        table.add_columns({"y": dies})
        print(table.backfill("y").rows_failed, table.to_arrow()["y"].to_pylist())
    """
    process = run_script(code, tmp_path, PYSPARK_PYTHON=sys.executable)
    said, problems = process.communicate(timeout=120)
    assert said.split("\n")[0] == f"1 {[None if x == 70 else 2 * x for x in range(100)]}", problems

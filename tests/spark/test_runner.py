"""Tasks on every runner, and on Spark: what the user sees when they fail."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from cluster import Cluster, names_in, run_script, running_cluster, wait_for
from geneva.errors import JobCancelledError, JobError, WorkerLostError
from geneva.execution.runner import InProcessRunner, Resources, Runner
from geneva.spark.embedded.java import MODULE_OPTIONS
from geneva.spark.embedded.settings import LocalOptions
from geneva.spark.local_slots import LocalSlots
from geneva.spark.runner import SparkRunner
from geneva.spark.sessions import embedded_session

# Workers can't import the tests: the functions below travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPTIONS = LocalOptions(slots=2, class_archive=False)


@pytest.fixture
def runner() -> Iterator[SparkRunner]:
    runner = SparkRunner(embedded_session(OPTIONS))
    yield runner
    runner.cancel()


# ------------------------------------------------------------------------------ shipped functions


def double(number: int) -> str:
    return str(number * 2)


def wait_then_report(seconds: float) -> str:
    time.sleep(seconds)
    return f"slept {seconds}"


def fail_if_short(seconds: float) -> str:
    if not seconds:
        raise RuntimeError("too short")
    return wait_then_report(seconds)


def hold_the_interpreter(seconds: float) -> str:
    pow(3, 10**8)  # one C call: no signal handler, no other thread gets a turn in it
    return "done"


def count_and_raise(log: str) -> str:
    with Path(log).open("a") as file:
        file.write("x")
    raise RuntimeError("the disk is on fire")


def die_once(mark: str) -> str:
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def always_die(_: int) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def segfault(_: int) -> str:
    import ctypes

    ctypes.string_at(0)
    return ""


def frozen_objects(_: int) -> str:
    return f"{os.getpid()} {gc.get_freeze_count()}"


def worker_environment(_: int) -> str:
    import pyspark

    return f"{sys.executable}\n{pyspark.__file__}"


def task_resources(_: int) -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    gpus = context.resources().get("gpu")
    return f"{context.cpus()} {len(gpus.addresses) if gpus else 0}"


def job_properties(_: int) -> str:
    """What Spark says of the job that a task is of."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.tags")
    return json.dumps([context.getLocalProperty(name) for name in names])


def properties_of_frame(batches: Iterator[Any]) -> str:
    """What Spark says of the job that a task with rows of a frame is of."""
    list(batches)
    return job_properties(0)


FORKED = """\
session = embedded_session(LocalOptions(slots=1, class_archive=False))
print(SparkRunner(session).submit(str, [1]).result(), flush=True)
child = os.fork()
if not child:
    try:
        print(SparkRunner(session).submit(str, [2]).result(timeout=20), flush=True)
        os._exit(0)
    finally:
        os._exit(1)
print(os.waitpid(child, 0)[1])
"""


def process_and_gpu(mark: str) -> str:
    """Who ran, on which GPU, and that no other task ran on it meanwhile."""
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    here = Path(f"{mark}-{gpu}")
    here.touch(exist_ok=False)
    time.sleep(0.1)
    here.unlink()
    return f"{os.getpid()} {gpu}"


def visible_gpus_here(seconds: float) -> str:
    time.sleep(seconds)
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def await_each_other(marks: tuple[str, str]) -> str:
    """Wait until a task has left the other mark."""
    own, other = map(Path, marks)
    own.touch()
    deadline = time.monotonic() + 20
    while not other.exists():
        assert time.monotonic() < deadline, "nobody else runs at the same time"
        time.sleep(0.01)
    return str(os.getpid())


def touch_and_wait(mark: str) -> str:
    Path(mark).touch()
    time.sleep(3)
    return mark


# -------------------------------------------------------------------- the contract, on each runner


@pytest.fixture(params=["in_process", pytest.param("spark", marks=pytest.mark.spark)])
def any_runner(request: pytest.FixtureRequest) -> Runner:
    return (
        InProcessRunner(2) if request.param == "in_process" else request.getfixturevalue("runner")
    )


class TestEveryRunner:
    def test_reports_come_in_the_order_of_the_items(self, any_runner: Runner) -> None:
        jobs = [any_runner.submit(double, list(range(size))) for size in (5, 1, 3)]
        assert [job.result() for job in jobs] == [
            ["0", "2", "4", "6", "8"],
            ["0"],
            ["0", "2", "4"],
        ]

    def test_nothing_to_do(self, any_runner: Runner) -> None:
        assert any_runner.submit(double, []).result() == []

    def test_slots(self, any_runner: Runner) -> None:
        assert any_runner.slots == 2

    def test_items_must_be_shippable(self, any_runner: Runner) -> None:
        with pytest.raises(Exception, match="pickle"):
            any_runner.submit(str, [threading.Lock()]).result()

    def test_resources_are_left_out_where_they_mean_nothing(self, any_runner: Runner) -> None:
        wanted = Resources(num_cpus=2, num_gpus=1, memory=2**30)
        assert any_runner.submit(double, [4], wanted).result() == ["8"]

    def test_after_cancel_nothing_starts(self, any_runner: Runner) -> None:
        any_runner.cancel()
        with pytest.raises(JobCancelledError):
            any_runner.submit(double, [1]).result()


@pytest.mark.slow
@pytest.mark.spark
class TestTasksWithSharesOfTheMachine:
    """Each of them is a Spark job: it can be cancelled, and its failure is told at once."""

    WANTED = Resources(num_cpus=2)

    def test_each_keeps_its_tag(self, runner: SparkRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        real, begun = SparkRunner._reports, itertools.count()

        def late(self: SparkRunner, *args: Any) -> list[str]:
            # The others have ended, and taken their own tags away, when this one starts.
            if next(begun):
                time.sleep(0.5)
            return real(self, *args)

        monkeypatch.setattr(SparkRunner, "_reports", late)
        monkeypatch.setattr(LocalSlots, "count", lambda *_: 3)
        monkeypatch.setattr(LocalSlots, "held", lambda *_: nullcontext({}))
        job = runner.submit(wait_then_report, [0.0, 0.0, 0.1], self.WANTED)
        assert job.result() == ["slept 0.0", "slept 0.0", "slept 0.1"]
        assert len(runner.engine_facts()["jobs"]) == 3

    def test_a_failure_is_told_before_the_others_end(
        self, runner: SparkRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if runner.slots < 2:
            pytest.skip("Spark is there already, with one slot: they can't run side by side")
        monkeypatch.setattr(LocalSlots, "held", lambda *_: nullcontext({}))
        began = time.monotonic()
        with pytest.raises(JobError, match="too short"):
            runner.submit(fail_if_short, [0.0, 30.0], self.WANTED).result()
        assert time.monotonic() - began < 15
        tracker = runner._session.sparkContext.statusTracker()
        wait_for(lambda: not tracker.getActiveJobsIds(), "the other one to be stopped", 10)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_gpu_of_a_local_spark_has_one_task_and_one_process(
    runner: SparkRunner, tmp_path: Path, gpus: int
) -> None:
    shared = SparkRunner(runner._session, gpus=gpus)
    whole = Resources(num_gpus=1)
    assert shared.slots_for(whole) == gpus
    assert shared.slots_for(Resources()) == 2
    # Idle Python workers of other jobs are not used: each would load the model once more.
    shared.submit(double, [1, 2]).result()
    jobs = [shared.submit(process_and_gpu, [str(tmp_path / "at")], whole) for _ in range(5)]
    found = {job.result()[0] for job in jobs}
    assert {text.split()[1] for text in found} == {str(number) for number in range(gpus)}
    assert len(found) == gpus, "one process per GPU"


@pytest.mark.slow
@pytest.mark.spark
def test_jobs_at_once_have_the_variables_of_their_own_gpus(runner: SparkRunner) -> None:
    shared = SparkRunner(runner._session, gpus=2)
    gpu, nothing = Resources(num_gpus=1), Resources()
    for _ in range(5):
        jobs = [
            shared.submit(visible_gpus_here, [0.05], wanted)
            for wanted in (gpu, gpu, nothing, gpu, nothing, gpu)
        ]
        found = [job.result()[0] for job in jobs]
        assert {found[2], found[4]} == {""}
        assert {found[0], found[1], found[3], found[5]} == {"0", "1"}


@pytest.mark.slow
@pytest.mark.spark
def test_items_that_share_the_machine_run_at_once(runner: SparkRunner, tmp_path: Path) -> None:
    shared = SparkRunner(runner._session, gpus=1)
    marks = (str(tmp_path / "a"), str(tmp_path / "b"))
    job = shared.submit(await_each_other, [marks, marks[::-1]], Resources(num_gpus=0.5))
    assert len(set(job.result(timeout=60))) == 2


def test_in_process_runner_fails_like_a_job(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on fire"):
        InProcessRunner(2).submit(count_and_raise, [str(tmp_path / "log")]).result()


def test_in_process_runner_drops_queued_calls_on_cancel() -> None:
    runner = InProcessRunner(1)
    job = runner.submit(wait_then_report, [0.1] * 50)
    runner.cancel()
    with pytest.raises(JobCancelledError):
        job.result(timeout=2)


# ------------------------------------------------------------------------------------ on a session


@pytest.mark.spark
class TestSparkRunner:
    def test_workers_run_this_python_and_its_pyspark(self, runner: SparkRunner) -> None:
        executable, pyspark_file = runner.submit(worker_environment, [0]).result()[0].split("\n")
        assert executable == sys.executable
        assert ".zip" not in pyspark_file

    def test_heap_is_frozen_after_the_first_item(self, runner: SparkRunner) -> None:
        runner.submit(double, list(range(4))).result()  # every worker has had an item
        for report in runner.submit(frozen_objects, [0]).result():
            assert int(report.split()[1]) > 10_000

    def test_a_job_leaves_nothing_to_the_next(self, runner: SparkRunner) -> None:
        runner.describe_jobs("a-group", "what it is")
        group, description, tag = json.loads(runner.submit(job_properties, [0]).result()[0])
        assert (group, description) == ("a-group", "what it is")
        other = SparkRunner(embedded_session(OPTIONS))
        told = json.loads(other.submit(job_properties, [0]).result()[0])
        assert told[:2] == [None, None]
        assert told[2] != tag

    def test_tags_of_one_user_are_not_those_of_the_next(self) -> None:
        session = embedded_session(OPTIONS)

        def tags() -> str:
            # The frame's tags are those of the session as well as those of the context.
            frame = session.range(0, 1, 1, 1)
            return SparkRunner(session).submit_frame(frame, properties_of_frame).result()[0]

        session.addTag("of-one-user")
        try:
            assert "of-one-user" in tags()
        finally:
            session.removeTag("of-one-user")
        assert "of-one-user" not in tags()

    def test_a_session_that_was_stopped_is_kept_by_nobody(self) -> None:
        session = embedded_session(OPTIONS)
        assert SparkRunner(session).submit(double, [1, 2]).result() == ["2", "4"]
        context = weakref.ref(session.sparkContext)
        session.stop()
        del session
        assert SparkRunner(embedded_session(OPTIONS)).submit(double, [3]).result() == ["6"]
        gc.collect()
        assert context() is None

    def test_a_fork_can_run_jobs(self, tmp_path: Path) -> None:
        script = run_script(FORKED, tmp_path)
        output, errors = script.communicate(timeout=60)
        assert output.splitlines() == ["['1']", "['2']", "0"], errors

    @pytest.mark.parametrize("tasks", [1, 2, 5])
    def test_each_job_has_its_own_tasks(self, runner: SparkRunner, tasks: int) -> None:
        # What Spark is given for so many tasks is made once, and not once for each job.
        for first in (0, 10):
            items = [*range(first, first + tasks)]
            assert runner.submit(double, items).result() == [str(2 * item) for item in items]

    def test_failing_task_is_tried_four_times_then_explained(
        self, runner: SparkRunner, tmp_path: Path
    ) -> None:
        log = tmp_path / "log"
        with pytest.raises(JobError, match="RuntimeError: the disk is on fire") as caught:
            runner.submit(count_and_raise, [str(log)]).result()
        assert log.read_text() == "xxxx"
        message = str(caught.value)
        assert "in count_and_raise" in message
        assert "/pyspark/" not in message
        assert "\tat " not in message

    def test_worker_that_dies_once_costs_nothing(self, runner: SparkRunner, tmp_path: Path) -> None:
        assert runner.submit(die_once, [str(tmp_path / "mark")]).result() == ["alive"]

    @pytest.mark.slow
    @pytest.mark.parametrize("function", [always_die, segfault])
    def test_worker_that_always_dies_is_explained(self, runner: SparkRunner, function) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(WorkerLostError, match="out of memory") as caught:
            runner.submit(function, [0]).result()
        if function is segfault:
            assert "Fatal Python error: Segmentation fault" in str(caught.value)
            assert "in segfault" in str(caught.value)
        else:
            assert "Task 0 in stage" in str(caught.value)
        assert len(str(caught.value).splitlines()) < 12

    @pytest.mark.slow
    @pytest.mark.parametrize("function", [wait_then_report, hold_the_interpreter])
    def test_cancelled_slots_are_soon_free(self, runner: SparkRunner, function) -> None:  # type: ignore[no-untyped-def]
        job = runner.submit(function, [60.0, 60.0])
        time.sleep(0.5)
        began = time.monotonic()
        runner.cancel()
        with pytest.raises(JobCancelledError):
            job.result(timeout=0)
        after = SparkRunner(embedded_session(OPTIONS))
        assert after.submit(double, [1, 2, 3]).result(timeout=50) == ["2", "4", "6"]
        # 3-5 s when idle. On a busy machine only: long before the tasks would have ended.
        busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
        assert time.monotonic() - began < (50 if busy else 10)

    def test_cancel_reaches_jobs_that_just_started(self, runner: SparkRunner) -> None:
        jobs = [runner.submit(wait_then_report, [30.0]) for _ in range(20)]
        runner.cancel()
        for job in jobs:
            with pytest.raises(JobCancelledError):
                job.result(timeout=0)

    @pytest.mark.slow
    def test_cancel_spares_other_runners(self, runner: SparkRunner) -> None:
        other = SparkRunner(embedded_session(OPTIONS))
        job = other.submit(wait_then_report, [1.0])
        runner.submit(wait_then_report, [30.0])
        time.sleep(0.3)
        runner.cancel()
        assert job.result(timeout=60) == ["slept 1.0"]

    def test_module_options_are_those_of_spark(self, runner: SparkRunner) -> None:
        jvm = embedded_session(OPTIONS).sparkContext._jvm
        assert jvm is not None
        options = jvm.org.apache.spark.launcher.JavaModuleOptions.defaultModuleOptionArray()
        assert [o for o in options if not o.startswith("-Djdk.reflect")] == list(MODULE_OPTIONS)


# ---------------------------------------------------------------------------- on a Connect server

CONNECT = """
    import glob, socket, subprocess
    import pyspark
    from geneva.errors import JobCancelledError, JobError
    from geneva.spark.embedded.java import find_java
    from geneva.execution.runner import Resources
    from pyspark.sql import SparkSession

    def fail(_):
        raise RuntimeError("the disk is on fire")

    home = os.path.dirname(pyspark.__file__)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    server = subprocess.Popen(
        [home + "/bin/spark-submit", "--master", "local[3,4]"]
        + [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        + ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
        + glob.glob(home + "/jars/spark-connect_2*.jar"),
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(find_java().path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
            time.sleep(0.1)
        session = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()
        assert embedded_session() is session
        runner = SparkRunner(session)
        print(runner.slots)
        print(runner.submit(str, [1, 2], Resources(num_cpus=2)).result())
        try:
            runner.submit(fail, [1]).result()
        except JobError as error:
            print(str(error).splitlines()[-1])
        session.addTag("of-one-user")
        runner.submit(str, [1]).result()
        session.removeTag("of-one-user")
        job = runner.submit(time.sleep, [60, 60, 60])
        time.sleep(1)
        print(session.interruptTag("of-one-user"))
        runner.cancel()
        print(type(job.exception(timeout=0)).__name__)
        print(SparkRunner(session).submit(str, [1, 2, 3]).result(timeout=30))
    finally:
        os.killpg(server.pid, 9)
        server.wait()
        os._exit(0 if sys.stdout.flush() is None else 1)
"""


@pytest.mark.slow
@pytest.mark.spark
def test_connect_session(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    script = run_script(CONNECT, tmp_path, PYTHONWARNINGS="default")
    output, errors = script.communicate(timeout=120)
    assert output.splitlines() == [
        "3",
        "['1', '2']",
        "RuntimeError: the disk is on fire",
        "[]",
        "JobCancelledError",
        "['1', '2', '3']",
    ], errors


# ------------------------------------------------------------------------------------ on a cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(workers=2, cores=2, gpus=2) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.spark
class TestCluster:
    def test_tasks_resources_and_a_lost_executor(self, cluster: Cluster, tmp_path: Path) -> None:
        with cluster.session() as session:
            runner = SparkRunner(session)
            assert runner.slots == 4
            assert runner.submit(double, list(range(8))).result()[-1] == "14"
            # Resources
            assert runner.submit(task_resources, [0]).result() == ["1 0"]
            wanted = Resources(num_cpus=1.5, num_gpus=1)
            assert runner.submit(task_resources, [0, 1], wanted).result() == ["2 1"] * 2
            # A lost executor: its tasks run again elsewhere
            marks = [str(tmp_path / str(number)) for number in range(4)]
            job = runner.submit(touch_and_wait, marks)
            wait_for(lambda: len(names_in(tmp_path)) == 4, "the tasks to run")
            cluster.kill_executor()
            assert job.result(timeout=60) == marks
            # A cancelled job frees the cluster
            job = runner.submit(wait_then_report, [60.0] * 4)
            time.sleep(1)
            runner.cancel()
            with pytest.raises(JobCancelledError):
                job.result(timeout=0)
            again = SparkRunner(session)
            assert again.submit(double, [1, 2, 3, 4]).result(timeout=50) == ["2", "4", "6", "8"]


# ------------------------------------------------------------------------------ in Spark's pages


def _job(spark: object, job_id: int) -> object:
    return spark.sparkContext._jsc.sc().statusStore().job(job_id)  # type: ignore[attr-defined]


@pytest.mark.spark
def test_jobs_have_a_group_and_a_description_in_sparks_pages() -> None:
    spark = embedded_session(OPTIONS)
    context = spark.sparkContext
    runner = SparkRunner(spark)
    try:
        runner.describe_jobs("geneva-j1", "geneva t.c: job j1, round 1")
        assert runner.submit(double, [1, 2]).result() == ["2", "4"]
        (first,) = runner.engine_facts()["jobs"]
        assert _job(spark, first).description().get() == "geneva t.c: job j1, round 1"
        assert list(context.statusTracker().getJobIdsForGroup("geneva-j1")) == [first]
        # A group of the user's own stays, and so does what they say of jobs of their own.
        context.setJobGroup("mine", "my own words")
        runner.describe_jobs("geneva-j1", "geneva t.c: job j1, round 2")
        assert runner.submit(double, [3]).result() == ["6"]
        assert context.getLocalProperty("spark.job.description") == "my own words"
        second = runner.engine_facts()["jobs"][-1]
        assert second in context.statusTracker().getJobIdsForGroup("mine")
        assert _job(spark, second).description().get() == "geneva t.c: job j1, round 2"
        assert runner.engine_facts() == {
            "application": context.applicationId,
            "jobs": [first, second],
            "group": "mine",
        }
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
        context.setLocalProperty("spark.job.description", None)
        runner.cancel()


@pytest.mark.spark
def test_a_jobs_history_says_what_spark_calls_it(tmp_path: Path) -> None:
    from support import connect, make_table, udf

    @udf
    def triple(id: int) -> int:
        return id * 3

    db = connect(tmp_path / "db", None)
    table = make_table(db, [3])
    table.add_columns({"c": triple})
    job_id = table.backfill("c").job_id
    context = embedded_session(OPTIONS).sparkContext
    found = db.get_job(job_id).spark
    assert found["application"] == context.applicationId
    assert found["group"] == f"geneva-{job_id}"
    assert found["jobs"] == sorted(context.statusTracker().getJobIdsForGroup(found["group"]))
    said = _job(embedded_session(OPTIONS), found["jobs"][0]).description().get()
    assert said == f"geneva t.c: job {job_id}, round 1"
    table.add([{"id": 100}])
    context.setJobGroup("mine", "my own words")
    try:
        found = db.get_job(table.backfill("c").job_id).spark
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
        context.setLocalProperty("spark.job.description", None)
    assert found["group"] == "mine"
    assert set(found["jobs"]) <= set(context.statusTracker().getJobIdsForGroup("mine"))

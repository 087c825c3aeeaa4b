"""Tasks on Spark, the life of the embedded session, and what the user sees when either fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import cloudpickle

from execution.cluster import Cluster, running_cluster, wait_for
from geneva.errors import JobCancelledError, JobError, SparkUnavailableError, WorkerLostError
from geneva.execution import jvm_archive, local_spark
from geneva.execution.java import MODULE_OPTIONS, JavaHome
from geneva.execution.local_spark import LocalOptions, local_settings, start_jvm
from geneva.execution.runner import InProcessRunner, Resources, Runner
from geneva.execution.spark import SparkRunner, active_session, embedded_session
from geneva.execution.spark_errors import explained

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

    @pytest.mark.parametrize(
        "function", [wait_then_report, pytest.param(hold_the_interpreter, marks=pytest.mark.slow)]
    )
    def test_cancelled_slots_are_soon_free(self, runner: SparkRunner, function) -> None:  # type: ignore[no-untyped-def]
        job = runner.submit(function, [60.0, 60.0])
        time.sleep(0.5)
        began = time.monotonic()
        runner.cancel()
        with pytest.raises(JobCancelledError):
            job.result(timeout=0)
        assert time.monotonic() - began < 3
        after = SparkRunner(embedded_session(OPTIONS))
        assert after.submit(double, [1, 2, 3]).result(timeout=10) == ["2", "4", "6"]
        assert time.monotonic() - began < 10

    def test_cancel_reaches_jobs_that_just_started(self, runner: SparkRunner) -> None:
        jobs = [runner.submit(wait_then_report, [30.0]) for _ in range(20)]
        runner.cancel()
        for job in jobs:
            with pytest.raises(JobCancelledError):
                job.result(timeout=0)

    def test_cancel_spares_other_runners(self, runner: SparkRunner) -> None:
        other = SparkRunner(embedded_session(OPTIONS))
        job = other.submit(wait_then_report, [1.0])
        runner.submit(wait_then_report, [30.0])
        time.sleep(0.3)
        runner.cancel()
        assert job.result(timeout=10) == ["slept 1.0"]

    def test_module_options_are_those_of_spark(self, runner: SparkRunner) -> None:
        jvm = embedded_session(OPTIONS).sparkContext._jvm
        assert jvm is not None
        options = jvm.org.apache.spark.launcher.JavaModuleOptions.defaultModuleOptionArray()
        assert [o for o in options if not o.startswith("-Djdk.reflect")] == list(MODULE_OPTIONS)


@pytest.mark.spark
class TestEmbeddedSession:
    def test_is_one_per_process(self) -> None:
        session = embedded_session(OPTIONS)
        assert embedded_session() is session
        assert active_session() is session

    def test_keeps_the_users_interrupt_handler(self) -> None:
        embedded_session(OPTIONS)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

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


def run_script(code: str, cwd: Path, **extra: str) -> subprocess.Popen[str]:
    """Start a Python process in a folder and a temporary folder of its own."""
    (cwd / "tmp").mkdir(exist_ok=True)
    environ = {**os.environ, "TMPDIR": str(cwd / "tmp"), "XDG_CACHE_HOME": str(cwd / "cache")}
    head = (
        "import os, sys, time\n"
        "from geneva.execution.spark import LocalOptions, SparkRunner, embedded_session\n"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", head + textwrap.dedent(code)],
        cwd=cwd,
        env={**environ, **extra},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def processes_in(folder: Path) -> list[str]:
    """Return the JVMs and workers whose command or environment names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                alive = "Z" not in (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if alive and os.fsencode(folder) in text:
                found.append(text.split(b"\0")[0].decode())
    return found


@pytest.mark.spark
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
class TestProcess:
    def test_leaves_nothing_behind_and_says_nothing(self, tmp_path: Path) -> None:
        script = run_script(
            """
            session = embedded_session(LocalOptions(slots=2, class_archive=False))
            print(SparkRunner(session).submit(str, [1, 2]).result())
            """,
            tmp_path,
        )
        assert script.communicate(timeout=60) == ("['1', '2']\n", "")
        wait_for(lambda: not processes_in(tmp_path), "the JVM to leave", 10)
        assert names_in(tmp_path) == ["tmp"]
        assert names_in(tmp_path / "tmp") == []

    def test_ctrl_c_cancels_and_the_session_lives_on(self, tmp_path: Path) -> None:
        script = run_script(
            """
            session = embedded_session(LocalOptions(slots=2, class_archive=False))
            runner = SparkRunner(session)
            job = runner.submit(time.sleep, [60, 60])
            print("ready", flush=True)
            try:
                job.result()
            except KeyboardInterrupt:
                runner.cancel()
                print(type(job.exception()).__name__)
            print(SparkRunner(session).submit(str, [1]).result())
            """,
            tmp_path,
        )
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        time.sleep(1)
        os.killpg(script.pid, signal.SIGINT)  # as the terminal does: to the whole group
        assert script.communicate(timeout=30) == ("JobCancelledError\n['1']\n", "")
        wait_for(lambda: not processes_in(tmp_path), "the JVM to leave", 10)

    @pytest.mark.slow
    def test_killed_python_takes_spark_along(self, tmp_path: Path) -> None:
        script = run_script(
            """
            session = embedded_session(LocalOptions(slots=2, class_archive=False))
            SparkRunner(session).submit(time.sleep, [60])
            print("ready", flush=True)
            time.sleep(60)
            """,
            tmp_path,
        )
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        time.sleep(1)
        assert len(processes_in(tmp_path)) >= 3  # Python, the shell, the JVM
        script.kill()
        script.communicate()
        wait_for(lambda: not processes_in(tmp_path), "the JVM to leave", 15)
        assert names_in(tmp_path / "tmp") == []

    @pytest.mark.slow
    def test_start_that_fails_shows_the_log(self, tmp_path: Path) -> None:
        script = run_script(
            """
            from geneva.errors import SparkUnavailableError
            try:
                embedded_session(LocalOptions(memory_mb=100, class_archive=False))
            except SparkUnavailableError as error:
                print(error)
            session = embedded_session(LocalOptions(slots=2, class_archive=False))
            print(SparkRunner(session).submit(str, [1]).result())
            """,
            tmp_path,
        )
        output, errors = script.communicate(timeout=60)
        assert "could not be started here" in output
        assert "System memory" in output
        assert "must be at least" in output
        assert output.endswith("['1']\n")
        assert errors == ""

    @pytest.mark.slow
    def test_scripts_of_spark_are_used_where_configured(self, tmp_path: Path) -> None:
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.geneva.test  yes\n")
        script = run_script(
            """
            session = embedded_session(LocalOptions(slots=2))
            print(session.sparkContext.getConf().get("spark.geneva.test"))
            print(SparkRunner(session).submit(str, [1]).result())
            """,
            tmp_path,
            SPARK_CONF_DIR=str(tmp_path / "conf"),
        )
        assert script.communicate(timeout=60) == ("yes\n['1']\n", "")
        wait_for(lambda: not processes_in(tmp_path), "the JVM to leave", 10)
        assert not list((tmp_path / "tmp").glob("geneva-*"))


def test_importing_geneva_imports_no_pyspark() -> None:
    code = (
        "import geneva, geneva.execution.spark, geneva.execution.runner, sys\n"
        "sys.exit('pyspark' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------- settings


class TestSettings:
    def test_socket_needs_a_short_path(self, tmp_path: Path) -> None:
        key = "spark.python.unix.domain.socket.enabled"
        assert local_settings(Path("/tmp/geneva-1"), OPTIONS)[key] == "true"
        assert local_settings(Path("/tmp") / ("x" * 80), OPTIONS)[key] == "false"

    def test_private_directory_moves_to_a_shorter_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deep = tmp_path / ("d" * 100)
        deep.mkdir()
        monkeypatch.setattr(local_spark.tempfile, "tempdir", str(deep))
        made = local_spark.private_directory()
        try:
            assert made.parent == Path("/tmp")
            assert not names_in(deep)
            assert made.stat().st_mode & 0o077 == 0
        finally:
            made.rmdir()

    def test_master_has_retries(self) -> None:
        assert local_settings(Path("/t"), LocalOptions(slots=3))["spark.master"] == "local[3,4]"

    @pytest.mark.parametrize(
        ("files", "cores"),
        [
            ({"cpu.max": "150000 100000\n"}, 2),
            ({"cpu.max": "max 100000\n"}, 8),
            ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
            ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
            ({}, 8),
        ],
    )
    def test_container_quota_counts(
        self, tmp_path: Path, files: dict[str, str], cores: int
    ) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        assert local_spark._container_cores(tmp_path, 8) == cores

    def test_jvm_that_does_not_start_shows_its_output(self, tmp_path: Path) -> None:
        with pytest.raises(SparkUnavailableError, match="no such flag"):
            start_jvm(["/bin/sh", "-c", "echo no such flag >&2; exit 1"], tmp_path)
        assert tmp_path.exists()


# ------------------------------------------------------------------------------------ class archive


class TestArchive:
    @pytest.fixture
    def archive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        self.registered.clear()
        monkeypatch.setattr(
            jvm_archive.atexit, "register", lambda *call: self.registered.append(call)
        )
        (tmp_path / "jars").mkdir()
        (tmp_path / "jars" / "a.jar").write_text("a")
        path = self.path(tmp_path)
        assert path is not None
        return path

    registered: list[object] = []  # noqa: RUF012  what would run at exit, by the fixture above

    @staticmethod
    def path(folder: Path, *flags: str) -> Path | None:
        java = JavaHome(Path("/jdk"), "17.0.1")
        return jvm_archive.archive_for(java, "4.3.0", folder / "jars", flags)

    def test_name_tells_what_it_fits(self, archive: Path, tmp_path: Path) -> None:
        assert archive.name.startswith("spark-4.3.0-java-17.0.1-")
        assert self.path(tmp_path, "-Djava.io.tmpdir=/tmp/x", "-Xmx2g") == archive
        assert self.path(tmp_path, "-XX:+UseG1GC") != archive
        os.utime(tmp_path / "jars" / "a.jar", ns=(1, 1))
        assert self.path(tmp_path) != archive

    def test_is_used_when_there(self, archive: Path) -> None:
        archive.parent.mkdir(parents=True)
        archive.touch()
        assert f"-XX:SharedArchiveFile={archive}" in jvm_archive.flags_or_train(archive)
        assert not self.registered

    def test_is_made_after_exit_otherwise(self, archive: Path) -> None:
        assert jvm_archive.flags_or_train(archive) == []
        assert jvm_archive.flags_or_train(archive) == []
        assert len(self.registered) == 1

    def test_is_not_tried_again_after_a_failure(
        self, archive: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(draft: Path) -> None:
            draft.write_text("half")
            raise OSError("no space left")

        archive.parent.mkdir(parents=True)
        monkeypatch.setattr(jvm_archive, "_run_spark", broken)
        assert jvm_archive.train(archive) is False
        assert not list(archive.parent.glob("*.draft"))
        assert jvm_archive.flags_or_train(archive) == []
        assert not self.registered

    def test_only_one_process_makes_it(
        self, archive: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        archive.parent.mkdir(parents=True)
        made: list[bool] = []

        def train_meanwhile(draft: Path) -> None:
            made.append(jvm_archive.train(archive))
            draft.touch()

        monkeypatch.setattr(jvm_archive, "_run_spark", train_meanwhile)
        assert jvm_archive.train(archive) is True
        assert made == [False]

    def test_cache_that_cannot_be_written_is_no_trouble(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        jvm_archive._train_detached(tmp_path / "file" / "classes" / "x.jsa")

    def test_old_archives_go(self, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        archive.parent.mkdir(parents=True)
        for age in range(1, 6):
            old = archive.parent / f"old{age}.jsa"
            old.touch()
            os.utime(old, (time.time() - age * 1000,) * 2)
        monkeypatch.setattr(jvm_archive, "_run_spark", lambda draft: draft.touch())
        assert jvm_archive.train(archive)
        left = {path.name for path in archive.parent.glob("*.jsa")}
        assert left == {archive.name, "old1.jsa", "old2.jsa"}

    @pytest.mark.slow
    @pytest.mark.spark
    def test_is_made_used_and_ignored_when_broken(self, tmp_path: Path) -> None:
        code = """
            session = embedded_session(LocalOptions(slots=2))
            print(SparkRunner(session).submit(str, [1]).result())
            arguments = session.sparkContext._jvm.java.lang.management.ManagementFactory
            names = arguments.getRuntimeMXBean().getInputArguments()
            print(any("SharedArchiveFile" in name for name in names))
            """
        folder = tmp_path / "cache" / "geneva" / "classes"
        first = run_script(code, tmp_path)
        assert first.communicate(timeout=60) == ("['1']\nFalse\n", "")
        archive = wait_for(lambda: list(folder.glob("*.jsa")), "the archive", 120)[0]
        wait_for(lambda: not processes_in(tmp_path), "the training to end", 30)
        second = run_script(code, tmp_path)
        assert second.communicate(timeout=60) == ("['1']\nTrue\n", "")
        archive.chmod(0o644)
        archive.write_bytes(b"not an archive")
        third = run_script(code, tmp_path)
        assert third.communicate(timeout=60) == ("['1']\nTrue\n", "")


# -------------------------------------------------------------------------------------- error texts


class TestExplained:
    def test_lost_executor(self) -> None:
        text = (
            "An error occurred while calling o1.getResult.\n"
            ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage "
            "1.0 failed 4 times, most recent failure: Lost task 0.3 in stage 1.0 (TID 7) (10.0.0.7 "
            "executor 3): ExecutorLostFailure (executor 3 exited caused by one of the running "
            "tasks) Reason: Command exited with code 137\n\tat org.apache.spark.X(X.scala:1)"
        )
        error = explained(Exception(text))
        assert isinstance(error, WorkerLostError)
        assert "executor 3" in str(error)
        assert "\tat" not in str(error)

    def test_cancelled_by_somebody_else(self) -> None:
        error = explained(Exception("[SPARK_JOB_CANCELLED] Job 7 cancelled because of a tag"))
        assert isinstance(error, JobCancelledError)

    def test_gone(self) -> None:
        assert isinstance(explained(ConnectionRefusedError(111, "refused")), SparkUnavailableError)

    def test_module_that_workers_lack(self) -> None:
        text = (
            "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
            '  File "/x/pyspark/worker.py", line 1, in main\n    run()\n'
            "ModuleNotFoundError: No module named 'torch'\n\nJVM stacktrace:\norg.apache..."
        )
        error = explained(Exception(text))
        assert isinstance(error, SparkUnavailableError)
        assert "Install the same packages" in str(error)
        assert str(error).endswith("No module named 'torch'")

    def test_unknown(self) -> None:
        error = explained(Exception("something odd"))
        assert isinstance(error, SparkUnavailableError)
        assert "something odd" in str(error)


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
            assert again.submit(double, [1, 2, 3, 4]).result(timeout=10) == ["2", "4", "6", "8"]

"""Spark sessions, and tasks run on them: the one module that imports pyspark.

A session may be anybody's: classic or Connect, of one machine or of many. Nothing here imports
pyspark before it is needed, so ``import geneva`` is cheap, and a plan with no work in it never
starts Spark.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shutil
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from geneva.errors import JobCancelledError, MissingDependencyError, SparkUnavailableError
from geneva.execution.runner import ANY, REPORT_DDL, task_body
from geneva.model.computation import Resources
from geneva.spark.embedded.class_archive import archive_for, flags_or_train
from geneva.spark.embedded.java import (
    STARTED_MARK,
    JavaHome,
    find_java,
    gateway_command,
    starts_directly,
)
from geneva.spark.embedded.settings import (
    LOG_NAME,
    LocalOptions,
    environment,
    jvm_options,
    local_settings,
    private_directory,
    start_jvm,
    tail,
    unchanged_interrupt_handler,
)
from geneva.spark.errors import explained, reason, spark_text

if TYPE_CHECKING:
    import pyarrow as pa
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession as SparkSession  # for annotations elsewhere

__all__ = ["LocalOptions", "SparkRunner", "active_session", "embedded_session"]

T = TypeVar("T")

MOST_JOBS_IN_FLIGHT = 16
"""Driver threads, each waiting for one Spark job; more submissions wait for one of them."""
CANCEL_LIMIT_SECONDS = 30.0


class SparkRunner:
    """Runs tasks on a Spark session: each ``submit`` is one Spark job, one task an item.

    ``slots`` is only for clusters whose size Spark doesn't tell.
    """

    def __init__(self, session: SparkSession, *, slots: int | None = None) -> None:
        self._session = session
        self._slots = slots
        self._tag = f"geneva-{uuid.uuid4().hex}"
        self._profiles: dict[Resources, ResourceProfile | None] = {}
        remote = type(session).__module__.startswith("pyspark.sql.connect")
        self._side: _Side = _Connect(session) if remote else _Classic(session)
        self._threads = ThreadPoolExecutor(MOST_JOBS_IN_FLIGHT, thread_name_prefix="geneva-job")
        self._cancelled = threading.Event()
        self._idle = threading.Condition()
        self._unfinished = 0

    @property
    def slots(self) -> int:
        """How many tasks can run at once: the cores that Spark has at this moment."""
        return self._slots or self._side.cores()

    def submit(
        self, function: Callable[[T], str], items: Sequence[T], resources: Resources = ANY
    ) -> Future[list[str]]:
        """Start one Spark job that calls ``function`` on every item."""
        from pyspark import inheritable_thread_target

        try:
            # The user's own tags and job group come along into our thread.
            run = inheritable_thread_target(self._session)(self._run)
        except Exception:  # noqa: BLE001  py4j has no one error for "the other side is gone"
            gone: Future[list[str]] = Future()
            gone.set_exception(SparkUnavailableError("The Spark session was stopped, or died."))
            return gone
        with self._idle:
            self._unfinished += 1
        job: Future[list[str]] = self._threads.submit(run, function, items, resources)
        job.add_done_callback(self._finished)
        return job

    def cancel(self) -> None:
        """Cancel this runner's jobs and wait until the driver has let go of them.

        The workers are gone a few seconds later, whatever the user's function is doing.
        """
        self._cancelled.set()
        # In a thread of its own, because a Ctrl-C may have broken this one's connection.
        threading.Thread(target=self._cancel_until_idle, daemon=True).start()
        with self._idle:
            self._idle.wait_for(lambda: not self._unfinished, CANCEL_LIMIT_SECONDS)

    def _cancel_until_idle(self) -> None:
        with contextlib.suppress(Exception):  # Spark is gone: then so are its jobs
            while self._unfinished:
                # Again and again: a job that was about to start can't be seen the first time.
                self._side.cancel(self._tag)
                time.sleep(0.1)

    def _finished(self, _: Future[list[str]]) -> None:
        with self._idle:
            self._unfinished -= 1
            self._idle.notify_all()

    def _run(
        self, function: Callable[[T], str], items: Sequence[T], resources: Resources
    ) -> list[str]:
        self._check()
        if not items:
            return []
        try:
            with self._side.tagged(self._tag):
                table = self._reports(function, items, resources)
        except Exception as error:  # noqa: BLE001  all of them are explained
            if self._cancelled.is_set():  # Spark's own error doesn't say so
                raise JobCancelledError("The job was cancelled.") from None
            # Not chained: py4j would print pages of JVM, asking a JVM that may be gone by then.
            raise explained(error) from None
        reports = dict(zip(table["index"].to_pylist(), table["report"].to_pylist(), strict=True))
        return [reports[index] for index in range(len(items))]

    def _reports(
        self, function: Callable[[T], str], items: Sequence[T], resources: Resources
    ) -> pa.Table:
        # One profile for all jobs alike: with dynamic allocation a new one gets new executors.
        if resources not in self._profiles:
            self._profiles[resources] = self._side.profile(resources)
        numbers = self._session.range(0, len(items), 1, len(items))
        with _pandas_warnings_off():
            reports = numbers.mapInArrow(
                task_body(function, items), REPORT_DDL, profile=self._profiles[resources]
            )
        self._check()
        return reports.toArrow()

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise JobCancelledError("The job was cancelled before its tasks started.")


# ----------------------------------------------------------------- what differs by kind of session


class _Side(Protocol):
    def cores(self) -> int: ...
    def tagged(self, tag: str) -> contextlib.AbstractContextManager[None]: ...
    def cancel(self, tag: str) -> None: ...
    def profile(self, resources: Resources) -> ResourceProfile | None: ...


class _Classic:
    """A session with a SparkContext, and its JVM, in this process."""

    def __init__(self, session: SparkSession) -> None:
        self._context = session.sparkContext

    def cores(self) -> int:
        return max(1, int(self._context.defaultParallelism))

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        self._context.addJobTag(tag)
        if self._context.getLocalProperty("spark.scheduler.pool") is None:
            self._context.setLocalProperty("spark.scheduler.pool", tag)
        try:
            yield
        finally:
            self._context.removeJobTag(tag)

    def cancel(self, tag: str) -> None:
        self._context.cancelJobsWithTag(tag)

    def profile(self, resources: Resources) -> ResourceProfile | None:
        return None if self._context.master.startswith("local") else _profile(resources)


class _Connect:
    """A session on a Spark Connect server: no context, no JVM, and its own kind of tags."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._cores: int | None = None

    def cores(self) -> int:
        from pyspark.sql import functions

        if self._cores is None:
            # Connect doesn't tell, but cuts a range into as many parts as there are cores.
            parts = self._session.range(0, 1_000_000).select(functions.spark_partition_id())
            last = parts.toDF("part").agg(functions.max("part")).toArrow()
            self._cores = int(last.column(0)[0].as_py()) + 1
        return self._cores

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        self._session.addTag(tag)
        try:
            yield
        finally:
            self._session.removeTag(tag)

    def cancel(self, tag: str) -> None:
        self._session.interruptTag(tag)

    def profile(self, resources: Resources) -> ResourceProfile | None:
        master = self._session.conf.get("spark.master", "local") or "local"
        return None if master.startswith("local") else _profile(resources)


def _profile(resources: Resources) -> ResourceProfile | None:
    """Return what a task asks the cluster for, or None where one core is all it needs.

    Memory is left out: Spark gives memory to executors, when they start, not to tasks.
    """
    cores = math.ceil(resources.num_cpus or 1)
    gpus = resources.num_gpus or 0
    if cores <= 1 and not gpus:
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests().cpus(cores)
    if gpus:
        # Spark shares one GPU among tasks, but gives out several only whole.
        requests = requests.resource("gpu", gpus if gpus <= 1 else math.ceil(gpus))
    return ResourceProfileBuilder().require(requests).build


_filters = threading.Lock()


@contextlib.contextmanager
def _pandas_warnings_off() -> Iterator[None]:
    """Hide what pyspark says about the version of pandas, which our users can't act on."""
    with _filters, warnings.catch_warnings():  # the process has one list of them: take turns
        warnings.simplefilter("ignore", FutureWarning)
        yield


# ------------------------------------------------------------------------------------- sessions

_starting = threading.RLock()


def embedded_session(options: LocalOptions | None = None) -> SparkSession:
    """Return this process's Spark session: the user's if there is one, else our own.

    Ours is started at first need and used from then on. A session that was stopped, or whose
    JVM died, is replaced by a new one.
    """
    with _starting:
        return active_session() or _start(options or LocalOptions())


def active_session() -> SparkSession | None:
    """Return the live session of this process, classic or Connect, or None."""
    remote = sys.modules.get("pyspark.sql.connect.session")
    if remote is not None:
        session = remote.SparkSession.getActiveSession() or remote.SparkSession._default_session
        if session is not None and not session.is_stopped:
            return session
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession as SparkSession  # for annotations elsewhere

    context = SparkContext._active_spark_context
    if context is None or not _is_alive(context):
        return None
    known = SparkSession._instantiatedSession
    return known if known is not None and known._sc is context else SparkSession(context)


def _is_alive(context: SparkContext) -> bool:
    """Whether the context can run jobs: neither stopped, here or in the JVM, nor orphaned."""
    try:
        return context._jsc is not None and not context._jsc.sc().isStopped()
    except Exception:  # noqa: BLE001  py4j has no one error for "the other side is gone"
        return False


def _start(options: LocalOptions) -> SparkSession:
    """Start a context of our own, on the JVM of this process if it has one already."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession as SparkSession  # for annotations elsewhere

    _forget_dead_jvm()
    reused = SparkContext._gateway is not None
    directory = private_directory()
    settings = local_settings(directory, options)
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    try:
        with unchanged_interrupt_handler():
            gateway = SparkContext._gateway or _launch(directory, settings, options)
            context = SparkContext(conf=conf, gateway=gateway)
            # Taken from the environment otherwise, where "python3" is any Python on the PATH.
            context.pythonExec = sys.executable
            session = SparkSession(context)
    except MissingDependencyError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    except Exception as error:  # noqa: BLE001  all of them mean: no session
        cause, log = reason(spark_text(error)), tail(directory / LOG_NAME)
        if not reused:
            _end_jvm()
        shutil.rmtree(directory, ignore_errors=True)
        raise SparkUnavailableError(f"Spark could not be started here: {cause}{log}") from None
    if reused:  # the JVM's shell looks after the folder that the JVM was started with
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / STARTED_MARK).touch()
    return session


def _launch(directory: Path, settings: dict[str, str], options: LocalOptions) -> JavaGateway:
    """Start Spark's JVM and connect to it; by Spark's own scripts where they have a say."""
    import pyspark
    from pyspark.find_spark_home import _find_spark_home
    from pyspark.java_gateway import launch_gateway

    java = find_java()
    spark_home = Path(_find_spark_home())
    flags = jvm_options(directory, options)
    if not starts_directly(spark_home, pyspark.__version__, os.environ):
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return _launch_by_scripts(java, directory, settings, flags)
    if options.class_archive:
        archive = archive_for(java, pyspark.__version__, spark_home / "jars", flags)
        flags += flags_or_train(archive)
    jvm = start_jvm(gateway_command(java, spark_home / "jars", flags), directory)
    with environment(PYSPARK_GATEWAY_PORT=str(jvm.port), PYSPARK_GATEWAY_SECRET=jvm.secret):
        gateway = launch_gateway()
    gateway.proc = jvm.process
    return gateway


def _launch_by_scripts(
    java: JavaHome, directory: Path, settings: dict[str, str], flags: list[str]
) -> JavaGateway:
    """Start the JVM by spark-submit, which reads the user's Spark configuration files."""
    from pyspark import SparkConf
    from pyspark.java_gateway import launch_gateway

    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    # Spark refuses a heap size here: it has a setting of its own for it.
    extra = " ".join(flag for flag in flags if not flag.startswith("-Xmx"))
    conf.set("spark.driver.extraJavaOptions", extra)
    with (directory / LOG_NAME).open("wb") as log, environment(JAVA_HOME=str(java.path)):
        popen = {"stdout": log, "stderr": log, "start_new_session": True}
        with warnings.catch_warnings():
            # Lance warns of any fork. This one runs a shell at once, and never touches Lance.
            warnings.simplefilter("ignore")
            return launch_gateway(conf, popen)


def _forget_dead_jvm() -> None:
    """Make pyspark forget a context that ended, and a JVM that is no more."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession as SparkSession  # for annotations elsewhere

    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None and process.poll() is not None:
        if process.stdin is not None:
            process.stdin.close()
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = SparkSession._activeSession = None
    elif SparkContext._active_spark_context is not None:
        SparkContext._active_spark_context.stop()


def _end_jvm() -> None:
    """End a JVM of ours on which no session could be started, so that the next try is a new one."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.communicate()  # closes the pipe, which ends the JVM, and waits
        _forget_dead_jvm()

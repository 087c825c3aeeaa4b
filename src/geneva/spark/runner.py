"""Tasks run on a Spark session: one Spark job per submission.

Nothing here imports pyspark before it is needed, so ``import geneva`` is cheap.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from geneva.errors import GenevaError, JobCancelledError
from geneva.execution.runner import ANY, REPORT_DDL, arrow_body, partition_body, task_body
from geneva.execution.worker.output import output_place, pipe_place
from geneva.execution.worker.surroundings import Surroundings
from geneva.model.computation import Resources
from geneva.model.tables import Secrets
from geneva.spark.errors import explained, explaining
from geneva.spark.local_slots import LocalSlots, shared_slots, visible_gpus
from geneva.spark.modules import module_archive

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD, SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

MAX_JOBS_IN_FLIGHT = 32
"""Threads of a runner, each waiting for one Spark job; more submissions wait for one of them. Up to
31 slots, a task is a job, and one more is at hand."""
CANCEL_LIMIT_SECONDS = 30.0
WATCH_SECONDS = 2.0
"""How often a runner looks whether its session was stopped, while it has jobs."""
STOP_LIMIT_SECONDS = 5.0
"""How long jobs of a stopped session may take to hear of it, before nobody waits for them."""
_GROUP, _DESCRIPTION = "spark.jobGroup.id", "spark.job.description"
_MAX_OPERATIONS = 1_000
"""The latest operations of a job on Connect that its history names; Spark keeps as many jobs."""
_SHIPPED: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""By session: the archives of modules that its workers can have."""
_SHIPPING = threading.Lock()


@cache
def _module_folder() -> Path:
    """Where archives of modules are: Spark serves files from where they are, as long as it runs."""
    folder = Path(tempfile.mkdtemp(prefix="geneva-modules-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class SparkRunner:
    """Runs tasks on a Spark session: each ``submit`` is one Spark job, one task per item.

    ``slots`` is only for clusters whose size Spark doesn't report; ``gpus`` for machines whose GPUs
    are not all to be used, or not found: how many there are. ``env`` are variables that workers
    get. Workers on this machine also get what has changed in this process's environment since
    ``environment_before``, which was at the latest when Spark was started, and import what this
    process would import.
    """

    def __init__(
        self,
        session: SparkSession,
        *,
        slots: int | None = None,
        gpus: int | None = None,
        env: Secrets | None = None,
        environment_before: Mapping[str, str] | None = None,
    ) -> None:
        self._session = session
        self._slots, self._gpus = slots, gpus
        self._env = env or Secrets()
        self._environment_before = environment_before
        self._tag = f"geneva-{uuid.uuid4().hex}"
        self._profiles: dict[Resources, ResourceProfile | None] = {}
        remote = type(session).__module__.startswith("pyspark.sql.connect")
        with explaining():
            self._kind: _SessionKind = _Connect(session) if remote else _Classic(session)
        self._threads = ThreadPoolExecutor(MAX_JOBS_IN_FLIGHT, thread_name_prefix="geneva-job")
        self._cancelled = threading.Event()
        self._idle = threading.Condition()
        self._unfinished = 0
        self._is_watched = False
        self._group, self._description = "", ""
        self._modules: tuple[str, ...] = ()

    def describe_jobs(self, group: str, description: str) -> None:
        """Say what is submitted from here on, for Spark's pages and logs."""
        self._group, self._description = group, description

    def engine_facts(self) -> dict[str, Any]:
        """What Spark calls the jobs that it ran: its application, and their ids."""
        try:
            return self._kind.facts(self._tag)
        except Exception:  # noqa: BLE001  Spark is gone; py4j has no one error for that
            return {}

    @property
    def slots(self) -> int:
        """How many tasks can run at once: the cores that Spark has at this moment."""
        with self._explained():
            return self._slots or self._kind.cores()

    def slots_for(self, resources: Resources) -> int:
        """How many tasks with these needs can run at once.

        On a cluster Spark itself holds back those for which there is no room.
        """
        if not self._shares_machine(resources):
            return self.slots
        return self._machine().count(resources, self.slots)

    def _shares_machine(self, resources: Resources) -> bool:
        """Whether tasks need a share of the one machine that Spark runs on."""
        return self._kind.is_local and bool(resources.num_gpus or (resources.num_cpus or 1) > 1)

    def _machine(self) -> LocalSlots:
        return shared_slots(visible_gpus(os.environ, self._gpus))

    def submit(
        self, function: Callable[[T], str], items: Sequence[T], resources: Resources = ANY
    ) -> Future[list[str]]:
        """Start one Spark job that calls ``function`` on every item."""
        return self._start(self._run, function, items, resources)

    def submit_frame(
        self, frame: DataFrame, function: Callable[[Iterator[pa.RecordBatch]], str]
    ) -> Future[list[str]]:
        """Start one Spark job that calls ``function`` on the rows of every partition."""
        return self._start(self._run_frame, frame, function)

    def _start(self, job_of: Callable[..., list[str]], *args: Any) -> Future[list[str]]:
        """Run a Spark job in a thread."""
        from pyspark import inheritable_thread_target

        try:
            with self._explained():
                # The user's own tags and job group come along into our thread.
                inherited: Callable[..., list[str]] = inheritable_thread_target(self._session)(
                    job_of
                )
        except GenevaError as error:
            gone: Future[list[str]] = Future()
            gone.set_exception(error)
            return gone

        def run(*args: Any) -> list[str]:
            with self._explained():  # also what pyspark does before and after it calls us
                return inherited(*args)

        with self._idle:
            self._unfinished += 1
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, daemon=True).start()
        said = (self._group, self._description)
        job: Future[list[str]] = self._threads.submit(run, *args, said)
        job.add_done_callback(self._finished)
        return job

    def ship_modules(self, modules: Sequence[str]) -> None:
        """Have this runner's jobs use folders and files of Python modules, as they are now.

        They are sent to the workers once for each session; jobs of other runners don't see them.
        """
        with self._explained(), _SHIPPING:  # jobs of one context start at the same time
            sent = _SHIPPED.setdefault(self._session, set())
            archives = [module_archive(module, _module_folder()) for module in modules]
            for archive in archives:
                if archive.name not in sent:
                    self._kind.ship(str(archive))
                    sent.add(archive.name)
        # Of two modules of one name the latter counts: that of the inner context.
        self._modules = tuple(dict.fromkeys(archive.name for archive in reversed(archives)))

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
                self._kind.cancel(self._tag)
                time.sleep(0.1)

    def _finished(self, _: Future[list[str]]) -> None:
        with self._idle:
            self._unfinished -= 1
            self._idle.notify_all()

    def _watch(self) -> None:
        """End the jobs of a session that was stopped, as long as there are any.

        Spark drops a job without a word that is submitted in the moment in which it stops: its
        thread would wait for ever, and Python for the thread when it ends.
        """
        while not self._ends_within(WATCH_SECONDS):
            if self._kind.is_stopped() and not self._ends_within(STOP_LIMIT_SECONDS):
                self._kind.let_go()

    def _ends_within(self, seconds: float) -> bool:
        """Wait until there are no jobs; whether there are none, and so nobody watches any more."""
        with self._idle:
            ended = self._idle.wait_for(lambda: not self._unfinished, seconds)
            self._is_watched = not ended
            return ended

    def _run(
        self,
        function: Callable[[T], str],
        items: Sequence[T],
        resources: Resources,
        said: tuple[str, str],
    ) -> list[str]:
        self._check()
        if not items:
            return []
        if len(items) > 1 and self._shares_machine(resources):
            return self._run_apart(function, items, resources, said)
        with self._held(resources) as environment, self._kind.tagged(self._tag, *said):
            return self._reports(function, items, resources, environment)

    def _run_apart(
        self,
        function: Callable[[T], str],
        items: Sequence[T],
        resources: Resources,
        said: tuple[str, str],
    ) -> list[str]:
        """Run a job for each item: it has its own share of the machine, and Python process.

        When one fails the others are stopped: nobody hears of them any more.
        """
        from pyspark import inheritable_thread_target

        together = f"{self._tag}-{uuid.uuid4().hex}"

        def run_one(item: T) -> str:
            with self._kind.also_tagged(together):
                return self._run(function, [item], resources, said)[0]

        def inherits(run: Callable[[], str]) -> Callable[[], str]:
            """With properties of its own: those of one call would be shared by all threads."""
            inheriting: Callable[[], str] = inheritable_thread_target(self._session)(run)
            return inheriting

        threads = ThreadPoolExecutor(len(items), thread_name_prefix="geneva-share")
        try:
            jobs = [threads.submit(inherits(partial(run_one, item))) for item in items]
            wait(jobs, return_when=FIRST_EXCEPTION)
            failed = next((job for job in jobs if job.done() and job.exception()), None)
            while failed is not None and wait(jobs, timeout=0.1).not_done:
                # Again and again: a job that was about to start can't be seen the first time.
                self._kind.cancel(together)
            return [job.result() for job in (jobs if failed is None else [failed])]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _run_frame(
        self,
        frame: DataFrame,
        function: Callable[[Iterator[pa.RecordBatch]], str],
        said: tuple[str, str],
    ) -> list[str]:
        self._check()
        with self._kind.tagged(self._tag, *said):
            body = partition_body(function, self._surroundings({}))
            with _pandas_warnings_off():
                reports = frame.mapInArrow(body, REPORT_DDL)
            answers = reports.toArrow()
            self._kind.ran(reports)
        return [str(text) for text in answers["report"].to_pylist()]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what happened where a call to Spark fails, whoever of us or pyspark made it."""
        try:
            yield
        except GenevaError:
            raise
        except Exception as error:  # noqa: BLE001  all of them are explained
            if self._cancelled.is_set():  # Spark's own error doesn't say so
                raise JobCancelledError("The job was cancelled.") from None
            # Not chained: py4j would print pages of JVM, asking a JVM that may be gone by then.
            raise explained(error, stopped=self._kind.is_stopped()) from None

    def _held(self, resources: Resources) -> contextlib.AbstractContextManager[Mapping[str, str]]:
        """Hold the task's share of the machine, where Spark doesn't; gives its variables."""
        if not self._shares_machine(resources):
            return contextlib.nullcontext({})
        return self._machine().held(resources, self.slots, self._cancelled.is_set)

    def _reports(
        self,
        function: Callable[[T], str],
        items: Sequence[T],
        resources: Resources,
        environment: Mapping[str, str],
    ) -> list[str]:
        # One profile for all jobs alike: with dynamic allocation a new one gets new executors.
        if resources not in self._profiles:
            self._profiles[resources] = self._kind.profile(resources)
        body = task_body(function, items, self._surroundings(environment))
        self._check()
        return self._kind.run(body, len(items), self._profiles[resources], environment)

    def _surroundings(self, given: Mapping[str, str]) -> Surroundings:
        """What workers are told; variables that Spark has `given` them stay as they are."""
        level = logging.getLogger().level
        if not self._kind.is_here:
            return Surroundings(env=self._env, modules=self._modules, log_level=level)
        changed, unset = _changes(self._environment_before)
        path = tuple(str(Path(entry).absolute()) for entry in sys.path)  # "" is where we are
        changed = {name: value for name, value in changed.items() if name not in given}
        return Surroundings(
            env=Secrets({**changed, **self._env}),
            unset=tuple(name for name in unset if name not in given),
            path=path,
            modules=self._modules,
            log_level=level,
            output_folder=output_place(),
            pipe_folder=pipe_place(),
        )

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise JobCancelledError("The job was cancelled before its tasks started.")


def _changes(before: Mapping[str, str] | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """What is new or different in this process's environment, and the names of what is gone.

    Without what Spark and Python set for their own workers.
    """
    if before is None:
        return {}, ()
    now = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    _ever_set.update(now)
    changed = {name: value for name, value in now.items() if before.get(name) != value}
    gone = (*before, *sorted(_ever_set - before.keys()))
    return changed, tuple(
        n for n in gone if n not in now and not n.startswith(_OWN + _SET_BY_SPARK)
    )


_ever_set: set[str] = set()
"""Variables that this process had when a job began; Spark's JVM may have been started with them."""
_OWN = ("SPARK_", "PYSPARK_", "PYTHON", "JAVA_HOME")
_SET_BY_SPARK = ("OMP_NUM_THREADS",)
"""What workers have from Spark when the driver has none."""


# ----------------------------------------------------------------- what differs by kind of session


_Body: TypeAlias = Callable[[Iterable[int]], Iterator[str]]


class _SessionKind(Protocol):
    """The calls that are different for classic sessions and for Connect."""

    @property
    def is_local(self) -> bool: ...

    is_here: bool
    """Whether workers are known to be on this machine."""

    def is_stopped(self) -> bool:
        """Whether somebody has stopped the session, which is not to be gone by itself."""

    def let_go(self) -> None:
        """End the calls of all threads that wait for jobs of a session that was stopped."""

    def cores(self) -> int: ...
    def tagged(
        self, tag: str, group: str, description: str
    ) -> contextlib.AbstractContextManager[None]: ...
    def also_tagged(self, tag: str) -> contextlib.AbstractContextManager[None]:
        """Give the jobs of this thread one more tag to be cancelled by."""

    def run(
        self,
        body: _Body,
        tasks: int,
        profile: ResourceProfile | None,
        variables: Mapping[str, str],
    ) -> list[str]:
        """Call a function on the numbers of so many tasks, one each; return what they yield.

        Tasks run in Python processes with these variables, where Spark starts them here.
        """

    def ran(self, frame: DataFrame) -> None: ...
    def facts(self, tag: str) -> dict[str, Any]: ...
    def cancel(self, tag: str) -> None: ...
    def ship(self, archive: str) -> None: ...
    def profile(self, resources: Resources) -> ResourceProfile | None: ...


class _Classic:
    """A session with a SparkContext, and its JVM, in this process."""

    def __init__(self, session: SparkSession) -> None:
        self._context = session.sparkContext
        self.is_local = self.is_here = self._context.master.startswith("local")
        self._waiting: set[Any] = set()
        """The connections of the threads that wait for jobs."""
        self._group: str | None = None
        """The group that the latest jobs ran in."""

    def is_stopped(self) -> bool:
        java = self._context._jsc
        try:
            return java is None or bool(java.sc().isStopped())
        except Exception:  # noqa: BLE001  py4j has no one error for "the other side is gone"
            return self._context._jsc is None

    def let_go(self) -> None:
        for connection in tuple(self._waiting):
            with contextlib.suppress(Exception):  # it is closed already, by whatever
                connection.socket.shutdown(socket.SHUT_RDWR)

    def cores(self) -> int:
        return max(1, int(self._context.defaultParallelism))

    @contextlib.contextmanager
    def tagged(self, tag: str, group: str, description: str) -> Iterator[None]:
        context = self._context
        context.addJobTag(tag)
        connection = _thread_connection(context)
        if context.getLocalProperty("spark.scheduler.pool") is None:
            context.setLocalProperty("spark.scheduler.pool", tag)
        # A group of the user's own stays: somebody may be about to cancel by it.
        group = context.getLocalProperty(_GROUP) or group
        self._group = group or None
        before = context.getLocalProperty(_DESCRIPTION)
        with contextlib.ExitStack() as said:
            for name, value, was in (
                (_GROUP, group, context.getLocalProperty(_GROUP)),
                (_DESCRIPTION, description or before, before),
            ):
                context.setLocalProperty(name, value or None)
                said.callback(context.setLocalProperty, name, was)
            self._waiting.add(connection)
            try:
                yield
            finally:
                self._waiting.discard(connection)
                context.removeJobTag(tag)

    @contextlib.contextmanager
    def also_tagged(self, tag: str) -> Iterator[None]:
        self._context.addJobTag(tag)
        try:
            yield
        finally:
            self._context.removeJobTag(tag)

    def run(
        self,
        body: _Body,
        tasks: int,
        profile: ResourceProfile | None,
        variables: Mapping[str, str],
    ) -> list[str]:
        """By the API of RDDs: planning a data frame takes as long as a short job does."""
        _find_classes_once(self._context._jvm)
        if profile is None:
            numbers = _numbers(self._context, tasks)
        else:
            numbers = self._context.parallelize(range(tasks), tasks).withResources(profile)
        reports = numbers.mapPartitions(body)
        with _environment:
            before = self._context.environment
            self._context.environment = {**before, **variables}
            try:
                _ = reports._jrdd  # made for the JVM, with the variables that there are now
            finally:
                self._context.environment = before
        return reports.collect()

    def ran(self, frame: DataFrame) -> None:
        """The status tracker knows."""

    def facts(self, tag: str) -> dict[str, Any]:
        found = self._context._jsc.sc().statusTracker().getJobIdsForTag(tag)
        group = {} if self._group is None else {"group": self._group}
        return {"application": self._context.applicationId, "jobs": sorted(found), **group}

    def cancel(self, tag: str) -> None:
        self._context.cancelJobsWithTag(tag)

    def ship(self, archive: str) -> None:
        self._context.addFile(archive)  # addPyFile would let all jobs import from it, and us

    def profile(self, resources: Resources) -> ResourceProfile | None:
        return None if self.is_local else _profile(resources, self._context.getConf().get)


def _thread_connection(context: SparkContext) -> Any:
    """This thread's own connection to the JVM; None where threads share some."""
    client = context._gateway._gateway_client
    return client.get_thread_connection() if hasattr(client, "get_thread_connection") else None


def _numbers(context: SparkContext, count: int) -> RDD[int]:
    """The numbers below `count`, a partition each: made once, as each takes a file and some ms.

    The context has them: it goes with them when it was stopped, which an `lru_cache` would prevent.
    """
    made: dict[int, RDD[int]] = vars(context).setdefault("_geneva_numbers", {})
    numbers = made.get(count)
    if numbers is None:
        made[count] = numbers = context.parallelize(range(count), count)
    return numbers


_CLASSES = ("PythonRDD", "PythonUtils", "SimplePythonFunction")
"""The classes of Spark's JVM that pyspark asks for by these names for each job."""


def _find_classes_once(jvm: Any) -> None:
    """Keep what pyspark finds: each look-up goes through all packages, which takes half a ms."""
    for name in _CLASSES:
        if name not in vars(jvm):
            setattr(jvm, name, getattr(jvm, name))


class _Connect:
    """A session on a Spark Connect server: no context, no JVM, and its own kind of tags."""

    is_here = False  # the server may be anywhere

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._operations: deque[str] = deque(maxlen=_MAX_OPERATIONS)
        self._cores: int | None = None
        master = session.conf.get("spark.master", "local") or "local"
        self.is_local = master.startswith("local")

    def is_stopped(self) -> bool:
        return bool(self._session.is_stopped)

    def let_go(self) -> None:
        """Its calls end with the session."""

    def cores(self) -> int:
        if self._cores is None:
            # Connect doesn't report it, but cuts a range into as many parts as there are cores.
            parts = self._session.range(0, 1_000_000).selectExpr("spark_partition_id() AS part")
            last = parts.selectExpr("max(part)").toArrow()
            self._cores = int(last.column(0)[0].as_py()) + 1
        return self._cores

    @contextlib.contextmanager
    def tagged(self, tag: str, group: str, description: str) -> Iterator[None]:
        # A server has groups and descriptions of its own; but its jobs have tags, without commas.
        tags = [text.replace(",", ";") for text in (tag, group, description) if text]
        for each in tags:
            self._session.addTag(each)
        try:
            yield
        finally:
            for each in tags:
                self._session.removeTag(each)

    @contextlib.contextmanager
    def also_tagged(self, tag: str) -> Iterator[None]:
        self._session.addTag(tag)
        try:
            yield
        finally:
            self._session.removeTag(tag)

    def run(
        self,
        body: _Body,
        tasks: int,
        profile: ResourceProfile | None,
        variables: Mapping[str, str],  # a server's Python processes have their own
    ) -> list[str]:
        numbers = self._session.range(0, tasks, 1, tasks)
        with _pandas_warnings_off():
            reports = numbers.mapInArrow(arrow_body(body), REPORT_DDL, profile=profile)
        answers = reports.toArrow()
        self.ran(reports)
        found = dict(zip(answers["index"].to_pylist(), answers["report"].to_pylist(), strict=True))
        return [found[number] for number in range(tasks)]

    def ran(self, frame: DataFrame) -> None:
        operation = getattr(frame.executionInfo, "operation_id", None)
        if operation is not None:
            self._operations.append(operation)

    def facts(self, tag: str) -> dict[str, Any]:
        return {"session": self._session.session_id, "operations": list(self._operations)}

    def cancel(self, tag: str) -> None:
        self._session.interruptTag(tag)

    def ship(self, archive: str) -> None:
        self._session.addArtifacts(archive, file=True)

    def profile(self, resources: Resources) -> ResourceProfile | None:
        return None if self.is_local else _profile(resources, self._session.conf.get)


def _profile(
    resources: Resources, setting: Callable[[str, str], str | None]
) -> ResourceProfile | None:
    """Return what a task asks the cluster for, or None where one core is all it needs.

    Memory is left out: Spark gives memory to executors, when they start, not to tasks. Where Spark
    starts executors for a profile, it has to be told what these have, too.
    """
    cores = resources.num_cpus or 1
    gpus = resources.num_gpus or 0
    if cores == 1 and not gpus:
        return None
    from pyspark.resource import (
        ExecutorResourceRequests,
        ResourceProfileBuilder,
        TaskResourceRequests,
    )

    requests = TaskResourceRequests().cpus(cores)
    if gpus:
        # Spark shares one GPU among tasks, but gives out several only whole.
        requests = requests.resource("gpu", gpus if gpus <= 1 else math.ceil(gpus))
    builder = ResourceProfileBuilder().require(requests)
    if gpus and setting("spark.dynamicAllocation.enabled", "false") == "true":
        amount = float(setting("spark.executor.resource.gpu.amount", "") or math.ceil(gpus))
        script = setting("spark.executor.resource.gpu.discoveryScript", "") or ""
        executors = ExecutorResourceRequests().resource("gpu", int(amount), script)
        executors.cores(int(setting("spark.executor.cores", "") or math.ceil(cores)))
        builder = builder.require(executors)
    return builder.build


_environment = threading.Lock()
"""A context has one set of variables for the Python processes of all jobs: they take turns."""
_filters = threading.Lock()


@contextlib.contextmanager
def _pandas_warnings_off() -> Iterator[None]:
    """Hide what pyspark says about the version of pandas, which our users can't act on."""
    with _filters, warnings.catch_warnings():  # the process has one list of them: take turns
        warnings.simplefilter("ignore", FutureWarning)
        yield

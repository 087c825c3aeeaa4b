"""Spark sessions: the user's own, or one that is started in this process at first need.

A session may be anybody's: classic or Connect, of one machine or of many. Nothing here imports
pyspark before it is needed, so ``import geneva`` is cheap, and a plan with no work in it never
starts Spark.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from geneva.config import environment
from geneva.errors import MissingDependencyError, SparkUnavailableError
from geneva.execution.worker.output import keep_output_in
from geneva.spark.embedded.class_archive import archive_for, flags_or_train
from geneva.spark.embedded.java import (
    STARTED_MARKER,
    JavaHome,
    find_java,
    gateway_command,
    starts_directly,
)
from geneva.spark.embedded.settings import (
    APP_NAME,
    LOG_NAME,
    QUERY_SETTINGS,
    TASK_SETTINGS,
    LocalOptions,
    end_jvm,
    is_own_jvm,
    jvm_options,
    local_settings,
    private_directory,
    start_jvm,
    tail,
    unchanged_interrupt_handler,
)
from geneva.spark.errors import explaining, reason, spark_text

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkContext
    from pyspark.sql import DataFrame as DataFrame  # for annotations elsewhere
    from pyspark.sql import SparkSession as SparkSession

_LOG = logging.getLogger("geneva")
_starting = threading.RLock()


def embedded_session(options: LocalOptions | None = None) -> SparkSession:
    """Return this process's Spark session: the user's if there is one, else our own.

    Ours is started at first need and used from then on. A session that was stopped, or whose
    JVM died, is replaced by a new one.
    """
    with _starting, explaining():
        return active_session() or _start(options or LocalOptions())


def cluster_session(address: str, conf: Mapping[str, str]) -> SparkSession:
    """Start a session on a master, or on a Connect server (`sc://...`), with settings."""
    from pyspark.sql import SparkSession as SparkSession  # for annotations elsewhere

    with _starting:
        running = active_session()
        if running is not None:
            raise SparkUnavailableError(
                f"There is a Spark session in this process already, so that none on {address} can "
                "be started: a process has one. Enter the context before the first job, stop the "
                "session, or give one to geneva.connect(spark=...)."
            )
        builder = SparkSession.builder
        if address.startswith("sc:"):
            builder = builder.remote(address)
        else:  # a JVM that embedded Spark has used has no name for its applications
            builder = builder.master(address).appName(APP_NAME)
        for name, value in conf.items():
            builder = builder.config(name, value)
        try:
            with unchanged_interrupt_handler():
                return builder.getOrCreate()
        except Exception as error:  # noqa: BLE001  all of them mean: no session
            cause = reason(spark_text(error))
            raise SparkUnavailableError(f"No Spark session on {address}: {cause}") from None
        except BaseException as error:  # Ctrl-C
            _end_processes_of(error)
            if not _is_client_only():
                from pyspark import SparkContext

                _give_up(SparkContext._gateway, None, interrupted=True)
            raise


def active_session() -> SparkSession | None:
    """Return the live session of this process, classic or Connect, or None."""
    remote = sys.modules.get("pyspark.sql.connect.session")
    if remote is not None:
        session = remote.SparkSession.getActiveSession() or remote.SparkSession._default_session
        if session is not None and not session.is_stopped:
            return session
    if "pyspark" not in sys.modules or _is_client_only():
        return None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession as SparkSession  # for annotations elsewhere

    context = SparkContext._active_spark_context
    if context is None or not _is_alive(context):
        return None
    known = SparkSession._instantiatedSession
    return known if known is not None and known._sc is context else SparkSession(context)


def slots_of(session: SparkSession) -> int | None:
    """How many tasks a session runs at once; None: it is one of Spark Connect, which can't say."""
    context = getattr(session, "_sc", None)
    return None if context is None else int(context.defaultParallelism)


def compiling_queries(session: SparkSession) -> SparkSession:
    """The session, ready for queries over many rows.

    Our own has code generation turned off, for plans of one row per task: those of data frames
    would be several times slower. Whoever set it otherwise keeps it.
    """
    for name, value in QUERY_SETTINGS.items():
        if session.conf.get(name, value) == TASK_SETTINGS[name]:
            session.conf.set(name, value)
    return session


def _is_client_only() -> bool:
    """Whether pyspark is pyspark-client: sessions of Connect servers, and no Spark."""
    from pyspark.util import is_remote_only

    return is_remote_only()


@contextmanager
def as_own_session(session: SparkSession) -> Iterator[None]:
    """Make a session the one of this thread meanwhile, or for good where the thread has none.

    Spark looks a format up in the session of the thread, whichever session was asked to read or to
    write it. On Connect every request is for its own session.
    """
    if not hasattr(session, "_jsparkSession"):
        yield
        return
    sessions = session._get_j_spark_session_class(session._jvm)
    former = sessions.getActiveSession()
    sessions.setActiveSession(session._jsparkSession)
    try:
        yield
    finally:
        if former.isDefined():
            sessions.setActiveSession(former.get())


def _is_alive(context: SparkContext) -> bool:
    """Whether the context can run jobs: neither stopped, here or in the JVM, nor orphaned."""
    try:
        return context._jsc is not None and not context._jsc.sc().isStopped()
    except Exception:  # noqa: BLE001  py4j has no one error for "the other side is gone"
        return False


def _start(options: LocalOptions) -> SparkSession:
    """Start a context of our own, on the JVM of this process if it has one already."""
    if _is_client_only():
        raise SparkUnavailableError(
            "Only the client of Spark Connect is installed here (pyspark-client), which can't "
            "start Spark. Give a session of a server, geneva.connect(..., spark=SparkSession."
            'builder.remote("sc://host:15002").getOrCreate()), or install geneva-spark in place of '
            "geneva-spark-client."
        )
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession as SparkSession  # for annotations elsewhere

    logging.getLogger().addFilter(_not_of_py4j)
    _forget_dead_jvm()
    gateway = SparkContext._gateway
    reused = gateway is not None
    directory: Path | None = None
    try:
        directory = private_directory()
        settings = local_settings(directory, options)
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        # Without it Spark's web pages are open to the network.
        with unchanged_interrupt_handler(), environment({"SPARK_LOCAL_IP": "127.0.0.1"}):
            gateway = gateway or _launch(directory, settings, options)
            context = SparkContext(conf=conf, gateway=gateway)
            # Taken from the environment otherwise, where "python3" is any Python on the PATH.
            context.pythonExec = sys.executable
            session = SparkSession(context)
    except BaseException as error:
        failed = _not_started(error, directory)
        _give_up(gateway, directory, interrupted=not isinstance(error, Exception))
        if failed is None:
            raise
        raise failed from None
    if reused:  # the JVM's shell looks after the folder that the JVM was started with
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / STARTED_MARKER).touch()
    keep_output_in(str(directory))  # it goes with the folder, however this process ends
    _keep_quiet(context)
    if options.ui:
        _LOG.warning("Spark's web pages are at %s", context.uiWebUrl)
    return session


def _not_started(error: BaseException, directory: Path | None) -> SparkUnavailableError | None:
    """What to say where no session could be started; None: the error says it, or it is Ctrl-C."""
    if isinstance(error, MissingDependencyError) or not isinstance(error, Exception):
        return None
    log = "" if directory is None else tail(directory / LOG_NAME)
    cause = reason(spark_text(error))
    return SparkUnavailableError(f"Spark could not be started here: {cause}{log}")


def _give_up(gateway: JavaGateway | None, directory: Path | None, *, interrupted: bool) -> None:
    """End the JVM in which no session could be started, so that the next try is a new one.

    It may have a context that Python knows nothing of, and a JVM can have but one. The user's own
    is ended after Ctrl-C alone: with any other error Spark has cleared up in it.
    """
    process = getattr(gateway, "proc", None)
    if process is not None and (interrupted or is_own_jvm(process)):
        end_jvm(process)
        _forget_dead_jvm()
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def _keep_quiet(context: SparkContext) -> None:
    """Print no traceback when the JVM dies: what that means for a job, its own error says."""
    server = getattr(context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda request, address: None


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """Whether py4j did not log this: it puts tracebacks into the root's log when the JVM dies."""
    return f"{os.sep}py4j{os.sep}" not in record.pathname


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
    address = {"PYSPARK_GATEWAY_PORT": str(jvm.port), "PYSPARK_GATEWAY_SECRET": jvm.secret}
    try:
        with environment(address):  # where alone they are looked for
            gateway = launch_gateway()
        gateway.proc = jvm.process
    except BaseException:  # Ctrl-C: the JVM would be nobody's
        end_jvm(jvm.process)
        raise
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
    with (directory / LOG_NAME).open("wb") as log, environment({"JAVA_HOME": str(java.path)}):
        popen = {"stdout": log, "stderr": log, "start_new_session": True}
        with warnings.catch_warnings():
            # Lance warns of any fork. This one runs a shell at once, and never touches Lance.
            warnings.simplefilter("ignore")
            try:
                return launch_gateway(conf, popen)
            except BaseException as error:  # Ctrl-C: the JVM would be nobody's
                _end_processes_of(error)
                raise


def _end_processes_of(error: BaseException) -> None:
    """End what functions had started as they were interrupted: pyspark tells nobody of its JVM."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    for value in [value for frame in frames for value in frame.f_locals.values()]:
        if isinstance(value, subprocess.Popen):
            end_jvm(value)


def _forget_dead_jvm() -> None:
    """Make pyspark forget a context that ended, and a JVM that is no more."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession as SparkSession  # for annotations elsewhere

    process = getattr(SparkContext._gateway, "proc", None)
    context = SparkContext._active_spark_context
    if context is not None and not _stops(context) and process is not None:
        process.kill()  # its JVM died a moment ago, or will
        process.wait()
    if process is not None and process.poll() is not None:
        if process.stdin is not None:
            process.stdin.close()
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = SparkSession._activeSession = None


def _stops(context: SparkContext) -> bool:
    """Stop a context; False where its JVM is not there to hear of it."""
    try:
        context.stop()
    except Exception:  # noqa: BLE001  py4j has no one error for "the other side is gone"
        return False
    return True

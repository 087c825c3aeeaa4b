"""What a Spark failure means to the user: its text read, and said again with a remedy.

Spark wraps what happened in layers of JVM traces that differ by kind of session, so the text is
all there is to go by. No pyspark here: tests need no session.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from geneva.errors import (
    GenevaError,
    JobCancelledError,
    JobError,
    SparkUnavailableError,
    StorageFullError,
    WorkerLostError,
)
from geneva.render.plain import plain

_log = logging.getLogger(__name__)

_CANCELLED = re.compile(r"cancelled (because|as part|by)|SPARK_JOB_CANCELLED|OPERATION_CANCELED")
_LOST = re.compile(
    r"Python worker (exited unexpectedly|failed to connect)|ExecutorLostFailure|Executor .*? lost"
    r"|Remote RPC client disassociated|exit(ed)? (code|status) 137|Container killed"
)
_TRIES = re.compile(r"Task \d+ in stage \S+ failed (\d+) times")
_STOPPED = re.compile(r"SparkContext (was|has been) shut ?down|stopped SparkContext")
_GONE = re.compile(
    r"StatusCode\.UNAVAILABLE"
    r"|Connection refused|Answer from Java side is empty|Error while (receiving|sending)"
    r"|An error occurred while calling \S+\Z"  # with nothing of Java's behind it
)
_FULL = re.compile(
    r".*(java|org)\.[\w.]+: [^'\"\n]*(No space left on device|Disk quota exceeded).*"
    r"|^[^'\"\n]*OSError: \[Errno (28|122)\].*"
    r"|^[^'\"\n]*LanceError\(IO\): [^'\"\n]*\(os error (28|122|27)\).*"
    r"|^[^'\"\n]*PanicException: [^'\"\n]*Os \{ code: (28|122|27), kind: .*",
    re.MULTILINE,
)
"""As Java, Python and Lance say it of a disk: the words alone, or in quotes, may be a user's."""
_DELETED = re.compile(r"OSError: LanceError\(IO\): failed to (shutdown|persist)[^'\"]*os error 2\)")
"""Of a file that Lance has written and can't find when it is to get its name."""
_MAX_TRACE_LINES = 30
"""Lines of a worker's traceback that are worth showing: the last ones."""


def explained(error: Exception, *, stopped: bool = False) -> GenevaError:
    """Return a Spark failure as an error that says what happened and what to do about it.

    With the session `stopped`, any call may fail inside of pyspark, which clears up at that moment.
    """
    text = spark_text(error)
    _log.debug("Spark failed: %s", plain(text, lines=True))
    if full := _FULL.search(text):
        return StorageFullError(
            "No space is left where the tables are, or where Spark keeps its own files "
            "(spark.local.dir, or TMPDIR on every machine). Make room and run again: what was "
            f"saved before is kept.\n{full.group().strip()[:600]}"
        )
    # First, because a user's traceback may hold any of the words that are looked for below.
    if trace := _traceback(text):
        if trace.rpartition("\n")[2].startswith(("ModuleNotFoundError", "ImportError")):
            return SparkUnavailableError(
                "The workers' Python can't import what this task needs. Install the same packages "
                "on every worker, or let PYSPARK_PYTHON name a Python that has them (before the "
                f"session starts).\n{trace}"
            )
        if _DELETED.match(trace.rpartition("\n")[2]):
            return JobError(
                "Files that the job was writing were deleted, again and again. A clean-up with "
                "delete_unverified=True deletes what is not committed yet: run it when no job "
                "writes. What was saved before is kept; run the job again."
            )
        return JobError(f"A task failed on its worker, also when tried again.\n{trace}")
    # Before what else is said of jobs then: they are cancelled, and their workers are lost.
    if stopped or _STOPPED.search(text):
        by_spark = f"\n{reason(text)}" if _STOPPED.search(text) else ""
        return SparkUnavailableError(
            "The Spark session was stopped while the job ran. What was computed is kept: run the "
            f"job again, in a session that runs.{by_spark}"
        )
    if _CANCELLED.search(text):
        return JobCancelledError("The Spark job was cancelled from outside Geneva.")
    if _LOST.search(text):
        return _lost(text)
    if _GONE.search(text) or isinstance(error, ConnectionError):
        return SparkUnavailableError(
            "Spark went away while the job ran. Start it and run the job again: finished work "
            f"is kept.\n{reason(text)}"
        )
    return SparkUnavailableError(f"Spark could not run the job.\n{reason(text)}")


def _lost(text: str) -> WorkerLostError:
    lost = WorkerLostError(
        "Worker processes died again and again while running the same task, so Spark gave "
        "up. Usual causes: out of memory (use a smaller batch, or give workers more), or a "
        f"crash in native code.\n{_crash(text) or reason(text)}"
    )
    tries = _TRIES.search(text)
    lost.tries = int(tries.group(1)) if tries else None
    return lost


@contextmanager
def explaining() -> Iterator[None]:
    """Say what happened where a call to Spark fails: its JVM may be gone at any moment."""
    try:
        yield
    except GenevaError:
        raise
    except Exception as error:  # noqa: BLE001  py4j has no one error for "the other side is gone"
        # Not chained: py4j would print pages of JVM, asking a JVM that may be gone by then.
        raise explained(error) from None


def spark_text(error: Exception) -> str:
    """Return what Spark says about an error. It asks the JVM for that, which may be gone."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  py4j fails in many ways when the JVM is gone
        return f"{type(error).__name__}: Answer from Java side is empty"


def _traceback(text: str) -> str:
    """Return the worker's Python traceback, without Spark's own frames and the JVM's."""
    found = re.search(r"Traceback \(most recent.*?(?=^\s+at |^JVM stack|\Z)", text, re.M | re.S)
    if found is None:
        return ""
    spark_frame = r'^  File "[^"]*/pyspark/[^"]*", line .*\n(?:    .*\n)*'
    frames = re.sub(spark_frame, "", found.group(), flags=re.M)
    lines = [line for line in frames.splitlines() if line.strip() and "SQLSTATE" not in line]
    return "\n".join(lines[-_MAX_TRACE_LINES:])


def _crash(text: str) -> str:
    """Return where a worker was when native code crashed it, if Python reported it."""
    fatal = re.search(r"Fatal Python error: .*", text)
    thread = re.search(r"^Current thread .*\n((?:  File .*\n?)*)", text, re.M)
    if fatal is None or thread is None:
        return ""
    frames = [frame for frame in thread.group(1).splitlines() if "/pyspark/" not in frame]
    return "\n".join([fatal.group(), "Most recent call first:", *frames[:_MAX_TRACE_LINES]])


def reason(text: str) -> str:
    """Return the one line of a JVM error that names its cause, without the stack below it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for marker in ("Job aborted due to stage failure", "Caused by:", "Exception:", "Error:"):
        for line in lines:
            if marker in line:
                return line.removeprefix("Caused by:").strip(": ")[:600]
    return lines[0][:600] if lines else "Spark gave no reason."

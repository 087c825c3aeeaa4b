"""What a Spark failure means to the user: its text read, and said again with a remedy.

Spark wraps what happened in layers of JVM traces that differ by kind of session, so the text is
all there is to go by. No pyspark here: the words are tested without a session.
"""

from __future__ import annotations

import re

from geneva.errors import (
    GenevaError,
    JobCancelledError,
    JobError,
    SparkUnavailableError,
    WorkerLostError,
)

_CANCELLED = re.compile(r"cancelled (because|as part|by)|SPARK_JOB_CANCELLED|OPERATION_CANCELED")
_LOST = re.compile(
    r"Python worker (exited unexpectedly|failed to connect)|ExecutorLostFailure|Executor .*? lost"
    r"|Remote RPC client disassociated|exit(ed)? (code|status) 137|Container killed"
)
_UNREACHABLE = re.compile(
    r"SparkContext (was|has been) shut ?down|stopped SparkContext|StatusCode.UNAVAILABLE"
    r"|Connection refused|Answer from Java side is empty|while receiving|while sending"
)


def explained(error: Exception) -> GenevaError:
    """Return a Spark failure as an error that says what happened and what to do about it."""
    text = str(error)
    if _CANCELLED.search(text):
        return JobCancelledError("The Spark job was cancelled from outside Geneva.")
    if _LOST.search(text):
        return WorkerLostError(
            "Worker processes died again and again while running the same task, so Spark gave "
            "up. Usual causes: out of memory (use a smaller batch, or give workers more), or a "
            f"crash in native code.\n{_worker_traceback(text) or _first_cause(text)}"
        )
    if trace := _worker_traceback(text):
        last = trace.splitlines()[-1]
        if last.startswith(("ModuleNotFoundError", "ImportError")):
            return SparkUnavailableError(
                "The workers' Python can't import what this task needs. Install the same packages "
                "on every worker, or let PYSPARK_PYTHON name a Python that has them (before the "
                f"session starts).\n{trace}"
            )
        return JobError(f"A task failed on its worker, also when tried again.\n{trace}")
    if _UNREACHABLE.search(text) or isinstance(error, ConnectionError):
        return SparkUnavailableError(
            f"Spark went away while the job ran. Start it and run the job again: finished work "
            f"is kept.\n{_first_cause(text)}"
        )
    return SparkUnavailableError(f"Spark could not run the job.\n{_first_cause(text)}")


def _worker_traceback(text: str, lines: int = 30) -> str:
    """Return the Python traceback in a Spark error, without Spark's own frames and the JVM's."""
    found = re.search(
        r"^(Traceback \(most recent|Fatal Python error).*?(?=^\s+at |^JVM stacktrace|^\tat |\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    if found is None:
        return ""
    frames = re.sub(
        r'^  File "[^"]*/pyspark/[^"]*", line .*\n(?:    .*\n)*', "", found.group(0), flags=re.M
    )
    kept = [line for line in frames.splitlines() if line.strip() and "SQLSTATE" not in line]
    return "\n".join(kept[-lines:])


def _first_cause(text: str) -> str:
    """Return the line of a JVM error that names the cause, without the stack below it."""
    causes = [line.strip() for line in text.splitlines() if "xception:" in line or "rror:" in line]
    plain = [line.strip() for line in text.splitlines() if line.strip()]
    return (causes or plain or ["(Spark gave no reason)"])[0][:500]

"""What a user reads when Spark fails: short, with the cause, and with a remedy."""

from __future__ import annotations

import pytest

from geneva.errors import (
    JobCancelledError,
    JobError,
    SparkUnavailableError,
    StorageFullError,
    WorkerLostError,
)
from geneva.spark.errors import explained, explaining


def test_lost_executor() -> None:
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
    assert error.tries == 4


def test_cancelled_by_somebody_else() -> None:
    error = explained(Exception("[SPARK_JOB_CANCELLED] Job 7 cancelled because of a tag"))
    assert isinstance(error, JobCancelledError)


@pytest.mark.parametrize(
    ("text", "stopped"),
    [
        ("'NoneType' object has no attribute 'setLocalProperty'", True),
        ("[OPERATION_CANCELED] Operation has been canceled.", True),
        ("Job 3 cancelled because SparkContext was shut down", False),
        ("java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.", False),
    ],
)
def test_a_stopped_session_is_said(text: str, stopped: bool) -> None:
    error = explained(AttributeError(text), stopped=stopped)
    assert type(error) is SparkUnavailableError
    assert str(error).startswith("The Spark session was stopped while the job ran. What was ")
    assert (text in str(error)) is not stopped


def test_gone() -> None:
    assert isinstance(explained(ConnectionRefusedError(111, "refused")), SparkUnavailableError)


def test_module_that_workers_lack() -> None:
    text = (
        "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
        '  File "/x/pyspark/worker.py", line 1, in main\n    run()\n'
        "ModuleNotFoundError: No module named 'torch'\n\nJVM stacktrace:\norg.apache..."
    )
    error = explained(Exception(text))
    assert isinstance(error, SparkUnavailableError)
    assert "Install the same packages" in str(error)
    assert str(error).endswith("No module named 'torch'")


def test_unknown() -> None:
    error = explained(Exception("something odd"))
    assert isinstance(error, SparkUnavailableError)
    assert "something odd" in str(error)


def test_failed_task_on_connect() -> None:
    text = (
        "\n  An exception was thrown from the Python worker. Please see the stack trace below.\n"
        "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: "
        "Traceback (most recent call last):\n"
        '  File "/x/pyspark/worker.py", line 1, in main\n    run()\n    ^^^\n'
        '  File "/x/geneva/execution/worker.py", line 1, in work\n    read()\n'
        "OSError: the disk is on fire\n SQLSTATE: 38000"
    )
    error = explained(Exception(text))
    assert isinstance(error, JobError)
    assert str(error).splitlines()[1:] == [
        "Traceback (most recent call last):",
        '  File "/x/geneva/execution/worker.py", line 1, in work',
        "    read()",
        "OSError: the disk is on fire",
    ]


@pytest.mark.parametrize(
    "cause",
    [
        "java.io.IOException: No space left on device",
        "java.nio.file.FileSystemException: /tmp/a: No space left on device",
        "OSError: [Errno 28] No space left on device: '/tmp/a'",
        "OSError: LanceError(IO): Disk quota exceeded (os error 122), /a/b.rs:1:2",
        "pyo3_runtime.PanicException: called `Result::unwrap()` on an `Err` value: Os { code: 28, "
        'kind: StorageFull, message: "No space left on device" }',
    ],
)
def test_no_space_is_said_as_such(cause: str) -> None:
    text = f"Job aborted due to stage failure\n{cause}\n\tat x"
    found = explained(RuntimeError(text))
    assert isinstance(found, StorageFullError)
    assert "spark.local.dir" in str(found)
    assert len(str(found)) < 400


@pytest.mark.parametrize(
    "value",
    [
        "No space left on device (os error 28)",
        "[Errno 28] No space left on device",
        "OSError: [Errno 28] No space left on device",
        "LanceError(IO): No space left on device (os error 28)",
    ],
)
def test_what_a_value_says_is_not_about_the_disk(value: str) -> None:
    trace = (
        'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    int(text)\n'
        f"ValueError: invalid literal for int(): '{value}'"
    )
    text = f"org.apache.spark.api.python.PythonException: {trace}"
    assert type(explained(RuntimeError(text))) is JobError


def test_a_call_that_gets_no_answer_means_that_spark_is_gone() -> None:
    found = explained(RuntimeError("An error occurred while calling o40.sc"))
    assert "Spark went away" in str(found)
    with pytest.raises(SparkUnavailableError, match="went away"), explaining():
        raise ConnectionRefusedError(111, "Connection refused")
    with pytest.raises(JobError, match="mine"), explaining():
        raise JobError("mine")

"""The seam between the driver and whatever runs its tasks, and the part of it that workers import.

A runner does one thing: call a module-level function on every item, somewhere, and hand back
the short strings that it returned, in the order of the items. Spark may call the function more
than once for an item (a retry, a speculative copy), so what it writes has to be idempotent.

This module imports no pyspark: every worker imports it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Protocol, TypeVar

import cloudpickle
import pyarrow as pa

from geneva.errors import JobCancelledError
from geneva.execution.apply.pauses import JOB_ENDED, JobEnded
from geneva.execution.worker.surroundings import Surroundings, enter_job
from geneva.model.computation import Resources

T = TypeVar("T")

REPORT_SCHEMA = pa.schema([("index", pa.int64()), ("report", pa.string())])
"""What a task sends back: the item's place in the list, and the function's answer."""
REPORT_DDL = "index long, report string"
"""The same as a Spark schema."""


NO_SURROUNDINGS = Surroundings()
ANY = Resources()
"""No demands: one core per task, which is what every runner gives by default."""


class Runner(Protocol):
    """Runs tasks for one job. After ``cancel`` it takes no more work: make a new one."""

    @property
    def slots(self) -> int:
        """How many tasks can run at once; on a cluster this may change while a job runs."""

    def submit(
        self, function: Callable[[T], str], items: Sequence[T], resources: Resources = ANY
    ) -> Future[list[str]]:
        """Call ``function`` on every item; the future holds the answers in the items' order.

        ``function`` is found by its module and name on the worker. The items travel together
        with every task, so keep them small and let them share what they have in common.
        """

    def cancel(self) -> None:
        """Stop what was submitted and still runs; its futures raise ``JobCancelledError``."""


def job_group(job_id: str) -> str:
    """The group that a job's tasks are in, to find them by and to cancel them by."""
    return f"geneva-{job_id}"


def describe_jobs(runner: Runner, group: str, description: str) -> None:
    """Say what is submitted from here on, where a runner shows that to people (Spark's pages)."""
    describe: Callable[[str, str], None] | None = getattr(runner, "describe_jobs", None)
    if describe is not None:
        describe(group, description)


def engine_facts(runner: Runner) -> dict[str, Any]:
    """What a runner's engine calls the jobs that it ran, where it has names for them."""
    facts: Callable[[], dict[str, Any]] | None = getattr(runner, "engine_facts", None)
    return {} if facts is None else facts()


def slots_for(runner: Runner, resources: Resources) -> int:
    """How many tasks with these needs can run at once: all slots, where a runner doesn't say."""
    count: Callable[[Resources], int] | None = getattr(runner, "slots_for", None)
    return runner.slots if count is None else count(resources)


class InProcessRunner:
    """A runner of threads in this process, for tests: no Spark, no Java, same contract."""

    def __init__(self, slots: int = 2) -> None:
        self._slots = slots
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="geneva-task")
        self._cancelled = threading.Event()

    @property
    def slots(self) -> int:
        """How many calls run at once."""
        return self._slots

    def submit(
        self, function: Callable[[T], str], items: Sequence[T], resources: Resources = ANY
    ) -> Future[list[str]]:
        """Call ``function`` on every item in the thread pool."""
        for item in items:
            # Not loaded again, only proven to be shippable: a test that passes here must not
            # fail on Spark because an item holds a lock or an open file.
            cloudpickle.dumps((function, item))
        # In the caller's context: whoever asks from inside a task which job it is part of, is told.
        calls = [
            self._threads.submit(copy_context().run, self._call, function, item) for item in items
        ]
        return _gather(calls)

    def cancel(self) -> None:
        """Let no queued call start. Calls that run are not interrupted, as threads can't be."""
        self._cancelled.set()

    def _call(self, function: Callable[[T], str], item: T) -> str:
        if self._cancelled.is_set():
            raise JobCancelledError("The job was cancelled before this task started.")
        # Pauses between calls end with the job. The context is this call's own.
        JOB_ENDED.set(self._cancelled)
        try:
            report = function(item)
        except JobEnded:
            raise JobCancelledError("The job was cancelled while this task waited.") from None
        if self._cancelled.is_set():
            # Spark throws away the answer of a killed task; so does its stand-in.
            raise JobCancelledError("The job was cancelled while this task ran.")
        return report


def _gather(calls: Sequence[Future[str]]) -> Future[list[str]]:
    """Return one future for all answers; it fails as soon as one call did, like a Spark job."""
    everything: Future[list[str]] = Future()
    everything.set_running_or_notify_cancel()
    lock = threading.Lock()
    left = len(calls)

    def finished(call: Future[str]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if everything.done():
                return
            if (error := call.exception()) is not None:
                everything.set_exception(error)
            elif left == 0:
                everything.set_result([c.result() for c in calls])

    for call in calls:
        call.add_done_callback(finished)
    if not calls:
        everything.set_result([])
    return everything


# ------------------------------------------------------------------------------- on the worker


def task_body(
    function: Callable[[T], str],
    items: Sequence[T],
    surroundings: Surroundings = NO_SURROUNDINGS,
) -> Callable[[Iterable[int]], Iterator[str]]:
    """Return what a task runs: it gets the numbers of items, and yields a report for each."""
    items = tuple(items)

    def body(numbers: Iterable[int]) -> Iterator[str]:
        enter_job(surroundings)
        return run_items(function, items, numbers)

    return body


def arrow_body(
    body: Callable[[Iterable[int]], Iterator[str]],
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the same as ``mapInArrow`` runs it."""

    def in_arrow(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            numbers = batch.column(0).to_pylist()
            for number, report in zip(numbers, body(numbers), strict=True):
                yield _report(number, report)

    return in_arrow


def partition_body(
    function: Callable[[Iterator[pa.RecordBatch]], str],
    surroundings: Surroundings = NO_SURROUNDINGS,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what ``mapInArrow`` runs over a data frame: one report for each partition."""

    def body(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        enter_job(surroundings)
        yield _report(0, function(iter(batches)))
        freeze_heap_once()

    return body


def _report(index: int, report: str) -> pa.RecordBatch:
    columns = [pa.array([index], pa.int64()), pa.array([report], pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=REPORT_SCHEMA)


def run_items(
    function: Callable[[T], str], items: Sequence[T], numbers: Iterable[int]
) -> Iterator[str]:
    """Call ``function`` on the items whose numbers arrive, and yield its answers."""
    _see_own_gpus()
    for number in numbers:
        report = function(items[number])
        freeze_heap_once()
        yield report


def _see_own_gpus() -> None:
    """Let libraries see the GPUs that Spark has given to this task, and no others."""
    module = sys.modules.get("pyspark.taskcontext")
    context = module.TaskContext.get() if module is not None else None
    gpus = context.resources().get("gpu") if context is not None else None
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)


_heap_is_frozen = False


def freeze_heap_once() -> None:
    """Take everything loaded so far out of the garbage collector's sight, once per process.

    Spark's daemon collects garbage after every task. With lance and pyarrow loaded that walk
    costs 31-42 ms, more than many tasks. After the first item the imports are done and the
    user's model is loaded, and both stay for the life of the worker anyway.
    """
    global _heap_is_frozen
    if not _heap_is_frozen:
        _heap_is_frozen = True
        gc.collect()
        gc.freeze()

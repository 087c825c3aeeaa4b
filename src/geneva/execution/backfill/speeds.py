"""How fast functions were in the latest jobs of this process: by that the next one cuts tasks."""

from __future__ import annotations

from geneva.model.computation import Computation

_MAX_KNOWN = 1_000


class Speeds:
    """Rows per second that one task has computed, by the version of the function."""

    def __init__(self) -> None:
        """Know of none."""
        self._known: dict[str, float] = {}

    def of(self, computation: Computation) -> float | None:
        """How fast the function was when it last ran; None: nobody knows."""
        return self._known.get(computation.version)

    def note(self, computation: Computation, rows_per_second: float | None) -> None:
        """Learn from a job; None: it has computed nothing."""
        if rows_per_second is None:
            return
        self._known.pop(computation.version, None)
        self._known[computation.version] = rows_per_second
        for version in [*self._known][: max(0, len(self._known) - _MAX_KNOWN)]:
            self._known.pop(version, None)


SPEEDS = Speeds()
"""Those of this process."""

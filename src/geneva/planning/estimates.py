"""How long a backfill will take, by what calls took before. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from geneva.render.text import count, seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """What a function's calls took, somewhere before."""

    seconds_per_row: float
    """Of one task, which may have several calls under way."""
    by: str
    """Where that was: "a preview of 5 rows", "job 1a2b3c4d"."""
    allowed_seconds_per_row: float = 0.0
    """What a rate limit takes for a row, however many tasks there are."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long the calls for some rows will take. Reading and writing come on top."""

    measured: Measured
    rows: int
    slots: int
    unit: str = "row"
    """What is computed by a call: a row, or a partition."""

    @property
    def seconds(self) -> float:
        """Seconds until all rows are computed, with all slots at work."""
        calls = self.measured.seconds_per_row * self.rows / max(1, min(self.slots, self.rows))
        return max(calls, self.measured.allowed_seconds_per_row * self.rows)

    def __str__(self) -> str:
        """Say it in a line."""
        return (
            f"about {seconds(self.seconds)} for {count(self.rows, self.unit)} on "
            f"{count(self.slots, 'slot')}, by {self.measured.by}"
        )

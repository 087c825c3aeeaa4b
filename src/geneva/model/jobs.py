"""Where a job stands."""

from __future__ import annotations

from enum import StrEnum


class JobStatus(StrEnum):
    """Where a job stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        """Whether nothing will change any more."""
        return self in (JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED)

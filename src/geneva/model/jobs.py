"""Where a job stands."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


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


def metric(metrics: Mapping[str, Any], name: str) -> float:
    """One of a job's numbers; 0 where it is missing or not known."""
    value = metrics.get(name)
    return value if isinstance(value, int | float) else 0

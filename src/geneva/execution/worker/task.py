"""What travels: the work that the driver ships to a worker, and the report that comes back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from geneva.model.computation import Computation
from geneva.model.rows import RowRange, RowSet
from geneva.model.tables import Sizes, TableRef
from geneva.storage.checkpoints.reuse import Reuse

MOST_REPORTED = 10_000
"""Failed rows of a part whose story travels; of all others only the number."""


@dataclass(frozen=True, slots=True)
class ColumnWork:
    """What is the same for every task of a job."""

    job_id: str
    ref: TableRef
    version: int
    computation: Computation
    sizes: Sizes
    flush_seconds: float | None = None
    threads: int = 1
    max_failed: int | None = None
    """How many rows may fail before the job is given up; None: all of them."""


@dataclass(frozen=True, slots=True)
class PartWork:
    """A range of one fragment to compute.

    `whole`: the range is the fragment, and its file gets staged. Assembling a fragment from
    checkpoints is the same work, with every row covered.
    """

    fragment_id: int
    physical_rows: int
    rows: RowRange
    whole: bool
    compute: RowSet
    """Rows of the range that get a new value (offsets count from the range's start)."""
    adopt: RowSet
    """Rows of the fragment that keep their value and get a receipt for it."""
    valid_after: RowSet | None
    """Rows of the fragment whose value is right afterwards; only for a whole one."""
    complete: bool
    keeps_old: bool
    receipts_only: bool
    """Whether nothing but receipts is written: no value is new."""
    covered: tuple[RowRange, ...]
    prefix: str
    """Prefix of the checkpoints' keys."""
    field_ids: tuple[int, ...]
    """The fields of its data file."""
    inputs: tuple[str, ...]
    """Input signature of the fragment."""
    base: str | None
    """The column's present file in the fragment."""
    window: int
    """Rows to read at once."""
    reuse: tuple[Reuse, ...] = ()
    """Unpublished results that are taken over, and not computed."""
    failed_after: RowSet | None = None
    """Rows of the fragment that failed before and stay so."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task: several parts of one job."""

    work: ColumnWork
    parts: tuple[PartWork, ...]
    attempt: int = 0
    """How often it was submitted before, and lost with its workers."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent, by what they were spent on."""

    read: float = 0.0
    udf: float = 0.0
    checkpoint: float = 0.0
    write: float = 0.0

    def plus(self, other: Timings) -> Timings:
        """Add up."""
        return Timings(
            self.read + other.read,
            self.udf + other.udf,
            self.checkpoint + other.checkpoint,
            self.write + other.write,
        )


@dataclass(frozen=True, slots=True)
class PartResult:
    """A part that is done: staged when it was a whole fragment, checkpointed otherwise."""

    fragment_id: int
    start: int
    end: int
    rows_run: int
    rows_reused: int
    checkpoints: tuple[tuple[int, int], ...]
    """Ranges that are in the checkpoint store now, ascending."""
    staged_path: str | None = None
    rows_failed: int = 0
    """Rows of the part that were skipped."""
    failed: tuple[RowFailure, ...] = ()
    """What happened to them, at most `MOST_REPORTED` of them; for an assembled one: nothing new."""


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row on which the user's function failed, and which was skipped."""

    offset: int
    exception_type: str
    message: str
    traceback: str
    attempt: int
    preview: str
    row_id: int | None = None

    def to_json(self) -> str:
        """As text, for a checkpoint."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class PartFailure:
    """A part in which the user's function failed."""

    fragment_id: int
    start: int
    end: int
    kind: str
    """The name of the error to raise."""
    message: str
    traceback: str
    rows_run: int = 0
    failed: tuple[RowFailure, ...] = ()
    """The row that ended the job, where it is known, and those skipped before it."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What a task did."""

    results: tuple[PartResult, ...]
    failure: PartFailure | None = None
    timings: Timings = field(default_factory=Timings)
    seconds: float = 0.0
    recorded: tuple[int, ...] = ()
    """Fragments whose staged file is noted in the checkpoint store."""
    retries: int = 0
    """Calls that were made again after a failure."""

    def to_json(self) -> str:
        """The report as text, as it travels."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TaskReport:
        """Read a report back."""
        record: dict[str, Any] = json.loads(text)
        failure = record["failure"]
        return cls(
            results=tuple(_result(item) for item in record["results"]),
            failure=_failure(failure) if failure is not None else None,
            timings=Timings(**record["timings"]),
            seconds=record["seconds"],
            recorded=tuple(record["recorded"]),
            retries=record["retries"],
        )


def _result(item: dict[str, Any]) -> PartResult:
    checkpoints = tuple((int(start), int(end)) for start, end in item.pop("checkpoints"))
    failed = tuple(RowFailure(**row) for row in item.pop("failed"))
    return PartResult(checkpoints=checkpoints, failed=failed, **item)


def _failure(item: dict[str, Any]) -> PartFailure:
    return PartFailure(failed=tuple(RowFailure(**row) for row in item.pop("failed")), **item)

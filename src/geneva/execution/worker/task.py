"""What travels: the work that the driver ships to a worker, and the report that comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from geneva.execution.apply.failures import texts_without_secrets
from geneva.model.computation import Computation, Permit
from geneva.model.rows import RowRange, RowSet
from geneva.model.tables import Secrets, Sizes, TableRef
from geneva.planning.backfill import OutputPlan
from geneva.planning.ranges import gaps
from geneva.planning.sizing import Limit
from geneva.secret_values import redacted
from geneva.storage.checkpoints.reuse import Reuse
from geneva.storage.columns.staged_files import StagedFile

MAX_REPORTED = 10_000
"""Failed rows of a part that are reported one by one; of all others only the number."""


@dataclass(frozen=True, slots=True)
class ColumnWork:
    """What is the same for every task of a job."""

    job_id: str
    ref: TableRef
    version: int
    computation: Computation
    sizes: Sizes
    flush_seconds: float | None = None
    threads: int | None = None
    """Calls at a time in a task; None: one, and 32 of an async function."""
    shared_uri: str = ""
    """The folder of the records that all workers of the database share; empty: there is none."""
    max_cost: float | None = None
    """What the calls of the whole job may cost, as the function reports it."""
    max_failed: int | None = None
    """How many rows may fail before the job is given up; None: all of them."""
    permit: Permit | None = None
    """The driver's word that the function may run; None: there is none to run."""
    hidden: tuple[Secrets, ...] = ()
    """What no text may show that leaves the worker: in a report, or in a checkpoint."""

    def hide(self, text: str) -> str:
        """A text of the user's function without what is secret."""
        return redacted(text, self.hidden)

    @property
    def bounds_lost_rows(self) -> bool:
        """Whether the user said how many rows may be lost: then nothing runs ahead of a save."""
        sizes = self.sizes
        return sizes.checkpoint_size is not None or sizes.max_checkpoint_size is not None


@dataclass(frozen=True, slots=True)
class FileWork:
    """The column file of a fragment: what it is to hold, and what its commit has to know."""

    valid_after: RowSet
    """Rows of the fragment whose value is right afterwards."""
    failed_after: RowSet | None
    """Rows of the fragment that failed before and stay so."""
    outputs: tuple[OutputPlan, ...]
    """What of the fragment is written: for each output, which rows get a value or a receipt."""
    complete: bool
    """Whether no live row is left to compute."""
    keeps_old: bool
    """Whether rows that are not computed keep the value that they have."""
    receipts_only: bool
    """Whether nothing but receipts is written: no value is new."""
    field_ids: tuple[int, ...]
    inputs: tuple[str, ...]
    """Input signature of the fragment."""
    base: str | None
    """The column's present file in the fragment."""
    lost: tuple[str, ...] = ()
    """Columns whose present file is gone: there is nothing to keep of them."""


@dataclass(frozen=True, slots=True)
class PartWork:
    """A range of one fragment to compute.

    With a `file` the range is the fragment, and its column file gets staged. Without one, the
    results go to checkpoints. Assembling a fragment from checkpoints is the same work, with every
    row covered.
    """

    fragment_id: int
    physical_rows: int
    rows: RowRange
    compute: RowSet
    """Rows of the range that get a new value (offsets count from the range's start)."""
    covered: tuple[RowRange, ...]
    """Ranges that are in the checkpoint store, ascending."""
    prefix: str
    """Prefix of the checkpoints' keys."""
    window: int
    """Rows to read at once."""
    reuse: tuple[Reuse, ...] = ()
    """Unpublished results that are taken over, and not computed."""
    file: FileWork | None = None

    @property
    def rows_to_run(self) -> int:
        """Rows that get a new value, and have none in a checkpoint."""
        start = self.rows.start
        return sum(
            self.compute.slice(RowRange(open_rows.start - start, open_rows.end - start)).count
            for open_rows in gaps(self.covered, self.rows)
        )

    def staged_file(
        self, file: FileWork, column_uuid: str, path: str, size_bytes: int | None = None
    ) -> StagedFile:
        """The file that this part has staged at `path`."""
        return StagedFile(
            fragment_id=self.fragment_id,
            path=path,
            physical_rows=self.physical_rows,
            column_uuid=column_uuid,
            field_ids=file.field_ids,
            inputs=file.inputs,
            base=file.base,
            size_bytes=size_bytes,
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One task: several parts of one job."""

    work: ColumnWork
    parts: tuple[PartWork, ...]
    attempt: int = 0
    """How often it was submitted before, and lost with its workers."""
    limit: Limit | None = None
    """When a first attempt gives back what it has not done; None: it does everything."""
    riders: tuple[Task, ...] = ()
    """Tasks of other columns, made from the same rows of the same source: one read serves all."""

    @property
    def rows_to_run(self) -> int:
        """For how many rows its function is called, if no unpublished result is taken over."""
        return sum(part.rows_to_run for part in self.parts)

    @property
    def columns(self) -> tuple[Task, ...]:
        """The tasks of all its columns, its own first."""
        return (self, *self.riders)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent, by what they were spent on."""

    read: float = 0.0
    udf: float = 0.0
    checkpoint: float = 0.0
    write: float = 0.0

    @property
    def of_rows(self) -> float:
        """Seconds that the rows took: some are read while others are computed."""
        return max(self.read, self.udf)

    def plus(self, other: Timings) -> Timings:
        """Add up."""
        return Timings(
            read=self.read + other.read,
            udf=self.udf + other.udf,
            checkpoint=self.checkpoint + other.checkpoint,
            write=self.write + other.write,
        )


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row on which the user's function failed."""

    offset: int
    exception_type: str
    message: str
    traceback: str
    attempt: int
    preview: str
    row_id: int | None = None

    def to_json(self) -> str:
        """As text, for a checkpoint."""
        return json.dumps(_fields(self))

    def without_secrets(self, hide: Callable[[str], str]) -> RowFailure:
        """The same with its texts as they may be shown and kept."""
        return replace(self, **texts_without_secrets(self, hide))


@dataclass(frozen=True, slots=True)
class PartResult:
    """A part that is done: staged when it was a whole fragment, checkpointed otherwise."""

    fragment_id: int
    rows: RowRange
    """Fewer than it had where a limit has ended it: the others are given back."""
    checkpoints: tuple[RowRange, ...] = ()
    """Ranges that are in the checkpoint store now, ascending."""
    staged_path: str | None = None
    staged_bytes: int | None = None
    rows_run: int = 0
    rows_valued: int = 0
    """Rows that were computed and are not NULL, in the column that has the most of them."""
    rows_reused: int = 0
    rows_failed: int = 0
    """Rows of the part that were skipped."""
    rows_unmatched: int = 0
    """Rows of the part whose key was looked up and is not in the source."""
    failures: tuple[RowFailure, ...] = ()
    """What happened to the first `MAX_REPORTED` of them."""


@dataclass(frozen=True, slots=True)
class PartFailure:
    """A part in which the user's function failed, so that the job ends."""

    fragment_id: int
    kind: str
    """The name of the error to raise."""
    message: str
    traceback: str
    failures: tuple[RowFailure, ...] = ()
    """The row that ended the job, where it is known, and those skipped before it."""


@dataclass(frozen=True, slots=True)
class UnreadablePart:
    """A part whose inputs or present values can't be read."""

    fragment_id: int
    rows: RowRange
    reason: str


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What a task did."""

    results: tuple[PartResult, ...]
    failure: PartFailure | None = None
    unreadable: tuple[UnreadablePart, ...] = ()
    timings: Timings = field(default_factory=Timings)
    parts_left: int = 0
    """The last parts, which it had no time to begin with."""
    recorded: tuple[tuple[int, ...], ...] = ()
    """Fragments whose staged files are on record, those of one record together: it has the key of
    the first."""
    retries: int = 0
    """Calls that were made again after a failure."""
    tokens: float = 0.0
    """Tokens that its calls used, as the function reported them."""
    cost: float = 0.0
    """What its calls cost, as the function reported it."""
    limit_updates: int = 0
    """Changes of records that limits share: requests to the store, five or so for each."""
    seconds: float = 0.0
    """How long the task took."""
    memory_bytes: int = 0
    """The most memory that its process has had so far; 0: not known."""
    output_shown: bool = False
    """Whether somebody who watches the job has seen what was printed."""
    output: str = ""
    """The end of what was printed and logged while it ran."""
    riders: tuple[TaskReport, ...] = ()
    """The reports of the task's riders, in their order. The reading is in the task's own."""

    def to_json(self) -> str:
        """The report as text, as it travels."""
        return json.dumps(self, default=_fields)

    @classmethod
    def from_json(cls, text: str) -> TaskReport:
        """Read a report back."""
        return cls._from_record(json.loads(text))

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> TaskReport:
        failure = record["failure"]
        return cls(
            results=tuple(_result(item) for item in record["results"]),
            failure=_failure(failure) if failure is not None else None,
            unreadable=tuple(_unreadable(item) for item in record["unreadable"]),
            timings=Timings(**record["timings"]),
            parts_left=record["parts_left"],
            recorded=tuple(map(tuple, record["recorded"])),
            retries=record["retries"],
            tokens=record["tokens"],
            cost=record["cost"],
            limit_updates=record["limit_updates"],
            seconds=record["seconds"],
            memory_bytes=record["memory_bytes"],
            output_shown=record["output_shown"],
            output=record["output"],
            riders=tuple(map(cls._from_record, record["riders"])),
        )


def _fields(record: Any) -> dict[str, Any]:
    """The fields of a record, as they are: `asdict` copies all that is in them, at great length."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _result(item: dict[str, Any]) -> PartResult:
    rows = RowRange(**item.pop("rows"))
    checkpoints = tuple(RowRange(**saved) for saved in item.pop("checkpoints"))
    failures = tuple(RowFailure(**row) for row in item.pop("failures"))
    return PartResult(rows=rows, checkpoints=checkpoints, failures=failures, **item)


def _unreadable(item: dict[str, Any]) -> UnreadablePart:
    return UnreadablePart(rows=RowRange(**item.pop("rows")), **item)


def _failure(item: dict[str, Any]) -> PartFailure:
    failures = tuple(RowFailure(**row) for row in item.pop("failures"))
    return PartFailure(failures=failures, **item)

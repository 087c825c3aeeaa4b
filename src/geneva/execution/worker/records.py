"""What flows through a worker: windows from the reader, results from the program to the writer.

The records of a part come in ascending order, and all wanted rows are in one of them, unless the
job's budget ends. No stage
knows another one: each takes records and gives records, and each runs in a thread of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeAlias

import pyarrow as pa

from geneva.background import in_background
from geneva.errors import GenevaError
from geneva.execution.apply.layouts import Values
from geneva.execution.worker.poison_rows import PoisonSearch
from geneva.execution.worker.task import ColumnWork, PartWork, RowFailure, Timings
from geneva.model.computation import Udf
from geneva.model.digests import Digests
from geneva.model.rows import Offsets, RowRange
from geneva.storage.checkpoints.staging import open_checkpoints
from geneva.storage.checkpoints.store import CheckpointStore
from geneva.storage.columns.functions import fetch_ahead
from geneva.storage.columns.staged_files import written_schema
from geneva.storage.lance.dataset import Dataset, open_pinned
from geneva.storage.lance.pieces import Piece


@dataclass(frozen=True, slots=True, eq=False)
class OpenTask:
    """What the stages of a task share, and none of them changes."""

    work: ColumnWork
    dataset: Dataset
    store: CheckpointStore
    schema: pa.Schema
    """The columns of a data file: what is computed, and the receipts."""


def open_task(work: ColumnWork) -> OpenTask:
    """Open the table of a task, at its version, and the table's checkpoints."""
    if isinstance(work.computation.program, Udf):
        fetch_ahead(work.ref, work.computation.program.digest)
    source = work.computation.source
    if source is not None and source.ref.is_remote:
        # Needed when it is known which of its rows are to be read.
        opens = partial(open_pinned, source.ref, source.version, work.job_id)
        in_background("geneva-source", opens)
    dataset = open_pinned(work.ref, work.version, work.job_id)
    written = [output.name for output in work.computation.written]
    return OpenTask(
        work, dataset, open_checkpoints(work.ref), written_schema(dataset.schema, written)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Inputs of rows that are to be computed, as they were read at once."""

    rows: RowRange
    """The range of the fragment that it is about; it ends with the last row to compute."""
    offsets: Offsets
    """The rows to compute, ascending."""
    inputs: pa.RecordBatch
    known: Piece | None = None
    """Values of other wanted rows in the range, which are taken over and not computed."""
    seconds: float = 0.0
    """What reading the inputs took."""
    digests: Digests | None = None
    """The digests of the inputs, where the computation has receipts."""

    @property
    def nbytes(self) -> int:
        """The size of its values in memory."""
        return int(self.inputs.nbytes + (self.known.values.nbytes if self.known is not None else 0))


class Durable(Enum):
    """When a result is to be made durable. A result is lost with its worker until then."""

    LATER = "later"
    """With one of the next ones, or by the column file."""
    BY_FILE = "by file"
    """By the column file, which is soon there: neither it nor those before are held for more."""
    SOON = "soon"
    """With the checkpoint that ends with it, which is written while the next batches run."""
    NOW = "now"
    """With the checkpoint that ends with it. The next batch waits for the acknowledgement."""
    ALREADY = "already"
    """It was read from a checkpoint of exactly its rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What the program made of a batch: values that have no receipts yet.

    The rows of the range that were not computed are in `known`.
    """

    rows: RowRange
    offsets: Offsets
    outputs: tuple[Values, ...]
    digests: Digests | None = None
    """The digests of the inputs, where the computation has receipts."""
    failed: tuple[int, ...] = ()
    """Places in the outputs that are NULL because the function failed on their row."""
    unpaid: tuple[int, ...] = ()
    """Places that are NULL because the budget ended before their row was done with."""
    follows_gap: bool = False
    """Whether wanted rows before its range are in no result."""
    failures: tuple[RowFailure, ...] = ()
    """What happened to the rows that were skipped."""
    known: Piece | None = None
    rows_run: int = 0
    rows_unmatched: int = 0
    """Rows whose key was looked up and is not in the source."""
    seconds: float = 0.0
    """The work that is lost with it: reading and computing."""
    nbytes: int = 0
    """The size of its values in memory."""
    durable: Durable = Durable.LATER

    @property
    def num_rows(self) -> int:
        """How many wanted rows it has values of."""
        return len(self.offsets) + (len(self.known.offsets) if self.known is not None else 0)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Values of all wanted rows in a range of a fragment."""

    rows: RowRange
    piece: Piece
    follows_gap: bool = False
    """Whether wanted rows before its range are in no result."""
    failures: tuple[RowFailure, ...] = ()
    """Rows that were skipped. They are NULL in the piece."""
    rows_run: int = 0
    rows_valued: int = 0
    """Rows that were computed and are not NULL, in the column that has the most of them."""
    rows_reused: int = 0
    rows_unmatched: int = 0
    seconds: float = 0.0
    """The work that is lost with it: reading and computing."""
    durable: Durable = Durable.LATER

    @property
    def num_rows(self) -> int:
        """How many wanted rows it has values of."""
        return len(self.piece.offsets)

    @property
    def nbytes(self) -> int:
        """The size of its values in memory."""
        return int(self.piece.values.nbytes)


Item: TypeAlias = Window | Result
"""What a reader gives: inputs to compute, or values that are there already."""

Leg: TypeAlias = tuple[PartWork | None, ...]
"""Parts of the same rows, one for each column of a task; None: the column is not computed there."""


@dataclass(frozen=True, slots=True, eq=False)
class PartBegins:
    """What follows is of this part."""

    part: PartWork
    search: PoisonSearch


@dataclass(frozen=True, slots=True)
class PartEnds:
    """The part has no more results; `error`: it could not be computed on."""

    error: Exception | None = None
    is_given_back: bool = False
    """Whether the task's time was over before all rows were computed."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The writer's acknowledgement: a checkpoint holds the results of these rows."""

    rows: RowRange
    seconds: float
    """What writing it took."""


class BatchFailed(Exception):
    """The user's function failed on a batch, and the policy says that this ends the job."""

    def __init__(
        self,
        error: GenevaError,
        rows: RowRange,
        at_fault: RowFailure | None,
        skipped: tuple[RowFailure, ...],
    ) -> None:
        """`at_fault`: the row that ends the job, where it is known; `skipped`: those before it."""
        super().__init__(str(error))
        self.error, self.rows = error, rows
        self.at_fault, self.skipped = at_fault, skipped


class Interrupted(Exception):
    """Another column of the task failed, which ends the job: what was computed is saved."""


class Clock:
    """Seconds of one stage, by what they were spent on."""

    def __init__(self) -> None:
        """Start at zero."""
        self.read = self.udf = self.checkpoint = self.write = 0.0

    def add(self, other: Clock) -> None:
        """Add the seconds of another one."""
        self.read += other.read
        self.udf += other.udf
        self.checkpoint += other.checkpoint
        self.write += other.write

    def timings(self) -> Timings:
        """The seconds as they are reported."""
        return Timings(read=self.read, udf=self.udf, checkpoint=self.checkpoint, write=self.write)

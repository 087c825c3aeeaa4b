"""What a worker holds while it computes: the task's clock and files, and results not yet saved."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from geneva.execution.worker.program import Program, live_program
from geneva.execution.worker.task import ColumnWork, Timings
from geneva.storage.checkpoints.staging import open_checkpoints, record_staged
from geneva.storage.checkpoints.store import CheckpointStore
from geneva.storage.columns.inputs import InputReader
from geneva.storage.columns.staged_files import StagedFile, written_schema
from geneva.storage.lance.dataset import open_pinned
from geneva.storage.lance.pieces import Piece


class Clock:
    """Seconds by activity."""

    def __init__(self) -> None:
        self.read = self.udf = self.checkpoint = self.write = 0.0

    def timings(self) -> Timings:
        """As they are reported."""
        return Timings(self.read, self.udf, self.checkpoint, self.write)

    @property
    def work(self) -> float:
        """Seconds that would be lost with the results: not those spent on saving them."""
        return self.read + self.udf


class TaskRun:
    """What the parts of one task share."""

    def __init__(self, work: ColumnWork) -> None:
        self.work = work
        self.dataset = open_pinned(work.ref, work.version, work.job_id)
        self.store: CheckpointStore = open_checkpoints(work.ref)
        self.clock = Clock()
        written = [output.name for output in work.computation.written]
        self.schema: pa.Schema = written_schema(self.dataset.schema, written)
        self.inputs = InputReader(self.dataset, work.computation, work.job_id)
        self.batch_rows: int | None = None
        self.checkpoint_cost = 0.0
        self.recorded: list[int] = []
        self.retries = 0
        self.rows_failed = 0
        self._pending: list[tuple[str, StagedFile]] = []
        self._pending_since = 0.0

    @property
    def program(self) -> Program:
        """What computes."""
        return live_program(self.work)

    def staged(self, prefix: str, staged: StagedFile) -> None:
        """Note a staged file; it is recorded once enough work hangs on it."""
        self._pending.append((prefix, staged))
        pause = 0.0 if self.work.sizes.checkpoint_size is not None else 1.0
        self.record_pending(pause if self.work.flush_seconds is None else self.work.flush_seconds)

    def record_pending(self, least_seconds: float) -> None:
        """Record staged files, if at least that much work would be lost with them."""
        if self.clock.work - self._pending_since < least_seconds:
            return
        for prefix, staged in self._pending:
            record_staged(self.store, prefix, staged)
            self.recorded.append(staged.fragment_id)
        self._pending.clear()
        self._pending_since = self.clock.work


@dataclass(slots=True)
class Unsaved:
    """Results since the last checkpoint, and the range they are of."""

    start: int
    pieces: list[Piece] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    since: float = 0.0

    def add(self, piece: Piece) -> None:
        """Take new results."""
        self.pieces.append(piece)
        self.rows += len(piece.offsets)
        self.bytes += piece.values.nbytes

"""What unit tests of the driver share: a plan, a runner without threads, a committer in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from geneva import Table
from geneva.execution.backfill.committer import Commit
from geneva.execution.backfill.prepare import PreparedBackfill, prepare
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.backfill.subjects import ColumnSubject
from geneva.execution.runner import ANY
from geneva.model.computation import Resources
from geneva.options import JobOptions
from geneva.storage.checkpoints.store import CheckpointKey
from geneva.storage.columns.definitions import read_definition
from geneva.storage.columns.publish import CommitOutcome
from geneva.storage.columns.staged_files import StagedFile
from geneva.storage.lance.dataset import open_dataset


def prepared_for(
    table: Table, column: str, *, only_fragments: frozenset[int] | None = None, **options: Any
) -> PreparedBackfill:
    """The plan of a backfill."""
    definition = read_definition(open_dataset(table.ref).schema, column)
    assert definition is not None
    request = BackfillRequest(JobOptions(**options), only_fragments=only_fragments)
    return prepare(ColumnSubject(table.ref, definition), request)


def outcome_of(
    landed: Sequence[StagedFile], lost: Sequence[StagedFile] = (), *, moved_on: bool = False
) -> CommitOutcome:
    """What a commit says of its files."""
    return CommitOutcome(
        landed=tuple(landed),
        lost=tuple((file, "its fragment is gone") for file in lost),
        moved_on=moved_on,
    )


@dataclass
class InlineRunner:
    """Runs a task in the moment in which it is submitted; `fail` may say that it can't."""

    fail: Callable[[int], Exception | None] = lambda number: None
    slots: int = 1
    submitted: list[list[Any]] = field(default_factory=list)
    cancelled: bool = False

    def submit(
        self, function: Callable[[Any], str], items: Sequence[Any], resources: Resources = ANY
    ) -> Future[list[str]]:
        self.submitted.append(list(items))
        done: Future[list[str]] = Future()
        error = self.fail(len(self.submitted))
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result([function(item) for item in items])
        return done

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class MemoryCommitter:
    """Publishes nothing. It commits what it has when asked to flush."""

    moved_on: bool = False
    ready: list[StagedFile] = field(default_factory=list)
    commits: list[list[int]] = field(default_factory=list)
    """The fragments of each commit."""
    checkpoints: list[CheckpointKey] = field(default_factory=list)

    def add(self, file: StagedFile) -> None:
        self.ready.append(file)

    def add_checkpoint(self, key: CheckpointKey, shared_by: Sequence[int] = ()) -> None:
        self.checkpoints.append(key)

    def commit_next(self, prepared: PreparedBackfill, *, flush: bool) -> Commit | None:
        if not self.ready or not flush:
            return None
        files, self.ready = self.ready, []
        self.commits.append([file.fragment_id for file in files])
        return Commit(outcome_of(files, moved_on=self.moved_on), seconds=0.25)

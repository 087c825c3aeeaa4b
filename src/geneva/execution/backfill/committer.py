"""Publishing what tasks have finished: which files go together, and what is cleaned up after."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.jobs.tracing import span
from geneva.planning.sizing import CommitRule
from geneva.process_memory import give_back_memory
from geneva.render.plain import plain
from geneva.storage.checkpoints.staging import open_checkpoints, record_staged
from geneva.storage.checkpoints.store import CheckpointKey
from geneva.storage.columns.publish import CommitOutcome, commit_columns
from geneva.storage.columns.staged_files import StagedFile

_LOG = logging.getLogger("geneva")

_SLOW_SECONDS = 0.25
"""Commits that take longer are of large tables, or to slow stores."""
_DELETED = "somebody has deleted it (a clean-up with delete_unverified=True?)"


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit: what became of its files, and how long it took."""

    outcome: CommitOutcome
    seconds: float
    unneeded: tuple[str, ...] = ()
    """Checkpoints that are of no use any more."""


class Committer(Protocol):
    """Takes finished files and publishes them. One per job, over all of its rounds."""

    def add(self, file: StagedFile) -> None:
        """Take a file that is ready to be published."""

    def add_checkpoint(self, key: CheckpointKey, shared_by: Sequence[int] = ()) -> None:
        """Take a checkpoint that is of no use once its fragment is published.

        Or, where several fragments share it, all of them.
        """

    def commit_next(self, prepared: PreparedBackfill, *, flush: bool) -> Commit | None:
        """Publish the next group of files; None: nothing is to be published now.

        With `flush` also a group that is not full. `prepared` is the plan that the files are of.
        """


MakeCommitter: TypeAlias = Callable[[str, int], Committer]
"""Makes the committer of a job, given the job's id and how often a commit may be retried."""

Publish: TypeAlias = Callable[[PreparedBackfill, Sequence[StagedFile], str, int], CommitOutcome]
"""Publishes files of one plan in one commit, for a job, with at most so many retries."""


def publish_columns(
    prepared: PreparedBackfill, files: Sequence[StagedFile], job_id: str, max_retries: int
) -> CommitOutcome:
    """Put the files into the table."""
    return commit_columns(
        prepared.ref, prepared.dataset, prepared.computation, files, job_id, max_retries
    )


class TableCommitter:
    """Commits to the table, in groups of `commit_granularity` files, or by time."""

    def __init__(
        self,
        job_id: str,
        max_retries: int,
        *,
        publish: Publish = publish_columns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is ready yet."""
        self._job_id, self._max_retries, self._publish = job_id, max_retries, publish
        self._clock, self._last_end, self._last_cost = clock, clock(), 0.0
        self._last_added = self._last_end
        self._ready: list[StagedFile] = []
        self._checkpoints: dict[int, set[str]] = {}
        """Keys in the checkpoint store, by fragment that they are of use for."""
        self._on_record: set[int] = set()
        """Fragments whose staged file is on record."""
        self._needed_by: dict[str, set[int]] = {}
        """The same, the other way round."""

    def add(self, file: StagedFile) -> None:
        """Take a file that is ready to be published."""
        self._ready.append(file)
        self._last_added = self._clock()

    def add_checkpoint(self, key: CheckpointKey, shared_by: Sequence[int] = ()) -> None:
        """Take a checkpoint that is of no use once the fragments that share it are published."""
        needed_by = set(shared_by or (key.fragment_id,))
        if key.rows is None:
            self._on_record |= needed_by
        self._needed_by[key.path()] = needed_by
        for fragment_id in needed_by:
            self._checkpoints.setdefault(fragment_id, set()).add(key.path())

    def commit_next(self, prepared: PreparedBackfill, *, flush: bool) -> Commit | None:
        """Publish the next group of files; None: it is not worth a commit yet."""
        rule = CommitRule(prepared.request.options.commit_granularity)
        started = self._clock()
        waited, quiet = started - self._last_end, started - self._last_added
        due = rule.is_due(len(self._ready), waited, self._last_cost, quiet)
        if not self._ready or not (due or flush):
            return None
        group = self._take(rule.files)
        with span("geneva.commit", {"job_id": self._job_id, "fragments": len(group)}):
            outcome = self._publish(prepared, group, self._job_id, self._max_retries)
        self._log(prepared, outcome)
        self._record_lost(prepared, outcome)
        if self._clock() - started > _SLOW_SECONDS:
            give_back_memory()
        self._last_end = self._clock()
        self._last_cost = self._last_end - started
        return Commit(outcome, self._last_cost, tuple(self._unneeded(prepared, outcome)))

    def _take(self, size: int | None) -> list[StagedFile]:
        """The next group; None: of any size. Lance publishes files of the same fields together."""
        fields = self._ready[0].field_ids
        group: list[StagedFile] = []
        left: list[StagedFile] = []
        for file in self._ready:
            fits = file.field_ids == fields and (size is None or len(group) < size)
            (group if fits else left).append(file)
        self._ready = left
        return group

    def _log(self, prepared: PreparedBackfill, outcome: CommitOutcome) -> None:
        """Say what others did to the table meanwhile."""
        table, column = prepared.ref.name, prepared.plan.column
        lost = len(outcome.lost) + len(outcome.deleted)
        if outcome.moved_on:
            _LOG.info(
                "Job %s: conflict: somebody else committed to table %r while column %r was "
                "committed; %d files landed, %d don't fit any more, or are gone.",
                *(self._job_id, table, column, len(outcome.landed), lost),
            )
        for file, why in (*outcome.lost, *((file, _DELETED) for file in outcome.deleted)):
            _LOG.info(
                "Job %s: data file %s of fragment %d of table %r can't be committed: %s. Its rows "
                "are planned again.",
                *(self._job_id, file.path, file.fragment_id, table, plain(why)),
            )

    def _record_lost(self, prepared: PreparedBackfill, outcome: CommitOutcome) -> None:
        """Keep files on record whose fragment is gone: the next plan finds where its rows are."""
        store = open_checkpoints(prepared.ref)
        for file, _ in outcome.lost:
            if file.fragment_id not in self._on_record:
                record_staged(store, prepared.prefixes[file.fragment_id], file)
        gone = (*(file for file, _ in outcome.lost), *outcome.deleted)
        self._on_record.difference_update(file.fragment_id for file in gone)

    def _unneeded(self, prepared: PreparedBackfill, outcome: CommitOutcome) -> list[str]:
        """Checkpoints of published fragments, unless the user asked for some of a size.

        Those of rows that were asked for go in any case: who asks for them again wants new ones.
        """
        done = [key for file in outcome.landed for key in self._published(file.fragment_id)]
        keeps = prepared.sizes.checkpoint_size is not None
        return [] if keeps and not prepared.request.asks_for_rows else done

    def _published(self, fragment_id: int) -> Iterator[str]:
        """Keys that nobody needs any more once a fragment is published."""
        for key in self._checkpoints.pop(fragment_id, ()):
            self._needed_by[key].discard(fragment_id)
            if not self._needed_by[key]:
                del self._needed_by[key]
                yield key

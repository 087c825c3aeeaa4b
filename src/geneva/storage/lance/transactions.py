"""What a table's transactions did: which compaction, or job, a data file comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lance
from lance import LanceOperation

from geneva.storage.lance.dataset import FragmentFacts, file_path, fragment_facts
from geneva.storage.lance.history import MAX_COMMITS_BACK, read_commit, read_transaction

JOB_PROPERTY = "geneva.job"
PLANNED_PROPERTY = "geneva.planned_version"
"""The version that a job's inputs were read at; a retried commit has a later read version. Nothing
here reads it: it is part of the format, for whoever looks into a table's history."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """Rows copied by a compaction: the live rows of `parents`, in order, became `children`."""

    parents: tuple[FragmentFacts, ...]
    children: tuple[FragmentFacts, ...]


class CompactionHistory:
    """The compactions behind one version of a table, read only as far back as somebody asks."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        """Start at the version that `dataset` is checked out at."""
        self._dataset = dataset
        self._next = int(dataset.version)
        self._oldest = max(1, self._next - MAX_COMMITS_BACK)
        self._found: dict[str, Compaction | None] = {}

    def of_file(self, path: str) -> Compaction | None:
        """The compaction that wrote a data file; None when none is known of."""
        while path not in self._found and self._next >= self._oldest:
            commit = read_commit(self._dataset, self._next)
            if commit is None:
                # What is older is gone, too, or of no use without what lies between.
                self._oldest = self._next + 1
                break
            self._next -= 1
            for found, compaction in _written_by(commit.operation):
                self._found.setdefault(found, compaction)
        return self._found.get(path)


def _written_by(operation: Any) -> Iterator[tuple[str, Compaction | None]]:
    """The data files that a commit may have brought, and the compaction that it was, if any."""
    match operation:
        case LanceOperation.Rewrite(groups=groups):
            for group in groups:
                compaction = Compaction(
                    tuple(fragment_facts(f) for f in group.old_fragments),
                    tuple(fragment_facts(f) for f in group.new_fragments),
                )
                files = (file for child in compaction.children for file in child.files)
                yield from ((file.path, compaction) for file in files)
        case LanceOperation.Update(new_fragments=fragments):
            yield from _no_compaction(fragments)
        case LanceOperation.Append(fragments=fragments):
            yield from _no_compaction(fragments)
        case LanceOperation.Overwrite(fragments=fragments):
            yield from _no_compaction(fragments)
        case LanceOperation.DataReplacement(replacements=replacements):
            yield from ((file_path(replaced.new_file), None) for replaced in replacements)


def _no_compaction(fragments: Iterable[Any]) -> Iterator[tuple[str, None]]:
    for fragment in fragments:
        yield from ((file.path, None) for file in fragment_facts(fragment).files)


@dataclass(frozen=True, slots=True)
class CommitSearch:
    """What a look through a table's history for a commit has found."""

    version: int | None
    """The version that it made; None: it is not there."""
    complete: bool
    """Whether all transactions could be read: some may have been cleaned up."""


def find_commit(
    dataset: lance.LanceDataset, after: int, is_it: Callable[[dict[str, str]], bool]
) -> CommitSearch:
    """Look for a commit by its properties, in the versions after one, the newest first."""
    for version in range(int(dataset.version), after, -1):
        commit = read_commit(dataset, version)
        if commit is None:
            return CommitSearch(None, complete=False)
        if is_it(commit.transaction_properties or {}):
            return CommitSearch(version, complete=True)
    return CommitSearch(None, complete=True)


def job_of(commit: Any) -> str | None:
    """The job that made a commit; None: it was none of Geneva's."""
    job_id = (commit.transaction_properties or {}).get(JOB_PROPERTY)
    return None if job_id is None else str(job_id)


def fragments_of_commit(dataset: lance.LanceDataset, version: int) -> list[FragmentFacts]:
    """The fragments that a commit appended, as they are in `dataset`."""
    operation = read_transaction(dataset, version).operation
    brought = {
        file.path for f in getattr(operation, "fragments", ()) for file in fragment_facts(f).files
    }
    present = [fragment_facts(f.metadata) for f in dataset.get_fragments()]
    return [f for f in present if any(file.path in brought for file in f.files)]


def files_of_jobs(
    dataset: lance.LanceDataset, job_ids: Collection[str], after: int = 0
) -> dict[str, set[str]]:
    """The data files that each of some jobs has committed, as far back as commits are looked at.

    `after`: only in versions after this one. Jobs without a commit are not in it.
    """
    found: dict[str, set[str]] = {}
    newest = int(dataset.version)
    for version in range(newest, max(after, newest - MAX_COMMITS_BACK), -1):
        commit = read_commit(dataset, version)
        if commit is None:
            break
        job_id = job_of(commit)
        if job_id is not None and job_id in job_ids:
            files = found.setdefault(job_id, set())
            files.update(path for path, _ in _written_by(commit.operation))
    return found

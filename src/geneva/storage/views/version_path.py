"""The commits between two versions of a table: which of them may have changed a column."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lance
from lance import LanceOperation

from geneva.errors import (
    TableNotFoundError,
)
from geneva.model.tables import TableRef
from geneva.storage.lance.dataset import (
    file_path,
    nodes_of,
    open_dataset,
)
from geneva.storage.lance.history import read_transaction
from geneva.storage.lance.transactions import job_of

_MAX_COMMITS = 10_000
"""How many commits apart two versions may be; beyond that their way counts as gone."""
EVERYTHING = 0
"""As a version: every row may have changed since, whatever its own version stamp."""


@dataclass(frozen=True, slots=True)
class Step:
    """One commit."""

    version: int
    operation: Any
    job: str | None = None
    """The job of Geneva's that made it, if it says so."""


@dataclass(frozen=True, slots=True)
class Route:
    """The commits that lead from a version back to a common past and from there to another."""

    ref: TableRef
    old: tuple[Step, ...]
    """The commits that the old version has and the new one lacks: one or more after a rollback."""
    new: tuple[Step, ...]
    fields: frozenset[int]
    """The fields that were there all along: Lance gives a dropped field's id away again."""

    @property
    def overwritten(self) -> bool:
        """Whether the whole table was replaced on the way."""
        return any(
            isinstance(s.operation, LanceOperation.Overwrite) for s in (*self.old, *self.new)
        )

    def touches(self, fields: Iterable[int]) -> tuple[int | None, int | None]:
        """The first commit on each branch that may have changed values of the fields."""
        wanted = frozenset(fields)
        old, new = (
            min((t for s in steps if (t := self._touch(s, wanted)) is not None), default=None)
            for steps in (self.old, self.new)
        )
        return old, new

    def touches_at(self, step: Step, fields: Iterable[int]) -> bool:
        """Whether one commit may have changed values of the fields."""
        return self._touch(step, frozenset(fields)) is not None

    def _touch(self, step: Step, fields: frozenset[int]) -> int | None:
        match step.operation:
            case LanceOperation.Update(fields_modified=modified):
                return step.version if not modified or fields.intersection(modified) else None
            case LanceOperation.DataReplacement(replacements=replacements):
                replaced = (r.new_file.fields for r in replacements)
                return step.version if fields.intersection(chain(*replaced)) else None
            case LanceOperation.Merge():
                return None if self._same_files(step.version, fields) else EVERYTHING
            case (
                LanceOperation.Append()
                | LanceOperation.Delete()
                | LanceOperation.Rewrite()
                | LanceOperation.Project()
                | LanceOperation.Restore()
                | LanceOperation.CreateIndex()
                | LanceOperation.UpdateConfig()
            ):
                return None
            case operation:
                # Lance has no name for the commit that reserves ids for a compaction.
                return None if type(operation) is LanceOperation.BaseOperation else EVERYTHING

    def _same_files(self, version: int, fields: frozenset[int]) -> bool:
        """Whether a commit that may rewrite any file left those of the fields alone."""
        try:
            versions = [open_dataset(self.ref, v) for v in (version - 1, version)]
        except TableNotFoundError:
            return False
        old, new = ({f.fragment_id: f.metadata for f in v.get_fragments()} for v in versions)
        return old.keys() == new.keys() and all(
            file_paths(old[i], fields) == file_paths(new[i], fields) for i in old
        )


def read_route(
    ref: TableRef, before: lance.LanceDataset, after: lance.LanceDataset
) -> Route | None:
    """The way from one version to another; None when a part of it was cleaned up.

    A restore goes on from the version that it restores, so that versions are a tree.
    """
    old, new = before.version, after.version
    newest = after if new > old else before
    branches: tuple[list[Step], list[Step]] = ([], [])
    for _ in range(_MAX_COMMITS):
        if old == new:
            break
        version = max(old, new)
        try:
            transaction = read_transaction(newest, version)
        except OSError:  # damaged or cleaned up: the versions themselves are compared then
            return None
        operation = transaction.operation
        restored = isinstance(operation, LanceOperation.Restore)
        parent = operation.version if restored else version - 1
        branches[old < new].append(Step(version, operation, job_of(transaction)))
        old, new = (old, parent) if old < new else (parent, new)
    if old != new:
        return None
    schemas = [before.lance_schema, after.lance_schema]
    if old not in (before.version, after.version):
        try:
            schemas.append(open_dataset(ref, old).lance_schema)
        except TableNotFoundError:
            return None
    schemas += [
        step.operation.schema
        for step in chain(*branches)
        if isinstance(step.operation, LanceOperation.Merge | LanceOperation.Project)
    ]
    fields = frozenset.intersection(*(frozenset(nodes_of(s).values()) for s in schemas))
    return Route(ref, tuple(branches[0]), tuple(branches[1]), fields)


def file_paths(metadata: Any, fields: Iterable[int]) -> frozenset[tuple[str, tuple[int, ...]]]:
    """The files behind some fields, and which of the fields each one holds."""
    wanted = frozenset(fields)
    held = ((file_path(file), wanted.intersection(file.fields)) for file in metadata.files)
    return frozenset((path, tuple(sorted(fields_))) for path, fields_ in held if fields_)

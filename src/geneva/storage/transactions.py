"""A table's past, read backwards: which commit brought a file, and whence its rows came."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lance
from lance import LanceOperation

from geneva.model import TableRef
from geneva.storage.dataset import (
    FragmentFacts,
    field_ids_of,
    fragment_facts,
    is_missing,
    open_dataset,
)

JOB_PROPERTY = "geneva.job"
PLANNED_PROPERTY = "geneva.planned_version"
"""The version that a job's inputs were read at; a retried commit has a later read version."""
MOST_TRANSACTIONS = 10_000
"""How far back to look for one file; beyond that the past counts as gone."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Rows copied by a compaction: the live rows of `parents`, in order, became `children`."""

    version: int
    parents: tuple[FragmentFacts, ...]
    children: tuple[FragmentFacts, ...]


@dataclass(frozen=True, slots=True)
class Updated:
    """Rows moved by an update or upsert, out of fragments that are still there or were removed."""

    version: int
    touched: tuple[int, ...]
    children: tuple[FragmentFacts, ...]


@dataclass(frozen=True, slots=True)
class Supplied:
    """Rows that a user wrote."""

    version: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """A column file put in place of another; `read_version` is what its writer had seen."""

    version: int
    read_version: int


Birth = Rewritten | Updated | Supplied | Replaced


class TableHistory:
    """The transactions behind one version of a table, read only as far back as somebody asks."""

    def __init__(self, ref: TableRef, dataset: lance.LanceDataset) -> None:
        """Start at the version that `dataset` is checked out at."""
        self._ref, self._dataset = ref, dataset
        self._next = dataset.version
        self._left = MOST_TRANSACTIONS
        self._births: dict[str, Birth] = {}
        self._versions: dict[int, VersionView | None] = {}

    def birth_of(self, path: str, lookback: int = MOST_TRANSACTIONS) -> Birth | None:
        """The commit that brought a data file; None when the past does not reach that far.

        `lookback` says how many commits ago is too long to be of interest.
        """
        oldest = max(1, self._dataset.version - lookback)
        while path not in self._births and self._next >= oldest and self._left > 0:
            try:
                transaction = read_transaction(self._dataset, self._next)
            except OSError as error:
                if not is_missing(error):
                    raise
                # Cleaned up. Everything older is gone too, or of no use without what lies between.
                self._left = 0
                break
            for file_path, birth in _births(self._next, transaction):
                self._births.setdefault(file_path, birth)
            self._next -= 1
            self._left -= 1
        return self._births.get(path)

    def at(self, version: int) -> VersionView | None:
        """The table as it was; None when that version was cleaned up."""
        if version not in self._versions:
            try:
                self._versions[version] = VersionView(open_dataset(self._ref, version))
            except (OSError, ValueError) as error:
                if not is_missing(error):
                    raise
                self._versions[version] = None
        return self._versions[version]


_PATCHING = threading.Lock()


def read_transaction(dataset: lance.LanceDataset, version: int) -> Any:
    """The transaction behind a version; OSError when it was cleaned up.

    pylance 14.0 can't make its own record of an index that a compaction rewrote: it leaves out
    arguments that the class wants. What happened to indices is nothing to us, so that the class
    is made to want none for the moment of the call.
    """
    try:
        return dataset.read_transaction(version)
    except TypeError:
        with _PATCHING:
            wanted = LanceOperation.RewrittenIndex
            LanceOperation.RewrittenIndex = _AnyRecord
            try:
                return dataset.read_transaction(version)
            finally:
                LanceOperation.RewrittenIndex = wanted


def fragments_of_commit(dataset: lance.LanceDataset, version: int) -> list[FragmentFacts]:
    """The fragments that a commit appended, as they are in `dataset`."""
    operation = read_transaction(dataset, version).operation
    brought = {
        file.path for f in getattr(operation, "fragments", ()) for file in fragment_facts(f).files
    }
    present = [fragment_facts(f.metadata) for f in dataset.get_fragments()]
    return [f for f in present if any(file.path in brought for file in f.files)]


class _AnyRecord:
    """Takes any arguments and forgets them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class VersionView:
    """One version of a table, addressed by field ids: names may have changed since."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        """Look at what `dataset` is checked out at."""
        self.dataset = dataset

    @property
    def version(self) -> int:
        """The version's number."""
        return int(self.dataset.version)

    @cached_property
    def _paths(self) -> dict[tuple[int, ...], str]:
        return {ids: path for path, ids in field_ids_of(self.dataset).items()}

    def path_of(self, field_ids: tuple[int, ...]) -> str | None:
        """What a column was called then."""
        return self._paths.get(field_ids)

    def fragment(self, fragment_id: int) -> FragmentFacts | None:
        """A fragment as it was then."""
        found = self.dataset.get_fragment(fragment_id)
        return fragment_facts(found.metadata) if found is not None else None


def _births(version: int, transaction: Any) -> list[tuple[str, Birth]]:
    match transaction.operation:
        case LanceOperation.Rewrite(groups=groups):
            return [
                pair
                for group in groups
                for pair in _of_group(version, group.old_fragments, group.new_fragments)
            ]
        case LanceOperation.Update() as update:
            children = tuple(fragment_facts(f) for f in update.new_fragments)
            touched = (*update.removed_fragment_ids, *(f.id for f in update.updated_fragments))
            birth: Birth = Updated(version, touched, children)
            return [(file.path, birth) for child in children for file in child.files]
        case (
            LanceOperation.Append(fragments=fragments)
            | LanceOperation.Overwrite(fragments=fragments)
        ):
            born = [fragment_facts(f) for f in fragments]
            return [(file.path, Supplied(version)) for f in born for file in f.files]
        case LanceOperation.DataReplacement(replacements=replacements):
            properties = transaction.transaction_properties or {}
            read = int(properties.get(PLANNED_PROPERTY, transaction.read_version))
            return [(r.new_file.path, Replaced(version, read)) for r in replacements]
        case _:
            return []


def _of_group(version: int, old: list[Any], new: list[Any]) -> list[tuple[str, Birth]]:
    children = tuple(fragment_facts(f) for f in new)
    birth = Rewritten(version, tuple(fragment_facts(f) for f in old), children)
    return [(file.path, birth) for child in children for file in child.files]

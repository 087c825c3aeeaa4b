"""The commits behind a version of a table: reading them, and what they say of its fields."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import lance
from lance import LanceOperation

from geneva.model.tables import CommitId
from geneva.storage.lance.damage import is_missing

MAX_COMMITS_BACK = 256
"""How far back commits are read: each is a request to the store."""
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


def read_commit(dataset: lance.LanceDataset, version: int) -> Any | None:
    """The same; None where it was cleaned up."""
    try:
        return read_transaction(dataset, version)
    except OSError as error:
        if not is_missing(error):
            raise
        return None


def commit_uuid(dataset: lance.LanceDataset, version: int) -> str | None:
    """Which commit made a version of a table; None where that was cleaned up.

    Read once for each handle: a handle is of one table, whatever is in its place by now.
    """
    known = _UUIDS.setdefault(dataset, {})
    if version not in known:
        commit = read_commit(dataset, version)
        if commit is None:
            return None
        known[version] = str(commit.uuid)
    return known[version]


_UUIDS: WeakKeyDictionary[lance.LanceDataset, dict[int, str]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class OverwriteSearch:
    """What a look through a table's history for an overwrite has found."""

    complete: bool
    """Whether it could be told: commits may have been cleaned up, or be too many."""
    commit: CommitId | None = None
    """The commit that overwrote the table; None: none did."""
    schema: Any = None
    """Lance's schema of what it was overwritten with."""


class History:
    """What is behind one version of a table, read only as far back as somebody asks.

    Behind a version that was restored is what it was made of then, and behind a branch or a clone
    the table that it comes from.
    """

    def __init__(self, dataset: lance.LanceDataset) -> None:
        """Start at the version that `dataset` is checked out at, also when it moves on."""
        self._dataset, self.version = dataset, int(dataset.version)
        self._known: dict[tuple[str, int], Any] = {}

    @property
    def newest(self) -> CommitId | None:
        """The commit that made the version; None: nobody knows."""
        commit = self._commit(self._dataset, self.version)
        return None if commit is None else CommitId(self.version, str(commit.uuid))

    def overwrite_since(self, since: CommitId | str) -> OverwriteSearch:
        """Look for the latest commit after another one that overwrote the table.

        A table that was made anew has never had the other one: its own first commit is found.
        `since`: the commit, or a column that came with it.
        """
        dataset, version = self._dataset, self.version
        for _ in range(MAX_COMMITS_BACK):
            commit = self._commit(dataset, version)
            if commit is None:
                break
            if _is_it(dataset, version, commit, since):
                return OverwriteSearch(complete=True)
            match commit.operation:
                case LanceOperation.Overwrite(new_schema=schema):
                    found = CommitId(version, str(commit.uuid))
                    return OverwriteSearch(complete=True, commit=found, schema=schema)
                case LanceOperation.Restore(version=restored):
                    version = restored
                case LanceOperation.Clone(ref_path=path, ref_version=version):
                    behind = _opened(path, version, dataset.latest_storage_options())
                    if behind is None:
                        break
                    dataset = behind
                case _:
                    version -= 1
        return OverwriteSearch(complete=False)

    def _commit(self, dataset: lance.LanceDataset, version: int) -> Any | None:
        key = (dataset.uri, version)
        if key not in self._known:
            self._known[key] = read_commit(dataset, version)
        return self._known[key]


def _is_it(dataset: lance.LanceDataset, version: int, commit: Any, wanted: CommitId | str) -> bool:
    """Whether a commit is the one that is meant, or added the column that is."""
    if isinstance(wanted, CommitId):
        return str(commit.uuid) == wanted.uuid
    if not isinstance(commit.operation, LanceOperation.Merge):
        return False
    before = _opened(dataset.uri, version - 1, dataset.latest_storage_options())
    return before is not None and wanted not in before.schema.names


def _opened(uri: str, version: int, options: dict[str, str] | None) -> lance.LanceDataset | None:
    """A table at a version; None: it is gone."""
    try:
        return lance.dataset(uri, version, storage_options=options)
    except (OSError, ValueError) as error:
        if not is_missing(error):
            raise
        return None


class _AnyRecord:
    """Takes any arguments and forgets them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

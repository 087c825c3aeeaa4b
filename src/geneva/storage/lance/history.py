"""The commits behind a version of a table: reading them, and what they say of its fields."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import lance
from lance import LanceOperation

from geneva.model.tables import CommitId, is_remote
from geneva.storage.lance.damage import is_missing

MAX_COMMITS_BACK = 256
"""How far back commits are read: each is a request to the store."""
_MAX_AT_ONCE = 16
"""How many are read at the same time, where that is a request."""
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


def commit_uuid(
    dataset: lance.LanceDataset,
    version: int,
    read: Callable[[lance.LanceDataset, int], Any | None] = read_commit,
) -> str | None:
    """Which commit made a version of a table; None where that was cleaned up.

    Read once for each handle: a handle is of one table, whatever is in its place by now.
    """
    known = _UUIDS.setdefault(dataset, {})
    if version not in known:
        commit = read(dataset, version)
        if commit is None:
            return None
        known[version] = str(commit.uuid)
    return known[version]


_UUIDS: WeakKeyDictionary[lance.LanceDataset, dict[int, str]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class SchemaSeen:
    """The schema that a table had from some commit on."""

    schema: Any
    """Lance's own, with the ids of fields."""
    overwrote: bool = False
    """Whether the commit overwrote the table: then ids mean nothing of what they meant before."""


@dataclass(frozen=True, slots=True)
class SchemaChanges:
    """The schemas that a table has had since a commit, the oldest first."""

    complete: bool
    """Whether these are all: commits may have been cleaned up, or be too many."""
    schemas: tuple[SchemaSeen, ...] = ()
    """The first one is that of the commit itself. If they are not complete, these are the latest,
    without a gap between them."""

    @property
    def since_overwrite(self) -> tuple[SchemaSeen, ...]:
        """From the first overwrite on that is known; empty: there is none."""
        first = next((i for i, seen in enumerate(self.schemas) if seen.overwrote), None)
        return () if first is None else self.schemas[first:]


Since: TypeAlias = CommitId | str
"""A commit, or a column that came with it."""


class _Memory:
    """The changes behind the commits that were asked for last, each found out once.

    A commit has an UUID, so that a table that is made anew is not taken for the one before.
    """

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._found: OrderedDict[tuple[str, Since], SchemaChanges] = OrderedDict()

    def get(self, commit: str, since: Since) -> SchemaChanges | None:
        with self._lock:
            found = self._found.get((commit, since))
            if found is not None:
                self._found.move_to_end((commit, since))
            return found

    def put(self, commit: str, since: Since, changes: SchemaChanges) -> None:
        with self._lock:
            self._found[commit, since] = changes
            while len(self._found) > self._size:
                self._found.popitem(last=False)


_KNOWN = _Memory(size=16)


class History:
    """What is behind one version of a table, read only as far back as somebody asks.

    Behind a version that was restored is what it was made of then, and behind a branch or a clone
    the table that it comes from.
    """

    def __init__(self, dataset: lance.LanceDataset) -> None:
        """Start at the version that `dataset` is checked out at, also when it moves on."""
        self._dataset, self.version = dataset, int(dataset.version)
        self._read: dict[tuple[str, int], Any] = {}
        self._at_once = 1

    @property
    def newest(self) -> CommitId | None:
        """The commit that made the version; None: nobody knows."""
        uuid = self._uuid(self._dataset, self.version)
        return None if uuid is None else CommitId(self.version, uuid)

    def changes_since(self, since: Since) -> SchemaChanges:
        """Find the schemas that the table has had since a commit.

        A table that was made anew has never had that one: then they are not complete. Commits are
        read back to the one that is meant, or to one that somebody has asked for before: of those
        behind it all is known.
        """
        dataset, version = self._dataset, self.version
        behind, later = SchemaChanges(complete=False), list[SchemaSeen]()
        for _ in range(MAX_COMMITS_BACK):
            uuid = self._uuid(dataset, version)
            known = None if uuid is None else _KNOWN.get(uuid, since)
            commit = self._commit(dataset, version) if known is None else None
            if known is not None:
                behind = known
            if commit is None:
                break
            if _is_it(dataset, version, commit, since):
                behind = _schema_at(dataset, version, commit)
                break
            match commit.operation:
                case LanceOperation.Overwrite(new_schema=schema):
                    later.append(SchemaSeen(schema, overwrote=True))
                    version -= 1
                case LanceOperation.Project(schema=schema) | LanceOperation.Merge(schema=schema):
                    later.append(SchemaSeen(schema))
                    version -= 1
                case LanceOperation.Restore(version=restored):
                    version = restored
                case LanceOperation.Clone(ref_path=path, ref_version=version):
                    opened = _opened(path, version, dataset.latest_storage_options())
                    if opened is None:
                        break
                    dataset = opened
                case _:
                    version -= 1
        found = SchemaChanges(behind.complete, (*behind.schemas, *reversed(later)))
        newest = self._uuid(self._dataset, self.version)
        if newest is not None:
            _KNOWN.put(newest, since, found)
        return found

    def _uuid(self, dataset: lance.LanceDataset, version: int) -> str | None:
        return commit_uuid(dataset, version, self._commit)

    def _commit(self, dataset: lance.LanceDataset, version: int) -> Any | None:
        if (dataset.uri, version) not in self._read:
            self._read_back(dataset, version)
        return self._read[dataset.uri, version]

    def _read_back(self, dataset: lance.LanceDataset, version: int) -> None:
        """Read a commit; in a store with those behind it, twice as many each time."""
        if not is_remote(dataset.uri):
            self._read[dataset.uri, version] = read_commit(dataset, version)
            return
        versions = range(version, max(0, version - self._at_once), -1)
        handles = [copy(dataset) for _ in versions]  # a handle reads one at a time
        with ThreadPoolExecutor(self._at_once, thread_name_prefix="geneva-commits") as threads:
            found = threads.map(read_commit, handles, versions)
            self._read |= {(dataset.uri, v): c for v, c in zip(versions, found, strict=True)}
        self._at_once = min(_MAX_AT_ONCE, 2 * self._at_once)


def _schema_at(dataset: lance.LanceDataset, version: int, commit: Any) -> SchemaChanges:
    """The schema of a version, which its commit may say; not complete: the version is gone."""
    match commit.operation:
        case LanceOperation.Overwrite(new_schema=schema):
            return SchemaChanges(complete=True, schemas=(SchemaSeen(schema),))
        case LanceOperation.Project(schema=schema) | LanceOperation.Merge(schema=schema):
            return SchemaChanges(complete=True, schemas=(SchemaSeen(schema),))
    opened = _opened(dataset.uri, version, dataset.latest_storage_options())
    if opened is None:
        return SchemaChanges(complete=False)
    return SchemaChanges(complete=True, schemas=(SchemaSeen(opened.lance_schema),))


def _is_it(dataset: lance.LanceDataset, version: int, commit: Any, wanted: Since) -> bool:
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

"""Removing what no plan can use again: checkpoints, staged files of dead jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial

import lance

from geneva.errors import TableNotFoundError
from geneva.model.tables import TableRef
from geneva.model.uris import branch_uri
from geneva.storage.checkpoints.pins import tags_on
from geneva.storage.checkpoints.staging import open_checkpoints, read_work
from geneva.storage.checkpoints.store import CheckpointKey, CheckpointStore
from geneva.storage.columns.provenance import parse_file_name
from geneva.storage.columns.staged_files import drop_staged
from geneva.storage.lance.blobs import data_file_of
from geneva.storage.lance.dataset import open_dataset
from geneva.storage.loads.staging import delete_loads


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """What was removed."""

    checkpoints: int
    staged_files: int
    staged_bytes: int

    def __add__(self, other: CleanupReport) -> CleanupReport:
        """What was removed from two tables."""
        return CleanupReport(
            checkpoints=self.checkpoints + other.checkpoints,
            staged_files=self.staged_files + other.staged_files,
            staged_bytes=self.staged_bytes + other.staged_bytes,
        )


def delete_keys(store: CheckpointStore, keys: Iterable[str]) -> int:
    """Delete checkpoints; those that are gone already are no matter."""
    wanted = list(keys)
    return store.discard(wanted) if wanted else 0


def without_use(
    keys: Iterable[CheckpointKey], useful: Callable[[CheckpointKey], bool]
) -> list[str]:
    """What of a store can go: a record of several staged files when none of them is useful."""
    stored: dict[str, bool] = {}
    for key in keys:
        stored[key.stored_at] = stored.get(key.stored_at, False) or useful(key)
    return [path for path, is_useful in stored.items() if not is_useful]


def drop_leftovers(ref: TableRef, is_own: Callable[[str], bool], keep: set[str]) -> int:
    """Delete the checkpoints whose prefix is one's own, those under the prefixes in `keep` aside.

    Nothing while another job works on the table.
    """
    store = open_checkpoints(ref)
    every = read_work(store).keys.items()
    keys = [key for (prefix, _), found in every if is_own(prefix) for key in found]
    return delete_keys(store, _if_idle(ref, without_use(keys, lambda key: key.prefix in keep)))


def is_idle(ref: TableRef) -> bool:
    """Whether no job works on a table: its version would be tagged.

    Asked when it is known what is to be deleted, and not before: a job that begins meanwhile has
    its tag before it writes anything.
    """
    return not tags_on(open_dataset(ref), ref.branch)


def _if_idle(ref: TableRef, keys: list[str]) -> list[str]:
    """What may be deleted of a store: nothing while a job works on the table."""
    return keys if keys and is_idle(ref) else []


def remove_leftovers(
    ref: TableRef,
    dataset: lance.LanceDataset,
    useful: Callable[[CheckpointKey], bool],
    older_than: timedelta,
) -> CleanupReport:
    """Delete the checkpoints that are of no use, then the staged files that nothing refers to.

    Nothing while a job runs. A staged file is only deleted when it is older than `older_than`: a
    job stages first and commits later.
    """
    store = open_checkpoints(ref)
    work = read_work(store)
    keys = [key for found in work.keys.values() for key in found]
    files = computed_files(dataset, before=datetime.now(UTC) - older_than)
    if not is_idle(ref):
        return CleanupReport(0, 0, 0)
    deleted = delete_keys(store, store.list_keys("lineage-"))  # notes of the first release
    deleted += delete_keys(store, without_use(keys, useful))
    deleted += delete_loads(ref, partial(is_idle, ref))
    places = {(key.prefix, key.fragment_id) for key in keys if useful(key)}
    kept = {file.path for place, file in work.staged.items() if place in places}
    return CleanupReport(deleted, *delete_data_files(ref, unreferenced(ref, files, kept)))


def forget_attempts(ref: TableRef) -> int:
    """Delete the notes on rows that killed workers; none while a job runs on the table."""
    store = open_checkpoints(ref)
    return delete_keys(store, _if_idle(ref, store.list_keys("attempt-")))


def recorded_paths(ref: TableRef) -> set[str]:
    """The staged files that the checkpoint store knows of: a later run may commit them."""
    return {file.path for file in read_work(open_checkpoints(ref)).staged.values()}


def computed_files(dataset: lance.LanceDataset, before: datetime | None = None) -> dict[str, int]:
    """The data files of ours in a table's folder, and their bytes, published or not.

    The bytes of blobs beside a data file count as its own, also where it was never finished.
    `before`: only those that are older, by the store's clock, as all that belongs to them.
    """
    found: dict[str, int] = {}
    young: set[str] = set()
    for row in dataset.all_files().read_all().to_pylist():
        if not row["path"].startswith("data/"):
            continue
        path = data_file_of(row["path"].removeprefix("data/"))
        if parse_file_name(path) is not None:
            found[path] = found.get(path, 0) + int(row["size_bytes"])
            if before is not None and row["last_modified"] >= before:
                young.add(path)
    return {path: size for path, size in found.items() if path not in young}


def unreferenced(ref: TableRef, files: Mapping[str, int], kept: set[str]) -> dict[str, int]:
    """Those of some data files that no version has by now; without those in `kept`."""
    if not files.keys() - kept:
        return {}
    in_use = kept | _files_in_use(ref)
    return {path: size for path, size in files.items() if path not in in_use}


def delete_data_files(ref: TableRef, files: Mapping[str, int]) -> tuple[int, int]:
    """Delete data files, given with their bytes; return how many were there, and their bytes."""
    removed = drop_staged(ref, *files)
    return len(removed), sum(files[path] for path in removed)


def _files_in_use(ref: TableRef) -> set[str]:
    """The data files, by name, that any version of the table or of one of its branches has.

    A branch has files of what it was made from, and may outlive the versions that had them.
    """
    found: set[str] = set()
    for branch in (None, *open_dataset(ref).branches.list()):
        with suppress(TableNotFoundError):  # a branch that was deleted just now
            opened = open_dataset(replace(ref, uri=branch_uri(ref.root, branch), branch=branch))
            found.update(opened.tracked_files().read_all().column("path").to_pylist())
    return {path.removeprefix("data/") for path in found}

"""Data files that are gone: deleted by hand, or by a clean-up that takes them for nobody's.

Lance's `cleanup_old_versions(delete_unverified=True)` deletes every file that no version has, also
those that a job has staged; and, where a commit comes while it looks around, those of that commit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lance.file import LanceFileSession

from geneva.model.computation import Computation, Load
from geneva.model.tables import TableRef
from geneva.model.uris import local_path
from geneva.storage.columns.provenance import parse_file_name
from geneva.storage.lance.dataset import Dataset, TableSnapshot

_LISTED_AT_ONCE = 1_000
"""Names that an object store gives for one request."""
_REQUESTS_AT_ONCE = 16
_ASKED_AT_ONCE = 4
"""Local files up to which each is asked for, without a listing."""

_SIZES: dict[str, int] = {}
"""How many files the data folder of a table in a store had when it was listed last."""


def missing_files(ref: TableRef, paths: Collection[str], dataset: Dataset) -> frozenset[str]:
    """Those of some data files in a table's folder that are not there.

    In a store it takes a request each, several at a time, or fewer: see `is_worth_listing`.
    """
    if not paths:
        return frozenset()
    if not ref.is_remote:
        return _absent(_data_folder(ref), paths)
    session = LanceFileSession(f"{ref.uri}/data", storage_options=ref.storage_options.plain())
    if is_worth_listing(len(paths), len(paths) + _present_files(dataset), _SIZES.get(ref.uri)):
        listed = session.list()
        _SIZES[ref.uri] = len(listed)
        paths = set(paths).difference(listed)
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        there = threads.map(session.contains, paths)
        return frozenset(path for path, found in zip(paths, there, strict=True) if not found)


def lost_values(snapshot: TableSnapshot, computation: Computation) -> frozenset[str]:
    """The files that jobs have written a computation's values and receipts into, and are gone.

    Not of values that were loaded: nobody can compute those again. Only of a local table, where
    looking costs next to nothing.
    """
    if isinstance(computation.program, Load):
        return frozenset()
    gone = absent_of_fields(snapshot, computation.written_ids)
    return frozenset(path for path in gone if parse_file_name(path) is not None)


def absent_of_fields(snapshot: TableSnapshot, field_ids: Iterable[int]) -> frozenset[str]:
    """The files of some fields that are gone, whoever wrote them; only of a local table."""
    ref, fields = snapshot.ref, frozenset(field_ids)
    if ref.is_remote:
        return frozenset()
    every = [file for fragment in snapshot.fragments for file in fragment.files]
    own = {f.path for f in every if f.base_id is None and not fields.isdisjoint(f.fields)}
    return _absent(_data_folder(ref), own)


def is_worth_listing(wanted: int, present: int, listed: int | None) -> bool:
    """Whether a folder in a store is listed for some files, instead of asking for each of them.

    It takes one request after the other, while they are asked for several at a time. Files that no
    version has any more are listed, too, and a listing can't be stopped: so it has to be worth it
    by how many were `listed` before. Where none was (None), there are at least those that are
    `present`.
    """
    if wanted <= _REQUESTS_AT_ONCE:
        return False
    return 1 + max(present, listed or 0) // _LISTED_AT_ONCE <= wanted // _REQUESTS_AT_ONCE


def _present_files(dataset: Dataset) -> int:
    """About how many data files a version of a table has."""
    fragments = dataset.get_fragments()
    return len(fragments) * len(fragments[-1].data_files()) if fragments else 0


def _data_folder(ref: TableRef) -> Path:
    folder = local_path(ref.uri)
    assert folder is not None
    return folder / "data"


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  names are all that is needed
    except FileNotFoundError:
        return []


def _absent(folder: Path, paths: Collection[str]) -> frozenset[str]:
    """Those that are not there. Each is asked for: a mount may remember an older listing."""
    if len(paths) > _ASKED_AT_ONCE:
        paths = set(paths).difference(_listed(folder))
    return frozenset(path for path in paths if not Path(folder, path).exists())

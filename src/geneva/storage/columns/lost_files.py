"""Data files that are gone: deleted by hand, or by a clean-up that takes them for nobody's.

Lance's `cleanup_old_versions(delete_unverified=True)` deletes every file that no version has, also
those that a job has staged; and, where a commit comes while it looks around, those of that commit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from lance.file import LanceFileSession

from geneva.model.computation import Computation, Load
from geneva.model.tables import TableRef
from geneva.model.uris import local_path
from geneva.storage.columns.provenance import parse_file_name
from geneva.storage.lance.dataset import Dataset, FileFacts, TableSnapshot

_LISTED_AT_ONCE = 1_000
"""Names that an object store gives for one request."""
_REQUESTS_AT_ONCE = 16


def missing_files(ref: TableRef, paths: Collection[str], dataset: Dataset) -> frozenset[str]:
    """Those of some data files in a table's folder that are not there.

    In a store it takes a request each, or as many as listing the folder takes.
    """
    if not paths:
        return frozenset()
    if not ref.is_remote:
        return frozenset(paths) - _local_files(ref)
    session = LanceFileSession(f"{ref.uri}/data", storage_options=ref.storage_options.plain())
    in_table = len(dataset.get_fragments())  # a file each, at the least
    if (in_table + len(paths)) / _LISTED_AT_ONCE <= len(paths):
        return frozenset(paths).difference(session.list())
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        there = threads.map(session.contains, paths)
        return frozenset(path for path, found in zip(paths, there, strict=True) if not found)


def missing_values(snapshot: TableSnapshot, computation: Computation) -> frozenset[str]:
    """The files that jobs have written a computation's values into, and that are gone.

    Not of values that were loaded: nobody can compute those again.
    """
    if isinstance(computation.program, Load):
        return frozenset()
    fields = frozenset(computation.output_ids)
    files = (file for fragment in snapshot.fragments for file in fragment.files_of(fields))
    return lost_files(snapshot.ref, files)


def lost_files(ref: TableRef, files: Iterable[FileFacts]) -> frozenset[str]:
    """Those of a table's files that jobs have written, and that are gone.

    Only of a local table, where looking costs next to nothing.
    """
    if ref.is_remote:
        return frozenset()
    own = {file.path for file in files if file.base_id is None}
    missing = own - _local_files(ref) if own else own
    return frozenset(path for path in missing if parse_file_name(path) is not None)


def _local_files(ref: TableRef) -> frozenset[str]:
    folder = local_path(ref.uri)
    assert folder is not None
    try:
        return frozenset(os.listdir(folder / "data"))  # noqa: PTH208  names are all that is needed
    except FileNotFoundError:
        return frozenset()

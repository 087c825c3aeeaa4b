"""What jobs that died have left in a table's folder: removed by the next one that ends well.

Nothing is removed while another job works on the table. Files that are being written have no
owner's name on them: those of a job that died on this machine are the ones that no process here
has open. All others have to be a day old, by the clock of the file system that they are on: also
those of workers that died while their job went on.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from geneva.model.tables import TableRef
from geneva.model.uris import local_path
from geneva.storage.checkpoints.cleanup import (
    CleanupReport,
    computed_files,
    delete_data_files,
    forget_attempts,
    recorded_paths,
    unreferenced,
)
from geneva.storage.checkpoints.pins import tags_on
from geneva.storage.lance.dataset import open_dataset

_DRAFTS = ".tmp*"
"""How Lance calls a file on a local disk until it is whole."""
_FOLDERS = ("data", "_checkpoints", "_udfs", "_versions", "_transactions", "_deletions")
A_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class DeadJobs:
    """What is known of the jobs that died on a table."""

    died: bool
    """Whether any did. Otherwise only old drafts are removed."""
    died_here: bool
    """Whether one of them ran on this machine, and is known to be gone."""


def remove_dead_files(
    ref: TableRef, dead: DeadJobs, older_than: timedelta = A_DAY
) -> CleanupReport | None:
    """Remove what dead jobs left in a table's folder; None: another job works on the table.

    Drafts that are older than that go whoever left them.
    """
    # Listed before it is known that nobody works here: what comes later is not in the list. After
    # that it is asked what is in use: a job that ended meanwhile has published its files.
    drafts = list(_abandoned_drafts(ref, dead, older_than))
    if not drafts and not dead.died:
        return CleanupReport(0, 0, 0)
    dataset = open_dataset(ref)
    files = computed_files(dataset) if dead.died else {}
    if tags_on(dataset, ref.branch):
        return None
    files = unreferenced(ref, files, recorded_paths(ref)) if files else {}
    notes = forget_attempts(ref) if dead.died else 0
    removed = CleanupReport(notes, *delete_data_files(ref, files))
    for path in drafts:
        with suppress(OSError):
            bytes_of = path.stat().st_size
            path.unlink()
            removed = replace(
                removed,
                staged_files=removed.staged_files + 1,
                staged_bytes=removed.staged_bytes + bytes_of,
            )
    return removed


def _abandoned_drafts(ref: TableRef, dead: DeadJobs, older_than: timedelta) -> Iterator[Path]:
    """Yield unfinished files that nobody will finish. Object stores show none."""
    folder = local_path(ref.uri)
    if folder is None:
        return
    found = [path for name in _FOLDERS for path in (folder / name).rglob(_DRAFTS)]
    if not found:
        return
    being_written = _open_files(found)
    old = _now_on(folder) - older_than.total_seconds()
    for path in found:
        if path in being_written:
            continue
        with suppress(OSError):
            if (dead.died_here and being_written is not _UNKNOWN) or path.stat().st_mtime < old:
                yield path


_UNKNOWN: frozenset[Path] = frozenset({Path()})


def _open_files(paths: Iterable[Path]) -> frozenset[Path]:
    """Which of these files a process of this machine has open; `_UNKNOWN` where that can't be."""
    wanted = {os.path.realpath(path): path for path in paths}
    found = set()
    try:
        processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    except OSError:
        return _UNKNOWN
    if not processes:
        return _UNKNOWN
    for process in processes:
        try:
            handles = list((process / "fd").iterdir())
        except PermissionError:
            return _UNKNOWN  # it is somebody else's
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        for handle in handles:
            with suppress(OSError):
                target = str(handle.readlink())
                if target in wanted:
                    found.add(wanted[target])
    return frozenset(found)


def _now_on(folder: Path) -> float:
    """What time it is by the clock that stamps the files of a folder."""
    try:
        with tempfile.NamedTemporaryFile(prefix="geneva-clock-", dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()

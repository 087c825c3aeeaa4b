"""Versions that running jobs read: pinned by a tag each, so that no clean-up removes them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import lance

_JOB_TAG = "geneva-job-"
_LIST_ATTEMPTS = 50
_LIST_PAUSE_SECONDS = 0.02


@contextmanager
def pinned(
    dataset: lance.LanceDataset,
    job_id: str,
    is_running: Callable[[str], bool],
    *,
    may_fail: bool = False,
) -> Iterator[None]:
    """Keep the version of `dataset` from being cleaned up while a job reads it.

    A job may pin several versions at a time. What dead jobs pinned is released on the way.
    `may_fail`: go on without a pin where none can be made, on a table that may only be read.
    """
    tag = f"{_JOB_TAG}{job_id}.{uuid.uuid4().hex[:8]}"
    try:
        release_dead_tags(dataset, is_running)
        dataset.tags.create(tag, dataset.version)
    except (OSError, ValueError):
        if not may_fail:
            raise
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            dataset.tags.delete(tag)


def job_tags(dataset: lance.LanceDataset) -> list[str]:
    """The tags of jobs on a table. A tag that goes while they are listed makes Lance fail."""
    for _ in range(_LIST_ATTEMPTS):
        with suppress(OSError, ValueError):
            return _list_tags(dataset)
        time.sleep(_LIST_PAUSE_SECONDS)
    return _list_tags(dataset)


def _list_tags(dataset: lance.LanceDataset) -> list[str]:
    return [name for name in dataset.tags.list() if name.startswith(_JOB_TAG)]


def release_dead_tags(dataset: lance.LanceDataset, is_running: Callable[[str], bool]) -> None:
    """Unpin the versions of jobs that no longer run, so that they can be cleaned up."""
    for name in job_tags(dataset):
        job_id = name.removeprefix(_JOB_TAG).rpartition(".")[0]
        if not is_running(job_id):
            with suppress(OSError, ValueError):
                dataset.tags.delete(name)

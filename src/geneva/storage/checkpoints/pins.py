"""Versions that running jobs read: pinned by a tag each, so that no clean-up removes them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

import lance

from geneva.background import in_background
from geneva.errors import JobError, TableChangedError, TableNotFoundError, UserInputError
from geneva.model.tables import TableRef, is_remote
from geneva.storage.lance.damage import is_damage, is_file_gone, is_missing
from geneva.storage.lance.dataset import open_dataset

Behind: TypeAlias = Callable[[Callable[[], object]], object]
"""Does what a job need not wait for, at once or while the job goes on."""

Result = TypeVar("Result")

_JOB_TAG = "geneva-job-"
_TAGS = "_refs/tags/"
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
    with pinning(dataset, job_id, is_running, may_fail=may_fail) as wait_for_pin:
        wait_for_pin()
        yield


@contextmanager
def pinning(
    dataset: lance.LanceDataset,
    job_id: str,
    is_running: Callable[[str], bool],
    *,
    may_fail: bool = False,
    behind: Behind = lambda work: work(),
) -> Iterator[Callable[[], None]]:
    """The same, for who has something to do until the pin is there: on a store it is some requests.

    Gives what waits for it, and raises where there is none. `behind` releases pins while the job
    goes on; each time by a handle of its own, as no two threads may change tags by the same.
    """
    tag = f"{_JOB_TAG}{job_id}.{uuid.uuid4().hex[:8]}"
    lives = partial(_lives, job_id, is_running)
    behind(partial(_release_dead, copy(dataset), lives))
    create = partial(_create, copy(dataset), tag, may_fail=may_fail)
    creating: Future[None] | None = None
    try:
        if is_remote(dataset.uri):
            creating = in_background("geneva-pin", create)
            yield creating.result
        else:
            create()
            yield lambda: None
    except Exception as error:
        # A clean-up may have listed the tags just before there was this one.
        of_lost_file = isinstance(error, TableNotFoundError) or type(error) is JobError
        if (is_damage(error) or of_lost_file) and _is_cleaned_up(dataset):
            raise _cleaned_up(dataset) from error
        raise
    finally:
        if creating is not None:
            wait([creating])
        behind(partial(_release, copy(dataset), tag))


def _create(dataset: lance.LanceDataset, tag: str, *, may_fail: bool) -> None:
    try:
        dataset.tags.create(tag, dataset.version)
    except (OSError, ValueError) as error:
        if not is_missing(error):
            if may_fail:
                return
            raise
        raise _cleaned_up(dataset) from error


def _is_cleaned_up(dataset: lance.LanceDataset) -> bool:
    """Whether a version is gone, and its table is not."""
    now, version = copy(dataset), dataset.version
    try:
        now.checkout_latest()  # of the version that a handle has, Lance looks for nothing
    except (OSError, ValueError):
        return False
    try:
        now.checkout_version(version)
    except (OSError, ValueError) as error:
        return is_missing(error)
    return False


def _cleaned_up(dataset: lance.LanceDataset) -> TableChangedError:
    return TableChangedError(
        f"Version {dataset.version} of {dataset.uri} was cleaned up before the job that reads it "
        "could keep it. What was computed is kept; run it again."
    )


def _lives(job_id: str, is_running: Callable[[str], bool], other: str) -> bool:
    """Whether a job runs, asked by another one: that does."""
    return other == job_id or is_running(other)


def _release_dead(dataset: lance.LanceDataset, is_running: Callable[[str], bool]) -> None:
    with suppress(OSError, ValueError):  # then the next job does
        release_dead_tags(dataset, is_running)


def _release(dataset: lance.LanceDataset, tag: str) -> None:
    with suppress(OSError, ValueError):
        dataset.tags.delete(tag)


def tags_on(dataset: lance.LanceDataset, branch: str | None) -> list[str]:
    """The tags of jobs on a branch of a table; None: on its main line."""
    return [name for name, tagged in job_tags(dataset).items() if tagged == branch]


def job_tags(dataset: lance.LanceDataset) -> dict[str, str | None]:
    """The tags of jobs on a table, each with the branch that it is on."""
    tags = listing_tags(dataset.tags.list).items()
    return {name: tag["branch"] for name, tag in tags if name.startswith(_JOB_TAG)}


def listing_tags(call: Callable[[], Result]) -> Result:
    """Call what lists the tags of a table: one that goes meanwhile makes Lance fail."""
    for _ in range(_LIST_ATTEMPTS):
        try:
            return call()
        except (OSError, ValueError, RuntimeError) as error:
            if not (is_file_gone(error) and _TAGS in str(error)):
                raise
        time.sleep(_LIST_PAUSE_SECONDS)
    return call()


def cleanup_versions(
    ref: TableRef,
    is_running: Callable[[str], bool],
    older_than: timedelta | None,
    *,
    delete_unverified: bool = False,
    **options: Any,
) -> Any:
    """Clean old versions up, but for those that have a tag, as those have that running jobs read.

    What dead jobs pinned is released first. What jobs have staged is unverified: deleting that is
    refused while one runs.
    """
    if delete_unverified:
        refuse_while_running(ref, is_running)
    dataset = open_dataset(ref)
    release_dead_tags(dataset, is_running)
    options = {"error_if_tagged_old_versions": False, **options}
    options["delete_unverified"] = delete_unverified
    return listing_tags(lambda: dataset.cleanup_old_versions(older_than, **options))


def refuse_while_running(ref: TableRef, is_running: Callable[[str], bool]) -> None:
    """Refuse to delete unverified files of a table, as staged ones are, while a job runs on it."""
    dataset = open_dataset(ref)
    release_dead_tags(dataset, is_running)
    running = tags_on(dataset, ref.branch)
    if running:
        raise UserInputError(
            f"Job {_job_of(running[0])} is running on table {ref.name!r}, and delete_unverified "
            "would delete what it has staged. Clean up without it, or when the job has ended."
        )


def _job_of(tag: str) -> str:
    return tag.removeprefix(_JOB_TAG).rpartition(".")[0]


def release_dead_tags(dataset: lance.LanceDataset, is_running: Callable[[str], bool]) -> None:
    """Unpin the versions of jobs that no longer run, so that they can be cleaned up."""
    for name in job_tags(dataset):
        if not is_running(_job_of(name)):
            _release(dataset, name)

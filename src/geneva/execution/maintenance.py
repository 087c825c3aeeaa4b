"""Keeping a table tidy: its checkpoints, its branches, and what dead jobs have pinned."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta

from geneva.errors import TableNotFoundError, UserInputError
from geneva.execution.backfill.prepare import useful_checkpoints
from geneva.model.tables import TableRef
from geneva.model.uris import TableName
from geneva.render.text import did_you_mean
from geneva.storage.checkpoints.cleanup import (
    CleanupReport,
    forget_attempts,
    is_idle,
    remove_leftovers,
)
from geneva.storage.checkpoints.pins import release_dead_tags
from geneva.storage.checkpoints.store import is_of_column
from geneva.storage.columns.definitions import read_definitions
from geneva.storage.lance.dataset import open_dataset, read_snapshot
from geneva.storage.views.definition import reads_source


def check_branch_deletable(ref: TableRef, name: str) -> None:
    """Refuse a branch that is not there, or that others were made from."""
    branches = open_dataset(ref).branches.list()
    table = str(replace(TableName.parse(ref.name), branch=None))
    if name not in branches:
        raise TableNotFoundError(
            f"Table {table!r} has no branch {name!r}.{did_you_mean(name, branches)}"
        )
    children = sorted(n for n, branch in branches.items() if branch["parent_branch"] == name)
    if children:
        raise UserInputError(
            f"Branch {name!r} of table {table!r} can't be deleted while others are made from it: "
            f"{', '.join(map(repr, children))}. Delete these first."
        )


def release_dead(ref: TableRef, is_running: Callable[[str], bool]) -> None:
    """Unpin what dead jobs have pinned, on any branch of a table."""
    release_dead_tags(open_dataset(ref), is_running)


def cleanup_checkpoints(
    ref: TableRef,
    is_running: Callable[[str], bool],
    older_than: timedelta,
    refreshed: Collection[str] = (),
) -> CleanupReport:
    """Remove what no plan can use again; nothing while a job runs on the table.

    Checkpoints of columns that are `refreshed` from another table stay: by their receipts the next
    refresh finds them, whatever version it goes to, and when it ends it removes what is left.
    """
    dataset = open_dataset(ref)
    release_dead_tags(dataset, is_running)
    if not is_idle(ref):
        return CleanupReport(0, 0, 0)
    forget_attempts(ref)
    definitions = read_definitions(dataset.schema)
    own = [d for d in definitions.values() if not reads_source(d.arrow_field)]
    useful = useful_checkpoints(dataset, read_snapshot(dataset, ref), own)
    return remove_leftovers(
        ref,
        dataset,
        lambda key: (
            useful(key.prefix) or any(is_of_column(key.prefix, column) for column in refreshed)
        ),
        older_than,
    )

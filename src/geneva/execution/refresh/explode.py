"""Views of several rows for one: a hidden view of one list per row, laid out as rows.

The chunker is a UDF of the hidden view, so that checkpoints, staleness and jobs are those of any
view. Laying its lists out runs no user code, and is done again for just the rows that changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from geneva.errors import JobCancelledError, TableChangedError, UnreadableFragmentsError
from geneva.execution.refresh.groups import open_view
from geneva.execution.refresh.layout import Layout, Lists, lay_out, read_source_ids_of, rewrite
from geneva.execution.refresh.passages import RowChanges, compare_rows, rewrites
from geneva.execution.refresh.prepare import (
    PreparedRefresh,
    RefreshRequest,
    find_lost_files,
    prepare_refresh,
)
from geneva.execution.runner import Runner, describe_jobs, job_group
from geneva.model.rows import RowIds
from geneva.model.tables import TableRef
from geneva.model.view_query import SYSTEM_COLUMNS
from geneva.planning.refresh import RefreshPlan
from geneva.storage.lance.commit import retry_conflicts
from geneva.storage.lance.damage import is_damage
from geneva.storage.lance.dataset import Dataset, check_not_dropped, open_dataset
from geneva.storage.lance.row_ids import read_row_ids, sorted_ids
from geneva.storage.views.definition import allow_nulls
from geneva.storage.views.explode import CHUNKS, RewrittenColumns, commit_chunks, inner_ref
from geneva.storage.views.foreign_writes import is_as_refreshed, is_untouched
from geneva.storage.views.source_changes import read_changes
from geneva.storage.views.state import commit_refreshed, commit_refreshing, read_view_state

if TYPE_CHECKING:
    from geneva.execution.backfill.control import JobControl
    from geneva.execution.jobs.progress import JobProgress

_LISTS_PER_ITEM = 20_000
_MAX_ROWS_HERE = 262_144
"""Rows of fragments that are rewritten in this process: less than tasks are worth."""
_MAX_RETRIES = 19


@dataclass(frozen=True, slots=True)
class PreparedChunkRefresh:
    """A refresh of the hidden view, and of the rows laid out from it."""

    ref: TableRef
    inner: PreparedRefresh
    plan: RefreshPlan


def prepare_chunk_refresh(
    ref: TableRef, source: TableRef, request: RefreshRequest, view: Dataset
) -> PreparedChunkRefresh:
    """Plan the refresh of a chunked view: that of its hidden view, which the rows follow."""
    inner = prepare_refresh(inner_ref(ref), source, request)
    opened = open_view(ref, view)
    find_lost_files(ref, opened.dataset, opened.columns)
    current = (
        inner.plan.is_empty
        and is_laid_out(ref, opened.dataset, inner.ref, inner.view_version)
        and opened.info.base_version == inner.target.version
    )
    plan = replace(inner.plan, view=ref.name, up_to_date=current)
    return PreparedChunkRefresh(ref, inner, plan)


def run_chunk_refresh(prepared: PreparedChunkRefresh, control: JobControl) -> JobProgress:
    """Refresh the hidden view, then lay out what changed in it."""
    # Imported when a job runs: a plan needs none of it.
    from geneva.execution.jobs.progress import JobProgress
    from geneva.execution.refresh.run import run_refresh

    progress, version = JobProgress(total=0), prepared.inner.view_version
    source, unreadable = prepared.inner.target.source.name, None
    if not prepared.inner.plan.is_empty:
        try:
            progress, version = run_refresh(prepared.inner, control, view=prepared.ref.name)
        except UnreadableFragmentsError as error:
            if error.table != source:
                raise
            # All else is refreshed, and can be laid out.
            unreadable, version = error, int(open_dataset(prepared.inner.ref).version)
    lay_out_changes(
        outer=prepared.ref,
        inner=prepared.inner.ref,
        version=version,
        base_version=prepared.inner.target.version,
        max_rows_per_fragment=prepared.inner.request.max_rows_per_fragment,
        control=control,
        to_the_end=unreadable is None,
    )
    if unreadable is not None:
        raise unreadable
    return progress


def is_laid_out(outer: TableRef, view: Dataset, inner: TableRef, version: int) -> bool:
    """Whether the rows of a view are those of a version of its hidden one."""
    computed_at, lists = read_view_state(view.schema).computed_at, Lists.read(inner, version)
    if len(computed_at) != 1 or not _is_untouched(outer, view, lists):
        return False
    # A compaction of the hidden one makes a version of it, and changes nothing.
    columns = (*SYSTEM_COLUMNS, CHUNKS, *lists.carried)
    return is_untouched(inner, open_dataset(inner, version), computed_at[0], columns)


def lay_out_changes(
    *,
    outer: TableRef,
    inner: TableRef,
    version: int,
    base_version: int,
    max_rows_per_fragment: int | None,
    control: JobControl,
    to_the_end: bool = True,
) -> None:
    """Make the rows of every source row whose list or carried values changed what they should be.

    Done again after a crash it gives the same: what is there is compared with what should be.
    `to_the_end`: whether the view counts as refreshed, to `base_version` of its source, after that.
    """
    planned, lists = open_dataset(outer), Lists.read(inner, version)
    # Where others may have written into the rows, all of them are compared.
    untouched = _is_untouched(outer, planned, lists)
    before = read_view_state(planned.schema).computed_at if untouched else ()
    allow_nulls(
        commit_refreshing(outer, version, control.job_id, control.is_running, _columns(lists))
    )
    gone, fresh = _changed_rows(inner, before, version, [CHUNKS, *lists.carried])
    written = RowChanges(), list[str]()

    def attempt() -> None:
        nonlocal written
        view = open_dataset(outer)
        changes = compare_rows(outer, view, lists, gone, fresh)
        if not changes.lays_out_the_same(written[0]):
            layouts = _layouts(outer, lists, changes, max_rows_per_fragment)
            written = changes, _run_items(lay_out, layouts, control, here=len(layouts) <= 1)
        items = list(rewrites(outer, view, lists, changes.staying))
        here = sum(item.physical_rows for item in items) <= _MAX_ROWS_HERE
        paths = _run_items(rewrite, items, control, here=here)
        files = [
            RewrittenColumns(item.fragment_id, item.columns, item.rows, path)
            for item, path in zip(items, paths, strict=True)
        ]
        check_not_dropped(outer, view)
        commit_chunks(view, changes.gone, files, written[1], control.job_id)

    # After a compaction, say, the rows are elsewhere.
    retry_conflicts(attempt, _MAX_RETRIES)
    if not to_the_end:
        return
    commit_refreshed(
        outer,
        base_version,
        control.job_id,
        {},
        computed_at=version,
        is_settled=lambda view: is_untouched(
            outer, view, int(planned.version), _columns(lists), control.job_id
        ),
    )


def _is_untouched(outer: TableRef, view: Dataset, lists: Lists) -> bool:
    """Whether the rows of a chunked view are as its last refresh left them."""
    return is_as_refreshed(outer, view, read_view_state(view.schema), _columns(lists))


def _columns(lists: Lists) -> tuple[str, ...]:
    """The columns of a chunked view that only its refreshes write."""
    return (*SYSTEM_COLUMNS, *lists.columns)


def _layouts(
    outer: TableRef, lists: Lists, changes: RowChanges, max_rows_per_fragment: int | None
) -> list[Layout]:
    """The new rows as items of work."""
    ids, (owners, places) = changes.lists, changes.kept
    items = []
    for at in range(0, len(ids), _LISTS_PER_ITEM):
        own = ids[at : at + _LISTS_PER_ITEM]
        mine = np.isin(owners, own)
        items.append(
            Layout(
                outer=outer,
                lists=lists,
                ids=own,
                kept=(owners[mine], places[mine]),
                max_rows_per_fragment=max_rows_per_fragment,
            )
        )
    return items


def _changed_rows(
    inner: TableRef, before: Sequence[int], now: int, watched: list[str]
) -> tuple[RowIds | None, RowIds]:
    """Source rows whose rows may be others (None: all), and rows of the hidden view they are of.

    What is there may be of several versions, when a run was cut off: then what differs from any.
    """
    gone: list[RowIds] = []
    fresh: list[RowIds] = []
    for version in before:
        try:
            changes = read_changes(inner, version, now, watched)
            touched = sorted_ids([*changes.changed.values()])
            left = sorted_ids([changes.deleted, touched])
            gone.append(read_source_ids_of(inner, version, left))
        except BaseException as error:
            # That version was cleaned up, or files of it are gone.
            if not (isinstance(error, TableChangedError) or is_damage(error)):
                raise
            before = ()
            break
        fresh.append(sorted_ids([changes.inserted, touched]))
    if not before:
        return None, read_row_ids(open_dataset(inner, now), None)
    ids = sorted_ids(fresh)
    # Also what a run that was cut off may have laid out of them already.
    return sorted_ids([*gone, read_source_ids_of(inner, now, ids)]), ids


_Item = TypeVar("_Item")


def _run_items(
    function: Callable[[_Item], str], items: list[_Item], control: JobControl, *, here: bool
) -> list[str]:
    """Write what the items say, in tasks or here: no user code runs, so that either is safe."""
    if here:
        return [function(item) for item in items]
    runner: Runner = control.make_runner()
    what = f"geneva rows of a chunked view: job {control.job_id}"
    describe_jobs(runner, job_group(control.job_id), what)
    waiting: dict[Future[list[str]], int] = {
        runner.submit(function, [item]): i for i, item in enumerate(items)
    }
    written: dict[int, str] = {}
    while waiting:
        done, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
        for future in done:
            written[waiting.pop(future)] = future.result()[0]
        if control.cancelled.is_set():
            runner.cancel()
            raise JobCancelledError(f"Job {control.job_id} was cancelled.")
    return [written[i] for i in range(len(items))]

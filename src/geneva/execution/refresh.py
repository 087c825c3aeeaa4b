"""Refreshing a view: which rows come and go, which values are stale, and the same engine for them.

Rows that come are appended as placeholders, rows that go are deleted; then each group of columns is
filled by the driver that runs backfills.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from geneva.errors import UserInputError
from geneva.execution.driver import JobControl
from geneva.execution.prepare import (
    BackfillRequest,
)
from geneva.execution.progress import JobProgress
from geneva.execution.side_by_side import run_side_by_side
from geneva.execution.view_groups import (
    NO_ROWS,
    Group,
    RefreshTarget,
    places_of,
    prepare_group,
    union_of,
    view_groups,
)
from geneva.model import TableRef
from geneva.planning.membership import choose_rows, rows_that_enter_and_leave
from geneva.planning.refresh import ColumnRefresh, RefreshPlan
from geneva.rows import RowSet
from geneva.storage.dataset import Dataset, has_path, open_dataset
from geneva.storage.housekeeping import drop_column_leftovers
from geneva.storage.row_ids import RowIds, read_matching_ids, read_row_ids
from geneva.storage.source_changes import SourceChanges, read_changes
from geneva.storage.view_state import (
    ViewState,
    commit_refreshed,
    commit_refreshing,
    read_view_state,
)
from geneva.storage.views import (
    ViewInfo,
    append_placeholders,
    delete_view_rows,
    read_source_ids,
    read_view,
)
from geneva.view_definition import ViewQuery


@dataclass(frozen=True, slots=True)
class RefreshRequest:
    """What was asked for, after checking."""

    src_version: int | None = None
    max_rows_per_fragment: int | None = None
    backfill: BackfillRequest = field(default_factory=BackfillRequest)


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """The rows of a view: which come, and which go."""

    entering: RowIds
    leaving: dict[int, RowSet]
    """Rows to delete, per fragment of the view."""

    @property
    def rows_leaving(self) -> int:
        """How many rows go."""
        return sum(rows.count for rows in self.leaving.values())


@dataclass(frozen=True, slots=True)
class PreparedRefresh:
    """A refresh plan with everything that is needed to carry it out."""

    ref: TableRef
    source: TableRef
    info: ViewInfo
    target: int
    request: RefreshRequest
    groups: tuple[Group, ...]
    membership: Membership
    changed: dict[str, RowIds]
    plan: RefreshPlan
    job_type: str = "REFRESH"

    @property
    def goal(self) -> RefreshTarget:
        """What the groups of columns are filled for."""
        return RefreshTarget(
            self.ref, self.source, self.target, self.changed, self.request.backfill
        )

    @property
    def table(self) -> str:
        """The view's name."""
        return self.ref.name

    @property
    def column(self) -> str:
        """All of the view's columns."""
        return "*"

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for."""
        return {
            "source": self.source.name,
            "src_version": self.target,
            "from_version": self.plan.from_version,
            "max_rows_per_fragment": self.request.max_rows_per_fragment,
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know."""
        return self.plan.notes

    @property
    def is_empty(self) -> bool:
        """Whether the view is up to date."""
        return self.plan.is_empty

    @property
    def total_rows(self) -> int:
        """Values to compute or carry over."""
        return self.plan.rows_to_compute

    def run(self, control: JobControl) -> JobProgress:
        """Carry the plan out. The version is recorded last, so that a crash repeats nothing."""
        return _run(self, control)

    def tidy(self) -> None:
        """Drop the checkpoints of all groups."""
        for group in self.groups:
            drop_column_leftovers(self.ref, group.definition.name, set())


def prepare_refresh(ref: TableRef, source: TableRef, request: RefreshRequest) -> PreparedRefresh:
    """Look at the view and its source, and decide what to do. Runs no user code."""
    view = open_dataset(ref)
    info = read_view(view.schema)
    if info is None:
        raise UserInputError(f"Table {ref.name!r} is not a materialized view.")
    source_now = open_dataset(source)
    target = request.src_version or source_now.version
    if info.format_version == "1" and target != info.base_version:
        raise UserInputError(
            f"Cannot refresh materialized view {ref.name!r} to version {target}: its source table "
            f"{source.name!r} has no stable row IDs, so that it can only be refreshed to version "
            f"{info.base_version}. Recreate the source with "
            "storage_options={'new_table_enable_stable_row_ids': 'true'}."
        )
    groups = view_groups(view, info)
    versions = {g.definition.name: g.definition.udf_version for g in groups}
    state = read_view_state(view.schema)
    nobody = Membership(NO_ROWS, {})
    if state.refreshed and info.base_version == target and state.udf_versions == versions:
        plan = _plan(ref, source, info, state, target, nobody, (), up_to_date=True)
        return PreparedRefresh(ref, source, info, target, request, groups, nobody, {}, plan)
    source_then = open_dataset(source, target)
    _check_columns(info.query, source_then, source)
    changes = _changes(source, info, target)
    membership = _membership(view, source_then, info, state, changes)
    prepared = PreparedRefresh(
        ref=ref,
        source=source,
        info=info,
        target=target,
        request=request,
        groups=groups,
        membership=membership,
        changed=changes.changed if changes is not None else {},
        plan=_plan(ref, source, info, state, target, membership, (), up_to_date=False),
    )
    columns = tuple(
        ColumnRefresh(g.definition.name, _rows_to_fill(prepared, view, g), g.runs_udf)
        for g in groups
    )
    plan = _plan(ref, source, info, state, target, membership, columns, up_to_date=False)
    return replace(prepared, plan=plan)


def _plan(
    ref: TableRef,
    source: TableRef,
    info: ViewInfo,
    state: ViewState,
    target: int,
    membership: Membership,
    columns: tuple[ColumnRefresh, ...],
    *,
    up_to_date: bool,
) -> RefreshPlan:
    return RefreshPlan(
        view=ref.name,
        source=source.name,
        from_version=info.base_version if state.refreshed else None,
        to_version=target,
        rows_entering=len(membership.entering),
        rows_leaving=membership.rows_leaving,
        columns=columns,
        up_to_date=up_to_date,
    )


def _check_columns(query: ViewQuery, source: Dataset, ref: TableRef) -> None:
    missing = [path for path in query.source_columns() if not has_path(source.schema, path)]
    if missing:
        raise UserInputError(
            f"The view reads column {missing[0]!r}, which table {ref.name!r} at version "
            f"{source.version} does not have. Refresh to a version that has it (src_version=...), "
            "or create the view anew."
        )


def _changes(source: TableRef, info: ViewInfo, target: int) -> SourceChanges | None:
    """What happened to the source since the view was last in order; None when it never was."""
    if info.format_version == "1" or info.base_version == target:
        return None
    return read_changes(source, info.base_version, target, sorted(info.query.source_columns()))


def _membership(
    view: Dataset,
    source: Dataset,
    info: ViewInfo,
    state: ViewState,
    changes: SourceChanges | None,
) -> Membership:
    """Which rows come and go: by what changed, where that tells; else by comparing all rows."""
    query = info.query
    bounded = query.limit is not None or query.offset is not None
    if changes is None or bounded or not state.refreshed:
        wanted = choose_rows(
            read_row_ids(source, query.where),
            shuffle_seed=query.shuffle_seed if query.shuffle else None,
            offset=query.offset,
            limit=query.limit,
        )
        ids = read_source_ids(view)
        present = np.concatenate([rows.live_ids() for rows in ids] or [NO_ROWS])
        entering, leaving = rows_that_enter_and_leave(present, wanted)
        return Membership(entering, places_of(ids, leaving))
    touched = union_of(changes.changed.get(path, NO_ROWS) for path in query.where_inputs)
    still = read_matching_ids(source, touched, query.where)
    gone = np.union1d(changes.deleted, np.setdiff1d(touched, still))
    fresh = read_matching_ids(source, changes.inserted, query.where)
    if not len(gone) and not len(still):
        return Membership(_ordered(fresh, query), {})
    ids = read_source_ids(view)
    present = np.sort(np.concatenate([rows.live_ids() for rows in ids] or [NO_ROWS]))
    entering = np.union1d(fresh, np.setdiff1d(still, present, assume_unique=False))
    return Membership(_ordered(entering, query), places_of(ids, gone))


def _ordered(ids: RowIds, query: ViewQuery) -> RowIds:
    seed = query.shuffle_seed if query.shuffle else None
    return choose_rows(np.sort(ids), shuffle_seed=seed, offset=None, limit=None)


def _rows_to_fill(prepared: PreparedRefresh, view: Dataset, group: Group) -> int:
    """How many rows of a group will get a value: those that come, and those that are stale."""
    stale = prepare_group(prepared.goal, group, frozenset(), view=view).plan
    leaving = prepared.membership.leaving
    staying = sum(
        f.compute.minus(leaving[f.fragment_id]).count
        if f.fragment_id in leaving
        else f.compute.count
        for f in stale.fragments
    )
    return staying + len(prepared.membership.entering)


def _run(prepared: PreparedRefresh, control: JobControl) -> JobProgress:
    commit_refreshing(open_dataset(prepared.ref))
    if prepared.membership.leaving:
        delete_view_rows(open_dataset(prepared.ref), prepared.membership.leaving)
    append_placeholders(
        prepared.ref,
        open_dataset(prepared.ref),
        prepared.membership.entering,
        prepared.request.max_rows_per_fragment,
    )
    works = [prepare_group(prepared.goal, group, frozenset()) for group in prepared.groups]
    needed = [work for work in works if not work.plan.is_empty]
    progress = run_side_by_side(needed, control, prepared.total_rows)
    versions = {g.definition.name: g.definition.udf_version for g in prepared.groups}
    commit_refreshed(open_dataset(prepared.ref), prepared.target, versions)
    return progress

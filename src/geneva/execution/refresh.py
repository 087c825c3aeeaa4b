"""Refreshing a view: which rows come and go, which values are stale, and the same engine for them.

A view's columns are computed columns whose inputs are rows of another table. Carried and SQL columns
are one group, each UDF column is one of its own; each is filled by the driver that runs backfills.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from geneva.errors import UserInputError
from geneva.execution.driver import JobControl, run_backfill
from geneva.execution.prepare import (
    BackfillRequest,
    PreparedBackfill,
    unpublished_search,
    with_unpublished,
)
from geneva.execution.progress import JobProgress
from geneva.model import ColumnDefinition, Reason, TableRef
from geneva.planning.backfill import (
    BackfillPlan,
    FragmentState,
    choose_fragments,
    plan_fragment,
)
from geneva.planning.membership import choose_rows, rows_that_enter_and_leave
from geneva.planning.refresh import ColumnRefresh, RefreshPlan
from geneva.rows import RowSet
from geneva.storage.column_state import ColumnFacts, read_column
from geneva.storage.columns import read_definition
from geneva.storage.dataset import (
    Dataset,
    has_path,
    open_dataset,
    quote_path,
    read_live_rows,
    read_snapshot,
)
from geneva.storage.donors import Donor, work_identity
from geneva.storage.fragments import StagedFile
from geneva.storage.housekeeping import drop_column_leftovers
from geneva.storage.lineage import ColumnIdentity, Verdict
from geneva.storage.provenance import is_computed_from
from geneva.storage.source_changes import (
    RowIds,
    SourceChanges,
    read_changes,
    read_matching_ids,
    read_row_ids,
)
from geneva.storage.source_rows import SourceRows
from geneva.storage.view_state import (
    ViewState,
    commit_refreshed,
    commit_refreshing,
    read_view_state,
)
from geneva.storage.views import (
    FragmentRows,
    ViewInfo,
    append_placeholders,
    delete_view_rows,
    read_source_ids,
    read_view,
)
from geneva.view_definition import IS_SET, ColumnKind, ViewColumn, ViewQuery

CARRIED = "__carried"
_NONE: RowIds = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class RefreshRequest:
    """What was asked for, after checking."""

    src_version: int | None = None
    max_rows_per_fragment: int | None = None
    backfill: BackfillRequest = field(default_factory=BackfillRequest)


@dataclass(frozen=True, slots=True)
class Group:
    """Columns of the view that are filled together."""

    definition: ColumnDefinition
    columns: tuple[ViewColumn, ...]
    mark: str | None = None

    @property
    def runs_udf(self) -> bool:
        """Whether the group is a UDF's column."""
        return bool(self.definition.udf_digest)

    def expressions(self, source: Dataset) -> tuple[tuple[str, str], ...]:
        """What to read from the source, by name."""
        if self.runs_udf:
            paths = self.columns[0].inputs
            return tuple((path, quote_path(path, source.schema)) for path in paths)
        return tuple(
            (
                column.name,
                quote_path(column.expression, source.schema)
                if column.kind is ColumnKind.COLUMN
                else column.expression,
            )
            for column in self.columns
        )

    def inputs(self) -> set[str]:
        """The source's columns that the group depends on."""
        return {path for column in self.columns for path in column.inputs}


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
        """Carry the plan out. The version is recorded last: before that, a crash repeats nothing."""
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
    nobody = Membership(_NONE, {})
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


def view_groups(view: Dataset, info: ViewInfo) -> tuple[Group, ...]:
    """The groups of columns of a view: those that are carried over, then each UDF's."""
    carried = tuple(c for c in info.query.columns if c.kind in (ColumnKind.COLUMN, ColumnKind.SQL))
    outputs = (*(column.name for column in carried), IS_SET)
    groups = [
        Group(
            ColumnDefinition(
                name=CARRIED,
                arrow_field=view.schema.field(IS_SET),
                uuid=f"{info.query.digest()}-carried",
                udf_name=CARRIED,
                udf_version=info.query.digest(),
                udf_digest="",
                inputs=(),
                outputs=outputs,
            ),
            carried,
            mark=IS_SET,
        )
    ]
    for column in info.query.columns:
        if column.kind is ColumnKind.UDF:
            definition = read_definition(view.schema, column.name)
            assert definition is not None, column.name
            own = replace(column, inputs=definition.inputs)
            groups.append(Group(definition, (own,)))
    return tuple(groups)


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
        present = np.concatenate([rows.live_ids() for rows in ids] or [_NONE])
        entering, leaving = rows_that_enter_and_leave(present, wanted)
        return Membership(entering, _places(ids, leaving))
    touched = _union(changes.changed.get(path, _NONE) for path in query.where_inputs)
    still = read_matching_ids(source, touched, query.where)
    gone = np.union1d(changes.deleted, np.setdiff1d(touched, still))
    fresh = read_matching_ids(source, changes.inserted, query.where)
    if not len(gone) and not len(still):
        return Membership(_ordered(fresh, query), {})
    ids = read_source_ids(view)
    present = np.sort(np.concatenate([rows.live_ids() for rows in ids] or [_NONE]))
    entering = np.union1d(fresh, np.setdiff1d(still, present, assume_unique=False))
    return Membership(_ordered(entering, query), _places(ids, gone))


def _ordered(ids: RowIds, query: ViewQuery) -> RowIds:
    seed = query.shuffle_seed if query.shuffle else None
    return choose_rows(np.sort(ids), shuffle_seed=seed, offset=None, limit=None)


def _places(ids: Iterable[FragmentRows], wanted: RowIds) -> dict[int, RowSet]:
    """Where the live rows of these source ids are, per fragment of the view."""
    if not len(wanted):
        return {}
    wanted = np.sort(wanted)
    found: dict[int, RowSet] = {}
    for rows in ids:
        mask = rows.live & np.isin(rows.source_ids.astype(np.uint64), wanted)
        if mask.any():
            found[rows.fragment_id] = RowSet.from_mask(mask)
    return found


def _union(arrays: Iterable[RowIds]) -> RowIds:
    every = [array for array in arrays if len(array)]
    return np.unique(np.concatenate(every)) if every else _NONE


def _rows_to_fill(prepared: PreparedRefresh, view: Dataset, group: Group) -> int:
    """How many rows of a group will get a value: those that come, and those that are stale."""
    stale = prepare_group(prepared, group, frozenset(), view=view).plan
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
    total = JobProgress(total=prepared.total_rows)
    for group in prepared.groups:
        work = prepare_group(prepared, group, frozenset())
        if not work.plan.is_empty:
            follow = replace(control, listeners=(partial(_report, control, total),))
            total = total.plus(run_backfill(work, follow))
    versions = {g.definition.name: g.definition.udf_version for g in prepared.groups}
    commit_refreshed(open_dataset(prepared.ref), prepared.target, versions)
    return total


def _report(control: JobControl, before: JobProgress, now: JobProgress) -> None:
    for listener in control.listeners:
        listener(before.plus(now))


def prepare_group(
    prepared: PreparedRefresh,
    group: Group,
    committed_by_job: frozenset[str],
    *,
    view: Dataset | None = None,
) -> PreparedBackfill:
    """What is left to fill of one group of columns, as work for the driver."""
    dataset = view if view is not None else open_dataset(prepared.ref)
    snapshot = read_snapshot(dataset, prepared.ref)
    definition = group.definition
    column = _identity(prepared, group, snapshot.field_ids)
    facts = read_column(dataset, snapshot, column)
    stale = _stale_rows(prepared, group, dataset, facts)
    states = []
    candidates = {f.id: f for f in snapshot.fragments if f.live_rows}
    for fragment in candidates.values():
        committed = facts.committed[fragment.id]
        valid = committed.valid
        reason = committed.reason
        if fragment.id in stale:
            valid = valid.minus(stale[fragment.id])
            reason = Reason.INPUT_CHANGED
        if valid.is_full:
            continue
        states.append((fragment, valid, reason, committed))
    live = read_live_rows(dataset, [fragment for fragment, *_ in states])
    planned = [
        FragmentState(
            fragment_id=fragment.id,
            physical_rows=fragment.physical_rows,
            live=live[fragment.id],
            valid=valid,
            reason=reason,
            has_output=committed.output_file is not None,
        )
        for fragment, valid, reason, committed in states
    ]
    prefixes = {
        fragment.id: work_identity(
            prepared.ref,
            definition,
            None,
            Verdict(valid, reason),
            committed.inputs,
            committed.output_file,
        ).prefix()
        for fragment, valid, reason, committed in states
    }
    needed, _ = choose_fragments(map(plan_fragment, planned), None)
    staged: dict[int, StagedFile] = {}
    donors: dict[int, tuple[Donor, ...]] = {}
    if needed and view is None:
        chosen = {plan.fragment_id for plan in needed}
        planned = [state for state in planned if state.fragment_id in chosen]
        search = unpublished_search(prepared.ref, facts, None, committed_by_job)
        planned, staged, donors = with_unpublished(search, facts, candidates, planned, prefixes)
        needed, _ = choose_fragments(map(plan_fragment, planned), None)
    source = open_dataset(prepared.source, prepared.target)
    return PreparedBackfill(
        ref=prepared.ref,
        dataset=dataset,
        snapshot=snapshot,
        definition=definition,
        request=prepared.request.backfill,
        plan=BackfillPlan(
            table=prepared.ref.name,
            version=snapshot.version,
            column=definition.name,
            udf_name=definition.udf_name,
            udf_version=definition.udf_version,
            where=None,
            fragments=needed,
            skipped_fragments=len(snapshot.fragments) - len(needed),
            total_rows=sum(f.live_rows for f in snapshot.fragments),
        ),
        facts=candidates,
        committed=facts.committed,
        prefixes=prefixes,
        staged=staged,
        donors=donors,
        again=partial(prepare_group, prepared, group),
        source=SourceRows(prepared.source, prepared.target, group.expressions(source)),
    )


def _identity(
    prepared: PreparedRefresh, group: Group, field_ids: Mapping[str, tuple[int, ...]]
) -> ColumnIdentity:
    names = group.definition.outputs or (group.definition.name,)
    own = [name for name in names if name != IS_SET] or list(names)
    return ColumnIdentity(
        definition=group.definition,
        output=tuple(i for name in own for i in field_ids[name]),
        inputs=(),
        source=source_signature(prepared.source, prepared.target),
        mark=field_ids[group.mark] if group.mark is not None else None,
    )


def source_signature(source: TableRef, version: int) -> str:
    """What the values of a view were computed from."""
    return f"{source.uri}@{version}"


def _stale_rows(
    prepared: PreparedRefresh, group: Group, view: Dataset, facts: ColumnFacts
) -> dict[int, RowSet]:
    """Rows of the view whose source row changed, in files that are not of the target version yet."""
    changed = _union(prepared.changed.get(path, _NONE) for path in group.inputs())
    if not len(changed):
        return {}
    signature = (source_signature(prepared.source, prepared.target),)
    fresh = {
        fragment_id
        for fragment_id, committed in facts.committed.items()
        if committed.output_file is not None and is_computed_from(committed.output_file, signature)
    }
    places = _places(read_source_ids(view), changed)
    return {fragment_id: rows for fragment_id, rows in places.items() if fragment_id not in fresh}


__all__ = [
    "PreparedRefresh",
    "RefreshRequest",
    "prepare_refresh",
    "source_signature",
]

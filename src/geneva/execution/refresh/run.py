"""Refreshing a view: which rows come and go, which values are stale, and the same engine for them.

Rows that come are appended as placeholders, rows that go are deleted; then each group of columns is
filled by the driver that runs backfills.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from geneva.errors import TableChangedError, TableNotFoundError, UserInputError
from geneva.execution.backfill.driver import JobControl
from geneva.execution.backfill.parallel import run_side_by_side
from geneva.execution.backfill.prepare import prepare
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.jobs.progress import JobProgress
from geneva.execution.refresh.groups import (
    NO_ROWS,
    ChangedRows,
    Group,
    GroupSubject,
    RefreshTarget,
    view_groups,
)
from geneva.execution.refresh.rows import Membership, drop_rows, read_membership
from geneva.model.rows import RowSet
from geneva.model.tables import TableRef
from geneva.planning.refresh import ColumnRefresh, RefreshPlan
from geneva.storage.checkpoints.cleanup import drop_column_leftovers, new_job_tag, release_dead_tags
from geneva.storage.columns.definitions import commit_receipt_columns
from geneva.storage.lance.dataset import Dataset, has_path, open_dataset
from geneva.storage.lance.transactions import fragments_of_commit
from geneva.storage.views.definition import (
    ViewInfo,
    append_placeholders,
    delete_view_rows,
    read_view,
)
from geneva.storage.views.source_changes import SourceChanges, read_changes
from geneva.storage.views.state import (
    ViewState,
    commit_refreshed,
    commit_refreshing,
    read_view_state,
    version_identity,
)


@dataclass(frozen=True, slots=True)
class RefreshRequest:
    """What was asked for, after checking."""

    src_version: int | None = None
    max_rows_per_fragment: int | None = None
    backfill: BackfillRequest = field(default_factory=BackfillRequest)


@dataclass(frozen=True, slots=True)
class PreparedRefresh:
    """A refresh plan with everything that is needed to carry it out."""

    ref: TableRef
    source: TableRef
    view_version: int
    """The version of the view that was looked at."""
    target: int
    request: RefreshRequest
    groups: tuple[Group, ...]
    membership: Membership
    changed: dict[int, ChangedRows | None]
    """What happened to the source since each version that the view's values may be of."""
    plan: RefreshPlan
    job_type: str = "REFRESH"

    @property
    def goal(self) -> RefreshTarget:
        """What the groups of columns are filled for."""
        return RefreshTarget(
            self.ref, self.source, self.target, self.changed, self.request.backfill
        )

    def subject(self, group: Group) -> GroupSubject:
        """A group of columns, as it is filled for this refresh."""
        return GroupSubject(self.goal, group)

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
        """Carry the plan out."""
        return run_refresh(self, control)[0]

    def tidy(self) -> None:
        """Drop the checkpoints of all groups."""
        for group in self.groups:
            drop_column_leftovers(self.ref, group.name, set())


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
    state = read_view_state(view.schema)
    prepared = PreparedRefresh(
        ref=ref,
        source=source,
        view_version=int(view.version),
        target=target,
        request=request,
        groups=groups,
        membership=Membership(NO_ROWS, NO_ROWS),
        changed={},
        plan=RefreshPlan(
            view=ref.name,
            source=source.name,
            from_version=info.base_version if state.refreshed else None,
            to_version=target,
            rows_entering=0,
            rows_leaving=0,
            columns=(),
            up_to_date=True,
        ),
    )
    _check_source(source, info, state)
    if state.refreshed and info.base_version == target and state.udf_versions == _versions(groups):
        return prepared
    return _with_work(prepared, view, info, state)


def _with_work(
    prepared: PreparedRefresh, view: Dataset, info: ViewInfo, state: ViewState
) -> PreparedRefresh:
    """Add what there is to do, at least that the version is to be recorded."""
    source = _open_target(prepared.source, prepared.target)
    watched = _watched(info, prepared.groups)
    _check_columns(watched, source, prepared.source)
    changes, notes = _changes(prepared, state, source, watched)
    since = changes.get(info.base_version) if state.refreshed else None
    membership = read_membership(view, source, info.query, since)
    changed = {v: c.changed if c is not None else None for v, c in changes.items()}
    filled = replace(prepared, membership=membership, changed=changed)
    columns = tuple(
        ColumnRefresh(g.name, _rows_to_fill(filled, view, g), g.runs_udf) for g in prepared.groups
    )
    plan = replace(
        prepared.plan,
        rows_entering=len(membership.entering),
        rows_leaving=len(membership.leaving),
        columns=columns,
        up_to_date=False,
        notes=notes,
    )
    return replace(filled, plan=plan)


def _open_target(source: TableRef, version: int) -> Dataset:
    try:
        return open_dataset(source, version)
    except TableNotFoundError as error:
        latest = open_dataset(source).version
        raise UserInputError(
            f"Table {source.name!r} has no version {version}: its latest is {latest}, and old "
            "versions may have been cleaned up."
        ) from error


def _check_source(source: TableRef, info: ViewInfo, state: ViewState) -> None:
    """Refuse a source that is another table by now, or a view that is itself not in order."""
    own = read_view(open_dataset(source).schema)
    if own is not None and not read_view_state(open_dataset(source).schema).refreshed:
        raise UserInputError(
            f"The view's source {source.name!r} is a view that was not refreshed to the end: "
            "refresh that one first."
        )
    if state.identity is None:
        return
    found = version_identity(source, info.base_version)
    latest = open_dataset(source).version
    if latest < info.base_version or found not in (None, state.identity):
        raise UserInputError(
            f"Table {source.name!r} was dropped and made anew since the view was refreshed to its "
            f"version {info.base_version}. Drop the view, and create it anew."
        )


def _versions(groups: Iterable[Group]) -> dict[str, str]:
    return {group.name: group.version for group in groups}


def _watched(info: ViewInfo, groups: Iterable[Group]) -> list[str]:
    """The source's columns that the view depends on, also those that an altered UDF reads now."""
    return sorted({*info.query.where_inputs, *(p for group in groups for p in group.inputs())})


def _check_columns(paths: Iterable[str], source: Dataset, ref: TableRef) -> None:
    missing = [path for path in paths if not has_path(source.schema, path)]
    if missing:
        raise UserInputError(
            f"The view reads column {missing[0]!r}, which table {ref.name!r} at version "
            f"{source.version} does not have. Refresh to a version that has it (src_version=...), "
            "or create the view anew."
        )


def _changes(
    prepared: PreparedRefresh, state: ViewState, source: Dataset, watched: list[str]
) -> tuple[dict[int, SourceChanges | None], tuple[str, ...]]:
    """What happened to the source since each version that the view's values may be of.

    None for a version that is gone: then anything may have changed since.
    """
    found: dict[int, SourceChanges | None] = {}
    notes: list[str] = []
    for version in state.computed_at:
        if not source.has_stable_row_ids or version == prepared.target:
            continue
        try:
            found[version] = read_changes(prepared.source, version, prepared.target, watched)
        except TableChangedError:
            found[version] = None
            notes.append(
                f"version {version} of {prepared.source.name!r}, which values of the view were "
                "computed from, was cleaned up: UDF columns are checked by their receipts, and "
                "carried columns are read again"
            )
    return found, tuple(notes)


def _rows_to_fill(prepared: PreparedRefresh, view: Dataset, group: Group) -> int:
    """How many rows of a group will get a value: those that come, and those that are stale."""
    stale = prepare(prepared.subject(group), prepared.request.backfill, dataset=view).plan
    places = prepared.membership.places
    staying = sum(
        f.compute.minus(places[f.fragment_id]).count if f.fragment_id in places else f.compute.count
        for f in stale.fragments
    )
    return staying + len(prepared.membership.entering)


def run_refresh(prepared: PreparedRefresh, control: JobControl) -> tuple[JobProgress, int]:
    """Carry a plan out; return what was done, and the version of the view that is the result.

    That the source's version is reached is recorded last, and that it is under way first: what a
    refresh that was cut off has left behind is known for what it is.
    """
    ref, target = prepared.ref, prepared.target
    begun = commit_refreshing(ref, target, control.job_id, control.is_running)
    if begun.version != prepared.view_version + 1:
        # Somebody changed the view since it was looked at, perhaps by a refresh.
        prepared = prepare_refresh(
            ref, prepared.source, replace(prepared.request, src_version=target)
        )
    definitions = [g.definition for g in prepared.groups if g.definition is not None]
    commit_receipt_columns(open_dataset(ref), definitions)
    drop_rows(ref, prepared.membership.leaving, control.max_conflict_retries)
    before = open_dataset(ref)
    after = append_placeholders(
        ref,
        before,
        prepared.membership.entering,
        prepared.request.max_rows_per_fragment,
    )
    if after.version != before.version:
        _check_still_ours(ref, after, control.job_id)
    with _source_pinned(prepared, control):
        request = prepared.request.backfill
        works = [
            prepare(prepared.subject(group), request, make_runner=control.make_runner)
            for group in prepared.groups
        ]
        needed = [work for work in works if not work.plan.is_empty]
        progress = run_side_by_side(needed, control, prepared.total_rows)
    ended = commit_refreshed(
        ref,
        target,
        control.job_id,
        _versions(prepared.groups),
        identity=version_identity(prepared.source, target),
    )
    return progress, int(ended.version)


def _check_still_ours(ref: TableRef, after: Dataset, job_id: str) -> None:
    """Take rows back that were added after another job had taken the view over.

    That happens to a job which was not heard of for so long that it was taken for dead.
    """
    if read_view_state(after.schema).job_id == job_id:
        return
    added = {f.id: RowSet.full(f.physical_rows) for f in fragments_of_commit(after, after.version)}
    delete_view_rows(after, added)
    raise TableChangedError(
        f"View {ref.name!r} was taken over by another refresh while job {job_id} was not heard of. "
        "Refresh again."
    )


@contextmanager
def _source_pinned(prepared: PreparedRefresh, control: JobControl) -> Iterator[None]:
    """Keep the source's version from being cleaned up while the job reads it.

    Not in another database: who unpins versions there knows nothing of the jobs of this one.
    """
    source = prepared.source
    if not prepared.ref.uri.startswith(f"{source.uri.rpartition('/')[0]}/"):
        yield
        return
    tag = new_job_tag(control.job_id)
    dataset = open_dataset(source, prepared.target)
    # A source that may only be read is no reason to fail.
    with suppress(OSError, ValueError):
        release_dead_tags(dataset, control.is_running)
        dataset.tags.create(tag, prepared.target)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            dataset.tags.delete(tag)

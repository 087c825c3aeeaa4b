"""Planning a refresh: which rows come and go, which values are stale, and a plan that runs.

The plan holds the backfill plan of each of the view's Computations, made on the view as it will be
when its rows have come and gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial

from geneva.errors import (
    StaleInputError,
    TableChangedError,
    TableNotFoundError,
    UnreadableFragmentsError,
    UserInputError,
)
from geneva.execution.backfill.prepare import PreparedBackfill, prepare
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.refresh.damage import Damage, find_damage, source_fragments_of
from geneva.execution.refresh.forecast import forecast
from geneva.execution.refresh.groups import (
    NO_ROWS,
    Group,
    GroupSubject,
    OpenView,
    RefreshTarget,
    open_view,
    own_columns,
    view_groups,
)
from geneva.execution.refresh.rows import Membership, read_first_membership, read_membership
from geneva.execution.refresh.stored_sql import check_stored_sql
from geneva.model.computation import PartitionRows
from geneva.model.tables import TableRef
from geneva.model.view_query import SYSTEM_COLUMNS, Shown
from geneva.planning.refresh import ColumnRefresh, RefreshPlan
from geneva.storage.checkpoints.staging import open_checkpoints, read_work
from geneva.storage.columns.copies import how_to_get_stable_ids
from geneva.storage.columns.lost_files import absent_of_fields
from geneva.storage.columns.provenance import parse_file_name
from geneva.storage.lance.damage import damage_reason, is_damage
from geneva.storage.lance.dataset import (
    Dataset,
    field_ids_of,
    has_later,
    has_path,
    open_dataset,
    read_snapshot,
)
from geneva.storage.lance.history import commit_uuid
from geneva.storage.views.definition import ROW_ADDRESSES, ViewInfo, is_view, read_view
from geneva.storage.views.foreign_writes import is_as_refreshed
from geneva.storage.views.source_changes import SourceChanges, read_changes
from geneva.storage.views.state import (
    ViewState,
    check_not_made_anew,
    read_view_state,
)

_TOUCHED = (
    "others may have written into the view since its last refresh (or its history was cleaned up): "
    "all of its rows are compared with the source"
)


@dataclass(frozen=True, slots=True)
class RefreshRequest:
    """What was asked for, after checking."""

    src_version: int | None = None
    max_rows_per_fragment: int | None = None
    backfill: BackfillRequest = field(default_factory=BackfillRequest)
    partition_rows: PartitionRows | None = None
    """Of a view whose source is a table of partitions: where their rows are."""


@dataclass(frozen=True, slots=True)
class OpenTables:
    """A view and its source at their latest versions, opened in this order.

    So the view is of no later version of the source than that.
    """

    view: Dataset
    source: Dataset


@dataclass(frozen=True, slots=True)
class PreparedRefresh:
    """A refresh plan with everything that is needed to carry it out."""

    target: RefreshTarget
    request: RefreshRequest
    view_id: str
    """The identity of the view that the plan was made on, ..."""
    view_version: int
    """... and its version."""
    columns: tuple[str, ...]
    """The view's columns that are filled, those of receipts aside."""
    groups: tuple[Group, ...]
    membership: Membership
    backfills: tuple[PreparedBackfill, ...]
    """One of each group, on the view as it will be; none where the view is up to date."""
    plan: RefreshPlan

    @property
    def ref(self) -> TableRef:
        """The view."""
        return self.target.ref

    @property
    def udf_versions(self) -> dict[str, str]:
        """The version of what fills each group."""
        return _versions(self.groups)

    @property
    def overtaken(self) -> tuple[tuple[int, str], ...]:
        """The fragments of the source that it leaves out, if others may have cleaned them up."""
        target, found = self.target, tuple(self.target.damage.fragments.items())
        if not found or self.request.src_version is not None:
            return ()
        return found if has_later(target.source, target.version) else ()


def prepare_refresh(
    ref: TableRef,
    source: TableRef,
    request: RefreshRequest,
    damage: Damage | None = None,
    *,
    tables: OpenTables | None = None,
) -> PreparedRefresh:
    """Plan a refresh from the view and its source as they are. Reads only; runs no user code.

    `damage`: what of the source is known to be unreadable, at the version asked for. `tables` are
    the two as they are, where they are open.
    """
    opened = open_view(ref, None if tables is None else tables.view)
    view, info = opened.dataset, opened.info
    latest = open_latest(source) if tables is None else tables.source
    version = request.src_version or int(latest.version)
    # Before anything else is read of it: what is read later is checked against that.
    identity = commit_uuid(latest, version)
    _check_reachable(ref, source, info, version)
    groups = view_groups(view, info)
    filled = (name for group in groups for name in group.columns_filled)
    has_lost_files = find_lost_files(ref, view, SYSTEM_COLUMNS, filled)
    state = read_view_state(view.schema)
    up_to_date = PreparedRefresh(
        target=RefreshTarget(
            ref=ref,
            source=source,
            version=version,
            changed={},
            address=info.query.source_address,
            partition_rows=request.partition_rows,
            identity=identity,
            at_version=latest if version == int(latest.version) else None,
        ),
        request=request,
        view_id=info.uuid,
        view_version=int(view.version),
        columns=opened.columns,
        groups=groups,
        membership=Membership(NO_ROWS, NO_ROWS),
        backfills=(),
        plan=RefreshPlan(
            view=ref.name,
            source=source.name,
            from_version=info.base_version if state.refreshed else None,
            to_version=version,
            rows_entering=0,
            rows_leaving=0,
            columns=(),
            up_to_date=True,
        ),
    )
    _check_source(source, latest, state)
    untouched = is_as_refreshed(ref, view, state, own_columns(view, groups))
    reached = info.base_version == version and state.udf_versions == _versions(groups)
    current = untouched and reached and not has_lost_files
    if current and not request.backfill.options.retry_failed:
        return up_to_date
    begun = replace(up_to_date, target=replace(up_to_date.target, damage=damage or Damage()))
    planned = _around_damage(
        begun, partial(_with_work, opened=opened, state=state, untouched=untouched)
    )
    # With rows to try again there may be work left in a view that is up to date.
    return up_to_date if current and not planned.plan.rows_to_compute else planned


def find_lost_files(
    ref: TableRef, view: Dataset, rows: Iterable[str], filled: Iterable[str] = ()
) -> bool:
    """Whether somebody has deleted files that a refresh of a local view would write again.

    Those are the files that jobs have written of the columns that make its `rows`, or are `filled`.
    Where others are gone that make its rows, it is refused: nobody knows what they were made from.
    """
    if ref.is_remote:
        return False
    ids, snapshot = field_ids_of(view), read_snapshot(view, ref)
    fields = frozenset(i for name in rows for i in ids.get(name, ()))
    others = frozenset(i for name in filled for i in ids.get(name, ()))
    gone = absent_of_fields(snapshot, fields | others)
    lost = {path for path in gone if parse_file_name(path) is not None}
    damaged = [
        (fragment.id, file.path)
        for fragment in snapshot.fragments
        for file in fragment.files_of(fields)
        if file.path in gone - lost
    ]
    if not damaged:
        return bool(lost)
    fragments = tuple(dict.fromkeys(fragment_id for fragment_id, _ in damaged))
    name = Shown.of(ref.name, "", "").table
    raise UnreadableFragmentsError(
        f"Rows of view {name!r} can't be read: its data files "
        f"{', '.join(path for _, path in damaged[:5])} are gone (fragments {[*fragments[:5]]}). "
        "Restore the files, or drop the view and create it again.",
        fragments,
        name,
    )


def _around_damage(
    begun: PreparedRefresh, plan: Callable[[PreparedRefresh], PreparedRefresh]
) -> PreparedRefresh:
    """Plan a refresh until all of the source that can't be read is known, and left out."""
    while True:
        target = begun.target
        try:
            planned = plan(begun)
            found = more_damage(planned, _unreadable_in_view(planned.backfills))
        except BaseException as error:
            if not (isinstance(error, UnreadableFragmentsError) or is_damage(error)):
                raise
            found = more_damage(begun, None)
            if not found:
                raise
        if not found:
            return planned
        known = target.damage.plus(_open_target(target), found)
        begun = replace(begun, target=replace(target, damage=known))


def more_damage(
    prepared: PreparedRefresh, view_fragments: Collection[int] | None
) -> dict[int, str]:
    """Fragments of the source, not known yet, because of which fragments of the view can't be made.

    None: nobody knows where it is.
    """
    if view_fragments is not None and not view_fragments:
        return {}
    target = prepared.target
    source = _open_target(target)
    info = read_view(open_dataset(target.ref).schema)
    assert info is not None
    suspects = None
    if view_fragments is not None:
        # None where a compaction of the view has taken these fragments away meanwhile.
        suspects = source_fragments_of(source, target.ref, view_fragments) or None
    found = find_damage(source, _watched(info, prepared.groups), suspects)
    return {i: why for i, why in found.items() if i not in target.damage.fragments}


def _unreadable_in_view(backfills: Iterable[PreparedBackfill]) -> set[int]:
    return {fragment for backfill in backfills for fragment, _ in backfill.plan.unreadable}


def _with_work(
    prepared: PreparedRefresh, opened: OpenView, state: ViewState, *, untouched: bool
) -> PreparedRefresh:
    """Add what there is to do, at least that the version is to be recorded.

    A view that is `untouched` since its last refresh has the rows that it had then.
    """
    target, request = prepared.target, prepared.request
    view, info = opened.dataset, opened.info
    source = _open_target(target)
    watched = _watched(info, prepared.groups)
    check_stored_sql(target.ref.name, info.query, source.schema)
    _check_columns(watched, source, target.source)
    changes, notes = _changes(target, state, source, watched)
    since = changes.get(info.base_version) if untouched else None
    if state.refreshed and not untouched:
        notes = (*notes, _TOUCHED)
    damage = target.damage
    if damage:
        notes = (*notes, damage.note(target.source.name))
    if state.computed_at:
        membership = read_membership(view, source, info.query, since, damage)
    else:
        max_rows = request.max_rows_per_fragment
        membership = read_first_membership(view, source, info.query, max_rows, damage)
    changed = {v: c.changed if c is not None else None for v, c in changes.items()}
    target = replace(target, changed=changed, at_version=source)
    snapshot = read_snapshot(view, target.ref)
    later = forecast(snapshot, membership, request.max_rows_per_fragment)
    stored = cache(lambda: read_work(open_checkpoints(target.ref)))  # once for all groups
    backfills = tuple(
        prepare(
            GroupSubject(target, group),
            request.backfill,
            dataset=view,
            snapshot=later,
            stored=stored,
        )
        for group in prepared.groups
    )
    entering = len(membership.entering)
    if prepared.plan.from_version is None:  # the rows that the view was made with come now
        carried = [b.plan.rows_to_compute for b in backfills if not b.computation.runs_user_code]
        entering = max([entering, *carried])
    plan = replace(
        prepared.plan,
        rows_entering=entering,
        rows_leaving=membership.rows_leaving,
        columns=tuple(
            ColumnRefresh(backfill.plan, backfill.computation.runs_user_code)
            for backfill in backfills
        ),
        up_to_date=False,
        notes=(*notes, *(n for b in backfills for n in _named_notes(b))),
    )
    return replace(prepared, target=target, membership=membership, backfills=backfills, plan=plan)


def _named_notes(backfill: PreparedBackfill) -> tuple[str, ...]:
    return tuple(f"{backfill.plan.column}: {note}" for note in backfill.plan.notes)


def open_latest(source: TableRef) -> Dataset:
    """Open the source of a view."""
    try:
        return open_dataset(source)
    except TableNotFoundError as error:
        raise TableNotFoundError(
            f"Table {source.name!r}, the view's source, is not there: it was dropped, or moved "
            "without the view. What the view holds stays as it is."
        ) from error


def _check_reachable(ref: TableRef, source: TableRef, info: ViewInfo, version: int) -> None:
    """Refuse another version of a source whose rows have no stable ids."""
    if info.format_version == ROW_ADDRESSES and version != info.base_version:
        raise UserInputError(
            f"Cannot refresh materialized view {ref.name!r} to version {version}: its source table "
            f"{source.name!r} has no stable row IDs, so that it can only be refreshed to version "
            f"{info.base_version}. {how_to_get_stable_ids(source.name)}"
        )


def _open_target(target: RefreshTarget) -> Dataset:
    try:
        return target.open_source()
    except TableNotFoundError as error:
        latest = open_latest(target.source)
        raise UserInputError(
            f"Table {target.source.name!r} has no version {target.version}: its latest is "
            f"{latest.version}, and old versions may have been cleaned up."
        ) from error


def _check_source(source: TableRef, latest: Dataset, state: ViewState) -> None:
    """Refuse a source that is another table by now, or a view that is itself not in order."""
    if is_view(latest.schema) and not read_view_state(latest.schema).refreshed:
        raise StaleInputError(
            f"The view's source {source.name!r} is a view that was not refreshed to the end: "
            "refresh that one first."
        )
    check_not_made_anew(source, state.identities.items(), latest)


def _versions(groups: Iterable[Group]) -> dict[str, str]:
    return {group.name: group.version for group in groups}


def _watched(info: ViewInfo, groups: Iterable[Group]) -> list[str]:
    """The source's columns that the view depends on, also those that an altered UDF reads now."""
    return sorted({*info.query.where_inputs, *(p for group in groups for p in group.input_paths)})


def _check_columns(paths: Iterable[str], source: Dataset, ref: TableRef) -> None:
    missing = [path for path in paths if not has_path(source.schema, path)]
    if missing:
        raise UserInputError(
            f"The view reads column {missing[0]!r}, which table {ref.name!r} at version "
            f"{source.version} does not have. Refresh to a version that has it (src_version=...), "
            "or create the view anew."
        )


def _changes(
    target: RefreshTarget, state: ViewState, source: Dataset, watched: list[str]
) -> tuple[dict[int, SourceChanges | None], tuple[str, ...]]:
    """What happened to the source since each version that the view's values may be of.

    None for a version that is gone: then anything may have changed since.
    """
    found: dict[int, SourceChanges | None] = {}
    notes: list[str] = []
    for version in state.computed_at:
        if not source.has_stable_row_ids or version == target.version:
            continue
        try:
            # A view reads columns by name: another field of the name has other values, maybe.
            found[version] = read_changes(
                target.source, version, target.version, watched, by_name=True, opened=source
            )
        except TableChangedError:
            found[version] = None
            notes.append(_checked(target, version, "was cleaned up"))
        except BaseException as error:
            if not is_damage(error):
                raise
            found[version] = None
            notes.append(_checked(target, version, f"can't be compared ({damage_reason(error)})"))
    return found, tuple(notes)


def _checked(target: RefreshTarget, version: int, why: str) -> str:
    return (
        f"version {version} of {target.source.name!r}, which values of the view were computed "
        f"from, {why}: UDF columns are checked by their receipts, and carried columns are read "
        "again"
    )

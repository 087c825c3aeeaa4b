"""The columns of a view, as work for the driver that runs backfills.

Carried and SQL columns are one group, each UDF column is one of its own. Their inputs are rows of
another table, which `__source_row_id` names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from geneva.execution.prepare import (
    BackfillRequest,
    PreparedBackfill,
    unpublished_search,
    with_unpublished,
)
from geneva.model import ColumnDefinition, Reason, TableRef
from geneva.planning.backfill import BackfillPlan, FragmentState, choose_fragments, plan_fragment
from geneva.rows import RowSet
from geneva.storage.column_state import ColumnFacts, Committed, read_column
from geneva.storage.columns import read_definition
from geneva.storage.dataset import (
    Dataset,
    FragmentFacts,
    open_dataset,
    quote_path,
    read_live_rows,
    read_snapshot,
)
from geneva.storage.donors import Donor, work_identity
from geneva.storage.fragments import StagedFile
from geneva.storage.lineage import ColumnIdentity, Verdict
from geneva.storage.provenance import is_computed_from, parse_file_name
from geneva.storage.row_ids import RowIds
from geneva.storage.source_rows import SourceRows
from geneva.storage.transactions import VersionView
from geneva.storage.views import FragmentRows, ViewInfo, read_source_ids
from geneva.view_definition import IS_SET, ColumnKind, ViewColumn

CARRIED = "__carried"
NO_ROWS: RowIds = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class RefreshTarget:
    """A view, and the version of its source that it is to equal."""

    ref: TableRef
    source: TableRef
    version: int
    changed: dict[int, dict[str, RowIds]]
    """Per version that values may be of: rows of the source whose value changed, per column."""
    request: BackfillRequest

    def changed_since(self, version: int, group: Group) -> RowIds:
        """Rows of the source in which something that a group depends on changed."""
        columns = self.changed[version]
        return union_of(columns.get(path, NO_ROWS) for path in group.inputs())


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
            if definition.inputs != column.inputs:
                # The same function of other columns is another one.
                definition = replace(definition, udf_version=_fed_from(definition))
            groups.append(Group(definition, (replace(column, inputs=definition.inputs),)))
    return tuple(groups)


def _fed_from(definition: ColumnDefinition) -> str:
    told = json.dumps([definition.udf_version, *definition.inputs])
    return hashlib.sha256(told.encode()).hexdigest()


def places_of(ids: Iterable[FragmentRows], wanted: RowIds) -> dict[int, RowSet]:
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


def union_of(arrays: Iterable[RowIds]) -> RowIds:
    """All ids of several arrays, sorted, each once."""
    every = [array for array in arrays if len(array)]
    return np.unique(np.concatenate(every)) if every else NO_ROWS


def prepare_group(
    target: RefreshTarget,
    group: Group,
    committed_by_job: frozenset[str],
    *,
    view: Dataset | None = None,
) -> PreparedBackfill:
    """What is left to fill of one group of columns, as work for the driver."""
    dataset = view if view is not None else open_dataset(target.ref)
    snapshot = read_snapshot(dataset, target.ref)
    definition = group.definition
    column = _identity(target, group, snapshot.field_ids)
    facts = read_column(dataset, snapshot, column)
    stale = _stale_rows(target, group, dataset, facts)
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
            failed=_still_failed(committed, stale.get(fragment.id)),
        )
        for fragment, valid, reason, committed in states
    ]
    prefixes = {
        fragment.id: work_identity(
            target.ref,
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
        search = replace(
            unpublished_search(target.ref, facts, None, committed_by_job),
            stale=partial(_stale_before, target, group, facts.column),
        )
        planned, staged, donors = with_unpublished(search, facts, candidates, planned, prefixes)
        needed, _ = choose_fragments(map(plan_fragment, planned), None)
    source = open_dataset(target.source, target.version)
    return PreparedBackfill(
        ref=target.ref,
        dataset=dataset,
        snapshot=snapshot,
        definition=definition,
        request=target.request,
        plan=BackfillPlan(
            table=target.ref.name,
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
        again=partial(prepare_group, target, group),
        source=SourceRows(target.source, target.version, group.expressions(source)),
    )


def _still_failed(committed: Committed, stale: RowSet | None) -> RowSet | None:
    """The rows that failed and whose source row is as it was."""
    if committed.failed is None or stale is None:
        return committed.failed
    return committed.failed.minus(stale)


def _identity(
    target: RefreshTarget, group: Group, field_ids: Mapping[str, tuple[int, ...]]
) -> ColumnIdentity:
    names = group.definition.outputs or (group.definition.name,)
    own = [name for name in names if name != IS_SET] or list(names)
    return ColumnIdentity(
        definition=group.definition,
        output=tuple(i for name in own for i in field_ids[name]),
        inputs=(),
        source=source_signature(target.source, target.version),
        mark=field_ids[group.mark] if group.mark is not None else None,
    )


def source_signature(source: TableRef, version: int) -> str:
    """What the values of a view were computed from."""
    return f"{source.uri}@{version}"


def _stale_rows(
    target: RefreshTarget, group: Group, view: Dataset, facts: ColumnFacts
) -> dict[int, RowSet]:
    """Rows of the view whose source row changed since the version that their value is of."""
    if not any(len(target.changed_since(v, group)) for v in target.changed):
        return {}
    stale: dict[int, RowSet] = {}
    for rows in read_source_ids(view):
        stale.update(_stale_of(target, group, rows, facts.committed[rows.fragment_id].output_file))
    return stale


def _stale_before(
    target: RefreshTarget,
    group: Group,
    column: ColumnIdentity,
    view: VersionView,
    fragment: FragmentFacts,
) -> RowSet:
    """The same for a fragment of an older version of the view."""
    (rows,) = read_source_ids(view.dataset, fragment.id)
    found = _stale_of(target, group, rows, column.output_file(fragment))
    return found.get(fragment.id, RowSet.empty(fragment.physical_rows))


def _stale_of(
    target: RefreshTarget, group: Group, rows: FragmentRows, path: str | None
) -> dict[int, RowSet]:
    if path is None:
        return {}
    versions = _made_at(target, path)
    return places_of([rows], union_of(target.changed_since(v, group) for v in versions))


def _made_at(target: RefreshTarget, path: str) -> Sequence[int]:
    """The versions of the source that the values in a file may be of, the target's aside."""
    versions = tuple(target.changed)
    if parse_file_name(path) is None:
        return versions
    for version in (target.version, *versions):
        if is_computed_from(path, (source_signature(target.source, version),)):
            return (version,) if version in target.changed else ()
    # Older, so that the refresh that ended last found it right.
    return versions[:1]

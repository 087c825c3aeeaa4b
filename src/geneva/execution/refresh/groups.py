"""The columns of a view, as computations for the driver that runs backfills.

Carried and SQL columns are one computation, those of each UDF are one of their own. Their inputs
are rows of another table, which `__source_row_id` names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from geneva.errors import TableChangedError, UserInputError
from geneva.execution.backfill.subjects import SourceCheck
from geneva.execution.refresh.damage import Damage
from geneva.model.computation import (
    Carry,
    Computation,
    Input,
    PartitionRows,
    Source,
    joined_name,
    receipt_name,
    source_signature,
)
from geneva.model.partitions import DIGEST, KEY, Keyed
from geneva.model.rows import RowIds, RowSet
from geneva.model.tables import ColumnDefinition, TableRef
from geneva.model.view_query import IS_SET, SYSTEM_COLUMNS, ColumnKind, ViewColumn
from geneva.storage.columns.definitions import (
    bound_output,
    computation_of,
    group_definitions,
    read_definitions,
)
from geneva.storage.columns.provenance import named_inputs
from geneva.storage.columns.publish import verify_column
from geneva.storage.columns.validity import Validity
from geneva.storage.lance.dataset import (
    Dataset,
    FragmentFacts,
    TableSnapshot,
    open_dataset,
    quote_path,
)
from geneva.storage.lance.row_ids import sorted_ids
from geneva.storage.views.definition import (
    FragmentRows,
    ViewInfo,
    read_source_ids,
    read_view,
    source_expression,
)
from geneva.storage.views.explode import query_columns
from geneva.storage.views.partitions import ROWS
from geneva.storage.views.state import fields_of, read_view_state

CARRIED = "__carried"
NO_ROWS: RowIds = np.zeros(0, dtype=np.uint64)

ChangedRows: TypeAlias = dict[str, RowIds]
"""Rows of the source whose value changed, per column."""


@dataclass(frozen=True, slots=True, eq=False)
class RefreshTarget:
    """A view, and the version of its source that it is to equal."""

    ref: TableRef
    source: TableRef
    version: int
    changed: dict[int, ChangedRows | None]
    """Per version that values may be of, what changed since; None: that version is gone."""
    address: str = ""
    """Where the source is, as the view's definition says it; empty: by its URI."""
    partition_rows: PartitionRows | None = None
    """Of a view whose source is a table of partitions: where their rows are."""
    damage: Damage = field(default_factory=Damage)
    """What of the source can't be read."""
    identity: str | None = None
    """Which commit had made that version when the refresh was planned, as `commit_uuid` says:
    another table may be in the source's place by now."""
    at_version: Dataset | None = field(default=None, repr=False)
    """The source at that version, where it is open."""

    def open_source(self) -> Dataset:
        """The source at that version."""
        opened = self.at_version
        return open_dataset(self.source, self.version) if opened is None else opened

    def changed_since(self, version: int, paths: Iterable[str]) -> RowIds | None:
        """Rows of the source in which one of these columns changed; None: nobody knows."""
        columns = self.changed[version]
        if columns is None:
            return None
        return sorted_ids([columns.get(path, NO_ROWS) for path in paths])


@dataclass(frozen=True, slots=True)
class CarriedColumns:
    """Columns and SQL expressions of the source, taken over together."""

    columns: tuple[ViewColumn, ...]
    version: str
    """The digest of the view's query."""

    @property
    def name(self) -> str:
        """The name of all of them together."""
        return CARRIED

    @property
    def input_paths(self) -> tuple[str, ...]:
        """The source's columns that they depend on."""
        return tuple(dict.fromkeys(path for c in self.columns for path in c.inputs))

    @property
    def columns_filled(self) -> tuple[str, ...]:
        """The view's columns that hold them."""
        return tuple(column.name for column in self.columns)

    def expressions(self, source: pa.Schema) -> tuple[tuple[str, str], ...]:
        """What to read from the source, by name."""
        return tuple((column.name, source_expression(column, source)) for column in self.columns)

    def computation(self, snapshot: TableSnapshot, source: Source) -> Computation:
        """The computation that fills them at one version of the view."""
        names = (*self.columns_filled, IS_SET)
        return Computation(
            id=f"{self.version}-carried",
            name=CARRIED,
            version=self.version,
            outputs=tuple(bound_output(snapshot, name) for name in names),
            program=Carry(),
            source=source,
            filled_flag=bound_output(snapshot, IS_SET),
        )


@dataclass(frozen=True, slots=True)
class UdfColumns:
    """The columns that one call of a UDF computes from columns of the source: mostly one."""

    definitions: tuple[ColumnDefinition, ...]
    version: str
    """The version of the function and of what it is fed from."""

    @property
    def name(self) -> str:
        """The column's name, or those of all of them."""
        return joined_name([definition.name for definition in self.definitions])

    @property
    def input_paths(self) -> tuple[str, ...]:
        """The source's columns that the function is fed from."""
        return self.definitions[0].inputs

    @property
    def columns_filled(self) -> tuple[str, ...]:
        """The view's columns that hold its values and receipts."""
        values = (definition.name for definition in self.definitions)
        return (*values, *(receipt_name(definition.uuid) for definition in self.definitions))

    def expressions(self, source: pa.Schema) -> tuple[tuple[str, str], ...]:
        """What to read from the source, by name."""
        return tuple((path, quote_path(path, source)) for path in self.input_paths)

    def computation(self, snapshot: TableSnapshot, source: Source) -> Computation:
        """The computation that fills it at one version of the view."""
        return replace(
            computation_of(snapshot, replace(self.definitions[0], inputs=())),
            version=self.version,
            inputs=tuple(Input(path) for path in self.input_paths),
            source=source,
        )


@dataclass(frozen=True, slots=True)
class KeyedRows(CarriedColumns):
    """The key and the digest of each row, of columns that are not stored."""

    keyed: Keyed = field(default_factory=lambda: Keyed((), ()))

    @property
    def columns_filled(self) -> tuple[str, ...]:
        """The hidden view's columns that hold them."""
        return (KEY, DIGEST)


Group: TypeAlias = CarriedColumns | UdfColumns
"""Columns of a view that are filled together, by one Computation."""


@dataclass(frozen=True, slots=True)
class OpenView:
    """A view at its latest version, its definition, and the columns that refreshes fill."""

    dataset: Dataset
    info: ViewInfo
    columns: tuple[str, ...]
    """Those of receipts aside."""


def open_view(ref: TableRef, view: Dataset | None = None) -> OpenView:
    """Open a view; refused where its columns are not those that refreshes fill.

    With plain Lance anybody can drop, rename and re-type them, and give one the name of another.
    `view` is its latest version, where that is open.
    """
    view = open_dataset(ref) if view is None else view
    info = read_view(view.schema)
    if info is None:
        raise UserInputError(f"Table {ref.name!r} is not a materialized view.")
    columns = (*SYSTEM_COLUMNS, *sorted(query_columns(ref, info.query)))
    computed = {column.name for column in info.query.columns if column.kind is ColumnKind.UDF}
    lost = computed.difference(read_definitions(view.schema))
    before, now = read_view_state(view.schema).fields, fields_of(view, columns)
    for name in columns:
        kept = name in now and before.get(name, now[name]) == now[name]
        if not kept or name in lost:
            raise TableChangedError(
                f"Column {name!r} of view {ref.name!r} was dropped, renamed or re-typed by others. "
                "Restore a version of the view from before that, or drop it and create it anew."
            )
    return OpenView(view, info, columns)


def view_groups(view: Dataset, info: ViewInfo) -> tuple[Group, ...]:
    """The groups of columns of a view: those that are carried over, then each UDF's.

    Without columns that others took away: `open_view` refuses these where they are to be filled.
    """
    kinds = (ColumnKind.COLUMN, ColumnKind.SQL)
    carried = tuple(c for c in info.query.columns if c.kind in kinds)
    keyed = info.query.keyed
    if keyed is not None:
        return (KeyedRows(carried, info.query.digest(), keyed),)
    udfs: dict[str, UdfColumns] = {}
    definitions = read_definitions(view.schema)
    for column in info.query.columns:
        if column.kind is ColumnKind.UDF and column.name in definitions:
            found = _udf_columns(view, column, definitions[column.name])
            udfs.setdefault(found.definitions[0].computation_id, found)
    return (CarriedColumns(carried, info.query.digest()), *udfs.values())


def own_columns(view: Dataset, groups: Iterable[Group]) -> list[str]:
    """The columns of a view that only its refreshes write."""
    names = {*SYSTEM_COLUMNS, *(name for group in groups for name in group.columns_filled)}
    return [name for name in view.schema.names if name in names]


def refreshed_columns(ref: TableRef) -> tuple[str, ...]:
    """The names of a view's groups; none for a chunked view, whose hidden one has them."""
    view = open_dataset(ref)
    info = read_view(view.schema)
    if info is None or info.query.chunker is not None:
        return ()
    return tuple(group.name for group in view_groups(view, info))


def _udf_columns(view: Dataset, column: ViewColumn, definition: ColumnDefinition) -> UdfColumns:
    every = group_definitions(view.schema, definition)
    # The same function of other columns is another one.
    if definition.inputs == column.inputs:
        return UdfColumns(every, definition.udf_version)
    kept = tuple(_fed_from(version, definition.inputs) for version in definition.kept_versions)
    version = _fed_from(definition.udf_version, definition.inputs)
    return UdfColumns(tuple(replace(each, kept_versions=kept) for each in every), version)


def _fed_from(version: str, inputs: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([version, *inputs]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class GroupSubject:
    """A group of columns of a view, for a version of its source."""

    target: RefreshTarget
    group: Group

    @property
    def ref(self) -> TableRef:
        """The view."""
        return self.target.ref

    def bind(self, dataset: Dataset, snapshot: TableSnapshot) -> Computation:
        """The group's computation at one version of the view."""
        target = self.target
        schema = target.open_source().schema
        expressions = self.group.expressions(schema)
        keyed = self.group.keyed if isinstance(self.group, KeyedRows) else None
        source = Source(target.source, target.version, expressions, target.address, keyed)
        computation = self.group.computation(snapshot, source)
        rows = target.partition_rows
        if rows is not None and isinstance(self.group, UdfColumns):
            read = replace(source, expressions=(*expressions, (ROWS, quote_path(ROWS, schema))))
            computation = replace(computation, source=read, partition_rows=rows)
        verify_column(snapshot.schema, target.ref, computation)
        return computation

    def source_check(self, dataset: Dataset, computation: Computation) -> SourceCheck | None:
        """Finds the rows of the view that stand for rows of the source that changed."""
        return _ChangedInSource(self.target, self.group, dataset, computation).judge


class _ChangedInSource:
    """Takes rows back whose source row changed since the version that their value is of."""

    def __init__(
        self, target: RefreshTarget, group: Group, view: Dataset, computation: Computation
    ) -> None:
        self._target, self._group, self._view = target, group, view
        self._computation = computation
        self._rows: dict[int, FragmentRows] | None = None

    def judge(self, fragment: FragmentFacts, validity: Validity) -> Validity:
        """What is still right, and which rows can't be judged, as their source can't be read."""
        known = self._still_right(fragment, validity)
        if known is None:
            known = Validity.unknown(fragment.physical_rows)
        lost = self._target.damage.rows
        if not len(lost):
            return known
        if fragment.source_ids is not None:
            rows = RowSet.from_mask(np.isin(fragment.source_ids, lost))
        else:
            rows = self._places(fragment, lost)
        return known.without_inputs(rows)

    def _still_right(self, fragment: FragmentFacts, validity: Validity) -> Validity | None:
        """What is still right; None when a version is gone that values may be of."""
        if not validity.right and not validity.failed:
            return validity
        changes = [
            self._target.changed_since(version, self._group.input_paths)
            for version in self._versions(validity.made_from)
        ]
        known = [ids for ids in changes if ids is not None]
        if len(known) < len(changes):
            return None
        ids = sorted_ids(known)
        if not len(ids):
            return validity
        return validity.without(self._places(fragment, ids))

    def _places(self, fragment: FragmentFacts, ids: RowIds) -> RowSet:
        """The rows of a fragment that stand for rows of the source."""
        places = places_of([self._rows_of(fragment)], ids)
        return places.get(fragment.id, RowSet.empty(fragment.physical_rows))

    def _rows_of(self, fragment: FragmentFacts) -> FragmentRows:
        if self._rows is None:
            self._rows = {rows.fragment_id: rows for rows in read_source_ids(self._view)}
        return self._rows[fragment.id]

    def _versions(self, made_from: frozenset[str]) -> Sequence[int]:
        """The versions of the source that values may be of, the target's aside."""
        target = self._target
        versions = tuple(target.changed)
        if not made_from:
            return versions
        names = {
            named_inputs((source_signature(address, version),)): version
            for version in (target.version, *versions)
            for address in (target.address, target.source.uri)
        }
        found = {names[name] for name in made_from if name in names}
        if len(found) < len(made_from):
            # Older, so that the refresh that ended last found it right.
            found.update(versions[:1])
        return [version for version in versions if version in found]


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

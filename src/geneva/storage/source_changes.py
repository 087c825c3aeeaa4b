"""What happened to a table between two of its versions, and which rows satisfy a condition.

Rows are known by their stable row ids, so that a moved row is the same row. What changed is first
told by manifests: a fragment with the same rows, deletions and files at both versions is never
read. Rows that left a fragment or came into one are then told by their ids. Values are compared,
at both versions, only for rows that some commit between the two may have given another value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from lance import LanceOperation

from geneva.errors import (
    ColumnNotFoundError,
    InvalidFilterError,
    TableChangedError,
    TableNotFoundError,
    UserInputError,
)
from geneva.model import TableRef
from geneva.rows import Mask, RowRange
from geneva.storage.dataset import (
    FragmentFacts,
    field_ids_of,
    filter_message,
    fragment_facts,
    open_dataset,
    quote_path,
)
from geneva.storage.fragments import field_at, is_blob, read_windows, window_rows
from geneva.storage.lineage import _aligned
from geneva.storage.transactions import MOST_TRANSACTIONS, read_transaction

RowIds: TypeAlias = npt.NDArray[np.uint64]
"""Stable row ids: ascending, each once."""

_IDS_AT_ONCE = 4_194_304
"""Row ids that one look at the deletions of several fragments reads."""
_MOST_IN_LIST = 4_096
"""Row ids in one SQL list: the parser takes longer than the search."""
_SPARSE = 64
"""A fragment is scanned when one in this many of its rows is asked for, else searched by id."""
_DENSE = 4
"""The whole table is scanned when one in this many of its rows is asked for."""
_EVERYTHING = 0
"""As a version: every row may have changed since, whatever its own stamp says."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceChanges:
    """What happened to a source table between two versions, as stable row ids."""

    inserted: RowIds
    """Live at the new version, not at the old one."""
    deleted: RowIds
    """Live at the old version, not at the new one."""
    changed: dict[str, RowIds]
    """Per watched column path: rows live at both versions whose value differs.

    After an overwrite ids say nothing: all rows are deleted and inserted, and an id that is there
    at both versions is listed for every column.
    """


def read_changes(ref: TableRef, old: int, new: int, columns: Sequence[str]) -> SourceChanges:
    """Compare two versions of a table, in either order. `columns` are paths at the new one.

    A column is what it was under the same field id; where that is not the same column (it was
    dropped and added again), under the same name; otherwise it was NULL.
    """
    after = _open(ref, new, "which is to be read")
    before = after if old == new else _open(ref, old, "which the view was computed from")
    for dataset in (before, after):
        if not dataset.has_stable_row_ids:
            raise UserInputError(
                f"Table {ref.name!r} has no stable row ids at version {dataset.version}, so its "
                "changes can't be told. Stable row ids exist only from a table's creation: "
                "create it again with storage option new_table_enable_stable_row_ids='true'."
            )
    nodes = _nodes_of(after.lance_schema)
    for path in columns:
        if path not in nodes:
            raise ColumnNotFoundError(
                f"Table {ref.name!r} has no column {path!r} at version {new}; it has "
                f"{', '.join(after.schema.names)}."
            )
    if old == new:
        return SourceChanges(_NONE, _NONE, dict.fromkeys(columns, _NONE))
    return _Comparison(ref, before, after, columns).changes()


def read_row_ids(dataset: lance.LanceDataset, where: str | None) -> RowIds:
    """The ids of live rows that satisfy `where`; row addresses if the table has no stable ids."""
    if where is None:
        return _scan_ids(dataset)
    return _filtered(
        where,
        lambda condition: _scan_ids(dataset, condition),
        lambda condition: _query_ids(dataset, condition),
    )


def read_matching_ids(dataset: lance.LanceDataset, ids: RowIds, where: str | None) -> RowIds:
    """Those of `ids` that are live and satisfy `where`; reads few other rows."""
    if where is None:
        most = len(ids) * _DENSE >= dataset.count_rows()
        return _common(ids, _scan_ids(dataset)) if most else _locate(dataset, ids)[0]
    return _filtered(
        where,
        lambda condition: _search(dataset, ids, condition),
        lambda condition: _query_some(dataset, ids, condition),
    )


def equal_rows(old: pa.Array, new: pa.Array) -> Mask:
    """Row by row whether the values are the same, whatever their type.

    NULL is NULL, NaN is NaN, and 0.0 is not -0.0: a function can tell them apart. Values of
    different types differ.
    """
    old, new = _without_encoding(old), _without_encoding(new)
    no_old, no_new = _flags(old.is_null()), _flags(new.is_null())
    same = no_old & no_new
    some = ~(no_old | no_new)
    if some.any():
        same |= some & _equal_values(old, new)
    return same


# --- the comparison -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Watched:
    """A column at both versions."""

    path: str
    before: str | None
    """Its path at the old version; None: it was not there."""
    old_fields: tuple[int, ...]
    new_fields: tuple[int, ...]
    same: bool
    """Whether it is one field, of one type: then one file holds the same values at both."""
    since_old: int | None
    """The first commit of the old version's branch that may have changed values; None: none did."""
    since_new: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """How rows got from fragment to fragment."""

    inserted: RowIds
    deleted: RowIds
    moved: RowIds
    left: tuple[int, ...]
    """Fragments of the old version that rows went out of."""
    entered: tuple[int, ...]
    """Fragments of the new version that rows came into."""


class _Comparison:
    """Two versions of one table, side by side."""

    def __init__(
        self,
        ref: TableRef,
        before: lance.LanceDataset,
        after: lance.LanceDataset,
        columns: Sequence[str],
    ) -> None:
        self._before, self._after = before, after
        self._route = _read_route(ref, before, after)
        self._old = {f.fragment_id: f.metadata for f in before.get_fragments()}
        self._new = {f.fragment_id: f.metadata for f in after.get_fragments()}
        self._columns = columns

    def changes(self) -> SourceChanges:
        if self._route is not None and self._route.overwritten:
            old, new = _scan_ids(self._before), _scan_ids(self._after)
            return SourceChanges(new, old, dict.fromkeys(self._columns, _common(old, new)))
        moves = self._moves()
        watched = [self._watch(path) for path in dict.fromkeys(self._columns)]
        found: dict[str, list[RowIds]] = {column.path: [] for column in watched}
        for column, ids in chain(
            self._filled(watched, moves), self._rewritten(watched), self._altered(watched, moves)
        ):
            found[column.path].append(ids)
        changed = {path: _sorted(parts) for path, parts in found.items()}
        return SourceChanges(moves.inserted, moves.deleted, changed)

    @cached_property
    def _kept(self) -> list[int]:
        """Fragments with the same rows, deleted ones included, in the same order."""
        return [
            i
            for i, new in self._new.items()
            if (old := self._old.get(i)) is not None
            and old.physical_rows == new.physical_rows
            and old.row_id_meta == new.row_id_meta
        ]

    def _moves(self) -> _Moves:
        kept = frozenset(self._kept)
        thinned = [i for i in self._kept if _deletions(self._old[i]) != _deletions(self._new[i])]
        left = [i for i in self._old if i not in kept]
        entered = [i for i in self._new if i not in kept]
        gone, come = [_scan_ids(self._before, None, left)], [_scan_ids(self._after, None, entered)]
        for group in _groups(thinned, self._new):
            old = _scan_ids(self._before, None, group)
            new = _scan_ids(self._after, None, group)
            gone.append(_minus(old, new))
            come.append(_minus(new, old))
        out, into = _sorted(gone), _sorted(come)
        return _Moves(
            _minus(into, out),
            _minus(out, into),
            _common(out, into),
            (*left, *thinned),
            (*entered, *thinned),
        )

    def _watch(self, path: str) -> _Watched:
        old_nodes, node = _nodes_of(self._before.lance_schema), self._new_nodes[path]
        continuous = self._route is None or node in self._route.fields
        names = {i: name for name, i in old_nodes.items()} if continuous else {}
        before = names.get(node, path if path in old_nodes else None)
        new_fields = field_ids_of(self._after)[path]
        if before is None:
            return _Watched(path, None, (), new_fields, False, None, None)
        old_fields = field_ids_of(self._before)[before]
        same = old_fields == new_fields and (
            field_at(self._before.schema, before).type == field_at(self._after.schema, path).type
        )
        if self._route is None or not same or not continuous:
            return _Watched(path, before, old_fields, new_fields, same, _EVERYTHING, None)
        since_old, since_new = self._route.touches(new_fields)
        return _Watched(path, before, old_fields, new_fields, same, since_old, since_new)

    @cached_property
    def _new_nodes(self) -> dict[str, int]:
        return _nodes_of(self._after.lance_schema)

    def _filled(
        self, watched: Sequence[_Watched], moves: _Moves
    ) -> Iterator[tuple[_Watched, RowIds]]:
        """Rows with a value in a column that was not there before."""
        for column in watched:
            if column.before is None:
                present = f"{quote_path(column.path, self._after.schema)} IS NOT NULL"
                files = [i for i, f in self._new.items() if _paths(f, column.new_fields)]
                ids = _scan_ids(self._after, present, files)
                yield column, _minus(ids, moves.inserted)

    def _rewritten(self, watched: Sequence[_Watched]) -> Iterator[tuple[_Watched, RowIds]]:
        """Rows that stayed where they are, but whose column has another file."""
        for i in self._kept:
            old, new = self._old[i], self._new[i]
            columns = [
                c
                for c in watched
                if c.before is not None
                and not (c.same and _paths(old, c.old_fields) == _paths(new, c.new_fields))
            ]
            if not columns:
                continue
            ids, offsets = _read_places(self._after, i)
            if _deletions(old) != _deletions(new):
                live = _among(ids, _scan_ids(self._before, None, [i]))
                ids, offsets = ids[live], offsets[live]
            blobs = [c for c in columns if _holds_blob(field_at(self._after.schema, c.path))]
            yield from self._differing(blobs, ids)
            columns = [c for c in columns if c not in blobs]
            unequal = self._unequal_offsets(fragment_facts(old), fragment_facts(new), columns)
            yield from ((c, ids[mask[offsets]]) for c, mask in zip(columns, unequal, strict=True))

    def _unequal_offsets(
        self, old: FragmentFacts, new: FragmentFacts, columns: Sequence[_Watched]
    ) -> list[Mask]:
        if not columns:
            return []
        masks = [np.zeros(new.physical_rows, dtype=np.bool_) for _ in columns]
        rows = RowRange(0, new.physical_rows)
        window = self._window(columns, [new])
        was_at = [c.before for c in columns if c.before is not None]
        streams = (
            read_windows(self._before, old.id, was_at, rows, window),
            read_windows(self._after, new.id, [c.path for c in columns], rows, window),
        )
        for (start, was), (_, now) in _aligned(*streams):
            for i, mask in enumerate(masks):
                mask[start : start + now.num_rows] = ~equal_rows(was.column(i), now.column(i))
        return masks

    def _window(self, columns: Sequence[_Watched], fragments: Sequence[FragmentFacts]) -> int:
        """How many rows to hold at once."""
        fields = [i for column in columns for i in column.new_fields]
        sizes = [file.size_bytes for f in fragments for file in f.files_of(fields)]
        rows = sum(fragment.physical_rows for fragment in fragments)
        return window_rows(self._after.schema, [c.path for c in columns], sizes, rows)

    def _altered(
        self, watched: Sequence[_Watched], moves: _Moves
    ) -> Iterator[tuple[_Watched, RowIds]]:
        """Rows that moved, and whose value became another on the way."""
        if not len(moves.moved):
            return
        stamped: dict[tuple[int | None, int | None], list[_Watched]] = {}
        for column in watched:
            if column.before is not None:
                stamped.setdefault((column.since_old, column.since_new), []).append(column)
        for (since_old, since_new), columns in stamped.items():
            ids = moves.moved
            if _EVERYTHING not in (since_old, since_new):
                old = _stamped_since(self._before, self._old, moves.left, since_old)
                new = _stamped_since(self._after, self._new, moves.entered, since_new)
                ids = _common(moves.moved, _sorted([old, new]))
            yield from self._differing(columns, ids)

    def _differing(
        self, columns: Sequence[_Watched], ids: RowIds
    ) -> Iterator[tuple[_Watched, RowIds]]:
        if not len(ids) or not columns:
            return
        step = self._window(columns, [fragment_facts(f) for f in self._new.values()])
        was_at = [c.before for c in columns if c.before is not None]
        for some in (ids[at : at + step] for at in range(0, len(ids), step)):
            was = _take(self._before, some, was_at)
            now = _take(self._after, some, [c.path for c in columns])
            for column, old, new in zip(columns, was, now, strict=True):
                yield column, some[~equal_rows(old, new)]


# --- the commits between two versions -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    version: int
    operation: Any


@dataclass(frozen=True, slots=True)
class _Route:
    """The commits that lead from a version back to a common past and from there to another."""

    ref: TableRef
    old: tuple[_Step, ...]
    """The commits that the old version has and the new one lacks: one or more after a rollback."""
    new: tuple[_Step, ...]
    fields: frozenset[int]
    """The fields that were there all along: Lance gives a dropped field's id away again."""

    @property
    def overwritten(self) -> bool:
        return any(
            isinstance(s.operation, LanceOperation.Overwrite) for s in (*self.old, *self.new)
        )

    def touches(self, fields: Iterable[int]) -> tuple[int | None, int | None]:
        """The first commit on each branch that may have changed values of the fields."""
        wanted = frozenset(fields)
        old, new = (
            min((t for s in steps if (t := self._touch(s, wanted)) is not None), default=None)
            for steps in (self.old, self.new)
        )
        return old, new

    def _touch(self, step: _Step, fields: frozenset[int]) -> int | None:
        match step.operation:
            case LanceOperation.Update(fields_modified=modified):
                return step.version if not modified or fields.intersection(modified) else None
            case LanceOperation.DataReplacement(replacements=replacements):
                replaced = (r.new_file.fields for r in replacements)
                return step.version if fields.intersection(chain(*replaced)) else None
            case LanceOperation.Merge():
                return None if self._same_files(step.version, fields) else _EVERYTHING
            case (
                LanceOperation.Append()
                | LanceOperation.Delete()
                | LanceOperation.Rewrite()
                | LanceOperation.Project()
                | LanceOperation.Restore()
                | LanceOperation.CreateIndex()
                | LanceOperation.UpdateConfig()
            ):
                return None
            case operation:
                # Lance has no name for the commit that reserves ids for a compaction.
                return None if type(operation) is LanceOperation.BaseOperation else _EVERYTHING

    def _same_files(self, version: int, fields: frozenset[int]) -> bool:
        """Whether a commit that may rewrite any file left those of the fields alone."""
        try:
            versions = [open_dataset(self.ref, v) for v in (version - 1, version)]
        except TableNotFoundError:
            return False
        old, new = ({f.fragment_id: f.metadata for f in v.get_fragments()} for v in versions)
        return old.keys() == new.keys() and all(
            _paths(old[i], fields) == _paths(new[i], fields) for i in old
        )


def _read_route(
    ref: TableRef, before: lance.LanceDataset, after: lance.LanceDataset
) -> _Route | None:
    """The way from one version to another; None when a part of it was cleaned up.

    A restore goes on from the version that it restores, so that versions are a tree.
    """
    old, new = before.version, after.version
    newest = after if new > old else before
    branches: tuple[list[_Step], list[_Step]] = ([], [])
    for _ in range(MOST_TRANSACTIONS):
        if old == new:
            break
        version = max(old, new)
        try:
            operation = read_transaction(newest, version).operation
        except OSError:
            return None
        restored = isinstance(operation, LanceOperation.Restore)
        parent = operation.version if restored else version - 1
        branches[old < new].append(_Step(version, operation))
        old, new = (old, parent) if old < new else (parent, new)
    if old != new:
        return None
    schemas = [before.lance_schema, after.lance_schema]
    if old not in (before.version, after.version):
        try:
            schemas.append(open_dataset(ref, old).lance_schema)
        except TableNotFoundError:
            return None
    schemas += [
        step.operation.schema
        for step in chain(*branches)
        if isinstance(step.operation, LanceOperation.Merge | LanceOperation.Project)
    ]
    fields = frozenset.intersection(*(frozenset(_nodes_of(s).values()) for s in schemas))
    return _Route(ref, tuple(branches[0]), tuple(branches[1]), fields)


def _open(ref: TableRef, version: int, which: str) -> lance.LanceDataset:
    try:
        return open_dataset(ref, version)
    except TableNotFoundError:
        open_dataset(ref)
    raise TableChangedError(
        f"Version {version} of table {ref.name!r}, {which}, is gone: old versions were cleaned up. "
        "Compute the view anew from a version that is there, and clean up only versions that no "
        "view was computed from (a tag keeps a version)."
    )


def _nodes_of(schema: Any) -> dict[str, int]:
    """Per column path, the field's own id, which outlives a renaming and new struct fields."""
    nodes: dict[str, int] = {}

    def walk(node: Any, path: str) -> None:
        nodes.setdefault(path, node.id())
        for child in node.children():
            walk(child, f"{path}.{child.name()}")

    for top in schema.fields():
        walk(top, top.name())
    return nodes


def _deletions(metadata: Any) -> Any:
    """What tells two deletion files apart: after a restore their counts may agree by chance."""
    file = metadata.deletion_file
    return None if file is None else (file.read_version, file.id, file.num_deleted_rows)


def _paths(metadata: Any, fields: Iterable[int]) -> frozenset[tuple[str, tuple[int, ...]]]:
    """The files behind some fields, and which of the fields each one holds."""
    wanted = frozenset(fields)
    held = ((file.path, wanted.intersection(file.fields)) for file in metadata.files)
    return frozenset((path, tuple(sorted(fields_))) for path, fields_ in held if fields_)


# --- reading ids and rows -----------------------------------------------------------------------

_NONE: RowIds = np.empty(0, dtype=np.uint64)
_NONE.flags.writeable = False


def _scan_ids(
    dataset: lance.LanceDataset,
    condition: str | None = None,
    fragment_ids: Sequence[int] | None = None,
) -> RowIds:
    """Ids of live rows, ascending; of some fragments, or of all."""
    if fragment_ids is not None and not fragment_ids:
        return _NONE
    scanner = dataset.scanner(
        columns=[],
        filter=condition,
        with_row_id=True,
        fragments=_handles(dataset, fragment_ids) if fragment_ids is not None else None,
    )
    return _sorted([batch.column("_rowid").to_numpy() for batch in scanner.to_batches()])


def _handles(dataset: lance.LanceDataset, fragment_ids: Sequence[int]) -> list[Any] | None:
    wanted = frozenset(fragment_ids)
    every = dataset.get_fragments()
    chosen = [fragment for fragment in every if fragment.fragment_id in wanted]
    return None if len(chosen) == len(every) else chosen


def _query_ids(dataset: lance.LanceDataset, condition: str) -> RowIds:
    query = dataset.sql(f"SELECT _rowid FROM dataset WHERE {condition}").with_row_id(True)
    return _sorted([b.column("_rowid").to_numpy() for b in query.build().to_batch_records()])


def _filtered(where: str, scan: Callable[[str], RowIds], query: Callable[[str], RowIds]) -> RowIds:
    """Rows by Lance's own planner, or by its DataFusion front end, which knows more SQL."""
    condition = f"({where}\n)"  # In parentheses: Lance ignores what follows what it can parse.
    try:
        return scan(condition)
    except (ValueError, OSError) as error:
        refusal = error
    try:
        return query(condition)
    except (ValueError, OSError) as error:
        reason = error if "not supported SQL in lance" in str(refusal) else refusal
        raise InvalidFilterError(filter_message(where, reason)) from error


def _locate(dataset: lance.LanceDataset, ids: RowIds) -> tuple[RowIds, npt.NDArray[np.int64]]:
    """Those of `ids` that are live, and the fragments they are in."""
    if not len(ids):
        return _NONE, np.empty(0, dtype=np.int64)
    table = dataset._take_rows(pa.array(ids), ["_rowid", "_rowaddr"])
    owners = table.column("_rowaddr").to_numpy() >> np.uint64(32)
    return table.column("_rowid").to_numpy(), owners.astype(np.int64)


def _search(dataset: lance.LanceDataset, ids: RowIds, condition: str) -> RowIds:
    if len(ids) * _DENSE >= dataset.count_rows():
        return _common(ids, _scan_ids(dataset, condition))
    # A wrong condition is wrong whatever the rows, and refused in words that name no ids.
    dataset.scanner(columns=[], filter=condition, with_row_id=True).explain_plan()
    live, owners = _locate(dataset, ids)
    fragments, counts = np.unique(owners, return_counts=True)
    rows = [dataset.get_fragment(i).physical_rows for i in fragments.tolist()]
    dense = fragments[counts * _SPARSE >= np.array(rows, dtype=np.int64)]
    parts = [_scan_ids(dataset, condition, dense.tolist())]
    for some in _lists(live[~np.isin(owners, dense)]):
        parts.append(_scan_ids(dataset, f"({some}) AND {condition}"))
    return _common(ids, _sorted(parts))


def _query_some(dataset: lance.LanceDataset, ids: RowIds, condition: str) -> RowIds:
    _query_ids(dataset, f"{condition} LIMIT 0")
    if len(ids) * _SPARSE >= dataset.count_rows():
        return _common(ids, _query_ids(dataset, condition))
    found = [_query_ids(dataset, f"({some}) AND {condition}") for some in _lists(ids)]
    return _common(ids, _sorted(found))


def _lists(ids: RowIds) -> Iterator[str]:
    """Conditions that name the ids, a bounded number each."""
    for at in range(0, len(ids), _MOST_IN_LIST):
        yield f"_rowid IN ({', '.join(map(str, ids[at : at + _MOST_IN_LIST].tolist()))})"


def _stamped_since(
    dataset: lance.LanceDataset,
    fragments: dict[int, Any],
    fragment_ids: Iterable[int],
    version: int | None,
) -> RowIds:
    """Rows of some fragments that were written by a commit from `version` on."""
    if version is None:
        return _NONE
    stamped: list[int] = []
    unstamped: list[int] = []
    for i in fragment_ids:
        known = fragments[i].last_updated_at_version_meta is not None
        (stamped if known else unstamped).append(i)
    late = f"_row_last_updated_at_version >= {version}"
    return _sorted([_scan_ids(dataset, late, stamped), _scan_ids(dataset, None, unstamped)])


def _read_places(
    dataset: lance.LanceDataset, fragment_id: int
) -> tuple[RowIds, npt.NDArray[np.int64]]:
    """A fragment's live rows, ascending by id, and their physical offsets."""
    table = dataset.scanner(
        columns=[],
        with_row_id=True,
        with_row_address=True,
        fragments=[dataset.get_fragment(fragment_id)],
    ).to_table()
    ids = table.column("_rowid").to_numpy()
    offsets = table.column("_rowaddr").to_numpy() & np.uint64(0xFFFFFFFF)
    order = np.argsort(ids, kind="stable")
    return ids[order], offsets[order].astype(np.int64)


def _take(dataset: lance.LanceDataset, ids: RowIds, paths: Sequence[str]) -> list[pa.Array]:
    """Columns of the rows with these ids, which must be live, in the order of the ids."""
    schema = dataset.schema
    projection = {f"c{i}": quote_path(path, schema) for i, path in enumerate(paths)}
    if any(_holds_blob(field_at(schema, path)) for path in paths):
        # Taking rows knows no blob handling: it would give descriptors instead of bytes.
        parts = [
            dataset.scanner(
                columns=projection, filter=some, with_row_id=True, blob_handling="all_binary"
            ).to_table()
            for some in _lists(ids)
        ]
        table = pa.concat_tables(parts).sort_by("_rowid")
    else:
        table = dataset._take_rows(pa.array(ids), projection)
    if table.num_rows != len(ids):
        raise OSError(
            f"version {dataset.version} of {dataset.uri} gave {table.num_rows} of {len(ids)} rows "
            "asked for by id"
        )
    return [table.column(name).combine_chunks() for name in projection]


def _holds_blob(field: pa.Field) -> bool:
    kind = field.type
    below = (kind.field(i) for i in range(kind.num_fields)) if pa.types.is_nested(kind) else ()
    return is_blob(field) or any(_holds_blob(child) for child in below)


def _groups(fragment_ids: Sequence[int], fragments: dict[int, Any]) -> Iterator[list[int]]:
    """Fragments in groups of a bounded number of rows."""
    group: list[int] = []
    rows = 0
    for i in fragment_ids:
        if group and rows + fragments[i].physical_rows > _IDS_AT_ONCE:
            yield group
            group, rows = [], 0
        group.append(i)
        rows += fragments[i].physical_rows
    if group:
        yield group


def _sorted(parts: Sequence[RowIds]) -> RowIds:
    """The ids of all parts, ascending, each once."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return _NONE
    ids = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if bool((ids[1:] > ids[:-1]).all()):
        return ids
    # Not np.unique, which hashes. The stable sort takes no time for a few ascending runs.
    ids = np.sort(ids, kind="stable")
    return ids[np.append(True, ids[1:] != ids[:-1])]


def _among(ids: RowIds, others: RowIds) -> Mask:
    """Which of `ids` are in `others`."""
    if not len(ids) or not len(others):
        return np.zeros(len(ids), dtype=np.bool_)
    first, last = min(ids[0], others[0]), max(ids[-1], others[-1])
    if last - first < 8 * (len(ids) + len(others)):
        # Ids mostly are numbers without gaps, and then a table of flags beats every search.
        flags = np.zeros(int(last - first) + 1, dtype=np.bool_)
        flags[others - first] = True
        return flags[ids - first]
    places = np.searchsorted(others, ids)
    places[places == len(others)] = 0
    return others[places] == ids


def _minus(ids: RowIds, others: RowIds) -> RowIds:
    return _NONE if np.array_equal(ids, others) else ids[~_among(ids, others)]


def _common(ids: RowIds, others: RowIds) -> RowIds:
    return ids if np.array_equal(ids, others) else ids[_among(ids, others)]


# --- values -------------------------------------------------------------------------------------


def _equal_values(old: pa.Array, new: pa.Array) -> Mask:
    """Equality of rows that are NULL in neither; other rows get any answer."""
    a, b = old.type, new.type
    nothing = np.zeros(len(old), dtype=np.bool_)
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        names = [field.name for field in a]
        if names != [field.name for field in b]:
            return nothing
        same = ~nothing
        for i in range(len(names)):
            same &= equal_rows(old.field(i), new.field(i))
        return same
    if pa.types.is_fixed_size_list(a) and pa.types.is_fixed_size_list(b):
        if a.list_size != b.list_size:
            return nothing
        return np.all(equal_rows(_items(old), _items(new)).reshape(len(old), a.list_size), axis=1)
    lists = (pa.types.is_list, pa.types.is_large_list)
    if any(is_list(a) and is_list(b) for is_list in lists):
        return _equal_lists(old, new)
    if a != b:
        return nothing
    if pa.types.is_floating(a):
        x, y = old.to_numpy(zero_copy_only=False), new.to_numpy(zero_copy_only=False)
        bits = np.dtype(f"u{x.itemsize}")
        return (x.view(bits) == y.view(bits)) | (np.isnan(x) & np.isnan(y))
    try:
        return _flags(pc.equal(old, new))
    except pa.ArrowNotImplementedError:
        pairs = zip(old.to_pylist(), new.to_pylist(), strict=True)
        return np.fromiter((was == now for was, now in pairs), dtype=np.bool_, count=len(old))


def _equal_lists(old: pa.Array, new: pa.Array) -> Mask:
    lengths = pc.list_value_length(old)
    same = _flags(pc.equal(lengths, pc.list_value_length(new)))
    rows = np.flatnonzero(same)
    # Through take: what is behind a NULL list must not count as its items.
    items = equal_rows(*(side.take(pa.array(rows)).flatten() for side in (old, new)))
    ends = np.cumsum(lengths.take(pa.array(rows)).to_numpy(zero_copy_only=False))
    wrong = np.concatenate([[0], np.cumsum(~items)])
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    same[rows] = wrong[ends.astype(np.int64)] == wrong[starts.astype(np.int64)]
    return same


def _items(array: pa.Array) -> pa.Array:
    """The items of fixed-size lists, with those of NULL lists."""
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)


def _without_encoding(array: pa.Array) -> pa.Array:
    """The values themselves: no dictionaries, no extension types, maps as lists of pairs."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_map(array.type):
        pair = pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])
        return array.cast(pa.list_(pair))
    return array


def _flags(answer: pa.Array) -> Mask:
    """A boolean array as a mask of its own; NULL is no."""
    return np.array(pc.fill_null(answer, False))

"""What happened to a table between two of its versions, and which rows satisfy a condition.

Rows are known by their stable row ids, so that a moved row is the same row. What changed is first
found from manifests: a fragment with the same rows, deletions and files at both versions is never
read. Rows that left a fragment or came into one are then found by their ids. Values are compared,
at both versions, only for rows that some commit between the two may have given another value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.errors import (
    ColumnNotFoundError,
    TableChangedError,
    TableNotFoundError,
    UserInputError,
)
from geneva.model.addresses import offsets_of
from geneva.model.rows import Mask, RowIds, RowRange
from geneva.model.tables import TableRef
from geneva.storage.lance.dataset import (
    FragmentFacts,
    field_ids_of,
    fragment_facts,
    nodes_of,
    open_dataset,
    quote_path,
)
from geneva.storage.lance.fragments import field_at, holds_blob, read_windows, window_rows
from geneva.storage.lance.pieces import check_all_taken, in_parts, noticing_full_dictionaries
from geneva.storage.lance.row_ids import (
    NO_IDS,
    among,
    common_ids,
    ids_minus,
    scan_ids,
    sorted_ids,
    sql_lists,
)
from geneva.storage.lance.values import aligned, equal_rows
from geneva.storage.views.version_path import EVERYTHING, file_paths, read_route
from geneva.udf.picking import picked

_IDS_AT_ONCE = 4_194_304
"""Row ids to read at once when deletions of several fragments are compared."""


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


def read_changes(
    ref: TableRef,
    old: int,
    new: int,
    columns: Sequence[str],
    *,
    by_name: bool = False,
    opened: lance.LanceDataset | None = None,
) -> SourceChanges:
    """Compare two versions of a table, in either order. `columns` are paths at the new one.

    A column is what it was under the same field id; where that is not the same column (it was
    dropped and added again), under the same name; otherwise it was NULL. `by_name`: it is what had
    its name, whatever field that was: for those who read the column by its name at both versions.
    `opened` is the new version, where it is open.
    """
    after = _open(ref, new, "which is to be read") if opened is None else opened
    before = after if old == new else _open(ref, old, "which the view was computed from")
    for dataset in (before, after):
        if not dataset.has_stable_row_ids:
            raise UserInputError(
                f"Table {ref.name!r} has no stable row ids at version {dataset.version}, so its "
                "changes can't be told. Stable row ids exist only from a table's creation: "
                "create it again with storage option new_table_enable_stable_row_ids='true'."
            )
    nodes = nodes_of(after.lance_schema)
    for path in columns:
        if path not in nodes:
            raise ColumnNotFoundError(
                f"Table {ref.name!r} has no column {path!r} at version {new}; it has "
                f"{', '.join(after.schema.names)}."
            )
    if old == new:
        return SourceChanges(NO_IDS, NO_IDS, dict.fromkeys(columns, NO_IDS))
    return _Comparison(ref, before, after, columns, by_name=by_name).changes()


@dataclass(frozen=True, slots=True)
class _Watched:
    """A column at both versions."""

    path: str
    new_fields: tuple[int, ...]
    before: str | None = None
    """Its path at the old version; None: it was not there."""
    old_fields: tuple[int, ...] = ()
    same: bool = False
    """Whether it is one field, of one type: then one file holds the same values at both."""
    since_old: int | None = None
    """The first commit of the old version's branch that may have changed values; None: none did."""
    since_new: int | None = None


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
        *,
        by_name: bool,
    ) -> None:
        self._before, self._after, self._by_name = before, after, by_name
        self._route = read_route(ref, before, after)
        self._old = {f.fragment_id: f.metadata for f in before.get_fragments()}
        self._new = {f.fragment_id: f.metadata for f in after.get_fragments()}
        self._columns = columns

    def changes(self) -> SourceChanges:
        if self._route is not None and self._route.overwritten:
            old, new = scan_ids(self._before), scan_ids(self._after)
            return SourceChanges(new, old, dict.fromkeys(self._columns, common_ids(old, new)))
        moves = self._moves()
        watched = [self._watch(path) for path in dict.fromkeys(self._columns)]
        found: dict[str, list[RowIds]] = {column.path: [] for column in watched}
        for column, ids in chain(
            self._filled(watched, moves), self._rewritten(watched), self._altered(watched, moves)
        ):
            found[column.path].append(ids)
        changed = {path: sorted_ids(parts) for path, parts in found.items()}
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
        changed_deletions = [
            i for i in self._kept if _deletions(self._old[i]) != _deletions(self._new[i])
        ]
        left = [i for i in self._old if i not in kept]
        entered = [i for i in self._new if i not in kept]
        gone, come = [scan_ids(self._before, None, left)], [scan_ids(self._after, None, entered)]
        for group in _groups(changed_deletions, self._new):
            old = scan_ids(self._before, None, group)
            new = scan_ids(self._after, None, group)
            gone.append(ids_minus(old, new))
            come.append(ids_minus(new, old))
        out, into = sorted_ids(gone), sorted_ids(come)
        return _Moves(
            inserted=ids_minus(into, out),
            deleted=ids_minus(out, into),
            moved=common_ids(out, into),
            left=(*left, *changed_deletions),
            entered=(*entered, *changed_deletions),
        )

    def _watch(self, path: str) -> _Watched:
        old_nodes, node = nodes_of(self._before.lance_schema), self._new_nodes[path]
        continuous = self._route is None or node in self._route.fields
        follows = continuous and not self._by_name
        names = {i: name for name, i in old_nodes.items()} if follows else {}
        before = names.get(node, path if path in old_nodes else None)
        new = _Watched(path=path, new_fields=field_ids_of(self._after)[path])
        if before is None:
            return new
        old_fields = field_ids_of(self._before)[before]
        same = (old_fields, old_nodes[before]) == (new.new_fields, node) and (
            field_at(self._before.schema, before).type == field_at(self._after.schema, path).type
        )
        watched = replace(new, before=before, old_fields=old_fields, same=same)
        if self._route is None or not same or not continuous:
            return replace(watched, since_old=EVERYTHING)
        since_old, since_new = self._route.touches(new.new_fields)
        return replace(watched, since_old=since_old, since_new=since_new)

    @cached_property
    def _new_nodes(self) -> dict[str, int]:
        return nodes_of(self._after.lance_schema)

    def _filled(
        self, watched: Sequence[_Watched], moves: _Moves
    ) -> Iterator[tuple[_Watched, RowIds]]:
        """Rows with a value in a column that was not there before."""
        for column in watched:
            if column.before is None:
                present = f"{quote_path(column.path, self._after.schema)} IS NOT NULL"
                files = [i for i, f in self._new.items() if file_paths(f, column.new_fields)]
                ids = scan_ids(self._after, present, files)
                yield column, ids_minus(ids, moves.inserted)

    def _rewritten(self, watched: Sequence[_Watched]) -> Iterator[tuple[_Watched, RowIds]]:
        """Rows that stayed where they are, but whose column has another file."""
        for i in self._kept:
            old, new = self._old[i], self._new[i]
            columns = [
                c
                for c in watched
                if c.before is not None
                and not (c.same and file_paths(old, c.old_fields) == file_paths(new, c.new_fields))
            ]
            if not columns:
                continue
            ids, offsets = _read_places(self._after, i)
            if _deletions(old) != _deletions(new):
                live = among(ids, scan_ids(self._before, None, [i]))
                ids, offsets = ids[live], offsets[live]
            blobs = [c for c in columns if holds_blob(field_at(self._after.schema, c.path))]
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
        for (start, was), (_, now) in aligned(*streams):
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
            if EVERYTHING not in (since_old, since_new):
                old = _stamped_since(self._before, self._old, moves.left, since_old)
                new = _stamped_since(self._after, self._new, moves.entered, since_new)
                ids = common_ids(moves.moved, sorted_ids([old, new]))
            yield from self._differing(columns, ids)

    def _differing(
        self, columns: Sequence[_Watched], ids: RowIds
    ) -> Iterator[tuple[_Watched, RowIds]]:
        if not len(ids) or not columns:
            return
        step = self._window(columns, [fragment_facts(f) for f in self._new.values()])
        was_at = [c.before for c in columns if c.before is not None]
        is_at = [c.path for c in columns]

        def take(some: RowIds) -> tuple[list[pa.Array], list[pa.Array]]:
            return _take(self._before, some, was_at), _take(self._after, some, is_at)

        for window in (ids[at : at + step] for at in range(0, len(ids), step)):
            for some, (was, now) in in_parts(take, window):
                for column, old, new in zip(columns, was, now, strict=True):
                    yield column, some[~equal_rows(old, new)]


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


def _deletions(metadata: Any) -> Any:
    """Identity of a deletion file: after a restore the counts of two may agree by chance."""
    file = metadata.deletion_file
    return None if file is None else (file.read_version, file.id, file.num_deleted_rows)


def _stamped_since(
    dataset: lance.LanceDataset,
    fragments: dict[int, Any],
    fragment_ids: Iterable[int],
    version: int | None,
) -> RowIds:
    """Rows of some fragments that were written by a commit from `version` on."""
    if version is None:
        return NO_IDS
    stamped: list[int] = []
    unstamped: list[int] = []
    for i in fragment_ids:
        known = fragments[i].last_updated_at_version_meta is not None
        (stamped if known else unstamped).append(i)
    late = f"_row_last_updated_at_version >= {version}"
    return sorted_ids([scan_ids(dataset, late, stamped), scan_ids(dataset, None, unstamped)])


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
    offsets = offsets_of(table.column("_rowaddr").to_numpy())
    order = np.argsort(ids, kind="stable")
    return ids[order], offsets[order]


def _take(dataset: lance.LanceDataset, ids: RowIds, paths: Sequence[str]) -> list[pa.Array]:
    """Columns of the rows with these ids, which must be live, in the order of the ids."""
    schema = dataset.schema
    projection = {f"c{i}": quote_path(path, schema) for i, path in enumerate(paths)}
    if any(holds_blob(field_at(schema, path)) for path in paths):
        # Taking rows knows no blob handling: it would give descriptors instead of bytes.
        parts = [
            dataset.scanner(
                columns=projection, filter=some, with_row_id=True, blob_handling="all_binary"
            ).to_table()
            for some in sql_lists(ids)
        ]
        found = pa.concat_tables(parts)
        table = picked(found, np.argsort(found.column("_rowid").to_numpy()))
    else:
        with noticing_full_dictionaries(len(ids)):
            table = dataset._take_rows(pa.array(ids), projection).combine_chunks()
    check_all_taken(dataset, table, len(ids))
    return [table.column(name).combine_chunks() for name in projection]


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

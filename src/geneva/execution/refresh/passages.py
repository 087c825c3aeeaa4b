"""Finding what differs between the rows of a chunked view and the lists they are laid out from.

A row that is there and a row that is to be are the same when they have the same content: it stays,
with its id, its place and what was computed for it; only values that are other ones now are
rewritten, in place. See `planning.passages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geneva.execution.refresh.layout import (
    Lists,
    Rewrite,
    read_source_ids_of,
)
from geneva.model.addresses import Addresses, fragments_of, offsets_of
from geneva.model.digests import Digests, digest_rows
from geneva.model.rows import Mask, Offsets, RowIds, bounded_runs
from geneva.model.tables import TableRef
from geneva.model.view_query import SOURCE_ROW_ID
from geneva.planning.passages import RowDigests, differing, pair_rows
from geneva.storage.lance.dataset import Dataset, quote_path
from geneva.storage.lance.fragments import is_blob
from geneva.storage.lance.lists import list_columns, places_in_lists
from geneva.storage.lance.source_rows import SourceRows
from geneva.storage.views.explode import CHUNKS, RowsOfSources, read_rows_of

_LISTS_AT_ONCE, _ROWS_AT_ONCE = 20_000, 2_000_000
_NO_IDS: RowIds = np.zeros(0, dtype=np.uint64)
_NO_PLACES: Offsets = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StayingRows:
    """Rows of the view that stay, and the rows of lists that they are."""

    addresses: Addresses
    ids: RowIds
    places: Offsets
    other: dict[str, Mask]
    """Per column, which of them get another value."""


@dataclass(frozen=True, slots=True, eq=False)
class RowChanges:
    """What turns the rows of a chunked view into those of its lists."""

    gone: Addresses = field(default_factory=_NO_IDS.copy)
    lists: RowIds = field(default_factory=_NO_IDS.copy)
    """Rows of the hidden view whose lists have rows that the view lacks."""
    kept: tuple[RowIds, Offsets] = (_NO_IDS, _NO_PLACES)
    """Rows of these lists that are there, as (row of the hidden view, place in its list)."""
    staying: tuple[StayingRows, ...] = ()
    """Rows that stay, and of which some value is another one."""

    def lays_out_the_same(self, other: RowChanges) -> bool:
        """Whether both need the same new rows."""
        mine, theirs = (self.lists, *self.kept), (other.lists, *other.kept)
        return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def compare_rows(
    outer: TableRef, view: Dataset, lists: Lists, gone: RowIds | None, fresh: RowIds
) -> RowChanges:
    """Compare the view's rows of some source rows (None: of all) with the lists of `fresh` rows."""
    present = read_rows_of(view, gone)
    if not len(present):
        return RowChanges(lists=fresh)
    sources = read_source_ids_of(lists.ref, lists.version, fresh)
    shared = np.isin(sources, present.source_ids)
    left = ~np.isin(present.source_ids, sources)
    parts = [RowChanges(gone=present.addresses[left], lists=fresh[~shared])]
    both, of = fresh[shared], sources[shared]
    for first, last in _runs(of, present):
        some = np.isin(present.source_ids, of[first:last])
        rows = RowsOfSources(present.ids[some], present.addresses[some], present.source_ids[some])
        parts.append(_compare(outer, view, lists, rows, both[first:last]))
    return RowChanges(
        gone=np.concatenate([part.gone for part in parts]),
        lists=np.sort(np.concatenate([part.lists for part in parts])),
        kept=(
            np.concatenate([part.kept[0] for part in parts]),
            np.concatenate([part.kept[1] for part in parts]),
        ),
        staying=tuple(rows for part in parts for rows in part.staying),
    )


def _runs(sources: RowIds, present: RowsOfSources) -> Iterator[tuple[int, int]]:
    """Lists that are compared at once: by the rows that the view has of them."""
    known, counts = np.unique(present.source_ids, return_counts=True)
    sizes = counts[np.searchsorted(known, sources)]
    return bounded_runs(sizes, _ROWS_AT_ONCE, max_items=_LISTS_AT_ONCE)


def _compare(
    outer: TableRef, view: Dataset, lists: Lists, present: RowsOfSources, ids: RowIds
) -> RowChanges:
    old = _present_rows(outer, view, lists, present)
    new, owners, places, main = _wanted_rows(lists, ids)
    pairs = pair_rows(old, new, lists.content, main)
    other = differing(old, new, pairs)
    # A blob's bytes are in files of their own: it can't be rewritten, so its row is replaced.
    fixed = [name for name in lists.columns if is_blob(view.schema.field(name))]
    stays = ~_any(other, fixed, len(pairs[0]))
    first, second = pairs[0][stays], pairs[1][stays]
    changed = _any(other, lists.columns, len(pairs[0]))[stays]
    gone, missing = np.ones(len(old), np.bool_), np.ones(len(new), np.bool_)
    gone[first], missing[second] = False, False
    unfinished = np.unique(owners[missing])
    kept = second[np.isin(owners[second], unfinished)]
    rewritten = StayingRows(
        addresses=present.addresses[first[changed]],
        ids=owners[second[changed]],
        places=places[second[changed]],
        other={name: mask[stays][changed] for name, mask in other.items()},
    )
    return RowChanges(
        gone=present.addresses[gone],
        lists=unfinished,
        kept=(owners[kept], places[kept]),
        staying=(rewritten,) if changed.any() else (),
    )


def _any(masks: dict[str, Mask], names: Sequence[str], size: int) -> Mask:
    total = np.zeros(size, dtype=np.bool_)
    for name in names:
        total |= masks[name]
    return total


def _present_rows(
    outer: TableRef, view: Dataset, lists: Lists, present: RowsOfSources
) -> RowDigests:
    schema = view.schema
    wanted = tuple((name, quote_path(name, schema)) for name in lists.columns)
    windows = SourceRows(outer, view.version, wanted).windows(present.ids)
    digests = _Digests(lists.columns)
    for batch in windows:
        for name in lists.columns:
            digests.add(name, batch.column(name))
    return RowDigests(present.source_ids, digests.columns())


def _wanted_rows(lists: Lists, ids: RowIds) -> tuple[RowDigests, RowIds, Offsets, str]:
    """The rows of lists, whose list and which place in it each is, and their main column."""
    digests = _Digests(lists.columns)
    owners, sources, places = [_NO_IDS], [_NO_IDS], [_NO_PLACES]
    numbers: set[str] = set()
    at = 0
    for batch in lists.windows(ids):
        own = ids[at : at + batch.num_rows]
        at += batch.num_rows
        column = batch.column(CHUNKS)
        parents = pc.list_parent_indices(column).to_numpy()
        owners.append(own[parents])
        sources.append(batch.column(SOURCE_ROW_ID).to_numpy().astype(np.uint64)[parents])
        places.append(places_in_lists(parents))
        for name in lists.carried:
            digests.add(name, batch.column(name), parents)
        for name, values in list_columns(column).items():
            digests.add(name, values)
            if pa.types.is_primitive(values.type):
                numbers.add(name)
    # A number says where a passage is, more likely than what it is.
    main = max(lists.content, key=lambda name: (name not in numbers, digests.nbytes[name]))
    rows = RowDigests(np.concatenate(sources), digests.columns())
    return rows, np.concatenate(owners), np.concatenate(places), main


class _Digests:
    """Digests of the values of columns, window by window."""

    def __init__(self, names: Sequence[str]) -> None:
        self._parts: dict[str, list[Digests]] = {name: [_NO_IDS] for name in names}
        self.nbytes = dict.fromkeys(names, 0)

    def add(self, name: str, values: pa.Array, repeated: Offsets | None = None) -> None:
        self.nbytes[name] += values.nbytes
        made = digest_rows([values], 0, len(values))
        self._parts[name].append(made if repeated is None else made[repeated])

    def columns(self) -> dict[str, Digests]:
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}


# ------------------------------------------------------------------------------ as work to do


def rewrites(
    outer: TableRef, view: Dataset, lists: Lists, staying: Sequence[StayingRows]
) -> Iterator[Rewrite]:
    """The work of rewriting values, fragment by fragment, of just the columns that need it."""
    if not staying:
        return
    addresses = np.concatenate([rows.addresses for rows in staying])
    order = np.argsort(addresses)
    addresses = addresses[order]
    ids = np.concatenate([rows.ids for rows in staying])[order]
    places = np.concatenate([rows.places for rows in staying])[order]
    other = {
        name: np.concatenate([rows.other[name] for rows in staying])[order]
        for name in lists.columns
    }
    owners, offsets = fragments_of(addresses), offsets_of(addresses)
    for fragment_id in np.unique(owners).tolist():
        own = owners == fragment_id
        yield Rewrite(
            outer=outer,
            version=int(view.version),
            fragment_id=fragment_id,
            physical_rows=int(view.get_fragment(fragment_id).physical_rows),
            columns=tuple(name for name, mask in other.items() if mask[own].any()),
            lists=lists,
            rows=offsets[own],
            ids=ids[own],
            places=places[own],
        )

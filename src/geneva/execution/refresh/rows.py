"""The rows of a view: which come, which go, and making it so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from geneva.errors import TableChangedError
from geneva.execution.refresh.damage import Damage
from geneva.execution.refresh.groups import NO_ROWS, places_of
from geneva.model.rows import RowIds, RowSet
from geneva.model.tables import TableRef
from geneva.model.view_query import ViewQuery
from geneva.planning.membership import choose_rows, rows_that_enter_and_leave
from geneva.render.text import count
from geneva.storage.lance.commit import retry_conflicts
from geneva.storage.lance.dataset import Dataset, open_dataset
from geneva.storage.lance.own_commits import note_own_commit
from geneva.storage.lance.row_ids import (
    common_ids,
    ids_minus,
    read_matching_ids,
    read_row_ids,
    sorted_ids,
)
from geneva.storage.views.definition import (
    FragmentRows,
    delete_view_rows,
    read_source_ids,
    shows_all_of,
)
from geneva.storage.views.source_changes import SourceChanges


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """The rows of a view: which come, and which go."""

    entering: RowIds
    leaving: RowIds
    places: dict[int, RowSet] = field(default_factory=dict)
    """Where the leaving rows are, per fragment of the view."""
    repeated: RowIds = field(default_factory=lambda: NO_ROWS)
    """Source rows that several rows of the view stand for: the first of them stays."""

    @property
    def changes_rows(self) -> bool:
        """Whether any row comes or goes."""
        return bool(len(self.entering) or self.rows_leaving)

    @property
    def commits(self) -> int:
        """How many commits it takes: one to delete rows, one to append placeholders."""
        return bool(len(self.entering)) + bool(self.rows_leaving)

    @property
    def rows_leaving(self) -> int:
        """How many rows of the view go."""
        return sum(rows.count for rows in self.places.values()) or len(self.leaving)


def read_membership(
    view: Dataset,
    source: Dataset,
    query: ViewQuery,
    changes: SourceChanges | None,
    damage: Damage,
) -> Membership:
    """Which rows come and go: by what changed, where that is known; else by comparing all rows.

    `changes` are those since the view was in order; None when it is not. Of what can't be read no
    row comes, and none goes but those that the source has no more.
    """
    bounded = query.limit is not None or query.offset is not None
    if changes is None or bounded or damage:
        ids = read_source_ids(view)
        present = _present(ids)
        return _compare(ids, present, _wanted_rows(source, query, present, damage))
    touched = sorted_ids([changes.changed.get(path, NO_ROWS) for path in query.where_inputs])
    still = sorted_ids([read_matching_ids(source, touched, query.where)])
    gone = sorted_ids([changes.deleted, ids_minus(touched, still)])
    fresh = read_matching_ids(source, changes.inserted, query.where)
    if not len(gone) and not len(still):
        return Membership(_ordered(fresh, query), NO_ROWS)
    ids = read_source_ids(view)
    present = np.sort(_present(ids))
    entering = sorted_ids([fresh, ids_minus(still, present)])
    leaving = common_ids(gone, present)
    return Membership(_ordered(entering, query), leaving, places_of(ids, leaving))


def read_first_membership(
    view: Dataset,
    source: Dataset,
    query: ViewQuery,
    max_rows_per_fragment: int | None,
    damage: Damage,
) -> Membership:
    """Which rows come and go in a view of nothing but placeholders.

    They are all laid out anew, which costs next to nothing, where fragments would be too large, or
    rows not be in the order of the query.
    """
    if max_rows_per_fragment is None and not damage and shows_all_of(view, source):
        return Membership(NO_ROWS, NO_ROWS)
    ids = read_source_ids(view)
    present = _present(ids)
    wanted = _wanted_rows(source, query, present, damage)
    found = _compare(ids, present, wanted)
    too_large = max_rows_per_fragment is not None and any(
        len(rows.live) > max_rows_per_fragment for rows in ids
    )
    if not too_large and (query.seed is None or not len(found.entering)):
        return found
    leaving = sorted_ids([present])
    return Membership(wanted, leaving, places_of(ids, leaving))


def _present(rows: Sequence[FragmentRows]) -> RowIds:
    """The source rows that a view shows, in its order."""
    return np.concatenate([fragment.live_ids() for fragment in rows] or [NO_ROWS])


def _compare(rows: Sequence[FragmentRows], present: RowIds, wanted: RowIds) -> Membership:
    """Which rows come and go, by all that are there and all that should be."""
    # Left by two refreshes that ran into each other, or added by hand.
    repeated = _repeated(present)
    if len(repeated):
        present = _each_once(present)
    entering, leaving = rows_that_enter_and_leave(present, wanted)
    return Membership(entering, leaving, leaving_places(rows, leaving, repeated), repeated)


def _wanted_rows(source: Dataset, query: ViewQuery, present: RowIds, damage: Damage) -> RowIds:
    """All rows that the query selects, in its order.

    Of rows that can't be read, those that are `present` in the view.
    """
    passing = read_row_ids(source, query.where, without=damage.fragments)
    if damage:
        kept = common_ids(sorted_ids([present]), sorted_ids([damage.rows]))
        passing = sorted_ids([passing, kept])
    return choose_rows(
        passing,
        shuffle_seed=query.seed,
        offset=query.offset,
        limit=query.limit,
    )


def leaving_places(
    rows: Sequence[FragmentRows], leaving: RowIds, repeated: RowIds
) -> dict[int, RowSet]:
    """Where the rows are that go: all of some source rows, of others all but the first."""
    places = places_of(rows, leaving)
    seen = leaving
    for fragment in rows if len(repeated) else ():
        found = places_of([fragment], repeated).get(fragment.fragment_id)
        if found is None:
            continue
        offsets = found.offsets()
        ids = fragment.source_ids[offsets].astype(np.uint64)
        first = np.zeros(len(ids), dtype=np.bool_)
        first[np.unique(ids, return_index=True)[1]] = True
        stays = first & ~np.isin(ids, seen)
        seen = sorted_ids([seen, ids])
        mask = found.mask()
        mask[offsets[stays]] = False
        more, there = RowSet.from_mask(mask), places.get(fragment.fragment_id)
        if more:
            places[fragment.fragment_id] = more if there is None else there.union(more)
    return places


def _each_once(ids: RowIds) -> RowIds:
    """The ids in their order, each where it comes first."""
    return ids[np.sort(np.unique(ids, return_index=True)[1])]


def _repeated(ids: RowIds) -> RowIds:
    """The ids that are there more than once."""
    if bool((ids[1:] > ids[:-1]).all()):
        return ids[:0]
    ordered = np.sort(ids)
    return sorted_ids([ordered[1:][ordered[1:] == ordered[:-1]]])


def _ordered(ids: RowIds, query: ViewQuery) -> RowIds:
    return choose_rows(np.sort(ids), shuffle_seed=query.seed, offset=None, limit=None)


def drop_rows(ref: TableRef, membership: Membership, job_id: str, max_retries: int) -> None:
    """Delete the rows that leave, wherever a compaction may have put them meanwhile."""
    if not membership.rows_leaving:
        return

    def attempt() -> None:
        dataset = open_dataset(ref)
        rows = read_source_ids(dataset)
        places = leaving_places(rows, membership.leaving, membership.repeated)
        version = delete_view_rows(dataset, places, job_id)
        if version != dataset.version:
            note_own_commit(ref.uri, version, job_id)

    exhausted = TableChangedError(
        f"Could not remove {count(membership.rows_leaving, 'row')} from view {ref.name!r}, because "
        "other writers kept getting in between. Refresh again when it is calmer."
    )
    retry_conflicts(attempt, max_retries, exhausted)

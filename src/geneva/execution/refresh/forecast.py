"""A view as it will be when its rows have come and gone, so that its columns can be planned now.

A plan is made on the forecast: fragments without the rows that leave, and fragments of the
placeholders that enter. When the rows have been changed, the same plan is put onto the version that
came of it. Nothing is decided a second time, unless somebody else changed the view as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.backfill.scope import work_identity
from geneva.execution.refresh.rows import Membership
from geneva.model.rows import RowIds
from geneva.storage.lance.dataset import Dataset, FragmentFacts, TableSnapshot, read_snapshot
from geneva.storage.views.definition import fragment_rows

_TO_BE_CHANGED = "to be changed"
"""Stands for a deletion file that is yet to be named: no checkpoint's key has it."""


def forecast(
    snapshot: TableSnapshot, membership: Membership, max_rows_per_fragment: int | None
) -> TableSnapshot:
    """What a view will be after rows have left and entered."""
    if not membership.changes_rows:
        return snapshot
    staying = tuple(_staying(snapshot, membership))
    size = fragment_rows(len(membership.entering), max_rows_per_fragment)
    first = max((fragment.id for fragment in snapshot.fragments), default=-1) + 1
    entering = tuple(_entering(membership.entering, size, first))
    return replace(snapshot, fragments=(*staying, *entering))


def _staying(snapshot: TableSnapshot, membership: Membership) -> Iterator[FragmentFacts]:
    for fragment in snapshot.fragments:
        leaving = membership.places.get(fragment.id)
        if leaving is None:
            yield fragment
        elif leaving.count < fragment.live_rows:
            yield replace(
                fragment,
                deleted_rows=fragment.deleted_rows + leaving.count,
                deletions=_TO_BE_CHANGED,
                leaving=leaving,
            )


def _entering(ids: RowIds, size: int, first: int) -> Iterator[FragmentFacts]:
    for number, at in enumerate(range(0, len(ids), size)):
        own = ids[at : at + size]
        yield FragmentFacts(
            id=first + number,
            physical_rows=len(own),
            deleted_rows=0,
            files=(),
            deletions=_TO_BE_CHANGED,
            source_ids=own,
        )


def come_true(planned: PreparedBackfill, view: Dataset) -> PreparedBackfill | None:
    """The same plan on the version that its forecast has become; None where that is another.

    That nobody else has changed the view meanwhile is for the caller to know.
    """
    dataset = copy(view)  # the backfills of a view run side by side
    snapshot = read_snapshot(dataset, planned.ref)
    ids = _real_ids(planned.snapshot, snapshot)
    if ids is None:
        return None
    real = {fragment.id: fragment for fragment in snapshot.fragments}
    facts = {ids[fragment_id]: real[ids[fragment_id]] for fragment_id in planned.facts}
    computation, request = planned.computation, planned.request
    return replace(
        planned,
        dataset=dataset,
        snapshot=snapshot,
        plan=replace(
            planned.plan,
            version=snapshot.version,
            fragments=tuple(
                replace(f, fragment_id=ids[f.fragment_id]) for f in planned.plan.fragments
            ),
        ),
        facts=facts,
        prefixes={
            fragment_id: work_identity(computation, request, planned.ref, fragment).prefix()
            for fragment_id, fragment in facts.items()
        },
        reuse={ids[fragment_id]: found for fragment_id, found in planned.reuse.items()},
    )


def _real_ids(forecast: TableSnapshot, now: TableSnapshot) -> dict[int, int] | None:
    """The ids that fragments have; those of entering rows are Lance's to give."""
    if len(forecast.fragments) != len(now.fragments):
        return None
    pairs = list(zip(forecast.fragments, now.fragments, strict=True))
    fits = all(
        planned.physical_rows == real.physical_rows
        and planned.deleted_rows == real.deleted_rows
        and (planned.source_ids is not None or planned.id == real.id)
        for planned, real in pairs
    )
    return {planned.id: real.id for planned, real in pairs} if fits else None

"""Which columns of a view are filled by one task from one read of the source. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from geneva.planning.backfill import Action, FragmentPlan

MAX_COLUMNS = 4
"""Columns in one task: as many programs as a worker keeps loaded."""
_MAX_COMPUTING_RATIO = 10
"""A column that computes for longer than this many times the reading gains nothing by sharing it,
and is better cut into tasks by its own speed."""
_SHORT_SECONDS = 0.15
"""What takes less than this in a task is not worth a task of its own, whatever the reading took."""


def shared_reads(columns: Sequence[Sequence[FragmentPlan]]) -> dict[int, list[list[int]]]:
    """For each fragment the columns, by their places, that are computed for just the same rows.

    Only groups of two and more, of at most `MAX_COLUMNS`. The first of a group leads. A fragment of
    which results are there already is no one's: what is left of it is not the same for all.
    """
    groups: dict[int, list[list[int]]] = {}
    first: dict[tuple[int, int], FragmentPlan] = {}
    for place, plans in enumerate(columns):
        for plan in plans:
            if not _is_fresh(plan):
                continue
            known = groups.setdefault(plan.fragment_id, [])
            for group in known:
                lead = first[plan.fragment_id, group[0]]
                if len(group) < MAX_COLUMNS and lead.compute == plan.compute:
                    group.append(place)
                    break
            else:
                known.append([place])
                first[plan.fragment_id, place] = plan
    several = ((id_, [g for g in found if len(g) > 1]) for id_, found in groups.items())
    return {fragment_id: found for fragment_id, found in several if found}


def _is_fresh(plan: FragmentPlan) -> bool:
    """Whether everything that a fragment needs is to be computed."""
    is_whole = plan.run is None or plan.run == plan.compute
    return plan.action is Action.COMPUTE and is_whole and not plan.covered


def gains_by_sharing(read_seconds: float, computing_seconds: float) -> bool:
    """Whether a column that rides with another one, and computed for so long, should go on so."""
    return computing_seconds <= max(_SHORT_SECONDS, _MAX_COMPUTING_RATIO * read_seconds)

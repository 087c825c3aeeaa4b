"""Writes into a view by others than its refreshes: with plain LanceDB, anybody can."""

from __future__ import annotations

from collections.abc import Iterable

import lance
from lance import LanceOperation

from geneva.errors import TableNotFoundError
from geneva.model.tables import TableRef
from geneva.storage.lance.dataset import field_ids_of, nodes_of, open_dataset
from geneva.storage.lance.own_commits import are_own_commits
from geneva.storage.views.state import ViewState
from geneva.storage.views.version_path import Route, Step, read_route


def is_as_refreshed(
    ref: TableRef, view: lance.LanceDataset, state: ViewState, columns: Iterable[str]
) -> bool:
    """Whether rows of a view, and values of some columns, are as its last refresh left them.

    The refresh has put down the version that it settled the view at, by one commit more. Where
    that is the latest, nobody else has written since.
    """
    if not state.refreshed or state.settled_at is None:
        return False
    is_latest = int(view.version) == state.settled_at + 1
    return is_latest or is_untouched(ref, view, state.settled_at, columns)


def is_untouched(
    ref: TableRef,
    view: lance.LanceDataset,
    since: int | None,
    columns: Iterable[str],
    job_id: str | None = None,
) -> bool:
    """Whether rows of a view, and values of some of its columns, are as a version had them.

    What job `job_id` wrote doesn't count, nor does what keeps rows and values: a compaction, an
    index, other columns. No, too, where nobody knows: a part of the way was cleaned up.
    """
    if since is None:
        return False
    if view.version == since:
        return True
    if job_id and are_own_commits(ref, range(since + 1, int(view.version) + 1), job_id):
        return True
    try:
        route = read_route(ref, open_dataset(ref, since), view)
    except TableNotFoundError:
        return False
    if route is None or route.old:
        return False
    nodes, leaves = nodes_of(view.lance_schema), field_ids_of(view)
    fields = frozenset(i for name in columns for i in (nodes[name], *leaves[name]))
    others = [step for step in route.new if not job_id or step.job != job_id]
    if job_id and any(isinstance(step.operation, LanceOperation.Restore) for step in others):
        return False  # what the job did before that is undone, and not on the way
    return not any(_writes(route, step, fields) for step in others)


def _writes(route: Route, step: Step, fields: frozenset[int]) -> bool:
    match step.operation:
        case LanceOperation.Append() | LanceOperation.Delete() | LanceOperation.Update():
            return True
        case _:
            return route.touches_at(step, fields)

"""Which rows of a round are safe from a crash, whoever says so: its plan, reports, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.model.rows import RowRange, RowSet
from geneva.planning.backfill import Action, FragmentPlan
from geneva.storage.checkpoints.staging import open_checkpoints
from geneva.storage.checkpoints.store import CheckpointKey, index_keys


class SavedRows:
    """The rows of a plan that have a durable result. A row that is seen twice counts once."""

    def __init__(self, prepared: PreparedBackfill) -> None:
        """Begin with what the plan takes over."""
        self._prepared = prepared
        self._plans = {plan.fragment_id: plan for plan in prepared.plan.fragments}
        self.count = prepared.plan.rows_reused
        """How many there are."""
        self._open: dict[int, RowSet] = {}
        """Per fragment of which something was seen, the rows that are not safe yet."""
        # Where rows were asked for, a plan takes rows over, and no checkpoints: those that are
        # there may hold what is to be computed again.
        self._not_ours = frozenset(self._keys() if prepared.request.asks_for_rows else ())

    def add(self, fragment_id: int, ranges: Iterable[RowRange]) -> None:
        """Count the rows of some ranges of a fragment that are safe now."""
        plan = self._plans[fragment_id]
        before = self._open[fragment_id] if fragment_id in self._open else _open_rows(plan)
        left = before
        if before:
            left = before.minus(RowSet.from_ranges(plan.physical_rows, ranges))
        self._open[fragment_id] = left
        self.count += before.count - left.count

    def look(self) -> None:
        """Count what is in the checkpoint store: one request, however many rows there are."""
        index = index_keys(key for key in self._keys() if key not in self._not_ours)
        for fragment_id, plan in self._plans.items():
            keys = index.get((self._prepared.prefixes[fragment_id], fragment_id), ())
            if ranges := _ranges(keys, plan):
                self.add(fragment_id, ranges)

    def _keys(self) -> list[str]:
        return open_checkpoints(self._prepared.ref).list_keys("udf-")


def _open_rows(plan: FragmentPlan) -> RowSet:
    """The rows of which a plan has no result."""
    if plan.action is not Action.COMPUTE:
        return RowSet.empty(plan.physical_rows)
    return plan.to_run.minus(RowSet.from_ranges(plan.physical_rows, plan.covered))


def _ranges(keys: Iterable[CheckpointKey], plan: FragmentPlan) -> list[RowRange]:
    ranges = (key.rows for key in keys if key.rows is not None)
    return [rows for rows in ranges if rows.end <= plan.physical_rows]

"""A refresh as a job sees it: a plan that is ready to be carried out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.refresh.explode import PreparedChunkRefresh, run_chunk_refresh
from geneva.execution.refresh.partitions import PreparedPartitionRefresh, run_partition_refresh
from geneva.execution.refresh.prepare import PreparedRefresh
from geneva.model.tables import TableRef
from geneva.planning.backfill import BackfillPlan, distinct_rows
from geneva.planning.refresh import RefreshPlan
from geneva.storage.checkpoints.cleanup import drop_leftovers
from geneva.storage.checkpoints.store import is_of_column

if TYPE_CHECKING:
    from geneva.execution.backfill.control import JobControl
    from geneva.execution.jobs.progress import JobProgress


@dataclass(frozen=True, slots=True)
class RefreshWork:
    """A refresh of a view, of one row per source row or of several."""

    prepared: PreparedRefresh | PreparedChunkRefresh | PreparedPartitionRefresh
    job_type: str = "REFRESH"

    @property
    def unit(self) -> str:
        """What the function is called for."""
        match self.prepared:
            case PreparedPartitionRefresh():
                return "partition"
            case PreparedChunkRefresh():
                return "source row"
            case _:
                return "row"

    @property
    def overtaken(self) -> tuple[tuple[int, str], ...]:
        """The fragments of the source that are left out, if others may have cleaned them up."""
        match self.prepared:
            case PreparedPartitionRefresh(rows=rows):
                return rows.overtaken
            case PreparedChunkRefresh(inner=inner):
                return inner.overtaken
            case PreparedRefresh() as prepared:
                return prepared.overtaken

    @property
    def plan(self) -> RefreshPlan:
        """What will be done."""
        return self.prepared.plan

    @property
    def table(self) -> str:
        """The view's name."""
        return self.plan.view

    @property
    def column(self) -> str:
        """All of the view's columns."""
        return "*"

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for, for the job history."""
        return {
            "source": self.plan.source,
            "src_version": self.plan.to_version,
            "from_version": self.plan.from_version,
            "max_rows_per_fragment": self._filled.request.max_rows_per_fragment,
            **self._filled.request.backfill.options.changed(),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks shown with the plan."""
        return self.plan.notes

    @property
    def plans(self) -> Sequence[BackfillPlan]:
        """The plan of each group of columns."""
        return [column.plan for column in self.plan.columns]

    @property
    def backfills(self) -> Sequence[PreparedBackfill]:
        """Those of its groups that have something to do; of a table function, whether or not."""
        if isinstance(self.prepared, PreparedPartitionRefresh):
            return self.prepared.inner.backfills
        return [backfill for backfill in self._filled.backfills if not backfill.plan.is_empty]

    @property
    def is_empty(self) -> bool:
        """Whether the view is up to date."""
        return self.plan.is_empty

    @property
    def total_rows(self) -> int:
        """Rows that get a new value; of a table function, partitions."""
        return self.plan.rows_to_run if self.plan.partitions else distinct_rows(self.plans)

    @property
    def identity(self) -> str | None:
        """None: a view that is being refreshed refuses a second refresh by itself."""
        return None

    @property
    def timeout(self) -> float | None:
        """Seconds that the job may take."""
        return self._filled.request.backfill.options.timeout

    def overtaken_by(self, job_ids: Collection[str]) -> Sequence[str]:
        """None: it follows nobody."""
        return ()

    def again(self, followed: Sequence[str], seconds: float) -> RefreshWork:
        """The same: it follows nobody."""
        return self

    @property
    def _filled(self) -> PreparedRefresh:
        """The refresh of the table that has the Computations."""
        match self.prepared:
            case PreparedChunkRefresh(inner=inner) | PreparedPartitionRefresh(inner=inner):
                return inner
            case prepared:
                return prepared

    def run(self, control: JobControl) -> JobProgress:
        """Carry the plan out."""
        return replace(self._run(control), rows_leaving=self.plan.rows_leaving)

    def _run(self, control: JobControl) -> JobProgress:
        from geneva.execution.refresh.run import run_refresh

        match self.prepared:
            case PreparedChunkRefresh() as prepared:
                return run_chunk_refresh(prepared, control)
            case PreparedPartitionRefresh() as prepared:
                return run_partition_refresh(prepared, control)
            case prepared:
                return run_refresh(prepared, control)[0]

    @property
    def refs(self) -> frozenset[TableRef]:
        """The view, and the hidden ones that it is made from."""
        return frozenset({self.prepared.ref, *(filled.ref for filled in self._every_filled)})

    @property
    def _every_filled(self) -> tuple[PreparedRefresh, ...]:
        """The refreshes of all tables that have Computations."""
        match self.prepared:
            case PreparedPartitionRefresh(rows=rows, inner=inner):
                return rows, inner
            case _:
                return (self._filled,)

    def tidy(self) -> None:
        """Drop the checkpoints of all groups."""
        for filled in self._every_filled:
            names = [group.name for group in filled.groups]
            drop_leftovers(filled.ref, partial(_is_of_any, names=names), set())


def _is_of_any(prefix: str, names: Sequence[str]) -> bool:
    return any(is_of_column(prefix, column=name) for name in names)

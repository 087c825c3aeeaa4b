"""What a job carries out: a backfill, or a refresh. One kind of job for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from geneva.execution.backfill.chain import PreparedChain, run_chain
from geneva.execution.backfill.driver import JobControl
from geneva.execution.jobs.progress import JobProgress
from geneva.storage.checkpoints.cleanup import drop_column_leftovers
from geneva.storage.columns.definitions import commit_has_receipts
from geneva.storage.lance.dataset import open_dataset


class Work(Protocol):
    """A plan that is ready to be carried out."""

    @property
    def table(self) -> str:
        """The table, or view, that it fills."""

    @property
    def column(self) -> str:
        """The column; of a view, all of them."""

    @property
    def job_type(self) -> str:
        """What the job history calls it."""

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for, for the job history."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks shown with the plan."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""

    @property
    def total_rows(self) -> int:
        """Values to compute."""

    def run(self, control: JobControl) -> JobProgress:
        """Do it."""

    def tidy(self) -> None:
        """Drop what is of no use after a job that did everything."""


@dataclass(frozen=True, slots=True)
class BackfillWork:
    """A backfill of one column, and of the computed columns that it is made from."""

    chain: PreparedChain
    job_type: str = "BACKFILL"

    @property
    def table(self) -> str:
        """The table's name."""
        return self.chain.own.plan.table

    @property
    def column(self) -> str:
        """The column's name."""
        return self.chain.own.plan.column

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for."""
        plan, request = self.chain.own.plan, self.chain.own.request
        return {
            **request.options.changed(),
            "where": plan.where,
            "read_version": plan.version,
            "udf_name": plan.udf_name,
            "udf_version": plan.udf_version,
            "concurrency": request.options.concurrency,
            "commit_granularity": request.options.commit_granularity,
            "upstream": [step.plan.column for step in self.chain.upstream],
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks shown with the plan."""
        return tuple(note for step in self.chain.steps for note in step.plan.notes)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.chain.plan.is_empty

    @property
    def total_rows(self) -> int:
        """Rows that get a new value."""
        return sum(step.plan.rows_to_compute for step in self.chain.steps)

    def run(self, control: JobControl) -> JobProgress:
        """Carry the plan out."""
        return run_chain(self.chain, control)

    def tidy(self) -> None:
        """Drop what earlier jobs on the columns left behind, once everything is computed."""
        for step in self.chain.steps:
            request = step.request
            if request.options.where is None and request.options.num_frags is None:
                own = set(step.prefixes.values())
                drop_column_leftovers(step.ref, step.plan.column, own)
                if step.computation.older_than_receipts:
                    commit_has_receipts(open_dataset(step.ref), step.computation)

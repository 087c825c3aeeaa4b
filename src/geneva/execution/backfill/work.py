"""What a job carries out: a backfill, or a refresh. One kind of job for both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from geneva.execution.backfill.chain import PreparedChain, prepare_chain, run_chain
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.backfill.subjects import ColumnSubject
from geneva.model.tables import TableRef
from geneva.planning.backfill import BackfillPlan, distinct_rows
from geneva.planning.notes import UPPER_BOUNDS
from geneva.storage.checkpoints.cleanup import drop_leftovers
from geneva.storage.checkpoints.store import is_of_column, is_of_computation
from geneva.storage.columns.definitions import commit_has_receipts, read_definitions
from geneva.storage.lance.dataset import open_dataset, planned_anew
from geneva.storage.lance.transactions import files_of_jobs

if TYPE_CHECKING:
    from geneva.execution.backfill.control import JobControl
    from geneva.execution.jobs.progress import JobProgress


class Work(Protocol):
    """A plan that is ready to be carried out."""

    @property
    def table(self) -> str:
        """The table, or view, that it fills."""

    @property
    def column(self) -> str:
        """The column; of a view, all of them."""

    @property
    def unit(self) -> str:
        """What its function is called for: a row, a source row, or a partition."""

    @property
    def job_type(self) -> str:
        """What the job history calls it."""

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for, for the job history."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on what is left as it is, and on what can't be known."""

    @property
    def plans(self) -> Sequence[BackfillPlan]:
        """The plan of every column that it fills."""

    @property
    def backfills(self) -> Sequence[PreparedBackfill]:
        """Those of its backfills that have something to do."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""

    @property
    def total_rows(self) -> int:
        """Rows that get a new value."""

    @property
    def identity(self) -> str | None:
        """What makes other work the same: the later of two such jobs follows the earlier one.

        None: it never is.
        """

    @property
    def timeout(self) -> float | None:
        """Seconds that the job may take."""

    def overtaken_by(self, job_ids: Collection[str]) -> Sequence[str]:
        """Which of these jobs have published something since this was planned."""

    def again(self, followed: Sequence[str], seconds: float) -> Work:
        """The same, planned on the latest version, after `seconds` of waiting for those jobs."""

    def run(self, control: JobControl) -> JobProgress:
        """Do it."""

    @property
    def refs(self) -> frozenset[TableRef]:
        """The tables that are written."""

    def tidy(self) -> None:
        """Drop what is of no use after a job that did everything."""


@dataclass(frozen=True, slots=True)
class BackfillWork:
    """A backfill of one column, and of the computed columns that it is made from."""

    chain: PreparedChain
    job_type: str = "BACKFILL"
    unit: str = "row"

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
            "inputs": list(plan.inputs),
            **({"columns": list(plan.columns)} if len(plan.columns) > 1 else {}),
            "upstream": [step.plan.column for step in self.chain.upstream],
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks shown with the plan; not what is about its numbers."""
        plans = self.plans
        return tuple(
            f"{plan.column}: {note}" if len(plans) > 1 else note
            for plan in plans
            for note in plan.notes
            if note != UPPER_BOUNDS
        )

    @property
    def plans(self) -> Sequence[BackfillPlan]:
        """The plans of the inputs, and of the column itself."""
        return [step.plan for step in self.chain.steps]

    @property
    def backfills(self) -> Sequence[PreparedBackfill]:
        """Those of the inputs and of the column itself that have something to do."""
        return [step for step in self.chain.steps if not step.plan.is_empty]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.chain.plan.is_empty

    @property
    def total_rows(self) -> int:
        """Rows that get a new value."""
        return distinct_rows(self.plans)

    @property
    def identity(self) -> str | None:
        """The column, its function, and what bounds the rows; not how the work is done."""
        own, options = self.chain.own, self.chain.own.request.options
        bounds = (options.where, options.read_version, options.num_frags, options.retry_failed)
        # By name, which a branch and a namespace are part of: a path may be written in many ways.
        key = (own.ref.name, own.computation.id, own.computation.version, *bounds)
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    @property
    def timeout(self) -> float | None:
        """Seconds that the job may take."""
        return self.chain.own.request.options.timeout

    def overtaken_by(self, job_ids: Collection[str]) -> Sequence[str]:
        """Which of these jobs have published values since this was planned."""
        own = self.chain.own
        if not job_ids or own.request.options.read_version is not None:
            return ()
        latest = open_dataset(own.ref)
        return sorted(files_of_jobs(latest, job_ids, after=own.snapshot.version))

    def again(self, followed: Sequence[str], seconds: float) -> BackfillWork:
        """Plan what is left; rows that a clause asked for are done where the others did them."""
        own, request = self.chain.own, self.chain.own.request
        options = request.options
        if options.timeout is not None:
            options = replace(options, timeout=max(0.0, options.timeout - seconds))
        if request.selects_rows:
            files = files_of_jobs(open_dataset(own.ref), followed).values()
            done = request.done_files.union(*files)
            request = replace(request, done_files=done)
        request = replace(request, options=options)
        subject = own.subject
        assert isinstance(subject, ColumnSubject)

        def plan() -> PreparedChain:
            dataset = open_dataset(own.ref) if options.read_version is None else own.dataset
            return prepare_chain(
                own.ref, dataset, subject.definition, request, make_runner=own.make_runner
            )

        return replace(self, chain=planned_anew(lambda: [own.ref], plan))

    def run(self, control: JobControl) -> JobProgress:
        """Carry the plan out."""
        return run_chain(self.chain, control)

    @property
    def refs(self) -> frozenset[TableRef]:
        """The table."""
        return frozenset(step.ref for step in self.chain.steps)

    def tidy(self) -> None:
        """Drop what earlier jobs on the columns left behind, once everything is computed."""
        for step in self.chain.steps:
            request = step.request
            if request.options.where is None and request.options.num_frags is None:
                # With a size that was asked for, checkpoints are kept on purpose.
                keeps_own = step.sizes.checkpoint_size is not None
                own = set(step.prefixes.values()) if keeps_own else set()
                drop_leftovers(step.ref, _is_left_by(step), own)
                if step.computation.older_than_receipts:
                    commit_has_receipts(open_dataset(step.ref), step.computation)


def _is_left_by(step: PreparedBackfill) -> Callable[[str], bool]:
    """Which checkpoints are of a computation, or of an earlier column of the same name.

    A column that was renamed is there under another name: what is kept for it stays.
    """
    computation = step.computation
    present = read_definitions(step.snapshot.schema).values()
    others = {found.computation_id for found in present} - {computation.id}

    def is_left(prefix: str) -> bool:
        if is_of_computation(prefix, computation.id):
            return True
        is_named = is_of_column(prefix, computation.name)
        return is_named and not any(is_of_computation(prefix, other) for other in others)

    return is_left

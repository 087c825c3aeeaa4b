"""What a backfill has to do, decided fragment by fragment from facts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from geneva.model.rows import RowRange, RowSet
from geneva.model.tables import Reason
from geneva.planning.ranges import disjoint
from geneva.render import html

_FEW_ROWS = 100_000
_ADOPTED_PER_RUN = 64
"""Receipts that can be written in the time of a call, at a guess."""


class Action(StrEnum):
    """What to do with a fragment."""

    SKIP = "skip"
    REUSE = "reuse staged file"
    COMPUTE = "compute"
    ADOPT = "write receipts"
    """No value is new, but some need a receipt: values that a person wrote."""


@dataclass(frozen=True, slots=True)
class FragmentState:
    """What storage knows about one fragment and one column."""

    fragment_id: int
    physical_rows: int
    live: RowSet
    valid: RowSet
    """Rows whose committed value is right for the current UDF and inputs."""
    reason: Reason
    """Why the other rows are not."""
    has_output: bool
    """Whether the fragment has values of the column at all."""
    adopt: RowSet
    """Rows whose value stays and gets a receipt: a person wrote it, or it is right without one."""
    failed: RowSet
    """Rows on which the current UDF failed, given the current inputs."""
    selected: RowSet | None = None
    """The rows that an explicit where clause matches; None: no clause was given."""
    only_stale: bool = False
    """Of the selected rows, only those that are not right."""
    checkpointed: tuple[RowRange, ...] = ()
    staged: bool = False
    reused: RowSet | None = None
    """Rows that an unpublished result is there for; None: none."""
    retry_failed: bool = False
    """Whether just those are asked for."""


@dataclass(frozen=True, slots=True)
class FragmentPlan:
    """What one fragment needs."""

    fragment_id: int
    physical_rows: int
    action: Action
    reason: Reason
    compute: RowSet
    """Rows that get a new value."""
    valid_after: RowSet
    """Rows whose value is right once this is committed."""
    complete: bool
    """Whether no live row is left to compute afterwards."""
    keeps_old: bool
    """Whether some rows keep the value they have."""
    adopt: RowSet
    """Rows that keep their value and get a receipt for it."""
    covered: tuple[RowRange, ...] = ()
    """Ranges whose results are in the checkpoint store already, disjoint and ascending."""
    run: RowSet | None = None
    """Rows to call the UDF for, ranges that are covered aside; None: all that get a new value."""
    failed_after: RowSet | None = None
    """Rows that failed before and stay so; None: none."""

    @property
    def to_run(self) -> RowSet:
        """Rows to call the UDF for, where no covered range has their result."""
        return self.compute if self.run is None else self.run

    @property
    def rows_to_run(self) -> int:
        """Rows for which the UDF will be called."""
        if self.action is not Action.COMPUTE:
            return 0
        return self.to_run.count - sum(self.to_run.slice(r).count for r in self.covered)

    @property
    def weight(self) -> int:
        """How much work it is, in rows that the UDF is called for."""
        return self.rows_to_run or self.adopt.count // _ADOPTED_PER_RUN


@dataclass(frozen=True, slots=True)
class BackfillPlan:
    """Everything a backfill will do. The driver runs it, and `explain` prints it."""

    table: str
    version: int
    column: str
    udf_name: str
    udf_version: str
    where: str | None
    fragments: tuple[FragmentPlan, ...]
    """The fragments that need something; those that don't are only counted."""
    skipped_fragments: int
    total_rows: int
    """Live rows of the table."""
    checked_rows: int = 0
    """Rows that were judged by their receipts: neither files nor history could tell."""
    upstream: tuple[BackfillPlan, ...] = ()
    """The plans of computed inputs that are brought up to date first, in order."""
    notes: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.fragments and all(plan.is_empty for plan in self.upstream)

    @property
    def rows_to_compute(self) -> int:
        """Rows that get a new value."""
        return sum(f.compute.count for f in self.fragments)

    @property
    def rows_to_adopt(self) -> int:
        """Rows whose value stays as a person wrote it, and gets a receipt."""
        return sum(f.adopt.count for f in self.fragments)

    @property
    def rows_to_run(self) -> int:
        """Rows for which the UDF will be called."""
        return sum(f.rows_to_run for f in self.fragments)

    @property
    def is_small_without_calls(self) -> bool:
        """Whether it is a matter of few rows and no call: not worth starting Spark for."""
        rows = self.rows_to_compute + self.rows_to_adopt
        return not self.rows_to_run and rows <= _FEW_ROWS

    @property
    def rows_reused(self) -> int:
        """Rows whose value was computed by an earlier run and is only waiting to be committed."""
        return self.rows_to_compute - self.rows_to_run

    def reasons(self) -> dict[Reason, int]:
        """Rows to compute, by reason."""
        counts: Counter[Reason] = Counter()
        for fragment in self.fragments:
            counts[fragment.reason] += fragment.compute.count
        return {reason: rows for reason, rows in counts.items() if rows}

    def __str__(self) -> str:
        """Return the plan as text."""
        from geneva.planning.explain import explain

        return explain(self)

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        pairs = (
            ("UDF", f"{self.udf_name} (version {self.udf_version})"),
            ("where", self.where),
            ("rows to compute", f"{self.rows_to_compute:,} of {self.total_rows:,}"),
            ("rows reused", f"{self.rows_reused:,}" if self.rows_reused else None),
            ("rows adopted", f"{self.rows_to_adopt:,}" if self.rows_to_adopt else None),
            ("fragments", f"{len(self.fragments):,} to do, {self.skipped_fragments:,} skipped"),
        )
        reasons = [(reason.value, f"{rows:,}") for reason, rows in self.reasons().items()]
        return html.section(
            f"Backfill of {self.column!r} of table {self.table!r} at version {self.version}",
            html.facts(pairs),
            html.grid(("because", "rows"), reasons) if reasons else "",
            *map(html.note, self.notes),
        )


def plan_fragment(state: FragmentState) -> FragmentPlan:
    """Decide what one fragment needs."""
    failed = state.failed.intersect(state.live)
    none = RowSet.empty(state.physical_rows)
    adopt = none
    if state.retry_failed:
        chosen = failed if state.selected is None else failed.intersect(state.selected)
        compute, reason = chosen, Reason.FAILED
    elif state.selected is None or state.only_stale:
        # A row that failed would fail again: it waits for another UDF, other inputs, or a wish.
        adopt = state.adopt.intersect(state.live)
        compute = state.live.minus(state.valid).minus(failed).minus(adopt)
        reason = state.reason
        if state.selected is not None:
            compute = compute.intersect(state.selected)
            adopt = adopt.intersect(state.selected)
    else:
        compute, reason = state.selected.intersect(state.live), Reason.ASKED
    # Of a deleted row nothing is said: its value may be gone, and a restored version has it live.
    valid_after = state.valid.union(compute).union(adopt).intersect(state.live)
    kept = state.live.minus(compute)
    if compute:
        action = Action.REUSE if state.staged else Action.COMPUTE
    elif adopt:
        action = Action.ADOPT
    else:
        action, reason = Action.SKIP, Reason.UP_TO_DATE
    return FragmentPlan(
        fragment_id=state.fragment_id,
        physical_rows=state.physical_rows,
        action=action,
        reason=reason,
        compute=compute,
        valid_after=valid_after,
        complete=not state.live.minus(valid_after),
        keeps_old=state.has_output and bool(kept),
        adopt=adopt,
        covered=disjoint(state.checkpointed, state.physical_rows)
        if action is Action.COMPUTE
        else (),
        run=compute.minus(state.reused) if state.reused is not None else None,
        failed_after=failed.minus(compute) or None,
    )


def choose_fragments(plans: Iterable[FragmentPlan], limit: int | None) -> tuple[FragmentPlan, ...]:
    """The plans that need something, at most `limit` of them."""
    needed = tuple(plan for plan in plans if plan.action is not Action.SKIP)
    return needed if limit is None else needed[:limit]

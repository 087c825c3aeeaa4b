"""What a backfill has to do, decided fragment by fragment from facts alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce

from geneva.model.rows import RowRange, RowSet
from geneva.model.tables import Reason
from geneva.model.view_query import Shown
from geneva.planning.estimates import Estimate
from geneva.planning.ranges import disjoint
from geneva.render import html
from geneva.render.text import count

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputState:
    """What storage knows of one output of a computation in one fragment."""

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
    stale: RowSet | None = None
    """Rows whose value is of another UDF or of other inputs; None: none."""
    failed_before: RowSet | None = None
    """Rows on which an earlier UDF failed, or this one given other inputs; None: none."""
    left_out: RowSet | None = None
    """Rows that stay as they are, because their inputs can't be read; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentState:
    """What storage knows of one fragment and one computation, and what was asked for."""

    fragment_id: int
    physical_rows: int
    live: RowSet
    outputs: tuple[OutputState, ...]
    """One for each output of the computation, in order."""
    selected: RowSet | None = None
    """The rows that an explicit where clause matches; None: no clause was given."""
    only_stale: bool = False
    """Of the selected rows, only those that are not right."""
    checkpointed: tuple[RowRange, ...] = ()
    staged: bool = False
    reused: RowSet | None = None
    """Rows that an unpublished result is there for; None: none."""
    retry_failed: bool = False
    """Whether just the rows that failed are asked for."""

    @property
    def valid(self) -> RowSet:
        """Rows of which every output is right."""
        return common_rows([output.valid for output in self.outputs])

    @property
    def stale(self) -> RowSet:
        """Rows of which an output is of another UDF or of other inputs."""
        return all_rows(self.physical_rows, [output.stale for output in self.outputs])

    @property
    def failed(self) -> RowSet:
        """Rows on which the current UDF failed, given the current inputs."""
        return all_rows(self.physical_rows, [output.failed for output in self.outputs])


def common_rows(sets: Sequence[RowSet]) -> RowSet:
    """The rows that are in every one of some sets."""
    return reduce(RowSet.intersect, sets)


def all_rows(size: int, sets: Iterable[RowSet | None]) -> RowSet:
    """The rows that are in any of some sets."""
    return reduce(RowSet.union, (rows for rows in sets if rows is not None), RowSet.empty(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """What one output of a computation gets in a fragment. Its other rows stay as they are."""

    place: int
    """Which output it is."""
    compute: RowSet
    """Rows that get a new value."""
    adopt: RowSet
    """Rows that keep their value and get a receipt for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentPlan:
    """What one fragment needs."""

    fragment_id: int
    physical_rows: int
    action: Action
    reason: Reason
    outputs: tuple[OutputPlan, ...]
    """The outputs that are written: those that are right as they are keep their files."""
    compute: RowSet
    """Rows of which an output gets a new value."""
    valid_after: RowSet
    """Rows of which every output that is written is right once this is committed."""
    complete: bool
    """Whether no live row is left to compute afterwards."""
    keeps_old: bool
    """Whether some rows keep the value they have."""
    adopt: RowSet
    """Rows of which an output keeps its value and gets a receipt for it."""
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

    def computed_in(self, place: int) -> RowSet:
        """The rows that get another value of one output."""
        found = (output.compute for output in self.outputs if output.place == place)
        return next(found, RowSet.empty(self.physical_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillPlan:
    """Everything a backfill will do. The driver runs it, and `explain` prints it."""

    table: str
    version: int
    column: str
    udf_name: str
    udf_version: str
    where: str | None
    retry_failed: bool = False
    """Whether just rows that failed before are computed."""
    inputs: tuple[str, ...] = field(default=(), compare=False)
    """The columns that the function reads, in the order of its parameters."""
    columns: tuple[str, ...] = field(default=(), compare=False)
    """The columns that it fills, all by one call."""
    fragments: tuple[FragmentPlan, ...]
    """The fragments that need something; those that don't are only counted."""
    skipped_fragments: int
    total_rows: int
    """Live rows of the table."""
    right_fragments: int = field(default=0, compare=False)
    """Fragments in which every row is right already."""
    right_rows: int = field(default=0, compare=False)
    """Rows that are right already, and are not computed again; of deleted rows at a guess."""
    checked_rows: int = 0
    """Rows that were checked by their receipts, as neither files nor history proved them."""
    upstream: tuple[BackfillPlan, ...] = ()
    """The plans of computed inputs that are brought up to date first, in order."""
    unreadable: tuple[tuple[int, str], ...] = ()
    """Fragments that can't be read, and why: the job does all others, and then fails."""
    notes: tuple[str, ...] = ()
    estimate: Estimate | None = field(default=None, compare=False)
    """How long the calls will take, where that was measured before."""

    @property
    def shown(self) -> Shown:
        """What is computed, by the names that users know."""
        return Shown.of(self.table, self.column, self.udf_name)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, and nothing to complain of."""
        idle = not self.fragments and not self.unreadable
        return idle and all(plan.is_empty for plan in self.upstream)

    @property
    def rows_to_compute(self) -> int:
        """Rows that get a new value."""
        return sum(f.compute.count for f in self.fragments)

    def log_lines(self) -> list[str]:
        """What the log says of it: what is taken over, what is stale and why."""
        reused = [f for f in self.fragments if f.rows_to_run < f.compute.count]
        taken = sum(f.compute.count - f.rows_to_run for f in reused)
        lines = [
            # The words of the specification, which people search logs for.
            f"Collected {self.right_fragments + len(reused):,} checkpointed fragments with "
            f"{self.right_rows + taken:,} rows for {self.shown}: "
            f"{count(self.right_rows, 'right row')}, "
            f"{count(self.right_fragments, 'fragment')} wholly right; {count(taken, 'row')} of "
            f"{count(len(reused), 'other')} computed before"
        ]
        if self.rows_to_compute:
            why = ", ".join(f"{rows:,} {reason.value}" for reason, rows in self.reasons().items())
            lines.append(f"Stale rows of {self.shown}: {why}")
        changed = [f.fragment_id for f in self.fragments if f.reason is Reason.INPUT_CHANGED]
        if changed:
            named = ", ".join(map(str, changed[:10])) + (", ..." if len(changed) > 10 else "")
            lines.append(
                f"Checkpoint data files mismatch: {count(len(changed), 'fragment')} of table "
                f"{self.table!r} with values of {self.column!r} that were computed from other "
                f"input data than there is now ({named})"
            )
        return lines

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

    def __repr__(self) -> str:
        """Show at a glance what there is to do; as text it says all."""
        return (
            f"BackfillPlan({self.table!r}, {self.column!r}, version={self.version}, "
            f"rows_to_compute={self.rows_to_compute} of {self.total_rows})"
        )

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


def distinct_rows(plans: Iterable[BackfillPlan]) -> int:
    """Rows that get a new value by at least one of the plans, of columns of one table."""
    found: dict[int, RowSet] = {}
    for plan in plans:
        for fragment in plan.fragments:
            known = found.get(fragment.fragment_id)
            rows = fragment.compute
            found[fragment.fragment_id] = rows if known is None else known.union(rows)
    return sum(rows.count for rows in found.values())


def plan_fragment(state: FragmentState) -> FragmentPlan:
    """Decide what one fragment needs."""
    wanted = [_wanted(state, output) for output in state.outputs]
    size = state.physical_rows
    compute = all_rows(size, [rows for rows, _, _ in wanted])
    # A row that failed would fail again: but where it is called anyway, all its outputs take that.
    every = [
        OutputPlan(place=place, compute=rows.union(compute.intersect(found.failed)), adopt=adopt)
        for place, (found, (rows, adopt, _)) in enumerate(zip(state.outputs, wanted, strict=True))
    ]
    outputs = tuple(output for output in every if output.compute or output.adopt)
    written = [(state.outputs[output.place], output) for output in outputs]
    # Of a deleted row nothing is said: its value may be gone, and a restored version has it live.
    right = [found.valid.union(new.compute).union(new.adopt) for found, new in written]
    valid_after = common_rows(right or [state.valid]).intersect(state.live)
    failed = [found.failed.minus(new.compute) for found, new in written]
    failed_after = common_rows(failed or [o.failed for o in state.outputs]).intersect(state.live)
    adopt = all_rows(size, [output.adopt for output in outputs])
    action = _action(state, compute, adopt)
    computes = action is Action.COMPUTE
    reasons = [why for rows, adopted, why in wanted if (rows if compute else adopted)]
    return FragmentPlan(
        fragment_id=state.fragment_id,
        physical_rows=size,
        action=action,
        reason=reasons[0] if reasons else Reason.UP_TO_DATE,
        outputs=outputs,
        compute=compute,
        valid_after=valid_after,
        complete=not state.live.minus(valid_after),
        keeps_old=any(
            found.has_output and bool(state.live.minus(new.compute))
            for found, new in (written or [(o, _no_plan(size)) for o in state.outputs])
        ),
        adopt=adopt,
        covered=disjoint(state.checkpointed, size) if computes else (),
        run=compute.minus(state.reused) if state.reused is not None else None,
        failed_after=failed_after or None,
    )


def _no_plan(size: int) -> OutputPlan:
    return OutputPlan(place=0, compute=RowSet.empty(size), adopt=RowSet.empty(size))


def without_calls(plan: FragmentPlan, *, has_output: bool) -> FragmentPlan | None:
    """The plan for just the rows that have a result already; None: there are none.

    `has_output`: whether the fragment has values of the column, which the other rows keep.
    """
    if plan.action is not Action.COMPUTE:
        return plan
    known = RowSet.from_ranges(plan.physical_rows, plan.covered).intersect(plan.compute)
    known = known.union(plan.compute.minus(plan.to_run))
    if not known:
        return None
    left = plan.compute.minus(known)
    outputs = [replace(o, compute=o.compute.intersect(known)) for o in plan.outputs]
    return replace(
        plan,
        outputs=tuple(output for output in outputs if output.compute or output.adopt),
        compute=known,
        valid_after=plan.valid_after.minus(left),
        complete=plan.complete and not left,
        keeps_old=plan.keeps_old or (has_output and bool(left)),
        run=plan.to_run.intersect(known),
    )


def _wanted(state: FragmentState, output: OutputState) -> tuple[RowSet, RowSet, Reason]:
    """Rows that get a new value, rows that get a receipt alone, and why."""
    selected = state.live if state.selected is None else state.live.intersect(state.selected)
    if output.left_out is not None:
        selected = selected.minus(output.left_out)
    nothing = RowSet.empty(state.physical_rows)
    if state.retry_failed:
        failed = output.failed
        if output.failed_before is not None:
            failed = failed.union(output.failed_before)
        return failed.intersect(selected), nothing, Reason.FAILED
    if state.selected is not None and not state.only_stale:
        return selected, nothing, Reason.ASKED
    adopt = output.adopt.intersect(selected)
    # A row that failed would fail again: it waits for another UDF, other inputs, or a wish.
    return selected.minus(output.valid).minus(output.failed).minus(adopt), adopt, output.reason


def _action(state: FragmentState, compute: RowSet, adopt: RowSet) -> Action:
    if compute:
        return Action.REUSE if state.staged else Action.COMPUTE
    return Action.ADOPT if adopt else Action.SKIP


def after_inputs_changed(
    state: FragmentState, changed: RowSet, supplied: Sequence[RowSet]
) -> FragmentState:
    """The state after inputs of some rows were computed anew: they may all be other ones.

    What a person wrote (`supplied`, by output) is adopted with whatever inputs it has then.
    """
    changed = changed.intersect(state.live)

    def after(output: OutputState, kept: RowSet) -> OutputState:
        others = changed.minus(kept)
        return replace(
            output,
            valid=output.valid.minus(others),
            adopt=output.adopt.minus(others),
            reason=output.reason if state.live.minus(output.valid) else Reason.UPSTREAM,
        )

    pairs = zip(state.outputs, supplied, strict=True)
    return replace(state, outputs=tuple(after(output, kept) for output, kept in pairs))


def choose_fragments(plans: Iterable[FragmentPlan], limit: int | None) -> tuple[FragmentPlan, ...]:
    """The plans that need something, at most `limit` of them."""
    needed = tuple(plan for plan in plans if plan.action is not Action.SKIP)
    return needed if limit is None else needed[:limit]


def in_mixed_order(
    plans: tuple[FragmentPlan, ...], diversity: int | None
) -> tuple[FragmentPlan, ...]:
    """Mix the fragments within a sliding window, to spread slow regions over the workers."""
    if not diversity or diversity < 2:
        return plans
    rng = random.Random(0)
    window: list[FragmentPlan] = []
    mixed: list[FragmentPlan] = []
    for plan in plans:
        window.append(plan)
        if len(window) >= diversity:
            mixed.append(window.pop(rng.randrange(len(window))))
    rng.shuffle(window)
    return tuple(mixed + window)

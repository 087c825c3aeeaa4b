"""What a refresh of a whole database has to do, as far as that can be known before it begins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from geneva.planning.backfill import BackfillPlan
from geneva.planning.graph import Key, Step
from geneva.planning.refresh import RefreshPlan
from geneva.render import html
from geneva.render.plain import plain
from geneva.render.text import agree, count

_NOTE_VERSION = "note the source's version"


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Why a step can't be planned."""

    why: str
    passes: bool = False
    """Whether it can be once the steps before it are done."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step has to do as things are now."""

    step: Step
    plan: BackfillPlan | RefreshPlan | None
    """None: it can't be planned, or not yet."""
    trouble: str = ""
    """Why it can't be; empty where the steps that it waits for are all it needs."""
    waits_for: tuple[str, ...] = ()
    """Steps that have something to do, and whose results it reads: there may be more to do then."""
    source_changes: bool = False
    """Whether steps before it write to the source of this view, whatever it reads of that."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, and will not be."""
        waits = self.waits_for or self.source_changes
        return self.plan is not None and self.plan.is_empty and not waits

    @property
    def action(self) -> str:
        """What is done, in a line."""
        if self.trouble:
            return f"can't be planned: {self.trouble}"
        known = "" if self.plan is None or self.plan.is_empty else _action(self.plan)
        if self.waits_for:
            follows = f"what follows from {', '.join(self.waits_for)}"
            return f"{known}, and {follows}" if known else follows
        return known or (_NOTE_VERSION if self.source_changes else "nothing to do")


@dataclass(frozen=True, slots=True)
class DatabasePlan:
    """All steps of a refresh of a database, in the order in which they run."""

    database: str
    steps: tuple[StepPlan, ...]
    unreadable: tuple[tuple[str, str], ...] = ()
    """Tables that can't be read, and why."""

    @property
    def is_empty(self) -> bool:
        """Whether everything is up to date."""
        return not self.unreadable and all(step.is_empty for step in self.steps)

    @property
    def _shown(self) -> list[tuple[str, str]]:
        bad = [(f"table {name!r}", f"can't be read: {why}") for name, why in self.unreadable]
        return bad + [(str(each.step), each.action) for each in self.steps if not each.is_empty]

    def __str__(self) -> str:
        """Return the plan as text."""
        up_to_date = sum(each.is_empty for each in self.steps)
        lines = [f"Refresh of {plain(self.database)}: {up_to_date} of {len(self.steps)} up to date"]
        lines.extend(f"  {plain(what)}: {plain(action)}" for what, action in self._shown)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        title = f"Refresh of {self.database}"
        if self.is_empty:
            return html.section(title, html.note("everything is up to date"))
        return html.section(title, html.grid(("what", "to do"), self._shown))


def planned_steps(
    found: Iterable[tuple[Step, BackfillPlan | RefreshPlan | NoPlan]],
) -> list[StepPlan]:
    """Steps in order with what each waits for; instead of a plan there may be why there is none."""
    planned: dict[Key, StepPlan] = {}
    changing: set[str] = set()
    for step, plan in found:
        waits_for = tuple(
            str(planned[key].step)
            for key in step.inputs
            if key in planned and not planned[key].is_empty
        )
        known, trouble = (None, plan.why) if isinstance(plan, NoPlan) else (plan, "")
        if isinstance(plan, NoPlan) and plan.passes and waits_for:
            trouble = ""
        each = StepPlan(step, known, trouble, waits_for, step.source in changing)
        planned[step.key] = each
        if not each.is_empty:
            changing.add(step.table)
    return list(planned.values())


def _action(plan: BackfillPlan | RefreshPlan) -> str:
    if isinstance(plan, BackfillPlan):
        return _of_column(plan)
    if plan.partitions is not None:
        return f"partitions: {plan.partitions}"
    entering, leaving = plan.rows_entering, plan.rows_leaving
    filled = max((column.rows for column in plan.columns), default=0)
    parts = (
        (entering, f"{count(entering, 'row')} {agree(entering, 'come')}"),
        (leaving, f"{count(leaving, 'row')} {agree(leaving, 'leave')}"),
        (filled, f"fill {count(filled, 'row')}"),
        (plan.rows_to_run, f"call functions for {count(plan.rows_to_run, 'row')}"),
    )
    return ", ".join(text for number, text in parts if number) or _NOTE_VERSION


def _of_column(plan: BackfillPlan) -> str:
    parts = []
    if plan.rows_to_compute:
        parts.append(f"compute {count(plan.rows_to_compute, 'row')}")
    if plan.rows_reused:
        parts.append(f"{plan.rows_reused:,} of them from an earlier run")
    if plan.rows_to_adopt:
        parts.append(f"write receipts for {count(plan.rows_to_adopt, 'row')}")
    return ", ".join(parts) or "look at files that can't be read"

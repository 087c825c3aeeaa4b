"""A column together with the computed columns that it is made from: one plan, one job, in order.

A value computed from an input that is itself not right would be computed again later. So inputs go
first, each on the version that the one before has left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from geneva.errors import StaleInputError
from geneva.execution.backfill.driver import JobControl, run_backfill
from geneva.execution.backfill.parallel import Sums
from geneva.execution.backfill.prepare import PreparedBackfill, prepare
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.backfill.subjects import ColumnSubject
from geneva.execution.jobs.progress import JobProgress
from geneva.execution.runner import Runner
from geneva.model.rows import RowSet
from geneva.model.tables import ColumnDefinition, TableRef, Upstream
from geneva.planning.backfill import BackfillPlan
from geneva.planning.graph import Reads, computed_inputs, upstream_of
from geneva.storage.columns.definitions import (
    FieldsNow,
    commit_rebound,
    commit_receipt_columns,
    read_definitions,
    rebound,
    with_present_inputs,
)
from geneva.storage.lance.dataset import Dataset, FragmentFacts, open_dataset
from geneva.storage.views.definition import reads_source


@dataclass(frozen=True, slots=True)
class PreparedChain:
    """A column's backfill, and before it those of its inputs that need one."""

    own: PreparedBackfill
    upstream: tuple[PreparedBackfill, ...] = ()
    """In the order in which they run. All of them are planned on the present version."""
    inputs: tuple[PreparedBackfill, ...] = ()
    """All computed inputs, near and far: kept up to date with what others add meanwhile."""

    @property
    def plan(self) -> BackfillPlan:
        """What will be done, with the plans of the inputs."""
        return replace(self.own.plan, upstream=tuple(step.plan for step in self.upstream))

    @property
    def steps(self) -> tuple[PreparedBackfill, ...]:
        """All that is run, in order."""
        return (*self.upstream, self.own)


def prepare_chain(
    ref: TableRef,
    dataset: Dataset,
    definition: ColumnDefinition,
    request: BackfillRequest,
    *,
    make_runner: Callable[[], Runner] | None = None,
) -> PreparedChain:
    """Plan a column and what it is made from. Runs no user code.

    Reads only, unless the plan is one to run, with `make_runner`: then columns that were declared
    before there were receipts get theirs, which is a change of the schema.
    """
    plan = partial(prepare, make_runner=make_runner)
    subject = ColumnSubject(ref, definition)
    definitions = {**read_definitions(dataset.schema), definition.name: definition}
    # A view's own columns come from its source: its refresh keeps them.
    fields = FieldsNow(dataset)
    present = {
        name: with_present_inputs(found, dataset, fields)
        for name, found in definitions.items()
        if not reads_source(found.arrow_field)
    }
    reads: Reads = {name: found.inputs for name, found in present.items()}
    before = upstream_of(definition.name, reads)
    if make_runner is not None:
        taking_part = [present[name] for name in (*before, definition.name)]
        latest = open_dataset(ref)
        added = commit_receipt_columns(latest, taking_part)
        if added:
            commit_rebound(latest, added)
            present |= {name: rebound(present[name], latest) for name in added}
            subject = ColumnSubject(ref, present[definition.name])
            dataset = dataset if request.options.read_version is not None else open_dataset(ref)
    if not before or request.options.upstream is Upstream.IGNORE:
        return PreparedChain(plan(subject, request, dataset=dataset))
    if request.options.read_version is not None:
        return _at_an_old_version(subject, dataset, request, present, before)
    steps: dict[str, PreparedBackfill] = {}
    for name in before:
        own = _request_upstream(request)
        changing = _changing(steps, computed_inputs(name, reads))
        steps[name] = plan(
            ColumnSubject(ref, present[name]), own, dataset=dataset, upstream=changing
        )
    stale = {name: step for name, step in steps.items() if step.plan.rows_to_compute}
    if stale and request.options.upstream is Upstream.REFUSE:
        raise _refusal(ref, definition.name, stale)
    inputs = tuple(steps.values())
    needed = {name: step for name, step in steps.items() if not step.plan.is_empty}
    if not needed or request.options.upstream is Upstream.REFUSE:
        return PreparedChain(plan(subject, request, dataset=dataset), inputs=inputs)
    changing = _changing(needed, computed_inputs(definition.name, reads))
    chain = PreparedChain(
        plan(subject, request, dataset=dataset, upstream=changing), tuple(needed.values()), inputs
    )
    if request.options.num_frags is None:
        return chain
    # As many fragments as were asked for, and no more of the inputs either.
    chosen = frozenset(fragment.fragment_id for fragment in chain.own.plan.fragments)
    bounded = [_bounded(step, chosen) for step in chain.upstream]
    first = tuple(step for step in bounded if not step.plan.is_empty)
    return PreparedChain(_bounded(chain.own, chosen), first)


def _bounded(step: PreparedBackfill, chosen: frozenset[int]) -> PreparedBackfill:
    request = replace(step.request, only_fragments=chosen)
    kept = tuple(f for f in step.plan.fragments if f.fragment_id in chosen)
    return replace(step, request=request, plan=replace(step.plan, fragments=kept))


def _request_upstream(request: BackfillRequest) -> BackfillRequest:
    """The same, for an input: of the rows that were asked for, those that are not right."""
    options = replace(request.options, num_frags=None, retry_failed=False, upstream=Upstream.IGNORE)
    return replace(request, options=options, only_stale=options.where is not None)


def _changing(
    steps: dict[str, PreparedBackfill], inputs: Sequence[str]
) -> Callable[[FragmentFacts], RowSet | None] | None:
    """Which rows of a fragment get other inputs, once these steps were run; None: no row does."""
    found: dict[int, RowSet] = {}
    for name in inputs:
        if name not in steps:
            continue
        for plan in steps[name].plan.fragments:
            known = found.get(plan.fragment_id, RowSet.empty(plan.physical_rows))
            found[plan.fragment_id] = known.union(plan.compute)
    return (lambda fragment: found.get(fragment.id)) if found else None


def _at_an_old_version(
    subject: ColumnSubject,
    dataset: Dataset,
    request: BackfillRequest,
    present: dict[str, ColumnDefinition],
    before: Sequence[str],
) -> PreparedChain:
    """Inputs of an old version are as they are: say so where they are not right."""
    own = prepare(subject, request, dataset=dataset)
    first = [
        prepare(
            ColumnSubject(subject.ref, present[name]), _request_upstream(request), dataset=dataset
        )
        for name in before
    ]
    stale = {step.plan.column: step for step in first if step.plan.rows_to_compute}
    if not stale:
        return PreparedChain(own)
    if request.options.upstream is Upstream.REFUSE:
        raise _refusal(subject.ref, subject.definition.name, stale)
    note = (
        f"at version {own.plan.version} the inputs {', '.join(map(repr, stale))} are not up to "
        "date, and an old version can't be changed: what is computed from them goes stale with them"
    )
    return PreparedChain(replace(own, plan=replace(own.plan, notes=(*own.plan.notes, note))))


def _refusal(ref: TableRef, column: str, stale: dict[str, PreparedBackfill]) -> StaleInputError:
    first, step = next(iter(stale.items()))
    return StaleInputError(
        f"Column {column!r} of table {ref.name!r} is computed from {first!r}, of which "
        f"{step.plan.rows_to_compute:,} rows are not up to date. Run backfill({first!r}) first, or "
        'leave upstream="refuse" out: then that is done in the same job.'
    )


def run_chain(chain: PreparedChain, control: JobControl) -> JobProgress:
    """Carry a plan out: the inputs first, then the column, on what they have left behind."""
    renew = partial(_renew_inputs, chain, control)
    if not chain.upstream:
        return run_backfill(chain.own, control, renew)
    total = sum(step.plan.rows_to_compute for step in chain.steps)
    sums = Sums(len(chain.steps), total, control)
    for place, planned in enumerate(chain.steps):
        step = planned if not place else planned.again(frozenset())
        listeners = (partial(sums.take, place),)
        if not step.plan.is_empty:
            run_backfill(step, replace(control, listeners=listeners), renew)
    return sums.now()


def _renew_inputs(chain: PreparedChain, control: JobControl) -> None:
    """Compute inputs of rows that others have added or changed while the job ran."""
    for planned in chain.inputs:
        step = planned.again(frozenset())
        if step.plan.rows_to_compute:
            run_backfill(step, replace(control, listeners=()))

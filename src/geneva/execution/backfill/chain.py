"""A column together with the computed columns that it is made from: one plan, one job, in order.

A value computed from an input that is itself not right would be computed again later. So inputs go
first, each on the version that the one before has left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import pyarrow as pa

from geneva.errors import StaleInputError, UnreadableFragmentsError
from geneva.execution.backfill.failures import all_unreadable
from geneva.execution.backfill.prepare import PreparedBackfill, Reading, prepare
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.backfill.subjects import ColumnSubject
from geneva.execution.backfill.survey import ChangedInputs
from geneva.execution.runner import Runner
from geneva.model.computation import receipt_name
from geneva.model.rows import RowSet
from geneva.model.tables import ColumnDefinition, TableRef, Upstream
from geneva.planning.backfill import BackfillPlan, all_rows
from geneva.planning.graph import Reads, computed_inputs, upstream_of
from geneva.render.text import agree, count
from geneva.storage.columns.definitions import (
    commit_pinned,
    commit_rebound,
    commit_receipt_columns,
    known_paths,
    read_definitions,
    rebound,
    to_pin,
    with_present_inputs,
    written_inputs,
)
from geneva.storage.columns.doubts import settled
from geneva.storage.lance.dataset import (
    Dataset,
    FieldsNow,
    TableSnapshot,
    has_column,
    open_dataset,
    read_snapshot,
)
from geneva.storage.views.definition import reads_source

if TYPE_CHECKING:
    from geneva.execution.backfill.control import JobControl
    from geneva.execution.jobs.progress import JobProgress

_RENEWALS = 3
"""How often each input is computed for rows that came meanwhile, before a column is planned."""


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

    def inputs_before(self, step: PreparedBackfill) -> tuple[PreparedBackfill, ...]:
        """The computed inputs that come before one of the steps: before the last all of them."""
        return tuple(takewhile(lambda each: each.plan.column != step.plan.column, self.inputs))


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
    return _prepare_chain(read_columns(ref, dataset), definition, request, make_runner)


def plan_chain(
    columns: TableColumns, definition: ColumnDefinition, request: BackfillRequest
) -> PreparedChain:
    """The same to look at, where the table was read already: for one of many columns."""
    return _prepare_chain(columns, definition, request, None)


def _prepare_chain(
    columns: TableColumns,
    definition: ColumnDefinition,
    request: BackfillRequest,
    make_runner: Callable[[], Runner] | None,
) -> PreparedChain:
    name, columns = definition.name, _settle(columns.with_(definition), definition.name)
    subject = columns.subject(name)
    before = columns.one_of_each(upstream_of(name, columns.reads))
    if make_runner is not None:
        added = _add_receipts(columns, (*before, name), reopen=request.options.read_version is None)
        if added is not None:
            columns, subject = added, added.subject(name)
        if request.options.read_version is None:
            columns = _pin_inputs(columns, (*before, name))
            subject = columns.subject(name)
    plan = partial(
        prepare,
        subject,
        request,
        dataset=columns.dataset,
        snapshot=columns.snapshot,
        make_runner=make_runner,
    )
    if not before or request.options.upstream is Upstream.IGNORE:
        return PreparedChain(plan())
    if request.options.read_version is not None:
        return _at_an_old_version(subject, columns, request, before)
    inputs = _plan_inputs(columns, before, request, make_runner)
    if request.options.upstream is Upstream.REFUSE:
        _refuse_stale(columns.ref, name, inputs.values())
        return PreparedChain(plan(), inputs=tuple(inputs.values()))
    needed = {input_: step for input_, step in inputs.items() if not step.plan.is_empty}
    if not needed:
        return PreparedChain(plan(), inputs=tuple(inputs.values()))
    own = plan(upstream=_changing(needed.values(), computed_inputs(name, columns.reads)))
    if request.options.num_frags is not None:
        return _bounded_chain(own, needed.values())
    return PreparedChain(own, tuple(needed.values()), tuple(inputs.values()))


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The computed columns of a table at one version, a view's own columns aside."""

    dataset: Dataset
    snapshot: TableSnapshot
    """Read once, for the plans of all of them."""
    definitions: dict[str, ColumnDefinition]
    """By name, with their inputs as they are called now."""

    @property
    def ref(self) -> TableRef:
        """The table."""
        return self.snapshot.ref

    @property
    def reads(self) -> Reads:
        """What each column reads, as far as that is known."""
        return {n: d.inputs if d.doubt is None else () for n, d in self.definitions.items()}

    def with_(self, definition: ColumnDefinition) -> TableColumns:
        """The same with a definition instead of the one that is stored, if there is one."""
        present = with_present_inputs(definition, self.snapshot.fields)
        return replace(self, definitions={**self.definitions, definition.name: present})

    def one_of_each(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of columns that are filled together, the first one: it stands for all of them."""
        first: dict[str, str] = {}
        for name in names:
            first.setdefault(self.definitions[name].computation_id, name)
        return tuple(first.values())

    def filled_with(self, names: Sequence[str]) -> list[str]:
        """Some columns, and all that are filled together with them."""
        ids = {self.definitions[name].computation_id for name in names}
        return [n for n, found in self.definitions.items() if found.computation_id in ids]

    def subject(self, name: str) -> ColumnSubject:
        """One of the columns, as something to compute."""
        return ColumnSubject(self.ref, self.definitions[name])


def read_columns(ref: TableRef, dataset: Dataset) -> TableColumns:
    """The computed columns of a table, as they are stored."""
    snapshot = read_snapshot(dataset, ref)
    present = {
        name: with_present_inputs(found, snapshot.fields)
        for name, found in read_definitions(snapshot.schema).items()
        # A view's own columns come from its source: its refresh keeps them.
        if not reads_source(found.arrow_field)
    }
    return TableColumns(dataset, snapshot, present)


def _settle(columns: TableColumns, name: str) -> TableColumns:
    """Ask files and receipts what a column, and those that it is made from, read."""
    asked: set[str] = set()
    while True:
        names = columns.filled_with((*upstream_of(name, columns.reads), name))
        left = {n: columns.definitions[n] for n in names if n not in asked}
        if not left:
            return columns
        asked.update(left)
        found = {n: settled(columns.dataset, columns.snapshot, d) for n, d in left.items()}
        columns = replace(columns, definitions=columns.definitions | found)


def _add_receipts(
    columns: TableColumns, names: Sequence[str], *, reopen: bool
) -> TableColumns | None:
    """Give receipts to columns that have none; None: all of them had theirs.

    With `reopen` the result is of the latest version.
    """
    names = columns.filled_with(names)
    if all(_has_receipts(columns.snapshot.schema, columns.definitions[name]) for name in names):
        return None
    latest = open_dataset(columns.ref)
    added = commit_receipt_columns(latest, [columns.definitions[name] for name in names])
    if not added:
        return None
    own = {n: d for n in added if not (d := columns.definitions[n]).overrides}
    commit_rebound(latest, {n: own[n].inputs if n in own else None for n in added})
    fields = FieldsNow.of(latest)
    present = columns.definitions | {n: rebound(columns.definitions[n], fields) for n in added}
    dataset = open_dataset(columns.ref) if reopen else columns.dataset
    snapshot = read_snapshot(dataset, columns.ref) if reopen else columns.snapshot
    return TableColumns(dataset, snapshot, present)


def _pin_inputs(columns: TableColumns, names: Sequence[str]) -> TableColumns:
    """Write down where inputs are that were cast, moved or made anew; return the latest version."""
    fields, names = columns.snapshot.fields, columns.filled_with(names)
    read = read_definitions(columns.snapshot.schema)

    def present_paths(found: ColumnDefinition, fields: FieldsNow) -> tuple[str, ...] | None:
        if found.name not in names:
            return None
        settled, before = columns.definitions[found.name], read.get(found.name)
        is_changed = before is None or written_inputs(before) != written_inputs(found)
        return known_paths(found if is_changed or settled.overrides else settled, fields)

    if not to_pin(columns.snapshot.schema, fields, present_paths):
        return columns
    commit_pinned(columns.ref, present_paths)
    latest = open_dataset(columns.ref)
    stored = read_definitions(latest.schema)
    own = {n: stored[n] for n in names if n in stored and not columns.definitions[n].overrides}
    snapshot = read_snapshot(latest, columns.ref)
    present = {
        n: replace(
            with_present_inputs(found, snapshot.fields), assumed=columns.definitions[n].assumed
        )
        for n, found in own.items()
    }
    return TableColumns(latest, snapshot, columns.definitions | present)


def _has_receipts(schema: pa.Schema, definition: ColumnDefinition) -> bool:
    return has_column(schema, receipt_name(definition.uuid))


def _plan_inputs(
    columns: TableColumns,
    before: Sequence[str],
    request: BackfillRequest,
    make_runner: Callable[[], Runner] | None,
) -> dict[str, PreparedBackfill]:
    """The plans of the computed inputs, in order, each for when those before it were run."""
    steps: dict[str, PreparedBackfill] = {}
    reads = columns.reads
    for name in before:
        steps[name] = prepare(
            columns.subject(name),
            _request_upstream(request),
            dataset=columns.dataset,
            snapshot=columns.snapshot,
            upstream=_changing(steps.values(), computed_inputs(name, reads)),
            make_runner=make_runner,
        )
    return steps


def _bounded_chain(own: PreparedBackfill, needed: Iterable[PreparedBackfill]) -> PreparedChain:
    """As many fragments as were asked for, and no more of the inputs either."""
    chosen = frozenset(fragment.fragment_id for fragment in own.plan.fragments)
    bounded = [_bounded(step, chosen) for step in needed]
    return PreparedChain(
        _bounded(own, chosen), tuple(step for step in bounded if not step.plan.is_empty)
    )


def _bounded(step: PreparedBackfill, chosen: frozenset[int]) -> PreparedBackfill:
    request = replace(step.request, only_fragments=chosen)
    kept = tuple(f for f in step.plan.fragments if f.fragment_id in chosen)
    return replace(step, request=request, plan=replace(step.plan, fragments=kept))


def _request_upstream(request: BackfillRequest) -> BackfillRequest:
    """The same, for an input: of the rows that were asked for, those that are not right."""
    options = replace(request.options, num_frags=None, retry_failed=False, upstream=Upstream.IGNORE)
    return replace(request, options=options, only_stale=options.where is not None)


def _changing(steps: Iterable[PreparedBackfill], inputs: Sequence[str]) -> ChangedInputs | None:
    """Which rows of a fragment get other inputs, once these steps were run; None: no row does."""
    found: dict[int, RowSet] = {}
    for step in steps:
        places = [i for i, o in enumerate(step.computation.outputs) if o.name in inputs]
        for plan in step.plan.fragments if places else ():
            known = found.get(plan.fragment_id, RowSet.empty(plan.physical_rows))
            changed = all_rows(plan.physical_rows, map(plan.computed_in, places))
            found[plan.fragment_id] = known.union(changed)
    return (lambda fragment: found.get(fragment.id)) if found else None


def _at_an_old_version(
    subject: ColumnSubject, columns: TableColumns, request: BackfillRequest, before: Sequence[str]
) -> PreparedChain:
    """Inputs of an old version are as they are: say so where they are not right."""
    at = {"dataset": columns.dataset, "snapshot": columns.snapshot}
    own = prepare(subject, request, **at)
    first = [prepare(columns.subject(name), _request_upstream(request), **at) for name in before]
    if request.options.upstream is Upstream.REFUSE:
        _refuse_stale(subject.ref, subject.definition.name, first)
    stale = [repr(step.plan.column) for step in first if step.plan.rows_to_compute]
    if not stale:
        return PreparedChain(own)
    note = (
        f"at version {own.plan.version} the inputs {', '.join(stale)} are not up to "
        "date, and an old version can't be changed: what is computed from them goes stale with them"
    )
    return PreparedChain(replace(own, plan=replace(own.plan, notes=(*own.plan.notes, note))))


def _refuse_stale(ref: TableRef, column: str, inputs: Iterable[PreparedBackfill]) -> None:
    """Raise StaleInputError where an input of a column is not up to date."""
    stale = next((step.plan for step in inputs if step.plan.rows_to_compute), None)
    if stale is not None:
        rows = stale.rows_to_compute
        raise StaleInputError(
            f"Column {column!r} of table {ref.name!r} is computed from {stale.column!r}, of which "
            f"{count(rows, 'row')} {agree(rows, 'are')} not up to date. Run "
            f"backfill({stale.column!r}) "
            'first, or leave upstream="refuse" out: then that is done in the same job.'
        )


def run_chain(chain: PreparedChain, control: JobControl) -> JobProgress:
    """Carry a plan out: the inputs first, then the column, on what they have left behind."""
    # Imported when a job runs: a plan needs none of it.
    from geneva.execution.backfill.driver import run_backfill
    from geneva.execution.backfill.parallel import Sums

    if not chain.upstream:
        return run_backfill(chain.own, control, partial(_renew_inputs, chain.inputs, control))
    sums = Sums([step.plan for step in chain.steps], control)
    unreadable: list[UnreadableFragmentsError] = []
    left_out: dict[str, set[int]] = {}
    for place, planned in enumerate(chain.steps):
        name = planned.plan.column
        renew = partial(_renew_inputs, chain.inputs_before(planned), control)
        at: Reading | None = None
        with suppress(UnreadableFragmentsError):  # the input's own step has said so
            at = renew() if place else None
        step = planned.again(frozenset(), at=at) if place else planned
        # Nothing is computed from inputs that could not be computed.
        reads: Reads = {**dict.fromkeys(left_out, ()), name: step.computation.input_paths}
        inputs = computed_inputs(name, reads)
        lost = {fragment for input_ in inputs for fragment in left_out[input_]}
        # One set for all columns of the step.
        left_out |= dict.fromkeys((name, *step.plan.columns), lost)
        step = step.without(lost)
        if place:
            sums.replanned(place, step.plan)  # inputs may have come out as they were
        listeners = (partial(sums.take, place),)
        if step.plan.is_empty:
            continue
        try:
            run_backfill(step, replace(control, listeners=listeners), renew)
        except UnreadableFragmentsError as error:
            unreadable.append(error)
            lost.update(error.fragments)
    if unreadable:
        raise all_unreadable(unreadable)
    return sums.now()


def _renew_inputs(inputs: Sequence[PreparedBackfill], control: JobControl) -> Reading | None:
    """Compute inputs of rows that others have added or changed while the job ran.

    Returns the version that was then read, on which all of them are right: on a later one there may
    be new rows without inputs. None: there is no such version, as others are faster.
    """
    from geneva.execution.backfill.driver import run_backfill

    for _ in range(_RENEWALS * len(inputs)):
        dataset = open_dataset(inputs[0].ref)
        reading = dataset, read_snapshot(dataset, inputs[0].ref)
        steps = (planned.again(frozenset(), at=reading) for planned in inputs)
        stale = next((step for step in steps if step.plan.rows_to_compute), None)
        if stale is None:
            return reading
        run_backfill(stale, replace(control, listeners=()))
    return None

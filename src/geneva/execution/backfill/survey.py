"""A survey of a table before a plan is made: what is known of each fragment that may need work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from geneva.errors import UnreadableFragmentsError
from geneva.execution.backfill.scope import Scope
from geneva.execution.backfill.validity_checks import Unreadable, read_validity
from geneva.execution.runner import Runner
from geneva.model.rows import RowSet
from geneva.model.tables import Reason, Unproven
from geneva.planning.backfill import FragmentState, OutputState, after_inputs_changed
from geneva.storage.columns.provenance import output_file, read_provenance
from geneva.storage.columns.validity import Validity, ValueState, joint_validity
from geneva.storage.lance.damage import damage_reason
from geneva.storage.lance.dataset import (
    FragmentFacts,
    open_dataset,
    read_live_rows,
    read_snapshot,
)
from geneva.storage.lance.matching_rows import read_matching_rows

ChangedInputs: TypeAlias = Callable[[FragmentFacts], RowSet | None]
"""Which rows of a fragment get another input before the plan is run; None: no row does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found in a table."""

    states: tuple[FragmentState, ...]
    """The fragments that may need work."""
    validity: dict[int, Validity]
    """What is right in each fragment that is not left out: rows of which every output is."""
    overtaken: frozenset[int]
    """Fragments of an older version that can't be filled: rewritten, or computed since."""
    compute_unproven: bool
    """Whether values from before receipts are computed again."""
    unreadable: dict[int, str]
    """Fragments that can't be read, and why."""


def take_survey(
    scope: Scope,
    changed_inputs: ChangedInputs | None = None,
    make_runner: Callable[[], Runner] | None = None,
) -> Survey:
    """Look at all fragments; `make_runner` makes what checks receipts, where it is much."""
    done, overtaken = _done_by_job(scope), _overtaken(scope)
    fragments = _asked_for(scope, without=done | overtaken)
    checked = read_validity(scope, fragments, make_runner)
    unreadable = {i: found.reason for i, found in checked.items() if isinstance(found, Unreadable)}
    outputs = {i: found for i, found in checked.items() if not isinstance(found, Unreadable)}
    validity = {i: joint_validity(found) for i, found in outputs.items()}
    fragments = [f for f in fragments if f.id not in unreadable]
    compute_unproven = _computes_unproven(scope, outputs)
    candidates = [
        f for f in fragments if changed_inputs is not None or _needs_work(scope, outputs[f.id])
    ]
    selected = None
    if scope.request.options.where is not None and (candidates or not done):
        # Also where there is no row to select: a wrong clause is refused on any table.
        selected, damaged = _selected(scope, candidates, scope.request.options.where)
        unreadable |= damaged
        candidates = [f for f in candidates if f.id not in damaged]
    states = _states(scope, candidates, outputs, selected, compute_unproven=compute_unproven)
    if changed_inputs is not None:
        states = [_after_changes(s, scope, outputs, changed_inputs) for s in states]
    return Survey(
        states=tuple(states),
        validity=validity,
        overtaken=overtaken,
        compute_unproven=compute_unproven,
        unreadable=unreadable,
    )


def _selected(
    scope: Scope, candidates: Sequence[FragmentFacts], where: str
) -> tuple[dict[int, RowSet], dict[int, str]]:
    """The rows that a clause selects, and the fragments in which that can't be read."""
    try:
        return read_matching_rows(scope.dataset, candidates, where), {}
    except UnreadableFragmentsError as error:
        damaged = dict.fromkeys(error.fragments, damage_reason(error.__cause__ or error))
    readable = [fragment for fragment in candidates if fragment.id not in damaged]
    return read_matching_rows(scope.dataset, readable, where), damaged


def _done_by_job(scope: Scope) -> frozenset[int]:
    """Fragments in which this job has computed what was asked for."""
    if not (scope.request.selects_rows or asks_for_failed(scope)):
        return frozenset()
    return frozenset(f.id for f in scope.snapshot.fragments if _is_of_job(scope, f))


def _is_of_job(scope: Scope, fragment: FragmentFacts) -> bool:
    """Whether the values of a fragment are of this very job."""
    return output_file(scope.computation, fragment) in scope.files_of_job


def asks_for_failed(scope: Scope) -> bool:
    """Whether just the rows that failed are asked for; a refresh of a view does the rest, too."""
    return scope.request.options.retry_failed and scope.computation.source is None


def _forgets_failed(scope: Scope, fragment: FragmentFacts) -> bool:
    """Whether rows that failed count as never computed: once in a job, or it would not end."""
    asked = scope.request.options.retry_failed and scope.computation.source is not None
    return asked and not _is_of_job(scope, fragment)


def _done_by_followed(scope: Scope, fragment: FragmentFacts, found: Validity) -> RowSet:
    """Rows that a job of the same work has computed while this one waited, and that are right.

    Just these: by now a clause may select others, too.
    """
    path = output_file(scope.computation, fragment)
    if path is not None and scope.request.selects_rows and path in scope.request.done_files:
        provenance = read_provenance(scope.ref, path)
        if provenance is not None:
            return provenance.made.intersect(found.right)
    return RowSet.empty(fragment.physical_rows)


def _overtaken(scope: Scope) -> frozenset[int]:
    """Fragments of an older version that can't be filled: rewritten, or computed since."""
    if scope.request.options.read_version is None:
        return frozenset()
    now = {f.id: f for f in read_snapshot(open_dataset(scope.ref), scope.ref).fragments}
    fields = scope.computation.output_ids
    return frozenset(
        f.id
        for f in scope.snapshot.fragments
        if f.id not in now
        or now[f.id].physical_rows != f.physical_rows
        or now[f.id].files_of(fields) != f.files_of(fields)
    )


def _asked_for(scope: Scope, *, without: frozenset[int]) -> list[FragmentFacts]:
    """The fragments that the request is about."""
    chosen = scope.request.only_fragments
    return [
        f
        for f in scope.snapshot.fragments
        if f.live_rows and f.id not in without and (chosen is None or f.id in chosen)
    ]


def _needs_work(scope: Scope, outputs: Sequence[Validity]) -> bool:
    """Whether a fragment may have rows to compute, or values that need a receipt."""
    return scope.request.selects_rows or any(
        not found.right.is_full or bool(found.without_receipt) for found in outputs
    )


def _computes_unproven(scope: Scope, validity: Mapping[int, Sequence[Validity]]) -> bool:
    """Whether values from before receipts are computed again.

    Where nobody said, they are kept, unless something shows that values of the column may be
    stale: it had another function before, or an input of one of its values has changed.
    """
    if scope.request.options.unproven is not None:
        return scope.request.options.unproven is Unproven.COMPUTE
    if scope.computation.source is not None:
        # Of a view nobody writes values: what is not proven may be of other source rows.
        return True
    stale = (Reason.INPUT_CHANGED, Reason.UDF_CHANGED)
    return bool(scope.computation.former_versions) or any(
        v.reason in stale for outputs in validity.values() for v in outputs
    )


def _states(
    scope: Scope,
    candidates: Sequence[FragmentFacts],
    validity: Mapping[int, Sequence[Validity]],
    selected: Mapping[int, RowSet] | None,
    *,
    compute_unproven: bool,
) -> list[FragmentState]:
    """What the planner has to know of each candidate."""
    live = read_live_rows(scope.dataset, candidates)
    facets = scope.computation.facets
    states = []
    for fragment in candidates:
        outputs = validity[fragment.id]
        asked = None
        if selected is not None:
            done = _done_by_followed(scope, fragment, joint_validity(outputs))
            asked = selected[fragment.id].minus(done)
        states.append(
            FragmentState(
                fragment_id=fragment.id,
                physical_rows=fragment.physical_rows,
                live=live[fragment.id],
                outputs=tuple(
                    _output_state(
                        found,
                        live[fragment.id],
                        has_output=scope.has_values(facet, fragment),
                        forgets_failed=_forgets_failed(scope, fragment),
                        compute_unproven=compute_unproven,
                    )
                    for facet, found in zip(facets, outputs, strict=True)
                ),
                selected=asked,
                only_stale=scope.request.only_stale,
                retry_failed=asks_for_failed(scope),
            )
        )
    return states


def _output_state(
    found: Validity,
    live: RowSet,
    *,
    has_output: bool,
    forgets_failed: bool,
    compute_unproven: bool,
) -> OutputState:
    adopt = found.supplied.union(found.without_receipt)
    stale = found.stale.union(found.failed_before)
    if compute_unproven:
        stale = stale.union(found.unproven)
    only_unproven = compute_unproven and found.unproven and not found.right
    retried = found.failed if forgets_failed else None
    reason = Reason.UNPROVEN if only_unproven else found.reason
    if retried and not live.minus(found.right).minus(retried):
        reason = Reason.FAILED
    return OutputState(
        valid=found.right,
        reason=reason,
        has_output=has_output,
        adopt=adopt if compute_unproven else adopt.union(found.unproven),
        failed=found.failed.minus(retried) if retried else found.failed,
        stale=stale or None,
        failed_before=found.failed_before or None,
        left_out=found.rows_in(ValueState.UNREADABLE) or None,
    )


def _after_changes(
    state: FragmentState,
    scope: Scope,
    validity: Mapping[int, Sequence[Validity]],
    changed_inputs: ChangedInputs,
) -> FragmentState:
    """The state once inputs were computed anew."""
    changed = changed_inputs(scope.facts[state.fragment_id])
    if not changed:
        return state
    supplied = [found.supplied for found in validity[state.fragment_id]]
    return after_inputs_changed(state, changed, supplied)

"""Results that are computed and not published: what of them a plan can use.

Staged files and checkpoint ranges of the very same work are taken as they are. All other results of
the computation are looked up row by row, by their receipts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from geneva.execution.backfill.scope import Scope
from geneva.model.computation import Computation
from geneva.model.digests import Digests
from geneva.model.rows import Offsets, RowSet
from geneva.planning.backfill import Action, FragmentPlan, FragmentState, plan_fragment
from geneva.storage.checkpoints.reuse import (
    ResultIndex,
    Reuse,
    committed_receipts,
    committed_results,
    read_results,
    reused_rows,
)
from geneva.storage.checkpoints.staging import Place, StoredWork, open_checkpoints
from geneva.storage.checkpoints.store import (
    CheckpointKey,
    is_of_clause,
    is_of_computation,
    without_names,
    work_of,
)
from geneva.storage.columns.provenance import output_file, read_provenance
from geneva.storage.columns.staged_files import StagedFile, staged_file_is_whole
from geneva.storage.columns.validity import Validity
from geneva.storage.lance.dataset import read_live_rows

_LOG = logging.getLogger("geneva")

Keys: TypeAlias = Mapping[Place, Sequence[CheckpointKey]]
"""What is in the checkpoint store, by prefix and fragment."""
Choose: TypeAlias = Callable[[list[Reuse], Offsets, Digests], list[Reuse]]
"""Which of the results are taken that were found for some rows, given the rows' digests."""


@dataclass(frozen=True, slots=True)
class Unpublished:
    """The states of some fragments, and the results that are there for them."""

    states: tuple[FragmentState, ...]
    staged: dict[int, StagedFile] = field(default_factory=dict)
    """Files that are to be committed as they are, by fragment."""
    reuse: dict[int, tuple[Reuse, ...]] = field(default_factory=dict)
    """Results that are taken over row by row, by fragment."""


def written_fields(computation: Computation, plan: FragmentPlan) -> tuple[int, ...]:
    """The fields of a fragment's new data file: of receipts alone, where no value is new."""
    facets = [computation.facets[output.place] for output in plan.outputs]
    values = [] if plan.action is Action.ADOPT else [i for f in facets for i in f.output_ids]
    return (*values, *(i for f in facets for r in f.receipts for i in r.field_ids))


def find_unpublished(
    scope: Scope,
    states: Sequence[FragmentState],
    prefixes: Mapping[int, str],
    validity: Mapping[int, Validity],
    stored: StoredWork,
) -> Unpublished:
    """Look up what is `stored` for these fragments; `validity` says what the table itself has."""
    keys = stored.keys
    found, used = _same_work(scope, states, prefixes, stored)
    _log_mismatches(scope, prefixes, keys)
    results = _results_of_others(scope, keys, used)
    kept = _results_of_kept_versions(scope, keys)
    if len(results) or len(kept):
        # Where somebody wrote NULL over a result, it is asked for anew: that one was given out.
        given = {fragment_id: found.published for fragment_id, found in validity.items()}
        receipts = committed_receipts(scope.dataset, scope.computation, _known(scope, given))
        results.drop(receipts, scope.files_of_job)
        kept.drop(receipts, scope.files_of_job)
        found = _look_up(scope, found, results)
        for version in scope.computation.kept_versions:
            found = _look_up(scope, found, kept, version=version)
    if _shares_results(scope):
        right = {fragment_id: found.right for fragment_id, found in validity.items()}
        table = committed_results(scope.dataset, scope.computation, _known(scope, right))
        found = _look_up(scope, found, table, partial(_of_equal_inputs, scope))
    return found


def _same_work(
    scope: Scope, states: Sequence[FragmentState], prefixes: Mapping[int, str], stored: StoredWork
) -> tuple[Unpublished, set[CheckpointKey]]:
    """Staged files and checkpoints of the very same work, and the keys that were used."""
    if scope.request.asks_for_rows:
        # A clause may select other rows by now: then results are looked up row by row.
        return Unpublished(tuple(states)), set()
    # A file is committed by its field ids, so that names don't matter: columns may be called
    # otherwise by now. A checkpoint is read under the present ones, or else looked up by receipt.
    files = {
        (without_names(prefix), i): ((prefix, i), f) for (prefix, i), f in stored.staged.items()
    }
    staged: dict[int, StagedFile] = {}
    found: list[FragmentState] = []
    used: set[CheckpointKey] = set()
    for state in states:
        prefix, fragment_id = prefixes[state.fragment_id], state.fragment_id
        own = stored.keys.get((prefix, fragment_id), ())
        ranges = [key for key in own if key.rows is not None]
        used.update(ranges)
        place, file = files.get((without_names(prefix), fragment_id), (None, None))
        if place is not None and file is not None and _still_fits(scope, file, state):
            staged[fragment_id] = file
            used.add(CheckpointKey(*place))
        checkpointed = tuple(key.rows for key in ranges if key.rows is not None)
        found.append(replace(state, checkpointed=checkpointed, staged=fragment_id in staged))
    return Unpublished(tuple(found), staged), used


def _log_mismatches(scope: Scope, prefixes: Mapping[int, str], keys: Keys) -> None:
    """Say which checkpoints of these fragments are of other data files than the fragments have."""
    wanted = {fragment_id: work_of(prefix) for fragment_id, prefix in prefixes.items()}
    computation = scope.computation
    others = [
        key
        for (prefix, fragment_id), found in keys.items()
        if is_of_computation(prefix, computation.id, computation.version)
        and work_of(prefix) != wanted.get(fragment_id)
        for key in found
    ]
    if others:
        _LOG.info(
            "Checkpoint data files mismatch: %d checkpoints of column %r of table %r are of other "
            "data files than the table has now, in fragments %s. Their rows are looked up by "
            "their receipts.",
            *(len(others), scope.computation.name, scope.ref.name),
            sorted({key.fragment_id for key in others})[:10],
        )


def _still_fits(scope: Scope, file: StagedFile, state: FragmentState) -> bool:
    """Whether a staged file is of this column, and of these rows; the rest is in its key.

    Rows come back when an old version is restored, and a clause may select others by now.
    """
    plan = plan_fragment(state)
    if (
        file.column_uuid != scope.computation.id
        or file.physical_rows != state.physical_rows
        or file.base != output_file(scope.computation, scope.facts[state.fragment_id])
        or file.field_ids != written_fields(scope.computation, plan)
        or not staged_file_is_whole(scope.ref, file)
    ):
        return False
    provenance = read_provenance(scope.ref, file.path)
    if provenance is None or (state.retry_failed and provenance.failed):
        return False
    known = provenance.valid.union(provenance.failed) if provenance.failed else provenance.valid
    wanted = plan.valid_after
    if plan.failed_after is not None:
        wanted = wanted.union(plan.failed_after)
    return known.intersect(state.live) == wanted


def _results_of_others(scope: Scope, keys: Keys, used: set[CheckpointKey]) -> ResultIndex:
    """All other results of the computation, of whatever fragment, and of columns of any name.

    Those of a clause are for the rows that were asked for by it; where none is given, any will do.
    """
    computation, request = scope.computation, scope.request
    others = (
        key
        for (prefix, _), found in keys.items()
        if is_of_computation(prefix, computation.id, computation.version)
        and (not request.asks_for_rows or is_of_clause(prefix, request.work_where or ""))
        for key in found
    )
    return read_results(
        scope.ref,
        open_checkpoints(scope.ref),
        computation,
        (key for key in others if key not in used),
        _moved_rows(scope),
        with_failed=not request.options.retry_failed,
    )


def _results_of_kept_versions(scope: Scope, keys: Keys) -> ResultIndex:
    """Values that other versions of the function gave, where these count as right.

    Not where rows are asked for: those are to be computed by this version.
    """
    computation = scope.computation
    if scope.request.asks_for_rows:
        return ResultIndex(())
    return read_results(
        scope.ref,
        open_checkpoints(scope.ref),
        computation,
        (
            key
            for (prefix, _), found in keys.items()
            if any(is_of_computation(prefix, computation.id, v) for v in computation.kept_versions)
            for key in found
        ),
        {},
        with_failed=False,
    )


def _moved_rows(scope: Scope) -> dict[str, RowSet | None]:
    """Rows in files that this job committed which are elsewhere by now; None: all of them.

    Rows that moved out of a fragment while it was computed: their values are in its file, but
    not where the rows are. A compaction takes values along; they are asked for again only
    where a clause selects them.
    """
    present = {
        path: fragment
        for fragment in scope.snapshot.fragments
        for path in (output_file(scope.computation, fragment) or "").split("\n")
    }
    ours = {path: present.get(path) for path in scope.files_of_job}
    live = read_live_rows(scope.dataset, [f for f in ours.values() if f and f.deleted_rows])
    moved: dict[str, RowSet | None] = {}
    for path, fragment in ours.items():
        if fragment is None:
            if scope.request.selects_rows:
                moved[path] = None
        elif fragment.deleted_rows:
            moved[path] = RowSet.full(fragment.physical_rows).minus(live[fragment.id])
    return moved


def _known(scope: Scope, rows: Mapping[int, RowSet]) -> dict[int, RowSet]:
    """Some rows of each fragment whose receipts are not gone, deleted rows left out."""
    facts = [f for f in scope.snapshot.fragments if rows.get(f.id) and scope.can_read_receipts(f)]
    live = read_live_rows(scope.dataset, facts)
    return {f.id: rows[f.id].intersect(live[f.id]) for f in facts}


def _shares_results(scope: Scope) -> bool:
    """Whether a right value of the table serves other rows with the same inputs."""
    computation = scope.computation
    return computation.memoizes and bool(computation.receipts) and not scope.request.selects_rows


def _look_up(
    scope: Scope,
    found: Unpublished,
    results: ResultIndex,
    choose: Choose | None = None,
    *,
    version: str | None = None,
) -> Unpublished:
    """Add results by the digests of their inputs, for rows that nothing is there for yet.

    `version`: of the function that gave them, if not of this one.
    """
    states, reuse = list(found.states), dict(found.reuse)
    for i, state in enumerate(states):
        rows = _without_result(plan_fragment(state))
        if not len(results) or not len(rows):
            continue
        digests = scope.readers[0].input_digests(scope.facts[state.fragment_id], rows, version)
        taken = results.take(rows, digests)
        if choose is not None:
            taken = choose(taken, rows, digests)
        if taken:
            every = (*reuse.get(state.fragment_id, ()), *taken)
            reuse[state.fragment_id] = every
            states[i] = replace(state, reused=reused_rows(every, state.physical_rows))
    return Unpublished(tuple(states), found.staged, reuse)


def _without_result(plan: FragmentPlan) -> Offsets:
    """The rows of a fragment for which the UDF would be called."""
    if plan.action is not Action.COMPUTE:
        return RowSet.empty(plan.physical_rows).offsets()
    return plan.to_run.minus(RowSet.from_ranges(plan.physical_rows, plan.covered)).offsets()


def _of_equal_inputs(
    scope: Scope, found: list[Reuse], rows: Offsets, digests: Digests
) -> list[Reuse]:
    """Those whose inputs have the same digest as a whole: 47 bits are few for a whole table."""
    kept = []
    for reuse in found:
        assert reuse.fragment_id is not None
        sources, back = np.unique(reuse.source, return_inverse=True)
        there = scope.readers[0].input_digests(scope.facts[reuse.fragment_id], sources)[back]
        same = there == digests[np.searchsorted(rows, reuse.target)]
        if same.any():
            kept.append(replace(reuse, source=reuse.source[same], target=reuse.target[same]))
    return kept

"""Results that are computed and not published: what of them a plan can use.

Staged files and checkpoint ranges of the very same work are taken as they are. All other results of
the computation are looked up row by row, by their receipts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from geneva.execution.backfill.request import BackfillRequest
from geneva.model.computation import Computation
from geneva.model.digests import Digests
from geneva.model.rows import Offsets, RowSet
from geneva.model.tables import TableRef
from geneva.planning.backfill import Action, FragmentPlan, FragmentState, plan_fragment
from geneva.storage.checkpoints.reuse import (
    Reuse,
    committed_receipts,
    committed_results,
    read_results,
    reused_rows,
)
from geneva.storage.checkpoints.staging import open_checkpoints, read_staged
from geneva.storage.checkpoints.store import CheckpointKey, WorkIdentity, head_of, index_keys
from geneva.storage.columns.provenance import read_provenance
from geneva.storage.columns.staged_files import StagedFile
from geneva.storage.columns.validity import Validity, ValidityReader, output_file, signature_of
from geneva.storage.lance.dataset import (
    Dataset,
    FragmentFacts,
    TableSnapshot,
    read_live_rows,
)


def work_identity(
    computation: Computation, request: BackfillRequest, ref: TableRef, fragment: FragmentFacts
) -> WorkIdentity:
    """What the work on a fragment is.

    The file of its present values is a source too: so that a clause that is run again after its
    result was committed is new work, and one that is run again after a crash isn't. The column's
    UUID is one as well: a column that was dropped and added again is another one. And so is which
    rows are deleted: they come back when an old version is restored.
    """
    base = output_file(computation, fragment)
    return WorkIdentity(
        udf_name=computation.program_name,
        udf_version=computation.version,
        column=computation.name,
        where=request.work_where or "",
        uri=ref.uri,
        source_files=(
            *signature_of(computation, fragment),
            *((base,) if base else ()),
            f"deleted:{fragment.deletions}",
            f"column:{computation.id}",
        ),
    )


def written_fields(computation: Computation, plan: FragmentPlan) -> tuple[int, ...]:
    """The fields of a fragment's new data file: of receipts alone, where no value is new."""
    if plan.action is Action.ADOPT:
        assert computation.receipt is not None
        return computation.receipt.field_ids
    return computation.written_ids


@dataclass(frozen=True, slots=True)
class UnpublishedWork:
    """A look at what is there, for one version of a table."""

    request: BackfillRequest
    dataset: Dataset
    snapshot: TableSnapshot
    computation: Computation
    reader: ValidityReader
    files_of_job: frozenset[str]
    """Data files that this very job has made, committed or not: their results are its own."""

    def found_for(
        self,
        states: list[FragmentState],
        prefixes: dict[int, str],
        right: Mapping[int, RowSet],
    ) -> tuple[list[FragmentState], dict[int, StagedFile], dict[int, tuple[Reuse, ...]]]:
        """Add what earlier runs left behind: staged files, checkpoints, and results by receipt."""
        ref = self.snapshot.ref
        store = open_checkpoints(ref)
        index = index_keys(store.list_keys("udf-"))
        facts = {f.id: f for f in self.snapshot.fragments}
        staged: dict[int, StagedFile] = {}
        found: list[FragmentState] = []
        used: set[CheckpointKey] = set()
        # A clause may select other rows by now: then results are looked up row by row.
        by_range = not (self.request.selects_rows or self.request.options.retry_failed)
        for state in states:
            prefix, fragment_id = prefixes[state.fragment_id], state.fragment_id
            keys = index.get((prefix, fragment_id), []) if by_range else []
            used.update(key for key in keys if key.rows is not None)
            whole = CheckpointKey(prefix, fragment_id)
            if whole in keys:
                file = read_staged(store, ref, prefix, fragment_id)
                if file is not None and self._still_fits(file, state, facts[fragment_id]):
                    staged[fragment_id] = file
                    used.add(whole)
            found.append(
                replace(
                    state,
                    checkpointed=tuple(key.rows for key in keys if key.rows is not None),
                    staged=fragment_id in staged,
                )
            )
        heads = {head_of(prefix) for prefix in prefixes.values()}
        others = (k for keys in index.values() for k in keys if head_of(k.prefix) in heads)
        results = read_results(
            ref,
            store,
            self.computation,
            (key for key in others if key not in used),
            self._own_rows(),
            with_failed=not self.request.options.retry_failed,
        )
        if len(results):
            committed = self._live_right(right)
            receipts = committed_receipts(self.dataset, self.computation, committed)
            results.drop(receipts, self.files_of_job)
        reuse: dict[int, tuple[Reuse, ...]] = {}
        for i, state in enumerate(found):
            if not len(results):
                break
            plan = plan_fragment(state)
            covered = RowSet.from_ranges(state.physical_rows, plan.covered)
            rows = plan.compute.minus(covered).offsets()
            if plan.action is not Action.COMPUTE or not len(rows):
                continue
            digests = self.reader.input_digests(facts[state.fragment_id], rows)
            taken = tuple(results.take(rows, digests))
            if taken:
                reuse[state.fragment_id] = taken
                found[i] = replace(state, reused=reused_rows(taken, state.physical_rows))
        return found, staged, reuse

    def _live_right(self, right: Mapping[int, RowSet]) -> dict[int, RowSet]:
        """The rows that have a right value, deleted ones left out."""
        facts = [f for f in self.snapshot.fragments if right.get(f.id)]
        live = read_live_rows(self.dataset, facts)
        return {f.id: right[f.id].intersect(live[f.id]) for f in facts}

    def shares_results(self) -> bool:
        """Whether a right value of the table serves other rows with the same inputs."""
        computation = self.computation
        return (
            computation.memoizes
            and computation.receipt is not None
            and not self.request.selects_rows
        )

    def shared_for(
        self,
        states: list[FragmentState],
        validity: dict[int, Validity],
        reuse: dict[int, tuple[Reuse, ...]],
    ) -> tuple[list[FragmentState], dict[int, tuple[Reuse, ...]]]:
        """Add what the table has for equal inputs, for a function that says that this is right."""
        right = {fragment: found.right for fragment, found in validity.items()}
        results = committed_results(self.dataset, self.computation, self._live_right(right))
        facts = {f.id: f for f in self.snapshot.fragments}
        found: list[FragmentState] = []
        for state in states:
            plan = plan_fragment(state)
            covered = RowSet.from_ranges(state.physical_rows, plan.covered)
            rows = plan.to_run.minus(covered).offsets()
            if plan.action is Action.COMPUTE and len(rows) and len(results):
                digests = self.reader.input_digests(facts[state.fragment_id], rows)
                shared = self._of_equal_inputs(results.take(rows, digests), rows, digests)
                taken = (*reuse.get(state.fragment_id, ()), *shared)
                reuse = {**reuse, state.fragment_id: taken}
                state = replace(state, reused=reused_rows(taken, state.physical_rows))
            found.append(state)
        return found, reuse

    def _of_equal_inputs(self, found: list[Reuse], rows: Offsets, digests: Digests) -> list[Reuse]:
        """Those whose inputs have the same digest as a whole: 47 bits are few for a whole table."""
        facts = {f.id: f for f in self.snapshot.fragments}
        kept = []
        for reuse in found:
            assert reuse.fragment_id is not None
            sources, back = np.unique(reuse.source, return_inverse=True)
            there = self.reader.input_digests(facts[reuse.fragment_id], sources)[back]
            same = there == digests[np.searchsorted(rows, reuse.target)]
            if same.any():
                kept.append(replace(reuse, source=reuse.source[same], target=reuse.target[same]))
        return kept

    def _own_rows(self) -> dict[str, RowSet | None]:
        """Rows in files that this job committed which are elsewhere by now.

        Rows that moved out of a fragment while it was computed: their values are in its file, but
        not where the rows are. A compaction takes values along; they are asked for again only
        where a clause selects them.
        """
        present = {output_file(self.computation, f): f for f in self.snapshot.fragments}
        thinned = [
            present[p] for p in self.files_of_job if p in present and present[p].deleted_rows
        ]
        live = read_live_rows(self.dataset, thinned)
        own: dict[str, RowSet | None] = {}
        for path in self.files_of_job:
            fragment = present.get(path)
            if fragment is None:
                if self.request.selects_rows:
                    own[path] = None
            elif fragment.deleted_rows:
                own[path] = RowSet.full(fragment.physical_rows).minus(live[fragment.id])
        return own

    def _still_fits(self, file: StagedFile, state: FragmentState, fragment: FragmentFacts) -> bool:
        """Whether a staged file is of this column, and of these rows; the rest is in its key.

        Rows come back when an old version is restored, and a clause may select others by now.
        """
        plan = plan_fragment(state)
        if (
            file.column_uuid != self.computation.id
            or file.physical_rows != state.physical_rows
            or file.base != output_file(self.computation, fragment)
            or file.field_ids != written_fields(self.computation, plan)
        ):
            return False
        provenance = read_provenance(self.snapshot.ref, file.path)
        if provenance is None or (state.retry_failed and provenance.failed):
            return False
        known = provenance.valid.union(provenance.failed) if provenance.failed else provenance.valid
        wanted = plan.valid_after
        if plan.failed_after is not None:
            wanted = wanted.union(plan.failed_after)
        return known.intersect(state.live) == wanted

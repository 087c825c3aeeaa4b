"""Gathering the facts for a backfill and joining them with the planner's decisions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from geneva.execution.task import ColumnWork, PartWork
from geneva.model import ColumnDefinition, Reason, Sizes, TableRef
from geneva.on_error import Limits
from geneva.planning.backfill import (
    BackfillPlan,
    FragmentPlan,
    FragmentState,
    choose_fragments,
    plan_fragment,
)
from geneva.planning.ranges import disjoint
from geneva.planning.sizing import Part
from geneva.rows import RowRange, RowSet
from geneva.storage.checkpoints import CheckpointKey, WorkIdentity, index_keys, without_where
from geneva.storage.column_state import ColumnFacts, Committed, read_committed
from geneva.storage.columns import with_present_inputs
from geneva.storage.commit import verified_definition
from geneva.storage.dataset import (
    Dataset,
    FragmentFacts,
    TableSnapshot,
    open_dataset,
    output_field_ids,
    read_live_rows,
    read_matching_rows,
    read_snapshot,
)
from geneva.storage.donors import (
    Donor,
    DonorSearch,
    donated_rows,
    donors_within,
    work_identity,
)
from geneva.storage.fragments import StagedFile, size_of_inputs, window_rows
from geneva.storage.lineage import Verdict
from geneva.storage.provenance import read_provenance
from geneva.storage.source_rows import SourceRows
from geneva.storage.staging import open_checkpoints, read_staged
from geneva.view_definition import SOURCE_ROW_ID


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """What was asked for, after checking."""

    where: str | None = None
    concurrency: int | None = None
    threads: int = 1
    sizes: Sizes = field(default_factory=Sizes)
    commit_granularity: int = 64
    num_frags: int | None = None
    read_version: int | None = None
    flush_seconds: float | None = None
    shuffle_diversity: int | None = None
    timeout_seconds: float | None = None
    retry_failed: bool = False

    @property
    def follows_table(self) -> bool:
        """Whether the job goes on with what others change meanwhile: not when it was bounded."""
        return self.read_version is None and self.num_frags is None

    @property
    def work_where(self) -> str | None:
        """The clause as it identifies the work: to try failed rows again is another work."""
        return f"{self.where or ''}\n(failed rows)" if self.retry_failed else self.where


@dataclass(frozen=True, slots=True)
class PreparedBackfill:
    """A plan with everything that is needed to carry it out."""

    ref: TableRef
    dataset: Dataset
    snapshot: TableSnapshot
    definition: ColumnDefinition
    request: BackfillRequest
    plan: BackfillPlan
    facts: dict[int, FragmentFacts]
    committed: dict[int, Committed]
    prefixes: dict[int, str]
    staged: dict[int, StagedFile]
    """Staged files of earlier runs, for the fragments whose plan is to reuse them."""
    donors: dict[int, tuple[Donor, ...]]
    """Results of rows that moved, per fragment that they moved to."""
    again: Callable[[frozenset[str]], PreparedBackfill]
    """Plans what is left on the latest version, given the files that this job has committed."""
    source: SourceRows | None = None
    """Where the inputs are, when they are in another table."""

    def column_work(self, job_id: str) -> ColumnWork:
        """What every task of the job shares."""
        definition, request = self.definition, self.request
        return ColumnWork(
            job_id=job_id,
            ref=self.ref,
            version=self.snapshot.version,
            column=definition.name,
            column_uuid=definition.uuid,
            field_ids=output_field_ids(self.snapshot, definition),
            udf_name=definition.udf_name,
            udf_version=definition.udf_version,
            udf_digest=definition.udf_digest,
            inputs=definition.inputs,
            nullable=definition.nullable,
            sizes=definition.sizes.overridden_by(request.sizes),
            flush_seconds=request.flush_seconds,
            threads=request.threads,
            outputs=definition.outputs or (definition.name,),
            source=self.source,
            most_failed=Limits.from_json(definition.on_error).most_failed(
                self.plan.rows_to_compute
            ),
        )

    def part_work(self, part: Part) -> PartWork:
        """A planned part as it is shipped."""
        covered = tuple(
            r for r in part.plan.covered if part.rows.start <= r.start and r.end <= part.rows.end
        )
        return self._ship(part.plan, part.rows, covered, whole=part.whole)

    def assembly_work(self, plan: FragmentPlan, covered: Sequence[RowRange]) -> PartWork:
        """Put a fragment together whose ranges are all in the checkpoint store."""
        rows = RowRange(0, plan.physical_rows)
        return self._ship(plan, rows, disjoint(covered, plan.physical_rows), whole=True)

    def _ship(
        self, plan: FragmentPlan, rows: RowRange, covered: tuple[RowRange, ...], *, whole: bool
    ) -> PartWork:
        committed = self.committed[plan.fragment_id]
        outputs = self.definition.outputs or (self.definition.name,)
        inputs = self.definition.inputs if self.source is None else (SOURCE_ROW_ID,)
        paths = (*inputs, *(outputs if plan.keeps_old else ()))
        field_ids = [i for path in paths for i in self.snapshot.field_ids[path]]
        sizes = size_of_inputs(self.facts[plan.fragment_id], field_ids)
        return PartWork(
            fragment_id=plan.fragment_id,
            physical_rows=plan.physical_rows,
            rows=rows,
            whole=whole,
            compute=plan.compute.slice(rows),
            valid_after=plan.valid_after if whole else None,
            complete=plan.complete,
            keeps_old=plan.keeps_old,
            covered=covered,
            prefix=self.prefixes[plan.fragment_id],
            inputs=committed.inputs,
            base=committed.output_file,
            donors=donors_within(self.donors.get(plan.fragment_id, ()), rows),
            window=window_rows(self.snapshot.schema, paths, sizes, plan.physical_rows),
            failed_after=plan.failed_after if whole else None,
        )


def prepare_backfill(
    ref: TableRef,
    dataset: Dataset,
    definition: ColumnDefinition,
    request: BackfillRequest,
    *,
    committed_by_job: frozenset[str] = frozenset(),
) -> PreparedBackfill:
    """Look at the table and decide what to do. Reads only; runs no user code.

    `committed_by_job` are data files that this very job committed in an earlier round: the rows
    that an explicit where clause asked for are done there.
    """
    snapshot = read_snapshot(dataset, ref)
    facts = read_committed(dataset, snapshot, definition)
    committed = facts.committed
    done_here = {i for i, c in committed.items() if c.output_file in committed_by_job}
    overtaken = _overtaken(ref, snapshot, definition, request)
    candidates = _candidates(snapshot, committed, request, done_here | overtaken)
    live = read_live_rows(dataset, candidates)
    selected = None
    if request.where is not None and (candidates or not done_here):
        # Also where there is no row to select: a wrong clause is refused on any table.
        selected = read_matching_rows(dataset, candidates, request.where)
    prefixes = {f.id: _identity(facts, ref, request, f.id).prefix() for f in candidates}
    states = [
        replace(
            _state(
                f, live[f.id], committed[f.id], selected[f.id] if selected is not None else None
            ),
            retry_failed=request.retry_failed,
        )
        for f in candidates
    ]
    plans = [plan_fragment(state) for state in states]
    needed, _ = choose_fragments(plans, request.num_frags)
    notes = _notes(states, committed)
    if overtaken:
        notes += (
            f"{len(overtaken)} fragments of version {snapshot.version} were rewritten or computed "
            "since, and are left out",
        )
    staged: dict[int, StagedFile] = {}
    donors: dict[int, tuple[Donor, ...]] = {}
    if needed:
        chosen = {plan.fragment_id for plan in needed}
        states = [state for state in states if state.fragment_id in chosen]
        search = unpublished_search(ref, facts, request.work_where, committed_by_job)
        fragments = {f.id: f for f in candidates}
        states, staged, donors = with_unpublished(search, facts, fragments, states, prefixes)
        needed, _ = choose_fragments(map(plan_fragment, states), None)
    plan = BackfillPlan(
        table=ref.name,
        version=snapshot.version,
        column=definition.name,
        udf_name=definition.udf_name,
        udf_version=definition.udf_version,
        where=request.where,
        fragments=_ordered(needed, request.shuffle_diversity),
        skipped_fragments=len(snapshot.fragments) - len(needed),
        total_rows=sum(f.live_rows for f in snapshot.fragments),
        notes=notes,
    )
    return PreparedBackfill(
        ref=ref,
        dataset=dataset,
        snapshot=snapshot,
        definition=definition,
        request=request,
        plan=plan,
        facts={f.id: f for f in candidates},
        committed=committed,
        prefixes=prefixes,
        staged=staged,
        donors=donors,
        again=partial(_prepare_again, ref, definition, request),
    )


def _prepare_again(
    ref: TableRef,
    definition: ColumnDefinition,
    request: BackfillRequest,
    committed_by_job: frozenset[str],
) -> PreparedBackfill:
    dataset = open_dataset(ref)
    verified = verified_definition(dataset.schema, ref, definition)
    present = with_present_inputs(verified, dataset)
    return prepare_backfill(ref, dataset, present, request, committed_by_job=committed_by_job)


def _candidates(
    snapshot: TableSnapshot,
    committed: dict[int, Committed],
    request: BackfillRequest,
    left_out: set[int],
) -> list[FragmentFacts]:
    """The fragments that may need something; the rest is up to date by the manifest alone."""
    if request.where is not None:
        return [f for f in snapshot.fragments if f.id not in left_out and f.live_rows]
    return [
        f
        for f in snapshot.fragments
        if f.id not in left_out and not committed[f.id].valid.is_full and f.live_rows
    ]


def _overtaken(
    ref: TableRef,
    snapshot: TableSnapshot,
    definition: ColumnDefinition,
    request: BackfillRequest,
) -> set[int]:
    """Fragments of an older version that results can't go to: rewritten, or computed since."""
    if request.read_version is None:
        return set()
    now = {f.id: f for f in read_snapshot(open_dataset(ref), ref).fragments}
    fields = output_field_ids(snapshot, definition)
    return {
        f.id
        for f in snapshot.fragments
        if f.id not in now
        or now[f.id].physical_rows != f.physical_rows
        or now[f.id].files_of(fields) != f.files_of(fields)
    }


def _state(
    fragment: FragmentFacts, live: RowSet, committed: Committed, selected: RowSet | None
) -> FragmentState:
    return FragmentState(
        fragment_id=fragment.id,
        physical_rows=fragment.physical_rows,
        live=live,
        valid=committed.valid,
        reason=committed.reason,
        has_output=committed.output_file is not None,
        selected=selected,
        failed=committed.failed,
    )


def _identity(
    facts: ColumnFacts, ref: TableRef, request: BackfillRequest, fragment_id: int
) -> WorkIdentity:
    committed = facts.committed[fragment_id]
    return work_identity(
        ref,
        facts.column.definition,
        request.work_where,
        Verdict(committed.valid, committed.reason),
        committed.inputs,
        committed.output_file,
    )


def _notes(states: list[FragmentState], committed: dict[int, Committed]) -> tuple[str, ...]:
    """What somebody who reads the plan should know."""
    notes: list[str] = []
    stale = sum(
        state.live.minus(state.valid).minus(state.selected).count
        for state in states
        if state.selected is not None and state.reason in (Reason.UDF_CHANGED, Reason.INPUT_CHANGED)
    )
    if stale:
        notes.append(
            f"{stale:,} rows outside the where clause are stale (their UDF or an input changed) "
            'and stay so; leave the clause out to compute them too, or use where="1=1" for all rows'
        )
    waiting = sum(
        state.live.intersect(state.failed).count
        for state in states
        if state.failed is not None and not state.retry_failed and state.selected is None
    )
    if waiting:
        notes.append(
            f"{waiting:,} rows failed before with this UDF and these inputs, and stay NULL; use "
            "retry_failed=True to try them again"
        )
    guessed = sum(not c.certain for c in committed.values())
    if guessed:
        notes.append(
            f"the history of {guessed} fragments is gone: rows with a value count as computed there"
        )
    return tuple(notes)


def unpublished_search(
    ref: TableRef, facts: ColumnFacts, where: str | None, committed_by_job: frozenset[str]
) -> DonorSearch:
    """A search through what the checkpoint store holds of a column."""
    store = open_checkpoints(ref)
    return DonorSearch(
        ref=ref,
        column=facts.column,
        tracer=facts.tracer,
        latest=facts.view,
        store=store,
        index=index_keys(store.list_keys("udf-")),
        where=where,
        own_files=committed_by_job,
    )


def with_unpublished(
    search: DonorSearch,
    facts: ColumnFacts,
    fragments: dict[int, FragmentFacts],
    states: list[FragmentState],
    prefixes: dict[int, str],
) -> tuple[list[FragmentState], dict[int, StagedFile], dict[int, tuple[Donor, ...]]]:
    """Add what earlier runs left behind: staged files, checkpoints, results of rows that moved."""
    staged: dict[int, StagedFile] = {}
    donors: dict[int, tuple[Donor, ...]] = {}
    found: list[FragmentState] = []
    for state in states:
        fragment_id = state.fragment_id
        prefix = prefixes[fragment_id]
        keys = search.index.get((prefix, fragment_id), [])
        if CheckpointKey(prefix, fragment_id) in keys:
            file = read_staged(search.store, search.ref, prefix, fragment_id)
            if file is not None and _still_fits(file, search.ref, state, facts):
                staged[fragment_id] = file
        if fragment_id not in staged and (search.index or search.own_files):
            donors[fragment_id] = tuple(search.find(facts.view, fragments[fragment_id]))
        found.append(
            replace(
                state,
                checkpointed=tuple(key.rows for key in keys if key.rows is not None),
                staged=fragment_id in staged,
                donated=donated_rows(donors.get(fragment_id, ()), state.physical_rows),
            )
        )
    return found, staged, donors


def _still_fits(file: StagedFile, ref: TableRef, state: FragmentState, facts: ColumnFacts) -> bool:
    """Whether a staged file is of this column, and of these rows; the rest is in its key.

    Rows come back when an old version is restored, and a clause may select others by now.
    """
    if (
        file.column_uuid != facts.column.definition.uuid
        or file.physical_rows != state.physical_rows
        or file.base != facts.committed[state.fragment_id].output_file
    ):
        return False
    provenance = read_provenance(ref, file.path)
    wanted = plan_fragment(state).valid_after
    if provenance is None or (state.retry_failed and provenance.failed):
        return False
    known = provenance.valid.union(provenance.failed) if provenance.failed else provenance.valid
    failed_before = plan_fragment(state).failed_after
    wanted = wanted.union(failed_before) if failed_before is not None else wanted
    return known.intersect(state.live) == wanted


def _ordered(plans: tuple[FragmentPlan, ...], diversity: int | None) -> tuple[FragmentPlan, ...]:
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


def useful_prefixes(ref: TableRef, dataset: Dataset, definition: ColumnDefinition) -> set[str]:
    """The checkpoint prefixes, without their where part, that a backfill may look for now."""
    snapshot = read_snapshot(dataset, ref)
    facts = read_committed(dataset, snapshot, definition)
    requests = (BackfillRequest(), BackfillRequest(where="any"))
    return {
        without_where(_identity(facts, ref, request, fragment.id).prefix())
        for fragment in snapshot.fragments
        for request in requests
        if request.where is not None or not facts.committed[fragment.id].valid.is_full
    }

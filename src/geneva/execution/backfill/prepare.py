"""Gathering the facts for a computation and joining them with the planner's decisions.

One way for all: a column of a table, a UDF's column of a view, and what a view carries over. What
differs between them is a `Subject`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.backfill.scope import Scope, bind_scope, work_identity
from geneva.execution.backfill.subjects import Subject
from geneva.execution.backfill.survey import ChangedInputs, Survey, asks_for_failed, take_survey
from geneva.execution.backfill.unpublished import Unpublished, find_unpublished, written_fields
from geneva.execution.runner import Runner
from geneva.execution.worker.task import ColumnWork, FileWork, PartWork
from geneva.model.computation import Computation, Permit
from geneva.model.rows import RowRange
from geneva.model.tables import ColumnDefinition, Secrets, Sizes, TableRef
from geneva.model.view_query import SOURCE_ROW_ID
from geneva.planning.backfill import (
    Action,
    BackfillPlan,
    FragmentPlan,
    choose_fragments,
    in_mixed_order,
    plan_fragment,
    without_calls,
)
from geneva.planning.notes import (
    assumed_inputs,
    failed_before,
    overtaken_fragments,
    shared_calls,
    stale_outside_clause,
    unproven_rows,
    unreadable_fragments,
    upper_bounds,
)
from geneva.planning.ranges import disjoint
from geneva.planning.sizing import Part
from geneva.storage.checkpoints.reuse import Reuse, reuse_within
from geneva.storage.checkpoints.staging import StoredWork, open_checkpoints, read_work
from geneva.storage.checkpoints.store import is_of_computation, work_of
from geneva.storage.columns.definitions import computation_of, with_present_inputs
from geneva.storage.columns.lost_files import lost_values
from geneva.storage.columns.proofs import readers_of
from geneva.storage.columns.provenance import adoption_signature, output_file, signature_of
from geneva.storage.columns.staged_files import StagedFile
from geneva.storage.lance.dataset import (
    Dataset,
    FragmentFacts,
    TableSnapshot,
    has_later,
    open_dataset,
    planned_anew,
    read_snapshot,
)
from geneva.storage.lance.fragments import size_of_inputs, window_rows
from geneva.udf.policy import Limits

Reading: TypeAlias = tuple[Dataset, TableSnapshot]
"""A version of a table, with the facts of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBackfill:
    """A plan with everything that is needed to carry it out."""

    subject: Subject
    dataset: Dataset
    snapshot: TableSnapshot
    computation: Computation
    request: BackfillRequest
    plan: BackfillPlan
    facts: dict[int, FragmentFacts]
    prefixes: dict[int, str]
    staged: dict[int, StagedFile]
    """Staged files of earlier runs, for the fragments whose plan is to reuse them."""
    reuse: dict[int, tuple[Reuse, ...]]
    """Unpublished results of other runs, per fragment that has rows for them."""
    filled: frozenset[int]
    """The fragments that need something and have values of an output, right or wrong."""
    lost_files: frozenset[str]
    """Data files of the table that are gone."""
    make_runner: Callable[[], Runner] | None = None
    """What checks receipts, where there is much to read; None: this process does."""

    @property
    def ref(self) -> TableRef:
        """The table that is filled."""
        return self.subject.ref

    @property
    def sizes(self) -> Sizes:
        """Sizes of batches, checkpoints and tasks: those of the request, else the UDF's own."""
        return self.computation.sizes.overridden_by(self.request.options.sizes)

    def again(
        self,
        files_of_job: frozenset[str],
        lost_files: frozenset[str] = frozenset(),
        at: Reading | None = None,
    ) -> PreparedBackfill:
        """Plan what is left, given the files that this job has made.

        `lost_files`: those of the table that are gone. `at`: the version to plan on, unless it was
        cleaned up; None: the latest.
        """
        wanted = iter([at])

        def plan() -> PreparedBackfill:
            dataset, snapshot = next(wanted, None) or (None, None)
            return prepare(
                self.subject,
                self.request,
                dataset=dataset,
                snapshot=snapshot,
                files_of_job=files_of_job,
                lost_files=lost_files,
                make_runner=self.make_runner,
            )

        return planned_anew(lambda: [self.ref], plan, overtaken)

    def column_work(
        self,
        job_id: str,
        permit: Permit | None,
        shared_uri: str = "",
        hidden: tuple[Secrets, ...] = (),
    ) -> ColumnWork:
        """What every task of the job shares."""
        computation, request = self.computation, self.request
        limits = Limits.from_json(computation.error_policy)
        return ColumnWork(
            job_id=job_id,
            ref=self.ref,
            version=self.snapshot.version,
            computation=computation,
            sizes=self.sizes,
            flush_seconds=request.options.batch_checkpoint_flush_interval_seconds,
            threads=request.options.intra_applier_concurrency,
            shared_uri=shared_uri,
            max_cost=request.options.max_cost,
            max_failed=limits.max_failed(self.plan.rows_to_compute),
            permit=permit,
            hidden=hidden,
        )

    def without(self, fragment_ids: Collection[int]) -> PreparedBackfill:
        """The same, but for some fragments."""
        kept = tuple(f for f in self.plan.fragments if f.fragment_id not in fragment_ids)
        return replace(self, plan=replace(self.plan, fragments=kept))

    def without_calls(self) -> PreparedBackfill:
        """The same, but only for rows that have a result already: nothing is computed."""
        cut = [
            without_calls(plan, has_output=plan.fragment_id in self.filled)
            for plan in self.plan.fragments
        ]
        kept = tuple(plan for plan in cut if plan is not None)
        return replace(self, plan=replace(self.plan, fragments=kept))

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

    def staged_file(
        self, plan: FragmentPlan, path: str, size_bytes: int | None = None
    ) -> StagedFile:
        """A file that a task has written for a fragment."""
        fragment = self.facts[plan.fragment_id]
        return StagedFile(
            fragment_id=plan.fragment_id,
            path=path,
            physical_rows=plan.physical_rows,
            column_uuid=self.computation.id,
            field_ids=written_fields(self.computation, plan),
            inputs=_signature(self.computation, fragment, plan),
            base=output_file(self.computation, fragment),
            size_bytes=size_bytes,
        )

    def _ship(
        self, plan: FragmentPlan, rows: RowRange, covered: tuple[RowRange, ...], *, whole: bool
    ) -> PartWork:
        computation, fragment = self.computation, self.facts[plan.fragment_id]
        inputs = computation.read_paths if computation.source is None else (SOURCE_ROW_ID,)
        outputs = tuple(output.name for output in computation.outputs)
        reads_old = plan.keeps_old or bool(plan.adopt)
        paths = tuple(dict.fromkeys((*inputs, *(outputs if reads_old else ()))))
        field_ids = [i for path in paths for i in self.snapshot.field_ids[path]]
        sizes = size_of_inputs(fragment, field_ids)
        return PartWork(
            fragment_id=plan.fragment_id,
            physical_rows=plan.physical_rows,
            rows=rows,
            compute=plan.compute.slice(rows),
            covered=covered,
            prefix=self.prefixes[plan.fragment_id],
            window=window_rows(self.snapshot.schema, paths, sizes, plan.physical_rows),
            reuse=reuse_within(self.reuse.get(plan.fragment_id, ()), rows),
            file=self._file_work(plan) if whole else None,
        )

    def _file_work(self, plan: FragmentPlan) -> FileWork:
        computation, fragment = self.computation, self.facts[plan.fragment_id]
        return FileWork(
            valid_after=plan.valid_after,
            failed_after=plan.failed_after,
            outputs=plan.outputs,
            complete=plan.complete,
            keeps_old=plan.keeps_old,
            receipts_only=plan.action is Action.ADOPT,
            field_ids=written_fields(computation, plan),
            inputs=_signature(computation, fragment, plan),
            base=output_file(computation, fragment),
            lost=tuple(
                written.name
                for written in computation.written
                for file in fragment.files_of(written.field_ids)
                if file.path in self.lost_files
            ),
        )


def overtaken(step: PreparedBackfill) -> tuple[tuple[int, str], ...]:
    """The fragments that a plan leaves out, if others may have cleaned them up."""
    found = step.plan.unreadable
    return found if found and has_later(step.ref, step.plan.version) else ()


def _signature(
    computation: Computation, fragment: FragmentFacts, plan: FragmentPlan
) -> tuple[str, ...]:
    if plan.action is not Action.ADOPT:
        return signature_of(computation, fragment)
    facets = [computation.facets[output.place] for output in plan.outputs]
    fields = [i for facet in facets for i in facet.output_ids]
    return adoption_signature(computation, fragment, fields)


def prepare(
    subject: Subject,
    request: BackfillRequest,
    *,
    dataset: Dataset | None = None,
    snapshot: TableSnapshot | None = None,
    files_of_job: frozenset[str] = frozenset(),
    lost_files: frozenset[str] = frozenset(),
    upstream: ChangedInputs | None = None,
    make_runner: Callable[[], Runner] | None = None,
    stored: Callable[[], StoredWork] | None = None,
) -> PreparedBackfill:
    """Look at the table and decide what to do. Reads only; runs no user code.

    `snapshot` is what `dataset` will be when the plan runs; None: what it is.
    `files_of_job` are data files that this very job made in earlier rounds, committed or not: the
    rows that an explicit where clause asked for are done there. `lost_files` are data files of the
    table that are known to be gone. `upstream` says which rows of a
    fragment get another input before this is run. `make_runner` makes what checks receipts, where
    there is much to read. `stored` tells what is in the checkpoint store; asked where it matters.
    """
    dataset = open_dataset(subject.ref) if dataset is None else dataset
    snapshot = read_snapshot(dataset, subject.ref) if snapshot is None else snapshot
    scope = bind_scope(subject, request, dataset, snapshot, files_of_job, lost_files)
    survey = take_survey(scope, upstream, make_runner)
    facts = {state.fragment_id: scope.facts[state.fragment_id] for state in survey.states}
    prefixes = {fragment_id: scope.prefix(fragment) for fragment_id, fragment in facts.items()}
    needed = choose_fragments(map(plan_fragment, survey.states), request.options.num_frags)
    found = Unpublished(())
    # Results are of the inputs as they are: of no use where others come first.
    if needed and upstream is None:
        work = read_work(open_checkpoints(scope.ref)) if stored is None else stored()
        found = _unpublished(scope, survey, needed, prefixes, work)
        needed = choose_fragments(map(plan_fragment, found.states), None)
    return PreparedBackfill(
        subject=subject,
        dataset=dataset,
        snapshot=snapshot,
        computation=scope.computation,
        request=request,
        plan=_plan(scope, survey, needed, after_upstream=upstream is not None),
        facts=facts,
        prefixes=prefixes,
        staged=found.staged,
        reuse=found.reuse,
        filled=frozenset(
            plan.fragment_id
            for plan in needed
            if any(scope.has_values(f, facts[plan.fragment_id]) for f in scope.computation.facets)
        ),
        lost_files=scope.lost_files,
        make_runner=make_runner,
    )


def _unpublished(
    scope: Scope,
    survey: Survey,
    needed: Sequence[FragmentPlan],
    prefixes: Mapping[int, str],
    stored: StoredWork,
) -> Unpublished:
    """What earlier runs have left behind for the fragments that need something."""
    ids = {plan.fragment_id for plan in needed}
    states = [state for state in survey.states if state.fragment_id in ids]
    return find_unpublished(scope, states, prefixes, survey.validity, stored)


def _plan(
    scope: Scope, survey: Survey, needed: tuple[FragmentPlan, ...], *, after_upstream: bool
) -> BackfillPlan:
    snapshot, computation, request = scope.snapshot, scope.computation, scope.request
    found = survey.validity.values()
    right_fragments, right_rows = _right_already(scope, survey, needed)
    notes = (
        assumed_inputs(computation.outputs[0].name, computation.assumed),
        stale_outside_clause(survey.states),
        failed_before(survey.states),
        unproven_rows(sum(v.unproven.count for v in found), compute=survey.compute_unproven),
        shared_calls(needed) if computation.memoizes else None,
        upper_bounds(needed) if after_upstream else None,
        overtaken_fragments(len(survey.overtaken), snapshot.version),
        unreadable_fragments(survey.unreadable),
    )
    return BackfillPlan(
        table=snapshot.ref.name,
        version=snapshot.version,
        column=computation.name,
        udf_name=computation.program_name,
        udf_version=computation.version,
        where=request.options.where,
        retry_failed=asks_for_failed(scope),
        inputs=computation.input_paths,
        columns=_columns(computation),
        fragments=in_mixed_order(needed, request.options.task_shuffle_diversity),
        skipped_fragments=len(snapshot.fragments) - len(needed),
        total_rows=sum(f.live_rows for f in snapshot.fragments),
        right_fragments=right_fragments,
        right_rows=right_rows,
        checked_rows=sum(v.checked_rows for v in found),
        unreadable=tuple(survey.unreadable.items()),
        notes=tuple(note for note in notes if note is not None),
    )


def _columns(computation: Computation) -> tuple[str, ...]:
    """The columns that a function fills; of a view, what it carries over goes by one name."""
    if not computation.runs_user_code:
        return (computation.name,)
    return tuple(output.name for output in computation.outputs)


def _right_already(scope: Scope, survey: Survey, needed: Sequence[FragmentPlan]) -> tuple[int, int]:
    """Fragments that are wholly right, and rows that are right and stay as they are."""
    plans = {plan.fragment_id: plan for plan in needed}
    fragments = rows = 0
    for fragment_id, validity in survey.validity.items():
        plan, live = plans.get(fragment_id), scope.facts[fragment_id].live_rows
        if plan is None and validity.right.is_full:
            fragments, rows = fragments + 1, rows + live
            continue
        kept = validity.right if plan is None else validity.right.minus(plan.compute)
        rows += min(live, kept.count)
        fragments += plan is None and kept.count >= live
    return fragments, rows


def useful_checkpoints(
    dataset: Dataset, snapshot: TableSnapshot, definitions: Iterable[ColumnDefinition]
) -> Callable[[str], bool]:
    """Which checkpoints backfills may take over now, by their prefix. No data is read.

    Those of the very work that is left; and where a column is not known to be right everywhere, or
    what it reads is not known, all of its function's: its rows look results up by their receipts.
    """
    request = BackfillRequest()
    # Columns that one call fills together have one.
    each = {definition.computation_id: definition for definition in definitions}
    present = [with_present_inputs(definition, snapshot.fields) for definition in each.values()]
    known = [d for d in present if d.doubt is None and snapshot.field_ids.keys() >= {*d.inputs}]
    computations = [computation_of(snapshot, definition) for definition in known]
    work = frozenset(
        work_of(work_identity(computation, request, snapshot.ref, fragment).prefix())
        for computation in computations
        for fragment in snapshot.fragments
    )
    right = {c.id for c in computations if _is_right(dataset, snapshot, c)}
    unfinished = [d for d in present if d.computation_id not in right]
    return lambda prefix: (
        work_of(prefix) in work
        or any(
            is_of_computation(prefix, definition.computation_id, version)
            for definition in unfinished
            for version in (definition.udf_version, *definition.kept_versions)
        )
    )


def _is_right(dataset: Dataset, snapshot: TableSnapshot, computation: Computation) -> bool:
    """Whether the files alone show that all values are right."""
    lost_files = lost_values(snapshot, computation)
    readers = readers_of(dataset, snapshot, computation, lost_files)
    filled = [fragment for fragment in snapshot.fragments if fragment.live_rows]
    return all(reader.by_files(f).right.is_full for reader in readers for f in filled)

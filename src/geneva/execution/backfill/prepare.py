"""Gathering the facts for a computation and joining them with the planner's decisions.

One way for all: a column of a table, a UDF's column of a view, and what a view carries over. What
differs between them is a `Subject`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from geneva.execution.backfill import receipt_checks
from geneva.execution.backfill.receipt_checks import bytes_to_read, check_with
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.backfill.subjects import Subject
from geneva.execution.backfill.unpublished import UnpublishedWork, work_identity, written_fields
from geneva.execution.runner import Runner
from geneva.execution.worker.task import ColumnWork, FileWork, PartWork
from geneva.model.computation import Computation
from geneva.model.rows import RowRange, RowSet
from geneva.model.tables import ColumnDefinition, Reason, TableRef, Unproven
from geneva.model.view_query import SOURCE_ROW_ID
from geneva.planning.backfill import (
    Action,
    BackfillPlan,
    FragmentPlan,
    FragmentState,
    choose_fragments,
    plan_fragment,
)
from geneva.planning.ranges import disjoint
from geneva.planning.sizing import Part
from geneva.storage.checkpoints.reuse import Reuse, reuse_within
from geneva.storage.checkpoints.store import without_where
from geneva.storage.columns.definitions import computation_of, with_present_inputs
from geneva.storage.columns.staged_files import StagedFile
from geneva.storage.columns.validity import (
    Validity,
    ValidityReader,
    adoption_signature,
    output_file,
    signature_of,
)
from geneva.storage.lance.dataset import (
    Dataset,
    FragmentFacts,
    TableSnapshot,
    open_dataset,
    read_live_rows,
    read_matching_rows,
    read_snapshot,
)
from geneva.storage.lance.fragments import size_of_inputs, window_rows
from geneva.udf.policy import Limits


@dataclass(frozen=True, slots=True)
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
    make_runner: Callable[[], Runner] | None = None
    """What checks receipts, where there is much to read; None: this process does."""

    @property
    def ref(self) -> TableRef:
        """The table that is filled."""
        return self.subject.ref

    def again(self, files_of_job: frozenset[str]) -> PreparedBackfill:
        """Plan what is left on the latest version, given the files that this job has made."""
        return prepare(
            self.subject,
            self.request,
            files_of_job=files_of_job,
            make_runner=self.make_runner,
        )

    def column_work(self, job_id: str) -> ColumnWork:
        """What every task of the job shares."""
        computation, request = self.computation, self.request
        limits = Limits.from_json(computation.error_policy)
        return ColumnWork(
            job_id=job_id,
            ref=self.ref,
            version=self.snapshot.version,
            computation=computation,
            sizes=computation.sizes.overridden_by(request.options.sizes),
            flush_seconds=request.options.batch_checkpoint_flush_interval_seconds,
            threads=request.options.intra_applier_concurrency,
            max_failed=limits.max_failed(self.plan.rows_to_compute),
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

    def staged_file(self, plan: FragmentPlan, path: str) -> StagedFile:
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
        )

    def _ship(
        self, plan: FragmentPlan, rows: RowRange, covered: tuple[RowRange, ...], *, whole: bool
    ) -> PartWork:
        computation, fragment = self.computation, self.facts[plan.fragment_id]
        inputs = computation.input_paths if computation.source is None else (SOURCE_ROW_ID,)
        outputs = tuple(output.name for output in computation.outputs)
        reads_old = plan.keeps_old or bool(plan.adopt)
        paths = (*inputs, *(outputs if reads_old else ()))
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
            adopt=plan.adopt,
            complete=plan.complete,
            keeps_old=plan.keeps_old,
            receipts_only=plan.action is Action.ADOPT,
            field_ids=written_fields(computation, plan),
            inputs=_signature(computation, fragment, plan),
            base=output_file(computation, fragment),
        )


def _signature(
    computation: Computation, fragment: FragmentFacts, plan: FragmentPlan
) -> tuple[str, ...]:
    alone = plan.action is Action.ADOPT
    return (adoption_signature if alone else signature_of)(computation, fragment)


def prepare(
    subject: Subject,
    request: BackfillRequest,
    *,
    dataset: Dataset | None = None,
    snapshot: TableSnapshot | None = None,
    files_of_job: frozenset[str] = frozenset(),
    upstream: Callable[[FragmentFacts], RowSet | None] | None = None,
    make_runner: Callable[[], Runner] | None = None,
) -> PreparedBackfill:
    """Look at the table and decide what to do. Reads only; runs no user code.

    `snapshot` is what `dataset` will be when the plan runs; None: what it is.
    `files_of_job` are data files that this very job made in earlier rounds, committed or not: the
    rows that an explicit where clause asked for are done there. `upstream` says which rows of a
    fragment get another input before this is run. `make_runner` makes what checks receipts, where
    there is much to read.
    """
    dataset = open_dataset(subject.ref) if dataset is None else dataset
    snapshot = read_snapshot(dataset, subject.ref) if snapshot is None else snapshot
    computation = subject.bind(dataset, snapshot)
    gathering = _Gathering(subject, request, dataset, snapshot, computation, files_of_job)
    return replace(gathering.prepared(upstream, make_runner), make_runner=make_runner)


class _Gathering:
    """The facts of one version of a table, on their way into a plan."""

    def __init__(
        self,
        subject: Subject,
        request: BackfillRequest,
        dataset: Dataset,
        snapshot: TableSnapshot,
        computation: Computation,
        files_of_job: frozenset[str],
    ) -> None:
        self._subject, self._request, self._dataset = subject, request, dataset
        self._snapshot, self._computation = snapshot, computation
        self._files_of_job = files_of_job
        self._reader = ValidityReader(dataset, snapshot, computation)

    def prepared(
        self,
        upstream: Callable[[FragmentFacts], RowSet | None] | None,
        make_runner: Callable[[], Runner] | None,
    ) -> PreparedBackfill:
        request, snapshot = self._request, self._snapshot
        overtaken = self._overtaken()
        left_out = self._done_here() | overtaken
        chosen = request.only_fragments
        fragments = [
            f
            for f in snapshot.fragments
            if f.live_rows and f.id not in left_out and (chosen is None or f.id in chosen)
        ]
        validity = self._judged(fragments, make_runner)
        computes_unproven = self._computes_unproven(validity)
        candidates = [
            f
            for f in fragments
            if request.selects_rows
            or not validity[f.id].right.is_full
            or validity[f.id].without_receipt
            or upstream is not None
        ]
        states = self._states(candidates, validity, upstream, computes_unproven=computes_unproven)
        plans = [plan_fragment(state) for state in states]
        needed = choose_fragments(plans, request.options.num_frags)
        prefixes = {f.id: self._prefix(f) for f in candidates}
        staged: dict[int, StagedFile] = {}
        reuse: dict[int, tuple[Reuse, ...]] = {}
        if needed and upstream is None:
            ids = {plan.fragment_id for plan in needed}
            kept = [state for state in states if state.fragment_id in ids]
            work = UnpublishedWork(
                request=request,
                dataset=self._dataset,
                snapshot=snapshot,
                computation=self._computation,
                reader=self._reader,
                files_of_job=self._files_of_job,
            )
            right = {fragment: found.right for fragment, found in validity.items()}
            kept, staged, reuse = work.found_for(kept, prefixes, right)
            if work.shares_results():
                kept, reuse = work.shared_for(kept, validity, reuse)
            needed = choose_fragments(map(plan_fragment, kept), None)
        notes = _notes(states, validity.values(), computes_unproven=computes_unproven)
        if self._computation.memoizes and needed:
            notes += ("rows with equal inputs share a call, so that there may be fewer calls",)
        if upstream is not None and any(p.reason is Reason.UPSTREAM for p in needed):
            notes += ("inputs that come out the same make no call: the numbers are upper bounds",)
        if overtaken:
            notes += (
                f"{len(overtaken)} fragments of version {snapshot.version} were rewritten or "
                "computed since, and are left out",
            )
        plan = BackfillPlan(
            table=snapshot.ref.name,
            version=snapshot.version,
            column=self._computation.name,
            udf_name=self._computation.program_name,
            udf_version=self._computation.version,
            where=request.options.where,
            fragments=_ordered(needed, request.options.task_shuffle_diversity),
            skipped_fragments=len(snapshot.fragments) - len(needed),
            total_rows=sum(f.live_rows for f in snapshot.fragments),
            checked_rows=sum(v.checked_rows for v in validity.values()),
            notes=notes,
        )
        return PreparedBackfill(
            subject=self._subject,
            dataset=self._dataset,
            snapshot=snapshot,
            computation=self._computation,
            request=request,
            plan=plan,
            facts={f.id: f for f in candidates},
            prefixes=prefixes,
            staged=staged,
            reuse=reuse,
        )

    def _judged(
        self, fragments: Sequence[FragmentFacts], make_runner: Callable[[], Runner] | None
    ) -> dict[int, Validity]:
        """What is right in each fragment, by the cheapest proof there is."""
        judge = self._subject.judge_source(self._dataset, self._computation)
        found: dict[int, Validity] = {}
        for fragment in fragments:
            validity = self._reader.by_files(fragment)
            if judge is not None:
                rows = fragment.physical_rows
                validity = judge(fragment, validity) or Validity.unknown(rows)
            found[fragment.id] = validity
        open_ = [f for f in fragments if found[f.id].undecided]
        live = read_live_rows(self._dataset, open_)
        undecided = [(f, found[f.id].undecided.intersect(live[f.id])) for f in open_]
        checks = self._checked(undecided, make_runner)
        for (fragment, _), looked in zip(undecided, checks, strict=True):
            if judge is not None and self._computation.receipt is None:
                looked = judge(fragment, looked) or looked.without(looked.right)
            found[fragment.id] = found[fragment.id].joined(looked)
        return found

    def _checked(
        self,
        undecided: Sequence[tuple[FragmentFacts, RowSet]],
        make_runner: Callable[[], Runner] | None,
    ) -> Iterable[Validity]:
        """What receipts say of these rows: read here, or by workers where it is much."""
        much = bytes_to_read(self._computation, undecided) >= receipt_checks.MUCH_BYTES
        if make_runner is None or not much or self._computation.receipt is None:
            return (self._reader.by_receipt(fragment, rows) for fragment, rows in undecided)
        opening = uuid.uuid4().hex
        return check_with(make_runner, self._snapshot, self._computation, opening, undecided)

    def _states(
        self,
        candidates: Sequence[FragmentFacts],
        validity: dict[int, Validity],
        upstream: Callable[[FragmentFacts], RowSet | None] | None,
        *,
        computes_unproven: bool,
    ) -> list[FragmentState]:
        request = self._request
        live = read_live_rows(self._dataset, candidates)
        selected: dict[int, RowSet] | None = None
        if request.options.where is not None and (candidates or not self._done_here()):
            # Also where there is no row to select: a wrong clause is refused on any table.
            selected = read_matching_rows(self._dataset, candidates, request.options.where)
        states = []
        for fragment in candidates:
            found = validity[fragment.id]
            state = FragmentState(
                fragment_id=fragment.id,
                physical_rows=fragment.physical_rows,
                live=live[fragment.id],
                valid=found.right,
                reason=found.reason,
                has_output=output_file(self._computation, fragment) is not None,
                adopt=_to_adopt(found, computes_unproven=computes_unproven),
                selected=selected[fragment.id] if selected is not None else None,
                only_stale=request.only_stale,
                failed=found.failed,
                retry_failed=request.options.retry_failed,
            )
            if computes_unproven and found.unproven and not found.right:
                state = replace(state, reason=Reason.UNPROVEN)
            changing = upstream(fragment) if upstream is not None else None
            if changing:
                state = _with_upstream(state, changing, found.supplied)
            states.append(state)
        return states

    def _computes_unproven(self, validity: dict[int, Validity]) -> bool:
        """Whether values from before receipts are computed again, where nobody said.

        They are kept, unless something shows that values of the column may be stale: it had another
        function before, or an input of one of its values has changed.
        """
        if self._request.options.unproven is not None:
            return self._request.options.unproven is Unproven.COMPUTE
        if self._computation.source is not None:
            # Of a view nobody writes values: what is not proven may be of other source rows.
            return True
        stale = (Reason.INPUT_CHANGED, Reason.UDF_CHANGED)
        return bool(self._computation.former_versions) or any(
            v.reason in stale for v in validity.values()
        )

    def _done_here(self) -> set[int]:
        """Fragments in which this job has computed what was asked for."""
        if not self._request.selects_rows:
            return set()
        return {
            f.id
            for f in self._snapshot.fragments
            if output_file(self._computation, f) in self._files_of_job
        }

    def _overtaken(self) -> set[int]:
        """Fragments of an older version that can't be filled: rewritten, or computed since."""
        if self._request.options.read_version is None:
            return set()
        ref = self._snapshot.ref
        now = {f.id: f for f in read_snapshot(open_dataset(ref), ref).fragments}
        fields = self._computation.output_ids
        return {
            f.id
            for f in self._snapshot.fragments
            if f.id not in now
            or now[f.id].physical_rows != f.physical_rows
            or now[f.id].files_of(fields) != f.files_of(fields)
        }

    def _prefix(self, fragment: FragmentFacts) -> str:
        return work_identity(
            self._computation, self._request, self._snapshot.ref, fragment
        ).prefix()


def _to_adopt(found: Validity, *, computes_unproven: bool) -> RowSet:
    """Rows that get a receipt without a call."""
    adopted = found.supplied.union(found.without_receipt)
    return adopted if computes_unproven else adopted.union(found.unproven)


def _with_upstream(state: FragmentState, changing: RowSet, supplied: RowSet) -> FragmentState:
    """The state after inputs of some rows were computed anew: they may all be other ones.

    What a person wrote is adopted with whatever inputs it has then.
    """
    changing = changing.intersect(state.live).minus(supplied)
    reason = state.reason if state.live.minus(state.valid) else Reason.UPSTREAM
    return replace(
        state, valid=state.valid.minus(changing), adopt=state.adopt.minus(changing), reason=reason
    )


def _notes(
    states: Iterable[FragmentState], validity: Iterable[Validity], *, computes_unproven: bool
) -> tuple[str, ...]:
    """Remarks shown with the plan."""
    notes: list[str] = []
    states = list(states)
    stale = sum(
        state.live.minus(state.valid)
        .minus(state.selected)
        .minus(state.adopt)
        .minus(state.failed)
        .count
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
        if not state.retry_failed and state.selected is None
    )
    if waiting:
        notes.append(
            f"{waiting:,} rows failed before with this UDF and these inputs, and stay NULL; use "
            "retry_failed=True to try them again"
        )
    unproven = sum(found.unproven.count for found in validity)
    if unproven:
        decided = (
            'are computed again; use unproven="keep" to take them for right'
            if computes_unproven
            else 'are taken for right; use unproven="compute" to compute them again'
        )
        notes.append(
            f"unproven: {unproven:,} rows were computed before there were receipts, and {decided}"
        )
    return tuple(notes)


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
    computation = computation_of(snapshot, with_present_inputs(definition, dataset))
    request = BackfillRequest()
    return {
        without_where(work_identity(computation, request, ref, fragment).prefix())
        for fragment in snapshot.fragments
    }

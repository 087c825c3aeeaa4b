"""Running a refresh plan: rows go and come, then the driver of backfills fills the columns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from geneva.errors import TableChangedError, UnreadableFragmentsError
from geneva.execution.backfill.control import JobControl
from geneva.execution.backfill.parallel import run_side_by_side
from geneva.execution.backfill.prepare import PreparedBackfill, prepare
from geneva.execution.jobs.progress import JobProgress
from geneva.execution.refresh.forecast import come_true
from geneva.execution.refresh.groups import RefreshTarget, UdfColumns, own_columns
from geneva.execution.refresh.prepare import (
    PreparedRefresh,
    more_damage,
    prepare_refresh,
)
from geneva.execution.refresh.rows import drop_rows
from geneva.model.rows import RowSet
from geneva.model.tables import TableRef
from geneva.storage.checkpoints.pins import pinning
from geneva.storage.columns.definitions import commit_receipt_columns
from geneva.storage.lance.dataset import Dataset, open_dataset
from geneva.storage.lance.transactions import fragments_of_commit
from geneva.storage.views.definition import allow_nulls, append_placeholders, delete_view_rows
from geneva.storage.views.foreign_writes import is_untouched
from geneva.storage.views.state import (
    PlannedOn,
    check_not_made_anew,
    commit_refreshed,
    commit_refreshing,
    read_view_state,
)


def run_refresh(
    prepared: PreparedRefresh,
    control: JobControl,
    *,
    view: str | None = None,
    also_read: RefreshTarget | None = None,
) -> tuple[JobProgress, int]:
    """Carry a plan out; return what was done, and the version of the view that is the result.

    `view` is what people call it, if that is another name. `also_read`: a refresh from whose source
    the functions of this one read, too.

    That the source's version is reached is recorded last, and that it is under way first: what a
    refresh that was cut off has left behind is known for what it is.
    """
    ref, target = prepared.ref, prepared.target
    begun = commit_refreshing(
        ref,
        target.version,
        control.job_id,
        control.is_running,
        prepared.columns,
        PlannedOn(prepared.view_id, target.source, target.identity),
    )
    if begun.version != prepared.view_version + 1:
        # Somebody changed the view since the plan was made, perhaps by a refresh.
        request = replace(prepared.request, src_version=target.version)
        prepared = prepare_refresh(ref, target.source, request)
        begun = open_dataset(ref, prepared.view_version)
    while True:
        try:
            progress = _fill(prepared, begun, control)
            break
        except UnreadableFragmentsError as error:
            found = more_damage(prepared, error.fragments)
            if not found:
                raise
        # Of the fragments that were left out, what is made from other rows can be done.
        damage = target.damage.plus(target.open_source(), found)
        request = replace(prepared.request, src_version=target.version)
        prepared = prepare_refresh(ref, target.source, request, damage)
        target, begun = prepared.target, open_dataset(ref, prepared.view_version)
    if target.damage:
        raise target.damage.error(view or ref.name, target.source.name, target.version)
    if also_read is not None:
        latest = open_dataset(also_read.source)
        check_not_made_anew(also_read.source, [(also_read.version, also_read.identity)], latest)
    ended = commit_refreshed(
        ref,
        target.version,
        control.job_id,
        prepared.udf_versions,
        source=target.source,
        is_settled=lambda now: is_untouched(
            ref, now, prepared.view_version, own_columns(now, prepared.groups), control.job_id
        ),
    )
    return progress, int(ended.version)


def _fill(prepared: PreparedRefresh, begun: Dataset, control: JobControl) -> JobProgress:
    """Let rows go and come, and fill the columns; `begun` is the view until then."""
    view = _change_rows(prepared, begun, control)
    # More commits are of somebody else, or of receipts for columns that are older than them.
    as_planned = view.version == begun.version + prepared.membership.commits
    with source_pinned(prepared, prepared.ref, control) as wait_for_pin:
        backfills = [
            _backfill(planned, view if as_planned else None, control)
            for planned in prepared.backfills
        ]
        needed = [backfill for backfill in backfills if not backfill.plan.is_empty]
        return run_side_by_side(needed, control, [wait_for_pin])


def _change_rows(prepared: PreparedRefresh, begun: Dataset, control: JobControl) -> Dataset:
    """Let rows go and come; return the view after that."""
    ref, membership = prepared.ref, prepared.membership
    udfs = [group for group in prepared.groups if isinstance(group, UdfColumns)]
    older = commit_receipt_columns(begun, [d for group in udfs for d in group.definitions])
    drop_rows(ref, membership, control.job_id, control.max_conflict_retries)
    changed = older or membership.rows_leaving
    before = allow_nulls(open_dataset(ref) if changed else begun)
    rows = prepared.request.max_rows_per_fragment
    after = append_placeholders(ref, before, membership.entering, rows, control.job_id)
    if after.version != before.version:
        _check_still_ours(ref, after, control.job_id)
    return after


def _backfill(
    planned: PreparedBackfill, as_planned: Dataset | None, control: JobControl
) -> PreparedBackfill:
    """A backfill of the plan, on the view whose rows have come and gone.

    Planned anew only where there is no version of the view that is as planned.
    """
    real = come_true(planned, as_planned) if as_planned is not None else None
    if real is None:
        return prepare(planned.subject, planned.request, make_runner=control.make_runner)
    return replace(real, make_runner=control.make_runner)


def _check_still_ours(ref: TableRef, after: Dataset, job_id: str) -> None:
    """Take rows back that were added after another job had taken the view over.

    That happens to a job whose heartbeat stopped for so long that it was taken for dead.
    """
    if read_view_state(after.schema).job_id == job_id:
        return
    added = {f.id: RowSet.full(f.physical_rows) for f in fragments_of_commit(after, after.version)}
    delete_view_rows(after, added, job_id)
    raise TableChangedError(
        f"View {ref.name!r} was taken over by another refresh while job {job_id} was not heard of. "
        "Refresh again."
    )


def source_pinned(
    prepared: PreparedRefresh, view: TableRef, control: JobControl
) -> AbstractContextManager[Callable[[], None]]:
    """Keep the source's version from being cleaned up while the job reads it.

    Gives what waits until that is so. Not in another database: who unpins versions there knows
    nothing of the jobs of this one.
    """
    source = prepared.target.source
    if not view.uri.startswith(f"{source.root.rpartition('/')[0]}/"):
        return nullcontext(lambda: None)
    # A source that may only be read is no reason to fail.
    return pinning(
        prepared.target.open_source(),
        control.job_id,
        control.is_running,
        may_fail=True,
        behind=control.behind,
    )

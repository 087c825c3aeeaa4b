"""Refreshing a view of a table function: rows by partition, what changed, the function, its rows.

Four steps, each of which can be done again at any time:

1. a hidden view gets the key and the digest of every row that came or changed (workers);
2. rows are added up by key: a partition whose sum is another one is put on record anew;
3. a hidden view over these records runs the function, as a UDF, for the ones that changed;
4. the lists that came of it are laid out as rows of the view, in one commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from geneva.errors import TableChangedError, UserInputError
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.refresh.explode import is_laid_out, lay_out_changes
from geneva.execution.refresh.groups import NO_ROWS, KeyedRows, open_view
from geneva.execution.refresh.prepare import (
    PreparedRefresh,
    RefreshRequest,
    find_lost_files,
    prepare_refresh,
)
from geneva.model.computation import PartitionRows, Source
from geneva.model.partitions import KEY_PREFIX, KeyedIds, Partitions, add_up_rows
from geneva.model.rows import RowIds
from geneva.model.tables import TableRef
from geneva.options import JobOptions
from geneva.planning.membership import choose_rows
from geneva.planning.refresh import PartitionCounts, RefreshPlan
from geneva.storage.lance.damage import is_damage
from geneva.storage.lance.dataset import Dataset, open_dataset
from geneva.storage.lance.source_rows import SourceRows
from geneva.storage.views.definition import ViewInfo, read_source_ids, read_view
from geneva.storage.views.explode import inner_ref
from geneva.storage.views.partitions import (
    ALL_ROWS,
    Assignment,
    IndexedPartitions,
    commit_partitions,
    drop_partitions,
    ids_by_partition,
    keyed_ids,
    partition_batch,
    partition_name,
    partitions_ref,
    read_keyed_ids,
    read_partitions,
    rows_ref,
    tidy_partitions,
)

if TYPE_CHECKING:
    from geneva.execution.backfill.control import JobControl
    from geneva.execution.jobs.progress import JobProgress

_MAX_ROWS_LISTED = 8_000_000
"""Rows whose ids are in memory at once, while partitions are put on record."""
_MAX_FORECAST = 200_000
"""Rows that a plan reads, to say how many partitions they change."""
_NAMES_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True)
class PreparedPartitionRefresh:
    """A refresh of the rows by partition, of what the function made, and of the view."""

    ref: TableRef
    rows: PreparedRefresh
    inner: PreparedRefresh
    """Of the lists that the function made, on the partitions as they are now."""
    plan: RefreshPlan

    @property
    def indexed_column(self) -> str | None:
        """The column whose index says the partitions."""
        return _info(self.rows).query.partition_index


def prepare_partition_refresh(
    ref: TableRef,
    source: TableRef,
    request: RefreshRequest,
    view: Dataset,
    *,
    planning_only: bool = False,
) -> PreparedPartitionRefresh:
    """Plan the refresh of a view of a table function. Reads only; runs no user code.

    `planning_only`: say how many partitions will be computed, which takes reading what changed.
    """
    if ref.branch is not None:
        raise UserInputError(
            f"{ref.name!r} is a branch of a view of a table function, which can't be refreshed: "
            "refresh the view itself, or create another one."
        )
    rows = prepare_refresh(rows_ref(ref), source, _for_rows(request))
    inner = _prepare_inner(ref, rows, request, None)
    opened = open_view(ref, view)
    find_lost_files(ref, opened.dataset, opened.columns)
    current = (
        rows.plan.is_empty
        and inner.plan.is_empty
        and opened.info.base_version == rows.target.version
        and is_laid_out(ref, opened.dataset, inner.ref, inner.view_version)
    )
    plan = replace(
        rows.plan,
        view=ref.name,
        from_version=opened.info.base_version if inner.plan.from_version is not None else None,
        columns=(*rows.plan.columns, *(c for c in inner.plan.columns if c.runs_udf)),
        notes=(*rows.plan.notes, *inner.plan.notes),
        up_to_date=current,
    )
    prepared = PreparedPartitionRefresh(ref, rows, inner, plan)
    if current:
        return prepared
    counts = _forecast(prepared) if planning_only else PartitionCounts()
    return replace(prepared, plan=replace(plan, partitions=counts))


def _for_rows(request: RefreshRequest) -> RefreshRequest:
    """How keys and digests are computed: what was asked of the function is not asked of these."""
    asked = request.backfill.options
    options = replace(JobOptions(), concurrency=asked.concurrency, timeout=asked.timeout)
    return RefreshRequest(request.src_version, None, BackfillRequest(options))


def _prepare_inner(
    ref: TableRef, rows: PreparedRefresh, request: RefreshRequest, version: int | None
) -> PreparedRefresh:
    """Plan what the function is to be called for, with partitions as a version has them."""
    inner = replace(
        request,
        src_version=version,
        partition_rows=_partition_rows(rows),
    )
    return prepare_refresh(inner_ref(ref), partitions_ref(ref), inner)


def _partition_rows(rows: PreparedRefresh) -> PartitionRows:
    """Where the rows of partitions are, and what the function sees of them."""
    query, keyed = _info(rows).query, _keyed(rows)
    schema = rows.target.open_source().schema
    expressions = dict(keyed.expressions(schema))
    return PartitionRows(
        source=Source(
            ref=rows.target.source,
            version=rows.target.version,
            expressions=tuple((name, expressions[name]) for name in keyed.keyed.values),
        ),
        where=query.where,
        seed=query.seed,
        offset=query.offset,
        limit=query.limit,
    )


def _info(rows: PreparedRefresh) -> ViewInfo:
    info = read_view(open_dataset(rows.ref).schema)
    assert info is not None
    return info


def _keyed(rows: PreparedRefresh) -> KeyedRows:
    (group,) = rows.groups
    assert isinstance(group, KeyedRows)
    return group


# --------------------------------------------------------------------------------- running


def run_partition_refresh(prepared: PreparedPartitionRefresh, control: JobControl) -> JobProgress:
    """Bring the view up to date, step by step."""
    # Imported when a job runs: a plan needs none of it.
    from geneva.execution.jobs.progress import JobProgress
    from geneva.execution.refresh.run import run_refresh, source_pinned

    rows, version = prepared.rows, prepared.rows.view_version
    with source_pinned(rows, prepared.ref, control) as wait_for_pin:
        wait_for_pin()
        if not rows.plan.is_empty:
            # Those who follow the job follow the function.
            quiet = replace(control, listeners=())
            _, version = run_refresh(rows, quiet, view=prepared.ref.name)
        grouping = _Grouping(prepared, version)
        partitions = grouping.commit(control.job_id)
        inner = _prepare_inner(prepared.ref, rows, prepared.inner.request, partitions)
        progress, made = JobProgress(total=0), inner.view_version
        if not inner.plan.is_empty:
            progress, made = run_refresh(
                inner, control, view=prepared.ref.name, also_read=rows.target
            )
    lay_out_changes(
        outer=prepared.ref,
        inner=inner.ref,
        version=made,
        base_version=rows.target.version,
        max_rows_per_fragment=prepared.inner.request.max_rows_per_fragment,
        control=control,
    )
    return progress


class _Grouping:
    """The rows of a version of the hidden view of rows, by partition."""

    def __init__(self, prepared: PreparedPartitionRefresh, version: int) -> None:
        self._rows, self._version = prepared.rows, version
        self._view = prepared.ref.name
        self._ref = partitions_ref(prepared.ref)
        self._assignment = _assignment(prepared)
        self._is_whole = _is_whole(prepared)

    def _read(self) -> Iterator[KeyedIds]:
        return read_keyed_ids(open_dataset(self._rows.ref, self._version), self._assignment)

    def commit(self, job_id: str) -> int:
        """Put on record what the partitions are now; return the version that says so.

        Another refresh, to another version of the source, may do the same at the same time. What
        the function is called for must be of the rows that it reads: so the record is read again.
        """
        now, before = self.partitions(), read_partitions(self._ref)
        changed = now.only(now.that_moved(before))
        if len(changed):
            anew = not len(before)
            commit_partitions(self._ref, self._batches(changed), anew=anew)
        drop_partitions(self._ref, before.only(before.that_lack(now)), job_id)
        tidy_partitions(self._ref)
        version = int(open_dataset(self._ref).version)
        there = read_partitions(self._ref, version)
        if now.that_moved(there).any() or there.that_lack(now).any():
            raise TableChangedError(
                f"Another refresh of view {self._view!r} got in between. Wait until that has "
                "ended, and refresh again."
            )
        return version

    def partitions(self) -> Partitions:
        """What each partition is made of."""
        return _added_up(self._read(), is_whole=self._is_whole)

    def _batches(self, changed: Partitions) -> Iterator[pa.RecordBatch]:
        if self._is_whole:
            yield partition_batch(changed, [ALL_ROWS], None)
            return
        for first, last in changed.runs(_MAX_ROWS_LISTED):
            some = changed.only(slice(first, last))
            places, ids = ids_by_partition(some, self._read())
            ids, places = self._in_order(ids, places)
            order = np.argsort(places, kind="stable")
            ids = ids[order]
            firsts = ids[np.cumsum(some.counts) - some.counts]
            yield partition_batch(some, self._names(firsts, some), ids)

    def _in_order(self, ids: RowIds, places: np.ndarray) -> tuple[RowIds, np.ndarray]:
        """Rows in the order of the query; they are given in that of their ids."""
        seed = _info(self._rows).query.seed
        ordered = choose_rows(ids, shuffle_seed=seed, offset=None, limit=None)
        return ordered, places[np.searchsorted(ids, ordered)]

    def _names(self, ids: RowIds, partitions: Partitions) -> list[str]:
        """What partitions are called: the values that their rows have in common."""
        if self._assignment is not None:
            return [f"number {number}" for number in partitions.low.tolist()]
        target, group = self._rows.target, _keyed(self._rows)
        schema = open_dataset(target.source, target.version).schema
        known = dict(group.expressions(schema))
        keys = [(name.removeprefix(KEY_PREFIX), known[name]) for name in group.keyed.keys]
        reader = SourceRows(target.source, target.version, tuple(keys))
        names: list[str] = []
        for at in range(0, len(ids), _NAMES_AT_ONCE):
            batch = reader.take(ids[at : at + _NAMES_AT_ONCE])
            names += [partition_name(row) for row in batch.to_pylist()]
        return names


def _is_whole(prepared: PreparedPartitionRefresh) -> bool:
    return not _keyed(prepared.rows).keyed.keys and prepared.indexed_column is None


def _assignment(prepared: PreparedPartitionRefresh) -> Assignment | None:
    if prepared.indexed_column is None:
        return None
    target = prepared.rows.target
    source = open_dataset(target.source, target.version)
    return IndexedPartitions(source, target.source.name, prepared.indexed_column)


def _added_up(parts: Iterator[KeyedIds], *, is_whole: bool) -> Partitions:
    if is_whole:
        return Partitions.whole(part.digests for part in parts)
    return add_up_rows(parts)


# -------------------------------------------------------------------------------- planning


def _forecast(prepared: PreparedPartitionRefresh) -> PartitionCounts:
    """How many partitions the function will be called for, as far as is known without work."""
    before = read_partitions(partitions_ref(prepared.ref))
    again = prepared.inner.plan.rows_to_run
    try:
        parts = _forecast_rows(prepared)
    except BaseException as error:
        if not is_damage(error):
            raise
        parts = None  # What can't be read, and where, is for the refresh to say.
    if parts is None:
        return PartitionCounts()
    now = _added_up(iter(parts), is_whole=_is_whole(prepared))
    changed = int(np.count_nonzero(now.that_changed(before)))
    return PartitionCounts(
        total=len(now),
        to_compute=min(len(now), changed + again),
        leaving=int(np.count_nonzero(before.that_lack(now))),
    )


def _forecast_rows(prepared: PreparedPartitionRefresh) -> list[KeyedIds] | None:
    """All rows with their keys and digests, as they will be; None where that is much to read."""
    rows, assignment = prepared.rows, _assignment(prepared)
    dataset = open_dataset(rows.ref, rows.view_version)
    if rows.plan.is_empty:
        return list(read_keyed_ids(dataset, assignment))
    if rows.target.damage or rows.plan.rows_to_compute > _MAX_FORECAST:
        return None
    (backfill,) = rows.backfills
    ids = _ids_to_compute(backfill, dataset)
    source = backfill.computation.source
    assert source is not None
    made = keyed_ids(ids, SourceRows.of(source).take(ids), assignment)
    elsewhere = np.sort(np.concatenate([ids, rows.membership.leaving]))
    kept = (part.without(elsewhere) for part in read_keyed_ids(dataset, assignment))
    return [*kept, made]


def _ids_to_compute(backfill: PreparedBackfill, dataset: Dataset) -> RowIds:
    """The rows of the source whose keys and digests are to be computed."""
    found = [NO_ROWS]
    for fragment in backfill.plan.fragments:
        if not fragment.compute:
            continue
        entering = backfill.facts[fragment.fragment_id].source_ids
        if entering is None:
            (present,) = read_source_ids(dataset, fragment.fragment_id)
            entering = present.source_ids.astype(np.uint64)
        found.append(entering[fragment.compute.offsets()])
    return np.sort(np.concatenate(found))

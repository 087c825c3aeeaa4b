"""A load as a job sees it: the source is staged by its keys, then the columns are filled."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from geneva.errors import (
    JobCancelledError,
    JobTimeoutError,
    SourceDataError,
    UnmatchedKeyError,
    UnreadableSourceError,
    UserInputError,
)
from geneva.execution.backfill.control import JobControl
from geneva.execution.backfill.driver import run_backfill
from geneva.execution.backfill.prepare import PreparedBackfill, prepare
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.jobs.progress import JobProgress
from geneva.execution.load.prepare import LoadRequest, LoadSubject, check_request
from geneva.execution.load.source import StagedSource, StagingJob, stage_source
from geneva.execution.load.unchanged import (
    record_unchanged,
    recorded_unchanged,
    unchanged_fragments,
)
from geneva.execution.runner import InProcessRunner, Runner
from geneva.model.computation import StagedKeys
from geneva.model.tables import OnMissing, TableRef
from geneva.planning.backfill import BackfillPlan
from geneva.render.text import agree, count
from geneva.storage.checkpoints.cleanup import drop_leftovers, is_idle
from geneva.storage.checkpoints.pins import pinned
from geneva.storage.checkpoints.store import is_of_column
from geneva.storage.lance.dataset import Dataset, open_dataset, open_pinned
from geneva.storage.lance.transactions import files_of_jobs
from geneva.storage.loads.lookup import open_lookup
from geneva.storage.loads.staging import SourceSchema, delete_loads, open_folder
from geneva.udf.picking import filtered

_FEW_ROWS = 100_000
"""A source and a table of so many rows together are joined here: Spark takes longer to start."""
_CHECK_ROWS = 65_536
_ITEMS_PER_SLOT = 4


@dataclass(frozen=True, slots=True, eq=False)
class LoadWork:
    """A load of columns into a table."""

    ref: TableRef
    request: LoadRequest
    columns: SourceSchema
    """What is taken of the source, in the table's types."""
    dataset: Dataset
    prepared: PreparedBackfill | None
    """What is to be filled; None: not all columns are there yet."""
    make_runner: Callable[[], Runner] | None = None
    job_type: str = "LOAD"
    unit: str = "row"

    @property
    def table(self) -> str:
        """The table's name."""
        return self.ref.name

    @property
    def column(self) -> str:
        """The names of the columns."""
        return ", ".join(self.request.columns)

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for, for the job history."""
        request = self.request
        return {
            "source": request.source.name,
            "pk": request.key,
            "columns": list(request.columns),
            "on_missing": request.on_missing.value,
            "read_version": int(self.dataset.version),
            **request.options.changed(),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on what is loaded."""
        return ()

    @property
    def plans(self) -> Sequence[BackfillPlan]:
        """The plan, where the columns are there already."""
        return [self.prepared.plan] if self.prepared is not None else []

    @property
    def backfills(self) -> Sequence[PreparedBackfill]:
        """None: no function runs."""
        return []

    @property
    def is_empty(self) -> bool:
        """Whether the columns were loaded from the same source, and nothing changed since."""
        return self.prepared is not None and self.prepared.plan.is_empty

    @property
    def total_rows(self) -> int:
        """Rows that are looked up."""
        if self.prepared is not None:
            return self.prepared.plan.rows_to_compute
        return int(self.dataset.count_rows())

    @property
    def identity(self) -> str | None:
        """Table, source, columns and rule. None: nobody else can have the same source."""
        if not self.request.source.can_be_known_again:
            return None
        key = (self.ref.name, self.request.version)
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    @property
    def timeout(self) -> float | None:
        """Seconds that the job may take."""
        return self.request.options.timeout

    def overtaken_by(self, job_ids: Collection[str]) -> Sequence[str]:
        """Which of these jobs have published values since this was planned."""
        if not job_ids:
            return ()
        after = int(self.dataset.version)
        return sorted(files_of_jobs(open_dataset(self.ref), job_ids, after=after))

    def again(self, followed: Sequence[str], seconds: float) -> LoadWork:
        """The same, on the latest version."""
        options = self.request.options
        if options.timeout is not None:
            options = replace(options, timeout=max(0.0, options.timeout - seconds))
        return plan_load(self.ref, replace(self.request, options=options), self.make_runner)

    def run(self, control: JobControl) -> JobProgress:
        """Stage the source, add the columns that are missing, and fill them all."""
        with pinned(self.dataset, control.job_id, control.is_running):
            return self._run(control)

    def _run(self, control: JobControl) -> JobProgress:
        started = time.monotonic()
        runner = self._runner(control)
        control = replace(control, make_runner=lambda: runner)
        job = StagingJob(
            runner,
            lambda: self._check_stop(control, time.monotonic() - started),
            self.request.options.concurrency,
        )
        version = self.request.version
        target = StagedSource(self.ref, version, self.columns)
        try:
            keys = stage_source(self.request.source, target, job)
            if self.request.on_missing is OnMissing.ERROR:
                self._check_matches(keys, job, control.job_id)
            return self._fill(keys, job, control, started)
        except UnreadableSourceError:
            raise  # of a store that failed, what was read may be of use
        except (SourceDataError, UserInputError):
            open_folder(self.ref, version).delete()  # of no use: the source has to change
            raise
        finally:
            if not self.request.source.can_be_known_again:
                open_folder(self.ref, version).delete()

    def _runner(self, control: JobControl) -> Runner:
        rows = self.request.source.rows
        if rows is not None and rows + self.total_rows <= _FEW_ROWS:
            return InProcessRunner(1)
        return control.make_runner()

    def _check_stop(self, control: JobControl, seconds: float) -> None:
        source = self.request.source
        kept = (
            "What is staged of the source is kept: the same load goes on from there."
            if source.can_be_known_again
            else f"No value was loaded, and the next load of {source.name} begins anew: only files "
            "can be known again."
        )
        if control.cancelled.is_set():
            raise JobCancelledError(f"Job {control.job_id} was cancelled. {kept}")
        if self.timeout is not None and seconds > self.timeout:
            raise JobTimeoutError(
                f"Job {control.job_id} did not finish within {self.timeout:g} s. {kept}"
            )

    def _fill(
        self, keys: StagedKeys, job: StagingJob, control: JobControl, started: float
    ) -> JobProgress:
        commit_missing_columns(self.ref, self.columns)
        subject = LoadSubject.of(self.ref, self.request, keys)
        planned = prepare(subject, self._backfill(), make_runner=self.make_runner)
        unchanged = recorded_unchanged(planned)
        compared = unchanged_fragments(planned.without(unchanged), job, control.job_id)
        unchanged, unmatched = unchanged.union(compared), sum(compared.values())
        if self.request.source.can_be_known_again:
            record_unchanged(planned, unchanged)
        spent = time.monotonic() - started
        prepared = replace(planned, request=self._backfill(spent)).without(unchanged)
        if prepared.plan.is_empty:
            return JobProgress(total=0, seconds=spent, unmatched_rows=unmatched)
        progress = run_backfill(prepared, control)
        return replace(
            progress,
            loaded_rows=progress.committed - progress.unmatched_rows,
            unmatched_rows=progress.unmatched_rows + unmatched,
            seconds=progress.seconds + spent,
        )

    def _backfill(self, spent: float = 0.0) -> BackfillRequest:
        """What is asked of the backfill, after so many seconds."""
        options = self.request.options
        if options.timeout is not None:
            options = replace(options, timeout=max(0.0, options.timeout - spent))
        return BackfillRequest(options)

    def _check_matches(self, keys: StagedKeys, job: StagingJob, job_id: str) -> None:
        """Make sure that the source has a key for every row; UnmatchedKeyError otherwise."""
        dataset = open_dataset(self.ref)
        fragments = [fragment.fragment_id for fragment in dataset.get_fragments()]
        shares = max(1, min(len(fragments), _ITEMS_PER_SLOT * job.runner.slots))
        items = [
            RowsToMatch(
                self.ref,
                int(dataset.version),
                job_id,
                self.request.key,
                keys,
                tuple(fragments[i::shares]),
            )
            for i in range(shares)
        ]
        found = [json.loads(text) for text in job.run(find_unmatched, items)]
        rows = sum(report["rows"] for report in found)
        if rows:
            first = next(report["key"] for report in found if report["rows"])
            raise UnmatchedKeyError(
                f"{count(rows, 'row')} of table {self.ref.name!r} {agree(rows, 'have')} a "
                f"{self.request.key!r} that is not in {self.request.source.name}, such as {first}, "
                "and on_missing is 'error'. Nothing was loaded. on_missing='carry' keeps the "
                "values of such rows, and 'null' makes them NULL."
            )

    @property
    def refs(self) -> frozenset[TableRef]:
        """The table."""
        return frozenset({self.ref})

    def tidy(self) -> None:
        """Drop what this load and others before it have staged, unless another one runs."""
        drop_leftovers(self.ref, partial(is_of_column, column=self.column), set())
        open_folder(self.ref, self.request.version).delete()
        delete_loads(self.ref, partial(is_idle, self.ref))


def plan_load(
    ref: TableRef, request: LoadRequest, make_runner: Callable[[], Runner] | None
) -> LoadWork:
    """Check a load against the latest version of the table. Reads only."""
    dataset = open_dataset(ref)
    columns = check_request(ref, dataset, request)
    prepared = None
    if all(name in dataset.schema.names for name in request.columns):
        subject = LoadSubject.of(ref, request, StagedKeys(request.version))
        prepared = prepare(subject, BackfillRequest(request.options), dataset=dataset)
        prepared = prepared.without(recorded_unchanged(prepared))
    return LoadWork(ref, request, columns, dataset, prepared, make_runner)


def commit_missing_columns(ref: TableRef, columns: SourceSchema) -> None:
    """Add those of the columns that the table doesn't have, NULL everywhere."""
    dataset = open_dataset(ref)
    new = [field for field in columns.values if field.name not in dataset.schema.names]
    if new:
        dataset.add_columns(new)


@dataclass(frozen=True, slots=True)
class RowsToMatch:
    """Rows of some fragments, whose keys are to be looked up."""

    ref: TableRef
    version: int
    job_id: str
    key: str
    keys: StagedKeys
    fragments: tuple[int, ...]


def find_unmatched(item: RowsToMatch) -> str:
    """Count the rows whose key is not in the source. This is shipped to workers."""
    dataset = open_pinned(item.ref, item.version, item.job_id)
    lookup = open_lookup(item.ref, item.keys, (item.key,))
    rows, first = 0, ""
    scanner = dataset.scanner(
        columns=[item.key],
        fragments=[dataset.get_fragment(i) for i in item.fragments],
        batch_size=_CHECK_ROWS,
    )
    for batch in scanner.to_batches():
        keys = batch.column(0)
        unmatched = ~lookup.find(keys).matched
        if not rows and unmatched.any():
            first = repr(filtered(keys, unmatched)[0].as_py())
        rows += int(unmatched.sum())
    return json.dumps({"rows": rows, "key": first})

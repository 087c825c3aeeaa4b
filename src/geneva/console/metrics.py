"""The database in numbers, as Prometheus reads them.

Not by prometheus-client: it is made for counters that live in the process, orders labels by name,
and fails on names that are not UTF-8. What is needed here is the text format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from geneva.console.plots import STAGES
from geneva.console.queries import Freshness, TableInfo
from geneva.model.jobs import JobStatus, metric
from geneva.storage.jobs.records import JobRecord

_GAUGES = (
    ("geneva_job_reused_rows", "reused_rows", "Rows taken from earlier runs."),
    ("geneva_job_skipped_rows", "skipped_rows", "Rows that needed nothing."),
    ("geneva_job_checkpoints_per_second", "checkpoints_per_second", "Checkpoints per second."),
    ("geneva_job_worker_utilization", "worker_utilization", "Share of time that slots were busy."),
    ("geneva_job_worker_memory_bytes", "worker_memory_bytes", "Most memory that a worker had."),
    ("geneva_job_fragment_seconds", "fragment_seconds", "Mean time of a fragment."),
)
_STATES = ("total", "checkpointed", "ready_to_commit", "committed")


@dataclass(frozen=True, slots=True)
class _Family:
    """A metric and its samples: labels and values."""

    name: str
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]

    def text(self) -> str:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} gauge"]
        for labels, value in self.samples:
            written = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            number = f"{value:g}" if value < 1e6 else f"{value:.0f}"
            lines.append(f"{self.name}{{{written}}} {number}")
        return "".join(f"{line}\n" for line in lines)


def metrics_text(
    tables: Sequence[TableInfo], jobs: Sequence[JobRecord], fresh: Mapping[str, Freshness]
) -> str:
    """Everything, in the text format 0.0.4. Stale rows are those of the last plan seen here."""
    running = [job for job in jobs if not job.status.is_final]
    families = (_statuses(jobs), *_table_families(tables, fresh), *_job_families(running))
    return "".join(family.text() for family in families)


def _statuses(jobs: Sequence[JobRecord]) -> _Family:
    found = Counter(job.status for job in jobs)
    samples = [({"status": status.value}, found[status]) for status in JobStatus]
    return _Family("geneva_jobs", "Jobs by status.", samples)


def _table_families(
    tables: Sequence[TableInfo], fresh: Mapping[str, Freshness]
) -> Iterator[_Family]:
    good = [table for table in tables if table.trouble is None]
    rows = [({"table": t.name}, t.rows) for t in good]
    yield _Family("geneva_table_rows", "Rows of a table.", rows)
    versions = [({"table": t.name}, t.version) for t in good]
    yield _Family("geneva_table_version", "Version of a table.", versions)
    stale = [
        ({"table": name, "column": column.column}, column.stale)
        for name, found in fresh.items()
        for column in found.columns
        if column.trouble is None
    ]
    text = "Rows of a computed column without a right value, when last planned."
    yield _Family("geneva_column_stale_rows", text, stale)


def _job_families(running: Sequence[JobRecord]) -> Iterator[_Family]:
    rows = [
        ({**_labels(job), "state": state}, metric(job.metrics, state))
        for job in running
        for state in _STATES
    ]
    yield _Family("geneva_job_rows", "Rows of a running job by state.", rows)
    rates = [(_labels(job), metric(job.metrics, "rows_per_second")) for job in running]
    yield _Family("geneva_job_rows_per_second", "Rows per second of a running job.", rates)
    for name, key, text in _GAUGES:
        yield _Family(name, text, [(_labels(job), metric(job.metrics, key)) for job in running])
    stages = [
        ({**_labels(job), "stage": name.lower()}, metric(job.metrics, key))
        for job in running
        for name, key in STAGES
    ]
    text = "Time that the tasks of a running job spent, by stage."
    yield _Family("geneva_job_stage_seconds", text, stages)


def _labels(job: JobRecord) -> dict[str, str]:
    return {"job": job.job_id, "table": job.table_name, "column": job.column_name}


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").replace("\r", " ")

"""The database in numbers, as Prometheus reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from geneva.console.plots import STAGES
from geneva.console.queries import Freshness, TableInfo
from geneva.model.jobs import JobStatus
from geneva.storage.jobs.events import JobRecord

_STATES = ("total", "checkpointed", "ready_to_commit", "committed")
Sample = tuple[Mapping[str, str], float]


def metrics_text(
    tables: Sequence[TableInfo], jobs: Sequence[JobRecord], fresh: Mapping[str, Freshness]
) -> str:
    """Everything, in the text format 0.0.4. Stale rows are those of the last plan seen here."""
    good = [table for table in tables if table.trouble is None]
    running = [job for job in jobs if not job.status.is_final]
    statuses = Counter(job.status for job in jobs)
    families: list[Iterable[str]] = [
        _family(
            "geneva_jobs",
            "Jobs by status.",
            [({"status": s.value}, statuses[s]) for s in JobStatus],
        ),
        _family(
            "geneva_table_rows", "Rows of a table.", [({"table": t.name}, t.rows) for t in good]
        ),
        _family(
            "geneva_table_version",
            "Version of a table.",
            [({"table": t.name}, t.version) for t in good],
        ),
        _family(
            "geneva_column_stale_rows",
            "Rows of a computed column without a right value, when last planned.",
            [
                ({"table": name, "column": column.column}, column.stale)
                for name, found in fresh.items()
                for column in found.columns
                if column.trouble is None
            ],
        ),
        _family(
            "geneva_job_rows",
            "Rows of a running job by state.",
            [
                ({**_job(job), "state": state}, float(job.metrics.get(state, 0)))
                for job in running
                for state in _STATES
            ],
        ),
        _family(
            "geneva_job_rows_per_second",
            "Rows per second of a running job.",
            [(_job(job), float(job.metrics.get("rows_per_second", 0.0))) for job in running],
        ),
        _family(
            "geneva_job_stage_seconds",
            "Time that the tasks of a running job spent, by stage.",
            [
                ({**_job(job), "stage": name.lower()}, float(job.metrics.get(key, 0.0)))
                for job in running
                for name, key in STAGES
            ],
        ),
    ]
    return "".join(line + "\n" for family in families for line in family)


def _job(job: JobRecord) -> dict[str, str]:
    return {"job": job.job_id, "table": job.table_name, "column": job.column_name}


def _family(name: str, help_text: str, samples: Sequence[Sample]) -> list[str]:
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
    for labels, value in samples:
        written = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(
            f"{name}{{{written}}} {value:g}" if value < 1e6 else f"{name}{{{written}}} {value:.0f}"
        )
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").replace("\r", " ")

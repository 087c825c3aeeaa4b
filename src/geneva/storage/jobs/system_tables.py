"""Jobs and errors as tables, for programs that read them with LanceDB's own queries."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from geneva.errors import TableNotFoundError
from geneva.model.jobs import JobMetrics
from geneva.storage.jobs.failures import ErrorRecord
from geneva.storage.jobs.records import JobRecord
from geneva.storage.lance.lancedb_import import lancedb

SYSTEM_NAMESPACE = "_geneva"
"""What the namespace of these tables is called."""
_TIME = pa.timestamp("us", tz="UTC")
_TEXTS = pa.list_(pa.string())
_JOBS = pa.schema(
    [
        *((name, pa.string()) for name in ("job_id", "job_type", "table_name", "column_name")),
        *((name, pa.string()) for name in ("status", "launched_by", "cluster_name", "manifest_id")),
        *((name, pa.string()) for name in ("manifest_checksum", "config", "error")),
        *((name, _TIME) for name in ("launched_at", "updated_at", "completed_at")),
        *((name, _TEXTS) for name in ("input_columns", "output_columns", "metrics", "events")),
    ]
)
_ERRORS = pa.schema(
    [
        *((name, pa.string()) for name in ("error_id", "error_type", "error_message")),
        *((name, pa.string()) for name in ("error_trace", "job_id", "table_name", "column_name")),
        *((name, pa.string()) for name in ("table_uri", "udf_name", "udf_version")),
        *((name, _TEXTS) for name in ("input_columns", "output_columns")),
        *((name, pa.int64()) for name in ("table_version", "fragment_id", "attempt")),
        *((name, pa.uint64()) for name in ("row_address", "row_id")),
        ("timestamp", _TIME),
    ]
)


def system_table(name: str, jobs: Iterable[JobRecord], errors: Iterable[ErrorRecord]) -> Any:
    """A table of LanceDB's of what is on record now: `geneva_jobs`, `geneva_errors`.

    It is in a folder of this machine, where Lance can read it too, for as long as the handle lives.
    """
    match name:
        case "geneva_jobs":
            rows = pa.Table.from_pylist([_job(job) for job in jobs], schema=_JOBS)
        case "geneva_errors":
            found = [{n: getattr(error, n) for n in _ERRORS.names} for error in errors]
            rows = pa.Table.from_pylist(found, schema=_ERRORS)
        case _:
            raise TableNotFoundError(
                f"There is no system table {name!r}: there are 'geneva_jobs' and 'geneva_errors'."
            )
    folder = tempfile.mkdtemp(prefix="geneva-system-")
    table = lancedb().connect(folder).create_table(name, rows)
    weakref.finalize(table, shutil.rmtree, folder, ignore_errors=True)
    return table


def _job(job: JobRecord) -> dict[str, Any]:
    facts = {name: getattr(job, name) for name in _JOBS.names}
    numbers = [
        {"name": m.name, "count": m.n, "total": m.total, "done": m.done, "desc": m.desc}
        for m in JobMetrics(job.metrics)
    ]
    return {
        **facts,
        "status": job.status.value,
        "config": json.dumps(dict(job.config), default=str),
        "metrics": [json.dumps(number) for number in numbers],
        "events": [f"{event.at.isoformat()} {event}" for event in job.events],
    }

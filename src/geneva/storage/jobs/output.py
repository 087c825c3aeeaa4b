"""What the tasks of jobs printed and logged: the end of it, for as long as the history is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import pyarrow as pa

from geneva.model.tables import Secrets
from geneva.model.uris import table_uri
from geneva.render.plain import plain
from geneva.storage.jobs.append_only import AppendOnlyTable, quoted
from geneva.storage.jobs.events import plain_id

_SCHEMA = pa.schema(
    [
        pa.field("job_id", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("task", pa.string()),
        pa.field("text", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """The end of what one task printed and logged. `str` gives it fit for a terminal."""

    job_id: str
    task: str
    """The column, and the rows that the task computed."""
    text: str
    """As it was printed; it may hold anything, also what a terminal would obey."""
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When the task ended."""

    def __str__(self) -> str:
        """What was printed, line by line."""
        return plain(self.text, lines=True)


class JobOutput(list[TaskOutput]):
    """The output of a job, task by task: a list, which prints as text."""

    def __str__(self) -> str:
        """What was printed, with a line before what each task printed."""
        return "".join(f"--- {plain(each.task)}\n{each}" for each in self)


class OutputStore:
    """The output of all jobs of a database. It lives beside the tables and shows in no list."""

    def __init__(self, database_uri: str, storage_options: Secrets) -> None:
        """Point at a database; nothing is read or written yet."""
        uri = table_uri(database_uri, "_geneva/output")
        self._table = AppendOnlyTable(uri, _SCHEMA, storage_options)

    def append(self, records: Sequence[TaskOutput]) -> None:
        """Write what tasks printed, in one commit."""
        if records:
            rows = [asdict(record) for record in records]
            self._table.append(pa.Table.from_pylist(rows, schema=_SCHEMA))

    def of_job(self, job_id: str) -> JobOutput:
        """What the tasks of a job printed, in the order in which they ended."""
        found = self._table.read(f"job_id = {quoted(plain_id(job_id))}").to_pylist()
        return JobOutput(sorted((TaskOutput(**row) for row in found), key=lambda each: each.at))

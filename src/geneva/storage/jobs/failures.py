"""The error store: the rows on which functions failed, of all tables of a database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa

from geneva.model.computation import is_named
from geneva.model.tables import Secrets
from geneva.model.uris import table_uri
from geneva.render import html
from geneva.render.text import count
from geneva.storage.jobs.append_only import AppendOnlyTable, quoted
from geneva.storage.jobs.events import plain_id

_SHOWN_RECORDS = 50

_SCHEMA = pa.schema(
    [
        pa.field("job_id", pa.string()),
        pa.field("table_name", pa.string()),
        pa.field("column_name", pa.string()),
        pa.field("fragment_id", pa.int64()),
        pa.field("row_address", pa.uint64()),
        pa.field("row_id", pa.uint64()),
        pa.field("exception_type", pa.string()),
        pa.field("message", pa.string()),
        pa.field("traceback", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("input_preview", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("table_uri", pa.string()),
        pa.field("table_version", pa.int64()),
        pa.field("udf_name", pa.string()),
        pa.field("udf_version", pa.string()),
        pa.field("input_columns", pa.list_(pa.string())),
        pa.field("output_columns", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """A row on which a function failed."""

    job_id: str
    table_name: str
    column_name: str
    fragment_id: int
    row_address: int
    """Fragment and offset at the time; compaction and updates change it."""
    row_id: int | None
    """The stable row id, if the table has them."""
    exception_type: str
    """The exception's class; "WorkerDied" where the row killed its worker."""
    message: str
    traceback: str = field(repr=False)
    """The function's own frames; empty for all but the first hundred of a task."""
    attempt: int
    """How often the row was tried."""
    input_preview: str
    at: datetime = field(repr=False)
    # What follows is None in records of releases before 0.2.
    table_uri: str | None = field(default=None, repr=False)
    table_version: int | None = field(default=None, repr=False)
    """The version that the inputs were read from: of a view's function, that of its source."""
    udf_name: str | None = field(default=None, repr=False)
    udf_version: str | None = field(default=None, repr=False)
    input_columns: Sequence[str] | None = field(default=None, repr=False)
    output_columns: Sequence[str] | None = field(default=None, repr=False)
    """The columns that the call was to fill."""

    @property
    def error_type(self) -> str:
        """The exception's class, by Geneva's name."""
        return self.exception_type

    @property
    def error_message(self) -> str:
        """The exception's message, by Geneva's name."""
        return self.message

    @property
    def error_trace(self) -> str:
        """The function's own frames, by Geneva's name."""
        return self.traceback

    @property
    def timestamp(self) -> datetime:
        """When it failed, by Geneva's name."""
        return self.at

    @property
    def error_id(self) -> str:
        """What this failure is known by: its job, column and row."""
        return f"{self.job_id}/{self.column_name}/{self.row_address}"

    # Of Ray's actors and of how they search a batch for its bad row; nothing here is like them.

    @property
    def actor_id(self) -> None:
        """None: there are no actors."""

    @property
    def batch_index(self) -> None:
        """None: rows are known by their address."""

    @property
    def max_attempts(self) -> None:
        """None: how often a row may be tried depends on the error; see the UDF's `on_error`."""

    @property
    def bisect_depth(self) -> None:
        """None: rows are found one by one."""

    def _repr_html_(self) -> str:
        """Show the failure in a notebook."""
        pairs = (
            ("column", self.column_name),
            ("row address", self.row_address),
            ("row id", self.row_id),
            ("error", f"{self.exception_type}: {self.message}"),
            ("attempt", self.attempt),
            ("input", self.input_preview),
            ("job", self.job_id),
        )
        return html.section(f"Failed row of table {self.table_name!r}", html.facts(pairs))


class ErrorRecords(list[ErrorRecord]):
    """Failed rows: a list, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        """Show the newest first, and not all of many."""
        rows = [
            (e.column_name, e.row_address, e.exception_type, e.message, e.attempt, e.input_preview)
            for e in self[: -_SHOWN_RECORDS - 1 : -1]
        ]
        headers = ("column", "row address", "error", "message", "attempt", "input")
        more = len(self) - len(rows)
        rest = [html.note(f"... and {more:,} older ones")] if more else []
        return html.section(count(len(self), "failed row"), html.grid(headers, rows), *rest)


class FailureStore:
    """The failed rows of a database. It lives beside the tables and shows in no list of them."""

    def __init__(self, database_uri: str, storage_options: Secrets) -> None:
        """Point at a database; nothing is read or written yet."""
        uri = table_uri(database_uri, "_geneva/errors")
        self._table = AppendOnlyTable(uri, _SCHEMA, storage_options)

    def append(self, records: Sequence[ErrorRecord]) -> None:
        """Write records, in one commit."""
        if records:
            columns = {n: [getattr(record, n) for record in records] for n in _SCHEMA.names}
            self._table.append(pa.table(columns, schema=_SCHEMA))

    def list(
        self,
        table_name: str | None = None,
        job_id: str | None = None,
        column_name: str | None = None,
        error_type: str | None = None,
    ) -> list[ErrorRecord]:
        """The records, in the order of time, then of rows.

        Those of a column are also those of columns that one call fills together with it.
        """
        wanted = {
            "table_name": table_name,
            "job_id": job_id,
            "exception_type": error_type,
        }
        conditions = [
            f"{name} = {quoted(plain_id(value))}"
            for name, value in wanted.items()
            if value is not None
        ]
        found = self._table.read(" AND ".join(conditions) or None)
        records = [
            ErrorRecord(**row)
            for row in found.to_pylist()
            if column_name is None or is_named(row["column_name"], column_name)
        ]
        return ErrorRecords(sorted(records, key=lambda r: (r.at, r.row_address)))

"""Records of a database that people give names to: clusters and manifests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from geneva.model.tables import Secrets
from geneva.model.uris import table_uri
from geneva.storage.jobs.append_only import AppendOnlyTable, quoted

_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("record", pa.string()),
    ]
)


class NamedRecords:
    """Records by name; the latest of a name counts, and one without content deletes it."""

    def __init__(self, database_uri: str, kind: str, storage_options: Secrets) -> None:
        """Point at a database; nothing is read or written yet."""
        uri = table_uri(database_uri, f"_geneva/{kind}")
        self._table = AppendOnlyTable(uri, _SCHEMA, storage_options)

    def put(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a record under a name, instead of the one that is there."""
        self._append(name, json.dumps(record))

    def delete(self, name: str) -> bool:
        """Forget a name; whether there was one."""
        known = name in self.read(name)
        if known:
            self._append(name, None)
        return known

    def read(self, name: str | None = None) -> dict[str, dict[str, Any]]:
        """The records, sorted by name, or the one of a name."""
        condition = f"name = {quoted(name)}" if name is not None else None
        rows = self._table.read(condition).sort_by("at").to_pylist()
        latest = {row["name"]: row["record"] for row in rows}
        return {key: json.loads(latest[key]) for key in sorted(latest) if latest[key] is not None}

    def _append(self, name: str, record: str | None) -> None:
        row = {"name": name, "at": datetime.now(UTC), "record": record}
        self._table.append(pa.Table.from_pylist([row], schema=_SCHEMA))

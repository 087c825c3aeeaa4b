"""Where unpublished work is kept between runs: batch checkpoints and records of staged files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import pyarrow as pa

from geneva.model.tables import TableRef
from geneva.storage.checkpoints.store import (
    CheckpointKey,
    CheckpointStore,
    LanceCheckpointStore,
    index_keys,
)
from geneva.storage.columns.staged_files import StagedFile

_READS_AT_ONCE = 16
Place: TypeAlias = tuple[str, int]
"""Which work a checkpoint is of: the prefix of its key, and the fragment."""


@lru_cache(maxsize=8)
def open_checkpoints(ref: TableRef) -> CheckpointStore:
    """The checkpoint store of a table, in its own folder and object store."""
    return LanceCheckpointStore(f"{ref.uri}/_checkpoints", ref.storage_options)


def record_staged(
    store: CheckpointStore, prefix: str, staged: StagedFile, *others: tuple[str, StagedFile]
) -> None:
    """Note staged files, so that a later run finds them if this one never commits them.

    One record for all of them, under the key of the first: a task writes it once.
    """
    key = CheckpointKey(prefix, staged.fragment_id).path()
    files = ((prefix, staged), *others)
    store[key] = pa.RecordBatch.from_pylist([_as_row(*file) for file in files])


def _as_row(prefix: str, staged: StagedFile) -> dict[str, Any]:
    return {
        "prefix": prefix,
        "fragment_id": staged.fragment_id,
        "file": staged.path,
        "src_data_files": json.dumps(sorted(staged.inputs)),
        "inputs": json.dumps(list(staged.inputs)),
        "output_field_ids": json.dumps(sorted(staged.field_ids)),
        "field_ids": json.dumps(list(staged.field_ids)),
        "column_uuid": staged.column_uuid,
        "physical_rows": staged.physical_rows,
        "base": staged.base or "",
        "size_bytes": staged.size_bytes,
    }


def read_record(store: CheckpointStore, key: CheckpointKey) -> dict[Place, StagedFile]:
    """The staged files of the record that a key is in; empty when it can't be read."""
    try:
        rows = store[key.stored_at].to_pylist()
        # Records of the first release are of one file, whose key says the rest.
        own = {"prefix": key.prefix, "fragment_id": key.fragment_id}
        return dict(_from_row({**own, **row}) for row in rows)
    except (KeyError, ValueError, TypeError):
        return {}


def _read_records(
    store: CheckpointStore, keys: Sequence[CheckpointKey]
) -> list[dict[Place, StagedFile]]:
    """Several records, several at a time: an object store answers each after a while."""
    if len(keys) < 2:
        return [read_record(store, key) for key in keys]
    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="geneva-records") as threads:
        return list(threads.map(partial(read_record, store), keys))


def _from_row(row: dict[str, Any]) -> tuple[Place, StagedFile]:
    staged = StagedFile(
        fragment_id=int(row["fragment_id"]),
        path=row["file"],
        physical_rows=int(row["physical_rows"]),
        column_uuid=row["column_uuid"],
        field_ids=tuple(json.loads(row["field_ids"])),
        inputs=tuple(json.loads(row["inputs"])),
        base=row["base"] or None,
        size_bytes=row.get("size_bytes"),
    )
    return (row["prefix"], staged.fragment_id), staged


@dataclass(frozen=True, slots=True)
class StoredWork:
    """What is in a checkpoint store: per prefix and fragment, the keys, and staged files."""

    keys: dict[Place, list[CheckpointKey]]
    staged: dict[Place, StagedFile]


def read_work(store: CheckpointStore) -> StoredWork:
    """Look through a store; records of staged files are read, checkpoints are not."""
    keys = index_keys(store.list_keys("udf-"))
    records = [key for own in keys.values() for key in own if key.rows is None]
    staged: dict[Place, StagedFile] = {}
    for record, files in zip(records, _read_records(store, records), strict=True):
        for place, file in files.items():
            staged[place] = file
            if place != (record.prefix, record.fragment_id):
                member = CheckpointKey(*place, record=record.path())
                keys.setdefault(place, []).append(member)
    return StoredWork(keys, staged)

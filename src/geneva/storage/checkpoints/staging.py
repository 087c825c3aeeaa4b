"""Where unpublished work is kept between runs: batch checkpoints and records of staged files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache

import pyarrow as pa
from lance.file import LanceFileReader

from geneva.model.tables import TableRef
from geneva.storage.checkpoints.store import CheckpointKey, CheckpointStore, LanceCheckpointStore
from geneva.storage.columns.staged_files import StagedFile, staged_file_is_whole


@lru_cache(maxsize=8)
def open_checkpoints(ref: TableRef) -> CheckpointStore:
    """The checkpoint store of a table, in its own folder and object store."""
    return LanceCheckpointStore(f"{ref.uri}/_checkpoints", ref.storage_options)


def record_staged(store: CheckpointStore, prefix: str, staged: StagedFile) -> None:
    """Note a staged file, so that a later run finds it if this one never commits it."""
    key = CheckpointKey(prefix, staged.fragment_id).path()
    store[key] = pa.RecordBatch.from_pylist(
        [
            {
                "file": staged.path,
                "src_data_files": json.dumps(sorted(staged.inputs)),
                "inputs": json.dumps(list(staged.inputs)),
                "output_field_ids": json.dumps(sorted(staged.field_ids)),
                "field_ids": json.dumps(list(staged.field_ids)),
                "column_uuid": staged.column_uuid,
                "physical_rows": staged.physical_rows,
                "base": staged.base or "",
            }
        ]
    )


def read_staged(
    store: CheckpointStore, ref: TableRef, prefix: str, fragment_id: int
) -> StagedFile | None:
    """A staged file that an earlier run recorded; None when there is none, or it is not whole."""
    try:
        record = store[CheckpointKey(prefix, fragment_id).path()].to_pylist()[0]
        staged = StagedFile(
            fragment_id=fragment_id,
            path=record["file"],
            physical_rows=int(record["physical_rows"]),
            column_uuid=record["column_uuid"],
            field_ids=tuple(json.loads(record["field_ids"])),
            inputs=tuple(json.loads(record["inputs"])),
            base=record["base"] or None,
        )
    except (KeyError, IndexError, ValueError, TypeError):
        return None
    return staged if staged_file_is_whole(ref, staged) else None


def read_staged_batches(ref: TableRef, path: str, rows: int) -> Iterator[pa.RecordBatch]:
    """What is in a staged data file, in order."""
    reader = LanceFileReader(f"{ref.uri}/data/{path}", storage_options=ref.storage_options.plain())
    yield from reader.read_all(batch_size=rows).to_batches()

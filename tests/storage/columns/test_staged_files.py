"""Column files that are staged: what is in them is what was given, in every format."""

from __future__ import annotations

import uuid
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

from geneva.model.computation import receipt_name
from geneva.model.rows import RowSet
from geneva.model.tables import TableRef
from geneva.storage.columns.provenance import Provenance
from geneva.storage.columns.staged_files import stage_columns, written_schema

ROWS = 5_000
RECEIPT = receipt_name(uuid.uuid4().hex)
RANDOM = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, ROWS)
SCHEMA = pa.schema(
    [
        pa.field("v", pa.float64()),
        pa.field(RECEIPT, pa.int64(), metadata={"geneva.receipt_of": "v"}),
    ]
)


def test_nothing_tries_to_compress_receipts() -> None:
    """And the values are written as Lance thinks best."""
    value, receipt = written_schema(SCHEMA, ["v", RECEIPT])
    assert receipt.metadata == {b"lance-encoding:compression": b"none"}
    assert value.metadata is None


@pytest.mark.parametrize("storage_version", ["2.0", "2.1", "2.2"])
@pytest.mark.parametrize(
    "receipts",
    [
        pa.array(RANDOM),
        pa.array(RANDOM, mask=np.arange(ROWS) % 3 > 0),
        pa.array(np.full(ROWS, RANDOM[0])),
        pa.array(RANDOM[np.arange(ROWS) % 10]),
        pa.nulls(ROWS, pa.int64()),
    ],
    ids=["random", "some", "equal", "ten", "none"],
)
def test_receipts_read_back_as_they_were(
    receipts: pa.Array, storage_version: str, tmp_path: Path
) -> None:
    batch = pa.record_batch([pa.array(np.arange(ROWS) / 7), receipts], schema=SCHEMA)
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(
        SCHEMA.empty_table(), uri, data_storage_version=storage_version, mode="create"
    )
    schema = written_schema(dataset.schema, SCHEMA.names)
    made = Provenance("column", "1", (), RowSet.full(ROWS))
    halves = [batch.slice(0, 1_234), batch.slice(1_234)]
    path, rows = stage_columns(TableRef("t", uri), dataset, schema, halves, made, complete=True)
    assert rows == ROWS
    found = LanceFileReader(f"{uri}/data/{path}").read_all().to_table()
    assert found["v"].to_pylist() == batch["v"].to_pylist()
    assert found[RECEIPT].to_pylist() == receipts.to_pylist()

"""Rows that are staged as fragments: whatever memory they come in."""

from __future__ import annotations

import decimal
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from geneva.model.tables import TableRef
from geneva.storage.columns.row_files import fragments_of, stage_rows


@pytest.mark.parametrize("shift", [0, 4, 8])
def test_memory_that_begins_anywhere_is_staged(tmp_path: Path, shift: int) -> None:
    """What another process sent is in one buffer, and its parts begin at multiples of 8."""
    values = pa.array([decimal.Decimal("1.50"), decimal.Decimal("-2.25")], pa.decimal128(10, 2))
    data = values.buffers()[1].to_pybytes()
    memory = np.zeros(len(data) + 80, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    memory[start : start + len(data)] = np.frombuffer(data, np.uint8)
    buffer = pa.py_buffer(memoryview(memory)[start : start + len(data)])
    moved = pa.Array.from_buffers(values.type, len(values), [None, buffer])
    assert moved.buffers()[1].address % 64 == shift
    batch = pa.record_batch({"d": moved})
    ref = TableRef("t", str(tmp_path / "t.lance"))
    staged = stage_rows(ref, batch.schema, iter([batch]), 100, create=True)
    operation = lance.LanceOperation.Overwrite(batch.schema, fragments_of([staged]))
    assert lance.LanceDataset.commit(ref.uri, operation).to_table()["d"].to_pylist() == [
        *values.to_pylist()
    ]

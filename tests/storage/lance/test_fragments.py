"""Reading ranges of a fragment: what UDFs get to see, and how much of it at once."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from geneva.model.rows import RowRange
from geneva.storage.lance.fragments import fitting_window, read_windows

TEXTS = [f"row {i}" for i in range(5_000)]


@pytest.fixture(params=[False, True], ids=["whole", "with_deletions"])
def dataset(tmp_path: Path, request: pytest.FixtureRequest) -> lance.LanceDataset:
    data = pa.table({"id": range(5_000), "text": TEXTS, "bytes": [t.encode() for t in TEXTS]})
    dataset = lance.write_dataset(data, str(tmp_path / "t.lance"))
    if request.param:
        dataset.delete("id % 7 = 3")
    return dataset


@pytest.mark.parametrize("start", [0, 1, 3, 4_000])
def test_range_is_physical(dataset: lance.LanceDataset, start: int) -> None:
    rows = RowRange(start, start + 900)
    at = start
    for first, batch in read_windows(dataset, 0, ["text", "bytes", "id"], rows, 64):
        assert first == at
        expected = TEXTS[at : at + batch.num_rows]
        assert batch.column(0).to_pylist() == expected
        assert batch.column(1).to_pylist() == [text.encode() for text in expected]
        at += batch.num_rows
    assert at == rows.end


def test_window_follows_the_width_in_memory(tmp_path: Path) -> None:
    wide = pa.table({"id": range(2_000), "text": ["a" * 100_000] * 2_000})
    dataset = lance.write_dataset(wide, str(tmp_path / "t.lance"))
    assert sum(f.file_size_bytes or 0 for f in dataset.get_fragments()[0].metadata.files) < 2**22
    rows = RowRange(0, 2_000)
    assert fitting_window(dataset, 0, ["text"], rows, 65_536) == 32 * 2**20 // 100_004
    assert fitting_window(dataset, 0, ["id"], rows, 65_536) == 65_536

"""Reading ranges of a fragment: what UDFs get to see, and how much of it at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from geneva.model.rows import RowRange
from geneva.storage.lance.fragments import (
    MAX_WINDOW_ROWS,
    fitting_window,
    read_at_once,
    read_windows,
)

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


def pieces_of(
    dataset: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch, window: int
) -> list[int]:
    """The rows of each scan that a whole fragment is read by, a window of so many at a time."""
    sizes: list[int] = []
    scanner = lance.LanceDataset.scanner

    def counted(self: lance.LanceDataset, **options: Any) -> Any:
        sizes.append(options["limit"])
        return scanner(self, **options)

    monkeypatch.setattr(lance.LanceDataset, "scanner", counted)
    rows = RowRange(0, dataset.count_rows())
    assert sum(b.num_rows for _, b in read_windows(dataset, 0, ["v"], rows, window)) == len(rows)
    return sizes


NARROW = pa.table({"v": [str(i) for i in range(1_000)]})
"""Rows whose width is not known before some were read."""


def test_narrow_rows_are_read_in_ever_larger_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = lance.write_dataset(NARROW, str(tmp_path / "t.lance"))
    assert pieces_of(dataset, monkeypatch, 100) == [100, 200, 400, 300]


@pytest.mark.parametrize(
    ("width", "sizes"), [(1, [4_000]), (1_024, [1_000, 1_000, 1_000, 1_000]), (8_192, [100] * 40)]
)
def test_rows_of_a_known_width_are_read_8_mib_at_a_time(
    width: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4_000 * width)), width)
    dataset = lance.write_dataset(pa.table({"v": rows}), str(tmp_path / "t.lance"))
    assert pieces_of(dataset, monkeypatch, 100) == sizes


def test_rows_that_get_wider_are_read_in_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [b""] * 100 + [b"x" * 1_000_000] * 60
    dataset = lance.write_dataset(pa.table({"v": values}), str(tmp_path / "t.lance"))
    sizes = pieces_of(dataset, monkeypatch, 4)
    assert sizes[:5] == [4, 8, 16, 32, 32]
    assert sizes[-3:-1] == [8, 8]  # 8 MiB each, once it is known how wide they are


def test_what_was_read_before_the_damage_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = lance.write_dataset(NARROW, str(tmp_path / "t.lance"))
    scanner = lance.LanceDataset.scanner

    def damaged(self: lance.LanceDataset, **options: Any) -> Any:
        found = scanner(self, **options)

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in found.to_batches():
                if "450" in batch.column(0).to_pylist():
                    raise OSError("damaged")
                yield batch

        return SimpleNamespace(to_batches=batches)

    monkeypatch.setattr(lance.LanceDataset, "scanner", damaged)
    seen: list[str] = []
    batches = read_windows(dataset, 0, ["v"], RowRange(0, 1_000), 100)
    with pytest.raises(OSError, match="damaged"):
        seen.extend(x for _, batch in batches for x in batch.column(0).to_pylist())
    assert seen == [str(i) for i in range(400)]


def test_without_a_thread_to_spare_all_is_read_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = lance.write_dataset(NARROW, str(tmp_path / "t.lance"))

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert pieces_of(dataset, monkeypatch, 100) == [100, 200, 400, 300]


def test_the_first_format_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(pa.table({"v": range(1_000)}), uri, data_storage_version="legacy")
    assert pieces_of(dataset, monkeypatch, 100) == [1_000]


def test_wide_rows_are_read_a_quarter_of_a_window_at_a_time() -> None:
    assert read_at_once(MAX_WINDOW_ROWS) == MAX_WINDOW_ROWS
    assert read_at_once(20_000) == 5_000
    assert [read_at_once(window) for window in (1, 10, 40)] == [1, 10, 16]

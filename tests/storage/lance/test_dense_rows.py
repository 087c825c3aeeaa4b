"""Rows read by id as a scan: the same as taken one by one, or refused."""

from __future__ import annotations

from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from geneva.storage.lance.dense_rows import DenseRows

ROWS, FRAGMENT = 6_000, 1_000
PROJECTION = {"c0": "x", "c1": "name", "row": "_rowid"}


@pytest.fixture
def dataset(tmp_path: Path) -> lance.LanceDataset:
    data = pa.table({"x": np.arange(ROWS), "name": [f"n{i}" for i in range(ROWS)]})
    return lance.write_dataset(
        data, str(tmp_path / "t.lance"), max_rows_per_file=FRAGMENT, enable_stable_row_ids=True
    )


@pytest.fixture
def scans(dataset: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many fragments each scan has read."""
    counted: list[int] = []
    plain = type(dataset).scanner

    def scanner(self: lance.LanceDataset, *args, **options):  # type: ignore[no-untyped-def]
        counted.append(len(options["fragments"]))
        return plain(self, *args, **options)

    monkeypatch.setattr(type(dataset), "scanner", scanner)
    return counted


def ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(numbers, dtype=np.uint64)


def test_neighbouring_fragments_are_one_scan(dataset: lance.LanceDataset, scans: list[int]) -> None:
    wanted = ids(*range(500, 4_500, 2))
    found = DenseRows(dataset, PROJECTION).read(wanted)
    assert found is not None
    assert found["c0"].to_pylist() == wanted.tolist()
    assert found["c1"].to_pylist() == [f"n{i}" for i in wanted]
    assert scans == [5]


def test_a_fragment_with_deleted_rows_is_a_scan_by_itself(
    dataset: lance.LanceDataset, scans: list[int]
) -> None:
    dataset.delete("x % 1000 = 7 AND x > 2000 AND x < 3000")
    wanted = ids(*(i for i in range(ROWS) if i != 2_007))
    found = DenseRows(dataset, PROJECTION).read(wanted)
    assert found is not None
    assert found["c0"].to_pylist() == wanted.tolist()
    assert scans == [2, 1, 3]


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_and_rows(dataset: lance.LanceDataset, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(draw.integers(0, 4)):
        low = int(draw.integers(0, ROWS))
        match draw.integers(0, 4):
            case 0:
                dataset.delete(f"x >= {low} AND x < {low + int(draw.integers(1, 1_500))}")
            case 1:
                dataset.update({"name": "'new'"}, where=f"x = {low}")
            case 2:
                dataset.insert(pa.table({"x": [ROWS + low], "name": ["more"]}))
            case _:
                dataset.optimize.compact_files(target_rows_per_fragment=2_500)
    every = np.sort(dataset.to_table(columns=[], with_row_id=True)["_rowid"].to_numpy())
    reader = DenseRows(dataset, PROJECTION)
    for share in (1.0, 0.5, 0.25):
        start, end = np.sort(draw.integers(0, len(every) + 1, 2))
        wanted = every[start:end][draw.random(end - start) < share]
        found = reader.read(wanted)
        if found is not None:
            right = dataset._take_rows(wanted.tolist(), PROJECTION).drop(["row"])
            assert found.combine_chunks() == right.combine_chunks()


def test_rows_that_have_moved_are_not_looked_for_where_they_were(
    dataset: lance.LanceDataset,
) -> None:
    dataset.update({"name": "'new'"}, where="x = 1500")
    assert DenseRows(dataset, PROJECTION).read(ids(*range(1_000, 2_000))) is None


def test_rows_of_which_nothing_is_read(dataset: lance.LanceDataset) -> None:
    found = DenseRows(dataset, {"row": "_rowid"}).read(ids(*range(0, 2_000, 2)))
    assert found is not None
    assert found.num_rows == 1_000

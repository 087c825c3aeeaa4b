"""Reading a table in parts: every live row once, and just what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva.model.rows import RowRange
from geneva.storage.lance.scans import (
    Scan,
    ScanPart,
    columns_of,
    read_sizes,
    scan_part,
    scan_schema,
)


@pytest.fixture(params=[False, True], ids=["addresses", "stable ids"])
def dataset(tmp_path: Path, request: pytest.FixtureRequest) -> lance.LanceDataset:
    data = pa.table({"id": range(90), "st": [{"n": i, "s": f"s{i}"} for i in range(90)]})
    made = lance.write_dataset(
        data, tmp_path / "t.lance", max_rows_per_file=30, enable_stable_row_ids=request.param
    )
    made.delete("id % 10 = 3 OR id = 0")
    return lance.dataset(tmp_path / "t.lance")


def rows(dataset: lance.LanceDataset, scan: Scan, part: ScanPart) -> list[dict[str, Any]]:
    batches = list(scan_part(dataset, scan, part))
    assert all(batch.schema.equals(scan_schema(dataset, scan)) for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


WHERE = (None, "id = 44", "id >= 20", "id < 0", "st.n % 2 = 0 AND id > 10", "id IN (31, 32, 33)")


@pytest.mark.parametrize(
    ("where", "columns"),
    [*((where, ("st.s", "id")) for where in WHERE), (None, ("id",)), (None, ()), (WHERE[-1], ())],
)
def test_parts_make_the_whole(
    dataset: lance.LanceDataset, where: str | None, columns: tuple[str, ...]
) -> None:
    scan = Scan(columns_of(dataset.schema, columns), where, row_id=True, row_address=True)
    wanted = dataset.to_table(
        columns={column.name: column.path for column in scan.columns} | {"i": "id"},
        filter=where,
        with_row_id=True,
        with_row_address=True,
    )
    expected = wanted.drop_columns(["i"]).to_pylist()
    sizes = read_sizes(dataset, scan)
    assert sum(size.live_rows for size in sizes) == 80
    whole = ScanPart(tuple(size.id for size in sizes))
    assert rows(dataset, scan, whole) == expected
    cut = [
        ScanPart((size.id,), RowRange(start, min(start + 7, size.live_rows)))
        for size in sizes
        for start in range(0, size.live_rows, 7)
    ]
    assert [row for part in cut for row in rows(dataset, scan, part)] == expected


def test_sizes_are_those_of_the_columns(dataset: lance.LanceDataset) -> None:
    every = read_sizes(dataset, Scan(columns_of(dataset.schema, ["id", "st"])))
    one = read_sizes(dataset, Scan(columns_of(dataset.schema, ["st.n"])))
    assert all(0 < a.size_bytes <= b.size_bytes for a, b in zip(one, every, strict=True))

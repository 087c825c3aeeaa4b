"""A process that dies in the middle of the refresh of a table function's view."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cluster import wait_for
from conftest import connect
from geneva import udtf
from geneva.execution.runner import InProcessRunner
from processes import kill, nothing_left_in, processes_in, start_script
from support import Calls
from view_support import STABLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
PARTITIONS, SLOTS = 60, 2


@pytest.mark.parametrize(
    "runner", ["InProcessRunner", pytest.param("None", marks=pytest.mark.spark)]
)
def test_killed_and_gone_on_with(tmp_path: Path, calls: Calls, runner: str) -> None:
    @udtf(output_schema=pa.schema([("k", pa.int64()), ("n", pa.int64())]), partition_by="k")
    def slow(source: Any) -> Iterator[dict[str, int]]:
        (k,) = set(source.to_arrow()["k"].to_pylist())
        calls.note([k])
        time.sleep(0.05)
        yield {"k": k, "n": source.count_rows()}

    db = connect(tmp_path / "db", InProcessRunner)
    data = pa.table({"k": [i % PARTITIONS for i in range(3 * PARTITIONS)]})
    source = db.create_table("t", data, storage_options=STABLE)
    view = db.create_udtf_view("v", source, slow)
    code = f"""
        import geneva
        from geneva.execution.runner import InProcessRunner
        db = geneva.connect({db.uri!r}, runner={runner})
        db.open_table("v").refresh(checkpoint_size=5)
        """
    machine = tmp_path / "machine"
    with nothing_left_in(machine):
        process = start_script(machine, code)
        wait_for(lambda: calls.count >= PARTITIONS // 2 or process.poll() is not None, "calls", 400)
        assert kill(process) == "" or calls.count >= PARTITIONS // 2
        wait_for(lambda: not processes_in(machine), "workers to leave", 30)
    before = calls.count
    view.checkout_latest()
    assert len(view) == 0, "no part of it is there"
    result = view.refresh(checkpoint_size=5)
    assert calls.count - before == result.rows_computed
    assert calls.count - PARTITIONS <= 5 * SLOTS, "what was saved is not computed again"
    rows = view.to_arrow().to_pylist()
    assert sorted((r["k"], r["n"]) for r in rows) == [(k, 3) for k in range(PARTITIONS)]

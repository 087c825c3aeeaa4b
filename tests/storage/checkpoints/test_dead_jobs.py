"""Removing what dead jobs left takes nothing from those that live."""

from __future__ import annotations

from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import Connection, udf
from geneva.execution.backfill.committer import publish_columns
from geneva.storage.checkpoints import dead_jobs
from geneva.storage.checkpoints.cleanup import CleanupReport
from geneva.storage.checkpoints.dead_jobs import DeadJobs, remove_dead_files
from geneva.storage.checkpoints.pins import tags_on
from support import publishing


def add_one(x: int) -> int:
    return x + 1


def test_files_that_a_job_publishes_meanwhile_stay(
    local_db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are listed when they are staged, and published when nobody is at work any more."""
    table = local_db.create_table("t", pa.table({"x": range(10)}))
    table.add_columns({"y": udf(add_one, data_type=pa.int64())})
    removed: list[CleanupReport | None] = []
    finish: list[Any] = []

    def staged(*args: Any) -> Any:
        """Clean up when the file is there; publish it in the midst of that."""
        with monkeypatch.context() as patch:
            patch.setattr(dead_jobs, "tags_on", ended)
            finish.append(args)
            removed.append(remove_dead_files(table.ref, DeadJobs(died=True, died_here=True)))
        return finish.pop()

    def ended(dataset: lance.LanceDataset, branch: str | None) -> list[str]:
        assert tags_on(dataset, branch), "the job has its tag"
        finish.append(publish_columns(*finish.pop()))
        return []

    with publishing(local_db, staged):
        table.backfill("y")
    assert removed == [CleanupReport(0, 0, 0)]
    assert table.to_arrow()["y"].to_pylist() == [x + 1 for x in range(10)]

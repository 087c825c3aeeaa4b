"""Unfinished work is found again through any path to the table, and in a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from geneva import skip_on_error
from geneva.errors import UDFExecutionError
from geneva.execution.runner import InProcessRunner
from support import Calls, connect, counted

ROWS, BAD = 40, 35


def through_a_link(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "db")
    return folder / "link"


def through_dots(folder: Path) -> Path:
    return folder / "db" / ".." / "db"


def moved(folder: Path) -> Path:
    return (folder / "db").rename(folder / "elsewhere")


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(folder / "db", folder / "copy"))


@pytest.mark.parametrize("place", [through_a_link, through_dots, moved, copied])
def test_a_job_goes_on_where_another_ended(
    tmp_path: Path, calls: Calls, place: Callable[[Path], Path]
) -> None:
    bad = tmp_path / "bad"
    bad.touch()

    def same(x: int) -> int:
        if x == BAD and bad.exists():
            raise RuntimeError("not yet")
        return x

    table = connect(tmp_path / "db", InProcessRunner).create_table(
        "t", pa.table({"x": range(ROWS)})
    )
    table.add_columns({"y": counted(calls, same, data_type=pa.int64(), version="1")})
    with pytest.raises(UDFExecutionError):
        table.backfill("y", checkpoint_size=5, concurrency=1)
    before = calls.count
    bad.unlink()
    found = connect(place(tmp_path), InProcessRunner).open_table("t")
    found.backfill("y")
    assert calls.count - before == ROWS - BAD
    assert found.to_arrow()["y"].to_pylist() == list(range(ROWS))


@pytest.mark.parametrize("stable", [True, False], ids=["stable", "addresses"])
def test_a_skipped_row_waits_through_changes_that_do_not_concern_it(
    tmp_path: Path, calls: Calls, stable: bool
) -> None:
    def same(x: int) -> int:
        if x == 3:
            raise ValueError("bad")
        return x

    options = {"new_table_enable_stable_row_ids": str(stable).lower()}
    rows = pa.table({"x": range(10), "other": [0] * 10})
    db = connect(tmp_path / "db", InProcessRunner)
    table = db.create_table("t", rows, storage_options=options)
    on_error = skip_on_error()
    table.add_columns(
        {"y": counted(calls, same, data_type=pa.int64(), version="1", on_error=on_error)}
    )
    table.backfill("y")
    before = calls.count
    table.update(where="x = 3", values={"other": 5})
    table.backfill("y")
    table.update(values={"other": 6})
    table.optimize()
    table.backfill("y")
    assert calls.count == before
    table.update(where="x = 3", values={"x": 4})
    table.backfill("y")
    assert calls.count == before + 1

"""Cleaning up after a refresh that died: what it computed is not thrown away."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pyarrow as pa
import pytest

from geneva import Connection, chunker
from support import Calls, tripled, uncommitted
from view_support import make_source, make_view, numbers, values


@pytest.mark.slow
@pytest.mark.parametrize("changed", [False, True])
def test_results_of_a_cut_off_refresh_survive_a_clean_up(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls)
    with uncommitted(monkeypatch):
        view.refresh(checkpoint_size=2)
    assert calls.taken() == [0, 2, 4, 6, 8]
    if changed:
        source.add(numbers(10, 11))
    view.cleanup_checkpoints(older_than=timedelta(0))
    view.refresh()
    assert calls.taken() == ([10] if changed else [])
    assert values(view) == {i: i * 3 for i in range(0, 11 if changed else 10, 2)}
    report = view.cleanup_checkpoints(older_than=timedelta(0))
    assert view.plan_refresh().is_empty
    assert report.checkpoints == 0


def test_those_of_a_chunker_do_as_well(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(id: int) -> Iterator[tuple[int]]:
        calls.note([id])
        yield from ((id,), (-id,))

    made = chunker(twice, output_schema=pa.schema([("n", pa.int64())]), version="1")
    view = local_db.create_udtf_view("v", make_source(local_db, rows=3), made)
    with uncommitted(monkeypatch):
        view.refresh(checkpoint_size=1)
    assert calls.taken() == [0, 1, 2]
    view.cleanup_checkpoints(older_than=timedelta(0))
    view.refresh()
    assert calls.taken() == []
    assert sorted(view.to_arrow()["n"].to_pylist()) == [-2, -1, 0, 0, 1, 2]


def test_columns_that_were_added_are_cleaned_up_like_those_of_a_table(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = make_view(local_db, make_source(local_db), calls)
    view.refresh()
    view.add_columns({"u": (tripled(calls), ["id"])})
    with uncommitted(monkeypatch):
        view.backfill("u", checkpoint_size=1)
    view.drop_columns(["u"])
    assert view.cleanup_checkpoints(older_than=timedelta(0)).checkpoints > 0

"""Publishing staged files, with other writers who commit in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest

from computed_table import ComputedTable
from geneva.errors import ColumnChangedError
from geneva.storage.columns.publish import commit_columns
from geneva.storage.lance import commit


@pytest.fixture
def table(tmp_path: Path) -> ComputedTable:
    return ComputedTable.create(tmp_path)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "pause_seconds", lambda retries: 0)


def between_plan_and_commit(table: ComputedTable, act: Callable[[], Any]) -> Any:
    """Stage both fragments, let somebody else act, and commit what was planned before."""
    planned, staged = table.dataset, [table.stage(0), table.stage(1)]
    act()
    return commit_columns(table.ref, planned, table.computation(), staged, "job", 3)


def test_files_land_in_one_commit(table: ComputedTable) -> None:
    before = table.dataset.version
    outcome = table.commit(table.stage(0), table.stage(1))
    assert (len(outcome.landed), outcome.lost, outcome.moved_on) == (2, (), False)
    assert table.dataset.version == before + 1
    assert table.column("y") == [30 * i for i in range(8)]


def test_files_that_still_fit_land_after_a_conflict(table: ComputedTable) -> None:
    outcome = between_plan_and_commit(
        table, lambda: table.dataset.update({"x": "x + 1"}, where="id = 0")
    )
    assert (len(outcome.landed), outcome.lost, outcome.moved_on) == (2, (), True)
    assert table.column("y")[1:] == [30 * i for i in range(1, 8)]


def test_what_another_writer_wrote_stays(table: ComputedTable) -> None:
    outcome = between_plan_and_commit(table, lambda: table.fill(0))
    ((lost, why),) = outcome.lost
    assert (lost.fragment_id, why) == (0, "somebody wrote the same column")
    assert [file.fragment_id for file in outcome.landed] == [1]


def test_nothing_lands_when_no_fragment_is_left(table: ComputedTable) -> None:
    outcome = between_plan_and_commit(table, lambda: table.dataset.optimize.compact_files())
    assert outcome.landed == ()
    assert {why for _, why in outcome.lost} == {"its fragment was rewritten or removed"}


def test_a_column_that_is_gone_is_said_to_be(table: ComputedTable) -> None:
    planned, staged, computation = table.dataset, table.stage(0), table.computation()
    table.dataset.drop_columns(["y"])
    with pytest.raises(ColumnChangedError, match="dropped or replaced"):
        commit_columns(table.ref, planned, computation, [staged], "job", 3)


def test_a_commit_that_landed_though_it_failed_is_found(
    table: ComputedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = lance.LanceDataset.commit

    def cut_off(*args: Any, **kwargs: Any) -> Any:
        plain(*args, **kwargs)
        raise OSError("connection reset")

    staged = table.stage(0)
    monkeypatch.setattr(lance.LanceDataset, "commit", staticmethod(cut_off))
    outcome = table.commit(staged)
    assert (len(outcome.landed), outcome.moved_on) == (1, True)


def test_it_gives_up_when_others_keep_getting_in_between(
    table: ComputedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def refused(*args: Any, **kwargs: Any) -> Any:
        attempts.append(1)
        table_of_others.update({"id": "id"}, where="id = 7")
        raise OSError("Commit conflict for version 9")

    staged, table_of_others = table.stage(0), table.dataset
    monkeypatch.setattr(lance.LanceDataset, "commit", staticmethod(refused))
    outcome = table.commit(staged)
    assert outcome.landed == ()
    assert outcome.moved_on
    assert [file for file, _ in outcome.lost] == [staged]
    assert len(attempts) == 5, "the first, three retries, and one for fields that are missing"

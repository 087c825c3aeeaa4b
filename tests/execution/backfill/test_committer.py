"""What the committer publishes together, and what it cleans up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from driving import InlineRunner, MemoryCommitter, outcome_of, prepared_for
from geneva import Connection, Table
from geneva.execution.backfill.committer import TableCommitter, publish_columns
from geneva.execution.backfill.control import JobControl
from geneva.execution.backfill.driver import run_backfill
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.storage.checkpoints.staging import open_checkpoints, record_staged
from geneva.storage.checkpoints.store import CheckpointKey
from geneva.storage.columns.publish import CommitOutcome
from geneva.storage.columns.staged_files import StagedFile
from support import Calls, by_id, checkpoint_keys, make_table, staged_records, tripled

SHARED = {"task_size": 2}


@pytest.fixture
def table(local_db: Connection, calls: Calls) -> Table:
    table = make_table(local_db, [4, 4, 4])
    table.add_columns({"c": tripled(calls)})
    return table


def staged(prepared: PreparedBackfill) -> list[StagedFile]:
    """The files of all fragments, computed and not published."""
    committer = MemoryCommitter()
    files: list[StagedFile] = []
    committer.add = files.append  # type: ignore[method-assign]
    run_backfill(prepared, JobControl("staging", InlineRunner, lambda job_id, retries: committer))
    return sorted(files, key=lambda file: file.fragment_id)


class Log:
    """Notes the fragments of every commit; loses those in `lost`."""

    def __init__(self, lost: Sequence[int] = ()) -> None:
        self.groups: list[list[int]] = []
        self._lost = lost

    def __call__(
        self, prepared: PreparedBackfill, files: Sequence[StagedFile], job_id: str, retries: int
    ) -> CommitOutcome:
        assert (job_id, retries) == ("job", 3)
        self.groups.append([file.fragment_id for file in files])
        lost = [file for file in files if file.fragment_id in self._lost]
        return outcome_of([file for file in files if file not in lost], lost)


def test_groups_are_full_unless_everything_is_wanted(table: Table) -> None:
    prepared, log = prepared_for(table, "c", commit_granularity=2), Log()
    committer = TableCommitter("job", 3, publish=log)
    files = staged(prepared)
    assert committer.commit_next(prepared, flush=True) is None
    committer.add(files[0])
    assert committer.commit_next(prepared, flush=False) is None
    committer.add(files[1])
    committer.add(files[2])
    done = committer.commit_next(prepared, flush=False)
    assert done is not None
    assert done.outcome.landed == (files[0], files[1])
    assert done.seconds >= 0
    assert committer.commit_next(prepared, flush=False) is None
    assert committer.commit_next(prepared, flush=True) is not None
    assert committer.commit_next(prepared, flush=True) is None
    assert log.groups == [[0, 1], [2]]


def test_by_default_all_that_is_ready_is_published_by_time(table: Table) -> None:
    prepared, log, now = prepared_for(table, "c"), Log(), [100.0]

    def publish(*args: Any) -> CommitOutcome:
        now[0] += 1.0
        return log(*args)

    committer = TableCommitter("job", 3, publish=publish, clock=lambda: now[0])
    files = staged(prepared)
    committer.add(files[0])
    assert committer.commit_next(prepared, flush=False) is None
    now[0] += 5.0
    committer.add(files[1])
    assert committer.commit_next(prepared, flush=False) is None, "others may end now, too"
    now[0] += 0.3
    assert committer.commit_next(prepared, flush=False) is not None
    committer.add(files[2])
    now[0] += 19.0
    assert committer.commit_next(prepared, flush=False) is None, "the last one took a second"
    now[0] += 1.0
    assert committer.commit_next(prepared, flush=False) is not None
    assert log.groups == [[0, 1], [2]]


def test_files_of_other_fields_go_into_another_commit(table: Table) -> None:
    prepared, log = prepared_for(table, "c"), Log()
    first, second, third = staged(prepared)
    committer = TableCommitter("job", 3, publish=log)
    for file in (first, replace(second, field_ids=(99,)), third):
        committer.add(file)
    while committer.commit_next(prepared, flush=True) is not None:
        pass
    assert log.groups == [[0, 2], [1]]


def test_a_file_that_no_longer_fits_stays_on_record(table: Table) -> None:
    prepared = prepared_for(table, "c")
    committer = TableCommitter("job", 3, publish=Log(lost=[1]))
    for file in staged(prepared):
        committer.add(file)
    before = staged_records(table)
    committer.commit_next(prepared, flush=True)
    assert before == []
    assert staged_records(table) == [1]


@pytest.mark.parametrize("size", [None, 2])
def test_checkpoints_of_published_fragments_are_deleted_unless_asked_for(
    table: Table, size: int | None
) -> None:
    sizes = {**SHARED, "checkpoint_size": size}
    prepared = prepared_for(table, "c", **sizes, commit_granularity=1)
    make = partial(TableCommitter, publish=publish_columns)
    run_backfill(prepared, JobControl("job", InlineRunner, make))
    assert by_id(table, "c") == {i: i * 3 for i in range(12)}
    assert bool(checkpoint_keys(table)) == (size is not None)


def test_checkpoints_are_kept_until_their_fragment_is_published(table: Table) -> None:
    prepared = prepared_for(table, "c", **SHARED)
    seen = MemoryCommitter()
    run_backfill(prepared, JobControl("staging", InlineRunner, lambda job_id, retries: seen))
    committer = TableCommitter("job", 3, publish=Log(lost=[1]))
    for key in seen.checkpoints:
        committer.add_checkpoint(key)
    for plan in prepared.plan.fragments:
        committer.add(prepared.staged_file(plan, f"{plan.fragment_id}.lance"))
    done = committer.commit_next(prepared, flush=True)
    assert done is not None
    kept = {key for key in seen.checkpoints if key.path() not in done.unneeded}
    assert {key.fragment_id for key in kept} == {1}


def test_a_record_of_several_files_stays_until_the_last_is_published(table: Table) -> None:
    prepared = prepared_for(table, "c", commit_granularity=1)
    files = staged(prepared)
    store = open_checkpoints(table.ref)
    prefixes = [prepared.prefixes[file.fragment_id] for file in files]
    record_staged(store, prefixes[0], files[0], *zip(prefixes[1:], files[1:], strict=True))
    assert staged_records(table) == [0, 1, 2]
    committer = TableCommitter("job", 3, publish=Log(lost=[1]))
    committer.add_checkpoint(CheckpointKey(prefixes[0], 0), [0, 1, 2])
    for file in files:
        committer.add(file)
        done = committer.commit_next(prepared, flush=False)
        assert done is not None
        assert not done.unneeded, "fragment 1 didn't land: its file is kept"


def test_a_later_run_finds_the_files_of_a_shared_record(table: Table, calls: Calls) -> None:
    prepared = prepared_for(table, "c")
    first, *others = staged(prepared)
    prefixes = prepared.prefixes
    store = open_checkpoints(table.ref)
    record_staged(
        store, prefixes[0], first, *((prefixes[file.fragment_id], file) for file in others)
    )
    calls.clear()
    result = table.backfill("c")
    assert (result.rows_computed, result.rows_reused) == (0, 12)
    assert calls.count == 0
    assert by_id(table, "c") == {i: i * 3 for i in range(12)}


def test_own_commits_are_no_conflict_with_others(
    local_db: Connection, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of several commits, or of several columns, doesn't plan again because of itself."""
    caplog.set_level("INFO", logger="geneva")
    table = make_table(local_db, [2, 2, 2], stable_row_ids=True)
    table.add_columns({"c": tripled(calls)})
    assert table.backfill("c", commit_granularity=1).progress.commits == 3
    query = table.query().select(["id"]).add_column({"y": tripled(calls)})
    view = local_db.create_materialized_view("v", query)
    groups = 2
    refreshed = view.refresh(max_rows_per_fragment=2, commit_granularity=1)
    assert refreshed.progress.commits == 3 * groups
    assert "somebody else committed" not in caplog.text


def test_rows_that_are_asked_for_again_are_computed_again(
    local_db: Connection, calls: Calls
) -> None:
    """Also where checkpoints were asked for: those of a job that ended are not for the next."""
    table = make_table(local_db, [6, 6])
    table.add_columns({"c": tripled(calls)})
    table.backfill("c", checkpoint_size=2)
    for again in range(2, 6):
        table.backfill("c", where="id >= 0", checkpoint_size=2)
        assert calls.count == 12 * again
    table.backfill("c", where="id >= 0")
    assert calls.count == 12 * 6

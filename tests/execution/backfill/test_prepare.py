"""Facts of a table become a plan: what is skipped, computed, taken over, and said about it."""

from __future__ import annotations

import pytest

from driving import InlineRunner, MemoryCommitter, prepared_for
from geneva import Connection, Table
from geneva.errors import UserInputError
from geneva.execution.backfill import validity_checks
from geneva.execution.backfill.control import JobControl
from geneva.execution.backfill.driver import run_backfill
from geneva.execution.backfill.prepare import PreparedBackfill, prepare
from geneva.model.rows import RowSet
from geneva.model.tables import Reason
from geneva.planning.backfill import Action
from geneva.storage.lance.dataset import open_dataset
from support import Calls, counted, make_table, triple, tripled


@pytest.fixture
def table(local_db: Connection, calls: Calls) -> Table:
    table = make_table(local_db, [4, 4, 4])
    table.add_columns({"c": tripled(calls)})
    return table


def stage_everything(prepared: PreparedBackfill) -> None:
    run_backfill(prepared, JobControl("job", InlineRunner, lambda *_: MemoryCommitter()))


def actions(prepared: PreparedBackfill) -> dict[int, tuple[Action, Reason, int]]:
    return {
        plan.fragment_id: (plan.action, plan.reason, plan.rows_to_run)
        for plan in prepared.plan.fragments
    }


def test_fragments_without_values_are_computed_and_others_skipped(table: Table) -> None:
    table.backfill("c", num_frags=1)
    prepared = prepared_for(table, "c")
    assert actions(prepared) == dict.fromkeys((1, 2), (Action.COMPUTE, Reason.NEW, 4))
    assert (prepared.plan.skipped_fragments, prepared.plan.total_rows) == (1, 12)
    assert set(prepared.prefixes) == set(prepared.facts) == {1, 2}


def test_an_empty_plan_reads_no_checkpoints(table: Table) -> None:
    table.backfill("c")
    prepared = prepared_for(table, "c")
    assert prepared.plan.is_empty
    assert (prepared.staged, prepared.reuse, prepared.plan.notes) == ({}, {}, ())


def test_only_some_fragments(table: Table) -> None:
    assert set(actions(prepared_for(table, "c", num_frags=2))) == {0, 1}
    assert set(actions(prepared_for(table, "c", only_fragments=frozenset({2})))) == {2}


def test_checkpoints_of_the_same_work_are_covered_ranges(table: Table) -> None:
    prepared = prepared_for(table, "c", task_size=2)
    stage_everything(prepared)
    again = prepared_for(table, "c")
    assert again.plan.rows_to_run == 0
    assert again.plan.rows_to_compute == 12


def test_results_for_a_clause_are_looked_up_by_receipt(table: Table) -> None:
    clause = "id < 6"
    stage_everything(prepared_for(table, "c", where=clause, checkpoint_size=1))
    prepared = prepared_for(table, "c", where=clause)
    assert [p.compute.count for p in prepared.plan.fragments] == [4, 2]
    assert prepared.plan.rows_to_run == 0
    assert set(prepared.reuse) == {0, 1}


def test_values_of_the_table_serve_equal_inputs_where_the_udf_says_so(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [[1, 2], [2, 3]], name="equal")
    table.add_columns({"c": counted(calls, triple, memoize=True)})
    table.backfill("c", num_frags=1)
    prepared = prepared_for(table, "c")
    assert actions(prepared) == {1: (Action.COMPUTE, Reason.NEW, 1)}
    assert "rows with equal inputs share a call, so that there may be fewer calls" in (
        prepared.plan.notes
    )


def test_files_that_the_job_made_are_done_for_its_clause(table: Table) -> None:
    table.backfill("c")
    first = prepared_for(table, "c", where="1=1")
    assert set(actions(first)) == {0, 1, 2}
    base = first.staged_file(first.plan.fragments[0], "new").base
    assert base is not None
    assert set(actions(first.again(frozenset({base})))) == {1, 2}


def test_inputs_that_change_first_make_rows_stale(table: Table) -> None:
    table.backfill("c")
    ready = prepared_for(table, "c")
    changed = RowSet.full(4)
    prepared = prepare(
        ready.subject, ready.request, upstream=lambda f: changed if f.id == 1 else None
    )
    assert actions(prepared) == {1: (Action.COMPUTE, Reason.UPSTREAM, 4)}
    assert prepared.plan.notes == (
        "inputs that come out the same make no call: the numbers are upper bounds",
    )


def test_an_old_version_leaves_out_what_was_computed_since(table: Table) -> None:
    old = table.version
    table.backfill("c", num_frags=1)
    ready = prepared_for(table, "c", read_version=old)
    prepared = prepare(ready.subject, ready.request, dataset=open_dataset(table.ref, old))
    assert set(actions(prepared)) == {1, 2}
    assert prepared.plan.notes == (
        f"1 fragment of version {old} was rewritten or computed since, and is left out",
    )


def test_a_wrong_clause_is_refused_on_an_empty_table_too(
    local_db: Connection, calls: Calls
) -> None:
    table = make_table(local_db, [2], name="empty")
    table.add_columns({"c": tripled(calls)})
    table.delete("true")
    with pytest.raises(UserInputError):
        prepared_for(table, "c", where="nothing = 1")


def test_much_to_read_is_read_by_workers(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.backfill("c")
    table.update(where="id = 1", values={"c": 7})
    table.update(where="id = 5", values={"id": 50})
    here = prepared_for(table, "c")
    assert here.plan.checked_rows
    monkeypatch.setattr(validity_checks, "MUCH_BYTES", 0)
    runner = InlineRunner()
    there = prepare(here.subject, here.request, make_runner=lambda: runner)
    assert runner.submitted
    assert there.plan == here.plan

"""A refresh plan is what runs: its numbers are those of the calls, also after a crash."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pytest

from geneva import Connection
from geneva.execution.backfill.prepare import PreparedBackfill
from geneva.execution.refresh import rows
from geneva.execution.refresh import run as refresh
from geneva.planning.backfill import BackfillPlan
from geneva.view import MaterializedView
from support import Calls, counted, publishing, triple
from view_support import make_source, make_view, numbers, values


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[BackfillPlan]:
    """The plans of the backfills that refreshes have run."""
    real, plans = refresh.run_side_by_side, list[BackfillPlan]()

    def noting(backfills: Sequence[PreparedBackfill], *rest: Any) -> Any:
        plans.extend(backfill.plan for backfill in backfills)
        return real(backfills, *rest)

    monkeypatch.setattr(refresh, "run_side_by_side", noting)
    return plans


@pytest.fixture
def prepared_anew(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The columns that were planned a second time while a refresh ran."""
    real, columns = refresh.prepare, list[str]()

    def noting(*args: Any, **options: Any) -> Any:
        prepared = real(*args, **options)
        columns.append(prepared.plan.column)
        return prepared

    monkeypatch.setattr(refresh, "prepare", noting)
    return columns


class TestWhatIsPrintedRuns:
    def test_values_alone(
        self,
        local_db: Connection,
        calls: Calls,
        ran: list[BackfillPlan],
        prepared_anew: list[str],
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        first = view.plan_refresh()
        view.refresh()
        assert [plan.rows_to_compute for plan in ran] == [c.rows for c in first.columns] == [5, 5]
        ran.clear()
        source.update(where="id = 4", values={"id": 44})
        planned = view.plan_refresh()
        calls.clear()
        view.refresh()
        assert [replace(c.plan, version=ran[0].version) for c in planned.columns] == ran
        assert len(calls.taken()) == planned.rows_to_run == 1
        assert not prepared_anew

    def test_rows_that_come_and_go(
        self,
        local_db: Connection,
        calls: Calls,
        ran: list[BackfillPlan],
        prepared_anew: list[str],
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        view.refresh()
        ran.clear()
        source.delete("id IN (2, 6)")
        source.update(where="id = 8", values={"id": 88})
        source.add(numbers(10, 16))
        planned = view.plan_refresh()
        assert (planned.rows_entering, planned.rows_leaving) == (3, 2)
        assert "run the UDF on 4 rows" in str(planned)
        calls.clear()
        view.refresh()
        assert [replace(c.plan, version=ran[0].version) for c in planned.columns] == ran
        assert len(calls.taken()) == planned.rows_to_run == 4
        assert values(view) == {i: i * 3 for i in (0, 4, 88, 10, 12, 14)}
        assert not prepared_anew

    def test_what_somebody_else_changed_is_planned_anew(
        self, local_db: Connection, calls: Calls, prepared_anew: list[str], monkeypatch: Any
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        view.refresh()
        source.add(numbers(10, 12))
        view.refresh()
        source.add(numbers(12, 16))
        real = refresh.drop_rows

        def compacting(*args: Any) -> None:
            real(*args)
            view.compact_files()

        monkeypatch.setattr(refresh, "drop_rows", compacting)
        calls.clear()
        view.refresh()
        assert calls.taken() == [12, 14]
        assert prepared_anew == ["__carried", "t"]

    def test_entering_rows_share_results_of_equal_inputs(
        self, local_db: Connection, calls: Calls, prepared_anew: list[str]
    ) -> None:
        source = make_source(local_db, rows=4)
        shared = counted(calls, triple, memoize=True)
        query = source.query().select(["id"]).add_column({"t": shared})
        view = local_db.create_materialized_view("shared", query)
        view.refresh()
        source.delete("id = 0")
        source.add(numbers(2, 6))
        plan = view.plan_refresh()
        assert (plan.rows_entering, plan.rows_leaving, plan.rows_to_run) == (4, 1, 2)
        calls.clear()
        view.refresh()
        assert calls.taken() == [4, 5]
        assert not prepared_anew


class TestAfterACrash:
    @pytest.fixture
    def view(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> MaterializedView:
        """A view whose refresh died when it had computed 5 rows and committed none."""
        view = make_view(local_db, make_source(local_db), calls)

        def dying(*args: Any) -> Any:
            raise KeyboardInterrupt

        with publishing(local_db, dying), monkeypatch.context() as patched:
            with pytest.raises(KeyboardInterrupt):
                view.refresh(checkpoint_size=1, concurrency=1)
            # The columns run one after the other: the second one is let through to its end.
            patched.setattr(refresh, "run_side_by_side", _only_udfs(refresh.run_side_by_side))
            with pytest.raises(KeyboardInterrupt):
                view.refresh(checkpoint_size=1, concurrency=1)
        assert calls.taken() == [0, 2, 4, 6, 8]
        calls.clear()
        return view

    def test_what_is_computed_is_not_counted_again(
        self, view: MaterializedView, calls: Calls
    ) -> None:
        plan = view.plan_refresh()
        assert (plan.rows_to_run, plan.rows_to_compute) == (0, 10)
        assert "run the UDF on 0 rows, take 5 from an earlier run" in str(plan)
        view.refresh()
        assert calls.taken() == []
        assert values(view) == {i: i * 3 for i in range(0, 10, 2)}

    def test_nor_where_rows_left_and_others_changed(
        self, view: MaterializedView, local_db: Connection, calls: Calls
    ) -> None:
        source = local_db.open_table("src")
        source.delete("id = 2")
        source.update(where="id = 4", values={"id": 44})
        source.add(numbers(10, 13))
        plan = view.plan_refresh()
        assert plan.rows_to_run == 3
        view.refresh()
        assert calls.taken() == [10, 12, 44]
        assert values(view) == {i: i * 3 for i in (0, 6, 8, 10, 12, 44)}

    def test_a_row_that_comes_again_takes_what_was_computed_for_the_old_one(
        self, view: MaterializedView, local_db: Connection, calls: Calls
    ) -> None:
        source = local_db.open_table("src")
        source.delete("id IN (2, 4)")
        source.add(numbers(4, 5))
        source.add(numbers(20, 21))
        assert view.plan_refresh().rows_to_run == 1
        view.refresh()
        assert calls.taken() == [20]
        assert values(view) == {i: i * 3 for i in (0, 4, 6, 8, 20)}

    def test_another_function_takes_nothing(self, view: MaterializedView, calls: Calls) -> None:
        view.alter_columns({"path": "t", "udf": counted(calls, triple, version="another")})
        assert view.plan_refresh().rows_to_run == 5
        view.refresh()
        assert len(calls.taken()) == 5


def _only_udfs(run: Any) -> Any:
    def running(backfills: Sequence[PreparedBackfill], *rest: Any) -> Any:
        return run([b for b in backfills if b.computation.runs_user_code], *rest)

    return running


class TestTheFirstRefreshKnowsItsRows:
    """Rows were selected when the view was made: they are not looked for again."""

    @pytest.fixture
    def looked_for(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The versions of sources that a refresh has gone through."""
        real, versions = rows.read_row_ids, list[int]()

        def noting(dataset: Any, *args: Any, **options: Any) -> Any:
            versions.append(int(dataset.version))
            return real(dataset, *args, **options)

        monkeypatch.setattr(rows, "read_row_ids", noting)
        return versions

    def test_the_source_is_as_it_was(
        self, local_db: Connection, calls: Calls, looked_for: list[int]
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        view.refresh()
        assert not looked_for
        assert values(view) == {i: 3 * i for i in range(0, 10, 2)}
        source.add(numbers(10, 14))
        view.refresh()
        assert values(view) == {i: 3 * i for i in range(0, 14, 2)}
        assert len(calls.taken()) == 7

    def test_the_source_has_changed(
        self, local_db: Connection, calls: Calls, looked_for: list[int]
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        source.add(numbers(10, 14))
        source.delete("id = 2")
        view.refresh()
        assert len(looked_for) == 1
        assert values(view) == {i: 3 * i for i in (0, 4, 6, 8, 10, 12)}

    def test_an_earlier_version_is_asked_for(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db)
        earlier = source.version
        source.add(numbers(10, 14))
        view = make_view(local_db, source, calls)
        view.refresh(src_version=earlier)
        assert values(view) == {i: 3 * i for i in range(0, 10, 2)}

    def test_somebody_has_written_into_the_view(
        self, local_db: Connection, calls: Calls, looked_for: list[int]
    ) -> None:
        view = make_view(local_db, make_source(local_db), calls)
        lance.dataset(view.ref.uri).delete("__source_row_id = 4")
        view.refresh()
        assert len(looked_for) == 1
        assert values(view) == {i: 3 * i for i in range(0, 10, 2)}

    def test_another_source_has_the_same_version_number(
        self, local_db: Connection, calls: Calls, looked_for: list[int]
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        local_db.drop_table("src")
        again = make_source(local_db, rows=16)
        assert again.version == source.version
        view.refresh()
        assert len(looked_for) == 1
        assert values(view) == {i: 3 * i for i in range(0, 16, 2)}

    def test_the_commits_of_the_source_were_cleaned_up(
        self, local_db: Connection, calls: Calls, looked_for: list[int]
    ) -> None:
        source = make_source(local_db)
        shutil.rmtree(Path(source.ref.uri, "_transactions"))
        view = make_view(local_db, source, calls)
        view.refresh()
        assert values(view) == {i: 3 * i for i in range(0, 10, 2)}

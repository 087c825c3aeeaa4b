"""Materialized views as users meet them: made, refreshed, read, and kept from being written to."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from geneva import Connection, Table, udf
from geneva.errors import UserInputError
from geneva.execution.runner import InProcessRunner
from geneva.model.jobs import JobStatus
from geneva.view import MaterializedView
from support import Calls, connect, counted, tripled
from view_support import STABLE, fragment_rows, make_source, make_view, numbers, values


class TestCreation:
    def test_it_makes_placeholders_and_runs_no_function(
        self, local_db: Connection, calls: Calls
    ) -> None:
        view = make_view(local_db, make_source(local_db), calls)
        assert calls.count == 0
        raw = lance.dataset(view.ref.uri)
        assert raw.schema.field("__source_row_id").type == pa.int64()
        assert raw.schema.field("__is_set").type == pa.bool_()
        table = raw.to_table()
        assert table["__source_row_id"].to_pylist() == [0, 2, 4, 6, 8]
        assert not any(table["__is_set"].to_pylist())
        assert table["t"].null_count == table["id"].null_count == 5

    def test_the_definition_is_in_the_schema_metadata(
        self, local_db: Connection, calls: Calls
    ) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        told = lance.dataset(view.ref.uri).schema.metadata
        assert told[b"geneva::view::base_table"] == b"src"
        assert told[b"geneva::view::base_table_db_uri"].decode() == local_db.uri
        assert told[b"geneva::view::base_table_version"].decode() == str(source.version)
        assert told[b"geneva::view::version"] == b"2"
        query = json.loads(told[b"geneva::view::query"])
        assert query["where"] == "id % 2 = 0"
        assert query["columns"] == ["id", "t"]
        assert view.definition.base_table == "src"
        assert view.source_version == source.version
        assert "'v'" in repr(view)

    @pytest.mark.parametrize(
        "option", ["new_table_enable_stable_row_ids", "enable_move_stable_row_ids"]
    )
    def test_both_names_of_the_stable_row_id_option(
        self, local_db: Connection, option: str
    ) -> None:
        source = local_db.create_table("s", numbers(0, 3), storage_options={option: "true"})
        assert lance.dataset(source.ref.uri).has_stable_row_ids
        view = local_db.create_materialized_view("v", source)
        view.refresh()
        source.add(numbers(3, 5))
        view.refresh()
        assert len(view) == 5

    def test_a_name_that_is_taken_is_refused(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db)
        make_view(local_db, source, calls)
        for name in ("v", "src"):
            with pytest.raises(UserInputError, match="already"):
                local_db.create_materialized_view(name, source)

    def test_views_are_listed_opened_and_dropped(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db)
        make_view(local_db, source, calls)
        query = source.search(None).where("id > 3")
        other = query.create_materialized_view(conn=local_db, view_name="w")
        assert isinstance(other, MaterializedView)
        assert local_db.list_materialized_views() == ["v", "w"]
        assert isinstance(local_db.open_table("v"), MaterializedView)
        assert not isinstance(local_db.open_table("src"), MaterializedView)
        with pytest.raises(UserInputError, match="drop_table"):
            local_db.drop_materialized_view("src")
        local_db.drop_materialized_view("v")
        assert local_db.list_materialized_views() == ["w"]
        make_view(local_db, source, calls).refresh()
        assert len(calls.taken()) == 5


class TestRefresh:
    def test_the_first_fills_everything_and_the_next_only_what_is_new(
        self, db: Connection, calls: Calls
    ) -> None:
        source = make_source(db)
        view = make_view(db, source, calls)
        first = view.plan_refresh()
        assert (first.rows_entering, first.rows_leaving, first.rows_to_run) == (5, 0, 5)
        anew = str(view.plan_refresh(max_rows_per_fragment=2))
        assert "  rows       5 enter\n" in anew, "also where placeholders are laid out anew"
        result = view.refresh()
        assert result.status is JobStatus.DONE
        assert calls.taken() == [0, 2, 4, 6, 8]
        source.add(numbers(10, 14))
        plan = view.plan_refresh()
        assert (plan.rows_entering, plan.rows_leaving, plan.rows_to_run) == (2, 0, 2)
        assert "run the UDF on 2 rows" in str(plan)
        view.refresh()
        assert calls.taken() == [10, 12]
        assert values(view) == {i: i * 3 for i in range(0, 14, 2)}
        assert all(view.to_arrow(include_system=True)["__is_set"].to_pylist())
        assert view.plan_refresh().is_empty
        assert "nothing to do" in str(view.plan_refresh())
        assert view.source_version == source.version

    def test_rows_come_leave_and_change(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db)
        query = source.query().where("name <> 'out'").add_column({"t": tripled(calls)})
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        calls.clear()
        source.update(where="id = 3", values={"name": "out"})
        source.update(where="id = 4", values={"name": "renamed"})
        source.update(where="id = 5", values={"id": 50})
        source.delete("id = 6")
        view.refresh()
        assert calls.taken() == [50]
        assert sorted(values(view)) == [0, 1, 2, 4, 7, 8, 9, 50]
        assert values(view, "name")[4] == "renamed"
        source.update(where="name = 'out'", values={"name": "in"})
        view.refresh()
        assert calls.taken() == [3]

    def test_the_size_of_new_fragments(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db, rows=4)
        view = local_db.create_materialized_view("v", source)
        view.refresh()
        source.add(numbers(4, 19))
        view.refresh(max_rows_per_fragment=7)
        assert fragment_rows(view) == [4, 7, 7, 1]
        source.add(numbers(19, 24))
        view.refresh(max_rows_per_fragment=2)
        source.add(numbers(24, 30))
        view.refresh()
        assert fragment_rows(view) == [4, 7, 7, 1, 2, 2, 1, 6]
        assert sorted(values(view, "name")) == list(range(30))
        with pytest.raises(UserInputError, match="max_rows_per_fragment"):
            view.refresh(max_rows_per_fragment=0)

    def test_a_pinned_version_and_back(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        old = source.version
        source.add(numbers(10, 20))
        middle = source.version
        source.update(where="id = 2", values={"id": 102})
        view.refresh(middle)
        assert sorted(values(view)) == list(range(0, 20, 2))
        assert view.source_version == middle
        view.refresh()
        assert 102 in values(view)
        calls.clear()
        view.refresh(src_version=old)
        assert values(view) == {i: i * 3 for i in range(0, 10, 2)}
        assert calls.taken() == [2]
        assert view.plan_refresh(old).is_empty
        assert not view.plan_refresh().is_empty
        view.refresh()
        assert sorted(values(view)) == [0, 4, 6, 8, 10, 12, 14, 16, 18, 102]

    def test_an_unknown_version_is_refused(self, local_db: Connection, calls: Calls) -> None:
        view = make_view(local_db, make_source(local_db), calls)
        with pytest.raises(UserInputError, match="no version 99"):
            view.refresh(src_version=99)
        with pytest.raises(UserInputError, match="src_version"):
            view.refresh(src_version=0)
        assert not local_db.list_jobs()

    def test_the_job_is_on_record(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        result = view.refresh()
        job = local_db.get_job(result)
        assert (job.job_type, job.table_name, job.status) == ("REFRESH", "v", JobStatus.DONE)
        assert job.config["source"] == "src"
        assert job.config["src_version"] == source.version
        assert result.rows_computed >= 5
        assert result.rows_committed == result.progress.total == result.rows_computed == 5
        numbers = job.metrics
        assert [numbers[n] for n in ("total", "checkpointed", "ready_to_commit")] == [5, 5, 5]

    def test_in_the_background(self, local_db: Connection, calls: Calls) -> None:
        view = make_view(local_db, make_source(local_db), calls)
        future = view.refresh_async(max_rows_per_fragment=3)
        assert future.result(timeout=60).status is JobStatus.DONE
        assert values(view) == {i: i * 3 for i in range(0, 10, 2)}

    def test_a_source_whose_old_versions_are_gone(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        source.add(numbers(10, 12))
        _forget_old_versions(source)
        view.refresh()
        assert calls.taken() == [0, 2, 4, 6, 8, 10]
        source.add(numbers(12, 14))
        _forget_old_versions(source)
        assert "cleaned up" in view.plan_refresh().notes[0]
        view.refresh()
        assert values(view) == {i: i * 3 for i in range(0, 14, 2)}

    def test_a_column_that_the_source_lost(self, local_db: Connection) -> None:
        source = make_source(local_db)
        view = local_db.create_materialized_view("v", source.query().select(["id", "name"]))
        view.refresh()
        source.drop_columns(["name"])
        with pytest.raises(UserInputError, match="'name'"):
            view.refresh()
        assert len(view) == 10


def _forget_old_versions(table: Table) -> None:
    dataset = lance.dataset(table.ref.uri)
    dataset.cleanup_old_versions(older_than=timedelta(0))


UNSTABLE = {"new_table_enable_stable_row_ids": "false"}


class TestWithoutStableRowIds:
    def test_a_warning_and_one_version_only(self, local_db: Connection, calls: Calls) -> None:
        source = local_db.create_table("src", numbers(0, 10), storage_options=UNSTABLE)
        version = source.version
        with pytest.warns(UserWarning, match="no stable row IDs"):
            view = make_view(local_db, source, calls)
        assert lance.dataset(view.ref.uri).schema.metadata[b"geneva::view::version"] == b"1"
        view.refresh()
        assert values(view) == {i: i * 3 for i in range(0, 10, 2)}
        source.add(numbers(10, 12))
        with pytest.raises(UserInputError, match=f"Cannot refresh.* to version {source.version}"):
            view.refresh()
        view.refresh(src_version=version)
        source.compact_files()
        view.refresh(src_version=version)
        assert len(view) == 5

    def test_strict_refuses(self, local_db: Connection) -> None:
        source = local_db.create_table("src", numbers(0, 3), storage_options=UNSTABLE)
        with pytest.raises(UserInputError, match="no stable row IDs"):
            local_db.create_materialized_view("v", source, strict=True)
        assert local_db.list_materialized_views() == []


class TestSources:
    def test_one_in_another_database(self, local_db: Connection, tmp_path: Path) -> None:
        other = connect(tmp_path / "other", InProcessRunner)
        source = make_source(other)
        view = source.query().create_materialized_view(view_name="v", conn=local_db)
        view.refresh()
        source.add(numbers(10, 12))
        again = local_db.open_table("v")
        assert isinstance(again, MaterializedView)
        again.refresh()
        assert len(again) == 12
        assert other.table_names() == ["src"]
        assert local_db.table_names() == ["v"]

    def test_a_view_of_a_view(self, local_db: Connection, calls: Calls, tmp_path: Path) -> None:
        source = make_source(local_db)
        view = make_view(local_db, source, calls)
        view.refresh()
        more = Calls(str(tmp_path / "more"))
        plus = counted(more, lambda t: t + 1, data_type=pa.int64())
        query = view.query().where("t > 6").select({"id": "id", "u": (plus, ["t"])})
        top = local_db.create_materialized_view("top", query)
        top.refresh()
        assert values(top, "u") == {4: 13, 6: 19, 8: 25}
        more.clear()
        source.add(numbers(10, 12))
        source.update(where="id = 4", values={"name": "other"})
        view.refresh()
        top.refresh()
        assert more.taken() == [30]
        view.compact_files()
        top.refresh()
        assert more.taken() == []
        assert values(top, "u") == {4: 13, 6: 19, 8: 25, 10: 31}

    def test_a_backfilled_column_flows_through(self, local_db: Connection, calls: Calls) -> None:
        source = make_source(local_db)
        source.add_columns({"d": udf(lambda id: id + 1, data_type=pa.int64())})
        double = counted(calls, lambda d: None if d is None else d * 2, data_type=pa.int64())
        query = source.query().select({"id": "id", "d": "d", "t": (double, ["d"])})
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        assert set(values(view).values()) == {None}
        source.backfill("d", where="id < 5")
        calls.clear()
        view.refresh()
        assert calls.taken() == [1, 2, 3, 4, 5]
        source.backfill("d")
        view.refresh()
        assert values(view) == {i: (i + 1) * 2 for i in range(10)}

    def test_an_input_that_is_nested_or_out_of_line(self, local_db: Connection) -> None:
        blob = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
        point = pa.struct([("x", pa.int64()), ("y", pa.int64())])
        schema = pa.schema([("id", pa.int64()), ("p", point), blob])
        rows = [{"id": i, "p": {"x": i, "y": -i}, "blob": b"b" * i} for i in range(4)]
        source = local_db.create_table(
            "src", pa.Table.from_pylist(rows, schema), storage_options=STABLE
        )
        size = udf(lambda data: len(data), data_type=pa.int64())
        case = "CASE WHEN id > 1 THEN 'big' ELSE 'small' END"
        columns = {"id": "id", "y": "p.y", "kind": case, "n": (size, ["blob"]), "raw": "blob"}
        query = source.query().select(columns)
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        raw = [blob.readall() for blob in view.take_blobs(range(4), "raw")]
        wanted = query.to_list()
        assert raw == [row.pop("raw") for row in wanted]
        assert view.to_arrow().drop_columns("raw").to_pylist() == wanted
        assert values(view, "n") == {i: i for i in range(4)}
        source.update(where="id = 2", values={"id": 22})
        view.refresh()
        assert values(view, "y") == {0: 0, 1: -1, 3: -3, 22: -2}

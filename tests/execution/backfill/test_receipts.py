"""Receipts as a user meets them: hidden, kept by every writer, written for what people supply."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lance import LanceOperation
from lancedb.index import BTree

import geneva
from geneva import Connection, Table, udf
from geneva.errors import GenevaError, InvalidUDFError, StaleInputError, UserInputError
from geneva.execution.backfill import validity_checks
from geneva.execution.backfill.verify import RowState
from geneva.model.computation import receipt_name
from geneva.model.rows import RowSet
from geneva.storage.columns.definitions import read_definition
from geneva.storage.columns.provenance import Provenance, input_signature
from geneva.storage.columns.staged_files import data_file, stage_columns, written_schema
from geneva.storage.lance.dataset import open_dataset, read_snapshot
from support import Calls, by_id, column, counted, make_table


def triple(id: int) -> int:
    return id * 3


def successor(a: int) -> int:
    return a + 1


def filled(db: Connection, calls: Calls, *fragments: int, **options: Any) -> Table:
    """A table whose column `a` is three times its id, all of it computed."""
    table = make_table(db, fragments or (4, 4), **options)
    table.add_columns({"a": counted(calls, triple)})
    table.backfill("a")
    calls.clear()
    return table


def receipts(table: Table, name: str = "a") -> dict[int, int | None]:
    dataset = lance.dataset(table.ref.uri)
    definition = read_definition(dataset.schema, name)
    assert definition is not None
    found = dataset.to_table(columns=["id", receipt_name(definition.uuid)])
    return dict(zip(found["id"].to_pylist(), found.column(1).to_pylist(), strict=True))


class TestHidden:
    def test_nobody_sees_them(self, local_db: Connection, calls: Calls) -> None:
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(8, np.float32)), 2)
        data = pa.table({"id": range(4), "text": ["a b"] * 4, "v": vectors})
        table = filled(local_db, calls, data)  # type: ignore[arg-type]
        names = ["id", "text", "v", "a"]
        assert table.schema.names == names
        assert table.to_arrow().column_names == names
        assert list(table.to_pandas().columns) == names
        assert table.head(1).column_names == names
        assert table.query().to_arrow().column_names == names
        assert table.search().to_arrow().column_names == names
        assert table.search([0.0, 0.0]).to_arrow().column_names == [*names, "_distance"]
        assert table.search().select(["id"]).to_arrow().column_names == ["id"]
        assert table.take_offsets([1]).to_arrow().column_names == names
        assert "__receipt" not in repr(table) + table._repr_html_()
        (hidden,) = set(table.to_arrow(include_system=True).column_names) - set(names)
        assert hidden.startswith("__receipt_")

    def test_a_view_of_all_columns_has_none_of_its_source(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls, stable_row_ids=True)
        view = local_db.create_materialized_view("v", table.query())
        view.refresh()
        assert view.schema.names == ["id", "a"]
        stored = open_dataset(view.ref).schema.names
        assert stored == ["__source_row_id", "__is_set", "id", "a"]

    def test_they_go_with_their_column(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.drop_columns("a")
        assert open_dataset(table.ref).schema.names == ["id"]
        table.add_columns({"a": counted(calls, triple)})
        assert table.plan_backfill("a").rows_to_run == 8

    def test_plain_lancedb_writes_without_them(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        plain = lancedb.connect(local_db.uri).open_table("t")
        plain.add(pa.table({"id": [100]}))
        plain.update(where="id = 1", values={"id": 101})
        merge = plain.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(pa.table({"id": [2, 102], "a": [777, 778]}))
        plain.optimize()
        table.backfill("a")
        assert calls.taken() == [100, 101]
        supplied = {2: 777, 102: 778}
        assert by_id(table, "a") == {i: supplied.get(i, i * 3) for i in by_id(table, "id")}

    def test_their_names_are_refused(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        with pytest.raises(UserInputError):
            table.add_columns({"__receipt_x": counted(calls, triple)})
        with pytest.raises(UserInputError, match="'__mine' can't start with '__'"):
            table.add_columns({"__mine": counted(calls, triple)})


class TestAdopting:
    def test_what_a_person_wrote_is_kept_and_goes_stale_later(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls)
        table.add(
            pa.table({"id": [50, 51], "a": [5, None]}, pa.schema([("id", "int64"), ("a", "int64")]))
        )
        plan = table.plan_backfill("a")
        assert (plan.rows_to_run, plan.rows_to_adopt) == (1, 1)
        assert "keep       1 row as written" in str(plan)
        assert receipts(table)[50] is None
        table.backfill("a")
        assert calls.taken() == [51]
        assert receipts(table)[50] is not None
        assert table.plan_backfill("a").is_empty
        table.update(where="a = 5", values={"id": 60})
        table.backfill("a")
        assert calls.taken() == [60]
        assert by_id(table, "a")[60] == 180

    def test_adopting_alone_writes_no_values(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.add(pa.table({"id": [50, 51], "a": [5, 6]}))
        (before,) = [f.data_files() for f in open_dataset(table.ref).get_fragments()[2:]]
        table.backfill("a")
        (after,) = [f.data_files() for f in open_dataset(table.ref).get_fragments()[2:]]
        assert before[0].path == after[0].path
        assert len(after) == 2
        assert calls.rows == []

    def test_a_clause_computes_what_a_person_wrote(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls)
        table.update(where="id = 3", values={"a": -1})
        table.backfill("a", where="id = 3")
        assert calls.rows == [3]
        assert by_id(table, "a")[3] == 9

    def test_clearing_a_value_is_no_correction(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.update(where="id = 3", values_sql={"a": "NULL"})
        table.backfill("a")
        assert calls.rows == [3]
        assert by_id(table, "a")[3] == 9

    def test_a_clause_leaves_corrections_outside_it_alone(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls, 6)
        table.update(where="id = 3", values={"a": -1})
        table.compact_files()
        table.backfill("a", where="id = 5")
        table.backfill("a")
        assert calls.rows == [5]
        assert by_id(table, "a")[3] == -1


class TestChains:
    def chain(self, db: Connection, calls: Calls) -> Table:
        table = make_table(db, [4, 4])
        table.add_columns({"a": counted(calls, triple)})
        table.add_columns({"b": counted(calls, successor)})
        return table

    def test_inputs_go_first_in_one_job(self, local_db: Connection, calls: Calls) -> None:
        table = self.chain(local_db, calls)
        plan = table.plan_backfill("b")
        assert [p.column for p in plan.upstream] == ["a"]
        assert (plan.upstream[0].rows_to_run, plan.rows_to_run) == (8, 8)
        assert str(plan).index("'a'") < str(plan).index("'b'")
        result = table.backfill("b")
        assert by_id(table, "b") == {i: i * 3 + 1 for i in range(8)}
        assert len(calls.taken()) == 16
        (job,) = local_db.list_jobs("t")
        assert (job.job_id, job.column_name) == (result.job_id, "b")
        assert job.metrics["udf_rows"] == 16

    def test_only_what_is_stale_of_the_rows_asked_for(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = self.chain(local_db, calls)
        table.backfill("a", where="id = 2")
        calls.clear()
        table.backfill("b", where="id IN (2, 3)")
        assert calls.taken() == [3, 6, 9]
        assert by_id(table, "a") == {2: 6, 3: 9} | dict.fromkeys((0, 1, 4, 5, 6, 7))

    def test_as_many_fragments_as_asked_for(self, local_db: Connection, calls: Calls) -> None:
        table = self.chain(local_db, calls)
        table.backfill("b", num_frags=1)
        assert len(calls.taken()) == 8
        assert column(table, "b") == [1, 4, 7, 10, None, None, None, None]
        assert column(table, "a") == [0, 3, 6, 9, None, None, None, None]

    def test_refusing_and_ignoring(self, local_db: Connection, calls: Calls) -> None:
        table = self.chain(local_db, calls)
        with pytest.raises(StaleInputError, match="'a', of which 8 rows"):
            table.backfill("b", upstream="refuse")
        with pytest.raises(StaleInputError):
            table.plan_backfill("b", upstream="refuse")
        with pytest.raises(UserInputError, match="'compute' or 'refuse' or 'ignore'"):
            table.backfill("b", upstream="perhaps")
        table.backfill("a")
        calls.clear()
        table.backfill("b", upstream="refuse")
        table.update(where="id = 1", values={"id": 10})
        calls.clear()
        table.backfill("b", upstream="ignore")
        assert calls.rows == [], "its input is what it was"

    def test_an_input_that_comes_out_the_same_costs_nothing_downstream(
        self, local_db: Connection, calls: Calls
    ) -> None:
        def half(id: int) -> int:
            return id // 2

        table = make_table(local_db, [4])
        table.add_columns({"a": counted(calls, half)})
        table.add_columns({"b": counted(calls, successor)})
        table.backfill("b")
        calls.clear()
        table.update(where="id = 2", values={"id": 3})
        assert table.plan_backfill("b").rows_to_run == 1, "at most: its input may change"
        table.backfill("b")
        assert calls.rows == [3]

    def test_cycles_are_refused(self, local_db: Connection, calls: Calls) -> None:
        table = self.chain(local_db, calls)
        back = {"path": "a", "udf": counted(calls, triple), "input_columns": ["b"]}
        with pytest.raises(InvalidUDFError, match="can't be computed from each other"):
            table.alter_columns(back)
        with pytest.raises(InvalidUDFError):
            table.plan_backfill("a", udf=(counted(calls, triple), ["b"]))


def as_of_the_first_release(table: Table, name: str) -> None:
    """Make a column what it was before there were receipts: values alone, under their old names."""
    dataset = open_dataset(table.ref)
    definition = read_definition(dataset.schema, name)
    assert definition is not None
    dataset.drop_columns([receipt_name(definition.uuid)])
    gone = {f"virtual_column.{key}": None for key in ("receipts", "field", "udf_former")}
    since = {"virtual_column.udf_since": "0"}
    dataset.update_field_metadata({name: {**gone, **since}})
    dataset = open_dataset(table.ref)
    snapshot = read_snapshot(dataset, table.ref)
    schema = written_schema(dataset.schema, [name])
    inputs = [snapshot.field_ids[path] for path in definition.inputs]
    fields = snapshot.field_ids[name]
    groups = []
    for fragment in snapshot.fragments:
        provenance = Provenance(
            definition.uuid,
            definition.udf_version,
            input_signature(fragment, inputs),
            RowSet.full(fragment.physical_rows),
        )
        rows = dataset.get_fragment(fragment.id).to_table(columns=[name]).combine_chunks()
        path, _ = stage_columns(
            table.ref, dataset, schema, rows.to_batches(), provenance, complete=True
        )
        file = data_file(dataset, path, fields)
        groups.append(LanceOperation.DataReplacementGroup(fragment.id, file))
    operation = LanceOperation.DataReplacement(groups)
    lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)


class TestColumnsFromBeforeReceipts:
    def test_they_get_receipts_without_a_call(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        as_of_the_first_release(table, "a")
        plan = table.plan_backfill("a")
        assert (plan.rows_to_run, plan.rows_to_adopt) == (0, 8)
        assert not [n for n in open_dataset(table.ref).schema.names if n.startswith("__")]
        table.backfill("a")
        assert calls.rows == []
        assert None not in receipts(table).values()
        assert table.plan_backfill("a").is_empty
        lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
        table.update(where="id = 3", values={"id": 30})
        table.compact_files()
        table.backfill("a")
        assert calls.rows == [30]

    @pytest.mark.parametrize(
        ("choice", "computed"), [(None, 0), ("keep", 0), ("compute", 8)], ids=str
    )
    def test_what_cannot_be_proven_is_said(
        self, local_db: Connection, calls: Calls, choice: str | None, computed: int
    ) -> None:
        table = filled(local_db, calls)
        as_of_the_first_release(table, "a")
        table.compact_files()
        table.delete("id = 100")
        for _ in range(2):
            table.add(pa.table({"id": [200]}))
            table.delete("id = 200")
        lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
        plan = table.plan_backfill("a", unproven=choice)
        assert any(note.startswith("unproven: 8 rows") for note in plan.notes)
        assert plan.rows_to_run == computed
        table.backfill("a", unproven=choice)
        assert len(calls.rows) == computed
        assert None not in receipts(table).values()
        assert not table.plan_backfill("a").notes

    def test_signs_of_stale_values_decide(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        as_of_the_first_release(table, "a")
        table.compact_files()
        lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
        other = counted(calls, lambda id: -id, data_type=pa.int64(), version="other")
        table.alter_columns({"path": "a", "udf": other})
        table.backfill("a")
        assert len(calls.rows) == 8

    def test_a_wrong_choice_is_refused(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        with pytest.raises(UserInputError, match="'compute' or 'keep'"):
            table.backfill("a", unproven="yes")


class TestVerify:
    def test_a_right_column_is_right_after_anything(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls)
        table.update(where="id = 1", values={"a": 0})
        table.backfill("a")
        table.compact_files()
        table.delete("id = 2")
        report = table.verify("a", run=True)
        assert (report.ok, report.rows, report.counts) == (True, 7, {RowState.RIGHT: 7})
        assert len(calls.rows) == 7

    def test_every_state_is_told(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.update(where="id = 1", values={"id": 11})
        table.update(where="id = 2", values={"a": 0})
        table.add(pa.table({"id": [20]}))
        report = table.verify("a")
        assert report.counts == {
            RowState.RIGHT: 6,
            RowState.STALE: 1,
            RowState.SUPPLIED: 1,
            RowState.NOT_COMPUTED: 1,
        }
        assert report.ok
        assert {e.state for e in report.examples} == report.counts.keys() - {RowState.RIGHT}
        addresses = {e.address for e in report.examples if e.state is RowState.STALE}
        found = open_dataset(table.ref).scanner(
            columns=["id"], with_row_address=True, filter="id = 11"
        )
        assert addresses == set(found.to_table()["_rowaddr"].to_pylist())
        assert "stale        1" in str(report)

    def test_values_that_changed_behind_the_tables_back_are_found(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls, 4)
        dataset = open_dataset(table.ref)
        fragment = dataset.get_fragments()[0]
        rows = fragment.to_table(columns=dataset.schema.names[1:])
        wrong = rows.set_column(0, "a", pa.array([0, 3, 6, 1000]))
        schema = written_schema(dataset.schema, wrong.column_names)
        definition = read_definition(dataset.schema, "a")
        assert definition is not None
        snapshot = read_snapshot(dataset, table.ref)
        signature = input_signature(snapshot.fragments[0], [snapshot.field_ids["id"]])
        claim = Provenance(definition.uuid, definition.udf_version, signature, RowSet.full(4))
        path, _ = stage_columns(
            table.ref, dataset, schema, wrong.to_batches(), claim, complete=True
        )
        ids = [i for name in wrong.column_names for i in snapshot.field_ids[name]]
        group = LanceOperation.DataReplacementGroup(0, data_file(dataset, path, ids))
        lance.LanceDataset.commit(
            dataset, LanceOperation.DataReplacement([group]), read_version=dataset.version
        )
        assert table.plan_backfill("a").is_empty, "its files claim that it is right"
        report = table.verify("a")
        assert not report.ok
        assert report.counts[RowState.WRONG] == 1

    def test_a_function_that_gives_other_values_now(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [4])
        table.add_columns({"a": counted(calls, lambda id: len(calls.rows), data_type=pa.int64())})
        table.backfill("a")
        report = table.verify("a", run=True, sample=2)
        assert (report.rows, report.counts) == (2, {RowState.DIFFERS: 2})
        assert not report.ok

    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_a_function_of_batches(
        self, local_db: Connection, calls: Calls, batch_size: int | None
    ) -> None:
        @udf(data_type=pa.list_(pa.float32(), 2), batch_size=batch_size)
        def vector(id: pa.Array) -> np.ndarray[Any, Any]:
            return np.full((len(id), 2), calls.count, np.float32)

        table = make_table(local_db, [5])
        table.add_columns({"v": vector})
        table.backfill("v")
        assert table.verify("v", run=True).counts == {RowState.RIGHT: 5}
        calls.note([])
        assert table.verify("v", run=True).counts == {RowState.DIFFERS: 5}

    def test_what_a_person_wrote_is_right_and_run_says_that_the_function_gives_another(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls)
        table.update(where="id IN (1, 2, 3)", values={"a": 0})
        table.update(where="id = 3", values={"a": 9})
        table.backfill("a")
        plain = table.verify("a")
        assert (plain.counts, plain.kept_values) == ({RowState.RIGHT: 8}, 0)
        assert "a person wrote" not in str(plain)
        report = table.verify("a", run=True)
        assert (report.ok, report.counts, report.kept_values) == (True, {RowState.RIGHT: 8}, 2)
        said = "2 rows have a value that a person wrote, or that was kept; the function gives"
        assert f"\n  of the right ones, {said} another one" in str(report)
        assert said in report._repr_html_()

    def test_the_rows_that_are_not_listed_are_counted(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [130])
        table.add_columns({"a": counted(calls, triple)})
        lines = str(table.verify("a")).splitlines()
        assert len([line for line in lines if "row address" in line]) == 10
        assert lines[-1] == "    and 120 more"
        table = make_table(local_db, [10], "ten")
        table.add_columns({"a": counted(calls, triple)})
        assert "row address" in str(table.verify("a")).splitlines()[-1]

    def test_samples(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls, 30, 30)
        assert table.verify("a", sample=0.5).rows == 30
        assert table.verify("a", sample=7).rows == 7
        assert table.verify("a", sample=7_000).rows == 60
        assert table.verify("a", sample=0.001).rows == 1, "a sample of rows has one at least"
        for share in (1.0, np.float32(1)):
            assert table.verify("a", sample=share).rows == 60, "a share of 1 is all rows"
        for rows in (1, np.int64(1)):
            assert table.verify("a", sample=rows).rows == 1
        with pytest.raises(UserInputError):
            table.verify("a", sample=0)
        with pytest.raises(GenevaError):
            table.verify("id")

    def test_a_views_column(self, local_db: Connection, calls: Calls) -> None:
        source = make_table(local_db, [5], stable_row_ids=True)
        query = source.query().select(["id"]).add_column({"a": counted(calls, triple)})
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        assert view.verify("a", run=True).counts == {RowState.RIGHT: 5}
        with pytest.raises(UserInputError):
            view.verify("id")


class TestMemoize:
    def remainder(self, calls: Calls, **options: Any) -> Any:
        def of_three(id: int) -> int:
            return id % 3 * 10

        return counted(calls, lambda r: of_three(r), data_type=pa.int64(), **options)

    def table(self, db: Connection, calls: Calls, **options: Any) -> Table:
        rows = pa.table({"id": range(12), "r": [i % 3 for i in range(12)]})
        table = make_table(db, [rows.slice(0, 6), rows.slice(6)])
        table.add_columns({"m": self.remainder(calls, **options)})
        return table

    def test_equal_inputs_share_a_call_where_the_function_says_so(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = self.table(local_db, calls, memoize=True)
        table.backfill("m", concurrency=1, task_size=12)
        assert calls.taken() == [0, 1, 2]
        assert by_id(table, "m") == {i: i % 3 * 10 for i in range(12)}
        table.add(pa.table({"id": [20, 21, 22], "r": [1, 2, 7]}))
        assert table.plan_backfill("m").rows_to_run == 1
        table.compact_files()
        table.backfill("m")
        assert calls.rows == [7]
        assert by_id(table, "m")[21] == 20
        assert table.verify("m", run=True).counts == {RowState.RIGHT: 15}

    def test_otherwise_each_row_has_a_call_of_its_own(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = self.table(local_db, calls)
        table.backfill("m")
        assert len(calls.taken()) == 12
        table.add(pa.table({"id": [20], "r": [1]}))
        table.backfill("m")
        assert calls.rows == [1]

    def test_what_a_person_wrote_is_no_result(self, local_db: Connection, calls: Calls) -> None:
        table = self.table(local_db, calls, memoize=True)
        table.update(values={"m": -1})
        table.backfill("m")
        table.add(pa.table({"id": [20], "r": [1]}))
        table.backfill("m")
        assert calls.rows == [1]
        assert by_id(table, "m")[20] == 10

    def test_failed_rows_are_tried_each(self, local_db: Connection, calls: Calls) -> None:
        def fails_on_1(r: int) -> int:
            if r == 1:
                raise ValueError("one")
            return r

        table = make_table(local_db, [pa.table({"id": range(6), "r": [0, 1, 0, 1, 2, 2]})])
        udf = counted(calls, fails_on_1, memoize=True, on_error=geneva.skip_on_error())
        table.add_columns({"m": udf})
        result = table.backfill("m")
        assert column(table, "m") == [0, None, 0, None, 2, 2]
        assert result.rows_failed >= 1
        calls.clear()
        table.backfill("m")
        assert calls.rows == []


@pytest.fixture
def at_first_call(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Let something happen when the UDF `doubled` is called for the first time."""
    waiting: list[Callable[[], None]] = []

    def happen() -> None:
        if waiting:
            waiting.pop()()

    # Through sys: the function travels as bytes, and finds what is here when it runs.
    monkeypatch.setattr(sys, "_geneva_test_hook", happen, raising=False)
    return waiting.append


def doubled(x: int) -> int:
    sys._geneva_test_hook()  # type: ignore[attr-defined]
    return x * 2


class TestWritersDuringAJob:
    def table(self, db: Connection) -> Table:
        table = make_table(db, [pa.table({"id": [1, 2, 3], "x": [1, 2, 3]})])
        table.add_columns({"b": udf(doubled, data_type=pa.int64())})
        return table

    def write(self, table: Table, **row: int) -> None:
        """Upsert a row in place: there is an index on the key."""
        values = pa.table({name: pa.array([value]) for name, value in row.items()})
        merge = lance.dataset(table.ref.uri).merge_insert("id").when_matched_update_all()
        merge.execute(values)

    def test_a_value_written_into_a_fragment_without_receipts_stays(
        self, local_db: Connection, at_first_call: Callable[[Callable[[], None]], None]
    ) -> None:
        table = self.table(local_db)
        some = pa.table({"id": [10, 11], "x": [10, 11], "b": pa.array([99, None], pa.int64())})
        table.add(some)
        table.create_index("id", config=BTree())
        at_first_call(lambda: self.write(table, id=11, x=70, b=777))
        table.backfill("b")
        assert by_id(table, "b") == {1: 2, 2: 4, 3: 6, 10: 99, 11: 777}

    def test_a_value_that_another_job_has_adopted_meanwhile_stays(
        self, local_db: Connection, at_first_call: Callable[[Callable[[], None]], None]
    ) -> None:
        table = self.table(local_db)
        table.create_index("id", config=BTree())

        def somebody_else() -> None:
            self.write(table, id=3, b=333)
            local_db.open_table("t").backfill("b")

        at_first_call(somebody_else)
        table.backfill("b")
        assert by_id(table, "b") == {1: 2, 2: 4, 3: 333}
        assert table.plan_backfill("b").is_empty


def test_a_computed_columns_type_is_its_functions(local_db: Connection, calls: Calls) -> None:
    table = filled(local_db, calls)
    with pytest.raises(UserInputError, match="its type is its UDF's"):
        table.alter_columns({"path": "a", "data_type": pa.int32()})
    table.alter_columns({"path": "a", "rename": "c"})
    assert table.plan_backfill("c").is_empty


class TestMuchToCheck:
    def test_workers_read_it(
        self, db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = filled(db, calls, 5, 5, 5)
        table.update(where="id % 2 = 1", values={"a": -1})
        table.update(where="id = 4", values={"id": 40})
        table.compact_files()
        for _ in range(2):
            table.add(pa.table({"id": [200]}))
            table.delete("id = 200")
        lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
        shipped: list[int] = []
        plain = validity_checks.check_on_workers

        def noted(*args: Any) -> Any:
            shipped.append(len(args[-1]))
            return plain(*args)

        monkeypatch.setattr(validity_checks, "MUCH_BYTES", 0)
        monkeypatch.setattr(validity_checks, "check_on_workers", noted)
        table.backfill("a")
        assert shipped
        assert calls.rows == [40]
        expected = {i: -1 if i % 2 else i * 3 for i in [*range(15), 40] if i != 4}
        assert by_id(table, "a") == expected


class TestViews:
    def test_a_clean_up_of_the_source_costs_reading_and_no_calls(
        self, local_db: Connection, calls: Calls
    ) -> None:
        source = make_table(local_db, [6, 6], stable_row_ids=True)
        query = source.query().select(["id"]).add_column({"a": counted(calls, triple)})
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        calls.clear()
        source.update(where="id = 3", values={"id": 30})
        source.delete("id = 4")
        source.add(pa.table({"id": [40]}))
        source.compact_files()
        lance.dataset(source.ref.uri).cleanup_old_versions(timedelta(0))
        view.refresh()
        assert calls.taken() == [30, 40]
        assert by_id(view, "a") == {i: i * 3 for i in by_id(source, "id")}
        view.compact_files()
        lance.dataset(view.ref.uri).cleanup_old_versions(timedelta(0))
        source.update(where="id = 5", values={"id": 50})
        lance.dataset(source.ref.uri).cleanup_old_versions(timedelta(0))
        view.refresh()
        assert calls.rows == [50]


def test_a_definition_says_since_when_it_has_receipts(local_db: Connection, calls: Calls) -> None:
    table = filled(local_db, calls)
    metadata = open_dataset(table.ref).schema.field("a").metadata
    assert json.loads(metadata[b"virtual_column.receipts"]) is True
    nodes = {f.name(): f.id() for f in open_dataset(table.ref).lance_schema.fields()}
    assert json.loads(metadata[b"virtual_column.field"]) == nodes["a"]

"""Views of table functions: partitions are computed when their rows changed, and only then."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import geneva
from geneva import UDTF, Connection, Retry, Skip, Table, chunker, udtf
from geneva.cli.summaries import table_description
from geneva.errors import (
    BudgetExceededError,
    ColumnNotFoundError,
    GenevaError,
    InvalidUDFError,
    TableChangedError,
    TypeMismatchError,
    UDFError,
    UDFOutputError,
    UnreadableFragmentsError,
    UserInputError,
)
from geneva.execution.refresh import partitions
from geneva.execution.runner import InProcessRunner
from geneva.partitioning import create_ivf_flat_index
from geneva.storage.lance.source_rows import SourceRows
from geneva.storage.views.state import commit_refreshing
from geneva.view import MaterializedView
from support import Calls, Prototypes, connect, counted, damage
from view_support import STABLE

SUMS = pa.schema([("customer", pa.string()), ("total", pa.int64()), ("rows", pa.int64())])


def sums(calls: Calls, **options: Any) -> UDTF:
    """The sum of each customer, counted by customer."""

    def total(source: Any) -> Iterator[pa.RecordBatch]:
        table = source.to_arrow()
        (customer,) = set(table["customer"].to_pylist())
        calls.note([customer])
        amount = sum(v or 0 for v in table["amount"].to_pylist())
        made = {"customer": [customer], "total": [amount], "rows": [table.num_rows]}
        yield pa.RecordBatch.from_pydict(made, schema=SUMS)

    return udtf(total, **{"output_schema": SUMS, "partition_by": "customer", **options})


def orders(db: Connection, name: str = "orders", **options: Any) -> Table:
    rows = {
        "id": [1, 2, 3, 4, 5],
        "customer": ["ann", "bob", "ann", None, "bob"],
        "amount": [1, 2, 3, 4, 5],
    }
    return db.create_table(name, pa.table(rows), storage_options={**STABLE, **options})


def found(view: Table) -> dict[Any, tuple[int, int]]:
    return {r["customer"]: (r["total"], r["rows"]) for r in view.to_arrow().to_pylist()}


ALL = {"ann": (4, 2), "bob": (7, 2), None: (4, 1)}


@pytest.fixture
def calls(prototypes: Prototypes) -> Calls:
    prototypes.calls().clear()
    return prototypes.calls()


def filled_view(db: Connection, prototypes: Prototypes) -> None:
    made = db.create_udtf_view("v", source=orders(db).query(), udtf=sums(prototypes.calls()))
    assert str(made.refresh()).startswith("DONE: 3 partitions computed in ")


@pytest.fixture
def view(local_db: Connection, prototypes: Prototypes) -> MaterializedView:
    """A view of a sum for each customer, filled."""
    prototypes.copy(filled_view, Path(local_db.uri))
    view = local_db.open_table("v")
    assert isinstance(view, MaterializedView)
    return view


@pytest.fixture
def source(request: pytest.FixtureRequest, local_db: Connection) -> Table:
    """Five orders of three customers: those of the view, where a test has that as well."""
    if "view" in request.fixturenames:
        request.getfixturevalue("view")
        return local_db.open_table("orders")
    return orders(local_db)


def test_it_runs_on_spark_too(db: Connection, calls: Calls) -> None:
    source = orders(db)
    view = db.create_udtf_view("v", source=source, udtf=sums(calls))
    assert len(view) == 0
    assert calls.count == 0
    view.refresh()
    assert found(view) == ALL
    assert calls.taken() == ["ann", "bob", None]
    source.update(where="id = 4", values={"customer": "ann"})
    view.refresh()
    assert found(view) == {"ann": (8, 3), "bob": (7, 2)}
    assert calls.taken() == ["ann"]


class TestWhatIsComputed:
    def test_only_touched_partitions(
        self, source: Table, view: MaterializedView, calls: Calls
    ) -> None:
        """Each change, whom it computes, and how many partitions are computed, there, and gone."""
        changes: list[tuple[Callable[[], Any], list[str], tuple[int, int, int]]] = [
            (lambda: source.update(where="id = 1", values={"amount": 9}), ["ann"], (1, 3, 0)),
            (
                lambda: source.update(where="id = 1", values={"customer": "bob"}),
                ["ann", "bob"],
                (2, 3, 0),
            ),
            (lambda: source.update(where="id = 4", values={"customer": "eve"}), ["eve"], (1, 3, 1)),
            (lambda: source.delete("id = 2"), ["bob"], (1, 3, 0)),
            (lambda: source.delete("customer = 'bob'"), [], (0, 2, 1)),
            (lambda: source.add_columns({"more": "id * 2"}), [], (0, 2, 0)),
        ]
        for change, called, counts in changes:
            change()
            plan = view.plan_refresh()
            assert plan.partitions is not None
            numbers = (plan.partitions.to_compute, plan.partitions.total, plan.partitions.leaving)
            assert numbers == counts
            assert f"{counts[0]} of {counts[1]}" in str(plan)
            result = view.refresh()
            assert calls.taken() == called
            assert result.rows_computed == len(called)
            expected: dict[Any, tuple[int, int]] = {}
            for row in source.to_arrow().to_pylist():
                total, rows = expected.get(row["customer"], (0, 0))
                expected[row["customer"]] = (total + row["amount"], rows + 1)
            assert found(view) == expected
            assert view.plan_refresh().is_empty

    def test_a_row_that_comes_back_computes_nothing(
        self, source: Table, view: MaterializedView, calls: Calls
    ) -> None:
        rows = source.search().where("customer = 'bob'").to_arrow()
        source.delete("customer = 'bob'")
        source.add(rows)
        view.refresh()
        assert calls.count == 0
        # Where its rows are now is known for the day when the function is another one.
        view.alter_columns({"path": "total", "udf": sums(calls, name="total", version="2")})
        view.refresh()
        assert calls.taken() == ["ann", "bob", None]
        assert found(view) == ALL

    @pytest.mark.slow
    def test_a_compaction_computes_nothing(
        self, source: Table, view: MaterializedView, calls: Calls
    ) -> None:
        source.add(pa.table({"id": [6], "customer": ["eve"], "amount": [1]}))
        view.refresh()
        assert calls.taken() == ["eve"]
        source.compact_files()
        view.compact_files()
        assert view.plan_refresh().rows_to_run == 0
        view.refresh()
        assert calls.count == 0
        assert found(view) == {**ALL, "eve": (1, 1)}

    @pytest.mark.slow
    def test_an_older_version(self, source: Table, view: MaterializedView, calls: Calls) -> None:
        before = source.version
        source.delete("customer = 'bob'")
        view.refresh()
        view.refresh(before)
        assert found(view) == ALL
        assert calls.taken() == ["bob"]

    def test_unchanged_rows_of_a_changed_partition_stay(
        self, local_db: Connection, source: Table, calls: Calls
    ) -> None:
        """So that nothing is computed again from them."""

        @udtf(output_schema=pa.schema([("id", pa.int64())]), partition_by=["customer"])
        def each(source: Any) -> Iterator[pa.Table]:
            yield source.to_arrow().select(["id"])

        view = local_db.create_udtf_view("v", source, each)
        view.refresh()
        view.add_columns({"t": counted(calls, lambda id: 3 * id, data_type=pa.int64())})
        view.backfill("t")
        over = local_db.create_materialized_view("over", view.query().select(["id", "t"]))
        over.refresh()
        assert calls.taken() == [1, 2, 3, 4, 5]
        source.add(pa.table({"id": [6], "customer": ["ann"], "amount": [1]}))
        source.update(where="id = 2", values={"amount": 7})
        view.refresh()
        view.backfill("t")
        over.refresh()
        assert calls.taken() == [6]
        assert sorted(over.to_arrow()["t"].to_pylist()) == [3, 6, 9, 12, 15, 18]


class TestAllRows:
    def test_are_one_partition(self, local_db: Connection, source: Table, calls: Calls) -> None:
        @udtf(output_schema=pa.schema([("n", pa.int64())]))
        def counting(source: Any) -> Iterator[dict[str, int]]:
            calls.note([source.count_rows()])
            yield {"n": sum(batch.num_rows for batch in source.to_batches(batch_size=2))}

        query = source.query().where("amount < 5").select(["id"])
        view = local_db.create_udtf_view("v", query, counting)
        view.refresh()
        assert calls.taken() == [4]
        source.update(where="id = 5", values={"amount": 6})
        source.update(where="id = 1", values={"customer": "not selected"})
        view.refresh()
        assert calls.count == 0
        source.delete("id = 1")
        view.refresh()
        assert view.to_arrow()["n"].to_pylist() == [3]
        source.delete("true")
        view.refresh()
        assert view.to_arrow()["n"].to_pylist() == [0]
        assert calls.taken() == [0, 3]

    def test_what_is_yielded_may_be_used_again(self, local_db: Connection, source: Table) -> None:
        @udtf(output_schema=pa.schema([("n", pa.int64())]))
        def counted(source: Any) -> Iterator[Any]:
            row: dict[str, int] = {}
            for row["n"] in range(2):
                yield row
            memory = np.empty(2, np.int64)
            for start in (2, 4):
                memory[:] = start, start + 1
                yield pa.record_batch({"n": pa.array(memory)})

        view = local_db.create_udtf_view("v", source.query().select(["id"]), counted)
        view.refresh()
        assert view.to_arrow()["n"].to_pylist() == [*range(6)]

    @pytest.mark.slow
    def test_in_the_order_of_the_query(self, local_db: Connection, source: Table) -> None:
        @udtf(output_schema=pa.schema([("ids", pa.list_(pa.int64()))]))
        def listed(source: Any) -> Iterator[dict[str, Any]]:
            yield {"ids": source.to_pandas()["id"].tolist()}

        query = source.query().shuffle(seed=5).offset(1).limit(3)
        view = local_db.create_udtf_view("v", query, listed)
        view.refresh()
        expected = query.to_arrow()["id"].to_pylist()
        assert view.to_arrow()["ids"].to_pylist() == [expected]
        by = udtf(listed.func, output_schema=listed.output_schema, partition_by="customer")
        parts = local_db.create_udtf_view("w", source.query().shuffle(seed=5), by)
        parts.refresh()
        order = source.query().shuffle(seed=5).to_arrow()
        ids: dict[Any, list[int]] = {}
        for row in order.to_pylist():
            ids.setdefault(row["customer"], []).append(row["id"])
        assert sorted(parts.to_arrow()["ids"].to_pylist()) == sorted(ids.values())


class TestWhatTheFunctionGets:
    def test_forms_of_its_rows(self, local_db: Connection) -> None:
        rows = orders(local_db)

        @udtf(output_schema=pa.schema([("n", pa.int64())]))
        def looked(source: Any) -> Iterator[dict[str, int]]:
            plenty = timedelta(minutes=5)
            frame = source.select(["id"]).to_pandas(timeout=plenty)
            yield {"n": int(frame["id"].sum())}
            yield {"n": len(source.to_list(timeout=60))}
            yield {"n": source.to_arrow(timeout=plenty).num_rows}
            yield from ({"n": b.num_rows} for b in source.to_batches(4, timeout=plenty))

        view = local_db.create_udtf_view("v", source=rows.search(None), udtf=looked)
        view.refresh()
        assert view.to_arrow()["n"].to_pylist() == [15, 5, 5, 4, 1]

    def test_what_only_queries_of_tables_have(self, local_db: Connection) -> None:
        @udtf(output_schema=pa.schema([("n", pa.int64())]))
        def filtered(source: Any) -> Iterator[pa.Table]:
            yield source.where("id > 1").to_arrow()

        source = orders(local_db).search(None)
        view = local_db.create_udtf_view("v", source=source, udtf=filtered)
        with pytest.raises(UDFError, match=r"no 'where': they have select.*view's query to say"):
            view.refresh()

    @pytest.mark.slow
    def test_its_input_columns(self, local_db: Connection, source: Table, calls: Calls) -> None:
        def names(source: Any) -> Iterator[dict[str, Any]]:
            seen = source.to_arrow().column_names
            calls.note([",".join(seen)])
            assert source.schema.names == seen
            assert source.select(seen[:1]).to_arrow().column_names == seen[:1]
            with pytest.raises(UserInputError, match="no column 'nowhere'"):
                source.select(["nowhere"])
            with pytest.raises(UserInputError, match="batch_size"):
                source.to_batches(batch_size=0)
            yield {"n": len(source)}

        schema = pa.schema([("n", pa.int64())])
        query = source.query().select({"who": "customer", "twice": "amount * 2"})
        cases = [
            (source.query(), udtf(names, output_schema=schema)),
            (query, udtf(names, output_schema=schema, partition_by="who")),
            (query, udtf(names, output_schema=schema, input_columns=["id", "twice"])),
            (query, udtf(names, output_schema=schema, input_columns=["id"], partition_by="twice")),
        ]
        for i, (asked, function) in enumerate(cases):
            local_db.create_udtf_view(f"v{i}", asked, function).refresh()
        assert calls.rows == [*["id"] * 5, "id,customer,amount", "id,twice", *["who,twice"] * 3]

    @pytest.mark.slow
    def test_odd_names(self, local_db: Connection) -> None:
        names = ["a b", "o'x", 'q"t', "ü", "SELECT"]
        data = pa.table({name: [i, i, i + 1] for i, name in enumerate(names)})
        source = local_db.create_table("t", data, storage_options=STABLE)

        @udtf(output_schema=pa.schema([(n, pa.int64()) for n in names]), partition_by=names)
        def first(source: Any) -> Iterator[Any]:
            yield source.to_arrow().slice(0, 1)

        view = local_db.create_udtf_view("v", source, first)
        view.refresh()
        rows = view.to_arrow().to_pylist()
        assert sorted(map(repr, rows)) == sorted(map(repr, data.slice(1).to_pylist()))

    @pytest.mark.slow
    def test_batches_of_the_asked_size(self, local_db: Connection) -> None:
        data = pa.table({"k": [i % 3 for i in range(1_000)], "v": range(1_000)})
        source = local_db.create_table("t", data, storage_options=STABLE)

        @udtf(output_schema=pa.schema([("sizes", pa.list_(pa.int64()))]), partition_by="k")
        def sizes(source: Any) -> Iterator[dict[str, Any]]:
            yield {"sizes": [b.num_rows for b in source.to_batches(batch_size=100)]}

        view = local_db.create_udtf_view("v", source, sizes)
        view.refresh()
        made = sorted(view.to_arrow()["sizes"].to_pylist())
        assert made == [[100, 100, 100, 33], [100, 100, 100, 33], [100, 100, 100, 34]]

    def test_small_partitions_are_read_together(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = pa.table(
            {"customer": [f"c{i % 2_000}" for i in range(4_000)], "amount": range(4_000)}
        )
        source = local_db.create_table("t", data, storage_options=STABLE)
        view = local_db.create_udtf_view("v", source, sums(calls))
        reads = []
        take = SourceRows.take

        def counting(self: SourceRows, ids: Any) -> Any:
            if self.keyed is None and self.ref.name == "t":
                reads.append(len(ids))
            return take(self, ids)

        monkeypatch.setattr(SourceRows, "take", counting)
        view.refresh(intra_applier_concurrency=4)
        assert calls.count == len(view) == 2_000
        assert sum(total for total, _ in found(view).values()) == sum(range(4_000))
        assert len(reads) < 200

    @pytest.mark.slow
    def test_a_class_is_made_once(self, local_db: Connection, source: Table, calls: Calls) -> None:
        @udtf(output_schema=pa.schema([("n", pa.int64())]), partition_by="customer")
        class Counter:
            def __init__(self, more: int = 0) -> None:
                calls.note(["made"])
                self.more = more

            def __call__(self, source: Any) -> Iterator[dict[str, int]]:
                yield {"n": source.count_rows() + self.more}

        view = local_db.create_udtf_view("v", source, Counter(10))
        assert calls.count == 0
        view.refresh()
        assert sorted(view.to_arrow()["n"].to_pylist()) == [11, 12, 12]
        assert calls.count == 1


def by_number(db: Connection, values: list[Any], schema: pa.Schema, **options: Any) -> Any:
    """A view with a partition for each number, for which the function gives one of some values."""
    data = pa.table({"k": range(len(values))})
    source = db.create_table("numbers", data, storage_options=STABLE)

    def given(source: Any) -> Any:
        return values[source.to_arrow()["k"][0].as_py()]

    made = udtf(given, output_schema=schema, partition_by="k", **options)
    return db.create_udtf_view("given", source, made)


class TestWhatTheFunctionGives:
    def test_tables_and_rows(self, local_db: Connection) -> None:
        given = [
            [{"a": 1, "b": "x"}, {"b": "y", "a": 2}],
            [(1, "x"), (2, "y")],
            [[{"a": 1, "b": "x"}], pa.table({"b": ["y"], "a": [2]})],
            pa.table({"a": pa.array([1, 2], pa.int8()), "b": ["x", "y"]}),
            [pa.record_batch({"a": [1], "b": ["x"]}), {"a": 2, "b": "y"}],
            pa.table({"a": [1, 2], "b": ["x", "y"]}).to_pandas(),
            None,
            [],
            pa.table({"a": pa.array([], pa.int64()), "b": pa.array([], pa.string())}),
        ]
        schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
        view = by_number(local_db, given, schema)
        view.refresh()
        expected = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}] * 6
        rows = view.to_arrow().to_pylist()
        assert sorted(map(repr, rows)) == sorted(map(repr, expected))

    def test_what_does_not_fit(self, local_db: Connection) -> None:
        given = {
            "has the columns ['a'], and not ['a', 'b']": pa.table({"a": [1]}),
            "has the columns ['a', 'b', 'c'],": pa.table({"a": [1], "b": ["x"], "c": [1]}),
            "column 'a' is double, which int64": pa.table({"a": [1.5], "b": ["x"]}),
            "'b' has a NULL": pa.table({"a": [1], "b": pa.nulls(1, pa.string())}),
            "['d'], which the struct lacks": [{"a": 1, "d": "x"}],
            "not a record": [7],
            "yields tables or rows, not a str": "text",
        }
        schema = pa.schema([("a", pa.int64()), pa.field("b", pa.string(), nullable=False)])
        view = by_number(local_db, [*given.values()], schema, on_error=[Skip(Exception)])
        view.refresh()
        assert len(view) == 0
        errors = sorted(view.get_errors(), key=lambda error: error.input_preview)
        assert len(errors) == len(given)
        for error, why in zip(errors, given, strict=True):
            assert why in error.message

    def test_what_does_not_fit_ends_the_refresh(self, local_db: Connection) -> None:
        view = by_number(local_db, [[7]], pa.schema([("a", pa.int64())]))
        with pytest.raises(UDFError, match=r"^View .*, rows of .*not a record"):
            view.refresh()
        assert len(view) == 0

    def test_nothing(self, local_db: Connection, source: Table, calls: Calls) -> None:
        """No rows are a result: the partition counts as done."""

        def none(source: Any) -> None:
            calls.note([0])

        view = local_db.create_udtf_view(
            "v", source, udtf(none, output_schema=SUMS, partition_by="customer")
        )
        view.refresh()
        view.refresh()
        assert calls.count == 3
        assert len(view) == 0


class TestFailures:
    @staticmethod
    def fragile(calls: Calls, broken: Path, on_error: Any) -> UDTF:
        path, plain = str(broken), sums(calls).func

        def total(source: Any) -> Iterator[Any]:
            made = list(plain(source))
            if Path(path).exists() and made[0]["customer"][0].as_py() == "ann":
                raise ValueError("not ann")
            yield from made

        return udtf(total, output_schema=SUMS, partition_by="customer", on_error=on_error)

    def test_fail_names_the_partition(
        self, local_db: Connection, source: Table, calls: Calls, tmp_path: Path
    ) -> None:
        broken = tmp_path / "broken"
        broken.touch()
        view = local_db.create_udtf_view("v", source, self.fragile(calls, broken, None))
        with pytest.raises(UDFError, match=r'partition {"customer": "ann"}: ValueError: not ann'):
            view.refresh()
        assert len(view) == 0
        broken.unlink()
        view.refresh()
        assert found(view) == ALL

    def test_skip_and_try_again(
        self, local_db: Connection, source: Table, calls: Calls, tmp_path: Path
    ) -> None:
        broken = tmp_path / "broken"
        function = self.fragile(calls, broken, [Skip(ValueError)])
        view = local_db.create_udtf_view("v", source, function)
        view.refresh()
        assert found(view) == ALL
        broken.touch()
        source.update(where="id = 1", values={"amount": 9})
        source.update(where="id = 2", values={"amount": 9})
        calls.clear()
        view.refresh()
        # What it had was of other rows: it has none until it is computed.
        assert found(view) == {"bob": (14, 2), None: (4, 1)}
        assert calls.taken() == ["ann", "bob"]
        (error,) = view.get_errors()
        assert (error.column_name, error.exception_type) == ("total", "ValueError")
        assert error.row_id is None
        assert error.input_preview == """partition='{"customer": "ann"}'"""
        assert error.table_version == source.version
        assert not {*error.input_columns, *error.output_columns} & {"__chunks", "partition"}
        view.refresh()
        assert calls.count == 0
        broken.unlink()
        view.refresh(retry_failed=True)
        assert calls.taken() == ["ann"]
        assert found(view) == {"ann": (12, 2), "bob": (14, 2), None: (4, 1)}

    @pytest.mark.slow
    def test_retry(self, local_db: Connection, source: Table, calls: Calls) -> None:
        def flaky(source: Any) -> Iterator[dict[str, int]]:
            calls.note([1])
            yield {"n": 1}
            if calls.count < 3:
                raise ConnectionError

        made = udtf(
            flaky,
            output_schema=pa.schema([("n", pa.int64())]),
            on_error=[Retry(ConnectionError, backoff="fixed")],
        )
        view = local_db.create_udtf_view("v", source, made)
        view.refresh()
        assert view.to_arrow()["n"].to_pylist() == [1]
        assert calls.count == 3


class TestOtherViews:
    @pytest.mark.slow
    def test_a_view_of_a_view(self, local_db: Connection, source: Table, calls: Calls) -> None:
        plain = local_db.create_materialized_view("p", source.query().where("amount > 1"))
        view = local_db.create_udtf_view("v", plain, sums(calls))
        plain.refresh()
        view.refresh()

        @udtf(output_schema=pa.schema([("total", pa.int64())]))
        def grand(source: Any) -> Iterator[dict[str, int]]:
            calls.note(["all"])
            yield {"total": sum(source.to_arrow()["total"].to_pylist())}

        top = local_db.create_udtf_view("top", view.query().select(["total"]), grand)
        top.refresh()
        assert top.to_arrow()["total"].to_pylist() == [14]
        assert calls.taken() == ["all", "ann", "bob", None]
        source.update(where="id = 1", values={"amount": 10})
        for each in (plain, view, top):
            each.refresh()
        assert top.to_arrow()["total"].to_pylist() == [24]
        assert calls.taken() == ["all", "ann"]
        for each in (plain, view, top):
            each.refresh()
        assert calls.count == 0

    @pytest.mark.slow
    def test_a_copied_database(
        self, source: Table, view: MaterializedView, calls: Calls, tmp_path: Path
    ) -> None:
        shutil.copytree(tmp_path / "db", tmp_path / "copy")
        shutil.rmtree(tmp_path / "db")
        copy = connect(tmp_path / "copy", InProcessRunner)
        again = copy.open_table("v")
        assert isinstance(again, MaterializedView)
        assert again.plan_refresh().is_empty
        copy.open_table("orders").update(where="id = 2", values={"amount": 9})
        again.refresh()
        assert calls.taken() == ["bob"]
        assert found(again) == {**ALL, "bob": (14, 2)}

    @pytest.mark.slow
    def test_dropped_and_made_anew(
        self, local_db: Connection, source: Table, view: MaterializedView, calls: Calls
    ) -> None:
        assert [(n, n.kind) for n in local_db.list_materialized_views()] == [("v", "udtf")]
        local_db.drop_materialized_view("v")
        assert local_db.list_materialized_views() == []
        again = local_db.create_udtf_view("v", source, sums(calls))
        assert len(again) == 0
        again.refresh()
        assert found(again) == ALL

    @pytest.mark.slow
    def test_without_stable_ids(self, local_db: Connection, calls: Calls) -> None:
        data = pa.table({"customer": ["ann", "ann"], "amount": [1, 2]})
        unstable = {"new_table_enable_stable_row_ids": "false"}
        plain = local_db.create_table("plain", data, storage_options=unstable)
        with pytest.warns(UserWarning, match="no stable row IDs") as told:
            view = local_db.create_udtf_view("w", plain, sums(calls))
        assert told[0].filename == __file__
        view.refresh()
        assert found(view) == {"ann": (3, 2)}
        plain.add(data)
        with pytest.raises(UserInputError, match="stable row IDs"):
            view.refresh()

    @pytest.mark.slow
    def test_a_branch_is_refused(self, view: MaterializedView, local_db: Connection) -> None:
        view.branches.create("b")
        with pytest.raises(UserInputError, match="branch of a view of a table function"):
            local_db.open_table("v@b").refresh()  # type: ignore[attr-defined]

    def test_a_second_refresh_is_refused(
        self, source: Table, view: MaterializedView, local_db: Connection
    ) -> None:
        from geneva.storage.views.partitions import rows_ref

        source.delete("id = 1")
        commit_refreshing(rows_ref(view.ref), source.version, "another-job", lambda job: True, [])
        local_db._history.close_lost = lambda job: True  # type: ignore[method-assign]
        with pytest.raises(TableChangedError, match="being refreshed by job another-job"):
            view.refresh()

    @pytest.mark.slow
    def test_a_refresh_that_gets_in_between(
        self,
        local_db: Connection,
        source: Table,
        view: MaterializedView,
        calls: Calls,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What a partition is made of, and where it is read, must be of one version."""
        before = source.version
        source.update(where="id = 1", values={"amount": 10})
        drop = partitions.drop_partitions

        def after_another(*args: Any) -> None:
            monkeypatch.setattr(partitions, "drop_partitions", drop)
            drop(*args)
            view.refresh()

        source.update(where="id = 3", values={"customer": "bob"})
        monkeypatch.setattr(partitions, "drop_partitions", after_another)
        other = local_db.open_table("v")
        assert isinstance(other, MaterializedView)
        with pytest.raises(TableChangedError, match="got in between"):
            other.refresh(before + 1)
        view.refresh()
        assert found(view) == {"ann": (10, 1), "bob": (10, 3), None: (4, 1)}

    @pytest.mark.slow
    def test_many_at_once(self, local_db: Connection, source: Table, calls: Calls) -> None:
        """One of them refreshes; the others are refused, find nothing, or go on."""
        local_db.create_udtf_view("v", source, sums(calls))
        refused: list[BaseException] = []

        def refresh() -> None:
            view = connect(Path(local_db.uri), InProcessRunner).open_table("v")
            assert isinstance(view, MaterializedView)
            try:
                view.refresh()
            except GenevaError as error:
                refused.append(error)

        for amount in (10, 20, 30):
            source.update(where="id = 1", values={"amount": amount})
            threads = [threading.Thread(target=refresh) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert all("refresh" in str(error).lower() for error in refused), refused
        view = local_db.open_table("v")
        assert isinstance(view, MaterializedView)
        view.refresh()
        assert found(view) == {**ALL, "ann": (33, 2)}
        calls.clear()
        view.refresh()
        assert calls.count == 0

    @pytest.mark.slow
    def test_cleaned_up(self, source: Table, view: MaterializedView, calls: Calls) -> None:
        for i in range(3):
            source.add(pa.table({"id": [i + 6], "customer": [f"c{i}"], "amount": [1]}))
            view.refresh()
        calls.clear()
        view.cleanup_checkpoints()
        view.optimize(cleanup_older_than=timedelta(0))
        for hidden in ("_rows", "_partitions", "_chunks"):
            dataset = lance.dataset(f"{view.ref.uri}/{hidden}")
            assert len(dataset.versions()) == 1
            assert hidden == "_partitions" or len(dataset.get_fragments()) == 1
        source.update(where="id = 6", values={"amount": 5})
        view.refresh()
        assert calls.taken() == ["c0"]
        assert found(view) == {**ALL, "c0": (5, 1), "c1": (1, 1), "c2": (1, 1)}

    @pytest.mark.slow
    def test_a_source_that_cannot_be_read(
        self, source: Table, view: MaterializedView, calls: Calls
    ) -> None:
        source.add(pa.table({"id": [6], "customer": ["eve"], "amount": [1]}))
        path, was = damage(source, 1)
        assert "known once they are read" in str(view.plan_refresh())
        with pytest.raises(UnreadableFragmentsError, match="view 'v'"):
            view.refresh()
        assert found(view) == ALL
        path.write_bytes(was)
        view.refresh()
        assert calls.taken() == ["eve"]
        assert found(view) == {**ALL, "eve": (1, 1)}


class TestAltering:
    def test_another_function(self, view: MaterializedView, calls: Calls) -> None:
        def total(source: Any) -> Iterator[dict[str, Any]]:
            table = source.to_arrow()
            calls.note([table["customer"][0].as_py()])
            yield {"customer": table["customer"][0].as_py(), "total": 0, "rows": 0}

        view.alter_columns(
            {"path": "total", "udf": udtf(total, output_schema=SUMS, partition_by="customer")}
        )
        assert view.plan_refresh().rows_to_run == 3
        view.refresh()
        assert calls.taken() == ["ann", "bob", None]
        assert found(view) == dict.fromkeys(ALL, (0, 0))

    def test_other_partitions_are_refused(self, view: MaterializedView, calls: Calls) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"partition_by": ["customer", "id"]}, "same inputs and partitions"),
            ({"partition_by": None}, "same inputs and partitions"),
            ({"input_columns": ["id"]}, "same inputs and partitions"),
            ({"output_schema": pa.schema([("a", pa.int64())])}, "must stay the same"),
        ]
        for options, why in cases:
            with pytest.raises((UserInputError, TypeMismatchError), match=why):
                view.alter_columns({"path": "total", "udf": sums(calls, **options)})

    def test_a_chunker_is_refused(self, view: MaterializedView) -> None:
        made = geneva.chunker(lambda id: [], output_schema=SUMS)
        with pytest.raises(UserInputError, match="Its table function is 'total'"):
            view.alter_columns({"path": "total", "udf": made})


class TestTheNameOfTheFunction:
    """It is no column's: a column of that name may be added to the view, and is one like others."""

    @pytest.fixture
    def named(self, local_db: Connection, source: Table, calls: Calls) -> MaterializedView:
        made = sums(calls, name="per_customer")
        view = local_db.create_udtf_view("named", source=source.query(), udtf=made)
        view.refresh()
        calls.taken()
        return view

    def test_a_computed_column(self, named: MaterializedView, calls: Calls) -> None:
        @geneva.udf
        def twice(total: int) -> int:
            return 2 * total

        @geneva.udf
        def thrice(total: int) -> int:
            return 3 * total

        named.add_columns({"per_customer": twice})
        assert named.backfill("per_customer").rows_computed == 3
        assert sorted(named.to_arrow()["per_customer"].to_pylist()) == [8, 8, 14]
        assert named.verify("per_customer").ok
        described = table_description(named)["computed_columns"]
        assert [(c["name"], c["udf"], c["stale_rows"]) for c in described] == [
            ("per_customer", "twice", 0)
        ]
        named.alter_columns(
            {"path": "per_customer", "udf": thrice},
            {"path": "per_customer", "udf": sums(calls, name="per_customer", version="2")},
        )
        assert named.refresh().rows_computed == 3
        assert calls.taken() == ["ann", "bob", None]
        assert named.backfill("per_customer").rows_computed == 3
        assert sorted(named.to_arrow()["per_customer"].to_pylist()) == [12, 12, 21]
        named.drop_columns("per_customer")
        assert named.schema.names == SUMS.names
        assert named.refresh().rows_computed == 0

    @pytest.mark.slow
    def test_a_loaded_column(self, named: MaterializedView) -> None:
        loaded = pa.table({"customer": ["ann"], "per_customer": [1.5]})
        for _ in range(2):
            named.load_columns(loaded, "customer", ["per_customer"])
            assert set(named.to_arrow()["per_customer"].to_pylist()) == {1.5, None}
        named.drop_columns("per_customer")
        assert named.schema.names == SUMS.names

    def test_a_function_of_columns_is_refused(self, named: MaterializedView) -> None:
        @geneva.udf
        def twice(amount: int) -> int:
            return 2 * amount

        for name, why in (
            ("per_customer", "is the table function"),
            ("rows", "comes of the table"),
        ):
            with pytest.raises(UserInputError, match=why):
                named.alter_columns({"path": name, "udf": twice})


class TestIndexedPartitions:
    @staticmethod
    def vectors(db: Connection, rows: int = 512) -> Table:
        points = np.random.default_rng(1).random((rows, 4), dtype=np.float32)
        data = pa.table(
            {
                "id": range(rows),
                "vec": pa.FixedSizeListArray.from_arrays(pa.array(points.reshape(-1)), 4),
            }
        )
        return db.create_table("points", data, storage_options=STABLE)

    @pytest.mark.slow
    def test_by_the_partitions_of_an_index(self, local_db: Connection, calls: Calls) -> None:
        @udtf(
            output_schema=pa.schema([("ids", pa.list_(pa.int64()))]),
            input_columns=["id"],
            partition_by_indexed_column="vec",
        )
        def members(source: Any) -> Iterator[dict[str, Any]]:
            ids = sorted(source.to_arrow()["id"].to_pylist())
            calls.note([ids[0]])
            yield {"ids": ids}

        source = self.vectors(local_db)
        view = local_db.create_udtf_view("v", source, members)
        with pytest.raises(UserInputError, match="has no IVF index"):
            view.refresh()
        create_ivf_flat_index(source, "vec", k=4)
        view.refresh()
        parts = view.to_arrow()["ids"].to_pylist()
        assert sorted(i for ids in parts for i in ids) == list(range(512))
        assert calls.count == len(parts) == 4
        calls.clear()
        source.delete(f"id = {parts[0][-1]}")
        view.refresh()
        assert calls.taken() == [parts[0][0]]
        source.add(source.search().where("id = 1").to_arrow())
        with pytest.raises(UserInputError, match="optimize"):
            view.refresh()
        source.optimize()
        view.refresh()
        assert sum(map(len, view.to_arrow()["ids"].to_pylist())) == 512
        # In the index it is still where its old vector was.
        source.update(where="id = 7", values={"vec": [1.0, 1.0, 1.0, 1.0]})
        with pytest.raises(UserInputError, match=r"1 row or more .* not in the index"):
            view.refresh()

    def test_not_with_columns(self) -> None:
        with pytest.raises(InvalidUDFError, match="not both"):
            udtf(
                lambda source: None,
                output_schema=SUMS,
                partition_by="a",
                partition_by_indexed_column="b",
            )


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "error", "why"),
        [
            ({"partition_by": "nowhere"}, ColumnNotFoundError, "UDTF 'total': .*nowhere"),
            ({"input_columns": ["nowhere"]}, ColumnNotFoundError, "nowhere"),
            ({"output_schema": pa.schema([("__a", pa.int64())])}, UserInputError, "__a"),
        ],
    )
    def test_of_a_view(
        self,
        local_db: Connection,
        source: Table,
        calls: Calls,
        options: dict[str, Any],
        error: type[Exception],
        why: str,
    ) -> None:
        with pytest.raises(error, match=why):
            local_db.create_udtf_view("v", source, sums(calls, **options))
        assert local_db.table_names() == ["orders"]

    def test_of_functions_in_the_query(
        self, local_db: Connection, source: Table, calls: Calls
    ) -> None:
        query = source.query().add_column(counted(calls, lambda id: id, data_type=pa.int64()))
        with pytest.raises(InvalidUDFError, match="Make a view of the query"):
            local_db.create_udtf_view("v", query, sums(calls))

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({}, "needs output_schema"),
            ({"output_schema": SUMS, "memoize": True}, "no option 'memoize'"),
            ({"output_schema": pa.schema([])}, "one or more columns"),
            ({"output_schema": SUMS, "partition_by": []}, "partition_by .*all rows are one"),
            ({"output_schema": SUMS, "partition_by": 5}, "partition_by must be a list"),
            ({"output_schema": SUMS, "partition_by": ["a", "a"]}, "names column 'a' twice"),
            ({"output_schema": SUMS, "input_columns": []}, "input columns must be a list"),
            ({"output_schema": SUMS, "partition_by_indexed_column": ""}, "one column, not ''"),
        ],
    )
    def test_of_declarations(self, options: dict[str, Any], why: str) -> None:
        with pytest.raises(InvalidUDFError, match=why):
            udtf(lambda source: None, **options)

    def test_of_functions_that_can_not_be_called_with_a_query(self) -> None:
        class NoArgument:
            def __call__(self) -> None: ...

        class Static:
            @staticmethod
            def __call__(source: Any) -> None: ...

        functions: list[Any] = [lambda: None, lambda a, b: None, lambda *, a: None, NoArgument]
        for function in functions:
            with pytest.raises(InvalidUDFError, match="called with one argument, a query"):
                udtf(function, output_schema=SUMS)
        fit: list[Any] = [lambda a, b=1: None, lambda *a: None, Static, len]
        for function in fit:
            udtf(function, output_schema=SUMS)

    def test_of_what_is_no_row(self, local_db: Connection, source: Table) -> None:
        made: list[Any] = [
            udtf(lambda source: 5, output_schema=SUMS, name="five"),
            chunker(lambda id: 5, output_schema=pa.schema([("n", pa.int64())]), name="five"),
        ]
        for number, function in enumerate(made):
            view = local_db.create_udtf_view(f"v{number}", source, function)
            with pytest.raises(UDFError, match=r"yields .*rows.*, not an int"):
                view.refresh()

    def test_of_async_functions(self) -> None:
        async def later(source: Any) -> None: ...

        with pytest.raises(InvalidUDFError, match=r"asyncio\.run"):
            udtf(later, output_schema=SUMS)


def test_users_see_their_own_names_and_lines(local_db: Connection, source: Table) -> None:
    """In errors and tracebacks: neither hidden columns, nor what stands around a function."""

    @udtf(output_schema=SUMS, partition_by="id", on_error=Skip(ValueError), name="per_id")
    def fails(source: Any) -> Iterator[dict[str, Any]]:
        raise ValueError("on purpose")
        yield {}

    view = local_db.create_udtf_view("v", source, fails)
    view.refresh()
    (error, *_) = view.get_errors()
    assert error.traceback.count("File ") == 1
    assert "raise ValueError" in error.traceback
    view.alter_columns({"path": "per_id", "udf": costing()})
    with pytest.raises(BudgetExceededError, match="for the rows of 'per_id' of view 'v' have cost"):
        view.refresh(budget=1, concurrency=1)


def costing() -> UDTF:
    def per_id(source: Any) -> list[Any]:
        geneva.report_usage(cost=1)
        return []

    return udtf(per_id, output_schema=SUMS, partition_by="id")


def test_what_is_hidden_is_inside_of_the_view(view: MaterializedView, local_db: Connection) -> None:
    assert local_db.table_names() == ["orders", "v"]
    assert lance.dataset(f"{view.ref.uri}/_partitions").count_rows() == 3


def test_narrow_dictionaries_of_many_fragments(local_db: Connection) -> None:
    """Small partitions are read together, and have more values together than their type holds."""
    kind = pa.dictionary(pa.int8(), pa.string())
    rows = [
        pa.table({"g": range(100), "s": pa.array([f"{i}-{n}" for n in range(100)]).cast(kind)})
        for i in range(3)
    ]
    source = local_db.create_table("narrow", rows[0])
    for more in rows[1:]:
        source.add(more)

    @udtf(output_schema=pa.schema([("texts", pa.list_(pa.string()))]), partition_by="g")
    def texts(query: Any) -> Any:
        yield {"texts": sorted(query.to_arrow()["s"].cast(pa.string()).to_pylist())}

    view = local_db.create_udtf_view("v", source=source.query(), udtf=texts)
    view.refresh()
    found = sorted(view.to_arrow()["texts"].to_pylist())
    assert found == sorted([f"{i}-{n}" for i in range(3)] for n in range(100))


def test_a_batch_chunker_that_forgets_a_column_is_refused(local_db: Connection) -> None:
    @chunker(batch=True, output_schema=pa.schema([("w", pa.int64())]), input_columns=["id"])
    def words(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"parent_row": list(range(batch.num_rows))})

    source = local_db.create_table("ids", pa.table({"id": [1, 2]}))
    view = local_db.create_udtf_view("v", source=source.query(), udtf=words)
    with pytest.raises(UDFError, match=r"and not \['w'\]"):
        view.refresh()


def test_a_type_error_names_the_partition(local_db: Connection) -> None:
    @udtf(output_schema=pa.schema([("n", pa.int64())]), partition_by="id")
    def total(query: Any) -> Any:
        raise TypeError("no sum")

    source = local_db.create_table("ids", pa.table({"id": [1]}))
    view = local_db.create_udtf_view("v", source=source.query(), udtf=total)
    with pytest.raises(UDFError, match=r'partition {"id": 1}: TypeError: no sum'):
        view.refresh()


@pytest.mark.parametrize("made", [[None], [[None]], [{"n": 1}, None], [pa.table({"n": [1]}), None]])
def test_none_is_no_row(local_db: Connection, source: Table, made: list[Any]) -> None:
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    view = local_db.create_udtf_view(
        "v", source=source.query(), udtf=udtf(lambda rows: made, name="n", output_schema=schema)
    )
    with pytest.raises(UDFOutputError, match="yielded None, which is no row"):
        view.refresh()

"""LanceDB's own computed columns, views and searches, through our objects and beside ours."""

from __future__ import annotations

import pickle
from typing import Any

import lancedb
import pyarrow as pa
import pytest
from lancedb.index import FTS
from lancedb.permutation import Permutation, Permutations, permutation_builder

from geneva import Connection, MaterializedView, Table
from geneva.errors import CompatibilityWarning, InvalidFilterError, UserInputError
from support import Calls, column, tripled


@pytest.fixture
def table(local_db: Connection) -> Table:
    return local_db.create_table("t", pa.table({"id": range(4), "s": ["a b", "b", "c", "d"]}))


class TestComputedColumns:
    def test_beside_ours(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        assert table.add_columns(computed={"up": "upper(s)"}).version == table.version
        assert column(table, "up") == [None] * 4
        assert table.refresh_column("up").rows_filled == 4
        table.backfill("x")
        assert (column(table, "up"), column(table, "x")) == (["A B", "B", "C", "D"], [0, 3, 6, 9])
        table.update(where="id = 1", values={"s": "z"})
        assert table.refresh_column("up").rows_filled == 1
        assert calls.taken() == [0, 1, 2, 3]
        assert table.backfill("x").rows_computed == 0

    def test_both_in_one_call(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)}, computed={"up": "upper(s)"})
        assert table.schema.names == ["id", "s", "x", "up"]

    def test_they_are_listed_with_their_kind(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        table.add_columns(computed={"up": "upper(s)"})
        kinds = {c.name: (c.kind, c.expression) for c in table.list_computed_columns()}
        assert kinds == {"x": ("udf", "triple(id)"), "up": ("sql", "upper(s)")}
        assert list(table.computed_columns()) == ["x"], "those that backfill computes"
        assert "up <- upper(s)" in repr(table)

    def test_backfill_says_whose_they_are(self, table: Table) -> None:
        table.add_columns(computed={"up": "upper(s)"})
        with pytest.raises(UserInputError, match="refresh_column"):
            table.backfill("up")

    def test_a_view_carries_one(self, local_db: Connection, table: Table) -> None:
        table.add_columns(computed={"up": "upper(s)"})
        table.refresh_column("up")
        view = local_db.create_materialized_view("v", table)
        view.refresh()
        assert column(view, "up") == ["A B", "B", "C", "D"]
        assert view.list_computed_columns() == []


class TestViews:
    def test_of_a_name_is_lancedbs(self, local_db: Connection, table: Table) -> None:
        view = local_db.create_materialized_view("big", "t", select={"i": "id + 1"}, where="id > 1")
        assert isinstance(view, lancedb.materialized_view.MaterializedView)
        assert view.table.to_arrow()["i"].to_pylist() == [3, 4], "filled at once"
        table.add(pa.table({"id": [7], "s": ["e"]}))
        opened = local_db.open_materialized_view("big")
        assert opened.refresh().rows_written == 1
        assert column(local_db.open_table("big"), "i") == [3, 4, 8]
        local_db.drop_materialized_view("big")
        assert local_db.table_names() == ["t"]

    def test_lancedbs_of_a_table_with_computed_columns(
        self, local_db: Connection, table: Table, calls: Calls
    ) -> None:
        """They have all columns that people see, and LanceDB computes them all."""
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        made = [
            local_db.create_materialized_view("big", "t").table,
            local_db.create_materialized_view("part", "t", select=["id", "x"]).table,
            local_db.create_materialized_view("none", "t", with_no_data=True).table,
        ]
        assert local_db.create_materialized_view_async("behind", "t").wait() is None
        made.append(local_db.open_materialized_view("behind").table)
        whole = ["id", "s", "x", "__source_row_id"]
        assert [t.schema.names for t in made] == [whole, ["id", "x", whole[-1]], whole, whole]
        opened = local_db.open_table("big")
        assert opened.list_computed_columns() == []
        assert "computed=[]" in repr(opened)
        refused = [
            lambda: opened.backfill("x"),
            lambda: opened.backfill("x", udf=tripled(calls)),
            lambda: opened.plan_backfill("x"),
            lambda: opened.add_columns({"y": tripled(calls)}),
            lambda: opened.alter_columns({"path": "x", "udf": tripled(calls)}),
        ]
        for call in refused:
            with pytest.raises(UserInputError, match="'big' is a view of LanceDB's own"):
                call()
        table.add(pa.table({"id": [7], "s": ["e"]}))
        table.backfill("x")
        view = local_db.open_materialized_view("big")
        assert view.refresh().mode == "incremental"
        assert column(opened.checkout_latest() or opened, "x") == [0, 3, 6, 9, 21]
        with pytest.raises(ValueError, match="'nope' was not found"):
            local_db.create_materialized_view("v", "nope")

    def test_both_kinds_are_listed(self, local_db: Connection, table: Table) -> None:
        local_db.create_materialized_view("theirs", source="t", with_no_data=True)
        local_db.create_materialized_view("ours", table.search(None))
        names = local_db.list_materialized_views()
        assert names == ["ours", "theirs"]
        assert [name.kind for name in names] == ["geneva", "lancedb"]
        assert isinstance(local_db.open_materialized_view("ours"), MaterializedView)
        assert isinstance(local_db.open_materialized_view("ours").table, MaterializedView)
        with pytest.raises(UserInputError, match="is a table"):
            local_db.open_materialized_view("t")
        for name in names:
            local_db.drop_materialized_view(name)
        assert local_db.list_materialized_views() == []

    def test_with_data(self, local_db: Connection, table: Table) -> None:
        view = local_db.create_materialized_view("v", table.search(None), with_no_data=False)
        assert column(view, "id") == [0, 1, 2, 3]
        empty = local_db.create_materialized_view("w", query=table.search(None), with_no_data=True)
        assert column(empty, "id") == [None] * 4

    @pytest.mark.parametrize("given", [{"select": ["id"]}, {"where": "id > 1"}, {"limit": 3}])
    def test_what_belongs_to_the_query(
        self, local_db: Connection, table: Table, given: dict[str, Any]
    ) -> None:
        with pytest.raises(UserInputError, match=next(iter(given))):
            local_db.create_materialized_view("v", table, **given)
        with pytest.raises(UserInputError, match="strict"):
            local_db.create_materialized_view("v", "t", strict=True, **given)
        for wrong in (None, pa.table({"id": [1]}), table.search("b", query_type="fts")):
            with pytest.raises(
                UserInputError, match=rf"needs a query.* not {type(wrong).__name__}"
            ):
                local_db.create_materialized_view("v", wrong)
        assert local_db.table_names() == ["t"]

    def test_auto_refresh_is_said(self, local_db: Connection, table: Table) -> None:
        with pytest.warns(CompatibilityWarning, match="geneva refresh DB") as told:
            local_db.create_materialized_view("v", table, auto_refresh=True)
        assert told[0].filename == __file__


class TestSearches:
    @pytest.fixture
    def words(self, local_db: Connection, calls: Calls) -> Table:
        rows = [{"id": i, "s": f"word{i} all", "v": [float(i), 0.0]} for i in range(6)]
        schema = pa.schema(
            [("id", pa.int64()), ("s", pa.string()), ("v", pa.list_(pa.float32(), 2))]
        )
        table = local_db.create_table("w", rows, schema=schema)
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        return table

    def test_vectors(self, words: Table) -> None:
        found = words.search([2.1, 0.0]).limit(2).to_list()
        assert [row["x"] for row in found] == [6, 9]
        assert not any(name.startswith("__") for row in found for name in row)
        assert words.search([2.1, 0.0]).select(["id"]).limit(1).to_list()[0]["id"] == 2

    def test_full_text_and_hybrid(self, words: Table) -> None:
        words.create_index("s", config=FTS())
        assert [r["id"] for r in words.search("word3", query_type="fts").to_list()] == [3]
        assert [r["id"] for r in words.search("word3", fts_columns="s").to_list()] == [3]
        both = words.search(query_type="hybrid").vector([5.0, 0.0]).text("word1").limit(6)
        found = both.to_list()
        assert {row["id"] for row in found} >= {1, 5}
        assert not any(name.startswith("__") for row in found for name in row)

    def test_full_text_as_a_frame(self, words: Table) -> None:
        words.create_index("s", config=FTS())

        def asked() -> Any:
            return words.search("word3", query_type="fts")

        frame = asked().to_pandas()
        assert list(frame.columns) == ["id", "s", "v", "x", "_score"]
        assert frame["x"].tolist() == [9]
        assert asked().output_schema().names == ["id", "s", "v", "x"], "as LanceDB's own has it"
        chosen = asked().select(["id", "_score"])
        assert list(chosen.to_pandas().columns) == ["id", "_score"]
        renamed = asked().select({"n": "id", "score": "_score"})
        assert list(renamed.to_pandas().columns) == renamed.to_arrow().schema.names
        assert words.search([3.0, 0.0]).limit(1).to_pandas()["x"].tolist() == [9]

    def test_permutations(self, words: Table) -> None:
        """LanceDB's way to feed a training reads our tables, and takes them to other processes."""
        shuffled = (
            permutation_builder(words)
            .split_random(ratios=[0.5, 0.5], seed=1, split_names=["train", "test"])
            .execute()
        )
        whole = Permutations(words, shuffled)
        parts = [whole[name].select_columns(["id", "x"]) for name in ("train", "test")]
        moved = [pickle.loads(pickle.dumps(part)) for part in parts]
        rows = [r for p in moved for r in p.take_offsets(list(range(len(p))))]
        assert sorted((r["id"], r["x"]) for r in rows) == [(i, 3 * i) for i in range(6)]
        names = Permutation.identity(words).column_names
        assert [n for n in names if not n.startswith("__receipt_")] == words.schema.names

    def test_conditions_are_datafusions_where_geneva_reads_them(
        self, local_db: Connection, calls: Calls
    ) -> None:
        """LanceDB's own searches read some otherwise."""
        columns = {"id": [0, 1], "s": ["ab", "c"], "score": pa.array([0.9, 0.5], pa.float32())}
        table = local_db.create_table("t", pa.table(columns))
        theirs, ours = table.search(), table.search(None)
        assert theirs.where("regexp_match(s, 'a+')").to_arrow()["id"].to_pylist() == [0]
        for wrong in ("regexp_match(s, 'a+')", "id < 1 AND NOT REGEXP_MATCH (s, 'a+')"):
            with pytest.raises(InvalidFilterError, match="regexp_like"):
                ours.where(wrong)
        assert ours.where("regexp_like(s, 'a+')").to_arrow()["id"].to_pylist() == [0]
        assert ours.where("regexp_match(s, 'a+')[1] = 'a'").to_arrow()["id"].to_pylist() == [0]
        assert table.count_rows("score >= 0.9") == 1
        assert ours.where("score >= 0.9").count_rows() == 0
        assert ours.where("score >= CAST(0.9 AS FLOAT)").count_rows() == 1
        table.add_columns({"x": tripled(calls)})
        with pytest.raises(InvalidFilterError, match="regexp_like"):
            table.backfill("x", where="regexp_match(s, 'a+')")

    def test_columns_whose_names_are_patterns(self, local_db: Connection, calls: Calls) -> None:
        columns = {"id": [1, 2], "*": ["a b", "c"], "^i?d$": [3, 4]}
        vectors = pa.array([[0.0, 1.0], [1.0, 0.0]], pa.list_(pa.float32(), 2))
        table = local_db.create_table("odd", pa.table({**columns, "v": vectors}))
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        table.create_index("*", config=FTS())
        names = ["id", "*", "^i?d$", "v", "x"]
        assert table.to_polars().collect().columns == names
        assert table.search().to_arrow().schema.names == names
        assert table.search([0.0, 1.0]).limit(1).to_list()[0]["*"] == "a b"
        found = table.search("c", query_type="fts").to_pandas()
        assert list(found.columns) == [*names, "_score"]
        assert found["x"].tolist() == [6]
        assert [row["*"] for row in table.take_offsets([1]).to_list()] == ["c"]

    def test_without_arguments(self, local_db: Connection, words: Table) -> None:
        query = words.search().where("id > 3").limit(9).select(["id", "x"])
        assert query.to_list() == [{"id": 4, "x": 12}, {"id": 5, "x": 15}]
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        assert sorted(column(view, "x")) == [12, 15]
        assert view.search().where("x > 12").to_arrow()["id"].to_pylist() == [5]
        local_db.create_materialized_view("vv", view.search().where("x > 12")).refresh()
        assert column(local_db.open_table("vv"), "id") == [5]

    def test_tags_and_versions(self, words: Table) -> None:
        words.tags.create("now", words.version)
        words.add([{"id": 9, "s": "", "v": [0.0, 0.0]}])
        words.checkout("now")
        assert words.count_rows() == 6
        words.checkout_latest()
        assert words.count_rows() == 7
        assert len(words.list_versions()) == words.version

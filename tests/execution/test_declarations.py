"""Declaring columns: what is stored, what is refused and how it is said; no function ever runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import Connection, Table, udf
from geneva.cli.summaries import table_description
from geneva.errors import (
    ColumnExistsError,
    ColumnNotFoundError,
    InvalidUDFError,
    TypeMismatchError,
    UserInputError,
)
from support import Calls, column, counted, make_table, triple, tripled


@pytest.fixture
def table(local_db: Connection) -> Table:
    data = pa.table(
        {
            "id": pa.array([0, 1, 2], pa.int64()),
            "text": ["a", "bb", "ccc"],
            "meta": [{"w": 1.5, "inner": {"n": 7}}] * 3,
        }
    )
    return make_table(local_db, [data])


class TestAdding:
    def test_it_is_metadata_only(self, table: Table, calls: Calls) -> None:
        files = sorted((Path(table.ref.uri) / "data").iterdir())
        version = table.version
        table.add_columns({"x": tripled(calls), "y": tripled(calls), "z": (tripled(calls), ["id"])})
        assert table.version == version + 1, "one commit"
        assert sorted((Path(table.ref.uri) / "data").iterdir()) == files
        assert column(table, "x") == [None] * 3
        assert table.schema.field("x").type == pa.int64()
        assert calls.count == 0

    def test_an_sql_column_beside_a_udf_column(self, table: Table, calls: Calls) -> None:
        table.add_columns({"s": "id + 10", "x": tripled(calls)})
        assert column(table, "s") == [10, 11, 12]
        assert list(table.computed_columns()) == ["x"]
        table.backfill("x")
        assert column(table, "x") == [0, 3, 6]
        assert calls.count == 3

    def test_plain_fields_are_lancedbs(self, table: Table) -> None:
        table.add_columns(pa.field("plain", pa.float32()))
        assert column(table, "plain") == [None] * 3
        assert table.computed_columns() == {}

    @pytest.mark.parametrize("given", [(), (None,)], ids=["left out", "none"])
    def test_lancedbs_computed_columns_are_added(self, table: Table, given: tuple[None]) -> None:
        table.add_columns(*given, computed={"next": "id + 1"})
        assert table.schema.names[-1] == "next"

    def test_lancedbs_computed_columns_beside_a_udf(self, table: Table, calls: Calls) -> None:
        with pytest.raises(UserInputError, match=r"add \['y'\] in a call of their own"):
            table.add_columns({"x": tripled(calls), "y": "id + 2"}, computed={"next": "id + 1"})
        assert table.computed_columns() == {}
        table.add_columns({"x": tripled(calls)}, computed={"next": "id + 1"})
        assert table.schema.names[-2:] == ["x", "next"]
        assert list(table.computed_columns()) == ["x"]

    def test_a_call_that_asks_for_nothing_is_lancedbs_to_refuse(self, table: Table) -> None:
        with pytest.raises(ValueError, match="requires transforms"):
            table.add_columns()

    def test_the_definition_says_everything_but_the_code(self, table: Table, calls: Calls) -> None:
        function = tripled(
            calls,
            version="v7",
            num_cpus=2,
            num_gpus=1,
            memory=1 << 20,
            checkpoint_size=10,
            batch_size=5,
            min_checkpoint_size=1,
            max_checkpoint_size=20,
            task_size=30,
            field_metadata={"owner": "me"},
        )
        table.add_columns({"x": function})
        definition = table.computed_columns()["x"]
        assert (definition.udf_name, definition.udf_version) == ("triple", "v7")
        assert definition.inputs == ("id",)
        assert (definition.num_cpus, definition.num_gpus, definition.memory) == (2, 1, 1 << 20)
        assert definition.sizes.checkpoint_size == 10
        assert definition.sizes.batch_size == 5
        assert definition.sizes.task_size == 30
        metadata = table.schema.field("x").metadata
        assert metadata[b"owner"] == b"me"
        assert json.loads(metadata[b"virtual_column.udf_inputs"]) == ["id"]
        assert "x <- triple" in repr(table)
        assert calls.count == 0

    def test_every_column_has_an_identity_of_its_own(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls), "y": tripled(calls)})
        first = table.computed_columns()
        assert first["x"].uuid != first["y"].uuid
        assert first["x"].udf_version == first["y"].udf_version
        table.drop_columns("x")
        table.add_columns({"x": tripled(calls)})
        assert table.computed_columns()["x"].uuid != first["x"].uuid

    def test_a_failed_call_changes_nothing(self, table: Table, calls: Calls) -> None:
        version = table.version
        with pytest.raises(ColumnNotFoundError):
            table.add_columns({"x": tripled(calls), "y": (tripled(calls), ["nope"])})
        assert table.version == version
        assert table.schema.names == ["id", "text", "meta"]


def test_messages_name_no_column_of_genevas_own(local_db: Connection, calls: Calls) -> None:
    """Neither where they list what there is, nor where they guess what was meant."""
    source = local_db.create_table("t", pa.table({"id": [0, 1]}))
    view = local_db.create_materialized_view("v", source.query().select(["id"]))
    view.refresh()
    view.add_columns({"x": tripled(calls)})
    view.backfill("x")
    assert any(name.startswith("__") for name in view.to_arrow(include_system=True).schema.names)
    reads = udf(lambda source_row_id: 1, data_type=pa.int64())
    refused: list[Callable[[str], Any]] = [
        view.backfill,
        view.plan_backfill,
        view.verify,
        view.preview,
        view.drop_columns,
        lambda name: view.backfill(name, udf=reads),
        lambda name: view.alter_columns({"path": name, "udf": reads}),
        lambda name: view.add_columns({"new": (reads, [name])}),
        lambda name: view.query().select([name]).to_arrow(),
        lambda name: view.query().where(f"{name} > 1").to_arrow(),
        lambda name: view.load_columns(pa.table({name: [1], "b": [1]}), name, ["b"]),
        lambda name: source.load_columns(view.ref.uri, "id", [name]),
        lambda name: view.take_blobs([0], name),
    ]
    for call in refused:
        for name in ("source_row_id", "_is_set", "receipt_"):
            with pytest.raises((ColumnNotFoundError, UserInputError)) as caught:
                call(name)
            assert "__" not in str(caught.value)


class TestRefusals:
    """The messages that the seed lists, each with what to do next."""

    @pytest.mark.parametrize(
        ("error", "said", "columns"),
        [
            (ColumnExistsError, "Column 'id' already exists", {"id": triple}),
            (ColumnExistsError, "has a column 'id', which differs from 'ID'", {"ID": triple}),
            (ColumnExistsError, "'x' and 'X' can't be added together", {"x": triple, "X": triple}),
            (
                ColumnNotFoundError,
                r"UDF expects input columns \['i'\] which are not found",
                {"x": lambda i: i},
            ),
            (ColumnNotFoundError, "Did you mean 'meta.w'", {"x": (triple, ["meta.v"])}),
            (ColumnNotFoundError, "not found", {"x": (triple, ["meta.inner.nope"])}),
            (ColumnNotFoundError, "not found", {"x": (triple, ["text.length"])}),
            (TypeMismatchError, "Type mismatch for column text", {"x": (triple, ["text"])}),
            (InvalidUDFError, "takes 1 input columns", {"x": (triple, ["id", "text"])}),
            (InvalidUDFError, "names", {"x": (triple, [])}),
            (UserInputError, "empty", {"": triple}),
            (UserInputError, "space", {" x": triple}),
            (UserInputError, "can't contain '.'", {"a.b": triple}),
            (UserInputError, "can't contain '`'", {"a`b": triple}),
            (UserInputError, "is Lance's own", {"_rowid": triple}),
            (UserInputError, "is Lance's own", {"_row_created_at_version": triple}),
        ],
    )
    def test_columns_that_can_not_be(
        self,
        table: Table,
        calls: Calls,
        error: type[Exception],
        said: str,
        columns: dict[str, Any],
    ) -> None:
        def declared(source: Any) -> Any:
            if isinstance(source, tuple):
                return (declared(source[0]), source[1])
            return counted(calls, source, data_type=pa.int64())

        version = table.version
        with pytest.raises(error, match=said) as caught:
            table.add_columns({name: declared(source) for name, source in columns.items()})
        assert isinstance(caught.value, ValueError)
        assert table.version == version
        assert calls.count == 0

    @pytest.mark.parametrize(
        "source",
        [triple, 3, None, (triple, ["id"]), [1, 2]],
        ids=["function", "number", "none", "pair", "list"],
    )
    def test_things_that_are_no_udf(self, table: Table, source: Any) -> None:
        with pytest.raises(InvalidUDFError, match="Column 'x' must be given a UDF"):
            table.add_columns({"x": source})

    def test_backfilling_what_is_not_there(self, table: Table) -> None:
        with pytest.raises(ColumnNotFoundError, match=r"Column 'x' is not defined in this table"):
            table.backfill("x")
        with pytest.raises(ColumnNotFoundError, match=r"Run table\.add_columns\(\) first"):
            table.plan_backfill("x")
        with pytest.raises(ColumnNotFoundError, match=r"'text' is not defined .* has no UDF"):
            table.backfill("text")

    def test_a_column_of_another_type(self, table: Table) -> None:
        with pytest.raises(TypeMismatchError, match="Type mismatch for column 'text'"):
            table.backfill("text", udf=udf(triple))
        with pytest.raises(TypeMismatchError, match="it is string"):
            table.alter_columns({"path": "text", "udf": udf(triple)})

    def test_a_column_computed_from_itself(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        with pytest.raises(InvalidUDFError, match="'x' can't be computed from itself"):
            table.alter_columns({"path": "x", "udf": (tripled(calls), ["x"])})

    def test_a_record_batch_reads_what_was_there_when_it_was_declared(
        self, table: Table, calls: Calls
    ) -> None:
        def names(batch: pa.RecordBatch) -> pa.Array:
            return pa.array([",".join(batch.schema.names)] * batch.num_rows)

        whole = counted(calls, names, data_type=pa.string())
        before = [*table.schema.names]
        table.add_columns({"x": whole})
        table.add_columns({"y": (udf(lambda x: x, data_type=pa.string(), name="y"), ["x"])})
        table.add_columns({"later": "id + 1"})
        table.backfill("y")
        assert column(table, "x") == [",".join(before)] * 3
        assert f"  reads      {', '.join(before)}\n" in str(
            table.plan_backfill("x", where="id = 0")
        )
        table.alter_columns({"path": "x", "udf": counted(calls, names, data_type=pa.string())})
        assert table.computed_columns()["x"].inputs == (*before, "later"), "without y, made of x"
        table.backfill("x", where="id = 0")
        assert column(table, "x")[0] == ",".join([*before, "later"])

    def test_an_input_that_went_away(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": (tripled(calls), ["id"])})
        lance.dataset(table.ref.uri).drop_columns(["id"])  # past geneva, which would refuse
        with pytest.raises(ColumnNotFoundError, match="UDF expects input columns"):
            table.backfill("x")
        assert calls.count == 0

    def test_a_renamed_input_is_the_same_input(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": (tripled(calls), ["id"])})
        table.backfill("x", where="id = 0")
        table.alter_columns({"path": "id", "rename": "number"})
        table.backfill("x")
        assert column(table, "x") == [0, 3, 6]
        assert calls.rows == [0, 1, 2]

    def test_a_renamed_input_is_shown_under_its_new_name(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        before = table.version
        table.alter_columns({"path": "id", "rename": "number"})
        table.add_columns({"id": "number + 100"})
        assert table.computed_columns()["x"].inputs == ("number",)
        (shown,) = [c for c in table.list_computed_columns() if c.kind == "udf"]
        assert (shown.inputs, shown.expression) == (("number",), "triple(number)")
        assert "triple(number)" in table._repr_html_()
        assert table_description(table)["computed_columns"][0]["inputs"] == ["number"]
        table.checkout(before)
        assert table.computed_columns()["x"].inputs == ("id",)

    def test_a_handle_of_a_table_that_is_gone_can_be_shown(
        self, local_db: Connection, table: Table, calls: Calls
    ) -> None:
        table.add_columns({"x": tripled(calls)})
        shown = repr(table)
        local_db.drop_table(table.name)
        assert repr(table) == shown
        assert "x <- triple" in shown


class TestAltering:
    def test_several_in_one_commit(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls), "y": tripled(calls)})
        version = table.version
        new = counted(calls, lambda id: -id, data_type=pa.int64(), name="minus")
        table.alter_columns({"path": "x", "udf": new}, {"path": "y", "udf": new})
        assert table.version == version + 1
        assert {d.udf_name for d in table.computed_columns().values()} == {"minus"}
        assert calls.count == 0

    def test_the_identity_stays(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        before = table.computed_columns()["x"]
        table.alter_columns({"path": "x", "udf": tripled(calls, version="2")})
        after = table.computed_columns()["x"]
        assert (after.uuid, after.udf_version) == (before.uuid, "2")

    def test_sizes_of_the_old_function_do_not_linger(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls, checkpoint_size=3, num_gpus=1)})
        table.alter_columns({"path": "x", "udf": tripled(calls)})
        after = table.computed_columns()["x"]
        assert after.sizes.checkpoint_size is None
        assert after.num_gpus is None

    def test_an_input_that_was_renamed_can_not_be_dropped(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        table.alter_columns({"path": "id", "rename": "number"})
        table.add_columns({"id": "number + 100"})
        with pytest.raises(UserInputError, match=r"'number' can't be dropped.*'x' reads it"):
            table.drop_columns(["number"])
        table.drop_columns(["id"])  # has the name that the input had, and nobody reads it
        assert table.backfill("x").rows_computed == 0
        assert column(table, "x") == [0, 3, 6]

    def test_a_name_of_lances_own_is_refused(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        with pytest.raises(UserInputError, match="is Lance's own"):
            table.alter_columns({"path": "x", "rename": "_rowaddr"})
        query = table.search(None).select({"_rowid": "id"})
        with pytest.raises(UserInputError, match="is Lance's own"):
            table._connection.create_materialized_view("v", query)
        assert list(table.computed_columns()) == ["x"]

    def test_a_rename_keeps_the_column_computed(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        table.alter_columns({"path": "x", "rename": "y"})
        assert list(table.computed_columns()) == ["y"]
        assert table.backfill("y").rows_computed == 0
        assert column(table, "y") == [0, 3, 6]
        assert calls.count == 3

    @pytest.mark.parametrize(
        "alteration",
        [{"udf": udf(triple)}, {"path": "x", "udf": udf(triple), "rename": "y"}],
        ids=["no path", "something else as well"],
    )
    def test_half_a_change_is_refused(
        self, table: Table, calls: Calls, alteration: dict[str, Any]
    ) -> None:
        table.add_columns({"x": tripled(calls)})
        with pytest.raises(UserInputError, match="To change a column's UDF give"):
            table.alter_columns(alteration)

    @pytest.mark.parametrize(
        "alteration",
        [
            {"path": "x", "data_type": pa.int32()},
            {"path": "`x`", "data_type": pa.int32()},
            {"path": "s", "data_type": pa.struct([("a", pa.int32())])},
            {"path": "s.a", "data_type": pa.int32()},
            {"path": "s.a", "rename": "b"},
        ],
        ids=str,
    )
    def test_the_type_of_a_computed_column_is_its_functions(
        self, table: Table, calls: Calls, alteration: dict[str, Any]
    ) -> None:
        kind = pa.struct([("a", pa.int64())])
        record = counted(calls, lambda id: {"a": id}, data_type=kind)
        table.add_columns({"x": tripled(calls), "s": record})
        table.backfill("x")
        version, schema = table.version, table.schema
        with pytest.raises(UserInputError, match="is computed: its type is its UDF's"):
            table.alter_columns(alteration)
        with pytest.raises(UserInputError, match="is computed: its type is its UDF's"):
            table.drop_columns(["s.a"])
        assert (table.version, table.schema) == (version, schema)
        assert table.backfill("x").rows_computed == 0

    def test_columns_of_genevas_own_are_left_alone(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        (hidden,) = set(lance.dataset(table.ref.uri).schema.names) - set(table.schema.names)
        for change in ({"rename": "y"}, {"data_type": pa.int32()}):
            with pytest.raises(UserInputError, match="Geneva's own"):
                table.alter_columns({"path": hidden, **change})
        with pytest.raises(UserInputError, match="Geneva's own"):
            table.drop_columns([hidden])

    def test_a_column_that_is_not_there(self, table: Table) -> None:
        with pytest.raises(ColumnNotFoundError, match="Did you mean 'text'"):
            table.alter_columns({"path": "txt", "udf": udf(triple)})


class TestDropping:
    def test_a_computed_column_goes_without_a_rewrite(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls), "y": tripled(calls)})
        table.backfill("x")
        table.drop_columns(["x", "y"])
        assert table.schema.names == ["id", "text", "meta"]
        assert table.computed_columns() == {}
        assert calls.count == 3

    def test_an_input_is_held_by_its_reader(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": tripled(calls)})
        with pytest.raises(UserInputError, match="'id' can't be dropped: computed column 'x'"):
            table.drop_columns(["id"])
        table.drop_columns(["id", "x"])
        assert table.schema.names == ["text", "meta"]

    def test_what_is_not_there(self, table: Table) -> None:
        with pytest.raises(ColumnNotFoundError, match="'nope' is not defined in this table"):
            table.drop_columns(["nope"])

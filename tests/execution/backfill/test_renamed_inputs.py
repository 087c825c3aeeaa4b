"""Inputs of computed columns that are renamed, swapped, retyped, or made anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import Connection, Table
from geneva.errors import UserInputError
from geneva.execution.declarations import declare_again
from support import Calls, by_id, column, counted, make_table


def renamed(table: Table, *names: tuple[str, str]) -> None:
    for path, name in names:
        table.alter_columns({"path": path, "rename": name})


def swapped(table: Table, one: str, other: str, within: str = "") -> None:
    renamed(table, (f"{within}{one}", "tmp"), (f"{within}{other}", one), (f"{within}tmp", other))


def added(table: Table, **columns: list[Any]) -> None:
    table.add(pa.table(columns))


class TestBatches:
    """A function of a batch gets the names that it was declared with."""

    @pytest.fixture
    def table(self, local_db: Connection, calls: Calls) -> Table:
        table = make_table(local_db, [pa.table({"id": [1, 2], "a": [10, 20], "b": [1, 2]})])

        def difference(batch: pa.RecordBatch) -> pa.Array:
            return pc.subtract(batch["a"], batch["b"])

        options = {"data_type": pa.int64(), "input_columns": ["a", "b"]}
        table.add_columns({"y": counted(calls, difference, **options)})
        table.backfill("y")
        return table

    def test_whose_names_are_swapped(self, table: Table, calls: Calls) -> None:
        swapped(table, "a", "b")
        added(table, id=[3], b=[30], a=[3])
        assert table.backfill("y").rows_computed == 1
        assert sum(calls.batches) == 3, "two rows, and then one"
        assert column(table, "y") == [9, 18, 27]
        assert table.verify("y", run=True, sample=3).ok

    def test_whose_columns_are_renamed(self, table: Table) -> None:
        renamed(table, ("a", "q"))
        added(table, id=[3], q=[30], b=[3])
        assert table.backfill("y").rows_computed == 1
        assert column(table, "y") == [9, 18, 27]
        shown = table.preview("y", n=3)
        assert shown.values.to_pylist() == [9, 18, 27]
        assert shown.inputs.schema.names == ["q", "b"]

    def test_also_when_the_function_is_declared_anew(self, table: Table) -> None:
        swapped(table, "a", "b")
        declare_again(table.ref, None, lambda definition: definition)
        assert table.computed_columns()["y"].inputs == ("b", "a")
        added(table, id=[3], b=[30], a=[3])
        table.backfill("y")
        assert column(table, "y") == [9, 18, 27]

    def test_another_function_knows_the_names_that_there_are(
        self, table: Table, calls: Calls
    ) -> None:
        renamed(table, ("a", "q"))
        declare_again(table.ref, None, lambda definition: definition)

        def total(batch: pa.RecordBatch) -> pa.Array:
            return pc.add(batch["q"], batch["b"])

        new = counted(calls, total, data_type=pa.int64(), input_columns=["q", "b"])
        table.alter_columns({"path": "y", "udf": new})
        table.backfill("y")
        assert column(table, "y") == [11, 22]


class TestStructs:
    """A function knows the fields of a struct by their names: with others it is another input."""

    @pytest.fixture
    def table(self, local_db: Connection) -> Table:
        structs = [{"x": 1, "z": 5}, {"x": 2, "z": 6}]
        data = pa.table({"id": [1, 2], "s": structs, "l": [[s] for s in structs]})
        return make_table(local_db, [data])

    @pytest.mark.parametrize(("path", "within"), [("s", "s."), ("l", "l.item.")])
    def test_whose_fields_are_swapped(
        self, table: Table, calls: Calls, path: str, within: str
    ) -> None:
        def first(v: Any) -> int:
            found = v if path == "s" else v[0]
            return int(found["x"])

        table.add_columns({"y": (counted(calls, first), [path])})
        table.backfill("y")
        swapped(table, "x", "z", within)
        assert table.backfill("y").rows_computed == 2
        assert column(table, "y") == [5, 6]
        assert table.verify("y", run=True, sample=2).ok
        table.optimize()
        assert table.backfill("y").rows_computed == 0
        swapped(table, "x", "z", within)
        table.backfill("y")
        assert column(table, "y") == [1, 2]
        assert calls.count == 8, "three times two, and two to verify"

    def test_a_field_by_its_path_is_followed(self, table: Table, calls: Calls) -> None:
        table.add_columns({"y": (counted(calls, lambda v: v, data_type=pa.int64()), ["s.x"])})
        table.backfill("y")
        swapped(table, "x", "z", "s.")
        assert table.backfill("y").rows_computed == 0
        assert column(table, "y") == [1, 2]
        assert calls.count == 2

    def test_a_struct_with_another_name_is_the_same_input(self, table: Table, calls: Calls) -> None:
        table.add_columns({"y": (counted(calls, lambda v: v["x"], data_type=pa.int64()), ["s"])})
        table.backfill("y")
        renamed(table, ("s", "r"))
        assert table.backfill("y").rows_computed == 0
        assert calls.count == 2


class TestOtherFields:
    """An input that is cast, or made anew, is another field: its column goes on to follow it."""

    @pytest.fixture
    def table(self, local_db: Connection, calls: Calls) -> Table:
        data = {"id": [1, 2], "a": [1, 2], "b": [7, 8], "s": [{"x": 1, "z": 7}, {"x": 2, "z": 8}]}
        table = make_table(local_db, [pa.table(data)])
        tenfold = counted(calls, lambda a: a * 10, data_type=pa.int64())
        table.add_columns({"y": (tenfold, ["a"]), "n": (tenfold, ["s.x"])})
        table.backfill("y")
        table.backfill("n")
        calls.clear()
        return table

    def cast(self, table: Table) -> None:
        table.alter_columns({"path": "a", "data_type": pa.int32()})

    def cast_past_geneva(self, table: Table) -> None:
        lance.dataset(table.ref.uri).alter_columns({"path": "a", "data_type": pa.int32()})
        table.checkout_latest()
        table.backfill("y")

    def made_anew(self, table: Table) -> None:
        lance.dataset(table.ref.uri).drop_columns(["a"])
        table.checkout_latest()
        table.add_columns({"a": "id"})
        table.backfill("y")

    def cast_under_another_name(self, table: Table) -> None:
        renamed(table, ("a", "first"))
        table.alter_columns({"path": "first", "data_type": pa.int32(), "rename": "a"})

    @pytest.mark.parametrize("change", [cast, cast_past_geneva, made_anew, cast_under_another_name])
    def test_it_is_followed_through_renames(
        self, table: Table, calls: Calls, change: Callable[[Any, Table], None]
    ) -> None:
        change(self, table)
        renamed(table, ("a", "old"), ("b", "a"))
        assert table.computed_columns()["y"].inputs == ("old",)
        assert table.backfill("y").rows_computed == 0
        with pytest.raises(UserInputError, match=r"'old' can't be dropped.*'y' reads it"):
            table.drop_columns(["old"])
        table.update(where="id = 1", values={"old": 5})
        table.backfill("y")
        assert by_id(table, "y") == {1: 50, 2: 20}
        assert calls.rows == [5]

    def test_cast_and_renamed_at_once(self, table: Table, calls: Calls) -> None:
        table.alter_columns({"path": "`a`", "data_type": pa.int32(), "rename": "old"})
        renamed(table, ("b", "a"))
        assert table.backfill("y").rows_computed == 0
        assert column(table, "y") == [10, 20]
        assert calls.count == 0

    def test_renamed_past_geneva(self, table: Table, calls: Calls) -> None:
        self.cast(table)
        for path, name in (("a", "old"), ("b", "a")):
            lance.dataset(table.ref.uri).alter_columns({"path": path, "name": name})
        table.checkout_latest()
        assert table.backfill("y").rows_computed == 0
        assert column(table, "y") == [10, 20]

    def test_a_field_of_a_struct(self, table: Table, calls: Calls) -> None:
        table.alter_columns({"path": "s.x", "data_type": pa.int32()})
        renamed(table, ("s.x", "w"), ("s.z", "x"), ("s", "r"))
        assert table.computed_columns()["n"].inputs == ("r.w",)
        assert table.backfill("n").rows_computed == 0
        assert column(table, "n") == [10, 20]
        assert calls.count == 0

    def test_a_field_with_a_dot_in_its_name(self, local_db: Connection, calls: Calls) -> None:
        data = pa.table({"id": [1, 2], "s": [{"x.y": 1, "z": 7}, {"x.y": 2, "z": 8}]})
        table = make_table(local_db, [data], name="dots")
        tenfold = counted(calls, lambda a: a * 10, data_type=pa.int64())
        table.add_columns({"n": (tenfold, ["s.x.y"])})
        table.backfill("n")
        table.alter_columns({"path": "s.`x.y`", "data_type": pa.int32(), "rename": "w"})
        assert table.computed_columns()["n"].inputs == ("s.w",)
        assert table.backfill("n").rows_computed == 0
        assert column(table, "n") == [10, 20]

    def test_a_struct_whose_fields_were_renamed(self, table: Table, calls: Calls) -> None:
        table.add_columns({"m": (counted(calls, len, data_type=pa.int64()), ["s"])})
        renamed(table, ("s.x", "w"), ("s", "r"))
        table.add_columns({"s": "id"})
        assert table.computed_columns()["m"].inputs == ("r",)
        table.backfill("m")
        assert column(table, "m") == [2, 2]

    def test_a_plain_column_that_was_made_a_computed_one(self, table: Table, calls: Calls) -> None:
        tenfold = counted(calls, lambda a: a * 10, data_type=pa.int64())
        table.alter_columns({"path": "id", "udf": (tenfold, ["a"])})
        swapped(table, "a", "b")
        assert table.computed_columns()["id"].inputs == ("b",)

    def test_a_rename_alone_is_one_commit(self, table: Table) -> None:
        version = table.version
        renamed(table, ("a", "old"))
        assert table.version == version + 1
        table.backfill("y")
        assert table.version == version + 1

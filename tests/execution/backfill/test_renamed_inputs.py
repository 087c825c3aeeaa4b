"""Inputs of computed columns that are renamed, swapped, retyped, or made anew."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import Connection, Table
from geneva.execution.declarations import declare_again
from support import Calls, column, counted, make_table


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

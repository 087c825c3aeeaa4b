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

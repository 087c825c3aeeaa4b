"""Inputs of computed columns that are renamed, swapped, retyped, or made anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import Connection, Table
from geneva.errors import (
    ColumnChangedError,
    ColumnNotFoundError,
    UnreadableFragmentsError,
    UserInputError,
)
from geneva.execution.declarations import declare_again
from geneva.model.tables import Doubt
from geneva.storage.columns import definitions, doubts
from geneva.storage.lance import history
from geneva.storage.lance.dataset import FieldsNow
from support import Calls, by_id, column, counted, make_table


def renamed(table: Table, *names: tuple[str, str]) -> None:
    for path, name in names:
        table.alter_columns({"path": path, "rename": name})


def swapped(table: Table, one: str, other: str, within: str = "") -> None:
    renamed(table, (f"{within}{one}", "tmp"), (f"{within}{other}", one), (f"{within}tmp", other))


def past_geneva(table: Table, alteration: dict[str, Any]) -> None:
    lance.dataset(table.ref.uri).alter_columns(alteration)
    table.checkout_latest()


def swapped_past_geneva(table: Table) -> None:
    for path, name in (("a", "tmp"), ("b", "a"), ("tmp", "b")):
        past_geneva(table, {"path": path, "name": name})


def added(table: Table, **columns: list[Any]) -> None:
    table.add(pa.table(columns))


def commits_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions whose commits are read from now on: each is a request to the store."""
    asked: list[int] = []
    real = history.read_transaction

    def noted(dataset: lance.LanceDataset, version: int) -> Any:
        asked.append(version)
        return real(dataset, version)

    monkeypatch.setattr(history, "read_transaction", noted)
    return asked


def overwritten(table: Table, names: list[str]) -> None:
    """Past Geneva, with these columns first, and those of them that are not there made up."""
    dataset = lance.dataset(table.ref.uri)
    data = dataset.to_table()
    for name in names:
        if name not in data.column_names:
            data = data.append_column(name, pa.array([100, 200]))
    left = [name for name in data.column_names[len(names) :] if name not in names]
    lance.write_dataset(data.select([*names, *left]), dataset.uri, mode="overwrite")
    table.checkout_latest()


def as_by_an_earlier_release(table: Table, fields_at: str | None) -> None:
    """The definition of `y`, which doesn't name the commit that its field ids are of."""
    dataset = lance.dataset(table.ref.uri)
    dataset.update_field_metadata({"y": {"virtual_column.fields_at": fields_at}})
    table.checkout_latest()


def cleaned_up(table: Table) -> None:
    """The history is gone, up to a commit that tells nothing."""
    table.checkout_latest()
    table.update(where="id = 2", values={"id": 2})
    lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
    table.checkout_latest()


def compacted(table: Table) -> None:
    """No data file is left that a job wrote, so that only receipts tell what was computed."""
    table.checkout_latest()
    table.update(where="id = 2", values={"id": 2})
    dataset = lance.dataset(table.ref.uri)
    dataset.optimize.compact_files(target_rows_per_fragment=10_000)
    files = [file.path for f in dataset.get_fragments() for file in f.metadata.files]
    assert not [path for path in files if path.startswith("geneva-")]
    table.checkout_latest()


def candidates(table: Table, name: str = "y") -> tuple[str, ...] | None:
    """The columns that the input of a column may be; None: nobody doubts."""
    doubt = table.computed_columns()[name].doubt
    return None if doubt is None else doubt.candidates


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

    @pytest.mark.parametrize("again", [True, False])
    def test_cast_and_renamed_at_once_past_geneva(
        self, table: Table, calls: Calls, again: bool
    ) -> None:
        chained = counted(calls, lambda y: y + 1, data_type=pa.int64())
        table.add_columns({"z": (chained, ["y"])})
        table.update(values_sql={"a": "a + 2"})  # no receipt fits
        past_geneva(table, {"path": "a", "data_type": pa.int32(), "name": "old"})
        past_geneva(table, {"path": "b", "name": "a"})
        cleaned_up(table)
        for name in ("y", "z"):
            with pytest.raises(ColumnChangedError, match=r"'y'.* computed from 'a'\. Others"):
                table.plan_backfill(name)
            with pytest.raises(ColumnChangedError, match=r"\('a' or 'old'\)\. Say which column"):
                table.backfill(name)
        if again:  # what a rename leads to is not what was lost
            renamed(table, ("a", "b"))
            assert table.computed_columns()["y"].inputs == ("a",)
        tenfold = counted(calls, lambda a: a * 10, data_type=pa.int64())
        table.alter_columns({"path": "y", "udf": (tenfold, ["old"])})
        assert table.backfill("n").rows_computed == 0
        calls.clear()
        table.update(where="id = 1", values={"old": 5})
        table.backfill("y")
        assert by_id(table, "y") == {1: 50, 2: 40}

    def test_dropped_past_geneva_while_an_older_column_gets_its_name(
        self, table: Table, calls: Calls
    ) -> None:
        lance.dataset(table.ref.uri).drop_columns(["a"])
        past_geneva(table, {"path": "b", "name": "a"})
        assert table.plan_backfill("y").rows_to_run == 2
        table.backfill("y")
        assert calls.taken() == [7, 8]
        assert column(table, "y") == [70, 80]

    def test_an_overwritten_table_is_read_by_name(self, table: Table, calls: Calls) -> None:
        self.cast(table)
        dataset = lance.dataset(table.ref.uri)
        lance.write_dataset(dataset.to_table(), dataset.uri, mode="overwrite")
        table.checkout_latest()
        table.update(where="id = 1", values={"a": 5})
        table.backfill("y")
        assert by_id(table, "y") == {1: 50, 2: 20}
        assert calls.rows == [5]

    @pytest.mark.parametrize("order", [["id", "b", "a", "s"], ["id", "b", "new", "s", "a"]])
    def test_a_table_that_is_overwritten_in_another_order(
        self, table: Table, calls: Calls, order: list[str]
    ) -> None:
        """The column and its receipts have the ids that they had, and its input has not."""
        dataset = lance.dataset(table.ref.uri)
        data = dataset.to_table().append_column("new", pa.array([3, 4]))
        rest = [name for name in data.column_names if name not in {*order, "new"}]
        last = order[4:]
        lance.write_dataset(data.select([*order[:4], *rest, *last]), dataset.uri, mode="overwrite")
        table.checkout_latest()
        table.update(where="id = 1", values={"a": 5})
        assert table.plan_backfill("y").rows_to_run == 1
        table.backfill("y")
        assert by_id(table, "y") == {1: 50, 2: 20}
        assert calls.rows == [5]

    def test_swapped_past_geneva(self, table: Table, calls: Calls) -> None:
        swapped_past_geneva(table)
        table.update(where="id = 1", values={"b": 5})
        assert table.backfill("y").rows_computed == 1
        assert table.computed_columns()["y"].inputs == ("b",)
        # A job writes down what it found: the history is not asked again.
        lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
        table.update(where="id = 2", values={"b": 6})
        table.backfill("y")
        assert by_id(table, "y") == {1: 50, 2: 60}
        assert calls.rows == [5, 6]

    def test_swapped_past_geneva_and_cleaned_up(self, table: Table, calls: Calls) -> None:
        swapped_past_geneva(table)
        table.update(where="id = 1", values={"b": 5})
        table.update(where="id = 2", values={"b": 6})
        lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
        with pytest.raises(ColumnChangedError, match=r"'y'.* computed from 'a'.* moved columns"):
            table.backfill("y")
        tenfold = counted(calls, lambda b: b * 10, data_type=pa.int64())
        table.alter_columns({"path": "y", "udf": (tenfold, ["b"])})
        table.backfill("y")
        assert by_id(table, "y") == {1: 50, 2: 60}

    @pytest.mark.parametrize("place", ["branch", "clone"])
    @pytest.mark.parametrize("before", [True, False])
    def test_swapped_past_geneva_where_the_history_goes_on_in_another_table(
        self, local_db: Connection, table: Table, calls: Calls, place: str, before: bool
    ) -> None:
        if before:
            swapped_past_geneva(table)
        if place == "branch":
            other = table.branches.create("other")
        else:
            dataset = lance.dataset(table.ref.uri)
            dataset.shallow_clone(f"{local_db.uri}/other.lance", dataset.version)
            other = local_db.open_table("other")
        if not before:
            swapped_past_geneva(other)
        other.update(where="id = 1", values={"b": 5})
        assert other.plan_backfill("y").rows_to_run == 1
        other.backfill("y")
        assert by_id(other, "y") == {1: 50, 2: 20}
        assert calls.rows == [5]

    def test_swapped_past_geneva_and_restored_behind_an_overwrite(
        self, table: Table, calls: Calls
    ) -> None:
        swapped_past_geneva(table)
        version = table.version
        lance.write_dataset(pa.table({"id": [1]}), table.ref.uri, mode="overwrite")
        table.checkout_latest()
        table.restore(version)
        table.update(where="id = 1", values={"b": 5})
        table.backfill("y")
        assert by_id(table, "y") == {1: 50, 2: 20}
        assert calls.rows == [5]

    def test_the_history_is_read_once(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each commit is a request to the store."""
        swapped_past_geneva(table)
        for _ in range(40):
            lance.dataset(table.ref.uri).delete("false")
        table.checkout_latest()
        asked = commits_read(monkeypatch)
        assert table.computed_columns()["y"].inputs == ("b",)
        assert len(asked) > 40
        for look in (table.computed_columns, table.list_computed_columns):
            asked.clear()
            look()
            assert len(asked) <= 1, "which table this is"
        asked.clear()
        assert table.plan_backfill("y").is_empty
        assert len(asked) <= 1
        table.delete("false")
        table.checkout_latest()
        asked.clear()
        assert table.backfill("y").rows_computed == 0
        assert len(asked) <= 4, "the new commits alone"

    def test_a_copy_knows_its_own_fields(
        self, local_db: Connection, table: Table, calls: Calls
    ) -> None:
        table.alter_columns({"path": "a", "data_type": pa.int32()})
        ids = FieldsNow.of(lance.dataset(table.ref.uri)).nodes
        copy = local_db.copy_table(table.name, "copy")
        fields = FieldsNow.of(lance.dataset(copy.ref.uri)).nodes
        for number in range(max(fields.values()) + 1, ids["a"] + 1):  # until one has a's old id
            copy.add_columns({f"new{number}": "cast(b as int)"})
        copy.update(where="id = 1", values={"a": 5})
        assert copy.backfill("y").rows_computed == 1
        assert by_id(copy, "y") == {1: 50, 2: 20}
        assert calls.rows == [5]

    def test_a_copy_knows_its_own_versions(
        self, local_db: Connection, table: Table, calls: Calls
    ) -> None:
        for _ in range(9):
            table.update(where="id = 1", values={"b": 7})
        table.alter_columns({"path": "y", "udf": counted(calls, lambda a: a, data_type=pa.int64())})
        copy = local_db.copy_table(table.name, "copy")
        swapped_past_geneva(copy)
        copy.backfill("y")
        assert calls.taken() == [1, 2]
        assert by_id(copy, "y") == {1: 1, 2: 2}

    def test_a_column_that_joins_others_after_their_input_was_made_anew(
        self, table: Table, calls: Calls
    ) -> None:
        schema = pa.schema([("p", pa.int64()), ("q", pa.int64())])
        both = counted(calls, lambda a: {"p": a, "q": -a}, output_schema=schema)
        table.add_columns((both, ["a"]))
        table.backfill("p")
        table.drop_columns("q")
        lance.dataset(table.ref.uri).drop_columns(["a"])
        table.checkout_latest()
        table.add_columns({"a": "id"})
        table.add_columns((both, ["a"]))
        past_geneva(table, {"path": "a", "name": "old"})
        past_geneva(table, {"path": "b", "name": "a"})
        calls.clear()
        table.backfill("q")
        assert calls.taken() == [1, 2]
        assert {table.computed_columns()[name].inputs for name in "pq"} == {("old",)}
        assert [table.backfill(name).rows_computed for name in "pq"] == [0, 0]
        assert column(table, "q") == [-1, -2]

    def test_no_column_joins_others_while_nobody_knows_what_they_read(
        self, table: Table, calls: Calls
    ) -> None:
        schema = pa.schema([("p", pa.int64()), ("q", pa.int64())])
        both = counted(calls, lambda a: {"p": a, "q": -a}, output_schema=schema)
        table.add_columns((both, ["a"]))
        table.drop_columns("q")
        past_geneva(table, {"path": "a", "data_type": pa.int32(), "name": "old"})
        past_geneva(table, {"path": "b", "name": "a"})
        cleaned_up(table)
        with pytest.raises(ColumnChangedError, match=r"'p' of table .* \('a' or 'old'\)"):
            table.add_columns((both, ["a"]))
        assert "q" not in table.schema.names

    def test_a_field_of_a_struct_cast_and_renamed_past_geneva(
        self, table: Table, calls: Calls
    ) -> None:
        """The history tells, and without it receipts do."""
        past_geneva(table, {"path": "s.x", "data_type": pa.int32(), "name": "old"})
        past_geneva(table, {"path": "s.z", "name": "x"})
        assert table.computed_columns()["n"].inputs == ("s.old",)
        cleaned_up(table)
        assert candidates(table, "n") == ("s.x", "s.old")
        assert table.backfill("n").rows_computed == 0
        assert table.computed_columns()["n"].inputs == ("s.old",)
        assert calls.count == 0

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

    def test_a_rename_is_written_down(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that nobody has to ask the history, nor could be left without an answer by it."""
        version = table.version
        renamed(table, ("a", "old"))
        assert table.version == version + 2
        table.backfill("y")
        assert table.version == version + 2
        renamed(table, ("b", "a"))
        table.update(where="id = 1", values={"old": 5})
        lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
        asked = commits_read(monkeypatch)
        assert table.computed_columns()["y"].inputs == ("old",)
        assert asked == []
        table.backfill("y")
        assert by_id(table, "y") == {1: 50, 2: 20}

    def test_a_job_without_work_writes_down_what_it_found(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        swapped_past_geneva(table)
        assert table.backfill("y").rows_computed == 0
        asked = commits_read(monkeypatch)
        assert table.computed_columns()["y"].inputs == ("b",)
        assert asked == []

    def test_a_table_that_is_overwritten_without_the_input(
        self, table: Table, calls: Calls
    ) -> None:
        """What stands in its place is not it."""
        overwritten(table, ["id", "unrelated", "b", "s"])
        assert table.computed_columns()["y"].inputs == ("a",)
        with pytest.raises(ColumnNotFoundError, match=r"\['a'\] which are not found"):
            table.backfill("y")
        table.cleanup_checkpoints(timedelta(0))
        assert calls.count == 0

    @pytest.mark.parametrize("order", [["id", "a", "b", "s"], ["id", "b", "a", "s"]])
    def test_a_table_that_is_overwritten_before_columns_are_renamed(
        self, table: Table, calls: Calls, order: list[str]
    ) -> None:
        """The input is the field that had its name then."""
        overwritten(table, order)
        past_geneva(table, {"path": "a", "name": "old"})
        if order[1] == "a":
            past_geneva(table, {"path": "b", "name": "a"})
        table.update(where="id = 1", values={"old": 5})
        table.backfill("y")
        assert table.computed_columns()["y"].inputs == ("old",)
        assert by_id(table, "y") == {1: 50, 2: 20}
        assert calls.rows == [5]

    def test_a_table_that_is_overwritten_before_names_go_round(
        self, table: Table, calls: Calls
    ) -> None:
        """A plan asks several times where an input is: the answer stays the same."""
        overwritten(table, ["id", "b", "a", "s"])
        for path, name in (("b", "q"), ("id", "key"), ("a", "id")):
            past_geneva(table, {"path": path, "name": name})
        assert table.plan_backfill("y").inputs == ("id",)
        declare_again(table.ref, None, lambda definition: definition)
        table.update(where="key = 1", values={"id": 5})
        table.backfill("y")
        assert by_id(table, "y") == {5: 50, 2: 20}
        assert calls.rows == [5]

    def test_a_table_that_is_made_anew_in_another_order(
        self, local_db: Connection, table: Table, calls: Calls
    ) -> None:
        """It has the versions of the one before, and none of its commits."""
        dataset = lance.dataset(table.ref.uri)
        data, functions = dataset.to_table(), f"{dataset.uri}/_udfs"
        order = ["id", "b", "a", *data.column_names[3:]]
        lance.write_dataset(data.select(order), f"{local_db.uri}/anew.lance")
        shutil.copytree(functions, f"{local_db.uri}/anew.lance/_udfs")
        anew = local_db.open_table("anew")
        for text in (5, 6, 7):
            assert anew.computed_columns()["y"].inputs == ("a",)
            anew.update(where="id = 1", values={"a": text})
        anew.backfill("y")
        assert by_id(anew, "y") == {1: 70, 2: 20}
        assert calls.rows == [7]

    def test_a_rename_past_geneva_whose_history_is_gone(self, table: Table, calls: Calls) -> None:
        past_geneva(table, {"path": "a", "name": "old"})
        assert table.computed_columns()["y"].inputs == ("old",)
        table.update(values={"old": 5})
        lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
        with pytest.raises(ColumnChangedError, match=r"computed from 'a'.* \('old'\)"):
            table.backfill("y")
        table.cleanup_checkpoints(timedelta(0))
        assert calls.count == 0

    def test_the_history_is_read_so_far_and_no_further(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        swapped_past_geneva(table)
        monkeypatch.setattr(history, "MAX_COMMITS_BACK", 3)
        asked = commits_read(monkeypatch)
        assert candidates(table) == ("a", "b")
        assert len(asked) == 3

    def test_jobs_write_field_ids_down_again_before_the_history_is_too_long(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(history, "MAX_COMMITS_BACK", 8)
        monkeypatch.setattr(definitions, "MAX_COMMITS_BACK", 8)
        for number in range(12):
            table.update(where="id = 1", values={"a": number})
            table.backfill("y")
        swapped_past_geneva(table)
        assert table.computed_columns()["y"].inputs == ("b",)

    @pytest.mark.parametrize("column_kept", ["a", "old"])
    def test_what_may_be_an_input_is_not_dropped(
        self, table: Table, calls: Calls, column_kept: str
    ) -> None:
        past_geneva(table, {"path": "a", "data_type": pa.int32(), "name": "old"})
        past_geneva(table, {"path": "b", "name": "a"})
        cleaned_up(table)
        doubt = Doubt("a", ("a", "old"), readings=(("a",), ("old",)), by_name=True)
        assert table.computed_columns()["y"].doubt == doubt
        assert table.list_computed_columns()[0].doubt == doubt
        with pytest.raises(UserInputError, match=f"'{column_kept}' can't be dropped.* may read it"):
            table.drop_columns([column_kept])
        tenfold = counted(calls, lambda a: a * 10, data_type=pa.int64())
        table.alter_columns({"path": "y", "udf": (tenfold, [column_kept])})
        assert table.computed_columns()["y"].doubt is None
        table.drop_columns(["a" if column_kept == "old" else "old"])


class TestTheHistoryTells:
    """What others did to columns since their ids were written down, commit by commit."""

    @pytest.fixture
    def table(self, local_db: Connection, calls: Calls) -> Table:
        data = {"id": [1, 2], "a": pa.array([1, 2], pa.int32()), "b": pa.array([7, 8], pa.int32())}
        table = make_table(local_db, [pa.table(data)])
        tenfold = counted(calls, lambda a: a * 10, data_type=pa.int64())
        table.add_columns({"y": (tenfold, ["a"])})
        table.backfill("y")
        calls.clear()
        return table

    def reads(self, table: Table, calls: Calls, name: str) -> None:
        """It reads a column, whose values it is computed from already."""
        table.checkout_latest()
        assert table.computed_columns()["y"].inputs == (name,)
        table.update(where="id = 1", values={name: 5})
        assert table.backfill("y").rows_computed == 1
        assert by_id(table, "y") == {1: 50, 2: 20}
        assert calls.rows == [5]

    def test_swapped_and_then_overwritten(self, table: Table, calls: Calls) -> None:
        swapped_past_geneva(table)
        overwritten(table, ["id", "b", "a"])
        self.reads(table, calls, "b")

    def test_swapped_and_then_overwritten_with_other_ids(self, table: Table, calls: Calls) -> None:
        """The column itself has another id, too."""
        swapped_past_geneva(table)
        dataset = lance.dataset(table.ref.uri)
        data = dataset.to_table()
        data = data.select(["id", "b", *data.column_names[3:], "a"])
        lance.write_dataset(data, dataset.uri, mode="overwrite")
        self.reads(table, calls, "b")

    def test_swapped_and_then_overwritten_without_receipts(
        self, table: Table, calls: Calls
    ) -> None:
        """The job that gives it receipts anew writes down what it reads."""
        swapped_past_geneva(table)
        dataset = lance.dataset(table.ref.uri)
        data = dataset.to_table(columns=["id", "b", "a", "y"])
        lance.write_dataset(data, dataset.uri, mode="overwrite")
        table.checkout_latest()
        assert table.computed_columns()["y"].inputs == ("b",)
        table.backfill("y")
        self.reads(table, calls, "b")

    def test_names_and_ids_that_agree_by_chance(self, table: Table, calls: Calls) -> None:
        """No file of the last job is there: so the history is asked."""
        overwritten(table, ["id", "b", "a"])
        swapped_past_geneva(table)
        assert table.plan_backfill("y").is_empty
        assert table.backfill("y").rows_computed == 0
        self.reads(table, calls, "b")
        table.update(where="id = 2", values={"b": 6})
        table.backfill("y")
        assert by_id(table, "y") == {1: 50, 2: 60}

    def test_swapped_and_then_overwritten_in_the_old_order(
        self, table: Table, calls: Calls
    ) -> None:
        swapped_past_geneva(table)
        overwritten(table, ["id", "a", "b"])
        assert table.backfill("y").rows_computed == 0
        self.reads(table, calls, "b")

    def test_the_history_is_not_asked_while_a_file_of_a_job_is_there(
        self, table: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each commit is a request to the store."""
        asked: list[int] = []
        real = history.History.changes_since

        def noted(self: history.History, since: history.Since) -> history.SchemaChanges:
            asked.append(self.version)
            return real(self, since)

        monkeypatch.setattr(history.History, "changes_since", noted)
        table.update(where="id = 1", values={"a": 5})
        assert table.plan_backfill("y").rows_to_run == 1
        assert asked == []
        compacted(table)
        assert table.plan_backfill("y").rows_to_run == 1
        assert asked

    def test_renamed_and_then_overwritten(self, table: Table, calls: Calls) -> None:
        past_geneva(table, {"path": "a", "name": "z"})
        overwritten(table, ["id", "z", "b"])
        self.reads(table, calls, "z")

    def test_renamed_between_overwrites(self, table: Table, calls: Calls) -> None:
        overwritten(table, ["b", "id", "a"])
        past_geneva(table, {"path": "a", "name": "z"})
        overwritten(table, ["z", "id", "b"])
        past_geneva(table, {"path": "b", "name": "a"})
        self.reads(table, calls, "z")

    def test_renamed_and_overwritten_and_restored(self, table: Table, calls: Calls) -> None:
        past_geneva(table, {"path": "a", "name": "z"})
        version = lance.dataset(table.ref.uri).version
        past_geneva(table, {"path": "z", "name": "q"})
        lance.dataset(table.ref.uri, version).restore()
        overwritten(table, ["id", "z", "b"])
        self.reads(table, calls, "z")

    def test_cast_and_renamed_while_a_new_column_gets_its_name(
        self, table: Table, calls: Calls
    ) -> None:
        past_geneva(table, {"path": "a", "data_type": pa.int64(), "name": "z"})
        lance.dataset(table.ref.uri).add_columns({"a": "cast(1000 + id as int)"})
        self.reads(table, calls, "z")

    def test_two_that_are_cast_and_swapped(self, table: Table, calls: Calls) -> None:
        lance.dataset(table.ref.uri).alter_columns(
            {"path": "a", "data_type": pa.int64()}, {"path": "b", "data_type": pa.int64()}
        )
        swapped_past_geneva(table)
        self.reads(table, calls, "b")

    def test_cast_through_geneva_and_renamed_past_it(self, table: Table, calls: Calls) -> None:
        """Its id is higher than that of the receipts."""
        table.alter_columns({"path": "a", "data_type": pa.int64()})
        table.backfill("y")
        past_geneva(table, {"path": "a", "name": "z"})
        self.reads(table, calls, "z")

    def test_dropped_while_its_id_is_given_away(self, table: Table, calls: Calls) -> None:
        dataset = lance.dataset(table.ref.uri)
        dataset.add_columns(pa.field("c", pa.int64()))
        table.checkout_latest()
        tenfold = counted(calls, lambda c: c * 10, data_type=pa.int64())
        table.alter_columns({"path": "y", "udf": (tenfold, ["c"])})
        dataset = lance.dataset(table.ref.uri)
        node = FieldsNow.of(dataset).nodes["c"]
        dataset.drop_columns(["c"])
        dataset.add_columns({"x": "cast(7 as bigint)"})
        dataset.add_columns({"c": "cast(id as bigint)"})
        assert FieldsNow.of(dataset).nodes["x"] == node
        table.checkout_latest()
        assert table.computed_columns()["y"].inputs == ("c",)
        table.backfill("y")
        assert by_id(table, "y") == {1: 10, 2: 20}
        assert calls.taken() == [1, 2]

    def test_swapped_and_copied_past_geneva(
        self, local_db: Connection, table: Table, calls: Calls
    ) -> None:
        """The copy has none of the commits, and receipts confirm nothing but what it names."""
        swapped_past_geneva(table)
        dataset = lance.dataset(table.ref.uri)
        lance.write_dataset(dataset.to_table(), f"{local_db.uri}/copy.lance")
        shutil.copytree(f"{dataset.uri}/_udfs", f"{local_db.uri}/copy.lance/_udfs")
        copy = local_db.open_table("copy")
        assert candidates(copy) == ("a", "b")
        with pytest.raises(ColumnChangedError, match=r"\('a' or 'b'\)"):
            copy.backfill("y")
        assert calls.count == 0

    def test_swapped_cleaned_up_and_then_overwritten(self, table: Table, calls: Calls) -> None:
        """What it was called when it was overwritten is not known."""
        swapped_past_geneva(table)
        cleaned_up(table)
        overwritten(table, ["id", "b", "a"])
        assert candidates(table) == ("a", "b")
        with pytest.raises(ColumnChangedError, match=r"\('a' or 'b'\)"):
            table.backfill("y")
        assert calls.count == 0

    def test_renamed_cleaned_up_and_then_overwritten(self, table: Table, calls: Calls) -> None:
        """Its name is gone, and receipts fit what is in its place."""
        past_geneva(table, {"path": "a", "name": "z"})
        cleaned_up(table)
        overwritten(table, ["id", "z", "b"])
        assert table.backfill("y").rows_computed == 0
        self.reads(table, calls, "z")

    def test_renamed_behind_an_overwrite_that_is_the_last_thing_known(
        self, table: Table, calls: Calls
    ) -> None:
        """The column itself has another id: its input had its name when it was overwritten."""
        cleaned_up(table)
        dataset = lance.dataset(table.ref.uri)
        data = dataset.to_table()
        lance.write_dataset(
            data.select(["a", *data.column_names[3:]]), dataset.uri, mode="overwrite"
        )
        past_geneva(table, {"path": "a", "name": "z"})
        assert table.computed_columns()["y"].inputs == ("z",)
        assert table.backfill("y").rows_computed == 0
        assert table.computed_columns()["y"].inputs == ("z",)


class TestEarlierReleases:
    """Definitions that don't name the commit that their field ids are of."""

    @pytest.fixture
    def table(self, local_db: Connection, calls: Calls) -> Table:
        table = make_table(local_db, [pa.table({"id": [1, 2], "a": [1, 2], "b": [7, 8]})])
        for number in range(3):
            table.update(where="id = 1", values={"b": number})
        table.add_columns({"y": (counted(calls, lambda a: a * 10, data_type=pa.int64()), ["a"])})
        table.backfill("y")
        calls.clear()
        return table

    @pytest.mark.parametrize("fields_at", [None, "4"])
    def test_columns_that_were_renamed(
        self, table: Table, calls: Calls, fields_at: str | None
    ) -> None:
        """The history reaches back to when the column was added, and need not go further."""
        as_by_an_earlier_release(table, fields_at)
        past_geneva(table, {"path": "a", "name": "q"})
        past_geneva(table, {"path": "b", "name": "a"})
        lance.dataset(table.ref.uri).cleanup_old_versions(versions=[1, 2])
        table.update(where="id = 2", values={"q": 5})
        table.backfill("y")
        assert by_id(table, "y") == {1: 10, 2: 50}
        assert calls.rows == [5]

    @pytest.mark.parametrize("stale", [True, False])
    @pytest.mark.parametrize("cleaned_up", [True, False])
    def test_a_table_that_was_overwritten(
        self, table: Table, calls: Calls, cleaned_up: bool, stale: bool
    ) -> None:
        as_by_an_earlier_release(table, None)
        overwritten(table, ["id", "b", "a"])
        table.update(values={"a": 5, "b": 6} if stale else {"b": 6})
        if cleaned_up:
            lance.dataset(table.ref.uri).cleanup_old_versions(timedelta(0))
        if not stale:  # receipts tell
            assert table.backfill("y").rows_computed == 0
            assert table.computed_columns()["y"].doubt is None
        else:
            with pytest.raises(ColumnChangedError, match=r"'y'.* from 'a'.* \('a' or 'b'\)"):
                table.backfill("y")
        assert calls.count == 0

    def test_a_job_names_the_commit(self, table: Table) -> None:
        as_by_an_earlier_release(table, None)
        assert table.computed_columns()["y"].fields_at is None
        table.backfill("y")
        found = table.computed_columns()["y"].fields_at
        assert found is not None
        assert found.uuid == lance.dataset(table.ref.uri).read_transaction(found.version).uuid


class TestReceiptsDecide:
    """The history is gone: the column whose values receipts were made from is the input."""

    @pytest.fixture
    def table(self, local_db: Connection, calls: Calls) -> Table:
        data = {"id": [1, 2, 3], "a": [1, 2, 3], "b": [7, 8, 9], "flag": [True, False, True]}
        table = make_table(local_db, [pa.table(data)])
        tenfold = counted(calls, lambda a: a * 10, data_type=pa.int64())
        table.add_columns({"y": (tenfold, ["a"])})
        table.backfill("y")
        calls.clear()
        return table

    def asks(self, table: Table, calls: Calls) -> None:
        for ask in (table.plan_backfill, table.backfill, table.verify, table.preview):
            with pytest.raises(ColumnChangedError, match="Say which column to read"):
                ask("y")
        assert calls.count == 0

    def test_an_input_that_was_renamed(
        self, table: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        past_geneva(table, {"path": "a", "name": "q"})
        cleaned_up(table)
        assert candidates(table) == ("q",)
        version = table.version
        assert table.plan_backfill("y").is_empty
        assert table.verify("y").ok
        assert table.preview("y", n=1).values.to_pylist() == [10]
        assert lance.dataset(table.ref.uri).version == version, "only a job writes it down"
        calls.clear()
        assert table.backfill("y").rows_computed == 0
        assert calls.count == 0
        monkeypatch.setattr(doubts, "RowTaker", None)  # nobody looks again
        assert table.computed_columns()["y"].inputs == ("q",)
        added(table, id=[4], q=[4], b=[10], flag=[True])
        past_geneva(table, {"path": "b", "name": "a"})
        table.backfill("y")
        assert by_id(table, "y") == {1: 10, 2: 20, 3: 30, 4: 40}
        assert calls.rows == [4]

    def test_another_column_that_has_got_its_name(self, table: Table, calls: Calls) -> None:
        swapped_past_geneva(table)
        cleaned_up(table)
        table.update(where="id = 1", values={"b": 5})
        assert table.backfill("y").rows_computed == 1
        assert by_id(table, "y") == {1: 50, 2: 20, 3: 30}
        assert calls.rows == [5]

    @pytest.mark.parametrize("order", [["id", "b", "a"], ["id", "flag", "a", "b"]])
    def test_a_table_that_was_overwritten_in_another_order(
        self, table: Table, calls: Calls, order: list[str]
    ) -> None:
        overwritten(table, order)
        cleaned_up(table)
        table.update(where="id = 1", values={"a": 5})
        assert table.backfill("y").rows_computed == 1
        assert table.computed_columns()["y"].inputs == ("a",)
        assert by_id(table, "y") == {1: 50, 2: 20, 3: 30}
        assert calls.rows == [5]

    def test_a_computed_input(self, table: Table, calls: Calls) -> None:
        """It is computed first: also where what it is called is found out by receipts."""
        more = counted(calls, lambda v: v + 1, data_type=pa.int64())
        table.add_columns({"z": (more, ["y"])})
        table.backfill("z")
        past_geneva(table, {"path": "y", "name": "w"})
        cleaned_up(table)
        calls.clear()
        added(table, id=[4], a=[4], b=[10], flag=[True])
        table.backfill("z")
        assert by_id(table, "z") == {1: 11, 2: 21, 3: 31, 4: 41}
        assert calls.rows == [4, 40]

    def test_columns_that_are_filled_together(self, table: Table, calls: Calls) -> None:
        schema = pa.schema([("p", pa.int64()), ("q", pa.int64())])
        both = counted(calls, lambda a: {"p": a, "q": -a}, output_schema=schema)
        table.add_columns((both, ["a"]))
        table.backfill("p")
        swapped_past_geneva(table)
        cleaned_up(table)
        calls.clear()
        assert table.backfill("q").rows_computed == 0
        assert {table.computed_columns()[name].inputs for name in "pq"} == {("b",)}
        assert calls.count == 0

    def test_a_function_that_was_changed_since(self, table: Table, calls: Calls) -> None:
        new = counted(calls, lambda a: a * 100, data_type=pa.int64())
        table.alter_columns({"path": "y", "udf": (new, ["a"])})
        swapped_past_geneva(table)
        cleaned_up(table)
        table.backfill("y")
        assert by_id(table, "y") == {1: 100, 2: 200, 3: 300}

    def test_blobs(self, local_db: Connection, calls: Calls) -> None:
        kind = pa.field("a", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
        schema = pa.schema([pa.field("id", pa.int64()), kind])
        table = make_table(local_db, [pa.table([[1, 2], [b"x", b"yy"]], schema=schema)])
        table.add_columns({"y": (counted(calls, len, data_type=pa.int64()), ["a"])})
        table.backfill("y")
        past_geneva(table, {"path": "a", "name": "q"})
        cleaned_up(table)
        calls.clear()
        assert table.backfill("y").rows_computed == 0
        assert table.computed_columns()["y"].inputs == ("q",)
        assert calls.count == 0

    def test_few_rows_are_read(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parts = [
            pa.table({"id": range(i, i + 50), "a": range(i, i + 50)}) for i in range(0, 1000, 50)
        ]
        table = make_table(local_db, parts)
        table.add_columns({"y": (counted(calls, lambda a: a, data_type=pa.int64()), ["a"])})
        table.backfill("y")
        table.delete("id % 50 < 10")
        past_geneva(table, {"path": "a", "name": "q"})
        for i in range(5):
            added(table, id=[1000 + i], q=[7])
        monkeypatch.setattr(doubts, "parse_file_name", lambda path: None)  # receipts alone
        cleaned_up(table)
        taken: list[int] = []

        class Noted(doubts.RowTaker):
            def take(self, offsets: Any) -> pa.RecordBatch:
                taken.append(len(offsets))
                return super().take(offsets)

        monkeypatch.setattr(doubts, "RowTaker", Noted)
        assert table.plan_backfill("y").rows_to_run == 5
        assert len(taken) > 2
        assert 16 < sum(taken) <= 64

    def test_columns_of_equal_values(self, table: Table, calls: Calls) -> None:
        table.update(values_sql={"b": "a"})
        swapped_past_geneva(table)
        cleaned_up(table)
        self.asks(table, calls)

    def test_rows_that_are_stale(self, table: Table, calls: Calls) -> None:
        table.update(values_sql={"a": "a + 100"})
        past_geneva(table, {"path": "a", "name": "q"})
        cleaned_up(table)
        self.asks(table, calls)

    def test_rows_without_receipts(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [pa.table({"id": [1, 2], "a": [1, 2]})], name="new")
        table.add_columns({"y": (counted(calls, lambda a: a, data_type=pa.int64()), ["a"])})
        past_geneva(table, {"path": "a", "name": "q"})
        cleaned_up(table)
        assert "'q' is read for 'a', whose field it was" in str(table.plan_backfill("y"))
        assert table.backfill("y").rows_computed == 2
        assert "is read for" not in str(table.plan_backfill("y")), "it is written down"
        assert calls.taken() == [1, 2]

    def test_a_table_without_receipts_that_was_overwritten_without_the_input(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [pa.table({"id": [1, 2], "a": [1, 2]})], name="new")
        table.add_columns({"y": (counted(calls, lambda a: a, data_type=pa.int64()), ["a"])})
        before = table.version
        overwritten(table, ["id", "unrelated"])
        lance.dataset(table.ref.uri).cleanup_old_versions(versions=[*range(1, before + 1)])
        self.asks(table, calls)

    def test_rows_that_fit_different_columns(self, table: Table, calls: Calls) -> None:
        table.update(where="id = 1", values={"a": 7, "b": 1})
        swapped_past_geneva(table)
        compacted(table)
        cleaned_up(table)
        self.asks(table, calls)

    def test_several_inputs(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [pa.table({"id": [1, 2], "a": [1, 2], "b": [7, 8]})], name="n")
        minus = counted(calls, lambda a, b: a - b, data_type=pa.int64())
        table.add_columns({"y": (minus, ["a", "b"])})
        table.backfill("y")
        calls.clear()
        swapped_past_geneva(table)
        compacted(table)
        cleaned_up(table)
        self.asks(table, calls)

    @pytest.mark.parametrize("files", [True, False])
    def test_several_inputs_that_were_renamed(
        self, local_db: Connection, calls: Calls, files: bool
    ) -> None:
        """All by their ids, or all by their names: those are gone."""
        data = {"id": range(20), "a": range(20), "b": range(50, 70)}
        table = make_table(local_db, [pa.table(data)], name="n")
        minus = counted(calls, lambda a, b: b - a, data_type=pa.int64())
        table.add_columns({"y": (minus, ["a", "b"])})
        table.backfill("y")
        calls.clear()
        past_geneva(table, {"path": "a", "name": "p"})
        past_geneva(table, {"path": "b", "name": "q"})
        if not files:
            compacted(table)
        added(table, id=[20], p=[2], q=[9])
        cleaned_up(table)
        assert table.backfill("y").rows_computed == 1
        assert table.computed_columns()["y"].inputs == ("p", "q")
        assert calls.count == 1

    def test_several_inputs_that_were_swapped(self, local_db: Connection, calls: Calls) -> None:
        """The files that the last job wrote say which fields it read."""
        table = make_table(local_db, [pa.table({"id": [1, 2], "a": [1, 2], "b": [7, 8]})], name="n")
        minus = counted(calls, lambda a, b: a - b, data_type=pa.int64())
        table.add_columns({"y": (minus, ["a", "b"])})
        table.backfill("y")
        calls.clear()
        swapped_past_geneva(table)
        cleaned_up(table)
        assert table.backfill("y").rows_computed == 0
        assert table.computed_columns()["y"].inputs == ("b", "a")
        assert calls.count == 0

    @pytest.mark.parametrize("files", [True, False])
    def test_an_input_most_of_whose_values_were_edited(
        self, local_db: Connection, calls: Calls, files: bool
    ) -> None:
        """Stale rows say nothing against it."""
        texts = [f"document {i} " * 20 for i in range(100)]
        table = make_table(local_db, [pa.table({"id": range(100), "a": texts})], name="texts")
        table.add_columns({"y": (counted(calls, len, data_type=pa.int64()), ["a"])})
        table.backfill("y")
        calls.clear()
        table.update(where="id >= 20", values_sql={"a": "concat(a, ' edited')"})
        past_geneva(table, {"path": "a", "name": "body"})
        if not files:
            compacted(table)
        cleaned_up(table)
        assert table.backfill("y").rows_computed == 80
        assert calls.count == 80

    @pytest.mark.parametrize("fits", [True, False])
    def test_values_that_fit_by_chance(
        self, local_db: Connection, calls: Calls, fits: bool
    ) -> None:
        """Small numbers: another column of them has some of the same in the same rows."""
        rows = {"id": range(64), "a": [i % 4 for i in range(64)], "c": [i // 16 for i in range(64)]}
        table = make_table(local_db, [pa.table(rows)], name="few")
        table.add_columns({"y": (counted(calls, lambda a: a, data_type=pa.int64()), ["a"])})
        table.backfill("y")
        calls.clear()
        if fits:
            past_geneva(table, {"path": "a", "name": "q"})
            compacted(table)
        else:
            data = lance.dataset(table.ref.uri).to_table()
            own = data.column_names[3:]
            data = data.select(["id", "c", "a", *own]).rename_columns(["id", "q", "other", *own])
            lance.write_dataset(data, table.ref.uri, mode="overwrite")
        cleaned_up(table)
        assert candidates(table) == ("q",)
        if fits:
            assert table.backfill("y").rows_computed == 0
        else:
            self.asks(table, calls)

    def test_a_copy_of_the_former_values(self, table: Table, calls: Calls) -> None:
        """Receipts fit it, and it is not the input: that has its name, and is in another place."""
        data = lance.dataset(table.ref.uri).to_table()
        data = data.set_column(2, "b", data["a"])
        data = data.set_column(1, "a", pc.multiply(data["a"], 2))
        order = ["id", "b", "a", *data.column_names[3:]]
        lance.write_dataset(data.select(order), table.ref.uri, mode="overwrite")
        cleaned_up(table)
        assert candidates(table) == ("a", "b")
        self.asks(table, calls)

    @pytest.mark.parametrize("all_of_them", [True, False])
    def test_fragments_that_can_not_be_read(
        self, local_db: Connection, calls: Calls, all_of_them: bool
    ) -> None:
        """They are left out, and the plan says so."""
        rows = [pa.table({"id": [i, i + 1], "a": [i, i + 1]}) for i in (1, 3)]
        table = make_table(local_db, rows, name="damaged")
        table.add_columns({"y": (counted(calls, lambda a: a, data_type=pa.int64()), ["a"])})
        table.backfill("y")
        for where in ("id < 3", "id > 2"):
            table.update(where=where, values_sql={"y": "y"})  # no file of a job is left
        past_geneva(table, {"path": "a", "name": "q"})
        added(table, id=[5], q=[5])
        dataset = lance.dataset(table.ref.uri)
        dataset.cleanup_old_versions(timedelta(0))
        damaged = dataset.get_fragments()[: 2 if all_of_them else 1]
        for fragment in damaged:
            Path(dataset.uri, "data", fragment.metadata.files[0].path).unlink()
        table.checkout_latest()
        calls.clear()
        assert len(table.plan_backfill("y").unreadable) == len(damaged)
        with pytest.raises(UnreadableFragmentsError, match=rf"{len(damaged)} fragment"):
            table.backfill("y")
        assert calls.taken() == [5]

    def test_an_input_that_is_gone_while_a_flag_fits_by_chance(
        self, local_db: Connection, calls: Calls
    ) -> None:
        rows = {"id": [1, 2, 3, 4], "a": [True, False] * 2, "b": [True, True, False, False]}
        table = make_table(local_db, [pa.table(rows)], name="flags")
        table.add_columns({"y": (counted(calls, lambda a: int(a), data_type=pa.int64()), ["a"])})
        table.backfill("y")
        calls.clear()
        dataset = lance.dataset(table.ref.uri)
        data = dataset.to_table().append_column("c", pa.array([0, 1, 2, 3]))
        order = ["id", "b", "c", *data.column_names[3:-1]]
        lance.write_dataset(data.select(order), dataset.uri, mode="overwrite")
        cleaned_up(table)
        assert candidates(table) == ("b",)
        self.asks(table, calls)

    @pytest.mark.parametrize("files", [True, False])
    def test_a_column_that_was_told_to_read_another_one(
        self, table: Table, calls: Calls, files: bool
    ) -> None:
        """Receipts may be of the one before. Files show that ids mean what they meant."""
        tenfold = counted(calls, lambda a: a * 10, data_type=pa.int64())
        table.alter_columns({"path": "y", "udf": (tenfold, ["b"])})
        swapped_past_geneva(table)
        if not files:
            compacted(table)
        cleaned_up(table)
        if not files:
            self.asks(table, calls)
            return
        table.backfill("y")
        assert table.computed_columns()["y"].inputs == ("a",)
        assert by_id(table, "y") == {1: 70, 2: 80, 3: 90}

    def test_rows_that_are_stale_while_a_file_is_left(
        self, local_db: Connection, calls: Calls
    ) -> None:
        data = {"id": [1, 2, 3], "a": [1, 2, 3], "b": [7, 8, 9]}
        table = make_table(local_db, [pa.table(data)], name="stale")
        table.add_columns({"y": (counted(calls, lambda a: a, data_type=pa.int64()), ["a"])})
        table.backfill("y", where="id = 1")
        table.update(where="id = 1", values={"b": 0})
        calls.clear()
        swapped_past_geneva(table)
        cleaned_up(table)
        table.backfill("y")
        assert by_id(table, "y") == {1: 1, 2: 2, 3: 3}
        assert calls.taken() == [2, 3]

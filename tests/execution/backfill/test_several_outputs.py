"""One call that fills several columns: together, and each a column by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lance
import pyarrow as pa
import pytest
from lancedb.index import BTree

import geneva
from geneva import UDF, Columns, Connection, Skip, Table, UnpackedUDF, udf
from geneva.errors import (
    ColumnChangedError,
    ColumnExistsError,
    InvalidUDFError,
    StaleInputError,
    TypeMismatchError,
    UDFError,
    UserInputError,
)
from geneva.execution.backfill.committer import publish_columns
from geneva.execution.backfill.verify import RowState
from geneva.execution.runner import InProcessRunner
from geneva.storage.columns.definitions import read_definitions
from geneva.storage.columns.publish import CommitOutcome
from geneva.storage.lance.dataset import open_dataset, read_snapshot
from geneva.trust.keys import new_key
from support import Calls, by_id, checkpoint_keys, make_table, publishing, uncommitted


class Size(NamedTuple):
    w: int
    h: int


def sizes(calls: Calls, by: int = 2, **options: Any) -> UDF:
    """`w` is `by` times the id, `h` a thousand more; the calls are counted."""

    def size(id: int) -> Columns[Size]:
        calls.note([id])
        return Size(id * by, id * by + 1_000)

    return udf(size, **options)


def sums() -> UDF:
    """`w` is the sum of a row, `h` how many columns were read."""
    schema = pa.schema([("w", pa.int64()), ("h", pa.int64())])

    def size(batch: pa.RecordBatch) -> pa.RecordBatch:
        sums = [sum(row.values()) for row in batch.to_pylist()]
        return pa.record_batch([sums, [batch.num_columns] * len(sums)], schema=schema)

    return udf(size, output_schema=schema)


def filled(db: Connection, calls: Calls, *fragments: int, **options: Any) -> Table:
    table = make_table(db, fragments or (4, 4), **options)
    table.add_columns(sizes(calls))
    table.backfill("h")
    assert calls.taken() == list(range(len(table)))
    return table


def files(table: Table, name: str) -> set[str]:
    """The data files that hold a column."""
    dataset = lance.dataset(table.ref.uri)
    (field,) = [f.id() for f in dataset.lance_schema.fields() if f.name() == name]
    every = [file for f in dataset.get_fragments() for file in f.metadata.files]
    return {file.path for file in every if field in file.fields}


def both(table: Table) -> dict[int, tuple[Any, Any]]:
    w, h = by_id(table, "w"), by_id(table, "h")
    return {id: (w[id], h[id]) for id in w}


def right(ids: Any, by: int = 2) -> dict[int, tuple[int, int]]:
    return {id: (id * by, id * by + 1_000) for id in ids}


class TestTogether:
    @pytest.mark.parametrize("asked", ["w", "h"])
    def test_any_of_them_fills_all(self, db: Connection, calls: Calls, asked: str) -> None:
        table = make_table(db, (4, 4))
        table.add_columns(sizes(calls))
        assert table.schema.names == ["id", "w", "h"]
        result = table.backfill(asked)
        assert calls.taken() == list(range(8)), "one call per row"
        assert both(table) == right(range(8))
        assert result.rows_computed == 8
        assert files(table, "w") == files(table, "h")
        assert len(files(table, "w")) == 2, "one file per fragment"
        table.backfill("w")
        table.backfill("h")
        assert calls.count == 0
        assert all(table.verify(name, run=True).ok for name in ("w", "h"))

    def test_the_plan_the_job_and_the_errors_name_all(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, (4,))

        @udf(on_error=[Skip(ValueError)])
        def size(id: int) -> Columns[Size]:
            if id == 2:
                raise ValueError("no")
            return Size(id, id)

        table.add_columns(size)
        plan = table.plan_backfill("h")
        assert plan.columns == ("w", "h")
        assert "columns 'w', 'h' (one call fills them all)" in str(plan)
        job = local_db.get_job(table.backfill("h").job_id)
        assert job.output_columns == ["w", "h"]
        for name in ("w", "h"):
            (error,) = table.get_errors(column_name=name)
            assert error.exception_type == "ValueError"
        assert table.get_errors(column_name="id") == []
        assert both(table)[2] == (None, None)
        assert table.verify("w").counts == {RowState.RIGHT: 3, RowState.FAILED: 1}
        (w, h) = table.list_computed_columns()
        assert (w.expression, w.siblings) == ("size(id).w", ("h",))
        assert (h.expression, h.siblings) == ("size(id).h", ("w",))

    @pytest.mark.parametrize("kind", ["class", "async", "arrays", "batches", "threads"])
    def test_every_kind_of_function(self, local_db: Connection, calls: Calls, kind: str) -> None:
        table = make_table(local_db, (3, 2))
        table.add_columns(functions(calls)[kind])
        threads = {"intra_applier_concurrency": 3} if kind == "threads" else {}
        table.backfill("w", **threads)
        assert calls.taken() == list(range(5))
        assert both(table) == right(range(5))

    def test_memoized_calls(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [[1, 1, 2], [2, 1]])
        table.add_columns(sizes(calls, memoize=True))
        table.backfill("w", where="id = 1")
        table.update(where="id = 1", values={"w": 77})  # a person's: no result for others
        table.backfill("w")
        calls.clear()
        table.add(pa.table({"id": [2, 1]}))
        table.backfill("w")
        assert calls.taken() == [1], "the table has a result for 2, and a person's value for 1"
        found = lance.dataset(table.ref.uri).to_table().sort_by("id").to_pydict()
        assert found["w"] == [77, 77, 77, 2, 4, 4, 4]
        assert found["h"] == [1002] * 4 + [1004] * 3

    def test_a_preview(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, (4,))
        size = sizes(calls)
        shown = size.test(table, n=2)
        assert shown.values.to_pylist() == [{"w": 0, "h": 1000}, {"w": 2, "h": 1002}]
        table.add_columns(size)
        assert table.preview("h", n=1).values.to_pylist() == [{"w": 0, "h": 1000}]


def functions(calls: Calls) -> dict[str, UDF]:
    schema = pa.schema([("w", pa.int64()), ("h", pa.int64())])

    @udf
    class Measure:
        def setup(self) -> None:
            self.more = 1_000

        def __call__(self, id: int) -> Columns[Size]:
            calls.note([id])
            return Size(2 * id, 2 * id + self.more)

    @udf
    async def awaited(id: int) -> Columns[Size]:
        calls.note([id])
        return Size(2 * id, 2 * id + 1_000)

    def laid_out(ids: list[int]) -> pa.RecordBatch:
        calls.note(ids)
        w = [2 * id for id in ids]
        return pa.record_batch({"h": [each + 1_000 for each in w], "w": w})

    @udf(output_schema=schema)
    def arrays(id: pa.Array) -> pa.RecordBatch:
        return laid_out(id.to_pylist())

    @udf(output_schema=schema)
    def batches(batch: pa.RecordBatch) -> pa.RecordBatch:
        return laid_out(batch.column("id").to_pylist())

    return {
        "class": Measure(),
        "async": awaited,
        "arrays": arrays,
        "batches": batches,
        "threads": sizes(calls),
    }


class TestDeclaring:
    def test_names_and_mixtures(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, (2,))
        size = sizes(calls)
        twice = udf(lambda id: 2 * id, data_type=pa.int64(), input_columns=["id"])
        table.add_columns([size, UnpackedUDF(size, prefix="b_"), {"y": twice, "z": "id + 1"}])
        assert table.schema.names == ["id", "w", "h", "b_w", "b_h", "y", "z"]
        table.add_columns((UnpackedUDF(size, prefix="c_"), ["z"]))
        for name in ("w", "b_h", "c_w"):
            table.backfill(name)
        assert by_id(table, "c_w") == {0: 2, 1: 4}
        assert by_id(table, "b_h") == by_id(table, "h")
        assert calls.taken() == [0, 0, 1, 1, 1, 2]
        groups = {d.group for d in table.computed_columns().values() if d.group}
        assert len(groups) == 3

    def test_a_clash_is_refused_before_anything_is_written(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [pa.table({"id": [1], "H": [1]})])
        before = table.version
        size = sizes(calls)
        with pytest.raises(ColumnExistsError, match=r"'H', which differs from 'h' .*prefix"):
            table.add_columns(size)
        with pytest.raises(ColumnExistsError, match="'b_w'"):
            table.add_columns([UnpackedUDF(size, prefix="b_"), {"b_w": size_of_one()}])
        assert (table.version, table.schema.names) == (before, ["id", "H"])

    def test_one_name_for_several_columns_is_refused(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, (1,))
        with pytest.raises(InvalidUDFError, match=r"fills several: w, h\. Pass the UDF itself"):
            table.add_columns({"s": sizes(calls)})
        with pytest.raises(InvalidUDFError, match="needs a name"):
            table.add_columns(size_of_one())

    def test_a_function_of_its_own_columns(self, local_db: Connection) -> None:
        table = make_table(local_db, (1,))

        def size(id: int, h: int) -> Columns[Size]:
            return Size(id, h)

        with pytest.raises(geneva.errors.ColumnNotFoundError, match="h"):
            table.add_columns(udf(size))


def size_of_one() -> UDF:
    return udf(lambda id: id, data_type=pa.int64(), input_columns=["id"], name="one")


class TestEachByItself:
    def test_as_an_input_an_index_and_a_condition(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        seen = Calls(f"{calls.path}-area")

        @udf
        def taller(h: int) -> int:
            seen.note([h])
            return h + 1

        table.add_columns({"t": taller})
        table.backfill("t")
        assert by_id(table, "t") == {id: 2 * id + 1001 for id in range(8)}
        assert seen.taken() == [2 * id + 1000 for id in range(8)]
        table.create_index("w", config=BTree())
        assert table.search().where("w = 6").to_arrow()["id"].to_pylist() == [3]
        table.backfill("w", where="h > 1010")
        assert calls.taken() == [6, 7]

    def test_a_chain_brings_the_group_up_to_date_once(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, (3,))
        seen = Calls(f"{calls.path}-area")

        @udf
        def area(w: int, h: int) -> int:
            seen.note([w])
            return w * h

        table.add_columns(sizes(calls))
        table.add_columns({"area": area})
        with pytest.raises(StaleInputError, match="'w, h'"):
            table.backfill("area", upstream="refuse")
        plan = table.plan_backfill("area")
        assert [step.column for step in plan.upstream] == ["w, h"]
        table.backfill("area")
        assert calls.taken() == [0, 1, 2]
        assert seen.taken() == [0, 2, 4]
        assert by_id(table, "area") == {0: 0, 1: 2 * 1002, 2: 4 * 1004}
        table.update(where="id = 1", values={"id": 9})
        table.backfill("area")
        assert (calls.taken(), seen.taken()) == ([9], [18])
        with pytest.raises(UserInputError, match="computed column 'area' reads it"):
            table.drop_columns("w")

    def test_one_that_only_another_needs_stays(self, local_db: Connection, calls: Calls) -> None:
        """A column computed from `h` is not touched when `w` alone is computed anew."""
        table = filled(local_db, calls)
        seen = Calls(f"{calls.path}-area")

        @udf
        def taller(h: int) -> int:
            seen.note([h])
            return h + 1

        table.add_columns({"t": taller})
        table.backfill("t")
        seen.clear()
        table.drop_columns("w")
        table.add_columns(sizes(calls))
        table.backfill("t")
        assert (calls.taken(), seen.taken()) == (list(range(8)), [])

    def test_what_people_write_is_theirs_column_by_column(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls)
        table.update(where="id = 3", values={"w": -1})
        table.add(pa.table({"id": [20, 21], "w": [-2, None], "h": [None, None]}))
        table.add(pa.table({"id": [22], "h": [-3]}))
        table.backfill("h")
        assert calls.taken() == [20, 21, 22], "for what is missing in a row"
        expected = right([*range(8), 21])
        expected |= {3: (-1, 1006), 20: (-2, 1040), 22: (44, -3)}
        assert both(table) == expected
        table.backfill("w")
        assert calls.count == 0
        for name in ("w", "h"):
            assert table.verify(name).counts == {RowState.RIGHT: 11}
        table.update(where="id = 3", values={"w": None})
        table.backfill("w")
        assert calls.taken() == [3], "emptied: computed again"
        assert both(table)[3] == (6, 1006)
        table.update(where="id in (20, 22)", values={"id": 30})
        table.backfill("w")
        assert calls.taken() == [30, 30], "adopted: stale with its inputs, like any other"

    def test_an_upsert_in_place(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.create_index("id", config=BTree())
        new = pa.table({"id": [2, 5], "w": [-1, -1]})
        table.merge_insert("id").when_matched_update_all().execute(new)
        table.backfill("h")
        assert calls.count == 0
        assert both(table) == right(range(8)) | {2: (-1, 1004), 5: (-1, 1010)}

    def test_a_compaction_and_a_renaming(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.alter_columns({"path": "w", "rename": "width"})
        table.delete("id = 1")
        table.compact_files()
        assert table.plan_backfill("width").is_empty
        table.add(pa.table({"id": [9]}))
        table.backfill("width")
        assert calls.taken() == [9]
        assert by_id(table, "width")[9] == 18
        assert by_id(table, "h")[9] == 1018


class TestDropping:
    def test_the_others_stay_and_go_on(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.drop_columns("w")
        assert table.schema.names == ["id", "h"]
        hidden = [n for n in lance.dataset(table.ref.uri).schema.names if n.startswith("__")]
        assert len(hidden) == 1, "its receipts went with it"
        assert table.plan_backfill("h").is_empty
        table.add(pa.table({"id": [9]}))
        table.update(where="id = 2", values={"id": 12})
        table.compact_files()
        table.backfill("h")
        assert calls.taken() == [9, 12]
        assert by_id(table, "h") == {i: 2 * i + 1000 for i in (0, 1, 3, 4, 5, 6, 7, 9, 12)}

    def test_added_again_it_is_computed_and_nothing_else_is_touched(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls)
        size = sizes(calls)
        table.drop_columns("w")
        kept = files(table, "h")
        table.add_columns(size)
        assert table.schema.names == ["id", "h", "w"]
        table.backfill("w")
        assert calls.taken() == list(range(8))
        assert both(table) == right(range(8))
        assert files(table, "h") == kept
        table.add(pa.table({"id": [9]}))
        table.backfill("h")
        assert calls.taken() == [9], "one call for both again"
        assert both(table) == right([*range(8), 9])
        with pytest.raises(ColumnExistsError):
            table.add_columns(size)

    def test_added_again_where_all_columns_are_read(
        self, local_db: Connection, calls: Calls
    ) -> None:
        """All that there were when the others were declared, and no column that came since."""
        schema = pa.schema([("w", pa.int64()), ("h", pa.int64())])

        def size(batch: pa.RecordBatch) -> pa.RecordBatch:
            calls.note(batch.schema.names)
            return pa.record_batch([batch.column(0), batch.column(0)], schema=schema)

        table = make_table(local_db, (4,))
        table.add_columns(udf(size, output_schema=schema))
        table.backfill("w")
        table.add_columns({"later": "id + 1"})
        kept = files(table, "w")
        table.drop_columns("h")
        table.add_columns(udf(size, output_schema=schema))
        table.backfill("h")
        assert set(calls.taken()) == {"id"}
        assert files(table, "w") == kept
        assert both(table) == {i: (i, i) for i in range(4)}
        with pytest.raises(ColumnExistsError, match="'w' already exists"):
            table.add_columns(udf(size, output_schema=schema))

    def test_a_function_of_all_columns_joins_no_group_of_named_ones(
        self, local_db: Connection
    ) -> None:
        """Its version is that of the function alone, whatever it reads."""
        function = sums()
        table = local_db.create_table("t", pa.table({"x": [1, 2], "y": [10, 20]}))
        table.add_columns((function, ["x"]))
        table.backfill("w")
        table.drop_columns("h")
        with pytest.raises(ColumnExistsError, match="'w' already exists"):
            table.add_columns(function)
        table.alter_columns({"path": "w", "rename": "old"})
        table.add_columns(function)
        assert table.schema.names == ["x", "y", "old", "w", "h"]
        table.backfill("w")
        assert table.to_arrow().drop_columns(["x", "y"]).to_pydict() == {
            "old": [1, 2],
            "w": [1 + 10 + 1, 2 + 20 + 2],
            "h": [3, 3],
        }

    def test_a_group_that_has_all_under_other_names_is_not_joined(
        self, local_db: Connection
    ) -> None:
        """Two columns of one group never hold the same."""
        new = (sums(), ["x"])
        table = local_db.create_table("t", pa.table({"x": [1, 2]}))
        for w, h in (("w1", "h1"), ("w2", "h2")):
            table.add_columns(new)
            table.alter_columns({"path": "w", "rename": w}, {"path": "h", "rename": h})
        table.add_columns(new)
        table.drop_columns(["h1", "h"])
        table.add_columns(new)
        found = read_definitions(lance.dataset(table.ref.uri).schema)
        places = [(d.group, d.output) for d in found.values()]
        assert len(set(places)) == len(places) == 5
        assert found["h"].group == found["w"].group, "and not that of w1, which has room as well"

    def test_added_again_after_a_compaction_and_a_renaming(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = filled(local_db, calls)
        table.alter_columns({"path": "h", "rename": "height"})
        table.drop_columns("w")
        table.add_columns(sizes(calls))
        assert table.schema.names == ["id", "height", "w"]
        table.compact_files()  # from here on the fragment has a file of NULLs for it
        table.backfill("height")
        assert calls.taken() == list(range(8))
        assert by_id(table, "w") == {id: 2 * id for id in range(8)}

    def test_the_last_one_goes_like_any_column(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.drop_columns(["w", "h"])
        assert lance.dataset(table.ref.uri).schema.names == ["id"]
        table.add_columns(sizes(calls))
        table.backfill("w")
        assert calls.taken() == list(range(8))

    def test_another_function_is_another_group(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.drop_columns("w")
        with pytest.raises(ColumnExistsError, match="'h'"):
            table.add_columns(sizes(calls, by=5))
        assert table.schema.names == ["id", "h"]


class TestAltering:
    def test_any_of_them_changes_all(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.alter_columns({"path": "h", "udf": sizes(calls, by=5)})
        assert table.plan_backfill("w").rows_to_compute == 8
        table.backfill("w", where="id < 2")
        assert calls.taken() == [0, 1]
        assert both(table) == right(range(8)) | right([0, 1], by=5)
        table.backfill("h")
        assert calls.taken() == list(range(2, 8))
        assert both(table) == right(range(8), by=5)

    def test_keeping_what_is_computed(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.alter_columns({"path": "w", "udf": sizes(calls, by=5), "keep": "computed"})
        table.add(pa.table({"id": [9]}))
        table.backfill("h")
        assert calls.taken() == [9]
        assert both(table) == right(range(8)) | right([9], by=5)

    def test_what_can_not_fill_them_is_refused(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        before = table.version

        class Wide(NamedTuple):
            w: int

        class Other(NamedTuple):
            w: int
            h: str

        def wide(id: int) -> Columns[Wide]:
            return Wide(id)

        def other(id: int) -> Columns[Other]:
            return Other(id, "")

        with pytest.raises(TypeMismatchError, match=r"a field 'h', too.*drop column 'h' first"):
            table.alter_columns({"path": "w", "udf": udf(wide)})
        with pytest.raises(TypeMismatchError, match="Type mismatch for column 'h'"):
            table.alter_columns({"path": "w", "udf": udf(other)})
        with pytest.raises(TypeMismatchError, match="has no fields"):
            table.alter_columns({"path": "w", "udf": size_of_one()})
        with pytest.raises(UserInputError, match="would get two UDFs"):
            table.alter_columns(
                {"path": "w", "udf": sizes(calls, by=5)}, {"path": "h", "udf": sizes(calls, by=6)}
            )
        assert table.version == before

    def test_a_function_for_one_run(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.backfill("h", udf=sizes(calls, by=7), where="id = 1")
        assert calls.taken() == [1]
        assert both(table)[1] == (7, 1007)
        table.backfill("w")
        assert calls.taken() == [1], "its own function's value is due"


class TestFailures:
    def test_rows_that_fail_and_are_tried_again(
        self, local_db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        broken = tmp_path / "broken"
        broken.write_text(json.dumps([2, 5]))
        table = make_table(local_db, (4, 4))
        table.add_columns(fragile(calls, str(broken), on_error=[Skip(ValueError)]))
        table.backfill("w")
        assert calls.taken() == list(range(8))
        assert both(table) == right(range(8)) | {2: (None, None), 5: (None, None)}
        table.backfill("h")
        assert calls.count == 0, "they would fail again"
        broken.unlink()
        table.backfill("h", retry_failed=True)
        assert calls.taken() == [2, 5]
        assert both(table) == right(range(8))

    def test_a_failure_ends_the_job_and_names_row_and_field(self, local_db: Connection) -> None:
        table = make_table(local_db, (4,))

        @udf
        def size(id: int) -> Columns[Size]:
            return Size(id, "tall" if id == 2 else id)  # type: ignore[arg-type]

        table.add_columns(size)
        with pytest.raises(UDFError, match=r"column 'w, h'.*row 2.*its field 'h': a str"):
            table.backfill("w")

    def test_one_added_again_where_the_other_failed(
        self, local_db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        """A row that is called anyway is so for all its columns."""
        broken = tmp_path / "broken"
        broken.write_text("[1]")
        table = make_table(local_db, (3,))
        size = fragile(calls, str(broken), on_error=[Skip(ValueError)])
        table.add_columns(size)
        table.backfill("w")
        table.drop_columns("w")
        broken.unlink()
        table.add_columns(size)
        calls.clear()
        table.backfill("w")
        assert calls.taken() == [0, 1, 2]
        assert both(table) == right(range(3))

    def test_a_job_that_died_before_its_commit(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = make_table(local_db, (3, 3))
        table.add_columns(sizes(calls))
        with uncommitted(monkeypatch):
            table.backfill("w", checkpoint_size=2)
        assert calls.taken() == list(range(6))
        table.backfill("h")
        assert calls.count == 0
        assert both(table) == right(range(6))

    def test_the_same_for_one_that_was_added_again(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = filled(local_db, calls)
        size = sizes(calls)
        table.drop_columns("w")
        table.add_columns(size)
        with uncommitted(monkeypatch):
            table.backfill("w", checkpoint_size=2)
        calls.clear()
        assert checkpoint_keys(table)
        table.backfill("w")
        assert calls.count == 0
        assert both(table) == right(range(8))

    def test_results_are_of_their_columns(
        self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was staged before columns were dropped, and added in another order, is not used."""
        table = make_table(local_db, (3, 3))

        class Box(NamedTuple):
            w: int
            h: int
            d: int

        def box(id: int) -> Columns[Box]:
            calls.note([id])
            return Box(id, id + 100, id + 200)

        table.add_columns(udf(box))
        table.drop_columns(["w", "h"])
        table.add_columns(udf(box))
        with uncommitted(monkeypatch):
            table.backfill("w", checkpoint_size=2)
        table.drop_columns(["w", "h"])

        class Turned(NamedTuple):
            h: int
            w: int
            d: int

        table.alter_columns({"path": "d", "udf": udf(_turned(calls, Turned))})
        table.add_columns(udf(_turned(calls, Turned)))
        table.backfill("d")
        rows = lance.dataset(table.ref.uri).to_table().to_pydict()
        assert (rows["w"], rows["h"], rows["d"]) == (
            list(range(6)),
            list(range(100, 106)),
            list(range(200, 206)),
        )


def _turned(calls: Calls, record: Callable[..., Any]) -> Callable[..., Any]:
    def box(id: int) -> Any:
        calls.note([id])
        return record(w=id, h=id + 100, d=id + 200)

    box.__annotations__["return"] = Columns[record]  # type: ignore[valid-type]
    return box


def fragile(calls: Calls, broken: str, **options: Any) -> UDF:
    def size(id: int) -> Columns[Size]:
        calls.note([id])
        if Path(broken).exists() and id in json.loads(Path(broken).read_text()):
            raise ValueError(f"can't do {id}")
        return Size(id * 2, id * 2 + 1_000)

    return udf(size, **options)


class TestElsewhere:
    def test_a_record_of_one_field(self, local_db: Connection, calls: Calls) -> None:
        class One(NamedTuple):
            only: int

        def one(id: int) -> Columns[One]:
            calls.note([id])
            return One(id + 1)

        table = make_table(local_db, (2, 2))
        table.add_columns(udf(one))
        table.backfill("only")
        table.backfill("only")
        assert calls.taken() == [0, 1, 2, 3]
        assert by_id(table, "only") == {0: 1, 1: 2, 2: 3, 3: 4}

    def test_blobs_among_them(self, local_db: Connection, calls: Calls) -> None:
        blob = {"lance-encoding:blob": "true"}
        schema = [pa.field("n", pa.int64()), pa.field("b", pa.large_binary(), metadata=blob)]

        def numbered(id: int) -> dict[str, Any]:
            calls.note([id])
            return {"n": id, "b": bytes([id])}

        table = make_table(local_db, (3,))
        table.add_columns(udf(numbered, output_schema=pa.schema(schema)))
        table.backfill("n")
        table.drop_columns("n")
        table.add(pa.table({"id": [3]}))
        table.add_columns(udf(numbered, output_schema=pa.schema(schema)))
        calls.clear()
        table.backfill("b")
        assert calls.taken() == [0, 1, 2, 3]
        rows = lance.dataset(table.ref.uri).to_table(blob_handling="all_binary")
        assert rows["b"].to_pylist() == [bytes([i]) for i in range(4)]
        assert rows["n"].to_pylist() == [0, 1, 2, 3]

    def test_old_columns_have_no_group(self, local_db: Connection, calls: Calls) -> None:
        table = filled(local_db, calls)
        table.add_columns({"y": size_of_one()})
        stored = lance.dataset(table.ref.uri).schema
        keys = [k.decode() for k in stored.field("y").metadata]
        assert not [k for k in keys if k.endswith((".group", ".output", ".prefix"))]
        w, h, y = read_definitions(stored).values()
        assert w.group == h.group != ""
        assert (w.output, h.output, y.output) == ("w", "h", "")
        assert y.computation_id == y.uuid

    def test_a_sibling_that_goes_while_the_job_runs(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, (4, 4))
        table.add_columns(sizes(calls))
        calls.clear()
        dropped: list[str] = []

        def publish(*commit: Any) -> CommitOutcome:
            if not dropped:
                dropped.append("w")
                local_db.open_table("t").drop_columns("w")
                local_db.open_table("t").add(pa.table({"id": [20]}))
            return publish_columns(*commit)

        with publishing(local_db, publish):
            table.backfill("h")
        assert table.schema.names == ["id", "h"]
        assert by_id(table, "h") == {i: 2 * i + 1000 for i in (*range(8), 20)}
        assert calls.taken() == [*range(8), 20], "what was computed for both is taken over for one"
        dropped.clear()
        table.add_columns(sizes(calls))
        with publishing(local_db, publish), pytest.raises(ColumnChangedError, match="'w'"):
            table.backfill("w")
        assert table.schema.names == ["id", "h"]

    def test_trusted_for_each_of_its_columns(self, tmp_path: Path, calls: Calls) -> None:
        private, public = new_key("alice", shared=False)
        options = {"runner": InProcessRunner, "trust": "signed"}
        signed = geneva.connect(tmp_path, signing_key=private, runner=InProcessRunner)
        table = make_table(signed, (3,))
        table.add_columns(sizes(calls))
        monkey = geneva.connect(tmp_path, trusted_keys=public, **options)
        (found,) = monkey.open_table("t").stored_functions()
        assert (found.column, found.signed_by) == ("w, h", "alice")
        dataset = lance.dataset(table.ref.uri)
        dataset.update_field_metadata({"h": {"virtual_column.udf_declaration": ""}})
        (found,) = monkey.open_table("t").stored_functions()
        assert (found.signed_by, found.doubt) == (None, "it is not signed")
        trust = replace(monkey._trust, accepted_file=tmp_path / "accepted")
        (subject,) = monkey.open_table("t")._subjects()
        opened = open_dataset(table.ref)
        bound = subject.bind(opened, read_snapshot(opened, table.ref))
        trust.accept(found)
        assert trust.look(table.ref, bound).accepted
        assert trust.forget(found)
        assert not trust.look(table.ref, bound).accepted
        assert signed.open_table("t").sign_functions(["w"]) == ["w", "h"]
        (found,) = monkey.open_table("t").stored_functions()
        assert found.signed_by == "alice"

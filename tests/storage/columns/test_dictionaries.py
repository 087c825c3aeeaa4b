"""Dictionary columns: values that the indices can't count are refused before they are published."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lance.file import LanceFileWriter
from lancedb.index import BTree

from geneva import Connection, JobStatus, Table, udf
from geneva.errors import UDFOutputError
from geneva.storage.columns import staged_files
from geneva.storage.columns.dictionaries import DistinctValues
from geneva.storage.columns.staged_files import StagedFile, staged_file_is_whole
from support import Calls, by_id, column, counted, make_table

NARROW = pa.dictionary(pa.int8(), pa.string())
ROOM = 128
VERSIONS = ["2.0", "2.1", "2.2"]
SHAPES: dict[str, tuple[pa.DataType, Callable[[str], Any]]] = {
    "plain": (NARROW, lambda v: v),
    "list": (pa.list_(NARROW), lambda v: [v]),
    "struct": (pa.struct({"d": NARROW}), lambda v: {"d": v}),
}
# A computed struct is refused in 2.0, which can't hold NULL structs.
HELD = [(s, v) for s in SHAPES for v in VERSIONS if (s, v) != ("struct", "2.0")]


pytestmark = pytest.mark.filterwarnings("ignore:Column .* is of type:UserWarning")


def stays_readable(table: Table) -> None:
    """Read all, also after a compaction, which makes one dictionary of those of its fragments."""
    rows = table.count_rows()
    assert len(column(table, "x")) == rows
    dataset = lance.dataset(table.ref.uri)
    dataset.optimize.compact_files()
    assert len(column(table, "x")) == rows


def refused(table: Table, **options: Any) -> str:
    before = lance.dataset(table.ref.uri).version
    with pytest.raises(UDFOutputError) as caught:
        table.backfill("x", **options)
    assert lance.dataset(table.ref.uri).version == before, "nothing was published"
    stays_readable(table)
    return str(caught.value)


def row_named(said: str) -> int:
    """The row that there is no room for; which of them depends on where tasks and batches begin."""
    found = re.match(r"Table 't', column 'x', fragment 0, row (\d+) ", said)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(("shape", "version"), HELD)
def test_too_many_values_in_a_fragment(
    local_db: Connection, calls: Calls, version: str, shape: str
) -> None:
    kind, wrap = SHAPES[shape]
    table = make_table(local_db, [300], storage_version=version)
    table.add_columns({"x": counted(calls, lambda id: wrap(f"v{id}"), data_type=kind)})
    said = refused(table)
    assert row_named(said) >= ROOM, "the first ones have room"
    assert "128 different values that int8 indices" in said
    assert local_db.list_jobs()[0].status is JobStatus.FAILED
    assert len(calls.rows) == len(set(calls.rows)), "no row is tried again"


@pytest.mark.parametrize(("shape", "version"), HELD)
def test_too_many_values_in_batches_that_are_written_together(
    local_db: Connection, calls: Calls, version: str, shape: str
) -> None:
    kind, wrap = SHAPES[shape]
    table = make_table(local_db, [300], storage_version=version)
    function = counted(calls, lambda id: wrap(f"v{id}"), data_type=kind, batch_size=10)
    table.add_columns({"x": function})
    assert row_named(refused(table, task_size=300)) == ROOM, "all rows are one task"
    assert len(calls.rows) == len(set(calls.rows)), "no row is tried again"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", [{"checkpoint_size": 7}, {"task_size": 40}], ids=str)
def test_too_many_values_over_batches_and_tasks(
    local_db: Connection, version: str, options: dict[str, Any]
) -> None:
    table = make_table(local_db, [300], storage_version=version)
    table.add_columns({"x": udf(lambda id: f"v{id}", data_type=NARROW)})
    assert row_named(refused(table, **options)) >= ROOM


@pytest.mark.parametrize(("shape", "version"), HELD)
def test_as_many_values_as_there_is_room_for(
    local_db: Connection, calls: Calls, version: str, shape: str
) -> None:
    """In many batches, each with all values: Lance would not find that they are the same."""
    kind, wrap = SHAPES[shape]
    few = counted(calls, lambda id: wrap(f"v{id % 127}") if id % 7 else None, data_type=kind)
    table = make_table(local_db, [1_000, 100], storage_version=version)
    table.add_columns({"x": few})
    table.backfill("x", checkpoint_size=140)
    expected = [wrap(f"v{i % 127}") if i % 7 else None for i in range(1_100)]
    assert column(table, "x") == expected
    assert calls.count == 1_100


@pytest.mark.parametrize("version", VERSIONS)
def test_too_many_values_over_fragments(local_db: Connection, calls: Calls, version: str) -> None:
    table = make_table(local_db, [90], storage_version=version)
    table.add_columns({"x": counted(calls, lambda id: f"v{id}", data_type=NARROW)})
    table.backfill("x")
    table.add(pa.table({"id": pa.array(range(90, 180), pa.int64())}))
    said = refused(table)
    assert "fragment 1, row 38: together with the values of other fragments" in said
    assert sorted(calls.rows) == list(range(180))


@pytest.mark.parametrize("version", VERSIONS)
def test_too_many_values_beside_those_that_stay(local_db: Connection, version: str) -> None:
    table = make_table(local_db, [200], storage_version=version)
    table.add_columns({"x": udf(lambda id: f"v{id}", data_type=NARROW)})
    table.backfill("x", where="id < 100")
    refused(table, where="id >= 100")
    assert column(table, "x") == [f"v{i}" if i < 100 else None for i in range(200)]


@pytest.mark.parametrize("version", VERSIONS)
def test_too_many_values_among_those_that_are_taken_over(
    local_db: Connection, calls: Calls, version: str
) -> None:
    """Results of runs that were refused, which a compaction has put into one fragment."""
    table = make_table(local_db, [100], storage_version=version)
    table.add_columns({"x": counted(calls, lambda id: f"v{id}", data_type=NARROW)})
    table.backfill("x")
    for start in (100, 200, 300):
        table.add(pa.table({"id": range(start, start + 100)}))
        refused(table)
    table.compact_files()
    said = refused(table)
    assert "Table 't', column 'x', fragment" in said
    assert "different" in said
    assert "int8 indices" in said


def test_values_of_a_former_function_do_not_count(local_db: Connection) -> None:
    table = make_table(local_db, [100, 100, 100])
    table.add_columns({"x": udf(lambda id: f"old{id % 100}", data_type=NARROW)})
    table.backfill("x")
    new = udf(lambda id: f"new{id % 100}", data_type=NARROW)
    table.alter_columns({"path": "x", "udf": new})
    table.backfill("x", commit_granularity=1)
    assert column(table, "x") == [f"new{i % 100}" for i in range(300)]


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_a_file_that_can_not_be_read_back_is_never_published(
    local_db: Connection, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    # What Lance itself makes of batches with the same values.
    monkeypatch.setattr(staged_files, "has_narrow_dictionary", lambda kinds: False)
    table = make_table(local_db, [1_000], storage_version=version)
    table.add_columns({"x": udf(lambda id: f"v{id % 100}", data_type=NARROW)})
    said = refused(table, checkpoint_size=250)
    assert "Table 't', column 'x', fragment 0" in said
    assert "can't read back the values" in said
    data = Path(table.ref.uri) / "data"
    assert not [file for file in data.iterdir() if file.name.startswith("geneva-")]


def test_a_staged_file_of_an_earlier_run_must_be_readable(local_db: Connection) -> None:
    table = make_table(local_db, [180], storage_version="2.1")
    path = Path(table.ref.uri) / "data" / "staged.lance"
    writer = LanceFileWriter(str(path), pa.schema([("x", NARROW)]), version="2.1")
    for start in (0, 90):
        values = pa.array([f"v{i}" for i in range(start, start + 90)], NARROW)
        writer.write_batch(pa.record_batch({"x": values}))
    writer.close()
    staged = StagedFile(0, path.name, 180, "uuid", (1,), (), None)
    assert not staged_file_is_whole(table.ref, staged)


@given(
    st.lists(st.lists(st.none() | st.integers(0, 140), max_size=60), max_size=6),
    st.sampled_from(list(SHAPES)),
)
def test_values_are_counted_as_a_set_counts_them(
    batches: list[list[int | None]], shape: str
) -> None:
    class Format:
        data_storage_version = "2.1"

    kind, wrap = SHAPES[shape]
    distinct = DistinctValues(Format())
    known: set[int] = set()
    for batch in batches:
        rows = [None if v is None else wrap(f"v{v}") for v in batch]
        found = distinct.add(pa.record_batch({"x": pa.array(rows, kind)}))
        expected, seen = None, set(known)
        for row, value in enumerate(batch):
            seen |= set() if value is None else {value}
            if len(seen) > ROOM:
                expected = row
                break
        assert (None if found is None else found.row) == expected
        known = seen if expected is None else known


# ------------------------------------------------------------------------------------- compaction


def filled(db: Connection, values: int, version: str, kind: pa.DataType = NARROW) -> Table:
    """Twenty fragments of 200 rows, and a column of so many different values in each."""
    table = make_table(db, [200] * 20, storage_version=version)
    table.add_columns({"x": udf(lambda id: f"v{id % values}", data_type=kind)})
    table.backfill("x")
    return table


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("by", ["optimize", "compact_files"])
def test_what_would_be_unreadable_is_not_merged(
    local_db: Connection, version: str, by: str
) -> None:
    table = filled(local_db, 100, version)
    with pytest.warns(UserWarning, match=r"20 fragments of table 't' could not be merged: .* 'x'"):
        getattr(table, by)()
    assert column(table, "x") == [f"v{i % 100}" for i in range(4000)]
    assert len(lance.dataset(table.ref.uri).get_fragments()) == 20
    if version != "2.0":  # there Lance itself gives up, and leaves its file
        with pytest.warns(UserWarning, match="could not be merged"):
            getattr(table, by)()
        tracked = lance.dataset(table.ref.uri).tracked_files().read_all()["path"].to_pylist()
        left = {f"data/{path.name}" for path in (Path(table.ref.uri) / "data").iterdir()}
        assert left <= set(tracked), "what was not merged leaves no file behind"
    assert table.plan_backfill("x").is_empty


@pytest.mark.parametrize("by", ["optimize", "compact_files"])
def test_what_stays_readable_is_merged(local_db: Connection, by: str) -> None:
    table = filled(local_db, 10, "2.2")
    table.create_index("id", config=BTree())
    getattr(table, by)()
    assert column(table, "x") == [f"v{i % 10}" for i in range(4000)]
    assert len(lance.dataset(table.ref.uri).get_fragments()) == 1
    assert table.count_rows("id = 17") == 1
    assert table.plan_backfill("x").is_empty


def test_what_can_be_merged_is_merged_beside_what_can_not(local_db: Connection) -> None:
    table = make_table(local_db, [200] * 20)
    few = udf(lambda id: f"v{id % (10 if id < 2000 else 100)}", data_type=NARROW)
    table.add_columns({"x": few})
    table.backfill("x")
    before = by_id(table, "x")
    with pytest.warns(UserWarning, match="10 fragments of table 't' could not be merged"):
        table.compact_files(target_rows_per_fragment=400)
    assert len(lance.dataset(table.ref.uri).get_fragments()) == 15
    assert by_id(table, "x") == before


def test_a_plain_column_stays_readable_too(local_db: Connection) -> None:
    parts = [
        pa.table({"d": pa.array([f"v{(i * 7 + f * 3) % 100}" for i in range(200)]).cast(NARROW)})
        for f in range(20)
    ]
    table = make_table(local_db, parts)
    before = column(table, "d")
    with pytest.warns(UserWarning, match="could not be merged"):
        table.optimize()
    assert column(table, "d") == before


@pytest.mark.filterwarnings("error")
def test_narrow_indices_are_warned_of(local_db: Connection) -> None:
    table = make_table(local_db, [3])
    with pytest.warns(UserWarning, match=r"Column 'x' of table 't' .* int32"):
        table.add_columns({"x": udf(lambda id: "v", data_type=pa.struct({"d": NARROW}))})
    wide = pa.dictionary(pa.int32(), pa.string())
    table.add_columns({"y": udf(lambda id: "v", data_type=wide)})
    source = make_table(local_db, [3], name="s", stable_row_ids=True)
    query = source.query().select(["id"]).add_column({"x": udf(lambda id: "v", data_type=NARROW)})
    with pytest.warns(UserWarning, match=r"Column 'x' of table 'v' .* int32"):
        local_db.create_materialized_view("v", query)


def test_a_branch_stays_readable_too(local_db: Connection) -> None:
    table = filled(local_db, 100, "2.2")
    branch = table.branches.create("dev")
    with pytest.warns(UserWarning, match="could not be merged"):
        branch.optimize()
    branch.delete("id >= 200")
    branch.optimize()
    assert column(branch, "x") == [f"v{i % 100}" for i in range(200)]
    assert table.count_rows() == 4000


def test_fragments_of_deleted_rows_go(local_db: Connection) -> None:
    table = filled(local_db, 100, "2.2")
    table.delete("id >= 20")
    table.optimize()
    assert column(table, "x") == [f"v{i}" for i in range(20)]
    assert len(lance.dataset(table.ref.uri).get_fragments()) == 1

"""View tables: definition, placeholders, rows that leave; what Lance does with them."""

from __future__ import annotations

from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance import LanceOperation
from lance.file import LanceFileWriter

from geneva import udf
from geneva.errors import TableChangedError, UserInputError
from geneva.model.rows import RowSet
from geneva.model.tables import TableRef
from geneva.model.view_query import IS_SET, SOURCE_ROW_ID, ColumnKind, ViewColumn, ViewQuery
from geneva.storage.columns.definitions import FunctionSource, read_definition
from geneva.storage.columns.staged_files import data_file
from geneva.storage.lance.dataset import field_ids_of, open_dataset
from geneva.storage.views.definition import (
    ROW_ADDRESSES,
    STABLE_ROW_IDS,
    append_placeholders,
    copied_field,
    create_view_table,
    delete_view_rows,
    read_source_ids,
    read_view,
    reads_source,
    source_udf_fields,
    visible_schema,
)

QUERY = ViewQuery(
    base_table="users",
    base_db_uri="/db",
    where="age > 21",
    where_inputs=("age",),
    columns=(ViewColumn("a", ColumnKind.COLUMN, "a", ("a",)),),
)
POINT = pa.struct([pa.field("x", pa.string()), pa.field("y", pa.int32())])
SCHEMA = pa.schema(
    [
        pa.field("a", pa.int64(), nullable=False),
        pa.field("s", POINT),
        pa.field("v", pa.list_(pa.float32(), 2)),
        pa.field("l", pa.list_(POINT)),
    ]
)
VALUES = (IS_SET, "a", "s", "v", "l")


@pytest.fixture
def ref(tmp_path: Path) -> TableRef:
    return TableRef("view", str(tmp_path / "view.lance"))


@pytest.fixture
def view(ref: TableRef) -> lance.LanceDataset:
    create_view_table(ref, SCHEMA, QUERY, 7, STABLE_ROW_IDS)
    return open_dataset(ref)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def fill(
    ref: TableRef, value: int, columns: tuple[str, ...] = VALUES, only: int | None = None
) -> lance.LanceDataset:
    """Replace the columns in all fragments, or one, by a file of theirs, in one commit."""
    dataset = open_dataset(ref)
    schema = pa.schema([dataset.schema.field(name) for name in columns])
    fields = [i for name in columns for i in field_ids_of(dataset)[name]]
    groups = []
    for fragment in dataset.get_fragments():
        if only not in (None, fragment.fragment_id):
            continue
        rows = fragment.physical_rows
        point = {"x": str(value), "y": value}
        made = {IS_SET: True, "a": value, "s": point, "v": [value, value], "l": [point]}
        batch = pa.RecordBatch.from_pylist([{c: made[c] for c in columns}] * rows, schema=schema)
        name = f"{value}-{'-'.join(columns)}-{fragment.fragment_id}.lance"
        writer = LanceFileWriter(f"{ref.uri}/data/{name}", schema, version="2.2")
        writer.write_batch(batch)
        writer.close()
        file = data_file(dataset, name, fields)
        groups.append(LanceOperation.DataReplacementGroup(fragment.fragment_id, file))
    operation = LanceOperation.DataReplacement(groups)
    filled = lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
    filled.validate()
    return filled


def row(value: int) -> dict[str, object]:
    point = {"x": str(value), "y": value}
    return {IS_SET: True, "a": value, "s": point, "v": [value, value], "l": [point]}


def values_of(dataset: lance.LanceDataset) -> list[dict[str, object]]:
    return dataset.to_table(columns=list(VALUES)).to_pylist()


def test_a_view_says_what_it_is(view: lance.LanceDataset) -> None:
    info = read_view(view.schema)
    assert info is not None
    assert (info.query, info.base_version, info.format_version) == (QUERY, 7, "2")
    assert view.has_stable_row_ids
    assert view.schema.names == [SOURCE_ROW_ID, IS_SET, "a", "s", "v", "l"]
    assert view.schema.field(SOURCE_ROW_ID).type == pa.int64()
    assert view.schema.field(IS_SET).type == pa.bool_()
    assert all(field.nullable for field in view.schema)
    assert visible_schema(view.schema).names == ["a", "s", "v", "l"]
    assert view.count_rows() == 0


def test_the_metadata_keys_are_the_documented_ones(view: lance.LanceDataset) -> None:
    metadata = view.schema.metadata
    assert metadata[b"geneva::view::query"].decode() == QUERY.to_json()
    assert metadata[b"geneva::view::base_table"] == b"users"
    assert metadata[b"geneva::view::base_table_db_uri"] == b"/db"
    assert metadata[b"geneva::view::base_table_version"] == b"7"
    assert metadata[b"geneva::view::version"] == b"2"


def test_a_plain_table_is_no_view(tmp_path: Path) -> None:
    plain = lance.write_dataset(pa.table({"a": [1]}), tmp_path / "t.lance")
    assert read_view(plain.schema) is None
    assert visible_schema(plain.schema) == plain.schema


def test_a_view_without_stable_ids_of_its_source_is_of_the_first_format(ref: TableRef) -> None:
    create_view_table(ref, SCHEMA, QUERY, 1, ROW_ADDRESSES)
    info = read_view(open_dataset(ref).schema)
    assert info is not None
    assert info.format_version == ROW_ADDRESSES


def test_a_name_is_taken_once(ref: TableRef, view: lance.LanceDataset) -> None:
    with pytest.raises(UserInputError, match="already"):
        create_view_table(ref, SCHEMA, QUERY, 7, STABLE_ROW_IDS)


def test_two_views_of_one_name_are_told_apart(ref: TableRef, tmp_path: Path) -> None:
    other = TableRef("view", str(tmp_path / "other.lance"))
    infos = []
    for place in (ref, other):
        create_view_table(place, SCHEMA, QUERY, 1, STABLE_ROW_IDS)
        infos.append(read_view(open_dataset(place).schema))
    assert infos[0] is not None
    assert infos[1] is not None
    assert infos[0].uuid != infos[1].uuid


def test_copies_of_columns_are_plain(tmp_path: Path) -> None:
    source = pa.schema(
        [
            pa.field(
                "c", pa.int64(), nullable=False, metadata={"virtual_column": "true", "unit": "m"}
            ),
            pa.field("b", pa.large_binary(), metadata={"lance-encoding:blob": "true"}),
            pa.field("s", POINT),
        ]
    )
    assert copied_field(source, "c", "d").equals(
        pa.field("d", pa.int64(), metadata={"unit": "m"}), check_metadata=True
    )
    assert copied_field(source, "b", "b").equals(source.field("b"), check_metadata=True)
    assert copied_field(source, "s.y", "y") == pa.field("y", pa.int32())


def test_udf_columns_say_that_they_read_the_source(tmp_path: Path) -> None:
    source = lance.write_dataset(pa.table({"x": [1], "y": [2]}), tmp_path / "t.lance")

    @udf(data_type=pa.int64())
    def double(y: int) -> int:
        return 2 * y

    function = FunctionSource(("y",), "digest")
    made = source_udf_fields(source, {"d": ""}, double, function)["d"]
    definition = read_definition(pa.schema([made]), "d")
    assert definition is not None
    assert (definition.inputs, definition.input_fields) == (("y",), ((1, "int64"),))
    assert reads_source(made)
    assert not reads_source(source.schema.field("x"))


def is_set(view: lance.LanceDataset) -> list[bool | None]:
    return view.to_table(columns=[IS_SET]).column(0).to_pylist()


def test_placeholders_are_one_commit_of_fragments_in_order(
    ref: TableRef, view: lance.LanceDataset
) -> None:
    wanted = np.random.default_rng(0).permutation(15).astype(np.uint64)
    after = append_placeholders(ref, view, wanted, 7)
    assert after.version == view.version + 1
    assert [f.physical_rows for f in after.get_fragments()] == [7, 7, 1]
    read = read_source_ids(after)
    assert np.concatenate([rows.live_ids() for rows in read]).tolist() == wanted.tolist()
    assert not any(is_set(after))
    assert read_view(after.schema) == read_view(view.schema)
    assert all(value is None for value in values_of(after)[0].values())


def test_a_large_append_is_cut_where_asked(ref: TableRef, view: lance.LanceDataset) -> None:
    after = append_placeholders(ref, view, np.arange(250_000, dtype=np.uint64), 120_000)
    assert [f.physical_rows for f in after.get_fragments()] == [120_000, 120_000, 10_000]


def test_no_placeholders_no_commit(ref: TableRef, view: lance.LanceDataset) -> None:
    assert append_placeholders(ref, view, ids()).version == view.version
    assert delete_view_rows(view, {}) == view.version
    assert read_source_ids(view) == []


def test_one_file_fills_all_columns_and_the_mark(ref: TableRef, view: lance.LanceDataset) -> None:
    append_placeholders(ref, view, np.arange(5, dtype=np.uint64), 3)
    assert values_of(fill(ref, 1)) == [row(1)] * 5
    again = fill(ref, 2)
    assert values_of(again) == [row(2)] * 5
    assert all(is_set(again))
    assert [r.source_ids.tolist() for r in read_source_ids(again)] == [[0, 1, 2], [3, 4]]


def test_groups_of_columns_are_filled_one_after_the_other(
    ref: TableRef, view: lance.LanceDataset
) -> None:
    append_placeholders(ref, view, ids(0, 1, 2))
    for value in (1, 2):
        fill(ref, value, ("a", "s", IS_SET))
        fill(ref, value, ("v",))
        assert values_of(fill(ref, value, ("l",))) == [row(value)] * 3
    assert values_of(fill(ref, 3)) == [row(3)] * 3, "over files of several groups"


def test_compacted_fragments_are_filled_too(ref: TableRef, view: lance.LanceDataset) -> None:
    append_placeholders(ref, view, np.arange(10, dtype=np.uint64), 3)
    fill(ref, 1, only=0)
    fill(ref, 1, only=1)
    open_dataset(ref).optimize.compact_files()
    compacted = open_dataset(ref)
    assert len(compacted.get_fragments()) == 1
    (rows,) = read_source_ids(compacted)
    assert rows.source_ids.tolist() == list(range(10))
    assert is_set(compacted) == [True] * 6 + [None] * 4
    append_placeholders(ref, compacted, ids(20, 21))
    assert values_of(fill(ref, 2)) == [row(2)] * 12
    assert values_of(fill(ref, 3, ("v",))) == [row(2) | {"v": [3, 3]}] * 12
    assert values_of(fill(ref, 4)) == [row(4)] * 12


def test_lance_takes_no_file_of_old_and_new_fields(ref: TableRef, view: lance.LanceDataset) -> None:
    """Why placeholders leave `__is_set` out. Once this works, they may say false."""
    both = pa.table({SOURCE_ROW_ID: [1], IS_SET: [False]})
    lance.write_dataset(both, view, mode="append")
    with pytest.raises(OSError, match="no changes were made"):
        fill(ref, 1)


def test_rows_leave_in_one_commit(ref: TableRef, view: lance.LanceDataset) -> None:
    append_placeholders(ref, view, np.arange(100, 109, dtype=np.uint64), 3)
    before = fill(ref, 1)
    gone = {0: RowSet.full(3), 1: RowSet.from_offsets(3, np.array([1])), 2: RowSet.empty(3)}
    assert delete_view_rows(before, gone) == before.version + 1
    after = open_dataset(ref)
    after.validate()
    assert [rows.fragment_id for rows in read_source_ids(after)] == [1, 2]
    first, second = read_source_ids(after)
    assert first.source_ids.tolist() == [103, 104, 105]
    assert first.live.tolist() == [True, False, True]
    assert first.live_ids().tolist() == [103, 105]
    assert second.live_ids().tolist() == [106, 107, 108]
    more = {1: RowSet.from_offsets(3, np.array([0, 1]))}
    delete_view_rows(after, more)
    left = [rows.live_ids().tolist() for rows in read_source_ids(open_dataset(ref))]
    assert left == [[105], [106, 107, 108]]
    assert values_of(fill(ref, 2)) == [row(2)] * 4, "deletions stay when columns are replaced"


def test_rows_of_a_fragment_that_is_gone_are_a_changed_table(
    ref: TableRef, view: lance.LanceDataset
) -> None:
    after = append_placeholders(ref, view, ids(1))
    with pytest.raises(TableChangedError, match="Fragment 5"):
        delete_view_rows(after, {5: RowSet.full(1)})


def test_a_million_rows_leave_without_a_list_of_them(
    ref: TableRef, view: lance.LanceDataset
) -> None:
    count = 1_000_000
    after = append_placeholders(ref, view, np.arange(count, dtype=np.uint64), count)
    mask = np.ones(count, dtype=np.bool_)
    mask[::1000] = False
    delete_view_rows(after, {0: RowSet.from_mask(mask)})
    (rows,) = read_source_ids(open_dataset(ref))
    assert rows.live_ids().tolist() == list(range(0, count, 1000))

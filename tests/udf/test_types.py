"""Values of every type, in every file format, come out as they went in."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from geneva import Connection, Table, chunker, udtf
from geneva.errors import InvalidUDFError
from geneva.storage.lance.trial import _one_value, why_not_storable
from support import Calls, by_id, checkpoint_ranges, column, counted, make_table

UTC = datetime.UTC
DAY = datetime.datetime(2026, 2, 3, 4, 5, 6, 789_000)  # noqa: DTZ001
D = decimal.Decimal

TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, False, None]),
    *((t, [0, 1, 127, None]) for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *((t, [0, 200, None]) for t in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())),
    *((t, [0.5, -1.25, None]) for t in (pa.float16(), pa.float32(), pa.float64())),
    (pa.decimal128(10, 2), [D("1.25"), D("-3.50"), None]),
    (pa.decimal256(40, 3), [D("1.125"), None]),
    (pa.string(), ["a", "", "😀", None]),
    (pa.large_string(), ["a", "", None]),
    (pa.binary(), [b"a", b"", b"\x00\xff", None]),
    (pa.large_binary(), [b"abc", None]),
    (pa.binary(3), [b"abc", b"xyz", None]),
    (pa.date32(), [DAY.date(), None]),
    (pa.date64(), [DAY.date(), None]),
    (pa.time32("s"), [datetime.time(1, 2, 3), None]),
    (pa.time64("us"), [datetime.time(1, 2, 3, 4), None]),
    (pa.timestamp("s"), [DAY.replace(microsecond=0), None]),
    (pa.timestamp("ms"), [DAY, None]),
    (pa.timestamp("us", tz="UTC"), [DAY.replace(tzinfo=UTC), None]),
    (pa.duration("us"), [datetime.timedelta(seconds=5), None]),
    (pa.list_(pa.int64()), [[1, 2], [], None, [3, None]]),
    (pa.list_(pa.string()), [["a", None], [], None]),
    (pa.large_list(pa.int32()), [[1], [], None]),
    (pa.list_(pa.float32(), 2), [[1.0, 2.0], [3.0, 4.5]]),
    (pa.list_(pa.list_(pa.int64())), [[[1], []], [], None]),
    (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        [{"a": 1, "b": "x"}, {"a": None, "b": ""}],
    ),
    (
        pa.struct([("p", pa.struct([("q", pa.list_(pa.float32()))])), ("r", pa.int8())]),
        [{"p": {"q": [1.5]}, "r": 1}, {"p": {"q": []}, "r": None}],
    ),
    (pa.list_(pa.struct([("a", pa.int64())])), [[{"a": 1}, {"a": None}], [], None]),
    (pa.dictionary(pa.int32(), pa.string()), ["red", "green", "red", None]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1), ("b", None)], [], None]),
]


def is_storable(version: str, kind: pa.DataType) -> bool:
    """Whether Lance's file format can hold NULLs of a type, whoever writes them."""
    if pa.types.is_map(kind):
        return version == "2.2"
    return not pa.types.is_struct(kind) or version != "2.0"


def is_stored_by_version(kind: pa.DataType) -> bool:
    """Whether the formats store a type in different ways."""
    return pa.types.is_nested(kind) or pa.types.is_dictionary(kind)


VERSIONS = ("2.0", "2.1", "2.2")


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_format_can_not_hold_is_refused(
    local_db: Connection, calls: Calls, version: str
) -> None:
    table = make_table(local_db, [1], storage_version=version)
    for kind in (kind for kind, _ in TYPES if not is_storable(version, kind)):
        with pytest.raises(InvalidUDFError, match=f"version {version}: it is NULL until"):
            table.add_columns({"x": counted(calls, lambda id: None, data_type=kind)})
    texts = pa.list_(pa.string(), 2)  # NULL can be written, and no value
    with pytest.raises(InvalidUDFError, match=f"version {version}: "):
        table.add_columns({"x": counted(calls, lambda id: ["a", "b"], data_type=texts)})
    assert table.schema.names == ["id"]


@pytest.mark.parametrize("kind", [kind for kind, _ in TYPES], ids=str)
def test_a_type_is_tried_with_null_and_with_a_value(kind: pa.DataType) -> None:
    assert _one_value(kind).null_count == 0
    for version in VERSIONS:
        can = is_storable(version, kind)
        assert (why_not_storable(version, kind) is None) == can, version
        inside = pa.struct([("x", kind)])
        assert (why_not_storable(version, inside) is None) == (can and version != "2.0"), version


def test_views_refuse_what_no_table_can_hold(local_db: Connection, calls: Calls) -> None:
    source = make_table(local_db, [1], stable_row_ids=True)
    texts = pa.list_(pa.string(), 2)
    made = counted(calls, lambda id: ["a", "b"], data_type=texts)
    rows = chunker(lambda id: [], output_schema=pa.schema([("x", texts)]), input_columns=["id"])

    @udtf(output_schema=pa.schema([("x", texts)]))
    def every(rows: Any) -> Any:
        yield {"x": ["a", "b"]}

    for create in (
        lambda: local_db.create_materialized_view("v", source.query().select({"x": made})),
        lambda: local_db.create_udtf_view("v", source, rows),
        lambda: local_db.create_udtf_view("v", source, every),
    ):
        with pytest.raises(InvalidUDFError, match="its values can't be written"):
            create()
    assert local_db.table_names() == ["t"]
    assert [path.name for path in Path(local_db.uri).glob("v*")] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_all_types_together(local_db: Connection, calls: Calls, version: str) -> None:
    """Each type is a column, all filled by one call; in older formats, those that differ there."""
    columns = {
        f"x{i}": (kind, values)
        for i, (kind, values) in enumerate(TYPES)
        if is_storable(version, kind) and (version == "2.2" or is_stored_by_version(kind))
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()])

    def expected(id: int, name: str) -> Any:
        values = columns[name][1]
        return values[id % len(values)]

    function = counted(
        calls, lambda id: {name: expected(id, name) for name in columns}, output_schema=schema
    )
    check_round_trip(
        make_table(local_db, [7, 3], storage_version=version), calls, function, schema, expected
    )


def cases() -> list[Any]:
    """Every type in every format; quick are those that are stored in ways of their own."""
    quick = (pa.string(), pa.bool_(), pa.list_(pa.float32(), 2), pa.list_(pa.string()))
    return [
        pytest.param(
            kind,
            values,
            version,
            id=f"{kind}-{version}",
            marks=[] if version == "2.2" and kind in quick else [pytest.mark.slow],
        )
        for kind, values in TYPES
        for version in VERSIONS
        if is_storable(version, kind)
    ]


@pytest.mark.parametrize(("kind", "values", "version"), cases())
def test_round_trip(
    local_db: Connection, calls: Calls, kind: pa.DataType, values: list[Any], version: str
) -> None:
    def expected(id: int, name: str) -> Any:
        return values[id % len(values)]

    function = counted(calls, lambda id: values[id % len(values)], data_type=kind)
    check_round_trip(
        make_table(local_db, [7, 3], storage_version=version),
        calls,
        {"x": function},
        pa.schema([("x", kind)]),
        expected,
    )


def check_round_trip(
    table: Table,
    calls: Calls,
    function: Any,
    schema: pa.Schema,
    expected: Callable[[int, str], Any],
) -> None:
    """Add the columns, compute them in every way, and look at each value."""
    table.delete("id IN (2, 8)")
    live = [i for i in range(10) if i not in (2, 8)]

    def check(ids: list[int]) -> None:
        for name in schema.names:
            assert column(table, name) == [expected(i, name) for i in ids]

    table.add_columns(function)
    assert [table.schema.field(name).type for name in schema.names] == schema.types
    # By way of checkpoints and an assembly, and once more over values that are there.
    table.backfill(schema.names[0], checkpoint_size=2, task_size=4)
    check(live)
    assert len(checkpoint_ranges(table)) == 2
    table.backfill(schema.names[0], where="id % 2 = 1")
    check(live)
    assert calls.rows == sorted([*live, *(i for i in live if i % 2)])
    # And the table can be changed, also while values are NULL.
    table.add(pa.table({"id": pa.array([10], pa.int64())}))
    table.update(where="id = 10", values={"id": 11})
    table.optimize()
    for name in schema.names:
        assert by_id(table, name) == {**{i: expected(i, name) for i in live}, 11: None}


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_a_batch_function_of_vectors(
    local_db: Connection, calls: Calls, version: str, stable: bool
) -> None:
    table = make_table(local_db, [20, 20], storage_version=version, stable_row_ids=stable)
    table.delete("id % 7 = 0")

    def embed(id: pa.Array) -> pa.Array:
        flat = [float(i) for v in id.to_pylist() for i in (v, v + 0.5, -v)]
        return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float32()), 3)

    table.add_columns({"x": counted(calls, embed, data_type=pa.list_(pa.float32(), 3))})
    table.backfill("x", where="id < 30", checkpoint_size=5)
    table.backfill("x", task_size=7)
    live = [i for i in range(40) if i % 7]
    assert column(table, "x") == [[i, i + 0.5, -i] for i in live]
    assert calls.rows == live
    table.to_lance().validate()

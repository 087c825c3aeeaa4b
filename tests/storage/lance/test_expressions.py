"""SQL over a table: types, the columns it depends on, values of given rows."""

from __future__ import annotations

from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from geneva.errors import ColumnNotFoundError, InvalidFilterError, UserInputError
from geneva.storage.lance.expressions import (
    RowReader,
    read_condition,
    read_expression,
    unrepeatable_part,
)

POINT = pa.struct([("u", pa.int64()), ("w", pa.string())])


@pytest.fixture(params=[True, False], ids=["stable ids", "addresses"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> lance.LanceDataset:
    data = pa.table(
        {
            "id": pa.array(range(8)),
            "Name": pa.array(list("abcdefgh")),
            "a b": pa.array([float(i) for i in range(8)]),
            "x": pa.array([None, *range(1, 8)]),
            "s": pa.array([{"u": i, "w": str(i)} for i in range(8)], POINT),
            "c, d": pa.array(range(8)),
        }
    )
    path = tmp_path / "t.lance"
    return lance.write_dataset(data, path, max_rows_per_file=3, enable_stable_row_ids=request.param)


def row_ids(table: lance.LanceDataset) -> np.ndarray:
    return table.scanner(columns=[], with_row_id=True).to_table()["_rowid"].to_numpy()


@pytest.mark.parametrize("last", ["7", "7.5", "'7'", "NULL", "99999999999999999999", "-7"])
def test_long_lists_mean_what_they_say(table: lance.LanceDataset, last: str) -> None:
    """Planned with few literals, computed with all: also that of the odd kind counts."""
    numbers = ", ".join(map(str, range(100, 200)))
    found = read_condition(table, f"id IN ({numbers}, {last}) OR x IN ({numbers})")
    assert (found.type, set(found.inputs)) == (pa.bool_(), {"id", "x"})
    reader = RowReader(table, [], [found.sql])
    (values,) = reader.take(row_ids(table))
    assert [i for i, value in enumerate(values.to_pylist()) if value] == (
        [7] if last.strip("'") == "7" else []
    )


@pytest.mark.parametrize(
    ("sql", "kind", "inputs"),
    [
        ("x + 1", pa.int64(), {"x"}),
        ("upper(`Name`)", pa.string(), {"Name"}),
        ("name", pa.string(), {"Name"}),
        ("`a b` * 2", pa.float64(), {"a b"}),
        ("s.u + id", pa.int64(), {"s.u", "id"}),
        ("s['w']", pa.string(), {"s.w"}),
        ("s", POINT, {"s"}),
        ("1", pa.int64(), set()),
        ("x > 1 OR 1 = 1", pa.bool_(), set()),
        ("'x' || `Name`", pa.string(), {"Name"}),
        ("CASE WHEN x > 1 THEN 'many' ELSE `Name` END", pa.string(), {"x", "Name"}),
        ("CASE WHEN true THEN 1 ELSE 2 END", pa.int64(), set()),
        ("`c, d` + 1", pa.int64(), {"c, d"}),
    ],
)
def test_an_expression_has_a_type_and_inputs(
    table: lance.LanceDataset, sql: str, kind: pa.DataType, inputs: set[str]
) -> None:
    found = read_expression(table, sql)
    assert found.type == kind
    assert set(found.inputs) == inputs


@pytest.mark.parametrize(
    "sql", ["x +", "x AS y", "count(*)", "nosuch(x)", "x > 'abc'", "sum(x) OVER ()"]
)
def test_wrong_sql_is_the_users_mistake(table: lance.LanceDataset, sql: str) -> None:
    with pytest.raises(UserInputError, match="can't be used") as caught:
        read_expression(table, sql)
    assert "/home/" not in str(caught.value)


@pytest.mark.parametrize("sql", ["x) + (1", "x) AS a, (id", "(x", "x > 1) OR (1 = 1"])
def test_brackets_of_ours_can_not_be_closed(table: lance.LanceDataset, sql: str) -> None:
    with pytest.raises(UserInputError, match="parenthes"):
        read_expression(table, sql)
    assert read_expression(table, "concat('(', `Name`, ')))') -- (").inputs == ("Name",)


def test_unknown_columns_are_named(table: lance.LanceDataset) -> None:
    with pytest.raises(ColumnNotFoundError, match=r"'nme'.*Did you mean 'Name'"):
        read_expression(table, "nme || 'x'")
    with pytest.raises(ColumnNotFoundError, match="'nosuch'"):
        read_condition(table, "CASE WHEN nosuch THEN true END")


def test_a_condition_is_a_boolean(table: lance.LanceDataset) -> None:
    assert read_condition(table, "x > 1 AND s.u = 2").inputs == ("x", "s.u")
    assert read_condition(table, "CASE WHEN x > 1 THEN true END").inputs == ("x",)
    with pytest.raises(InvalidFilterError, match="int64"):
        read_condition(table, "x + 1")
    with pytest.raises(InvalidFilterError, match="can't be used"):
        read_condition(table, "x >")


@pytest.mark.parametrize(
    ("sql", "part"),
    [
        ("x + random()", "random"),
        ("ts < NOW ()", "NOW"),
        ("current_date", "current_date"),
        ("`_rowid` + 1", "_rowid"),
        ("_rowaddr", "_rowaddr"),
        ("x + 1", None),
        ("now + known(1)", None),
        ("'now()' || x", None),
    ],
)
def test_what_can_not_be_repeated_is_found(sql: str, part: str | None) -> None:
    assert unrepeatable_part(sql) == part


def test_rows_are_read_in_the_order_asked_for(table: lance.LanceDataset) -> None:
    sql = ["x * 10", "CASE WHEN s.u > 3 THEN `Name` END", "1", "CASE WHEN true THEN 2 END"]
    reader = RowReader(table, ["s.u", "Name", "s.u"], sql)
    order = [7, 0, 4, 2]
    taken = [array.to_pylist() for array in reader.take(row_ids(table)[order])]
    assert taken == [
        order,
        ["h", "a", "e", "c"],
        order,
        [70, None, 40, 20],
        ["h", None, "e", None],
        [1] * 4,
        [2] * 4,
    ]
    assert [len(array) for array in reader.take(row_ids(table)[:0])] == [0] * 7


def test_only_constants_have_rows_too(table: lance.LanceDataset) -> None:
    (ones,) = RowReader(table, [], ["1"]).take(row_ids(table))
    assert ones.to_pylist() == [1] * 8


def test_rows_that_are_gone_are_an_error(table: lance.LanceDataset) -> None:
    ids = row_ids(table)
    table.delete("id = 3")
    with pytest.raises(OSError, match="gave 7 of 8 rows"):
        RowReader(table, ["id"]).take(ids)


def test_blobs_are_read_as_bytes(tmp_path: Path) -> None:
    blob = pa.field("b", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    data = pa.table([[b"one", b"two", b"three"]], schema=pa.schema([blob]))
    table = lance.write_dataset(
        data, tmp_path / "b.lance", enable_stable_row_ids=True, data_storage_version="2.1"
    )
    for reader in (RowReader(table, ["b"]), RowReader(table, [], ["`b`"])):
        (blobs,) = reader.take(np.array([2, 0], dtype=np.uint64))
        assert blobs.to_pylist() == [b"three", b"one"]


def test_values_have_the_type_that_was_told(table: lance.LanceDataset) -> None:
    sql = "left(md5(`Name`), 2)"
    assert read_expression(table, sql).type == pa.string(), "Lance computes a view of strings"
    hashes, u = RowReader(table, [], [sql, "`s`.`u`"]).take(row_ids(table))
    assert hashes.type == pa.string()
    assert u.to_pylist() == list(range(8))

"""Which rows satisfy a condition, and whose fault it is when nobody can tell."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from geneva.errors import InvalidFilterError, UnreadableFragmentsError
from geneva.storage.lance.dataset import FragmentFacts, fragment_facts
from geneva.storage.lance.matching_rows import read_matching_rows
from geneva.storage.lance.row_ids import read_matching_ids, read_row_ids

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def table(tmp_path: Path) -> lance.LanceDataset:
    data = pa.table(
        {
            "x": pa.array([None, *range(1, 9)]),
            "name": [*"12345678", "nine"],
            "zero": [-0.0, 0.0, 1.0, -1.0, None, float("nan"), float("inf"), -0.0, 2.0],
            "dur": pa.array([timedelta(hours=24 * i) for i in range(9)], pa.duration("ms")),
            "at": pa.array(
                [START + timedelta(days=i) for i in range(9)], pa.timestamp("us", "UTC")
            ),
        }
    )
    path = str(tmp_path / "t.lance")
    return lance.write_dataset(data, path, max_rows_per_file=3, enable_stable_row_ids=True)


def facts(table: lance.LanceDataset) -> list[FragmentFacts]:
    return [fragment_facts(fragment.metadata) for fragment in table.get_fragments()]


def matching(table: lance.LanceDataset, where: str) -> list[int]:
    """The rows, by all the ways that lead to them."""
    every = read_matching_rows(table, facts(table), where)
    rows = [f * 3 + i for f, found in every.items() for i in found.offsets().tolist()]
    for fragment in facts(table):
        assert read_matching_rows(table, [fragment], where)[fragment.id] == every[fragment.id]
    ids = read_row_ids(table, None)
    assert read_row_ids(table, where).tolist() == ids[rows].tolist()
    others = [i for i in range(len(ids)) if i not in rows]
    for i in (*rows[:1], *others[:1]):
        assert len(read_matching_ids(table, ids[[i]], where)) == (i in rows)
    return rows


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("zero = 0", [0, 1, 7]),
        ("zero >= 0.0", [0, 1, 2, 5, 6, 7, 8]),
        ("zero < 0.0", [3]),
        ("zero <> -0.0", [2, 3, 5, 6, 8]),
        ("zero * -1 IN (0.0, 1.0)", [0, 1, 3, 7]),
        ("CASE WHEN x > 0 THEN zero = 0 ELSE NULL END", [1, 7]),
        ("NOT (zero > 0)", [0, 1, 3, 7]),
        ('"x" IS NOT NULL', [1, 2, 3, 4, 5, 6, 7, 8]),
        ("dur > interval '3 days'", [4, 5, 6, 7, 8]),
        ("dur = interval '3' day", [3]),
        ("interval '1 day 24 hours' >= dur", [0, 1, 2]),
        ("dur BETWEEN interval '1 day' AND (interval '48 hours')", [1, 2]),
        ("dur IN (interval '1 day', interval '3 days')", [1, 3]),
        ("at - timestamp '2026-01-01T00:00:00Z' > interval '6 days'", [7, 8]),
        ("at < timestamp '2026-01-03T00:00:00Z' + interval '1 day'", [0, 1, 2]),
        ("_rowaddr IN (1, 4294967297)", [1, 4]),
        ("_ROWADDR > 4294967296 AND x < 6", [4, 5]),
        ("_rowid = 5 OR _rowoffset = 7", [5, 7]),
        ("x > 7 OR false", [8]),
        ("true", list(range(9))),
        ("NULL::boolean", []),
    ],
)
def test_all_ways_give_the_same_rows(
    table: lance.LanceDataset, where: str, rows: list[int]
) -> None:
    assert matching(table, where) == rows


def test_with_an_index_too(table: lance.LanceDataset) -> None:
    table.create_scalar_index("x", "BTREE")
    table.delete("x = 4")
    fresh = lance.dataset(table.uri)
    found = read_matching_rows(fresh, facts(fresh), 'X >= 4 AND "x" < 7')
    assert {f: rows.offsets().tolist() for f, rows in found.items()} == {0: [], 1: [2], 2: [0]}


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("dur > interval '1 month'", "a month has 28 to 31 days"),
        ("dur + interval '1 day' > interval '3 days'", "is an interval"),
        ("dur > arrow_cast('3 days', 'Interval(MonthDayNano)')", "is an interval"),
        ("greatest(dur, interval '7 days') > interval '7 days'", "is an interval"),
        ("dur > interval 'many days'", "many days"),
        ("cast(name as int) > 3", "row of address 8589934594 .name = nine"),
        ("x = ?", "stands for a value"),
    ],
)
def test_a_clause_at_fault(table: lance.LanceDataset, where: str, reason: str) -> None:
    for read in (
        lambda: read_matching_rows(table, facts(table), where),
        lambda: read_matching_rows(table, facts(table)[2:], where),
        lambda: read_row_ids(table, where),
    ):
        with pytest.raises(InvalidFilterError, match=reason) as caught:
            read()
        assert ".rs" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_at_fault(table: lance.LanceDataset, damage: str) -> None:
    name = table.get_fragment(1).data_files()[0].path
    file = Path(table.uri) / "data" / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100])
    table = lance.dataset(table.uri)
    for where in ("x > 1", "CASE WHEN x > 1 THEN true END"):
        for read in (
            lambda where=where: read_matching_rows(table, facts(table), where),
            lambda where=where: read_row_ids(table, where),
        ):
            with pytest.raises(
                UnreadableFragmentsError, match="The clause is not at fault"
            ) as caught:
                read()
            assert caught.value.fragments == (1,)
        with pytest.raises(InvalidFilterError, match="nope"):
            read_row_ids(table, "nope > 1")
        found = read_matching_rows(table, [facts(table)[0], facts(table)[2]], where)
        assert {f: rows.offsets().tolist() for f, rows in found.items()} == {0: [2], 2: [0, 1, 2]}

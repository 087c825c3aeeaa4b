"""Writes into a view by plain LanceDB: the next refresh finds them, and mends what they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import lancedb
import pyarrow as pa
import pytest

from geneva import Chunker, Connection, Table, chunker
from support import Calls, Prototypes
from support import tripled as make_udf
from view_support import make_source, make_view, numbers, values

EXPECTED = {i: i * 3 for i in range(0, 10, 2)}


def by_hand(db: Connection, name: str = "v") -> Any:
    """The view as somebody sees it who has only LanceDB."""
    return lancedb.connect(db.uri).open_table(name)


def row(**values: Any) -> pa.Table:
    kinds = {"__source_row_id": pa.int64(), "__is_set": pa.bool_()}
    return pa.table({k: pa.array([v], kinds.get(k, pa.int64())) for k, v in values.items()})


WRITES: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "a carried column": (lambda t: t.update(where="id = 4", values={"id": 44}), []),
    "a UDF column": (lambda t: t.update(where="id = 4", values={"t": -1}), [4]),
    "a UDF column to NULL": (lambda t: t.update(where="id = 4", values_sql={"t": "NULL"}), [4]),
    "both": (lambda t: t.update(where="id >= 6", values={"id": 1, "t": -1}), [6, 8]),
    "all": (lambda t: t.update(values={"t": 0}), [2, 4, 6, 8]),  # 0 is right for row 0
    "the flag": (lambda t: t.update(where="id = 4", values={"__is_set": False}), []),
    "the id": (lambda t: t.update(where="id = 4", values={"__source_row_id": 99}), [4]),
    "the id of another": (lambda t: t.update(where="id = 4", values={"__source_row_id": 6}), [4]),
    "deleted": (lambda t: t.delete("id = 4"), [4]),
    "all deleted": (lambda t: t.delete("true"), [0, 2, 4, 6, 8]),
    "added": (lambda t: t.add(row(id=5, t=15)), []),
    "added twice": (lambda t: (t.add(row(id=5, t=15)), t.add(row(id=5, t=15))), []),
    "added again": (lambda t: t.add(row(__source_row_id=4, __is_set=True, id=4, t=1)), []),
    "added to the rest": (lambda t: t.add(row(__source_row_id=5, __is_set=True, id=5, t=1)), []),
    "upserted": (
        lambda t: (
            t.merge_insert("id")
            .when_matched_update_all()
            .when_not_matched_insert_all()
            .execute(pa.table({"id": [4, 5], "t": [40, 50]}))
        ),
        [4],
    ),
}


def refreshed_view(db: Connection, prototypes: Prototypes) -> None:
    make_view(db, make_source(db), prototypes.calls()).refresh()


WITH_ANOTHER_SOURCE = ("a UDF column", "both", "the id of another", "all deleted", "added")
"""Writes that are mended in the quick round also together with a change of the source."""


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        pytest.param(
            what,
            changed,
            marks=[pytest.mark.slow] if changed and what not in WITH_ANOTHER_SOURCE else [],
        )
        for what in WRITES
        for changed in (False, True)
    ],
)
def test_what_was_written_is_mended(
    tmp_path: Path, prototypes: Prototypes, what: str, changed: bool
) -> None:
    write, needed = WRITES[what]
    db, calls = prototypes.copy(refreshed_view, tmp_path / "db"), prototypes.calls()
    write(by_hand(db))
    expected = dict(EXPECTED)
    if changed:
        db.open_table("src").add(numbers(10, 11))
        expected[10] = 30
    view = db.open_table("v")
    plan = view.plan_refresh()
    assert not plan.is_empty
    assert plan.rows_to_run == len(needed) + changed
    view.refresh()
    assert values(view) == expected
    assert len(view) == len(expected)
    assert calls.taken() == [*needed, *([10] if changed else [])]
    assert all(view.to_arrow(include_system=True)["__is_set"].to_pylist())
    assert view.plan_refresh().is_empty
    view.refresh()
    assert calls.taken() == []


def test_what_keeps_rows_and_values_is_no_write(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls)
    view.refresh()
    source.add(numbers(10, 14))
    view.refresh()
    view.add_columns({"u": (make_udf(calls, name="u"), ["id"])})
    view.backfill("u")
    by_hand(local_db).create_index("id")
    lance.dataset(view.ref.uri).optimize.compact_files()
    assert view.plan_refresh().is_empty


def test_a_write_in_the_middle_of_a_refresh_is_found(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geneva.execution.refresh import run

    source = make_source(local_db)
    view = make_view(local_db, source, calls)
    view.refresh()
    source.add(numbers(10, 11))
    real = run.append_placeholders

    def disturbed(*args: Any) -> Any:
        by_hand(local_db).delete("id = 4")
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(run, "append_placeholders", disturbed)
        view.refresh()
    calls.clear()
    assert not view.plan_refresh().is_empty
    view.refresh()
    assert values(view) == {**EXPECTED, 10: 30}
    assert calls.taken() == [4]


def twice(chunked: Calls) -> Chunker:
    @chunker(output_schema=pa.schema([("n", pa.int64())]), version="1")
    def twice(id: int) -> Iterator[tuple[int]]:
        chunked.note([id])
        yield from ((id * 10,), (id * 10 + 1,))

    return twice


@pytest.fixture
def chunked(tmp_path: Path) -> Calls:
    """The rows that the chunker ran for."""
    return Calls(str(tmp_path / "chunked"))


def chunks_of(view: Table) -> list[tuple[int, int]]:
    table = view.to_arrow()
    return sorted(zip(table["id"].to_pylist(), table["n"].to_pylist(), strict=True))


def chunks_with_a_column(db: Connection, prototypes: Prototypes) -> None:
    calls, chunked = prototypes.calls(), prototypes.calls("chunked")
    source = make_source(db, rows=3)
    view = db.create_udtf_view("v", source.query().select(["id"]), twice(chunked))
    view.refresh()
    assert chunked.taken() == [0, 1, 2]
    view.add_columns({"u": (make_udf(calls, name="u"), ["id"])})
    view.backfill("u")


@pytest.mark.parametrize(
    ("write", "lost"),
    [
        (lambda t: t.update(where="n = 20", values={"n": 7}), [2]),
        (lambda t: t.update(where="n = 20", values={"id": 7}), []),
        (lambda t: t.update(where="n = 20", values={"__is_set": False}), [2]),
        (lambda t: t.update(where="n = 20", values={"__source_row_id": 1}), [2]),
        (lambda t: t.delete("n = 11"), [1]),
        (lambda t: t.delete("true"), [0, 0, 1, 1, 2, 2]),
        (lambda t: t.add(row(id=5, n=50)), []),
        (lambda t: t.update(where="n = 20", values={"u": 5}), []),
        (lambda t: t.update(where="n = 20", values={"u": None}), [2]),
        (lambda t: t.update(where="n = 20", values={"n": None}), [2]),
        (lambda t: t.update(where="n = 20", values={"id": None}), []),
    ],
)
def test_rows_of_a_chunked_view_are_mended(
    tmp_path: Path, prototypes: Prototypes, write: Callable[[Any], Any], lost: list[int]
) -> None:
    db = prototypes.copy(chunks_with_a_column, tmp_path / "db")
    calls, chunked = prototypes.calls(), prototypes.calls("chunked")
    write(by_hand(db))
    view = db.open_table("v")
    assert not view.plan_refresh().is_empty
    view.refresh()
    assert chunked.taken() == []
    assert chunks_of(view) == [(i, i * 10 + part) for i in range(3) for part in range(2)]
    view.backfill("u")
    assert calls.taken() == lost
    assert view.plan_refresh().is_empty


def test_what_keeps_the_rows_of_a_chunked_view_is_no_write(
    local_db: Connection, chunked: Calls
) -> None:
    source = make_source(local_db, rows=3)
    view = local_db.create_udtf_view("v", source.query().select(["id"]), twice(chunked))
    view.refresh()
    source.add(numbers(3, 4))
    view.refresh()
    by_hand(local_db).create_index("n")
    lance.dataset(view.ref.uri).optimize.compact_files()
    assert view.plan_refresh().is_empty
    source.delete("id = 1")
    view.refresh()
    assert sorted({i for i, _ in chunks_of(view)}) == [0, 2, 3]

"""Columns of a view that plain Lance dropped, renamed or re-typed: no refresh fills them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance import LanceOperation, Transaction

from geneva import Connection, Table, chunker, udtf
from geneva.errors import TableChangedError
from geneva.model.view_query import IS_SET, SOURCE_ROW_ID
from support import Prototypes, counted, tripled

CHUNKS = pa.schema([("n", pa.int64()), ("m", pa.int64())])


def rows(start: int, stop: int) -> pa.Table:
    ids = range(start, stop)
    pairs = [{"x": 100 + i, "y": 200 + i} for i in ids]
    return pa.table({"id": ids, "a": [10 * i for i in ids], "b": [-i for i in ids], "s": pairs})


def twin(id: int) -> int:
    return id * 3 + 1


def rows_view(db: Connection, prototypes: Prototypes) -> None:
    calls = prototypes.calls()
    query = db.create_table("src", rows(0, 4)).query().select(["id", "a", "b", "s"])
    made = query.add_column({"c": tripled(calls), "d": counted(calls, twin)})
    db.create_materialized_view("v", made).refresh()


def chunks_view(db: Connection, prototypes: Prototypes) -> None:
    calls = prototypes.calls()

    @chunker(output_schema=CHUNKS, version="1")
    def parts(id: int) -> Iterator[tuple[int, int]]:
        calls.note([id])
        yield from ((id, 0), (id, 1))

    query = db.create_table("src", rows(0, 4)).query().select(["a", "b"])
    db.create_udtf_view("v", query.add_column({"c": tripled(calls)}), parts).refresh()


def sums_view(db: Connection, prototypes: Prototypes) -> None:
    calls = prototypes.calls()

    @udtf(output_schema=pa.schema([("a", pa.int64()), ("b", pa.int64())]), partition_by="id")
    def sums(source: Any) -> Iterator[dict[str, int]]:
        table = source.to_arrow()
        calls.note(table["id"].to_pylist())
        yield {"a": sum(table["a"].to_pylist()), "b": sum(table["b"].to_pylist())}

    source = db.create_table("src", rows(0, 4))
    db.create_udtf_view("v", source=source.query(), udtf=sums).refresh()


def dropped(*names: str) -> Callable[[str], None]:
    return lambda uri: lance.dataset(uri).drop_columns(list(names))


def renamed(*pairs: tuple[str, str]) -> Callable[[str], None]:
    def write(uri: str) -> None:
        for path, name in pairs:
            lance.dataset(uri).alter_columns({"path": path, "name": name})

    return write


def swapped(one: str, other: str) -> Callable[[str], None]:
    parent, _, last = one.rpartition(".")
    under = f"{parent}." if parent else ""
    return renamed((one, "t"), (other, last), (f"{under}t", other.removeprefix(under)))


def retyped(name: str, kind: pa.DataType) -> Callable[[str], None]:
    return lambda uri: lance.dataset(uri).alter_columns({"path": name, "data_type": kind})


def replaced(name: str) -> Callable[[str], None]:
    def write(uri: str) -> None:
        dropped(name)(uri)
        lance.dataset(uri).add_columns({name: "cast(7 as bigint)"})

    return write


def names_passed_on(uri: str) -> None:
    dropped("a")(uri)
    renamed(("b", "a"))(uri)


QUICK: list[tuple[Any, str, Callable[[str], None]]] = [
    (rows_view, "a", swapped("a", "b")),
    (rows_view, "a", dropped("a")),
    (rows_view, "a", retyped("a", pa.int32())),
    (rows_view, "s", swapped("s.x", "s.y")),
    (rows_view, "c", renamed(("c", "z"))),
    (rows_view, "c", retyped("c", pa.int32())),
    (rows_view, IS_SET, dropped(IS_SET)),
    (chunks_view, "m", swapped("n", "m")),
    (chunks_view, "n", dropped("n")),
    (sums_view, "a", swapped("a", "b")),
]
MORE: list[tuple[Any, str, Callable[[str], None]]] = [
    (rows_view, "a", renamed(("a", "z"))),
    (rows_view, "a", replaced("a")),
    (rows_view, "a", names_passed_on),
    (rows_view, "s", dropped("s.x")),
    (rows_view, "c", swapped("c", "d")),
    (rows_view, "c", dropped("c")),
    (rows_view, SOURCE_ROW_ID, dropped(SOURCE_ROW_ID)),
    (rows_view, SOURCE_ROW_ID, retyped(SOURCE_ROW_ID, pa.int32())),
    (chunks_view, "a", swapped("a", "b")),
    (chunks_view, "c", renamed(("c", "z"))),
    (chunks_view, "a", retyped("a", pa.int32())),
    (chunks_view, IS_SET, dropped(IS_SET)),
    (sums_view, "a", dropped("a")),
    (sums_view, "b", retyped("b", pa.int32())),
    (sums_view, SOURCE_ROW_ID, dropped(SOURCE_ROW_ID)),
]


@pytest.mark.parametrize(
    ("make", "column", "alter"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
def test_a_view_whose_columns_others_altered_is_not_refreshed(
    tmp_path: Path, prototypes: Prototypes, make: Any, column: str, alter: Callable[[str], None]
) -> None:
    db, calls = prototypes.copy(make, tmp_path / "db"), prototypes.calls()
    before = db.open_table("v").version
    alter(db.open_table("v").ref.uri)
    view = db.open_table("v")
    altered = view.version
    refused = f"Column '{column}' of view 'v' was dropped, renamed or re-typed by others"
    for _ in ("the source as it was", "with another row"):
        for refresh in (view.plan_refresh, view.refresh, view.refresh):
            with pytest.raises(TableChangedError, match=refused):
                refresh()
        db.open_table("src").add(rows(4, 5))
    assert (view.version, calls.taken()) == (altered, [])
    view.cleanup_checkpoints()  # is not refused
    view.restore(before)
    view.refresh()
    assert set(calls.taken()) == {4}


def test_a_column_that_has_its_name_again_is_refreshed(
    tmp_path: Path, prototypes: Prototypes
) -> None:
    db = prototypes.copy(rows_view, tmp_path / "db")
    view = db.open_table("v")
    swapped("a", "b")(view.ref.uri)
    swapped("a", "b")(view.ref.uri)
    db.open_table("src").add(rows(4, 5))
    view = db.open_table("v")
    view.refresh()
    assert shown(view) == [(i, 10 * i, -i, i * 3) for i in range(5)]


def test_what_others_do_to_other_columns_is_their_business(
    tmp_path: Path, prototypes: Prototypes
) -> None:
    db = prototypes.copy(rows_view, tmp_path / "db")
    uri = db.open_table("v").ref.uri
    lance.dataset(uri).add_columns({"e": "a", "f": "b"})
    swapped("e", "f")(uri)
    dropped("e")(uri)
    db.open_table("src").add(rows(4, 5))
    view = db.open_table("v")
    view.refresh()
    assert shown(view) == [(i, 10 * i, -i, i * 3) for i in range(5)]


@pytest.mark.parametrize("make", [rows_view, chunks_view, sums_view])
def test_rows_come_to_a_view_with_a_column_of_a_constant(
    tmp_path: Path, prototypes: Prototypes, make: Any
) -> None:
    db, calls = prototypes.copy(make, tmp_path / "db"), prototypes.calls()
    view = db.open_table("v")
    before = len(view)
    view.add_columns({"k": "7"})
    db.open_table("src").add(rows(4, 5))
    view.refresh()
    assert set(calls.taken()) == {4}
    added = len(view) - before
    assert view.to_arrow()["k"].to_pylist() == [7] * before + [None] * added
    assert view.plan_refresh().is_empty


def test_a_view_that_was_refreshed_before_fields_were_on_record_is_refreshed_and_then_checked(
    tmp_path: Path, prototypes: Prototypes
) -> None:
    db = prototypes.copy(rows_view, tmp_path / "db")
    view = db.open_table("v")
    forget_fields(view.ref.uri)
    db.open_table("src").add(rows(4, 5))
    view = db.open_table("v")
    view.refresh()
    assert shown(view) == [(i, 10 * i, -i, i * 3) for i in range(5)]
    swapped("a", "b")(view.ref.uri)
    with pytest.raises(TableChangedError, match="Column 'a' of view 'v'"):
        db.open_table("v").refresh()
    forget_fields(view.ref.uri)
    dropped("a")(view.ref.uri)
    with pytest.raises(TableChangedError, match="Column 'a' of view 'v'"):
        db.open_table("v").refresh()


def forget_fields(uri: str) -> None:
    dataset = lance.dataset(uri)
    updates = LanceOperation.UpdateMap(updates={"geneva::view::fields": None}, replace=False)
    operation = LanceOperation.UpdateConfig(schema_metadata_updates=updates)
    lance.LanceDataset.commit(dataset, Transaction(dataset.version, operation))
    assert b"geneva::view::fields" not in lance.dataset(uri).schema.metadata


def shown(view: Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(r[n] for n in ("id", "a", "b", "c")) for r in view.to_arrow().to_pylist())

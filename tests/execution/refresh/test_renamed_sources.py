"""Columns of a source that change their names: a view reads by name, and knows columns by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from geneva import Connection, MaterializedView, Table, chunker
from geneva.query import Query
from support import Calls, counted
from view_support import STABLE


def shout(text: str) -> str:
    return text.upper()


@chunker(output_schema=pa.schema([("letter", pa.string())]), version="1")
def letters(text: str) -> Iterator[tuple[str]]:
    for letter in text:
        yield (letter,)


def make_source(db: Connection) -> Table:
    rows = [
        {"id": i, "text": f"a{i}", "clean": f"b{i}" if i % 2 else f"a{i}", "p": {"x": i, "y": -i}}
        for i in range(6)
    ]
    return db.create_table("src", rows, storage_options=STABLE)


def rename(table: Table, *pairs: tuple[str, str]) -> None:
    for old, new in pairs:
        table.alter_columns({"path": old, "rename": new})


def replace_text(source: Table) -> None:
    source.drop_columns(["text"])
    rename(source, ("clean", "text"))


def swap_text(source: Table) -> None:
    rename(source, ("text", "other"), ("clean", "text"), ("other", "clean"))


def rows_of(found: Any) -> list[str]:
    return sorted(map(repr, found.to_arrow().to_pylist()))


def queries(source: Table, calls: Calls) -> dict[str, Query]:
    query = source.query()
    return {
        "plain": query.select({"id": "id", "text": "text", "sql": "lower(text)"}).add_column(
            {"loud": counted(calls, shout, version="1")}
        ),
        "filtered": query.where("text LIKE 'b%'").select(["id"]),
        "chunked": query.select(["id", "text"]).add_column(letters),
    }


@pytest.mark.slow
@pytest.mark.parametrize("change", [replace_text, swap_text])
def test_another_column_of_the_name_is_another_column(
    local_db: Connection, calls: Calls, change: Any
) -> None:
    source = make_source(local_db)
    views = {
        name: local_db.create_materialized_view(name, query)
        for name, query in queries(source, calls).items()
    }
    for view in views.values():
        view.refresh()
    calls.clear()
    change(source)
    fresh = queries(source, calls)
    views["plain"].refresh()
    assert calls.taken() == ["b1", "b3", "b5"]  # the others have the same value
    for name in ("filtered", "chunked"):
        views[name].refresh()
    for name, view in views.items():
        assert rows_of(view) == rows_of(fresh[name]), name
    calls.clear()
    assert all(view.plan_refresh().is_empty for view in views.values())
    source.update(where="id = 2", values={"text": "z2"})
    for name, view in views.items():
        view.refresh()
        assert rows_of(view) == rows_of(queries(source, Calls(calls.path + "x"))[name])
    assert calls.taken() == ["z2"]


def test_renamed_and_back_is_no_change(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db)
    view = local_db.create_materialized_view("v", queries(source, calls)["plain"])
    view.refresh()
    calls.clear()
    swap_text(source)
    swap_text(source)
    assert [c.rows for c in view.plan_refresh().columns] == [0, 0]
    view.refresh()
    assert calls.taken() == []


def test_fields_of_a_struct_that_change_their_names(local_db: Connection) -> None:
    source = make_source(local_db)
    query = source.query().select({"id": "id", "x": "p.x"})
    view: MaterializedView = local_db.create_materialized_view("v", query)
    view.refresh()
    source.alter_columns({"path": "p.x", "rename": "other"})
    source.alter_columns({"path": "p.y", "rename": "x"})
    view.refresh()
    assert sorted(view.to_arrow()["x"].to_pylist()) == [-5, -4, -3, -2, -1, 0]

"""What is refused on a view and on a table: writing into columns that are Geneva's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from geneva import Connection, MaterializedView, Table, chunker, udf
from geneva.errors import ColumnNotFoundError, UserInputError
from support import Calls, make_table, tripled
from view_support import make_source, make_view, values

truth = udf(lambda id: True, data_type=pa.bool_(), input_columns=["id"], name="truth")
number = udf(lambda id: 7, data_type=pa.int64(), input_columns=["id"], name="number")


@chunker(output_schema=pa.schema([("n", pa.int64())]), version="1")
def one(id: int) -> Iterator[tuple[int]]:
    yield (id,)


@pytest.fixture
def view(local_db: Connection, calls: Calls) -> MaterializedView:
    made = make_view(local_db, make_source(local_db), calls)
    made.refresh()
    return made


def hidden_of(table: Table) -> list[str]:
    return [n for n in table._table.schema.names if n.startswith("__")]


@pytest.mark.parametrize("call", ["backfill", "plan_backfill", "backfill_async"])
def test_columns_of_the_query_are_not_backfilled(view: MaterializedView, call: str) -> None:
    before = view.version
    for column, function in (("id", number), ("id", None), ("t", number), ("t", None)):
        with pytest.raises(UserInputError, match=r"(?s)one of its query.*'src'.*refresh\(\)"):
            getattr(view, call)(column, udf=function)
    with pytest.raises(UserInputError, match="Geneva's own"):
        getattr(view, call)("__is_set", udf=truth)
    with pytest.raises(UserInputError, match="Geneva's own"):
        getattr(view, call)("__source_row_id", udf=number)
    with pytest.raises(ColumnNotFoundError):
        getattr(view, call)("nothing", udf=number)
    assert view.version == before


def test_columns_of_a_chunked_view_neither(local_db: Connection) -> None:
    view = local_db.create_udtf_view(
        "v", make_source(local_db, rows=2).query().select(["id", "name"]), one
    )
    view.refresh()
    for column in ("n", "id", "name"):
        with pytest.raises(UserInputError, match="refresh"):
            view.backfill(column, udf=number)
    view.add_columns({"u": (number, ["n"])})
    view.backfill("u")
    assert values(view, "u") == {0: 7, 1: 7}


CHANGES: list[Callable[..., Any]] = [
    lambda table, name: table.alter_columns({"path": name, "rename": "mine"}),
    lambda table, name: table.alter_columns({"path": name, "udf": number}),
    lambda table, name: table.alter_columns({"path": name, "nullable": True}),
    lambda table, name: table.drop_columns([name]),
    lambda table, name: table.backfill(name, udf=number),
    lambda table, name: (
        table.alter_columns({"path": "u", "rename": f"{name}x"})
        if name.startswith("__receipt")
        else table.drop_columns(name)
    ),
]


def test_system_columns_stay_as_they_are(
    local_db: Connection, calls: Calls, view: MaterializedView
) -> None:
    view.add_columns({"u": (number, ["id"])})
    table = make_table(local_db, [3])
    table.add_columns({"u": tripled(calls)})
    for made in (view, table):
        before = made.version
        assert len(hidden_of(made)) == (4 if made is view else 1)
        for name, change in itertools.product(hidden_of(made), CHANGES):
            with pytest.raises(UserInputError, match=r"Geneva's own|not possible"):
                change(made, name)
        assert made.version == before


def test_a_table_may_have_columns_that_are_called_like_those_of_a_view(
    local_db: Connection,
) -> None:
    table = local_db.create_table("t", pa.table({"id": [1], "__is_set": pa.nulls(1, pa.bool_())}))
    table.backfill("__is_set", udf=truth)
    assert table.to_arrow()["__is_set"].to_pylist() == [True]
    table.drop_columns("__is_set")

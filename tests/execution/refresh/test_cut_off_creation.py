"""Views whose creation is cut off: creating them again replaces the hidden tables that are left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from geneva import Connection, chunker, udtf
from geneva.errors import TableChangedError, UserInputError
from geneva.execution.refresh import create
from geneva.view import MaterializedView
from support import Calls
from view_support import make_source, numbers

NUMBERS = pa.schema([("n", pa.int64())])


def chunks(db: Connection, calls: Calls, factor: int = 1) -> MaterializedView:
    @chunker(output_schema=NUMBERS, version=str(factor))
    def parts(id: int) -> Iterator[tuple[int]]:
        calls.note([id])
        yield (id * factor,)

    return db.create_udtf_view("v", db.open_table("src").query().select(["id"]), parts)


def sums(db: Connection, calls: Calls, factor: int = 1) -> MaterializedView:
    @udtf(output_schema=NUMBERS, partition_by="id", version=str(factor))
    def sums(source: Any) -> Iterator[dict[str, int]]:
        ids = source.to_arrow()["id"].to_pylist()
        calls.note(ids)
        yield {"n": sum(ids) * factor}

    return db.create_udtf_view("v", source=db.open_table("src").query(), udtf=sums)


Make = Callable[..., MaterializedView]


def shown(view: MaterializedView) -> list[int]:
    return sorted(view.to_arrow()["n"].to_pylist())


@pytest.mark.parametrize(("make", "tables"), [(chunks, 2), (sums, 3)])
def test_a_view_whose_creation_was_cut_off_can_be_created_again(
    local_db: Connection, calls: Calls, make: Make, tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(local_db, rows=3)
    for last in range(1, tables):
        dying(monkeypatch, "append_placeholders", last)
        with pytest.raises(KeyboardInterrupt):
            make(local_db, calls)
        dying(monkeypatch, "create_view_table", last + 1)
        with pytest.raises(KeyboardInterrupt):
            make(local_db, calls)
    source.add(numbers(3, 5))
    view = make(local_db, calls, 10)
    view.refresh()
    assert shown(view) == [0, 10, 20, 30, 40]
    assert sorted(calls.taken()) == [0, 1, 2, 3, 4]
    with pytest.raises(UserInputError, match="There is a table or view 'v' already"):
        make(local_db, calls)
    assert view.plan_refresh().is_empty


def dying(monkeypatch: pytest.MonkeyPatch, name: str, nth: int) -> None:
    """Let the process end before a function is called for the n-th time from now on."""
    real, called = getattr(create, name), 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal called
        called += 1
        if called == nth:
            monkeypatch.setattr(create, name, real)
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(create, name, call)


@pytest.mark.parametrize("make", [chunks, sums])
def test_of_two_that_create_a_view_at_once_one_does(
    local_db: Connection, calls: Calls, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_source(local_db, rows=3)
    real = create.append_placeholders

    def overtaken(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(create, "append_placeholders", real)
        make(local_db, calls, 10)
        return real(*args, **options)

    monkeypatch.setattr(create, "append_placeholders", overtaken)
    with pytest.raises((TableChangedError, UserInputError), match="'v'"):
        make(local_db, calls)
    view = local_db.open_table("v")
    assert isinstance(view, MaterializedView)
    view.refresh()
    assert shown(view) == [0, 10, 20]
    assert sorted(calls.taken()) == [0, 1, 2]

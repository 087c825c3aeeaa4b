"""A source, or a view, that others replace after a refresh was planned, or while a view is made.

The other table has the same name, versions and row ids, and other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from geneva import Connection, Table, chunker, udtf
from geneva.errors import TableNotFoundError, UserInputError
from geneva.execution.refresh import create, partitions, run
from geneva.storage.lance import source_rows
from geneva.storage.lance.dataset import open_pinned
from geneva.view import MaterializedView
from support import Calls
from view_support import STABLE, make_source, make_view, numbers, values

ANEW = "'src' was dropped and made anew"


@chunker(output_schema=pa.schema([("letter", pa.string())]))
def letters(name: str) -> Iterator[dict[str, Any]]:
    for letter in name:
        yield {"letter": letter}


@udtf(output_schema=pa.schema([("sum", pa.int64())]), partition_by="name", input_columns=["id"])
def sums(rows: Any) -> Iterator[dict[str, Any]]:
    yield {"sum": sum(rows.to_arrow()["id"].to_pylist())}


def plain_view(db: Connection, source: Table, calls: Calls) -> MaterializedView:
    return make_view(db, source, calls)


def chunked_view(db: Connection, source: Table, calls: Calls) -> MaterializedView:
    return db.create_udtf_view("v", source.query().select(["id"]), letters)


def table_function_view(db: Connection, source: Table, calls: Calls) -> MaterializedView:
    return db.create_udtf_view("v", source, sums)


def replace_source(db: Connection, *, refreshed: bool) -> None:
    """Make another table, of the same versions, in the place of the source."""
    db.drop_table("src")
    source = db.create_table("src", numbers(100, 110), storage_options=STABLE)
    if refreshed:
        source.add(numbers(110, 112))
    # As in workers that have not opened the first one.
    open_pinned.cache_clear()
    source_rows._reader.cache_clear()


def first_call(
    patched: pytest.MonkeyPatch, owner: Any, name: str, before: Callable[[], None]
) -> None:
    """Do something before the first call of a function."""
    real, called = getattr(owner, name), list[bool]()

    def calling(*args: Any, **kwargs: Any) -> Any:
        if not called:
            called.append(True)
            before()
        return real(*args, **kwargs)

    patched.setattr(owner, name, calling)


@pytest.mark.parametrize("refreshed", [False, True])
@pytest.mark.parametrize(
    ("make", "owner", "moment"),
    [
        (plain_view, run, "run_refresh"),
        (plain_view, run, "run_side_by_side"),
        (plain_view, run, "commit_refreshed"),
        (chunked_view, run, "run_refresh"),
        (chunked_view, run, "commit_refreshed"),
        (table_function_view, run, "run_refresh"),
        (table_function_view, run, "commit_refreshed"),
        (table_function_view, partitions, "drop_partitions"),
    ],
)
def test_a_source_that_is_replaced_after_the_plan_is_refused(
    local_db: Connection,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Connection, Table, Calls], MaterializedView],
    owner: Any,
    moment: str,
    refreshed: bool,
) -> None:
    source = make_source(local_db)
    view = make(local_db, source, calls)
    if refreshed:
        view.refresh()
        source.add(numbers(10, 12))
    with monkeypatch.context() as patched:
        first_call(patched, owner, moment, lambda: replace_source(local_db, refreshed=refreshed))
        with pytest.raises(UserInputError, match=ANEW):
            view.refresh()
    if refreshed or moment != "run_refresh":
        for again in (view.plan_refresh, view.refresh):
            with pytest.raises(UserInputError, match=ANEW):
                again()
    else:  # nothing was read of the first one
        view.refresh()
        assert view.plan_refresh().is_empty


def test_a_view_that_was_never_refreshed_follows_the_new_source(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = make_view(local_db, make_source(local_db), calls)
    with monkeypatch.context() as patched:
        first_call(patched, run, "run_refresh", lambda: replace_source(local_db, refreshed=False))
        with pytest.raises(UserInputError, match=ANEW):
            view.refresh()
    assert calls.count == 0
    view.refresh()
    assert values(view) == {i: 3 * i for i in range(100, 110, 2)}


@pytest.mark.parametrize("note", ["", "n" * 1_000])
def test_a_source_that_is_replaced_while_a_view_of_it_is_made(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch, note: str
) -> None:
    """Its placeholders are of the first one: they are not taken for the second one's rows.

    Nor is it an error that a commit of the second one, of another size, is in the first one's
    place.
    """
    first = numbers(0, 20)
    local_db.create_table("src", first.replace_schema_metadata({"n": note}), storage_options=STABLE)
    source, real = local_db.open_table("src"), create.read_row_ids

    def replacing(*args: Any) -> Any:
        rows = real(*args)
        local_db.drop_table("src")
        local_db.create_table("src", numbers(100, 120), storage_options=STABLE)
        return rows

    with monkeypatch.context() as patched:
        patched.setattr(create, "read_row_ids", replacing)
        view = make_view(local_db, source, calls)
    view.refresh()
    assert values(view) == {i: 3 * i for i in range(100, 120, 2)}
    assert view.plan_refresh().is_empty


def test_a_view_that_is_replaced_after_the_plan_is_left_alone(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(local_db)
    view = make_view(local_db, source, calls)
    view.refresh()
    before = source.version
    source.add(numbers(10, 12))

    def replacing() -> None:
        local_db.drop_table("v")
        query = source.query().where("id < 3").select(["id"])
        local_db.create_materialized_view("v", query).refresh(src_version=before)

    with monkeypatch.context() as patched:
        first_call(patched, run, "run_refresh", replacing)
        with pytest.raises(TableNotFoundError, match="'v' was dropped"):
            view.refresh()
    assert sorted(local_db.open_table("v").to_arrow()["id"].to_pylist()) == [0, 1, 2]

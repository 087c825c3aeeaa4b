"""What planning costs, in calls of functions: it grows with the table, and no faster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import Connection, Table, udf
from support import Calls, make_table, tripled


@udf(data_type=pa.int64())
def same(x: pa.Array) -> pa.Array:
    return x


@udf(data_type=pa.int64())
def first(batch: pa.RecordBatch) -> pa.Array:
    return batch.column(0)


def calls_of(action: Callable[[], Any]) -> int:
    """How many functions of Python's are called by an action, in this thread."""
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def growth(costs: list[int]) -> float:
    """What each of the last items adds, over what the first ones did; sizes are 1, 2 and 4."""
    return (costs[2] - costs[1]) / 2 / (costs[1] - costs[0])


@contextmanager
def counting_opens(monkeypatch: pytest.MonkeyPatch, uri: str) -> Iterator[list[str]]:
    """Collect each opening of a table."""
    opened: list[str] = []
    plain = lance.LanceDataset.__init__

    def opening(self: Any, path: Any, *args: Any, **options: Any) -> None:
        if str(path) == uri:
            opened.append(uri)
        plain(self, path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(lance.LanceDataset, "__init__", opening)
        yield opened


def _chain(db: Connection, length: int) -> Callable[[], Any]:
    table = make_table(db, [2], f"chain{length}")
    names = ["id", *(f"y{i}" for i in range(length))]
    for before, name in pairwise(names):
        table.add_columns({name: (same, [before])})
    return lambda: table.plan_backfill(names[-1])


def _fan(db: Connection, width: int) -> Callable[[], Any]:
    table = make_table(db, [2], f"fan{width}")
    names = [f"y{i}" for i in range(width)]
    table.add_columns({name: (same, ["id"]) for name in names})
    table.add_columns({"z": (first, names)})
    return lambda: table.plan_backfill("z")


@pytest.mark.parametrize("shape", [_chain, _fan])
def test_planning_grows_with_the_columns(
    local_db: Connection, shape: Callable[[Connection, int], Callable[[], Any]]
) -> None:
    shape(local_db, 3)()
    costs = [calls_of(shape(local_db, columns)) for columns in (6, 12, 24)]
    assert growth(costs) < 1.2, costs


def _right(db: Connection, calls: Calls, fragments: int) -> Table:
    table = make_table(db, [2] * fragments, f"right{fragments}")
    table.add_columns({"y": tripled(calls)})
    table.backfill("y")
    return table


def test_nothing_to_do_is_a_look_at_the_manifest(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _right(local_db, calls, 1).backfill("y")
    tables = [_right(local_db, calls, fragments) for fragments in (8, 16, 32)]
    calls.clear()
    costs = [calls_of(lambda table=table: table.backfill("y")) for table in tables]
    assert growth(costs) < 1.1, costs
    assert (costs[2] - costs[1]) / 16 < 75, "calls for each fragment"
    with counting_opens(monkeypatch, tables[0].ref.uri) as opened:
        tables[0].backfill("y")
    assert len(opened) == 1
    assert calls.count == 0

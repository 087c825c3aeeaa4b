"""Random histories of a source and views of table functions, against a plain Python group-by.

After each refresh every view has the rows that grouping the source here gives, and the function was
called for just the partitions whose rows are others than when it was last called for them.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import Connection, Table, udtf
from geneva.execution.refresh import explode, partitions, run
from geneva.storage.columns import publish
from geneva.view import MaterializedView
from support import Calls
from view_support import STABLE

CUSTOMERS = ["ann", "bob", "", "Ann", "o'neil", 'q"uote', None]
REGIONS = [0.0, -0.0, float("nan"), 1.5, None]
OUT = pa.schema([("key", pa.string()), ("ids", pa.list_(pa.int64())), ("sum", pa.int64())])


def key_of(row: dict[str, Any], by: tuple[str, ...]) -> str:
    """A partition's name, as a person would tell partitions apart."""
    values = [row[name] for name in by]
    return repr([0.0 if isinstance(v, float) and v == 0 else v for v in values])


def grouping(calls: Calls, by: tuple[str, ...], factor: int) -> Any:
    """A function of a partition that yields its ids and sum, and a second row for large sums."""

    def summed(source: Any) -> Iterator[pa.RecordBatch]:
        rows = source.to_list()
        key = key_of(rows[0], by) if rows else "[]"
        calls.note([key])
        yield from batches(key, rows, factor)

    return udtf(summed, output_schema=OUT, partition_by=list(by) or None, version=str(factor))


def batches(key: str, rows: list[dict[str, Any]], factor: int) -> Iterator[pa.RecordBatch]:
    ids = sorted(row["id"] for row in rows)
    total = sum(row["amount"] or 0 for row in rows) * factor
    made = [{"key": key, "ids": ids, "sum": total}]
    if total > 100:
        made.append({"key": key, "ids": [], "sum": -total})
    yield pa.RecordBatch.from_pylist(made, schema=OUT)


class World:
    """A source, views of table functions over it, and what they should be."""

    def __init__(self, db: Connection, calls: Calls, seed: int) -> None:
        self.db, self.calls, self.random = db, calls, random.Random(seed)
        self.next_id, self.factor = 0, 1
        rows = [self.row() for _ in range(30)]
        schema = pa.schema(
            [
                ("id", pa.int64()),
                ("customer", pa.string()),
                ("region", pa.float64()),
                ("amount", pa.int64()),
                ("note", pa.string()),
            ]
        )
        self.table: Table = db.create_table(
            "orders", pa.Table.from_pylist(rows, schema=schema), storage_options=STABLE
        )
        self.schema = schema
        self.by: dict[str, tuple[str, ...]] = {
            "one": ("customer",),
            "two": ("customer", "region"),
            "all": (),
            "few": ("region",),
        }
        query = self.table.query().where("amount >= 10 OR amount IS NULL")
        query = query.select(["id", "customer", "region", "amount"])
        for name, by in self.by.items():
            asked = query.limit(12).offset(2) if name == "few" else query
            db.create_udtf_view(name, source=asked, udtf=grouping(calls, by, 1))
        self.known: dict[str, dict[str, Any]] = {name: {} for name in self.by}
        self.cut_off: dict[str, set[str]] = {name: set() for name in self.by}

    def row(self) -> dict[str, Any]:
        pick = self.random
        self.next_id += 1
        return {
            "id": self.next_id,
            "customer": pick.choice(CUSTOMERS),
            "region": pick.choice(REGIONS),
            "amount": pick.choice([None, *range(0, 60, 5)]),
            "note": pick.choice(["x", "y"]),
        }

    # -- what happens

    def append(self) -> None:
        rows = [self.row() for _ in range(self.random.randint(1, 8))]
        self.table.add(pa.Table.from_pylist(rows, schema=self.schema))

    def upsert(self) -> None:
        rows = [{**self.row(), "id": i} for i in self.some_ids(4)]
        rows = list({row["id"]: row for row in rows}.values())
        merge = self.table.merge_insert("id").when_matched_update_all()
        merge.when_not_matched_insert_all().execute(pa.Table.from_pylist(rows, schema=self.schema))

    def move(self) -> None:
        for i in self.some_ids(2):
            customer = self.random.choice([c for c in CUSTOMERS if c is not None])
            self.table.update(where=f"id = {i}", values={"customer": customer})

    def change(self) -> None:
        for i in self.some_ids(2):
            self.table.update(where=f"id = {i}", values={"amount": self.random.randint(0, 60)})

    def change_what_is_not_read(self) -> None:
        self.table.update(where="id % 3 = 0", values={"note": self.random.choice(["x", "z"])})

    def delete(self) -> None:
        for i in self.some_ids(3):
            self.table.delete(f"id = {i}")

    def delete_partition(self) -> None:
        self.table.delete(f"customer = '{self.random.choice(['ann', 'bob', 'Ann'])}'")

    def come_back(self) -> None:
        """The same rows again, under other row ids."""
        rows = [row for row in self.rows() if row["customer"] == "bob"]
        self.table.delete("customer = 'bob'")
        if rows:
            self.table.add(pa.Table.from_pylist(rows, schema=self.schema))

    def compact(self) -> None:
        self.table.compact_files()

    def clean_up(self) -> None:
        lance.dataset(self.table.ref.uri).cleanup_old_versions(
            timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
        )

    def compact_view(self) -> None:
        self.view(self.random.choice([*self.by])).compact_files()

    def optimize_view(self) -> None:
        self.view(self.random.choice([*self.by])).optimize()

    def clean_view_up(self) -> None:
        self.view(self.random.choice([*self.by])).cleanup_old_versions(timedelta(0))

    def new_code(self) -> None:
        self.factor += 1
        for name, by in self.by.items():
            made = grouping(self.calls, by, self.factor)
            self.view(name).alter_columns({"path": "summed", "udf": made})
        self.known = {name: {} for name in self.by}

    def die(self) -> None:
        """A refresh whose driver dies when it is about to commit something."""
        name = self.random.choice([*self.by])
        self.calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*self.random.choice(STEPS), _fail)
            with suppress(OSError):
                self.view(name).refresh()
        self.cut_off[name].update(self.calls.taken())

    def refresh(self) -> None:
        for name in self.by:
            self.check(name)

    # -- what should be

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = lance.dataset(self.table.ref.uri).to_table().to_pylist()
        return rows

    def selected(self, name: str) -> list[dict[str, Any]]:
        """The rows that a view is of."""
        rows = lance.dataset(self.table.ref.uri).to_table(with_row_id=True).to_pylist()
        found = [row for row in rows if row["amount"] is None or row["amount"] >= 10]
        found.sort(key=lambda row: row["_rowid"])
        return found[2:14] if name == "few" else found

    def some_ids(self, most: int) -> list[int]:
        ids = [row["id"] for row in self.rows()] or [1]
        return self.random.choices(ids, k=self.random.randint(1, most))

    def view(self, name: str) -> MaterializedView:
        view = self.db.open_table(name)
        assert isinstance(view, MaterializedView)
        return view

    def check(self, name: str) -> None:
        by, view = self.by[name], self.view(name)
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self.selected(name):
            groups[key_of(row, by)].append(row)
        if not by:
            groups.setdefault("[]", [])
        now = {key: Counter(map(_seen, rows)) for key, rows in groups.items()}
        before = self.known[name]
        expected = sorted(key for key, content in now.items() if before.get(key) != content)
        self.calls.clear()
        planned = view.plan_refresh()
        view.refresh()
        called = self.calls.taken()
        assert len(set(called)) == len(called)
        # What a run that was cut off has computed need not be computed again.
        assert set(called) <= set(expected) <= {*called, *self.cut_off[name]}
        if not self.cut_off[name]:
            assert planned.rows_to_run == len(expected)
            assert planned.is_empty or planned.partitions is not None
        made = (b for key, rows in groups.items() for b in batches(key, rows, self.factor))
        wanted = [row for batch in made for row in batch.to_pylist()]
        assert sorted(map(repr, view.to_arrow().to_pylist())) == sorted(map(repr, wanted))
        self.known[name] = now
        self.cut_off[name] = set()


def _seen(row: dict[str, Any]) -> str:
    return repr({name: row[name] for name in ("id", "customer", "region", "amount")})


def _fail(*_: object, **__: object) -> int:
    raise OSError("the driver is gone")


STEPS: list[tuple[Any, str]] = [
    (publish, "_commit"),
    (partitions, "commit_partitions"),
    (partitions, "drop_partitions"),
    (partitions, "lay_out_changes"),
    (explode, "commit_chunks"),
    (explode, "commit_refreshed"),
    (run, "commit_refreshed"),
]
"""What publishes something, step by step."""

EVENTS = [
    *(World.append, World.upsert, World.move, World.change, World.change_what_is_not_read),
    *(World.delete, World.delete_partition, World.come_back, World.compact, World.clean_up),
    *(World.compact_view, World.optimize_view, World.clean_view_up, World.new_code, World.die),
    *(World.refresh, World.refresh, World.refresh),
]


def live(db: Connection, calls: Calls, seed: int, events: int) -> None:
    world = World(db, calls, seed)
    for _ in range(events):
        event = world.random.choice(EVENTS)
        event(world)
    world.refresh()


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_short_history(local_db: Connection, calls: Calls, seed: int) -> None:
    live(local_db, calls, seed, 6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 106))
def test_a_history(local_db: Connection, calls: Calls, seed: int) -> None:
    live(local_db, calls, seed, 40)

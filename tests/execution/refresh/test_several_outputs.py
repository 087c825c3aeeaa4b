"""Views with functions that fill several columns, and views of tables that have such columns."""

from __future__ import annotations

import random
from typing import NamedTuple

import lance
import pyarrow as pa
import pytest

from geneva import UDF, Columns, Connection, UnpackedUDF, udf
from geneva.errors import ColumnExistsError, InvalidUDFError, UserInputError
from support import Calls
from view_support import STABLE, make_source, numbers, values


class Size(NamedTuple):
    w: int
    h: int


def sizes(calls: Calls, by: int = 2) -> UDF:
    def size(id: int) -> Columns[Size]:
        calls.note([id])
        return Size(id * by, id * by + 1_000)

    return udf(size)


def expected(ids: list[int], by: int = 2) -> dict[int, int]:
    return {id: id * by + 1_000 for id in ids}


def test_a_view_fills_them_together(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db, rows=6)
    query = source.query().where("id % 2 = 0").select(["id", UnpackedUDF(sizes(calls), "s_")])
    assert query.schema.names == ["id", "s_w", "s_h"]
    assert query.to_arrow()["s_h"].to_pylist() == [1000, 1004, 1008]
    assert calls.taken() == [0, 2, 4], "a query calls it once per row, too"
    view = local_db.create_materialized_view("v", query)
    assert [c.name for c in view.plan_refresh().columns] == ["__carried", "s_w, s_h"]
    view.refresh()
    assert calls.taken() == [0, 2, 4]
    assert values(view, "s_w") == {0: 0, 2: 4, 4: 8}
    assert values(view, "s_h") == expected([0, 2, 4])
    source.add(numbers(6, 9))
    source.update(where="id = 2", values={"id": 20})
    source.delete("id = 0")
    view.refresh()
    assert calls.taken() == [6, 8, 20]
    assert values(view, "s_h") == expected([4, 6, 8, 20])
    assert view.verify("s_w", run=True).ok
    assert view.verify("s_h").ok
    calls.clear()
    view.refresh()
    assert calls.count == 0


def test_one_column_file_for_all(local_db: Connection, calls: Calls) -> None:
    view = make_source(local_db).query().select([sizes(calls)]).create_materialized_view("v")
    view.refresh()
    dataset = lance.dataset(view.ref.uri)
    ids = {f.name(): f.id() for f in dataset.lance_schema.fields()}
    for fragment in dataset.get_fragments():
        holding = [f for f in fragment.metadata.files if {ids["w"], ids["h"]} & set(f.fields)]
        assert len(holding) == 1


def test_some_of_them_are_enough(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db, rows=3)
    query = source.query().add_column(sizes(calls)).without(["w", "name"])
    view = local_db.create_materialized_view("v", query)
    assert view.schema.names == ["id", "h"]
    view.refresh()
    assert calls.taken() == [0, 1, 2]
    assert values(view, "h") == expected([0, 1, 2])


def test_another_function_for_all_of_them(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db, rows=3)
    view = source.query().select(["id", sizes(calls)]).create_materialized_view("v")
    view.refresh()
    calls.clear()
    view.alter_columns({"path": "w", "udf": sizes(calls, by=5)})
    view.refresh()
    assert calls.taken() == [0, 1, 2]
    assert values(view, "h") == expected([0, 1, 2], by=5)
    with pytest.raises(UserInputError, match="refresh"):
        view.backfill("h")


def test_a_view_carries_and_extends_them(local_db: Connection, calls: Calls) -> None:
    source = make_source(local_db, rows=4)
    source.add_columns(sizes(calls))
    source.backfill("w")
    view = local_db.create_materialized_view("v", source.query().select(["id", "h"]))
    view.refresh()
    assert values(view, "h") == expected([0, 1, 2, 3])
    calls.clear()
    view.add_columns(UnpackedUDF(sizes(calls, by=3), prefix="v_"))
    view.backfill("v_w")
    assert calls.taken() == [0, 1, 2, 3]
    source.update(where="id = 1", values={"id": 9})
    source.backfill("h")
    assert calls.taken() == [9]
    view.refresh()
    view.backfill("v_h")
    assert calls.taken() == [9]
    assert values(view, "h") == expected([0, 2, 3, 9])
    assert values(view, "v_h") == expected([0, 2, 3, 9], by=3)


def test_names_are_refused_that_are_taken(local_db: Connection, calls: Calls) -> None:
    query = make_source(local_db).query()
    with pytest.raises(ColumnExistsError, match="'w'"):
        query.add_column({"w": "id + 1"}).add_column(sizes(calls))
    with pytest.raises(InvalidUDFError, match="fills several: w, h"):
        query.select({"id": "id", "size": sizes(calls)})


class ViewHistory:
    """A source, a view of it with such a function, and which source rows were computed when."""

    def __init__(self, db: Connection, calls: Calls, seed: int) -> None:
        self.random, self.calls, self.by = random.Random(seed), calls, 2
        self.source = db.create_table(
            "src", pa.table({"key": [0, 1, 2], "id": [10, 11, 12]}), storage_options=STABLE
        )
        self.ids = {0: 10, 1: 11, 2: 12}
        query = self.source.query().where("id < 50").select(["key", sizes(calls)])
        self.view = db.create_materialized_view("v", query)
        self.computed: dict[int, tuple[int, int]] = {}
        """By key, the version of the function and the id that values are of."""

    def step(self) -> None:
        self.random.choice(
            [self.add, self.add, self.update, self.delete, self.compact, self.alter, self.refresh]
        )()

    def add(self) -> None:
        first = max(self.ids) + 1
        new = {key: self.random.randint(0, 60) for key in range(first, first + 3)}
        self.source.add(pa.table({"key": list(new), "id": list(new.values())}))
        self.ids |= new

    def update(self) -> None:
        key, new = self.random.choice(sorted(self.ids)), self.random.randint(0, 60)
        self.source.update(where=f"key = {key}", values={"id": new})
        self.ids[key] = new

    def delete(self) -> None:
        if len(self.ids) > 3:
            key = self.random.choice(sorted(self.ids))
            self.source.delete(f"key = {key}")
            del self.ids[key]

    def compact(self) -> None:
        self.random.choice([self.source, self.view]).compact_files()

    def alter(self) -> None:
        self.by += 1
        path = self.random.choice(["w", "h"])
        self.view.alter_columns({"path": path, "udf": sizes(self.calls, by=self.by)})

    def refresh(self) -> None:
        shown = {key: (self.by, id) for key, id in self.ids.items() if id < 50}
        called = [made[1] for key, made in shown.items() if self.computed.get(key) != made]
        self.view.refresh()
        assert self.calls.taken() == sorted(called)
        self.computed = shown
        rows = {row["key"]: (row["w"], row["h"]) for row in self.view.to_arrow().to_pylist()}
        assert rows == {k: (by * id, by * id + 1_000) for k, (by, id) in shown.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_history(local_db: Connection, calls: Calls, seed: int) -> None:
    history = ViewHistory(local_db, calls, seed)
    for _ in range(30):
        history.step()
    history.refresh()
    assert all(history.view.verify(name, run=True).ok for name in ("w", "h"))

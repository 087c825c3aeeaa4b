"""Random histories of columns that one call fills together, against a model that knows receipts.

After every backfill the values are compared, and the calls: which rows, each how often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import lance
import pyarrow as pa
import pytest
from lancedb.index import BTree

from geneva import UDF, Columns, Connection, Skip, udf
from geneva.storage.columns import publish
from support import Calls

OUTPUTS = ("a", "b", "c")
QUICK, SLOW, LONG = range(2), range(2, 12), range(12, 80)


class Made(NamedTuple):
    a: int | None
    b: int | None
    c: int | None


class Failed(Exception):
    """The function could not do it."""


def result(version: int, x: int) -> dict[str, int | None] | None:
    """What a version of the function gives; raises Failed for some rows."""
    if x % 7 == 3:
        raise Failed
    if x % 5 == 4:
        return None
    made: dict[str, int | None] = {o: version * 10_000 + x * 10 + i for i, o in enumerate(OUTPUTS)}
    if x % 3 == 0:
        made["b"] = None
    return made


def made_by(version: int, calls: Calls) -> UDF:
    def several(x: int) -> Columns[Made] | None:
        calls.note([x])
        made = result(version, x)
        return None if made is None else Made(**made)

    return udf(several, version=str(version), on_error=[Skip()])


def successor(calls: Calls) -> UDF:
    def after(b: int | None) -> int | None:
        calls.note([b])
        return None if b is None else b + 1

    return udf(after, version="1")


@dataclass(frozen=True)
class Receipt:
    """What a cell was made from, and what it was then."""

    version: str
    inputs: tuple[Any, ...]
    value: Any
    failed: bool = False


@dataclass
class Cell:
    value: Any = None
    receipt: Receipt | None = None


@dataclass
class Row:
    x: int
    cells: dict[str, Cell] = field(default_factory=dict)
    """By output."""

    def cell(self, output: str) -> Cell:
        return self.cells.setdefault(output, Cell())


@dataclass
class Model:
    """What the table should be."""

    rows: dict[int, Row] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=lambda: {o: o for o in OUTPUTS})
    """The columns that are there, by output, and what they are called."""
    version: int = 1
    kept: set[str] = field(default_factory=set)

    def need(self, row: Row, output: str, inputs: tuple[Any, ...], version: str) -> str:
        """What a backfill does about a cell."""
        cell = row.cell(output)
        kept = self.kept if output in OUTPUTS else set()
        if cell.receipt is None:
            return "adopt" if cell.value is not None else "compute"
        fits = cell.receipt.inputs == inputs and cell.receipt.version == version
        is_kept = cell.receipt.inputs == inputs and cell.receipt.version in kept
        if cell.receipt.failed and cell.value is None:
            return "failed" if fits else "compute"
        if cell.value != cell.receipt.value or cell.receipt.failed:
            return "adopt" if cell.value is not None else "compute"
        return "right" if fits or is_kept else "compute"

    def backfill(self, selected: set[int] | None) -> list[int]:
        """Fill the group; return what the function is called with."""
        called = []
        for key, row in self.rows.items():
            needs = {o: self.need(row, o, (row.x,), str(self.version)) for o in self.names}
            if selected is not None:
                needs = dict.fromkeys(self.names, "compute" if key in selected else "right")
            calls = "compute" in needs.values()
            if calls:
                called.append(row.x)
            for output, need in needs.items():
                self._fill(row, output, need, calls=calls)
        return sorted(called)

    def _fill(self, row: Row, output: str, need: str, *, calls: bool) -> None:
        cell, receipt = row.cell(output), Receipt(str(self.version), (row.x,), None)
        if need == "adopt":
            cell.receipt = replace(receipt, value=cell.value)
        elif calls and need in ("compute", "failed"):
            try:
                made = result(self.version, row.x)
            except Failed:
                cell.value, cell.receipt = None, replace(receipt, failed=True)
            else:
                cell.value = None if made is None else made[output]
                cell.receipt = replace(receipt, value=cell.value)

    def backfill_after(self) -> list[Any]:
        """Fill the column that reads one of the group's; return what it is called with."""
        called = []
        for row in self.rows.values():
            b, cell = row.cell("b").value, row.cell("after")
            need = self.need(row, "after", (b,), "1")
            if need == "compute":
                called.append(b)
                cell.value = None if b is None else b + 1
            if need in ("compute", "adopt"):
                cell.receipt = Receipt("1", (b,), cell.value)
        return sorted(called, key=lambda v: (v is None, v))


class History:
    """A table and its model, and random things that happen to both."""

    def __init__(self, db: Connection, calls: Calls, seed: int) -> None:
        self.random = random.Random(seed)
        self.model, self.calls, self.after = Model(), calls, Calls(f"{calls.path}-after")
        uri = f"{db.uri}/t.lance"
        stable = bool(seed % 2)
        data = pa.table({"k": pa.array([0, 1, 2]), "x": pa.array([10, 11, 12])})
        storage = ("2.2", "2.1", "2.0")[seed // 2 % 3]
        lance.write_dataset(data, uri, enable_stable_row_ids=stable, data_storage_version=storage)
        self.model.rows = {k: Row(x) for k, x in ((0, 10), (1, 11), (2, 12))}
        self.table = db.open_table("t")
        self.table.add_columns(made_by(1, calls))
        self.table.add_columns({"after": successor(self.after)})
        if seed % 3:
            self.table.create_index("k", config=BTree())
        self.next = 3
        self.done: list[str] = []

    def steps(self, count: int) -> None:
        acts = [
            *(self.append, self.append, self.change, self.upsert, self.correct, self.delete),
            *(self.compact, self.drop, self.add_again, self.rename, self.alter),
            *(self.backfill, self.backfill, self.backfill, self.die, self.where),
            self.backfill_after,
        ]
        for _ in range(count):
            act = self.random.choice(acts)
            self.done.append(act.__name__)
            act()
        self.backfill()
        self.backfill_after()
        for name in self.model.names.values():
            assert self.table.verify(name).ok

    # ------------------------------------------------------------------------------- writes

    def keys(self, most: int = 3) -> list[int]:
        every = sorted(self.model.rows)
        return self.random.sample(every, min(len(every), self.random.randint(1, most)))

    def supplied(self, keys: list[int]) -> dict[str, list[Any]]:
        """Values of some outputs that a person gives, by output."""
        outputs = [o for o in self.model.names if self.random.random() < 0.4]
        return {o: [self.random.choice([None, -k - 1]) for k in keys] for o in outputs}

    def append(self) -> None:
        keys = list(range(self.next, self.next + self.random.randint(1, 4)))
        self.next = keys[-1] + 1
        xs = [self.random.randint(0, 30) for _ in keys]
        given = self.supplied(keys) if self.random.random() < 0.4 else {}
        columns = {self.model.names[o]: pa.array(v, pa.int64()) for o, v in given.items()}
        self.table.add(pa.table({"k": keys, "x": xs, **columns}))
        for i, (key, x) in enumerate(zip(keys, xs, strict=True)):
            self.model.rows[key] = Row(x, {o: Cell(v[i]) for o, v in given.items()})

    def change(self) -> None:
        (key,) = self.keys(1)
        x = self.random.randint(0, 30)
        self.table.update(where=f"k = {key}", values={"x": x})
        self.model.rows[key].x = x

    def correct(self) -> None:
        (key,) = self.keys(1)
        output = self.random.choice(list(self.model.names))
        value = self.random.choice([None, -100 - key])
        sql = "CAST(NULL AS BIGINT)" if value is None else str(value)
        self.table.update(where=f"k = {key}", values_sql={self.model.names[output]: sql})
        self.model.rows[key].cell(output).value = value

    def upsert(self) -> None:
        keys = self.keys()
        given = self.supplied(keys)
        columns = {self.model.names[o]: pa.array(v, pa.int64()) for o, v in given.items()}
        if self.random.random() < 0.5 or not columns:
            xs = [self.random.randint(0, 30) for _ in keys]
            columns["x"] = pa.array(xs)
            for key, x in zip(keys, xs, strict=True):
                self.model.rows[key].x = x
        new = pa.table({"k": keys, **columns})
        self.table.merge_insert("k").when_matched_update_all().execute(new)
        for output, values in given.items():
            for key, value in zip(keys, values, strict=True):
                self.model.rows[key].cell(output).value = value

    def delete(self) -> None:
        if len(self.model.rows) < 4:
            return
        (key,) = self.keys(1)
        self.table.delete(f"k = {key}")
        del self.model.rows[key]

    def compact(self) -> None:
        self.table.compact_files()

    # ------------------------------------------------------------------------------ columns

    def drop(self) -> None:
        outputs = [o for o in self.model.names if o != "b"]  # another column reads that
        if outputs:
            output = self.random.choice(outputs)
            self.table.drop_columns(self.model.names.pop(output))
            for row in self.model.rows.values():
                row.cells.pop(output, None)

    def add_again(self) -> None:
        if len(self.model.names) < len(OUTPUTS):
            self.table.add_columns(made_by(self.model.version, self.calls))
            for output in OUTPUTS:
                self.model.names.setdefault(output, output)

    def rename(self) -> None:
        outputs = [o for o in self.model.names if o != "b" and self.model.names[o] == o]
        if outputs:
            output = self.random.choice(outputs)
            self.table.alter_columns({"path": output, "rename": f"{output}_{self.next}"})
            self.model.names[output] = f"{output}_{self.next}"

    def alter(self) -> None:
        before, self.model.version = self.model.version, self.model.version + 1
        path = self.random.choice(list(self.model.names.values()))
        change = {"path": path, "udf": made_by(self.model.version, self.calls)}
        if self.random.random() < 0.4:
            self.table.alter_columns({**change, "keep": "computed"})
            # What was stale until now stays so.
            self.model.kept |= {str(before)}
        else:
            self.table.alter_columns(change)
            self.model.kept = set()

    # ----------------------------------------------------------------------------- backfills

    def asked(self) -> str:
        return self.random.choice(list(self.model.names.values()))

    def backfill(self) -> None:
        expected = self.model.backfill(None)
        self.table.backfill(self.asked())
        self.check(expected)

    def where(self) -> None:
        most = self.random.randint(0, 30)
        selected = {k for k, row in self.model.rows.items() if row.x < most}
        expected = self.model.backfill(selected)
        self.table.backfill(self.asked(), where=f"x < {most}")
        self.check(expected)

    def die(self) -> None:
        """A job that computes and stages everything, and can't commit; then another one."""
        expected = self.model.backfill(None)
        with unpublished(), suppress(_Gone):
            self.table.backfill(self.asked(), checkpoint_size=2)
        xs = [row.x for row in self.model.rows.values()]
        if self.random.random() < 0.3 and len(set(xs)) == len(xs):
            # With equal inputs nobody knows which results have been given out by then.
            self.table.compact_files()
        self.table.backfill(self.asked())
        self.check(expected)

    def backfill_after(self) -> None:
        expected = self.model.backfill(None)
        called = self.model.backfill_after()
        self.table.backfill("after")
        self.check(expected)
        assert self.after.taken() == called

    def check(self, expected: list[int]) -> None:
        found = self.calls.taken()
        assert found == expected, (self.done, found, expected)
        names = self.model.names
        data = lance.dataset(self.table.ref.uri).to_table()
        stored = {row["k"]: row for row in data.to_pylist()}
        assert stored.keys() == self.model.rows.keys()
        for key, row in self.model.rows.items():
            own = {o: stored[key][name] for o, name in names.items()}
            assert own == {o: row.cell(o).value for o in names}, (self.done, key, row)


class _Gone(OSError):
    """The driver died."""


@contextmanager
def unpublished() -> Iterator[None]:
    """Let no commit of values land."""

    def fail(*_: object, **__: object) -> int:
        raise _Gone

    plain, publish._commit = publish._commit, fail
    try:
        yield
    finally:
        publish._commit = plain


@pytest.mark.parametrize("seed", QUICK)
def test_a_history(local_db: Connection, calls: Calls, seed: int) -> None:
    History(local_db, calls, seed).steps(12)


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW),
        *(pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.long]) for seed in LONG),
    ],
)
def test_longer_histories(local_db: Connection, calls: Calls, seed: int) -> None:
    History(local_db, calls, seed).steps(30)

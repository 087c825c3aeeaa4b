"""Any table, any history: a backfill gives what a plain loop gives, and calls no row twice.

A model (a dict of rows) goes through the same steps as the table. Whatever the layout, the storage
version, the sizes and what earlier runs left behind, values and the exact number of calls must
agree with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geneva import UDF, Table
from geneva.errors import UDFExecutionError
from geneva.execution.runner import InProcessRunner
from support import Calls, connect, counted, make_table, uncommitted

# -------------------------------------------------------------------------------- the functions

Function = Callable[[int], Any]

VALUES: dict[str, tuple[pa.DataType, Function]] = {
    "int": (pa.int64(), lambda id: id * 3),
    "some null": (pa.int32(), lambda id: None if id % 3 == 0 else id),
    "text": (pa.string(), lambda id: "x" * (id % 5)),
    "vector": (pa.list_(pa.float32(), 2), lambda id: [float(id), 0.5]),
    "list": (pa.list_(pa.int64()), lambda id: None if id % 4 == 0 else list(range(id % 3))),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        lambda id: {"a": id, "b": None if id % 2 else "b"},
    ),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), lambda id: "rgb"[id % 3]),
    "bool": (pa.bool_(), lambda id: id % 2 == 0),
}


def make_udf(calls: Calls, value: str, kind: str, broken: Path) -> UDF:
    """A counted UDF of the given kind, which raises on the ids that the file `broken` lists."""
    data_type, function = VALUES[value]
    path = str(broken)

    def one(id: int) -> Any:
        if Path(path).exists() and id in json.loads(Path(path).read_text()):
            raise ValueError(f"can't do {id}")
        return function(id)

    def arrays(id: pa.Array) -> list[Any]:
        return [one(i) for i in id.to_pylist()]

    def batches(batch: pa.RecordBatch) -> list[Any]:
        return [one(i) for i in batch["id"].to_pylist()]

    shapes: dict[str, Callable[..., Any]] = {"scalar": one, "array": arrays, "batch": batches}
    inputs = {"input_columns": ["id"]} if kind == "batch" else {}
    return counted(calls, shapes[kind], data_type=data_type, version="1", **inputs)


# --------------------------------------------------------------------------------- the tables

SIZES = st.fixed_dictionaries(
    {},
    optional={
        "checkpoint_size": st.integers(1, 12),
        "task_size": st.integers(1, 30),
        "commit_granularity": st.integers(1, 4),
        "concurrency": st.integers(1, 3),
        "intra_applier_concurrency": st.integers(1, 3),
        "task_shuffle_diversity": st.integers(0, 4),
        "max_checkpoint_size": st.integers(1, 9),
        "batch_checkpoint_flush_interval_seconds": st.just(0.0),
    },
)
CLAUSES: dict[str, Callable[[int], bool]] = {
    "id % 2 = 1": lambda id: id % 2 == 1,
    "id < 7": lambda id: id < 7,
    "id IN (3, 11, 17)": lambda id: id in (3, 11, 17),
    "true": lambda id: True,
    "id < 0": lambda id: False,
}


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    fragments = draw(st.lists(st.integers(1, 18), min_size=1, max_size=4))
    rows = sum(fragments)
    version = draw(st.sampled_from(["2.0", "2.1", "2.2"]))
    kinds = sorted(VALUES if version != "2.0" else VALUES.keys() - {"struct"})
    return {
        "fragments": fragments,
        "deleted": draw(st.sets(st.integers(0, rows - 1), max_size=rows)),
        "storage_version": version,
        "stable_row_ids": draw(st.booleans()),
        "value": draw(st.sampled_from(kinds)),
        "kind": draw(st.sampled_from(["scalar", "array", "batch"])),
    }


class Model:
    """A table, and what its rows ought to be."""

    def __init__(self, folder: Path, layout: dict[str, Any]) -> None:
        self.calls = Calls(str(folder / "calls"))
        self.broken = folder / "broken"
        self.function = VALUES[layout["value"]][1]
        self.next_id = sum(layout["fragments"])
        self.rows: dict[int, Any] = dict.fromkeys(range(self.next_id))
        self.done: set[int] = set()
        self.table: Table = make_table(
            connect(folder / "db", InProcessRunner),
            layout["fragments"],
            storage_version=layout["storage_version"],
            stable_row_ids=layout["stable_row_ids"],
        )
        self.table.add_columns(
            {"x": make_udf(self.calls, layout["value"], layout["kind"], self.broken)}
        )
        self.delete(layout["deleted"])

    def delete(self, ids: set[int]) -> None:
        if ids:
            self.table.delete(f"id IN ({', '.join(map(str, sorted(ids)))})")
        for id in ids:
            self.rows.pop(id, None)
            self.done.discard(id)

    def append(self, count: int) -> None:
        ids = list(range(self.next_id, self.next_id + count))
        self.table.add(pa.table({"id": pa.array(ids, pa.int64())}))
        self.rows.update(dict.fromkeys(ids))
        self.next_id += count

    def wanted(self, where: str | None) -> list[int]:
        if where is None:
            return sorted(set(self.rows) - self.done)
        return sorted(id for id in self.rows if CLAUSES[where](id))

    def backfill(self, where: str | None, sizes: dict[str, Any]) -> None:
        """Run to the end; every wanted row is called for once, no other at all."""
        wanted = self.wanted(where)
        assert self.table.plan_backfill("x", where=where).rows_to_run == len(wanted)
        result = self.table.backfill("x", where=where, **sizes)
        assert self.calls.taken() == wanted
        assert result.rows_computed == result.rows_committed == len(wanted)
        self.computed(wanted)

    def computed(self, ids: list[int]) -> None:
        self.done.update(ids)
        self.rows.update({id: self.function(id) for id in ids})

    def check(self) -> None:
        found = self.table.to_lance().to_table(columns=["id", "x"])
        values = dict(zip(*(c.to_pylist() for c in found.columns), strict=True))
        assert values.keys() == self.rows.keys()
        for id, value in values.items():
            if id in self.done:
                assert value == self.rows[id], f"row {id}"
            else:
                assert value is None, f"row {id} was never computed"
        self.table.to_lance().validate()


# --------------------------------------------------------------------------------- the histories


@pytest.mark.slow
@given(layouts(), st.one_of(st.none(), st.sampled_from(sorted(CLAUSES))), SIZES, SIZES)
def test_one_backfill(
    tmp_path_factory: pytest.TempPathFactory,
    layout: dict[str, Any],
    where: str | None,
    sizes: dict[str, Any],
    later: dict[str, Any],
) -> None:
    model = Model(tmp_path_factory.mktemp("layout"), layout)
    model.backfill(where, sizes)
    model.check()
    model.backfill(None, later)
    model.check()
    assert model.table.plan_backfill("x").is_empty


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("backfill"), st.none(), SIZES),
        st.tuples(st.just("backfill"), st.sampled_from(sorted(CLAUSES)), SIZES),
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("delete"), st.sets(st.integers(0, 40), max_size=6)),
    ),
    min_size=2,
    max_size=6,
)


@pytest.mark.slow
@given(layouts(), STEPS)
def test_any_history(
    tmp_path_factory: pytest.TempPathFactory, layout: dict[str, Any], steps: list[Any]
) -> None:
    model = Model(tmp_path_factory.mktemp("history"), layout)
    for name, *arguments in steps:
        getattr(model, name)(*arguments)
        model.check()
    model.backfill(None, {})
    model.check()


@pytest.mark.slow
@given(layouts(), SIZES, SIZES, st.data())
def test_after_a_failing_function(
    tmp_path_factory: pytest.TempPathFactory,
    layout: dict[str, Any],
    sizes: dict[str, Any],
    later: dict[str, Any],
    data: st.DataObject,
) -> None:
    """What the plan promises after a failure is what runs, whatever was saved and committed."""
    model = Model(tmp_path_factory.mktemp("failure"), layout)
    if not model.rows:
        return
    bad = data.draw(st.sampled_from(sorted(model.rows)))
    model.broken.write_text(json.dumps([bad]))
    with pytest.raises(UDFExecutionError, match=f"can't do {bad}"):
        model.table.backfill("x", **sizes)
    called = model.calls.taken()
    assert called == sorted(set(called)), "no row twice, even though it failed"
    committed = column_by_id(model.table)
    model.broken.unlink()
    plan = model.table.plan_backfill("x")
    assert plan.rows_to_run >= len(model.rows) - len(called) + 1
    result = model.table.backfill("x", **later)
    again = model.calls.taken()
    assert bad in again
    assert len(again) == plan.rows_to_run == result.rows_computed
    assert again == sorted(set(again))
    assert set(called) | set(again) == set(model.rows)
    saved = {id for id, value in committed.items() if value is not None}
    assert not saved & set(again), "what was committed is not computed again"
    model.computed(sorted(model.rows))
    model.check()


@pytest.mark.slow
@given(layouts(), st.one_of(st.none(), st.sampled_from(sorted(CLAUSES))), SIZES, SIZES)
@settings(max_examples=15)
def test_after_a_driver_that_died(
    tmp_path_factory: pytest.TempPathFactory,
    layout: dict[str, Any],
    where: str | None,
    sizes: dict[str, Any],
    later: dict[str, Any],
) -> None:
    """Computed and staged, but never committed: the next run takes what was saved, and no more."""
    model = Model(tmp_path_factory.mktemp("crash"), layout)
    wanted = model.wanted(where)
    sizes.pop("commit_granularity", None)  # the first commit fails: let it be the last
    if wanted:
        with pytest.MonkeyPatch.context() as patch, uncommitted(patch):
            model.table.backfill("x", where=where, **sizes)
        assert model.calls.taken() == wanted
    plan = model.table.plan_backfill("x", where=where)
    if "checkpoint_size" in sizes:
        assert plan.rows_to_run == 0, "an explicit checkpoint size saves everything"
    result = model.table.backfill("x", where=where, **later)
    again = model.calls.taken()
    assert len(again) == plan.rows_to_run == result.rows_computed
    assert set(again) <= set(wanted)
    assert result.rows_committed == len(wanted)
    model.computed(wanted)
    model.check()
    model.backfill(None, {})
    model.check()


@pytest.mark.slow
@given(layouts(), SIZES, st.data())
@settings(max_examples=15)
def test_after_compaction_nothing_runs_again(
    tmp_path_factory: pytest.TempPathFactory,
    layout: dict[str, Any],
    sizes: dict[str, Any],
    data: st.DataObject,
) -> None:
    model = Model(tmp_path_factory.mktemp("compaction"), layout)
    model.backfill(data.draw(st.one_of(st.none(), st.sampled_from(sorted(CLAUSES)))), sizes)
    model.table.compact_files()
    model.check()
    model.backfill(None, sizes)
    model.check()


def column_by_id(table: Table) -> dict[int, Any]:
    found = table.to_lance().to_table(columns=["id", "x"])
    return dict(zip(*(c.to_pylist() for c in found.columns), strict=True))


def test_the_model_is_not_blind(tmp_path: Path) -> None:
    """A wrong value must be noticed, or all of the above means nothing."""
    layout = {
        "fragments": [3],
        "deleted": set(),
        "storage_version": "2.2",
        "stable_row_ids": False,
        "value": "int",
        "kind": "scalar",
    }
    model = Model(tmp_path, layout)
    model.backfill(None, {})
    model.table.update(where="id = 1", values={"x": 5})
    with pytest.raises(AssertionError, match="row 1"):
        model.check()
    assert pc.sum(model.table.to_arrow()["x"]).as_py() == 11

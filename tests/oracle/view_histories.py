"""Random histories of a materialized view: its source changes in every way, then it is refreshed.

The rule is the one of tables, with the values of the source: a row of a view costs a call when it
comes, when an input of it has another value than it was computed from, and when the function is
another one. Nothing that happens to versions, files or indexes costs any.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import lancedb

from geneva import MaterializedView
from oracle.functions import (
    Call,
    Function,
    Recorder,
    canonical,
    evaluate,
    make_udf,
    plain,
)
from oracle.histories import Draw, Failure, History, applicable
from oracle.model import Column, Mismatch, Value, call_of, new_row
from oracle.world import Backfill, Restore, Setup, Step, World, dying_commits
from oracle.writes import (
    Alter,
    Append,
    Cleanup,
    Compact,
    Delete,
    Index,
    Optimize,
    Update,
    Upsert,
    selecting,
)

_OF_SOURCE = (Append, Delete, Update, Upsert, Index, Alter, Cleanup, Compact, Optimize, Restore)

VIEW = "view"
FILTER = "y % 4 != 3"


@dataclass(frozen=True)
class Refresh:
    """Bring the view up to date; `dies` lets its commits fail first."""

    dies: bool = False


@dataclass(frozen=True)
class AlterView:
    """A column of the view's own gets another version of its function."""

    role: str
    factor: int


@dataclass(frozen=True)
class TidyView:
    """Somebody compacts the view and cleans up its versions."""

    compact: bool


@dataclass(frozen=True)
class WriteView:
    """Somebody writes a value, or NULL, into a computed column of the view."""

    ids: tuple[int, ...]
    role: str
    value: Value


ViewStep = Step | Refresh | AlterView | TidyView | WriteView


class ViewWorld:
    """A source with its model, a view, and what each row of the view was computed from."""

    def __init__(self, path: Path, setup: Setup, recorder: Recorder, *, filtered: bool) -> None:
        self.source = World(path, setup, recorder)
        self.recorder, self.filtered = recorder, filtered
        self.columns = {
            "v": Column("v", Function("tens"), ("a",)),
            "t": Column("t", Function("text"), ("x", "y")),
        }
        self.known: dict[tuple[int, str], Call] = {}
        self.paid: Counter[Call] = Counter()
        table = self.source.tables.ours()
        query = table.query().where(FILTER) if filtered else table.query()
        query = query.select(["id", "u", "a"])
        for role in self.columns:
            query = query.add_column({role: self._udf(role)})
        self.source.tables.db.create_materialized_view(VIEW, query)

    def do(self, step: ViewStep) -> None:
        """Do a step to the source, or to the view and its model."""
        match step:
            case Refresh():
                self._refresh(dies=step.dies)
            case AlterView():
                column = self.columns[step.role]
                function = replace(column.function, factor=step.factor)
                self.columns[step.role] = replace(column, function=function)
                self._view().alter_columns({"path": step.role, "udf": self._udf(step.role)})
            case TidyView():
                self._tidy(step)
            case WriteView():
                self._write(step)
            case _:
                self.source.do(step)

    def _udf(self, role: str) -> Any:
        column = self.columns[role]
        return make_udf(role, column.function, column.inputs)

    def _view(self) -> MaterializedView:
        view = self.source.tables.db.open_table(VIEW)
        assert isinstance(view, MaterializedView)
        return view

    def _tidy(self, step: TidyView) -> None:
        dataset = lance.dataset(f"{self.source.tables.db.uri}/{VIEW}.lance")
        if step.compact:
            dataset.optimize.compact_files()
        else:
            dataset.cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)

    def _write(self, step: WriteView) -> None:
        """Write into the view: rows that had another value have to be computed again."""
        view = lancedb.connect(self.source.tables.db.uri).open_table(VIEW)
        for row in view.to_arrow().to_pylist():
            key = (row["__source_row_id"], step.role)
            if row["id"] in step.ids and row[step.role] != step.value and key in self.known:
                del self.known[key]
        view.update(where=selecting(step.ids), values={step.role: plain(step.value)})

    def _wanted(self) -> dict[int, dict[str, Value]]:
        """The rows of the source that belong to the view, by stable row id."""
        data = self.source.tables.lance().to_table(
            columns=["id", "u", "a", "x", "y"],
            with_row_id=True,
            filter=FILTER if self.filtered else None,
        )
        return {row.pop("_rowid"): row for row in data.to_pylist()}

    def _refresh(self, *, dies: bool) -> None:
        wanted = self._wanted()
        needed = {
            (row, column.role): call_of(new_row(values), column)
            for row, values in wanted.items()
            for column in self.columns.values()
        }
        least = Counter(call for key, call in needed.items() if self.known.get(key) != call)
        if dies:
            return self._die(least)
        planned = self._view().plan_refresh().rows_to_run
        if calls := self.recorder.taken():
            raise Mismatch(f"planning a refresh called {calls}")
        self._view().refresh()
        calls = self.recorder.taken()
        if extra := calls - least:
            raise Mismatch(f"the refresh called without need: {dict(extra)}")
        if missing := least - calls - self.paid:
            raise Mismatch(f"the refresh did not call for: {dict(missing)}")
        if planned != calls.total():
            raise Mismatch(f"the plan said {planned} calls, and there were {calls.total()}")
        self.known = needed
        self._compare(wanted)
        return None

    def _die(self, least: Counter[Call]) -> None:
        """Refresh with commits that fail; the next refresh may use what was computed."""
        with dying_commits(f"{self.source.tables.db.uri}/{VIEW}.lance", 1) as fuse:
            try:
                self._view().refresh()
            except Exception:
                if not fuse.blown:
                    raise
        calls = self.recorder.taken()
        if extra := calls - least:
            raise Mismatch(f"the refresh called without need before it died: {dict(extra)}")
        self.paid += calls
        self._refresh(dies=False)

    def _compare(self, wanted: dict[int, dict[str, Value]]) -> None:
        rows = self._view().to_arrow().to_pylist()
        actual = {row["id"]: {k: canonical(v) for k, v in row.items()} for row in rows}
        expected = {values["id"]: self._shown(values) for values in wanted.values()}
        if len(rows) != len(actual) or actual != expected:
            wrong = {i for i in {*actual, *expected} if actual.get(i) != expected.get(i)}
            shown = [(actual.get(i), expected.get(i)) for i in sorted(wrong)[:3]]
            raise Mismatch(f"rows of the view (is, should be): {shown}")

    def _shown(self, source: dict[str, Value]) -> dict[str, Value]:
        """The row that the view must have for a row of the source."""
        shown = {name: source[name] for name in ("id", "u", "a")}
        for role, column in self.columns.items():
            inputs = [plain(v) for v in call_of(new_row(source), column).inputs]
            shown[role] = canonical(evaluate(column.function, inputs, failing=False))
        return shown


@dataclass
class DrawView:
    """Draws steps of the source, refreshes, and changes of the view."""

    rng: random.Random
    source: Draw

    def step(self, world: ViewWorld) -> ViewStep:
        draw = self.rng.random()
        if draw < 0.25:
            return Refresh(dies=self.rng.random() < 0.1)
        if draw < 0.28:
            return AlterView(self.rng.choice(["v", "t"]), self.rng.choice([1, 2]))
        if draw < 0.34:
            return TidyView(compact=self.rng.random() < 0.5)
        if draw < 0.38:
            role, value = self.rng.choice([("v", None), ("t", None), ("v", 77), ("t", "written")])
            return WriteView((self.rng.randrange(20),), role, value)
        if draw < 0.5:
            return Backfill("a")
        return self._of_source(world)

    def _of_source(self, world: ViewWorld) -> Step:
        state = world.source.state
        while True:
            step = self.source.step(state, failing=False)
            if isinstance(step, _OF_SOURCE):
                return step


def of_view(setup: Setup, *, filtered: bool) -> History[ViewWorld, ViewStep]:
    """Histories of a view, with or without a filter, of a table that begins like this."""
    return History(
        start=lambda folder, recorder: ViewWorld(folder, setup, recorder, filtered=filtered),
        do=ViewWorld.do,
        makes_sense=_makes_sense,
        title=f"of_view({setup!r}, filtered={filtered})",
    )


def _makes_sense(world: ViewWorld, step: ViewStep) -> bool:
    if isinstance(step, Refresh | AlterView | TidyView | WriteView):
        return True
    return applicable(world.source.state, step)


def run_view_history(seed: int, steps: int) -> tuple[int, Failure[ViewWorld, ViewStep] | None]:
    """Run a random history of a view."""
    rng = random.Random(seed)
    setup = Setup(
        fragments=tuple(rng.randint(2, 8) for _ in range(rng.randint(1, 4))),
        storage_version=rng.choice(["2.0", "2.1", "2.2"]),
        stable_row_ids=True,
        functions={"a": Function("half")},
    )
    draw, filtered = DrawView(rng, Draw(rng)), rng.random() < 0.5

    def drawn(world: ViewWorld) -> Iterator[ViewStep]:
        for _ in range(steps):
            yield draw.step(world)

    return of_view(setup, filtered=filtered).run(drawn)

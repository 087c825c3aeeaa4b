"""Histories of a source and the views over it, each step against a from-scratch evaluation.

Append, delete, update, upsert, compact, backfill, alter, restore, roll back, crash, reopen: after
every refresh a view equals its query at the source's version, and UDFs ran for new rows and changed
inputs only. The walks go through every sequence of so many operations; random ones go further.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geneva import Connection, Table, udf
from geneva.execution.backfill.prepare import PreparedBackfill, prepare
from geneva.execution.refresh.forecast import come_true
from geneva.execution.runner import InProcessRunner
from geneva.storage.lance.dataset import Dataset, open_dataset
from support import connect, publishing
from view_model import CALLS, CHUNKS, SCHEMA, SHAPES, Tracked, create, one_input, rows_as_set

STEPS = 12
STABLE = {"new_table_enable_stable_row_ids": "true"}
PLACES = {
    "commit": "geneva.execution.backfill.committer.publish_columns",
    "append": "geneva.execution.refresh.run.append_placeholders",
    "delete": "geneva.execution.refresh.rows.delete_view_rows",
    "refreshed": "geneva.execution.refresh.run.commit_refreshed",
    "chunks": "geneva.execution.refresh.explode.commit_chunks",
}


@pytest.fixture(autouse=True, scope="module")
def _plans_are_those_that_a_second_look_would_make() -> Iterator[None]:
    """A plan on a forecast is the plan that is made when the view's rows have come and gone."""

    def checked(planned: PreparedBackfill, view: Dataset) -> PreparedBackfill | None:
        real = come_true(planned, view)
        assert real is not None
        there = open_dataset(real.ref, int(view.version))
        anew = prepare(real.subject, real.request, dataset=there)
        assert (real.plan, real.staged) == (anew.plan, anew.staged)
        assert {f: real.prefixes[f] for f in anew.prefixes} == anew.prefixes
        return real

    with patch("geneva.execution.refresh.run.come_true", checked):
        yield


class Crash(BaseException):
    """The process dies here."""


@contextmanager
def crash_at(db: Connection, place: str, countdown: int, *, after: bool) -> Iterator[None]:
    """Kill the process, for what Geneva can tell, before or after the n-th write of a kind."""
    module, _, name = PLACES[place].rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)
    left = itertools.count(countdown - 1, -1)

    def dying(*args: Any, **kwargs: Any) -> Any:
        turn = next(left)
        if turn < 0 or (turn == 0 and not after):
            raise Crash
        result = real(*args, **kwargs)
        if turn == 0:
            raise Crash
        return result

    with publishing(db, dying) if place == "commit" else patch(PLACES[place], dying):
        yield


class World:
    """A source table, the views over it, and what happened to them."""

    def __init__(self, folder: Path, shape: str) -> None:
        self.folder, self.shape = folder, shape
        self.history: list[str] = []
        self.next_key = 0
        self.steps = 0
        self.crashed = self.disturbed = False
        """A refresh was cut off since the last one that ended; its view was compacted since."""
        self.reopen()
        self.src = self.db.create_table("src", self._rows(3), storage_options=STABLE)
        self.src.add(self._rows(3))
        self.src.add(self._rows(2))
        self.src.add_columns({"d": (one_input("d", 0), ["x"]), "e": (one_input("e", 0), ["other"])})
        self.src.backfill("d")
        CALLS.clear()
        self.views = [create(self.db, name, made) for name, made in SHAPES[shape].items()]
        self.versions = [self.src.version]
        self.user_column = False
        assert not CALLS, "creation ran a UDF"
        self.refresh()

    def reopen(self) -> None:
        """Forget everything but what is in storage."""
        self.db = connect(self.folder / "db", lambda: InProcessRunner(1))
        if hasattr(self, "src"):
            self.src = self.db.open_table("src")
            for tracked in self.views:
                tracked.view = self.db.open_table(tracked.name)  # type: ignore[assignment]

    def _rows(self, count: int, **given: Any) -> pa.Table:
        rows = []
        for _ in range(count):
            k = self.next_key
            self.next_key += 1
            row = {"k": k, "x": k * 7, "y": k + 3, "s": f"s{k}", "flag": k % 7, "other": k}
            rows.append({**row, "p": {"a": k % 3, "b": f"b{k}"}, **given})
        return pa.Table.from_pylist(rows, SCHEMA)

    def _some_keys(self, count: int, start: int = 0) -> list[int]:
        """Keys of live rows, another choice at every step."""
        keys = sorted(lance.dataset(self.src.ref.uri).to_table(columns=["k"])["k"].to_pylist())
        return (
            [keys[(self.steps * 3 + start + i) % len(keys)] for i in range(count)] if keys else []
        )

    def _update(self, column: str, sql: str, start: int = 0) -> None:
        keys = self._some_keys(3, start)
        if keys:
            self.src.update(where=f"k IN ({', '.join(map(str, keys))})", values_sql={column: sql})

    # ------------------------------------------------------------------------------- operations

    def append(self) -> None:
        self.src.add(self._rows(2))

    def append_unmatched(self) -> None:
        self.src.add(self._rows(1, flag=9))

    def delete(self) -> None:
        keys = self._some_keys(1)
        if len(keys) and self.src.count_rows() > 2:
            self.src.delete(f"k = {keys[0]}")

    def update_input(self) -> None:
        self._update("x", f"x + {1000 + self.steps}")

    def update_filter(self) -> None:
        self._update("flag", "(flag + 4) % 9")

    def update_carried(self) -> None:
        self._update("s", "concat(s, '!')")

    def update_other(self) -> None:
        self._update("other", "other + 1")

    def update_struct(self) -> None:
        keys = self._some_keys(2)
        rows = lance.dataset(self.src.ref.uri).to_table(columns=SCHEMA.names).to_pylist()
        changed = [{**row, "p": {"a": self.steps, "b": "new"}} for row in rows if row["k"] in keys]
        self._upsert(changed)

    def upsert(self) -> None:
        keys = self._some_keys(2)
        rows = lance.dataset(self.src.ref.uri).to_table(columns=SCHEMA.names).to_pylist()
        changed = [{**row, "y": row["y"] + 50, "x": row["x"]} for row in rows if row["k"] in keys]
        self._upsert([*changed, *self._rows(1).to_pylist()])

    def _upsert(self, rows: list[dict[str, Any]]) -> None:
        merge = self.src.merge_insert("k").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(pa.Table.from_pylist(rows, SCHEMA))

    def compact_source(self) -> None:
        self.src.compact_files()

    def compact_view(self) -> None:
        self.disturbed = self.crashed
        for tracked in self.views:
            tracked.view.compact_files()

    def backfill_input(self) -> None:
        self.src.backfill("d")

    def backfill_unrelated(self) -> None:
        self.src.backfill("e")

    def alter(self) -> None:
        for tracked in self.views:
            shape = tracked.shape
            assert shape.altered is not None
            assert shape.alter is not None
            name = "chunks" if shape.altered == "pieces" else shape.altered
            tracked.numbers[name] += 1
            new = shape.alter(tracked.numbers[name])
            inputs = shape.udfs[CHUNKS if shape.altered == "pieces" else shape.altered]
            tracked.view.alter_columns({"path": shape.altered, "udf": new, "input_columns": inputs})

    def restore(self) -> None:
        self.src.checkout(self.versions[max(0, len(self.versions) - 3)])
        self.src.restore()
        self.src.checkout_latest()

    def roll_back(self) -> None:
        """Refresh to an older version; the step's own refresh goes to the latest again."""
        older = self.versions[max(0, len(self.versions) - 3)]
        first = self.views[0]
        if older < self.src.version:
            self._refresh_one(first, older)
            self._finished()

    def add_user_column(self) -> None:
        view = self.views[-1].view
        if not self.user_column:
            names = ["k", "s" if "s" in view.schema.names else "k"]
            tag = udf(lambda k, s: f"{k}:{s}", data_type=pa.string(), version="tag")
            view.add_columns({"tag": (tag, names)})
            self.user_column = True

    def crash(self, place: str, countdown: int, *, after: bool, **options: Any) -> None:
        """Change much, and die in the refresh."""
        self.append()
        for start in (2, 5):
            self._update("x", f"x + {1000 + self.steps}", start)
        self._update("flag", "(flag + 5) % 9", 1)
        self.delete()
        self._note_version()
        for tracked in self.views:
            tracked.view.checkout_latest()
            files = {column: tracked.files(column) for column in tracked.shape.udfs}
            with crash_at(self.db, place, countdown, after=after):
                try:
                    tracked.view.refresh(commit_granularity=1, **options)
                    tracked.made = tracked.wanted(self._source_of(tracked))
                    tracked.before = tracked.made
                    continue
                except Crash:
                    self.crashed = True
            self._note_crash(tracked, files)
            break

    def _note_crash(
        self, tracked: Tracked, before: dict[str, dict[int, tuple[int, tuple[str, ...]]]]
    ) -> None:
        """What of a cut-off refresh is in the view: the rows of fragments that got a new file."""
        source = self._source_of(tracked)
        ids = tracked.source_ids()
        live = set(source.to_table(columns=[], with_row_id=True)["_rowid"].to_pylist())
        for column in tracked.shape.udfs:
            now = tracked.files(column)
            kept = {i: made for i, made in tracked.made[column].items() if i in ids}
            fresh = {i for i, where in now.items() if where[1] and where != before[column].get(i)}
            tracked.made[column] = kept
            inputs = tracked.shape.udfs[column]
            for i in fresh & live:
                row = source._take_rows([i], list(inputs)).to_pylist()[0]
                tracked.made[column][i] = (tracked.maker(column), tuple(map(row.get, inputs)))

    # --------------------------------------------------------------------------------- checking

    def step(self, operation: str) -> None:
        self.steps += 1
        self.history.append(operation)
        OPERATIONS[operation](self)
        self._note_version()
        if not operation.startswith("crash"):
            self.refresh()

    def _note_version(self) -> None:
        if self.src.version != self.versions[-1]:
            self.versions.append(self.src.version)

    def _source_of(self, tracked: Tracked, version: int | None = None) -> lance.LanceDataset:
        table = self.src if tracked.shape.over == "src" else self.views[0].view
        return lance.dataset(table.ref.uri, version=version)

    def refresh(self) -> None:
        for tracked in self.views:
            self._refresh_one(tracked, None)
        self._finished()

    def _finished(self) -> None:
        self.crashed = self.disturbed = False

    def _refresh_one(self, tracked: Tracked, version: int | None) -> None:
        view = tracked.view
        planned = view.plan_refresh(version)
        CALLS.clear()
        view.refresh(version)
        calls = Counter(CALLS)
        self._check_rows(tracked, version)
        wanted = tracked.wanted(self._source_of(tracked, version))
        self._check_calls(tracked, wanted, calls, planned.rows_to_run)
        tracked.made = wanted
        tracked.before = {name: dict(made) for name, made in wanted.items()}
        self._check_at_rest(tracked, version)

    def _check_rows(self, tracked: Tracked, version: int | None) -> None:
        source: Table = self.db.open_table(tracked.shape.over, version=version)
        expected = tracked.shape.query(source, tracked.numbers).to_list()
        view = tracked.view
        hidden = [name for name in view.schema.names if name.startswith("__")]
        assert not hidden
        rows = view.to_arrow().to_pylist()
        if self.user_column and tracked is self.views[-1]:
            view.backfill("tag")
            rows = view.to_arrow().to_pylist()
            for row in rows:
                assert row.pop("tag") == f"{row['k']}:{row['s' if 's' in row else 'k']}"
        assert rows_as_set(rows) == rows_as_set(expected)

    def _check_calls(
        self, tracked: Tracked, wanted: dict[str, Any], calls: Counter[Any], planned: int
    ) -> None:
        exact = not self.crashed and "restore" not in self.history
        allowed = Counter[Any]()
        for column, rows in wanted.items():
            made = tracked.made.get(column, {})
            was = tracked.before.get(column, {}) if self.disturbed else made
            allowed.update(
                (tracked.label(column), value[1])
                for i, value in rows.items()
                if made.get(i) != value or was.get(i) != value
            )
        assert calls <= allowed, f"run for nothing: {calls - allowed}"
        if exact:
            assert calls == allowed, f"not run: {allowed - calls}"
        assert calls.total() == planned

    def _check_at_rest(self, tracked: Tracked, version: int | None) -> None:
        assert tracked.view.plan_refresh(version).is_empty
        CALLS.clear()
        if self.steps % 4 == 0:
            before = tracked.view.version
            assert tracked.view.refresh(version).rows_computed == 0
            assert tracked.view.version == before
        assert not CALLS
        lance.dataset(tracked.view.ref.uri).validate()


def _crashing(
    place: str, countdown: int, *, after: bool, **options: Any
) -> Callable[[World], None]:
    return lambda world: world.crash(place, countdown, after=after, **options)


OPERATIONS: dict[str, Callable[[World], None]] = {
    "append": World.append,
    "append unmatched": World.append_unmatched,
    "delete": World.delete,
    "update input": World.update_input,
    "update filter": World.update_filter,
    "update carried": World.update_carried,
    "update other": World.update_other,
    "update struct": World.update_struct,
    "upsert": World.upsert,
    "compact source": World.compact_source,
    "compact view": World.compact_view,
    "backfill input": World.backfill_input,
    "backfill unrelated": World.backfill_unrelated,
    "alter": World.alter,
    "restore": World.restore,
    "roll back": World.roll_back,
    "reopen": World.reopen,
    "add user column": World.add_user_column,
    "crash before the first commit": _crashing("commit", 1, after=False),
    "crash with checkpoints": _crashing("commit", 1, after=False, checkpoint_size=1),
    "crash after the first commit": _crashing("commit", 1, after=True),
    "crash after the third commit": _crashing("commit", 3, after=True),
    "crash after rows left": _crashing("delete", 1, after=True),
    "crash after rows came": _crashing("append", 1, after=True),
    "crash before the end": _crashing("refreshed", 1, after=False),
    "crash after the end": _crashing("refreshed", 1, after=True),
    "crash after chunks": _crashing("chunks", 1, after=True),
}


def run(shape: str, operations: Sequence[str]) -> None:
    """Go through a history; a failure says which one it was."""
    with tempfile.TemporaryDirectory(prefix="geneva-views-") as folder:
        world = World(Path(folder), shape)
        try:
            for operation in operations:
                world.step(operation)
            world.refresh()
        except BaseException as error:
            error.add_note(f"run({shape!r}, {world.history!r})")
            raise


def walk(names: Sequence[str], length: int) -> list[str]:
    """Operations in an order that has every sequence of `length` of them in it, each once."""
    count = len(names)
    tail: list[int] = []
    word = [0] * (count * length)

    def grow(t: int, p: int) -> None:
        if t > length:
            if length % p == 0:
                tail.extend(word[1 : p + 1])
            return
        word[t] = word[t - p]
        grow(t + 1, p)
        for j in range(word[t - p] + 1, count):
            word[t] = j
            grow(t + 1, t)

    grow(1, 1)
    return [names[i] for i in (*tail, *tail[: length - 1])]


def stretches(shape: str, length: int) -> list[list[str]]:
    """A walk in stretches, each of which begins with a new table."""
    every = walk(operations_of(shape), length)
    last = len(every) - length + 1
    return [every[at : at + STEPS + length - 1] for at in range(0, last, STEPS)]


def operations_of(shape: str) -> list[str]:
    return [name for name in OPERATIONS if "chunks" not in name or "chunk" in shape]


def test_some_operations() -> None:
    run("chunked", operations_of("chunked")[::4])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_operation(shape: str) -> None:
    run(shape, operations_of(shape))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_two_operations(shape: str, slow_rounds: int) -> None:
    """All pairs in five rounds; fewer rounds take their share of them."""
    for at, operations in enumerate(stretches(shape, 2)):
        if at % 5 < slow_rounds:
            run(shape, operations)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_three_operations(shape: str, slow_rounds: int) -> None:
    """A thousandth of all triples a round; GENEVA_SLOW_ROUNDS=1000 takes all."""
    every = stretches(shape, 3)
    random.Random(0).shuffle(every)
    for operations in every[: max(1, len(every) * slow_rounds // 1000)]:
        run(shape, operations)


histories = st.sampled_from(list(SHAPES)).flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        st.lists(st.sampled_from(operations_of(shape)), min_size=2, max_size=25),
    )
)


@pytest.mark.slow
@settings(max_examples=3)
@given(history=histories)
def test_some_histories(history: tuple[str, list[str]]) -> None:
    run(*history)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_long_histories(slow_rounds: int) -> None:
    @settings(max_examples=10 * slow_rounds)
    @given(history=histories)
    def check(history: tuple[str, list[str]]) -> None:
        run(*history)

    check()

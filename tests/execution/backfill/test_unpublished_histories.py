"""Random histories of jobs that are ended before their commit, and of columns that change then.

The rule: a row is called for once, until its function or its input changes, or a column is added
that it has no value for. Whatever a column is called, whichever of the others are dropped, and
wherever the row is by now: what was computed for it and not committed is found again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from geneva import UDF, Columns, Connection, udf
from geneva.errors import ColumnChangedError, JobCancelledError, UDFError
from geneva.execution.backfill.committer import publish_columns
from geneva.execution.runner import InProcessRunner
from support import Calls, connect, make_table, publishing

OUTPUTS = ("a", "b", "c")


class Made(NamedTuple):
    a: int
    b: int
    c: int


@dataclass(frozen=True)
class Told:
    """A file that says at which row the function is to fail, once."""

    path: str

    def tell(self, row: int) -> None:
        Path(self.path).write_text(str(row))

    def is_for(self, row: int) -> bool:
        path = Path(self.path)
        found = path.exists() and path.read_text() == str(row)
        if found:
            path.unlink()
        return found


def value(version: int, x: int, output: str) -> int:
    return 10_000 * version + 10 * x + OUTPUTS.index(output)


def several(version: int, calls: Calls, told: Told) -> UDF:
    def made(x: int) -> Columns[Made]:
        if told.is_for(x):
            raise ValueError("not this one")
        calls.note([x])
        return Made(*(value(version, x, output) for output in OUTPUTS))

    return udf(made, version=str(version))


class History:
    """A table, and which of its rows need a call."""

    def __init__(self, db: Connection, calls: Calls, told: Told, seed: int) -> None:
        self.db, self.calls, self.told = db, calls, told
        self.random = random.Random(seed)
        self.table = make_table(
            db, [pa.table({"x": range(i, i + 4)}) for i in (0, 4, 8)], stable_row_ids=seed % 2 == 1
        )
        self.xs = set(range(12))
        self.version = 1
        self.names = {output: output for output in OUTPUTS}
        self.table.add_columns(self.function())
        self.needed = set(self.xs)
        self.done: list[str] = []

    def function(self) -> UDF:
        return several(self.version, self.calls, self.told)

    def steps(self, count: int) -> None:
        ends = [self.raises, self.raises, self.refused, self.refused, self.cancelled]
        changes = [
            *(self.drop, self.rename, self.rename, self.compact, self.append, self.update),
            self.clean_up,
        ]
        anew = [self.add_again, self.alter]
        for _ in range(count):
            for act in (self.random.choice(ends), self.random.choice(changes)):
                self.act(act)
            if self.random.random() < 0.3:
                self.act(self.random.choice(anew))
            if self.random.random() < 0.2:
                self.act(self.all_of_it)
        self.act(self.changed_while_it_runs)
        self.act(self.all_of_it)

    def act(self, act: Callable[[], None]) -> None:
        self.done.append(act.__name__)
        act()

    # ------------------------------------------------------------------------- jobs that end early

    def run(self, **options: Any) -> None:
        name = self.random.choice(list(self.names.values()))
        self.table.backfill(name, checkpoint_size=1, **options)

    def check_calls(self) -> None:
        """No row was called for that needed no call; those that were need none any more."""
        called = self.calls.taken()
        assert len(set(called)) == len(called), (self.done, called)
        assert set(called) <= self.needed, (self.done, called, self.needed)
        self.needed -= set(called)

    def raises(self) -> None:
        if self.needed:
            self.told.tell(self.random.choice(sorted(self.needed)))
            with pytest.raises(UDFError, match="not this one"):
                self.run()
        self.check_calls()

    def cancelled(self) -> None:
        name = self.random.choice(list(self.names.values()))
        job = self.table.backfill_async(name, checkpoint_size=1, task_size=2)
        while self.needed and not self.calls.count and not job.done():
            time.sleep(0.002)
        job.cancel()
        with suppress(JobCancelledError):  # it may have been done by then
            job.result()
        self.check_calls()

    def refused(self) -> None:
        """It computes everything, and can't commit."""

        def refuse(*_: Any) -> Any:
            raise OSError("the store is away")

        with publishing(self.db, refuse):
            try:
                self.run()
            except OSError as error:
                assert "the store is away" in str(error)  # noqa: PT017  it may have had nothing to do
        self.check_calls()

    def changed_while_it_runs(self) -> None:
        """A column is dropped or renamed when the job is about to commit."""
        change = self.random.choice((self.drop, self.rename))
        told: list[bool] = []

        def publish(*commit: Any) -> Any:
            if not told:
                told.append(True)
                self.act(change)
            return publish_columns(*commit)

        with publishing(self.db, publish):
            try:
                self.run()
            except ColumnChangedError as error:
                assert "What was computed is kept" in str(error)  # noqa: PT017
        self.check_calls()

    def all_of_it(self) -> None:
        self.run()
        self.check_calls()
        assert not self.needed, (self.done, self.needed)
        for output, name in self.names.items():
            rows = self.table.to_arrow()
            found = dict(zip(rows["x"].to_pylist(), rows[name].to_pylist(), strict=True))
            assert found == {x: value(self.version, x, output) for x in self.xs}, self.done

    # ------------------------------------------------------------------------------------- changes

    def drop(self) -> None:
        if len(self.names) > 1:
            self.table.drop_columns(self.names.pop(self.random.choice(list(self.names))))

    def rename(self) -> None:
        output = self.random.choice(list(self.names))
        new = self.random.choice(
            [o for o in (*OUTPUTS, "d", "e", "f") if o not in self.table.schema.names]
        )
        self.table.alter_columns({"path": self.names[output], "rename": new})
        self.names[output] = new

    def compact(self) -> None:
        self.table.compact_files()

    def clean_up(self) -> None:
        """What a plan can use stays."""
        self.table.cleanup_checkpoints(timedelta(0))

    def append(self) -> None:
        new = {max(self.xs) + 1, max(self.xs) + 2}
        self.table.add(pa.table({"x": sorted(new)}))
        self.xs |= new
        self.needed |= new

    def update(self) -> None:
        old, new = self.random.choice(sorted(self.xs)), max(self.xs) + 1
        self.table.update(where=f"x = {old}", values={"x": new})
        self.xs = self.xs - {old} | {new}
        self.needed = self.needed - {old} | {new}

    def add_again(self) -> None:
        """One that was dropped is another column now: each row is called for once more."""
        missing = [o for o in OUTPUTS if o not in self.names]
        if missing and not set(missing) & set(self.names.values()):
            self.table.add_columns(self.function())
            self.names |= {output: output for output in missing}
            self.needed = set(self.xs)

    def alter(self) -> None:
        self.version += 1
        name = self.random.choice(list(self.names.values()))
        self.table.alter_columns({"path": name, "udf": self.function()})
        self.needed = set(self.xs)


def play(tmp_path: Path, calls: Calls, seed: int, steps: int) -> None:
    # One slot, and a checkpoint for each row: what was called for is what was saved.
    db = connect(tmp_path / "db", lambda: InProcessRunner(1))
    History(db, calls, Told(str(tmp_path / "told")), seed).steps(steps)


@pytest.mark.parametrize("seed", [1, 5])
def test_a_history(tmp_path: Path, calls: Calls, seed: int) -> None:
    play(tmp_path, calls, seed, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_longer_histories(tmp_path: Path, calls: Calls, seed: int) -> None:
    play(tmp_path, calls, seed, 6)

"""What tests share: UDFs that count their calls, tables of a given layout, and a look inside."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

import geneva
from geneva import UDF, udf
from geneva.config import Settings
from geneva.execution.backfill.committer import Publish, TableCommitter
from geneva.execution.runner import InProcessRunner, Runner
from geneva.storage.checkpoints.staging import read_work
from geneva.storage.checkpoints.store import CheckpointKey, LanceCheckpointStore
from geneva.storage.columns import publish as commit

if TYPE_CHECKING:
    from geneva import Connection, Table


RunnerFactory = Callable[[], Runner]


def connect(path: Path, runner: RunnerFactory | None) -> Connection:
    """Connect with settings of the tests' own: two slots, no bars, nothing in the user's cache."""
    quiet = Settings(local_slots=2, jvm_archive=False, progress=False)
    return geneva.connect(path, runner=runner, settings=quiet)


@dataclass(frozen=True)
class Calls:
    """A log of UDF calls: one line a call, appended in one write by whatever process runs it."""

    path: str

    def note(self, rows: Sequence[Any], started: float = 0.0) -> None:
        """Add a call that computed `rows`, known by the values of their first input."""
        line = json.dumps([list(rows), started, time.monotonic()], default=str) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    def _lines(self) -> list[Any]:
        if not Path(self.path).exists():
            return []
        return [json.loads(line) for line in Path(self.path).read_text().splitlines()]

    @property
    def count(self) -> int:
        """How often the function was called."""
        return len(self._lines())

    @property
    def batches(self) -> list[int]:
        """Rows of each call, in the order of the calls."""
        return [len(rows) for rows, _, _ in self._lines()]

    @property
    def rows(self) -> list[Any]:
        """The rows that the function was called for, sorted; one that ran twice is there twice."""
        every = itertools.chain.from_iterable(rows for rows, _, _ in self._lines())
        return sorted(every, key=lambda v: (v is None, str(type(v)), v))

    @property
    def most_at_once(self) -> int:
        """How many calls overlapped at most (only for functions that take their time)."""
        edges = [(start, 1) for _, start, _ in self._lines()]
        edges += [(end, -1) for _, _, end in self._lines()]
        return max(itertools.accumulate(step for _, step in sorted(edges)), default=0)

    def clear(self) -> None:
        """Start counting anew."""
        Path(self.path).unlink(missing_ok=True)

    def taken(self) -> list[Any]:
        """Return `rows` and start counting anew."""
        rows = self.rows
        self.clear()
        return rows


def slow(*values: Any) -> Any:
    """A case of a parametrized test that is left to the slow round."""
    return pytest.param(*values, marks=pytest.mark.slow)


def counted(calls: Calls, function: Callable[..., Any], **options: Any) -> UDF:
    """Make a UDF of a function that logs every call before it is made."""

    @functools.wraps(function)
    def counting(*args: Any) -> Any:
        started = time.monotonic()
        try:
            return function(*args)
        finally:
            calls.note(rows_of(args[0]), started)

    return udf(counting, **options)


@dataclass(frozen=True)
class Prototypes:
    """Databases that are made once for the tests of a module; each test gets a copy of one."""

    folder: Path

    def calls(self, name: str = "calls") -> Calls:
        """The log of UDF calls in the prototypes and in all of their copies."""
        return Calls(str(self.folder / f"{name}.log"))

    def copy(self, make: Callable[..., Any], to: Path, *args: Any) -> Connection:
        """Return a copy of what `make(db, self, *args)` fills, in which nothing was called yet."""
        made = self.folder / "-".join([make.__name__, *(getattr(a, "name", str(a)) for a in args)])
        if not made.exists():
            unfinished = made.with_suffix(".unfinished")
            make(connect(unfinished, InProcessRunner), self, *args)
            unfinished.rename(made)
        shutil.copytree(made, to, dirs_exist_ok=True)
        for log in self.folder.glob("*.log"):
            log.unlink()
        return connect(to, InProcessRunner)


def rows_of(argument: Any) -> list[Any]:
    """Return the rows that a UDF's first argument stands for."""
    if isinstance(argument, pa.RecordBatch):
        return rows_of(argument.column(0))
    if isinstance(argument, pa.Array):
        return argument.to_pylist()
    return [argument]


def triple(id: int) -> int:
    return id * 3


def tripled(calls: Calls, **options: Any) -> UDF:
    """Three times the column `id`, counted."""
    return counted(calls, triple, **options)


def breakable(calls: Calls, broken: Path, **options: Any) -> UDF:
    """Three times `id`; raises on the ids listed in a file, so it is mended by deleting that."""
    path = str(broken)

    def fragile(id: int) -> int:
        if Path(path).exists() and id in json.loads(Path(path).read_text()):
            raise ValueError(f"can't do {id}")
        return id * 3

    return counted(calls, fragile, **options)


def make_table(
    db: Connection,
    fragments: Iterable[int | Sequence[int] | pa.Table],
    name: str = "t",
    *,
    storage_version: str | None = None,
    stable_row_ids: bool = False,
) -> Table:
    """Make a table of the given fragments: a row count (ids go on from the last), ids, or data."""
    uri = f"{db.uri}/{name}.lance"
    options = {"data_storage_version": storage_version, "enable_stable_row_ids": stable_row_ids}
    next_id = 0
    for position, fragment in enumerate(fragments):
        if isinstance(fragment, int):
            fragment = range(next_id, next_id + fragment)
        if not isinstance(fragment, pa.Table):
            next_id = max(next_id, *(i + 1 for i in fragment), 0)
            fragment = pa.table({"id": pa.array(list(fragment), pa.int64())})
        lance.write_dataset(fragment, uri, mode="append" if position else "create", **options)
    return db.open_table(name)


def column(table: Table, name: str) -> list[Any]:
    """Return a column's values in the table's latest version, in row order."""
    dataset = lance.dataset(table.ref.uri)
    return dataset.to_table(columns=[name]).column(0).to_pylist()


def by_id(table: Table, name: str) -> dict[int, Any]:
    """Return a column's values by the id of their row, in the table's latest version."""
    return dict(zip(column(table, "id"), column(table, name), strict=True))


def checkpoint_store(table: Table) -> LanceCheckpointStore:
    """Return the table's own checkpoint store."""
    return LanceCheckpointStore(f"{table.ref.uri}/_checkpoints")


def checkpoint_keys(table: Table) -> list[CheckpointKey]:
    """Return every key in the table's checkpoint store; each must parse."""
    keys = [CheckpointKey.parse(text) for text in checkpoint_store(table).list_keys()]
    assert None not in keys
    return [key for key in keys if key is not None]


def checkpoint_ranges(table: Table) -> dict[int, list[tuple[int, int]]]:
    """Return the ranges of the batch checkpoints, by fragment, ascending."""
    found: dict[int, list[tuple[int, int]]] = {}
    for key in checkpoint_keys(table):
        if key.rows is not None:
            found.setdefault(key.fragment_id, []).append((key.rows.start, key.rows.end))
    return {fragment: sorted(ranges) for fragment, ranges in sorted(found.items())}


def staged_records(table: Table) -> list[int]:
    """Return the fragments for which a staged file is on record."""
    return sorted(fragment_id for _, fragment_id in read_work(checkpoint_store(table)).staged)


@contextmanager
def publishing(db: Connection, publish: Publish) -> Iterator[None]:
    """Let the jobs of a connection publish in another way than by a commit to the table."""
    plain = db._make_committer
    db._make_committer = functools.partial(TableCommitter, publish=publish)
    try:
        yield
    finally:
        db._make_committer = plain


@contextmanager
def uncommitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let what is inside compute and stage everything and then fail, as if the driver had died."""

    def fail(*_: object, **__: object) -> int:
        raise OSError("the driver is gone")

    with monkeypatch.context() as patched:
        patched.setattr(commit, "_commit", fail)
        with pytest.raises(OSError, match="the driver is gone"):
            yield


def damage(table: Table, fragment: int, how: str = "gone") -> tuple[Path, bytes]:
    """Make the first file of a fragment unreadable; return it, and what was in it."""
    found = lance.dataset(table.ref.uri).get_fragment(fragment)
    path = Path(table.ref.uri) / "data" / found.data_files()[0].path
    was = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "cut":
        os.truncate(path, 100)
    else:
        path.write_bytes(os.urandom(len(was)))
    return path, was

"""The threads of a task: they overlap, stop together, and leave nothing behind. No driver."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from geneva.execution.apply.batch import Applied
from geneva.execution.apply.timeouts import Guard
from geneva.execution.worker import pipeline as pipeline_module
from geneva.execution.worker.batches import BatchRunner
from geneva.execution.worker.pipeline import Pipeline
from geneva.execution.worker.poison_rows import note_key
from geneva.execution.worker.reader import Reader
from geneva.execution.worker.records import OpenTask, Result, Window
from geneva.execution.worker.task import PartWork
from geneva.execution.worker.threads import BoundedQueue, Halt, Stage, Stopped
from geneva.execution.worker.writer import PartWriter
from geneva.model.rows import RowRange
from geneva.planning.batching import CallCost
from geneva.storage.checkpoints.store import CheckpointStore, InMemoryCheckpointStore
from geneva.storage.lance.damage import Damaged
from worker_support import make_file, make_part, open_task

LIMIT = 20.0
"""Seconds after which a test takes threads for deadlocked."""


def own_threads() -> list[threading.Thread]:
    ours = ("geneva-reader", "geneva-writer", "geneva-saver")
    return [thread for thread in threading.enumerate() if thread.name in ours]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert own_threads() == []


# ------------------------------------------------------------------------------------- the queue


class TestQueue:
    def test_items_come_in_order(self) -> None:
        queue: BoundedQueue[int] = BoundedQueue(Halt())
        for number in range(3):
            queue.put(number)
        assert [queue.get(), queue.get(), queue.get(), queue.get_now()] == [0, 1, 2, None]

    def test_what_waits_never_takes_more_room_than_there_is(self) -> None:
        halt, draw = Halt(), random.Random(7)
        queue: BoundedQueue[float] = BoundedQueue(halt)
        most, alone = 0.0, 0

        def fill() -> None:
            for _ in range(200):
                share = draw.choice([0.1, 0.3, 0.6, 1.5])
                queue.put(share, share)

        stage = Stage("geneva-writer", fill, halt)
        for _ in range(200):
            queue.get()
            with queue._changed:
                inside = sum(item for item, _ in queue._items)
                most = max(most, inside if len(queue._items) > 1 else 0.0)
                alone += len(queue._items) == 1
        stage.join(LIMIT)
        assert most <= 1.0 + 1e-9
        assert alone

    @pytest.mark.parametrize("waits_at", ["put", "get"])
    def test_whoever_waits_is_stopped(self, waits_at: str) -> None:
        halt = Halt()
        queue: BoundedQueue[int] = BoundedQueue(halt)
        if waits_at == "put":
            queue.put(0, 1.0)
        stopped = threading.Event()

        def wait() -> None:
            try:
                queue.put(1, 1.0) if waits_at == "put" else queue.get()
            except Stopped:
                stopped.set()
                raise

        stage = Stage("geneva-reader", wait, halt)
        time.sleep(0.05)
        assert not stopped.is_set()
        halt.set()
        assert stopped.wait(LIMIT)
        stage.join(LIMIT)
        assert halt.error is None, "to be stopped is no error"
        with pytest.raises(Stopped):
            queue.get()

    def test_the_first_error_is_kept(self) -> None:
        halt = Halt()
        for number in range(2):
            halt.set(ValueError(number))
        halt.set()
        assert str(halt.error) == "0"


# -------------------------------------------------------------------------------------- pipelines


@dataclass
class Program:
    """Triples; calls `before` with each batch's values."""

    before: Any = lambda xs: None
    calls: list[list[int]] = field(default_factory=list)
    cost: CallCost = field(default_factory=CallCost)
    is_async: bool = False
    prepares: int = 0

    def warm(self, batch: pa.RecordBatch) -> None:
        """Need nothing."""

    def ahead(self, batch: pa.RecordBatch, guard: Any = None) -> None:
        """Call when asked."""

    def run(
        self, batch: pa.RecordBatch, guard: Guard | None = None, prepared: None = None
    ) -> Applied:
        xs = batch.column(0).to_pylist()
        self.before(xs)
        self.calls.append(xs)
        return Applied((pa.array([3 * x for x in xs], pa.int64()),))

    def call(self, batch: pa.RecordBatch, guard: Guard | None = None) -> Applied:
        return self.run(batch, guard)

    def close(self) -> None:
        """Hold nothing."""


def make_pipeline(task: OpenTask, program: Program, *, is_retry: bool = False) -> Pipeline:
    made = Pipeline(task, is_retry=is_retry)
    made._runner = BatchRunner(task, lambda work: program)  # type: ignore[arg-type,return-value]
    return made


def parts_of(rows: int, size: int) -> list[PartWork]:
    return [make_part(rows, RowRange(at, min(at + size, rows))) for at in range(0, rows, size)]


def test_the_reader_is_in_the_next_part_while_the_program_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_read = threading.Event()
    read = Reader.read

    def watched(self: Reader, part: PartWork) -> Iterator[Window | Result]:
        if part.rows.start:
            second_read.set()
        return read(self, part)

    monkeypatch.setattr(Reader, "read", watched)
    program = Program(before=lambda xs: second_read.wait(LIMIT) or pytest.fail("not read ahead"))
    report = make_pipeline(open_task(tmp_path, range(8)), program).run(parts_of(8, 4))
    assert [result.rows_run for result in report.results] == [4, 4]


def test_the_program_is_in_the_next_part_while_the_writer_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = threading.Event()
    finish = PartWriter.finish

    def watched(self: PartWriter) -> Any:
        assert computed.wait(LIMIT), "the program waits for the writer"
        return finish(self)

    monkeypatch.setattr(PartWriter, "finish", watched)
    program = Program(before=lambda xs: computed.set() if 4 in xs else None)
    make_pipeline(open_task(tmp_path, range(8)), program).run(parts_of(8, 4))


class SlowStore(InMemoryCheckpointStore):
    """Notes what the program had computed when a checkpoint was begun, and when it was there."""

    def __init__(self, program: Program, seconds: float) -> None:
        super().__init__()
        self.program, self.seconds = program, seconds
        self.events: list[tuple[int, int]] = []

    def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
        before = len(self.program.calls)
        time.sleep(self.seconds)
        super().__setitem__(key, value)
        self.events.append((before, len(self.program.calls)))


def test_a_checkpoint_of_rows_that_the_user_counted_is_awaited(tmp_path: Path) -> None:
    program = Program()
    store = SlowStore(program, 0.05)
    task = replace(open_task(tmp_path, range(8), checkpoint_size=2), store=store)
    make_pipeline(task, program).run([make_part(8)])
    assert store.events == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_checkpoint_by_time_is_written_behind_and_one_at_a_time(tmp_path: Path) -> None:
    program = Program(before=lambda xs: time.sleep(0.02))
    store = SlowStore(program, 0.05)
    task = replace(open_task(tmp_path, range(40), batch_size=2), store=store)
    task = replace(task, work=replace(task.work, flush_seconds=0.03))
    make_pipeline(task, program).run([make_part(40)])
    assert any(after > before for before, after in store.events[:-1]), "the program ran meanwhile"
    starts = [before for before, _ in store.events]
    assert max(b - a for a, b in pairwise(starts)) <= 8, "bounded"
    assert len(store.list_keys()) == len(store.events)


def test_a_part_is_settled_before_the_next_one_where_rows_are_counted(tmp_path: Path) -> None:
    program = Program()
    store = SlowStore(program, 0.05)
    task = replace(open_task(tmp_path, range(8), checkpoint_size=100), store=store)
    make_pipeline(task, program).run(parts_of(8, 2))
    assert store.events == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_lost_task_settles_a_part_before_the_next_one(tmp_path: Path) -> None:
    """Else a worker that dies in the second part leaves a note on a row of the first."""
    notes: list[list[str]] = []
    task = open_task(tmp_path, range(8))
    program = Program(before=lambda xs: notes.append(task.store.list_keys("attempt-")))
    parts = parts_of(8, 4)
    make_pipeline(task, program, is_retry=True).run(parts)
    first, second = (note_key("job", part) for part in parts)
    expected = [[first] if xs[0] < 4 else [second] for xs in program.calls]
    assert notes == expected


# ------------------------------------------------------------------------- errors at every stage


class Broken(Exception):
    """An error that is nobody's outcome."""


class Panic(BaseException):
    """As Lance panics: no Exception."""


PLACES: list[tuple[type[BaseException], str]]
PLACES = [(kind, place) for kind in (Broken, Panic) for place in ("reader", "program", "writer")]
PLACES += [(Broken, "store"), (Panic, "store"), (Damaged, "reader"), (Damaged, "writer")]


@pytest.mark.parametrize(("kind", "place"), PLACES)
@pytest.mark.parametrize("seed", range(6))
def test_an_error_of_any_stage_ends_all_of_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
    place: str,
    seed: int,
) -> None:
    """At a random moment, with random delays, in a task of several parts."""
    draw = random.Random(f"{kind}{place}{seed}")
    moment = draw.randrange(1, 12)
    count = {"reader": 0, "program": 0, "store": 0, "writer": 0}

    def step(stage: str) -> None:
        time.sleep(draw.choice([0, 0, 0.001]))
        count[stage] += 1
        if stage == place and count[stage] == moment:
            raise kind("here")

    class Store(InMemoryCheckpointStore):
        def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
            step("store")
            super().__setitem__(key, value)

    read, add = Reader.read, PartWriter.add

    def reading(self: Reader, part: PartWork) -> Iterator[Window | Result]:
        for item in read(self, part):
            step("reader")
            yield item

    def adding(self: PartWriter, result: Result) -> Any:
        step("writer")
        return add(self, result)

    monkeypatch.setattr(Reader, "read", reading)
    monkeypatch.setattr(PartWriter, "add", adding)
    sizes = draw.choice([{"checkpoint_size": 2}, {"batch_size": 2}])
    task = replace(open_task(tmp_path, range(40), **sizes), store=Store())
    task = replace(task, work=replace(task.work, flush_seconds=0.0))
    program = Program(before=lambda xs: step("program"))
    made, parts = make_pipeline(task, program), parts_of(40, 10)
    started = time.monotonic()
    if kind is Damaged:
        report = made.run(parts)
        assert len(report.unreadable) == 1
        assert len(report.results) == 3, "the other parts are done"
        assert report.failure is None
    else:
        with pytest.raises(kind, match="here"):
            made.run(parts)
    assert time.monotonic() - started < LIMIT
    assert own_threads() == []
    rows = [x for call in program.calls for x in call]
    assert len(rows) == len(set(rows)), "no row was computed twice"


def test_a_store_that_hangs_does_not_keep_a_failed_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_module, "_PATIENCE_SECONDS", 0.05)
    answers = threading.Event()
    read = Reader.read

    def hanging(self: Reader, part: PartWork) -> Iterator[Window | Result]:
        yield from read(self, part)
        if part.rows.start:
            answers.wait(LIMIT)

    monkeypatch.setattr(Reader, "read", hanging)

    def fail(xs: list[int]) -> None:
        raise Broken("here")

    with pytest.raises(Broken):
        make_pipeline(open_task(tmp_path, range(8)), Program(before=fail)).run(parts_of(8, 4))
    answers.set()
    for thread in own_threads():
        thread.join(LIMIT)


def test_what_can_not_be_written_is_not_computed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(self: PartWriter, result: Result) -> Any:
        raise Damaged("old values")

    monkeypatch.setattr(PartWriter, "add", damaged)
    program = Program()
    task = open_task(tmp_path, range(400), checkpoint_size=2)
    report = make_pipeline(task, program).run([make_part(400, file=make_file(400))])
    assert [part.reason for part in report.unreadable] == ["old values"]
    assert len(program.calls) < 20


def test_threads_end_with_their_task_and_serve_the_next_one(tmp_path: Path) -> None:
    task = open_task(tmp_path, range(8))
    for _ in range(3):
        make_pipeline(task, Program()).run(parts_of(8, 4))
        assert own_threads() == []


def test_a_task_of_nothing_starts_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "__init__", lambda *args: pytest.fail("started"))
    report = make_pipeline(open_task(tmp_path, range(8)), Program()).run([])
    assert report.results == ()


def test_a_writer_that_fails_at_the_very_end_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Store(InMemoryCheckpointStore):
        def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
            raise Broken("the last one")

    store: CheckpointStore = Store()
    task = replace(open_task(tmp_path, range(4)), store=store)
    with pytest.raises(Broken, match="the last one"):
        make_pipeline(task, Program()).run([make_part(4)])

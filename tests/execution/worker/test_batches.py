"""The program of a worker alone: windows in, results out. Reads and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import udf
from geneva.errors import TooManyFailedRowsError, UDFError, UDFExecutionError
from geneva.execution.apply.batch import Applied, Applier
from geneva.execution.apply.failures import CellFailure, with_failure
from geneva.execution.apply.timeouts import Guard
from geneva.execution.worker import pacing
from geneva.execution.worker.batches import BatchRunner, Event
from geneva.execution.worker.poison_rows import PoisonSearch
from geneva.execution.worker.records import (
    BatchFailed,
    Computed,
    Durable,
    OpenTask,
    Result,
    Saved,
    Window,
)
from geneva.execution.worker.sealing import sealed
from geneva.model.digests import digest_rows
from geneva.model.rows import RowRange
from geneva.planning.batching import CallCost
from geneva.planning.sizing import BatchRule
from worker_support import (
    COMPUTATION,
    as_offsets,
    make_part,
    make_piece,
    make_result,
    open_task,
)


@dataclass
class Tripling:
    """A program that notes its batches, skips the rows in `skipped` and fails on those in `bad`."""

    skipped: frozenset[int] = frozenset()
    bad: frozenset[int] = frozenset()
    batches: list[list[int]] = field(default_factory=list)
    cost: CallCost = field(default_factory=CallCost)
    is_async: bool = False
    prepares: int = 0
    prepared: list[list[int]] = field(default_factory=list)
    """The batches that were prepared."""

    def warm(self, batch: pa.RecordBatch) -> None:
        """Need nothing."""

    def prepare(self, batch: pa.RecordBatch, guard: Guard) -> Future[Any] | None:
        self.prepared.append(batch.column(0).to_pylist())
        future: Future[Any] = Future()
        future.set_result(batch)
        return future

    def run(
        self,
        batch: pa.RecordBatch,
        guard: Guard | None = None,
        prepared: Future[Any] | None = None,
    ) -> Applied:
        xs = batch.column(0).to_pylist()
        if prepared is not None:
            assert prepared.result() is batch
        self.batches.append(xs)
        for row, x in enumerate(xs):
            if x in self.bad:
                raise with_failure(UDFExecutionError("bad"), CellFailure(row, "ValueError", "bad"))
        places = [i for i, x in enumerate(xs) if x in self.skipped]
        failures = [CellFailure(i, "ValueError", "no") for i in places]
        values = [None if x in self.skipped else 3 * x for x in xs]
        return Applied((pa.array(values, pa.int64()),), tuple(failures))

    def call(self, batch: pa.RecordBatch, guard: Guard | None = None) -> Applied:
        return self.run(batch, guard)

    def ahead(self, batch: pa.RecordBatch, guard: Guard | None = None) -> None:
        """Call when asked."""

    def settle(self, error: UDFError, batch: pa.RecordBatch, attempt: int) -> Applied:
        failure = CellFailure(0, type(error).__name__, str(error), attempt=attempt)
        return Applied((pa.nulls(1, pa.int64()),), (failure,))

    def close(self) -> None:
        """Hold nothing."""


@dataclass
class Running:
    """A runner, and what it computes as it is written: with receipts."""

    task: OpenTask
    runner: BatchRunner

    def run(self, *items: Window | Result) -> Iterator[Result]:
        """Run what belongs to one part so far."""
        for item in items:
            yield from self._results(self.runner.run(item))

    def run_all(self, *items: Window | Result) -> Iterator[Result]:
        """Run a whole part."""
        yield from self.run(*items)
        yield from self._results(self.runner.end())
        yield from self._results(self.runner.finish())

    def _results(self, events: Iterator[Event]) -> Iterator[Result]:
        for event in events:
            if isinstance(event, Computed):
                yield sealed(self.task, [event])
            elif isinstance(event, Result):
                yield event


Begin = Callable[..., Running]


def begun(task: OpenTask, program: Tripling | Applier, *, retried: bool = False) -> Running:
    runner = BatchRunner(task, lambda work: program)
    search = PoisonSearch(task.store, "a", is_retry=retried)
    list(runner.begin(make_part(10, window=100), search))
    return Running(task, runner)


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    def make(program: Tripling | Applier, *, retried: bool = False, **sizes: int) -> Running:
        return begun(open_task(tmp_path, range(10), **sizes), program, retried=retried)

    return make


def window(*rows: int, start: int = 0) -> Window:
    offsets = as_offsets(rows)
    inputs = pa.record_batch({"x": pa.array(offsets, pa.int64())})
    digests = digest_rows(inputs.columns, COMPUTATION.receipt_seed(), len(offsets))
    return Window(RowRange(start, rows[-1] + 1), offsets, inputs, digests=digests)


def test_a_window_is_cut_into_batches(begin: Begin) -> None:
    program = Tripling()
    results = list(begin(program, batch_size=4).run_all(window(*range(10))))
    assert program.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [(r.rows.start, r.rows.end, r.rows_run) for r in results] == [
        (0, 4, 4),
        (4, 8, 4),
        (8, 10, 2),
    ]
    values = [v for r in results for v in r.piece.values.column(0).to_pylist()]
    assert values == [3 * i for i in range(10)]
    assert results[0].piece.values.column(1).equals(make_piece(range(4)).values.column(1))


def test_ranges_end_with_their_last_row_and_leave_no_gap(begin: Begin) -> None:
    results = list(begin(Tripling(), batch_size=2).run_all(window(1, 3, 6, 9)))
    assert [(r.rows.start, r.rows.end) for r in results] == [(0, 4), (4, 10)]


def test_a_checkpoint_is_due_at_its_exact_size(begin: Begin) -> None:
    runner = begin(Tripling(), checkpoint_size=3, batch_size=2)
    results = list(runner.run_all(window(*range(7))))
    assert [len(r.piece.offsets) for r in results] == [2, 1, 2, 1, 1]
    later, now = Durable.LATER, Durable.NOW
    assert [r.durable for r in results] == [later, now, later, now, later]


def test_a_loaded_range_passes_and_starts_the_count_anew(begin: Begin) -> None:
    runner = begin(Tripling(), checkpoint_size=3, batch_size=2)
    list(runner.run(window(0, 1)))
    loaded = make_result(2, 4, durable=Durable.ALREADY)
    assert list(runner.run(loaded)) == [loaded]
    results = list(runner.run_all(window(4, 5, 6, start=4)))
    assert [r.durable for r in results] == [Durable.LATER, Durable.NOW]


def test_known_values_are_merged_into_their_batch(begin: Begin) -> None:
    program = Tripling()
    known = replace(window(0, 3, 5), known=make_piece([1, 2, 4]))
    results = list(begin(program, batch_size=2).run_all(known))
    assert program.batches == [[0, 3], [5]]
    assert [r.piece.offsets.tolist() for r in results] == [[0, 1, 2, 3], [4, 5]]
    assert [r.piece.values.column(0).to_pylist() for r in results] == [[0, 3, 6, 9], [12, 15]]
    assert [(r.rows_run, r.rows_reused) for r in results] == [(2, 2), (1, 1)]


def test_reading_is_work_that_can_be_lost(begin: Begin) -> None:
    first, second = begin(Tripling(), batch_size=5).run_all(
        replace(window(*range(10)), seconds=7.0)
    )
    assert first.seconds >= 7.0 > second.seconds


def test_skipped_rows_are_reported_by_their_offset(begin: Begin) -> None:
    runner = begin(Tripling(skipped=frozenset({6})), batch_size=4)
    _, result, _ = runner.run_all(window(*range(1, 10)))
    assert [failure.offset for failure in result.failures] == [6]
    assert result.piece.values.column(0).to_pylist() == [15, None, 21, 24]


def test_a_failure_ends_the_run_and_says_where(begin: Begin) -> None:
    runner = begin(Tripling(bad=frozenset({6})), batch_size=4)
    results: list[Result] = []
    with pytest.raises(BatchFailed) as caught:
        results.extend(iter(runner.run(window(*range(10)))))
    failed = caught.value
    assert failed.rows == RowRange(4, 8)
    assert isinstance(failed.error, UDFExecutionError)
    assert failed.at_fault is not None
    assert failed.at_fault.offset == 6


def test_too_many_failures_end_the_run(tmp_path: Path) -> None:
    task = open_task(tmp_path, range(10), batch_size=2)
    task = replace(task, work=replace(task.work, max_failed=1))
    program = Tripling(skipped=frozenset({1, 4}))
    runner = begun(task, program)
    with pytest.raises(BatchFailed, match=r"2 rows failed.*allow 1 here.*row 4") as caught:
        list(runner.run(window(*range(10))))
    assert isinstance(caught.value.error, TooManyFailedRowsError)
    assert [failure.offset for failure in caught.value.skipped] == [4]
    assert program.batches == [[0, 1], [2, 3], [4, 5]]


def test_suspects_are_computed_and_saved_one_by_one(tmp_path: Path) -> None:
    task, program = open_task(tmp_path, range(10), batch_size=8), Tripling()
    PoisonSearch(task.store, "a", is_retry=True).starting(as_offsets([3, 4]))
    runner = begun(task, program, retried=True)
    results = list(runner.run_all(window(*range(8))))
    assert program.batches == [[0, 1, 2], [3], [4], [5, 6, 7]]
    later, now = Durable.LATER, Durable.NOW
    assert [r.durable for r in results] == [later, now, now, later]


def test_a_condemned_row_is_not_called(tmp_path: Path) -> None:
    task, program = open_task(tmp_path, range(10), batch_size=8), Tripling()
    for _ in range(2):
        PoisonSearch(task.store, "a", is_retry=True).starting(as_offsets([3]))
    runner = begun(task, program, retried=True)
    results = list(runner.run_all(window(*range(5))))
    assert program.batches == [[0, 1, 2], [4]]
    assert [f.exception_type for f in results[1].failures] == ["WorkerDied"]


def test_dear_checkpoints_are_made_less_often(begin: Begin) -> None:
    runner = begin(Tripling(), batch_size=1)
    slow = replace(window(0), seconds=2.0)
    assert [r.durable for r in runner.run(slow)] == [Durable.SOON]
    runner.runner.saved(Saved(RowRange(0, 1), seconds=1.0))
    assert [r.durable for r in runner.run(slow)] == [Durable.LATER]


def test_a_batch_of_a_given_size_is_full_over_window_borders(begin: Begin) -> None:
    program = Tripling()
    windows = [window(0, 1, 3), window(4, 5, start=4), window(6, start=6), window(7, 9, start=7)]
    windows[1] = replace(windows[1], known=make_piece([]), seconds=1.0)
    windows[3] = replace(windows[3], known=make_piece([8]), seconds=2.0)
    results = list(begin(program, batch_size=4).run_all(*windows))
    assert program.batches == [[0, 1, 3, 4], [5, 6, 7, 9]]
    assert [r.piece.offsets.tolist() for r in results] == [[0, 1, 3, 4], [5, 6, 7, 8, 9]]
    assert [(r.rows.start, r.rows.end) for r in results] == [(0, 5), (5, 10)]
    assert results[1].piece.values.column(0).to_pylist() == [15, 18, 21, 24, 27]
    assert results[0].seconds >= 1.0
    assert results[1].seconds >= 2.0


def test_calls_of_async_functions_have_a_given_size_too(begin: Begin) -> None:
    called: list[list[int]] = []

    async def tripled(x: pa.Array) -> pa.Array:
        called.append(x.to_pylist())
        return pc.multiply(x, 3)

    declared = udf(tripled, data_type=pa.int64(), batch_size=4)
    windows = [window(0, 1, 3), window(4, 5, start=4), window(6, 7, 9, start=6)]
    with Applier(declared, pa.field("y", pa.int64())) as program:
        results = list(begin(program, batch_size=4).run_all(*windows))
    assert called == [[0, 1, 3, 4], [5, 6, 7, 9]]
    assert [r.piece.offsets.tolist() for r in results] == called


def test_a_batch_of_our_own_size_ends_with_its_window(begin: Begin) -> None:
    program = Tripling()
    list(begin(program).run(window(0, 1, 2), window(3, 4, start=3)))
    assert [row for batch in program.batches for row in batch] == [0, 1, 2, 3, 4]
    assert program.batches[-1][-1] == 4, "no row waits for the next window"


def test_how_to_cut_a_window_is_worked_out_by_batch_not_by_row(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed of the function is not known yet, so that the first batch has one row."""
    asked: list[None] = []
    plain = BatchRule.batch_rows

    def noting(rule: BatchRule, wanted: int | None) -> int:
        asked.append(None)
        return plain(rule, wanted)

    monkeypatch.setattr(BatchRule, "batch_rows", noting)
    running = begin(Tripling())
    running.runner._cut_rule = BatchRule(1, 100_000, None, 1, None, 60.0)
    list(running.run(window(*range(50_000))))
    assert 0 < len(asked) < 100


def test_a_loaded_range_ends_the_batch_before_it(begin: Begin) -> None:
    program = Tripling()
    loaded = make_result(2, 4, durable=Durable.ALREADY)
    results = list(begin(program, batch_size=4).run(window(0, 1), loaded))
    assert program.batches == [[0, 1]]
    assert [(r.rows.start, r.rows.end) for r in results] == [(0, 2), (2, 4)]


def test_batches_are_prepared_ahead_also_of_the_next_part(tmp_path: Path) -> None:
    task, program = open_task(tmp_path, range(10), batch_size=2), Tripling(prepares=3)
    runner = BatchRunner(task, lambda work: program)
    search = PoisonSearch(task.store, "a", is_retry=False)
    events: list[Event] = []
    for rows in (range(4), range(4, 8)):
        part = make_part(10, RowRange(rows[0], rows[-1] + 1), window=100)
        events += runner.begin(part, search)
        events += runner.run(window(*rows, start=rows[0]))
        events += runner.end()
        assert len(program.prepared) - len(program.batches) <= 3
    assert program.prepared == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert program.batches == [[0, 1]]
    events += runner.finish()
    assert program.batches == program.prepared, "in order"
    kinds = [type(event).__name__ for event in events]
    assert kinds == 2 * ["PartBegins", "Computed", "Computed", "PartEnds"]


def test_nothing_is_prepared_ahead_after_a_worker_was_lost(tmp_path: Path) -> None:
    """Only the batch that is run is noted: another one that kills the worker would not be found."""
    task, program = open_task(tmp_path, range(10), batch_size=2), Tripling(prepares=3)
    list(begun(task, program, retried=True).run_all(window(*range(8))))
    assert program.prepared == []
    assert len(program.batches) == 4


def test_checkpoints_of_a_given_size_stay_exact_with_batches_ahead(tmp_path: Path) -> None:
    task = open_task(tmp_path, range(10), batch_size=2, checkpoint_size=3)
    program = Tripling(prepares=2)
    results = list(begun(task, program).run_all(window(*range(8))))
    assert program.batches == [[0, 1], [2], [3, 4], [5], [6, 7]]
    later, now = Durable.LATER, Durable.NOW
    assert [r.durable for r in results] == [later, now, later, now, later]


@pytest.mark.parametrize("prepares", [0, 2])
@pytest.mark.parametrize("borders", [(20,), (7, 12, 20), (1, 2, 3, 4, 11, 19, 20)])
@pytest.mark.parametrize("sizes", [{"checkpoint_size": 5}, {"max_checkpoint_size": 5}])
@pytest.mark.parametrize("many_bytes", [False, True])
def test_batches_stay_exact_behind_a_checkpoint_of_many_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    prepares: int,
    borders: tuple[int, ...],
    sizes: dict[str, int],
    many_bytes: bool,
) -> None:
    if many_bytes:
        monkeypatch.setattr(pacing, "MAX_UNSAVED_BYTES", 1)
    task = open_task(tmp_path, range(20), batch_size=2, **sizes)
    program = Tripling(prepares=prepares)
    starts = (0, *borders[:-1])
    windows = [window(*range(a, b), start=a) for a, b in zip(starts, borders, strict=True)]
    results = list(begun(task, program).run_all(*windows))
    assert [len(batch) for batch in program.batches] == [2, 2, 1] * 4
    later = Durable.NOW if many_bytes else Durable.LATER
    assert [r.durable for r in results] == [later, later, Durable.NOW] * 4

"""Calls that follow each other at once: what they return is looked at behind several of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import Connection, report_usage, udf
from geneva.errors import TooManyFailedRowsError, UDFExecutionError, UDFOutputError
from geneva.execution.apply.batch import Applied, Applier
from geneva.execution.apply.layouts import as_array
from geneva.execution.worker import batches
from geneva.execution.worker.batches import BatchRunner
from geneva.execution.worker.pacing import Deadline
from geneva.execution.worker.poison_rows import PoisonSearch
from geneva.execution.worker.records import BatchFailed, Computed, Window
from geneva.model.digests import digest_rows
from geneva.model.rows import RowRange
from geneva.on_error import skip_on_error
from geneva.planning.sizing import Limit
from support import make_table
from worker_support import COMPUTATION, as_offsets, make_file, make_part, open_task

ROWS, SIZE = 10, 2


def windows() -> Iterator[Window]:
    """All rows, in windows that are batches as they are."""
    for start in range(0, ROWS, SIZE):
        offsets = as_offsets(range(start, start + SIZE))
        inputs = pa.record_batch({"x": pa.array(offsets, pa.int64())})
        digests = digest_rows(inputs.columns, COMPUTATION.receipt_seed(), SIZE)
        yield Window(RowRange(start, start + SIZE), offsets, inputs, digests=digests)


class Log:
    """What happens, in order: calls, and results that are handed on."""

    def __init__(self, tmp_path: Path) -> None:
        self.events: list[tuple[str, int]] = []
        self.values: list[Any] = []
        self.seconds = 0.0
        self._task = open_task(tmp_path, range(ROWS), batch_size=SIZE)

    def run(
        self, function: Callable[[Log, pa.Array], Any], limit: Limit | None = None, **options: Any
    ) -> None:
        """Compute all windows by a function of arrays, in a task with a limit."""

        @udf(data_type=pa.int64(), batch_size=SIZE, **options)
        def called(x: pa.Array) -> pa.Array:
            self.events.append(("call", x[0].as_py()))
            return function(self, x)

        self.apply(Applier(called, pa.field("y", pa.int64())), limit)

    def apply(self, applier: Applier, limit: Limit | None = None) -> None:
        """Compute all windows of a fragment."""
        runner = self.runner = BatchRunner(self._task, lambda work: applier)
        runner.deadline = Deadline(limit, ROWS)
        search = PoisonSearch(self._task.store, "a", is_retry=False)
        list(runner.begin(make_part(ROWS, window=100, file=make_file(ROWS)), search))
        for event in runner.run(*windows()):
            assert isinstance(event, Computed)
            self.events.append(("result", event.rows.start))
            self.seconds += event.seconds
            self.values += as_array(event.outputs[0]).to_pylist()

    @property
    def calls(self) -> list[int]:
        return [row for kind, row in self.events if kind == "call"]

    @property
    def results(self) -> list[int]:
        return [row for kind, row in self.events if kind == "result"]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def fresh(log: Log, x: pa.Array) -> Any:
    return x.to_numpy() * 3


TRIPLED = [3 * i for i in range(ROWS)]


def test_results_are_handed_on_behind_the_calls_of_a_moment(log: Log) -> None:
    log.run(fresh)
    assert log.values == TRIPLED
    assert log.calls == log.results == [0, 2, 4, 6, 8]
    first, others = ["call", "result"], ["call"] * 4 + ["result"] * 4
    assert [kind for kind, _ in log.events] == first + others


def test_calls_follow_each_other_in_tasks_that_may_end_in_fragments(log: Log) -> None:
    log.run(fresh, limit=Limit(60.0, max_rest=0.0, in_fragments=True))
    assert [kind for kind, _ in log.events] == ["call", "result"] + ["call"] * 4 + ["result"] * 4


def test_a_task_that_is_over_ends_the_moment(log: Log) -> None:
    log.run(fresh, limit=Limit(0.0, max_rest=0.0, in_fragments=True))
    assert log.runner.is_given_back
    assert log.calls == log.results == [0]


@pytest.mark.parametrize("bound", ["_BURST_SECONDS", "_BURST_BYTES"])
def test_a_moment_ends(log: Log, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(batches, bound, 0)
    log.run(fresh)
    assert [kind for kind, _ in log.events] == ["call", "result"] * 5


def test_what_came_before_a_failure_is_handed_on(log: Log) -> None:
    def fails(log: Log, x: pa.Array) -> Any:
        if 6 in x.to_pylist():
            raise ValueError("six")
        return fresh(log, x)

    with pytest.raises(BatchFailed) as failed:
        log.run(fails)
    assert isinstance(failed.value.error, UDFExecutionError)
    assert failed.value.rows == RowRange(6, 8)
    assert log.results == [0, 2, 4]
    assert log.calls == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: np.zeros(len(x) + 1, np.int64),
        lambda x: np.zeros(len(x), np.float64),
        lambda x: np.array(["a"] * len(x), dtype=object),
    ],
)
def test_a_result_that_is_wrong_fails_at_its_place(
    log: Log, wrong: Callable[[pa.Array], Any]
) -> None:
    with pytest.raises(BatchFailed) as failed:
        log.run(lambda log, x: wrong(x) if 4 in x.to_pylist() else fresh(log, x))
    assert isinstance(failed.value.error, UDFOutputError)
    assert failed.value.rows == RowRange(4, 6)
    assert log.results == [0, 2]


def test_rows_that_are_skipped_end_the_moment(log: Log) -> None:
    def fails(log: Log, x: pa.Array) -> Any:
        if 5 in x.to_pylist():
            raise ValueError("five")
        return fresh(log, x)

    log.run(fails, on_error=skip_on_error())
    assert log.values == [*TRIPLED[:5], None, *TRIPLED[6:]]
    assert log.events.index(("result", 4)) < log.events.index(("call", 6))


def test_rows_may_be_skipped_of_what_was_kept(log: Log) -> None:
    def some_wrong(log: Log, x: pa.Array) -> Any:
        found = fresh(log, x)
        return found[:1] if 4 in x.to_pylist() and len(x) > 1 else found

    with pytest.raises(BatchFailed):
        log.run(some_wrong)
    log.events.clear()
    log.values.clear()
    log.run(some_wrong, on_error=skip_on_error())
    assert log.values == TRIPLED


def test_calls_that_are_made_again_are_timed(log: Log) -> None:
    def slow_alone(log: Log, x: pa.Array) -> Any:
        if len(x) == 1:
            time.sleep(0.05)
        return fresh(log, x)[:1]

    log.run(slow_alone, on_error=skip_on_error())
    assert log.values == TRIPLED
    assert log.runner.clock.udf >= ROWS * 0.05
    assert log.seconds == pytest.approx(log.runner.clock.udf, rel=0.1)


def test_memory_and_objects_that_are_used_again(log: Log) -> None:
    memory, inner, objects = np.zeros(SIZE, np.int64), np.zeros(SIZE, object), {}

    def again(log: Log, x: pa.Array) -> Any:
        memory[:] = x.to_numpy() * 3
        return memory

    def in_objects(log: Log, x: pa.Array) -> Any:
        inner[:] = [3 * value for value in x.to_pylist()]
        return inner.view()

    def kept_for_a_call(log: Log, x: pa.Array) -> Any:
        if "last" in objects:
            objects.pop("last")[:] = -1
        objects["last"] = fresh(log, x)
        return objects["last"]

    for function in (again, in_objects, kept_for_a_call):
        log.values.clear()
        log.run(function)
        assert log.values == TRIPLED


def test_lists_in_an_array_of_objects_that_are_used_again(tmp_path: Path) -> None:
    row = [0]

    @udf(data_type=pa.list_(pa.int64()), batch_size=SIZE)
    def lists(x: pa.Array) -> Any:
        row[0] = x[0].as_py()
        found = np.empty(len(x), dtype=object)
        found[:] = [row] * len(x)
        return found

    applier = Applier(lists, pa.field("y", pa.list_(pa.int64())))
    found = [applier.call(window.inputs) for window in windows()]
    applied = [each if isinstance(each, Applied) else each.applied() for each in found]
    assert [each.arrays[0][0].as_py() for each in applied] == [[0], [2], [4], [6], [8]]


class Metered:
    """Reports usage when it is set up, which is no call, and in each call."""

    def setup(self) -> None:
        report_usage(tokens=1_000)

    def __call__(self, id: pa.Array) -> pa.Array:
        report_usage(tokens=len(id))
        return id


@pytest.mark.parametrize("batch_size", [None, SIZE])
def test_usage_counts_in_calls(local_db: Connection, batch_size: int | None) -> None:
    table = make_table(local_db, [ROWS])
    y = udf(data_type=pa.int64(), version="1", batch_size=batch_size)(Metered)()
    table.add_columns({"y": y})
    assert table.backfill("y").progress.tokens == ROWS


def test_an_error_of_the_set_up_is_one_of_the_first_batch(tmp_path: Path) -> None:
    class Broken:
        def setup(self) -> None:
            raise ValueError("no model")

        def __call__(self, x: pa.Array) -> pa.Array:
            return x

    log = Log(tmp_path)
    made = udf(data_type=pa.int64(), batch_size=SIZE)(Broken)()
    with pytest.raises(BatchFailed, match="no model") as failed:
        log.apply(Applier(made, pa.field("y", pa.int64())))
    assert failed.value.rows == RowRange(0, SIZE)
    assert log.runner.clock.udf > 0


def test_limits_of_failures_hold(tmp_path: Path) -> None:
    log = Log(tmp_path)
    object.__setattr__(log._task.work, "max_failed", 1)

    def fails(log: Log, x: pa.Array) -> Any:
        raise ValueError("never")

    with pytest.raises(BatchFailed) as failed:
        log.run(fails, on_error=skip_on_error())
    assert isinstance(failed.value.error, TooManyFailedRowsError)
    assert set(log.calls) <= {0, 1}, "no other batch is begun"

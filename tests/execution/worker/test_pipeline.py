"""Reader, program and writer joined, over the parts of one task; no driver, no runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from geneva import udf
from geneva.execution.worker.pipeline import Pipeline
from geneva.execution.worker.poison_rows import PoisonSearch, note_key
from geneva.execution.worker.records import OpenTask
from geneva.execution.worker.task import (
    PartFailure,
    PartResult,
    RowFailure,
    TaskReport,
    Timings,
    UnreadablePart,
)
from geneva.model.computation import Udf, permit_any
from geneva.model.rows import RowRange
from geneva.planning.sizing import Limit
from geneva.storage.checkpoints.reuse import BatchCheckpoint, Reuse
from geneva.storage.columns.functions import stage_udf
from worker_support import COMPUTATION, as_offsets, make_file, make_part, open_task

FAILURE = RowFailure(
    offset=6,
    exception_type="ValueError",
    message="no",
    traceback="",
    attempt=1,
    preview="",
    row_id=9,
)


@udf(data_type=pa.int64())
def fragile(x: int) -> int:
    if x == 6:
        raise ValueError("can't do 6")
    return 3 * x


@pytest.fixture
def task(tmp_path: Path) -> OpenTask:
    opened = open_task(tmp_path, range(10), batch_size=2)
    program = Udf("fragile", stage_udf(opened.work.ref, fragile))
    computation = replace(COMPUTATION, program=program)
    permit = permit_any(opened.work.ref, computation)
    return replace(opened, work=replace(opened.work, computation=computation, permit=permit))


def test_parts_are_done_in_order(task: OpenTask) -> None:
    parts = [make_part(10, RowRange(0, 3)), make_part(10, RowRange(3, 6))]
    report = Pipeline(task, is_retry=False).run(parts)
    assert report.failure is None
    assert [result.rows for result in report.results] == [RowRange(0, 3), RowRange(3, 6)]
    assert [result.rows_run for result in report.results] == [3, 3]
    assert len(task.store.list_keys()) == 2


def test_a_failure_saves_what_was_computed_and_ends_the_task(task: OpenTask) -> None:
    whole = make_part(10, file=make_file(10))
    report = Pipeline(task, is_retry=False).run([whole, whole])
    assert report.results == ()
    failure = report.failure
    assert failure is not None
    assert failure.kind == "UDFExecutionError"
    assert failure.message.startswith("Table 't', column 'y', fragment 0, row 6 (of rows [6, 8)): ")
    assert [row.offset for row in failure.failures] == [6]
    assert [key.rpartition("_")[2] for key in task.store.list_keys()] == ["range-0-6"]
    assert list(Path(task.work.ref.uri, "data").glob("geneva-*")) == []


def test_parts_that_there_is_no_time_for_are_left(task: OpenTask) -> None:
    parts = [make_part(10, RowRange(at, at + 2)) for at in (0, 2, 4)]
    report = Pipeline(task, is_retry=False).run(parts, limit=Limit(0.0, max_rest=0.0))
    assert [result.rows for result in report.results] == [RowRange(0, 2)]
    assert TaskReport.from_json(report.to_json()).parts_left == 2
    assert Pipeline(task, is_retry=False).run(parts).parts_left == 0


def test_the_rest_of_a_fragment_that_there_is_no_time_for_is_given_back(task: OpenTask) -> None:
    whole = make_part(10, file=make_file(10))
    limit = Limit(0.0, max_rest=0.0, in_fragments=True)
    report = Pipeline(task, is_retry=False).run([whole, whole], limit=limit)
    (result,) = report.results
    assert (result.rows, result.checkpoints) == (RowRange(0, 2), (RowRange(0, 2),))
    assert (result.rows_run, result.staged_path) == (2, None)
    assert report.parts_left == 1
    assert list(Path(task.work.ref.uri, "data").glob("geneva-*")) == []


def test_what_takes_no_time_is_not_given_back(task: OpenTask) -> None:
    whole = make_part(6, file=make_file(6))
    limit = Limit(0.0, max_rest=60.0, in_fragments=True)
    report = Pipeline(task, is_retry=False).run([whole, whole], limit=limit)
    assert [result.rows for result in report.results] == [RowRange(0, 6)] * 2


@pytest.mark.parametrize("is_retry", [False, True])
def test_ranges_and_second_tries_are_not_given_back(task: OpenTask, *, is_retry: bool) -> None:
    part = make_part(6, file=make_file(6)) if is_retry else make_part(10, RowRange(0, 6))
    limit = Limit(0.0, max_rest=0.0, in_fragments=True)
    report = Pipeline(task, is_retry=is_retry).run([part], limit=limit)
    assert [result.rows for result in report.results] == [RowRange(0, 6)]


def test_what_was_saved_is_not_computed_again(task: OpenTask) -> None:
    Pipeline(task, is_retry=False).run([make_part(10)])
    part = make_part(10, RowRange(0, 6), covered=(RowRange(0, 6),))
    report = Pipeline(task, is_retry=False).run([part])
    (result,) = report.results
    assert (result.rows_run, result.rows_reused) == (0, 6)


@pytest.mark.parametrize("end", [6, 10])
def test_notes_on_poison_rows_go_with_the_part(task: OpenTask, end: int) -> None:
    part = make_part(10, RowRange(0, end))
    key = note_key("job", part)
    PoisonSearch(task.store, key, is_retry=True).starting(as_offsets([0, 1]))
    Pipeline(task, is_retry=True).run([part])
    assert key not in task.store


def test_an_error_of_the_store_is_no_failure_of_the_function(task: OpenTask) -> None:
    class Broken(type(task.store)):  # type: ignore[misc]
        def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        Pipeline(replace(task, store=Broken()), is_retry=False).run([make_part(10)])


def test_a_report_reads_back_as_it_was() -> None:
    result = PartResult(
        fragment_id=1,
        rows=RowRange(0, 9),
        checkpoints=(RowRange(0, 4), RowRange(4, 9)),
        rows_run=9,
        failures=(FAILURE,),
    )
    failure = PartFailure(2, "UDFExecutionError", "bad", "Traceback", (FAILURE,))
    report = TaskReport(
        results=(result,),
        failure=failure,
        unreadable=(UnreadablePart(3, RowRange(0, 5), "gone"),),
        timings=Timings(1.0, 2.0, 3.0, 4.0),
        recorded=((1, 2),),
        retries=2,
    )
    assert TaskReport.from_json(report.to_json()) == report


def test_a_failure_claims_no_rows_that_were_not_saved(task: OpenTask) -> None:
    """Rows 4 and 5 are taken over together with row 6, which fails: they are not saved yet."""
    Pipeline(task, is_retry=False).run([make_part(10, RowRange(4, 6), prefix="udf-before")])
    (key,) = task.store.list_keys()
    reuse = Reuse(BatchCheckpoint(key), source=as_offsets([0, 1]), target=as_offsets([4, 5]))
    report = Pipeline(task, is_retry=False).run([make_part(10, reuse=(reuse,))])
    assert report.failure is not None
    (saved,) = task.store.list_keys("udf-triple")
    assert saved.endswith("range-0-4")

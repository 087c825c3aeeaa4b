"""The error store: what it keeps of rows that failed, for whom, and how much."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

import geneva
from geneva import skip_on_error, udf
from geneva.debug.error_store import ErrorHandlingConfig
from geneva.execution.apply.failures import MAX_TRACEBACKS, preview
from geneva.execution.worker.task import MAX_REPORTED
from geneva.model.tables import Secrets
from geneva.storage.jobs.failures import ErrorRecord, FailureStore
from support import Calls, breakable, by_id, counted, make_table, uncommitted

if TYPE_CHECKING:
    from geneva import Connection


def fails(id: int) -> int:
    if id >= 5:
        raise ValueError(f"no {id}")
    return id


def test_by_job_and_by_column(local_db: Connection) -> None:
    table = make_table(local_db, [8])
    other = make_table(local_db, [8], name="other")
    for one in (table, other):
        one.add_columns({n: udf(fails, name=n, on_error=skip_on_error()) for n in ("a", "b")})
    job_a, job_b = table.backfill("a"), table.backfill("b")
    other.backfill("a")
    assert len(table.get_errors()) == 6
    assert {e.column_name for e in table.get_errors(job_id=job_b)} == {"b"}
    assert {e.job_id for e in table.get_errors(column_name="a")} == {job_a.job_id}
    assert table.get_failed_row_addresses(job_id=job_a, column_name="a") == [5, 6, 7]
    assert table.get_failed_row_addresses(column_name="none") == []
    assert table.get_errors(job_id="it's none") == []
    assert all(e.at <= datetime.now(UTC) for e in table.get_errors())
    assert local_db.table_names() == ["other", "t"]


def test_an_empty_store(local_db: Connection) -> None:
    assert make_table(local_db, [3]).get_errors() == []


@pytest.mark.parametrize("stable", [True, False])
def test_stable_row_ids(local_db: Connection, stable: bool) -> None:
    table = make_table(local_db, [6, 6], stable_row_ids=stable)
    table.delete("id = 1")
    table.add_columns({"c": udf(fails, on_error=skip_on_error())})
    table.backfill("c")
    ids = {e.row_address: e.row_id for e in table.get_errors()}
    fragment = 1 << 32
    if stable:
        assert ids == {5: 5, **{fragment + i: 6 + i for i in range(6)}}
    else:
        assert set(ids.values()) == {None}


def test_what_is_kept_is_bounded(local_db: Connection) -> None:
    def long_story(id: int) -> int:
        raise ValueError("x" * 10_000)

    rows = MAX_REPORTED + 50
    table = make_table(local_db, [rows])
    table.add_columns({"c": udf(long_story, on_error=skip_on_error())})
    result = table.backfill("c", task_size=rows, concurrency=1)
    assert result.rows_failed == rows, "all are counted"
    errors = table.get_errors()
    assert len(errors) == MAX_REPORTED
    assert sum(bool(e.traceback) for e in errors) == MAX_TRACEBACKS
    assert max(len(e.message) + len(e.traceback) for e in errors) < 10_000
    assert table.plan_backfill("c").is_empty, "also of those that are not told"


def test_previews_are_short_and_tell_sizes() -> None:
    batch = pa.record_batch(
        {
            "image": [b"\x89PNG" * 1000],
            "text": ["long " * 1000],
            "vector": pa.array([[0.5] * 768], pa.list_(pa.float32(), 768)),
            "nothing": pa.array([None], pa.int64()),
        }
    )
    told = preview(batch, 0)
    assert told.startswith("image=<4,000 bytes>, text='long long")
    assert "768 items" in told
    assert told.endswith("nothing=None")
    assert len(told) <= 300


def test_inputs_can_be_left_out(local_db: Connection) -> None:
    config = ErrorHandlingConfig(on_error=skip_on_error(), store_inputs=False)
    table = make_table(local_db, [8])
    table.add_columns({"c": udf(fails, error_handling=config)})
    table.backfill("c")
    assert {e.input_preview for e in table.get_errors()} == {""}


def test_a_store_that_can_not_be_written_stops_no_job(
    local_db: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(FailureStore, "append", broken)
    table = make_table(local_db, [8])
    table.add_columns({"c": udf(fails, on_error=skip_on_error())})
    assert table.backfill("c").rows_failed == 3
    assert "errors could not be recorded: disk full" in caplog.text


def test_a_crash_between_computing_and_committing(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(local_db, [8])
    table.add_columns({"c": counted(calls, fails, on_error=skip_on_error(), checkpoint_size=4)})
    with uncommitted(monkeypatch):
        table.backfill("c")
    assert calls.taken() == list(range(8))
    table.backfill("c")
    assert calls.taken() == [], "what failed is known from the checkpoints, too"
    assert by_id(table, "c") == {i: i if i < 5 else None for i in range(8)}
    assert table.plan_backfill("c").is_empty
    assert table.get_failed_row_addresses() == [5, 6, 7]


def test_a_where_clause_asks_again(local_db: Connection, calls: Calls, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(json.dumps([3]))
    table = make_table(local_db, [6])
    table.add_columns({"c": breakable(calls, broken, on_error=skip_on_error())})
    table.backfill("c")
    broken.unlink()
    calls.clear()
    table.backfill("c", where="id > 3")
    assert calls.taken() == [4, 5]
    assert table.plan_backfill("c", retry_failed=True).rows_to_run == 1, "still known as failed"
    table.backfill("c", where="id = 3")
    assert calls.taken() == [3]
    assert by_id(table, "c")[3] == 9
    assert table.plan_backfill("c", retry_failed=True).is_empty


def test_records_round_trip(tmp_path: Path) -> None:
    store = FailureStore(str(tmp_path), Secrets())
    at = datetime(2026, 1, 2, 3, 4, 5, 678, UTC)
    numbers: dict[str, Any] = {"fragment_id": 3, "row_address": (3 << 32) + 7, "row_id": None}
    record = ErrorRecord("job", "t'", "c", *numbers.values(), "ValueError", "m", "tb", 2, "x=1", at)
    store.append([])
    store.append([record])
    assert store.list("t'") == [record]
    assert store.list("t") == []


def test_a_store_of_an_earlier_release(tmp_path: Path) -> None:
    store = FailureStore(str(tmp_path), Secrets())
    at = datetime(2026, 1, 2, 3, 4, 5, 678, UTC)
    record = ErrorRecord("job", "t", "c", 3, 7, None, "ValueError", "m", "tb", 2, "x=1", at)
    newer = replace(record, table_version=3, udf_name="f", input_columns=["x"])
    store.append([record])
    place = tmp_path / "_geneva" / "errors.lance"
    names = [field.name for field in fields(ErrorRecord)]
    lance.write_dataset(lance.dataset(place).to_table(names[:12]), place, mode="overwrite")
    assert store.list() == [record]
    store.append([newer])
    store.append([newer])
    assert store.list() == [record, newer, newer]


class TestJobs:
    def test_wait_and_numbers(self, local_db: Connection) -> None:
        table = make_table(local_db, [8])
        table.add_columns({"c": udf(fails, on_error=skip_on_error())})
        future = table.backfill_async("c")
        job = local_db.get_job(future.job_id).wait(timeout=30)
        assert job.status == "DONE"
        metrics = job.progress()
        assert (metrics["failed_rows"], metrics["retries"], metrics["eta_seconds"]) == (3, 0, 0.0)
        assert {"udf_seconds", "read_seconds", "write_seconds", "commit_seconds"} <= set(metrics)
        assert next(e.kind for e in job.events) == "created"
        with pytest.raises(geneva.errors.JobError, match="ended already"):
            job.cancel()

    def test_waiting_ends(self, local_db: Connection) -> None:
        def slow(id: int) -> int:
            import time

            time.sleep(0.2)
            return id

        table = make_table(local_db, [8])
        table.add_columns({"c": udf(slow)})
        future = table.backfill_async("c")
        job = local_db.get_job(future.job_id)
        with pytest.raises(geneva.errors.JobTimeoutError, match="still"):
            job.wait(timeout=0.1)
        assert job.wait(timeout=30).status == "DONE"
        future.result(10)

    @pytest.mark.slow
    @pytest.mark.spark
    def test_cancelled_from_elsewhere_within_ten_seconds(self, tmp_path: Path) -> None:
        import time

        from support import connect

        def hangs(id: int) -> int:
            time.sleep(600)
            return id

        db = connect(tmp_path / "db", None)
        table = make_table(db, [8])
        table.add_columns({"c": udf(hangs), "ok": udf(fails, on_error=skip_on_error())})
        future = table.backfill_async("c")
        elsewhere = connect(tmp_path / "db", None)
        while elsewhere.get_job(future.job_id).status != "RUNNING":
            time.sleep(0.1)
        time.sleep(1)
        started = time.monotonic()
        elsewhere.cancel_job(future.job_id)
        assert elsewhere.get_job(future.job_id).wait(timeout=10).status == "CANCELLED"
        table.backfill("ok", timeout=30)
        assert time.monotonic() - started < 15, "the slots are free again"


def test_spans(local_db: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    from geneva.execution.jobs import tracing

    spans: list[tuple[str, dict[str, Any]]] = []

    class Tracer:
        @contextmanager
        def start_as_current_span(self, name: str, attributes: dict[str, Any]) -> Any:
            spans.append((name, attributes))

            class Span:
                set_attribute = staticmethod(attributes.__setitem__)

            yield Span()

    monkeypatch.setattr(tracing, "_tracer", Tracer)
    table = make_table(local_db, [4])
    table.add_columns({"c": udf(fails)})
    result = table.backfill("c")
    assert [name for name, _ in spans] == ["geneva.backfill", "geneva.commit"]
    assert spans[0][1]["geneva.job_id"] == result.job_id
    assert spans[0][1]["geneva.udf_rows"] == 4

"""What happens to rows on which a UDF fails: retried, skipped or fatal; and what is known after."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from geneva import Fail, Retry, Skip, fail_fast, retry_all, retry_transient, skip_on_error, udf
from geneva.debug.error_store import ErrorHandlingConfig
from geneva.errors import InvalidUDFError, TooManyFailedRowsError, UDFExecutionError
from geneva.udf.policy import ErrorPolicy
from support import Calls, breakable, by_id, checkpoint_keys, counted, make_table

if TYPE_CHECKING:
    from geneva import Connection


def odd_fails(id: int) -> int:
    if id % 10 == 3:
        raise ValueError(f"can't do {id}")
    return id * 3


def expected(rows: int) -> dict[int, Any]:
    return {i: None if i % 10 == 3 else i * 3 for i in range(rows)}


def test_failed_rows_are_null_and_not_computed(db: Connection, calls: Calls) -> None:
    table = make_table(db, [100, 50])
    table.add_columns({"c": counted(calls, odd_fails, on_error=skip_on_error())})
    result = table.backfill("c")
    assert by_id(table, "c") == expected(150)
    assert calls.taken() == list(range(150)), "each row is called once"
    assert (result.rows_failed, result.rows_computed) == (15, 150)
    assert "15 rows failed before" in str(table.plan_backfill("c").notes)
    assert table.plan_backfill("c").is_empty
    assert table.backfill("c").rows_computed == 0
    assert calls.taken() == []
    errors = sorted(table.get_errors(result.job_id), key=lambda e: e.row_address)
    assert [e.row_address & 0xFFFFFFFF for e in errors if e.fragment_id == 1] == [3, 13, 23, 33, 43]
    assert {e.exception_type for e in errors} == {"ValueError"}
    assert errors[0].message == "can't do 3"
    assert "odd_fails" in errors[0].traceback
    assert errors[0].input_preview == "id=3"


def test_retry_failed_runs_just_those(local_db: Connection, calls: Calls, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(json.dumps([3, 30, 31]))
    table = make_table(local_db, [20, 20])
    table.add_columns({"c": breakable(calls, broken, on_error=skip_on_error())})
    table.backfill("c")
    calls.clear()
    broken.write_text(json.dumps([31]))
    plan = table.plan_backfill("c", retry_failed=True)
    assert plan.rows_to_run == 3
    assert "failed before" in str(plan)
    result = table.backfill("c", retry_failed=True)
    assert calls.taken() == [3, 30, 31]
    assert result.rows_failed == 1
    assert by_id(table, "c") == {i: None if i == 31 else i * 3 for i in range(40)}
    broken.unlink()
    table.backfill("c", retry_failed=True)
    assert calls.taken() == [31]
    assert by_id(table, "c") == {i: i * 3 for i in range(40)}
    assert table.backfill("c", retry_failed=True).rows_computed == 0
    assert table.get_failed_row_addresses() == [3, (1 << 32) + 10, (1 << 32) + 11]


def test_all_rows_of_a_fragment_fail(local_db: Connection, calls: Calls, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(json.dumps(list(range(10))))
    table = make_table(local_db, [10, 10])
    table.add_columns({"c": breakable(calls, broken, on_error=skip_on_error(), checkpoint_size=4)})
    table.backfill("c")
    assert calls.taken() == list(range(20))
    assert table.plan_backfill("c").is_empty
    broken.unlink()
    table.backfill("c", retry_failed=True)
    assert calls.taken() == list(range(10)), "checkpoints of the failed run are not its result"
    assert by_id(table, "c") == {i: i * 3 for i in range(20)}


def test_failed_rows_survive_compaction_and_deletion(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [20, 20])
    table.add_columns({"c": counted(calls, odd_fails, on_error=skip_on_error())})
    table.backfill("c")
    table.delete("id = 5")
    table.compact_files()
    calls.clear()
    assert table.plan_backfill("c").is_empty
    table.backfill("c", retry_failed=True)
    assert calls.taken() == [3, 13, 23, 33]


def test_a_changed_input_is_tried_again(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [20])
    table.add_columns({"c": counted(calls, odd_fails, on_error=skip_on_error())})
    table.backfill("c")
    calls.clear()
    table.update(where="id = 13", values={"id": 14})
    table.backfill("c")
    assert calls.taken() == [14]


def test_another_udf_tries_everything(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [20])
    table.add_columns({"c": counted(calls, odd_fails, on_error=skip_on_error())})
    table.backfill("c")
    calls.clear()

    def fixed(id: int) -> int:
        return id

    table.alter_columns({"path": "c", "udf": counted(calls, fixed)})
    table.backfill("c")
    assert calls.taken() == list(range(20))


def test_the_policy_is_no_part_of_the_meaning(local_db: Connection, calls: Calls) -> None:
    plain, lenient = (udf(odd_fails, on_error=p) for p in (None, skip_on_error()))
    assert plain.version == lenient.version
    table = make_table(local_db, [[0, 1, 2]])
    table.add_columns({"c": plain})
    table.backfill("c")
    table.alter_columns({"path": "c", "udf": lenient})
    assert table.plan_backfill("c").is_empty
    assert json.loads(table.computed_columns()["c"].on_error)["rules"] == [
        {"do": "skip", "on": ["Exception"]}
    ]


def test_fail_fast_is_the_default(db: Connection) -> None:
    table = make_table(db, [10])
    table.add_columns({"c": udf(odd_fails)})
    with pytest.raises(UDFExecutionError, match="row 3 "):
        table.backfill("c")
    (error,) = table.get_errors()
    assert (error.row_address, error.exception_type) == (3, "ValueError")


def test_retries_call_again_until_it_works(local_db: Connection, tmp_path: Path) -> None:
    flaky = Calls(str(tmp_path / "flaky"))

    def sometimes(id: int) -> int:
        flaky.note([id])
        if id % 2 and flaky.rows.count(id) < 3:
            raise ConnectionError("try later")
        return id

    table = make_table(local_db, [10])
    table.add_columns({"c": udf(sometimes, on_error=retry_transient(3, backoff=0.0))})
    result = table.backfill("c")
    assert by_id(table, "c") == {i: i for i in range(10)}
    assert result.progress.retries == 10
    assert flaky.count == 5 + 5 * 3


def test_retries_end(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [5])
    table.add_columns({"c": counted(calls, odd_fails, on_error=retry_all(4, backoff=0.0))})
    with pytest.raises(UDFExecutionError, match="can't do 3"):
        table.backfill("c")
    assert calls.rows.count(3) == 4


def test_transient_means_transient(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [5])
    table.add_columns({"c": counted(calls, odd_fails, on_error=retry_transient())})
    with pytest.raises(UDFExecutionError):
        table.backfill("c")
    assert calls.rows.count(3) == 1


def picky(id: int) -> int:
    if id == 2:
        raise ConnectionError("reset")
    if id == 4:
        raise ValueError("broken image")
    if id == 6:
        raise ValueError("disk full")
    return id


def test_rules_are_tried_in_order(local_db: Connection, calls: Calls) -> None:
    rules = [
        Retry(ConnectionError, max_attempts=2, backoff=0.0),
        Skip(ConnectionError),
        Fail(ValueError, match="disk"),
        Skip(ValueError),
    ]
    table = make_table(local_db, [6])
    table.add_columns({"c": counted(calls, picky, on_error=rules)})
    table.backfill("c")
    assert by_id(table, "c") == {0: 0, 1: 1, 2: None, 3: 3, 4: None, 5: 5}
    assert calls.taken() == [0, 1, 2, 2, 3, 4, 5]
    told = {(e.exception_type, e.attempt) for e in table.get_errors()}
    assert told == {("ConnectionError", 2), ("ValueError", 1)}
    table.add(pa.table({"id": [6, 7]}))
    with pytest.raises(UDFExecutionError, match="disk full"):
        table.backfill("c")


@pytest.mark.parametrize("kind", ["array", "record_batch"])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_poison_row_costs_log_n_calls(
    local_db: Connection, calls: Calls, kind: str, threads: int
) -> None:
    def poisoned(values: pa.Array) -> pa.Array:
        if pc.any(pc.equal(values, 777)).as_py():
            raise ValueError("poison")
        return pc.multiply(values, 3)

    def by_array(id: pa.Array) -> pa.Array:
        return poisoned(id)

    def by_batch(batch: pa.RecordBatch) -> pa.Array:
        return poisoned(batch.column(0))

    function: Any = by_array if kind == "array" else by_batch
    table = make_table(local_db, [1024])
    column = counted(
        calls,
        function,
        data_type=pa.int64(),
        input_columns=["id"],
        batch_size=1024,
        on_error=skip_on_error(),
    )
    table.add_columns({"c": column})
    result = table.backfill("c", intra_applier_concurrency=threads)
    assert by_id(table, "c") == {i: None if i == 777 else i * 3 for i in range(1024)}
    assert result.rows_failed == 1
    assert calls.count <= 1 + 2 * math.log2(1024) + threads
    assert [e.row_address for e in table.get_errors()] == [777]


@pytest.mark.parametrize("threads", [1, 3])
def test_what_does_not_fit_fails_too(local_db: Connection, calls: Calls, threads: int) -> None:
    def odd_type(id: int) -> Any:
        return "no number" if id in (2, 5) else id

    table = make_table(local_db, [10])
    table.add_columns(
        {"c": counted(calls, odd_type, data_type=pa.int64(), on_error=skip_on_error())}
    )
    table.backfill("c", intra_applier_concurrency=threads)
    assert by_id(table, "c") == {i: None if i in (2, 5) else i for i in range(10)}
    assert calls.taken() == list(range(10))
    assert {e.exception_type for e in table.get_errors()} == {"UDFOutputError"}


def test_none_where_none_may_be(local_db: Connection) -> None:
    def nothing(id: int) -> Any:
        return None if id == 4 else id

    table = make_table(local_db, [6])
    column = udf(nothing, data_type=pa.int64(), nullable=False, on_error=skip_on_error())
    table.add_columns({"c": column})
    assert table.backfill("c").rows_failed == 1
    assert "nullable=False" in table.get_errors()[0].message


@pytest.mark.parametrize(
    "limit", [{"max_failed_rows": 3}, {"max_failed_fraction": 0.02}], ids=["rows", "fraction"]
)
def test_limits(local_db: Connection, limit: dict[str, Any]) -> None:
    table = make_table(local_db, [100, 100])
    table.add_columns({"c": udf(odd_fails, on_error=[Skip(ValueError)], **limit)})
    with pytest.raises(TooManyFailedRowsError, match=r"rows failed.*get_errors"):
        table.backfill("c")
    assert local_db.list_jobs()[0].status == "FAILED"
    assert len(table.get_errors()) > 3


def test_limits_that_hold(local_db: Connection) -> None:
    table = make_table(local_db, [100])
    table.add_columns({"c": udf(odd_fails, on_error=skip_on_error(max_failed_rows=10))})
    assert table.backfill("c").rows_failed == 10


def test_a_large_fragment_in_several_tasks(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [1000])
    table.add_columns(
        {"c": counted(calls, odd_fails, on_error=skip_on_error(), checkpoint_size=50)}
    )
    result = table.backfill("c", task_size=200)
    assert by_id(table, "c") == expected(1000)
    assert result.rows_failed == 100
    assert len(table.get_errors()) == 100, "each failed row is told once"
    assert calls.taken() == list(range(1000))
    assert checkpoint_keys(table), "sized on purpose: they stay"


def test_a_configuration_says_the_same(local_db: Connection) -> None:
    config = ErrorHandlingConfig(on_error=skip_on_error(), store_errors=False, max_failed_rows=50)
    column = udf(odd_fails, error_handling=config)
    assert column.on_error.max_failed_rows == 50
    table = make_table(local_db, [100])
    table.add_columns({"c": column})
    assert table.backfill("c").rows_failed == 10
    assert table.get_errors() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "skip"}, "must be fail_fast"),
        ({"on_error": [ValueError]}, "must be fail_fast"),
        ({"timeout": 0}, "timeout"),
        ({"max_failed_rows": -1}, "max_failed_rows"),
        ({"max_failed_fraction": 2}, "max_failed_fraction"),
        ({"on_error": fail_fast(), "error_handling": ErrorHandlingConfig()}, "not both"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidUDFError, match=message):
        udf(odd_fails, **options)


def test_refused_rules() -> None:
    for wrong in (
        lambda: Retry("ValueError"),  # type: ignore[arg-type]
        lambda: Retry(max_attempts=0),
        lambda: Retry(backoff="never"),
        lambda: Skip(match="("),
    ):
        with pytest.raises(InvalidUDFError):
            wrong()


def test_the_default_is_nothing_in_the_options() -> None:
    assert ErrorPolicy().to_json() == ""


def test_a_view_knows_its_failed_rows(local_db: Connection, calls: Calls) -> None:
    lance.write_dataset(
        pa.table({"id": pa.array(range(20), pa.int64())}),
        f"{local_db.uri}/s.lance",
        enable_stable_row_ids=True,
    )
    source = local_db.open_table("s")
    column = counted(calls, odd_fails, on_error=skip_on_error())
    view = local_db.create_materialized_view("v", source.query().select({"id": "id", "c": column}))
    view.refresh()
    assert by_id(view, "c") == expected(20)
    calls.clear()
    source.add(pa.table({"id": pa.array([20, 23], pa.int64())}))
    view.refresh()
    assert calls.taken() == [20, 23]
    assert by_id(view, "c") == {**expected(20), 20: 60, 23: None}

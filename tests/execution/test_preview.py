"""Trying a function before it is paid for: a few rows, here, without Spark."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import geneva
from geneva import RateLimit, UnpackedUDF, chunker, retry_all, udf, udtf
from geneva.errors import ColumnNotFoundError, InvalidUDFError, UserInputError
from geneva.execution.runner import InProcessRunner
from geneva.execution.worker.surroundings import Surroundings, enter_job
from geneva.planning.estimates import Estimate, Measured
from support import Calls, counted, make_table, tripled

if TYPE_CHECKING:
    from geneva import Connection


def test_rows_values_times_and_the_estimate(local_db: Connection, calls: Calls):
    table = make_table(local_db, [1000, 500])

    def slow(id: int) -> int:
        time.sleep(0.002)
        return id * 3

    shown = table.preview(counted(calls, slow), n=4)
    assert calls.taken() == [0, 1, 2, 3]
    assert shown.ok
    assert shown.values.to_pylist() == [0, 3, 6, 9]
    assert shown.seconds_per_row >= 0.002
    assert shown.estimate is not None
    assert (shown.estimate.rows, shown.estimate.slots) == (1500, 2)
    assert shown.estimate.seconds >= 1500 * 0.002 / 2
    assert table.preview(tripled(calls), n=2, where="id >= 40").values.to_pylist() == [120, 123]
    assert calls.rows == [40, 41]
    assert local_db.list_jobs() == []
    text, page = str(shown), shown._repr_html_()
    for part in ("slow", "id", "a row", "memory", "about", "1,500 rows on 2 slots"):
        assert part in text
        assert part in page


def test_rows_that_fail_are_shown(local_db: Connection, calls: Calls):
    table = make_table(local_db, [5])

    def picky(id: int) -> int:
        if id == 1:
            raise ValueError("<bad>")
        return "x" if id == 3 else id  # type: ignore[return-value]

    shown = udf(picky, on_error=retry_all(backoff=60)).test(table)
    assert [f.row for f in shown.failures] == [1, 3]
    assert shown.values.to_pylist() == [0, None, 2, None, 4]
    assert "failed: ValueError: <bad>" in str(shown)
    assert "&lt;bad&gt;" in shown._repr_html_()
    assert shown.to_arrow()["error"].to_pylist()[1] == "ValueError: <bad>"


def test_why_rows_failed_is_said_in_full(local_db: Connection):
    def long_story(id: int) -> int:
        raise ValueError("a" * 100 + f" and the end {id % 2}")

    shown = udf(long_story).test(make_table(local_db, [5]), n=4)
    for end in (0, 1):
        assert str(shown).count(f"because    ValueError: {'a' * 100} and the end {end}") == 1
        assert f"and the end {end}" in shown._repr_html_()


def test_a_batch_that_fails_as_a_whole_has_failed(local_db: Connection, calls: Calls):
    """A job with the function's own policy would fail, though each row by itself goes well."""

    def first_only(id: pa.Array) -> pa.Array:
        calls.note(id.to_pylist())
        return id.slice(0, 1)

    shown = udf(first_only, data_type=pa.int64()).test(make_table(local_db, [5]), n=3)
    assert calls.rows[0] == 0
    assert [f.row for f in shown.failures] == [0, 1, 2]
    assert shown.values.to_pylist() == [None] * 3
    assert "returned 1 value for a batch of 3 rows" in str(shown)


def test_a_rate_limit_bounds_the_estimate(local_db: Connection):
    def asks(id: int) -> int:
        geneva.report_usage(tokens=10)
        return id

    table = make_table(local_db, [100])
    for limit in (RateLimit(requests_per_minute=6100), RateLimit(tokens_per_minute=61_000)):
        estimate = udf(asks, rate_limit=limit).test(table, n=2).estimate
        assert estimate.measured.allowed_seconds_per_row == pytest.approx(0.01)
        assert estimate.seconds >= 0.99


def test_a_set_up_that_fails_is_shown(local_db: Connection):
    class Broken:
        def setup(self) -> None:
            raise OSError("no model")

        def __call__(self, id: int) -> int:
            return id

    shown = udf(Broken).test(make_table(local_db, [3]), n=2)
    assert [f.message for f in shown.failures] == ["no model", "no model"]
    assert shown.estimate is None


def test_no_row_to_try(local_db: Connection, calls: Calls):
    shown = make_table(local_db, [3]).preview(tripled(calls), where="id > 90")
    told = "Function 'triple' on 0 rows of table 't': there are none to try it on."
    assert str(shown) == told
    assert told.replace("'", "&#x27;") in shown._repr_html_()
    assert shown.to_record()["rows"] == []
    assert calls.taken() == []


@pytest.mark.parametrize("kind", ["array", "batch", "async", "chunker", "class"])
def test_all_kinds(local_db: Connection, kind: str):
    def doubled(id: pa.Array) -> pa.Array:
        return pc.multiply(id, 2)

    def of_batch(batch: pa.RecordBatch) -> pa.Array:
        return pc.multiply(batch.column("id"), 2)

    async def waits(id: int) -> int:
        await asyncio.sleep(0.001)
        return id * 2

    class Model:
        def __call__(self, id: int) -> int:
            return id * 2

    def rows(id: int) -> Any:
        yield {"x": id}

    made: Any = {
        "array": lambda: udf(doubled, data_type=pa.int64()),
        "batch": lambda: udf(of_batch, data_type=pa.int64(), input_columns=["id"]),
        "async": lambda: udf(waits),
        "class": lambda: udf(Model, data_type=pa.int64()),
        "chunker": lambda: chunker(rows, output_schema=pa.schema([("x", pa.int64())])),
    }[kind]()
    shown = make_table(local_db, [4]).preview(made, n=3)
    expected = [[{"x": i}] for i in range(3)] if kind == "chunker" else [0, 2, 4]
    assert shown.values.to_pylist() == expected


def shops(db: Connection, rows: int = 20) -> Any:
    return db.create_table(
        "shops", pa.table({"id": range(rows), "shop": [i % 7 for i in range(rows)]})
    )


def test_a_table_function_is_called_for_the_first_partitions(local_db: Connection, calls: Calls):
    @udtf(output_schema=pa.schema([("ids", pa.list_(pa.int64()))]), partition_by="shop")
    def gathered(source: Any) -> Any:
        rows = source.to_arrow()
        calls.note([rows["shop"][0].as_py()])
        if rows["shop"][0].as_py() == 1:
            raise ValueError("not this one")
        yield {"ids": rows["id"].to_pylist()}

    table = shops(local_db)
    shown = table.preview(gathered, n=3)
    assert calls.taken() == [0, 1, 2]
    assert shown.values.to_pylist() == [[{"ids": [0, 7, 14]}], None, [{"ids": [2, 9, 16]}]]
    assert [(f.row, f.message) for f in shown.failures] == [(1, "not this one")]
    assert shown.to_arrow().select(["shop", "rows"]).to_pylist() == [
        {"shop": i, "rows": 3} for i in range(3)
    ]
    assert shown.estimate is not None
    assert (shown.estimate.rows, shown.estimate.unit) == (7, "partition")
    for part in ("3 partitions of table 'shops'", "a partition", "7 partitions on 2 slots"):
        assert part in str(shown)
    some = gathered.test(table, 2, where="id > 12")
    assert some.values.to_pylist() == [[{"ids": [13]}], [{"ids": [14]}]]
    assert calls.taken() == [0, 6]
    assert "the table " in str(shown)
    assert "rows with id > 12 " in str(some), "the estimate is for what the function would see"
    assert "the table " not in str(some)
    assert table.preview(gathered, where="id < 0").values.to_pylist() == []
    assert (calls.count, local_db.list_jobs(), local_db.table_names()) == (0, [], ["shops"])


def test_what_partitions_are_tried_as(local_db: Connection):
    class Counts:
        def __init__(self, times: int) -> None:
            self.times = times

        def __call__(self, source: Any) -> Any:
            yield {"rows": self.times * len(source)}

    rows, table = pa.schema([("rows", pa.int64())]), shops(local_db)
    counts = udtf(Counts, output_schema=rows)
    assert table.preview(counts(10)).values.to_pylist() == [[{"rows": 200}]]
    assert table.preview(counts(1), where="id < 0").values.to_pylist() == [[{"rows": 0}]]
    by_both = udtf(Counts, output_schema=rows, partition_by=["shop", "id"], input_columns=["id"])
    assert table.preview(by_both(1), n=2).inputs.to_pylist() == [
        {"shop": 0, "id": 0, "rows": 1},
        {"shop": 1, "id": 1, "rows": 1},
    ]
    with pytest.raises(InvalidUDFError, match="can't be constructed"):
        table.preview(counts)
    with pytest.raises(ColumnNotFoundError, match="nowhere"):
        table.preview(udtf(Counts, output_schema=rows, partition_by="nowhere")(1))
    with pytest.raises(InvalidUDFError, match="input_columns"):
        table.preview((counts(1), ["id"]))
    with pytest.raises(UserInputError, match="no IVF index"):
        table.preview(udtf(Counts, output_schema=rows, partition_by_indexed_column="id")(1))


def test_functions_of_a_views_query_are_tried_on_its_source(local_db: Connection, calls: Calls):
    source = shops(local_db)
    view = local_db.create_materialized_view("v", source.query().select({"t": tripled(calls)}))
    view.refresh()
    calls.clear()
    with pytest.raises(UserInputError, match=r"on the source, table 'shops', with preview\("):
        view.preview("t")
    assert view.preview((tripled(calls), ["t"]), n=2).values.to_pylist() == [0, 9]


def test_a_chunker_is_fed_from_other_columns(local_db: Connection):
    @chunker(output_schema=pa.schema([("n", pa.int64())]))
    def counted_up(to: int) -> Any:
        return [{"n": n} for n in range(to)]

    table = make_table(local_db, [3])
    assert table.preview((counted_up, ["id"])).values.to_pylist()[2] == [{"n": 0}, {"n": 1}]
    assert chunker(lambda id: [(id,)], output_schema=counted_up.output_schema).test(table, 1).ok


def test_a_column_by_its_name_and_what_cannot_be_tried(local_db: Connection, calls: Calls):
    table = make_table(local_db, [4])
    table.add_columns({"c": tripled(calls)})
    assert table.preview("c", n=2).values.to_pylist() == [0, 3]
    assert table.preview(tripled(calls), where="id > 99").values.to_pylist() == []
    with pytest.raises(ColumnNotFoundError):
        table.preview("nothing")
    for wrong in (0, None):
        with pytest.raises(UserInputError, match="n must be"):
            table.preview("c", n=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidUDFError, match=r"What can be tried is a UDF.*Decorate it"):
        table.preview(len)  # type: ignore[arg-type]


def test_several_columns_by_other_names(local_db: Connection):
    both = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    unpacked = UnpackedUDF(udf(lambda id: {"a": id, "b": -id}, output_schema=both), prefix="x_")
    assert unpacked.test(make_table(local_db, [4]), n=2).values.to_pylist()[1] == {"a": 1, "b": -1}


def test_variables_are_there_while_it_is_tried(tmp_path: Path):
    import os

    def seen(id: int) -> str:
        return f"{os.environ['PREVIEW_A']}{os.environ['PREVIEW_B']}"

    db = geneva.connect(tmp_path, env={"PREVIEW_A": "1"})
    table = db.create_table("t", pa.table({"id": [7]}))
    assert table.preview(udf(seen, env={"PREVIEW_B": "2"})).values.to_pylist() == ["12"]
    assert "PREVIEW_A" not in os.environ


def test_variables_are_there_while_values_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import os

    def seen(id: int) -> str:
        return f"{os.environ['PREVIEW_A']}{os.environ['PREVIEW_B']}"

    db = geneva.connect(tmp_path, env={"PREVIEW_A": "1"}, runner=InProcessRunner)
    table = db.create_table("t", pa.table({"id": [7]}))
    table.add_columns({"v": udf(seen, env={"PREVIEW_B": "2"})})
    with monkeypatch.context() as patch:
        patch.setenv("PREVIEW_A", "1")  # this runner's workers are in this process
        table.backfill("v")
        enter_job(Surroundings())
    assert table.verify("v", run=True).ok
    assert not {"PREVIEW_A", "PREVIEW_B"} & set(os.environ)


def test_variables_are_there_while_a_query_is_evaluated(tmp_path: Path):
    import os

    def seen(id: int) -> str:
        return f"{os.environ['PREVIEW_A']}{os.environ.get('PREVIEW_B', '-')}"

    db = geneva.connect(tmp_path, env={"PREVIEW_A": "1"})
    table = db.create_table("t", pa.table({"id": [7, 8]}))
    query = table.query().add_column({"v": udf(seen, env={"PREVIEW_B": "2"}), "w": udf(seen)})
    for batch in query.to_batches(batch_size=1):
        assert (batch["v"].to_pylist(), batch["w"].to_pylist()) == (["12"], ["1-"])
        assert not {"PREVIEW_A", "PREVIEW_B"} & set(os.environ), "not between batches"


def test_usage_is_shown(local_db: Connection):
    def paid(id: int) -> int:
        geneva.report_usage(tokens=10, cost=0.5)
        return id

    shown = udf(paid).test(make_table(local_db, [100]), n=4)
    assert (shown.tokens, shown.cost) == (40, 2.0)
    assert "0.5 a row, 50 for the table" in str(shown)


def test_plans_show_what_was_measured_by_a_preview_or_a_job(local_db: Connection, calls: Calls):
    table = make_table(local_db, [100])
    table.add_columns({"c": tripled(calls)})
    assert table.plan_backfill("c").estimate is None
    table.preview("c")
    plan = table.plan_backfill("c")
    assert plan.estimate is not None
    assert plan.estimate.rows == 100
    assert plan.estimate.measured.by == "a preview of 5 rows"
    slower = Estimate(Measured(0.5, "a preview of 5 rows"), 100, 2)
    assert "  time       about 25.0 s for 100 rows on 2 slots, by a preview of 5 rows\n" in str(
        dataclasses.replace(plan, estimate=slower)
    )
    assert "  time" not in str(plan), "nobody waits for milliseconds"
    result = table.backfill("c")
    assert table.plan_backfill("c").estimate is None, "nothing to do"
    table.add(pa.table({"id": range(100, 150)}))
    other = geneva.connect(local_db.uri).open_table("t")
    again = other.plan_backfill("c").estimate
    assert again is not None
    assert (again.measured.by, again.rows) == (f"job {result.job_id[:8]}", 50)
    table.alter_columns({"path": "c", "udf": udf(lambda id: id, data_type=pa.int64())})
    assert table.plan_backfill("c").estimate is None, "another function was never measured"


@pytest.mark.slow
def test_neither_spark_nor_java_is_started(tmp_path: Path):
    code = f"""
import sys, geneva, pyarrow as pa
table = geneva.connect({str(tmp_path)!r}).create_table("t", pa.table({{"id": [1, 2]}}))
print(geneva.udf(lambda id: id + 1, data_type=pa.int64(), name="f").test(table))
assert "pyspark" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert "Function 'f' on 2 rows of table 't'" in done.stdout


def test_the_command(local_db: Connection, calls: Calls, capsys: pytest.CaptureFixture[str]):
    from geneva.cli import app

    table = make_table(local_db, [4])
    table.add_columns({"c": udf(lambda id: id * 3, name="tripled", data_type=pa.int64())})
    app(["preview", local_db.uri, "t", "c", "-n", "2"], standalone_mode=False)
    assert "Function 'tripled' on 2 rows" in capsys.readouterr().out
    app(["preview", local_db.uri, "t", "c", "--json", "--where", "id = 3"], standalone_mode=False)
    shown = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["value"]) for row in shown["rows"]] == [(3, 9)]

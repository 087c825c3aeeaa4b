"""Small fragments on an object store: few requests, several at a time, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from benchmarks.slow_store import SlowStore, slow_store

import geneva
from geneva import Table, udf
from geneva.config import Settings
from geneva.errors import UDFExecutionError
from geneva.execution.runner import InProcessRunner
from support import Calls, breakable, tripled
from view_support import values

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def make_table(store: SlowStore, rows: int, fragments: int, **options: bool) -> Table:
    data = pa.table({"id": pa.array(range(rows), pa.int64())})
    size = -(-rows // fragments)
    lance.write_dataset(
        data,
        f"{store.uri}/t.lance",
        storage_options=store.options,
        max_rows_per_file=size,
        **options,
    )
    db = geneva.connect(
        store.uri,
        storage_options=store.options,
        settings=Settings(progress=False),
        runner=lambda: InProcessRunner(1),
    )
    return db.open_table("t")


def test_small_fragments_take_two_requests_each_and_several_at_a_time() -> None:
    @udf(data_type=pa.int64(), input_columns=["id"])
    def plus_one(id: pa.Array) -> pa.Array:
        return pa.compute.add(id, 1)

    with slow_store(0.05) as store:
        table = make_table(store, 400, 40)
        table.add_columns({"y": plus_one})
        store.requests(), store.most_at_once()
        table.backfill("y", task_size=400)
        counts = store.requests()
        assert (counts["GET data"], counts["PUT data"]) == (40, 40)
        # What was deleted meanwhile is seen in a listing: files are not asked for one by one.
        assert counts["HEAD data"] <= 2
        assert sum(counts.values()) <= 3 * 40
        # One after the other, the reader, the writer and what goes on behind them were three.
        assert store.most_at_once() > 4
        assert values(table, "y") == {i: i + 1 for i in range(400)}


def test_what_ends_the_job_keeps_all_fragments_before_it(calls: Calls, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(json.dumps([53]))
    with slow_store(0.02) as store:
        table = make_table(store, 100, 20)
        table.add_columns({"y": breakable(calls, broken, batch_size=1)})
        with pytest.raises(UDFExecutionError, match="fragment 10, row 3"):
            table.backfill("y", task_size=100)
        assert calls.taken() == list(range(54))
        broken.unlink()
        table.backfill("y")
        assert calls.taken() == list(range(53, 100))
        assert values(table, "y") == {i: 3 * i for i in range(100)}


def test_a_split_fragment_is_put_together_from_its_checkpoints(calls: Calls) -> None:
    with slow_store(0.02) as store:
        table = make_table(store, 60, 1)
        table.add_columns({"y": tripled(calls)})
        table.backfill("y", task_size=7, checkpoint_size=2)
        assert calls.taken() == list(range(60))
        assert values(table, "y") == {i: 3 * i for i in range(60)}


def test_a_refresh_opens_its_tables_once(calls: Calls) -> None:
    """What was opened to plan it is used to run it. Opening all anew, a plan took 13 requests."""
    with slow_store(0.0) as store:
        table = make_table(store, 80, 8, enable_stable_row_ids=True)
        query = table.query().where("id % 2 = 0").select(["id"]).add_column({"y": tripled(calls)})
        view = table._connection.create_materialized_view("v", query)

        def requests_of(call: Callable[[], object]) -> int:
            store.requests()
            call()
            return sum(store.requests().values())

        assert requests_of(view.plan_refresh) <= 6
        assert requests_of(view.refresh) <= 80
        assert calls.taken() == list(range(0, 80, 2))
        assert requests_of(view.refresh) <= 12
        assert requests_of(view.plan_refresh) <= 3
        table.add(pa.table({"id": [80, 81, 82]}))
        assert requests_of(view.refresh) <= 80
        assert calls.taken() == [80, 82]
        assert values(view, "y") == {i: 3 * i for i in range(0, 84, 2)}


def test_the_commits_behind_a_table_are_read_several_at_a_time(calls: Calls) -> None:
    with slow_store(0.02) as store:
        table = make_table(store, 20, 2)
        table.add_columns({"y": tripled(calls)})
        table.backfill("y")
        for i in range(40):
            table.add(pa.table({"id": [100 + i]}))
        dataset = lance.dataset(table.uri, storage_options=store.options)
        dataset.alter_columns({"path": "id", "name": "key"})
        store.requests(), store.most_at_once()
        (column,) = table._connection.open_table("t").computed_columns().values()
        assert column.inputs == ("key",)
        assert sum(store.requests().values()) >= 40
        assert store.most_at_once() >= 8

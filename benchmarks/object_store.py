"""What is timed on an object store: every request takes 30 ms, as on a real one, and is counted."""

from __future__ import annotations

import time

import lance
import pyarrow as pa

import geneva
from benchmarks import functions
from benchmarks.cases import Bench, Outcome, Target, numbers
from benchmarks.slow_store import SlowStore, slow_store
from benchmarks.views import keyed, timed
from geneva import udf
from geneva.config import Settings

REQUEST_SECONDS = 0.03
SLOTS = 2


@udf
def waits_1ms(x: float) -> float:
    time.sleep(0.001)
    return x


def _table(
    store: SlowStore, name: str, data: pa.Table, fragments: int, **options: bool
) -> geneva.Table:
    settings = Settings(progress=False, local_slots=SLOTS)
    db = geneva.connect(store.uri, storage_options=store.options, settings=settings)
    rows = -(-data.num_rows // fragments)
    lance.write_dataset(
        data,
        f"{store.uri}/{name}.lance",
        storage_options=store.options,
        max_rows_per_file=rows,
        max_rows_per_group=rows,
        **options,
    )
    return db.open_table(name)


def _warm_table(store: SlowStore, data: pa.Table, fragments: int, **options: bool) -> geneva.Table:
    """A table in a database that has had a job."""
    warm = _table(store, "warm", numbers(8), 4)
    warm.add_columns({"y": functions.arrow})
    warm.backfill("y", task_size=2)
    return _table(store, "t", data, fragments, **options)


def _fragments(bench: Bench, store: SlowStore) -> tuple[list[float], list[int]]:
    """Seconds and requests of backfills of 100 fragments of 100 rows."""
    table = _warm_table(store, numbers(10_000), 100)
    seconds, requests = [], []
    for run in range(bench.repeat):
        table.add_columns({f"y{run}": functions.arrow})
        store.requests()
        started = time.perf_counter()
        table.backfill(f"y{run}")
        seconds.append(time.perf_counter() - started)
        requests.append(sum(store.requests().values()))
    return seconds, requests


def store_fragments(bench: Bench) -> Outcome:
    outcome = Outcome(
        "store_fragments",
        "S3, 30 ms a request: 100 fragments x 100 rows, 2 slots",
        target=Target(4.0, "seconds"),
    )
    with slow_store(REQUEST_SECONDS) as store:
        outcome.runs, requests = _fragments(bench, store)
        outcome.metrics = {"requests": requests}
    return outcome


def store_requests(bench: Bench) -> Outcome:
    outcome = Outcome(
        "store_requests",
        "the same: requests",
        target=Target(300, "seconds", "requests"),
    )
    with slow_store(0.0) as store:
        _, requests = _fragments(bench, store)
        outcome.runs = [float(count) for count in requests]
    return outcome


def store_rows(bench: Bench) -> Outcome:
    """The reference is what the calls take, on as many slots."""
    outcome = Outcome(
        "store_rows",
        "S3, 30 ms a request: 8,000 rows of 1 ms, 8 fragments, 2 slots",
        target=Target(1.25, "waits"),
    )
    with slow_store(REQUEST_SECONDS) as store:
        table = _warm_table(store, numbers(8_000), 8)
        for run in range(bench.repeat):
            table.add_columns({f"y{run}": waits_1ms})
            started = time.perf_counter()
            result = table.backfill(f"y{run}")
            outcome.runs.append(time.perf_counter() - started)
            outcome.ideal_runs.append(result.progress.timings.udf / SLOTS)
    return outcome


def store_view(bench: Bench) -> Outcome:
    """The reference is a backfill of the source's rows."""
    outcome = Outcome(
        "store_view",
        "S3, 30 ms a request: first refresh of a 50% filter over 8,000 rows; against a backfill",
        target=Target(2.5, "loop"),
    )
    with slow_store(REQUEST_SECONDS) as store:
        table = _warm_table(store, keyed(0, 8_000), 8, enable_stable_row_ids=True)
        for run in bench.runs():
            query = table.query().select(["id"]).add_column({"y": functions.arrow})
            db = table._connection
            view = db.create_materialized_view(f"v{run}", query.where("id % 2 = 0"))
            outcome.runs.append(timed(view.refresh))
            table.add_columns({f"y{run}": functions.arrow})
            outcome.loop_runs.append(timed(lambda column=f"y{run}": table.backfill(column)))
    return outcome


WARM = (store_fragments, store_requests, store_rows, store_view)

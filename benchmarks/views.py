"""What is timed of views, each against the same rows without what a view adds."""

from __future__ import annotations

import time

import lance
import numpy as np
import pyarrow as pa

import geneva
from benchmarks import functions, processes
from benchmarks.cases import Bench, Outcome, Target


def keyed(start: int, rows: int) -> pa.Table:
    ids = np.arange(start, start + rows)
    return pa.table({"id": ids, "x": ids.astype(np.float64)})


def source(bench: Bench, name: str, rows: int, fragments: int) -> geneva.Table:
    uri = str(bench.folder / "db" / f"{name}.lance")
    each = -(-rows // fragments)
    lance.write_dataset(keyed(0, rows), uri, max_rows_per_file=each, enable_stable_row_ids=True)
    return bench.db.open_table(name)


def view_of(bench: Bench, table: geneva.Table, name: str, where: str | None = None):
    query = table.query().select(["id"]).add_column({"y": functions.arrow})
    return bench.db.create_materialized_view(name, query.where(where) if where else query)


def timed(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def view_append(bench: Bench) -> Outcome:
    """Append 1% to a large source and refresh; the reference is a view of as many rows alone."""
    rows = bench.rows(10_000_000)
    added = max(1, rows // 100)
    outcome = Outcome(
        "view_append",
        "refresh after 1% was appended to 10M rows; against a view of those rows alone",
        target=Target(2.0, "loop"),
    )
    table = source(bench, outcome.name, rows, 16)
    view = view_of(bench, table, "view_append_v")
    view.refresh()
    for run in bench.runs():
        table.add(keyed(rows + run * added, added))
        outcome.runs.append(timed(view.refresh))
        alone = source(bench, f"{outcome.name}_alone_{run}", added, 1)
        reference = view_of(bench, alone, f"view_append_alone_{run}_v")
        outcome.loop_runs.append(timed(reference.refresh))
    return outcome


def view_first(bench: Bench) -> Outcome:
    """A first refresh of a 50% filter; the reference is a backfill of as many rows."""
    rows = bench.rows(1_000_000)
    outcome = Outcome(
        "view_first",
        "first refresh of a 50% filter over 1M rows; against a backfill of as many rows",
        target=Target(1.3, "loop"),
    )
    table = source(bench, outcome.name, rows, 16)
    half = source(bench, f"{outcome.name}_half", rows // 2, 8)
    for run in bench.runs():
        view = view_of(bench, table, f"view_first_{run}_v", "id % 2 = 0")
        outcome.runs.append(timed(view.refresh))
        column = f"y_{run}"
        half.add_columns({column: functions.arrow})
        outcome.loop_runs.append(timed(lambda column=column: half.backfill(column)))
    return outcome


def view_nothing(bench: Bench) -> Outcome:
    outcome = Outcome(
        "view_nothing",
        "refresh of a view of 1M rows, nothing to do, no Spark started",
        target=Target(0.2, "seconds"),
    )
    table = source(bench, outcome.name, bench.rows(1_000_000), 16)
    view_of(bench, table, "view_nothing_v").refresh()
    for _ in bench.runs():
        outcome.runs.append(processes.time_refresh(bench.folder / "db", "view_nothing_v"))
    return outcome


WARM = (view_append, view_first)
SEPARATE = (view_nothing,)

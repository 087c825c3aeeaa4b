"""What is timed of receipts: plans that have to prove which values are right."""

from __future__ import annotations

import time
from datetime import timedelta

import lance
import numpy as np
import pyarrow as pa

import geneva
from benchmarks import functions
from benchmarks.cases import Bench, Outcome, Target, numbers


def _plans(bench: Bench, table: geneva.Table, column: str, outcome: Outcome) -> Outcome:
    for _ in range(bench.repeat):
        started = time.perf_counter()
        plan = table.plan_backfill(column)
        outcome.runs.append(time.perf_counter() - started)
        assert plan.rows_to_run == outcome.metrics["rows_to_run"], plan
    return outcome


def _computed(bench: Bench, name: str, rows: int) -> geneva.Table:
    table = bench.table(name, numbers(rows), 16)
    table.add_columns({"y": functions.arrow})
    table.backfill("y")
    return table


def plan_update(bench: Bench) -> Outcome:
    """An update of the input of 1% of the rows: they have moved, and are judged by receipt."""
    rows = bench.rows(10_000_000)
    outcome = Outcome(
        "plan_update", "plan after an update of 1% of 10M rows", target=Target(1.0, "seconds")
    )
    table = _computed(bench, outcome.name, rows)
    lance.dataset(str(table.uri)).update({"x": "x + 0.5"}, where=f"x < {rows // 100}")
    outcome.metrics = {"rows_to_run": rows // 100}
    return _plans(bench, table, "y", outcome)


def plan_compacted(bench: Bench) -> Outcome:
    """A compaction of everything: its transaction proves that every value is right."""
    outcome = Outcome(
        "plan_compacted", "plan after a compaction of 10M rows", target=Target(0.1, "seconds")
    )
    table = _computed(bench, outcome.name, bench.rows(10_000_000))
    lance.dataset(str(table.uri)).optimize.compact_files(target_rows_per_fragment=20_000_000)
    outcome.metrics = {"rows_to_run": 0}
    return _plans(bench, table, "y", outcome)


def plan_cleaned_up(bench: Bench) -> Outcome:
    """The same after a clean-up of all history: every receipt is compared with its input."""
    outcome = Outcome(
        "plan_cleaned_up", "plan after a compaction of 10M rows and a clean-up: by receipt alone"
    )
    table = _computed(bench, outcome.name, bench.rows(10_000_000))
    dataset = lance.dataset(str(table.uri))
    dataset.optimize.compact_files(target_rows_per_fragment=20_000_000)
    for i in range(2):
        lance.dataset(str(table.uri)).update_config({"n": str(i)})
    lance.dataset(str(table.uri)).cleanup_old_versions(timedelta(0))
    outcome.metrics = {"rows_to_run": 0}
    return _plans(bench, table, "y", outcome)


def plan_vectors(bench: Bench) -> Outcome:
    """Lists of 384 floats, all moved by an update of another column."""
    rows, width = bench.rows(100_000), 384
    outcome = Outcome(
        "plan_vectors",
        "plan after an update of an unrelated column: 100k lists of 384 floats moved",
        target=Target(1.0, "seconds"),
    )
    items = np.random.default_rng(0).random(rows * width).astype(np.float32)
    ends = pa.array(np.arange(0, rows * width + 1, width), pa.int32())
    lists = pa.ListArray.from_arrays(ends, pa.array(items))
    table = bench.table(outcome.name, pa.table({"v": lists, "other": [0] * rows}), 4)
    table.add_columns({"y": functions.norm})
    table.backfill("y")
    lance.dataset(str(table.uri)).update({"other": "1"})
    outcome.metrics = {"rows_to_run": 0}
    return _plans(bench, table, "y", outcome)


WARM = (plan_update, plan_compacted, plan_cleaned_up, plan_vectors)

"""How cost grows with the work: each case at several sizes, and the steepest exponent between them.

    python -m benchmarks growth --json growth.json
    python -m benchmarks.plot growth.json docs/images/growth.png

An exponent of 1 is "twice the work, twice the time". What is fixed about a job makes it smaller.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa

import geneva
from benchmarks import functions
from benchmarks.cases import Bench, Outcome, Target, numbers
from geneva import udf
from geneva.config import Settings
from geneva.errors import GenevaError
from geneva.execution.runner import InProcessRunner


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """The steepest growth between two sizes that follow each other, on logarithmic scales."""
    steps = pairwise(points)
    return max(math.log(t2 / t1) / math.log(n2 / n1) for (n1, t1), (n2, t2) in steps)


def measured(
    bench: Bench,
    outcome: Outcome,
    sizes: Sequence[int],
    make: Callable[[int], Callable[[], object]],
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Time what `make` gives for each size, the best of several runs, and note the exponent."""
    points = []
    for size in sizes:
        action = make(size)
        action()
        runs = []
        for _ in range(max(2, bench.repeat)):
            started = clock()
            action()
            runs.append(clock() - started)
        points.append((size, min(runs)))
    outcome.runs.append(exponent(points))
    outcome.metrics = {"points": points}
    return outcome


def _backfills(table: geneva.Table) -> Callable[[], object]:
    """A backfill of one more column, each time."""

    def run() -> None:
        column = f"y{len(table.schema)}"
        table.add_columns({column: functions.arrow})
        table.backfill(column)

    return run


def growth_fragments(bench: Bench) -> Outcome:
    """The whole job: planning, tasks, commits, history."""
    outcome = Outcome(
        "growth_fragments",
        "500 / 5,000 fragments (and 50,000 in a full run) of 100 rows: exponent",
        target=Target(1.05, "seconds", "exponent"),
    )
    sizes = [500, 5_000, *([] if bench.is_quick else [50_000])]
    points, memory = [], 0.0
    for size in sizes:
        table = bench.table(f"growth_{size}", numbers(100 * size), size)
        table.add_columns({"y": functions.arrow})
        with _Memory() as used:
            started = time.perf_counter()
            table.backfill("y")
            points.append((size, time.perf_counter() - started))
        memory = max(memory, used.mib)
    outcome.runs.append(exponent(points))
    outcome.metrics = {"points": points, "driver_mib": memory}
    return outcome


def driver_memory(bench: Bench) -> Outcome:
    """The driver alone, in a table of many small fragments; nothing is computed by Spark."""
    fragments = 5_000 if bench.is_quick else 50_000
    outcome = Outcome(
        "driver_memory",
        f"the driver's memory over idle, {fragments:,} fragments",
        target=Target(300, "seconds", "MiB"),
    )
    name = f"growth_{fragments}"
    table = bench.db.open_table(name) if name in bench.db.table_names() else None
    if table is None:
        table = bench.table(name, numbers(100 * fragments), fragments)
    table.add_columns({"z": functions.arrow})
    with _Memory() as used:
        table.backfill("z")
    outcome.runs.append(used.mib)
    return outcome


class _Memory:
    """The most memory that this process has, over what it had before."""

    def __enter__(self) -> _Memory:
        self._before, self.mib = _resident(), 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.mib = max(self.mib, (_resident() - self._before) / 2**20)


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def growth_rows(bench: Bench) -> Outcome:
    outcome = Outcome(
        "growth_rows", "rows x10 (1M, 10M): exponent", target=Target(1.1, "seconds", "exponent")
    )
    return measured(
        bench,
        outcome,
        (1_000_000, 10_000_000),
        lambda rows: _backfills(bench.table(f"rows_{rows}", numbers(rows), 16)),
    )


def growth_columns(bench: Bench) -> Outcome:
    """A plan for a chain of computed columns, each of them the input of the next."""
    sizes = (15, 150) if bench.is_quick else (30, 300)
    outcome = Outcome(
        "growth_columns",
        "columns x10 ({}, {}, in a chain): exponent of planning".format(*sizes),
        target=Target(1.1, "seconds", "exponent"),
    )

    def chain(columns: int) -> Callable[[], object]:
        table = bench.table(f"columns_{columns}", numbers(16), 1)
        for i in range(columns):
            table.add_columns({f"y{i}": (functions.arrow, [f"y{i - 1}" if i else "x"])})
        return lambda: table.plan_backfill(f"y{columns - 1}")

    return measured(bench, outcome, sizes, chain, time.process_time)


def growth_versions(bench: Bench) -> Outcome:
    """A backfill of a few rows in a table with a long history."""
    outcome = Outcome(
        "growth_versions",
        "versions x100 (10, 1,000): exponent of a small backfill",
        target=Target(1.1, "seconds", "exponent"),
    )

    def old_table(versions: int) -> Callable[[], object]:
        table = bench.table(f"versions_{versions}", numbers(100), 1)
        dataset = lance.dataset(str(table.uri))
        for i in range(versions):
            dataset.update_config({"n": str(i)})
        return _backfills(table)

    return measured(bench, outcome, (10, 1_000), old_table)


@udf(data_type=pa.float64(), checkpoint_size=1)
def _fails_at_the_end(x: float) -> float:
    if x < 0:
        raise ValueError("the last row")
    return x


def growth_checkpoints(bench: Bench) -> Outcome:
    """A plan after a job that failed at its last row, and has left a checkpoint for each other."""
    outcome = Outcome(
        "growth_checkpoints",
        "checkpoints x100 (40, 4,000): exponent of planning",
        target=Target(1.1, "seconds", "exponent"),
    )
    # Without Spark: 4,000 checkpoints are made by one thread.
    db = geneva.connect(
        bench.folder / "db",
        settings=Settings(progress=False),
        runner=lambda: InProcessRunner(1),
    )

    def failed(rows: int) -> Callable[[], object]:
        values = np.arange(rows + 1, dtype=np.float64)
        values[-1] = -1
        name = f"checkpoints_{rows}"
        bench.table(name, pa.table({"x": values}), 1)
        table = db.open_table(name)
        table.add_columns({"y": _fails_at_the_end})
        with suppress(GenevaError):
            table.backfill("y")
        return lambda: table.plan_backfill("y")

    return measured(bench, outcome, (40, 4_000), failed, time.process_time)


WARM = (growth_fragments, growth_columns, growth_versions, growth_checkpoints)
GROWTH = (*WARM, growth_rows, driver_memory)

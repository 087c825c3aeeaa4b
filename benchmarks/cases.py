"""What is timed: tables, the two ways to fill a column of them, and what is to be reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa

import geneva
from benchmarks import functions, processes
from geneva.config import Settings
from geneva.spark.embedded.settings import available_cores

SHORT_SECONDS = 1.0
"""Runs that take no longer are made three times in a quick round."""


@dataclass(frozen=True)
class Target:
    """The most that a case may take: in seconds, or as a multiple of its reference."""

    most: float
    of: str
    """"seconds" (or what else is measured), "loop" (the reference), "alone" (the function alone is
    the reference, as a share: 0.95 is to be reached), "ideal" (sum of UDF time / cores), or "waits"
    (sum of what calls wait / calls at once)."""
    unit: str = "s"

    def __str__(self) -> str:
        if self.of == "seconds":
            return f"≤ {self.most:g} {self.unit}"
        if self.of == "alone":
            return f"≥ {1 / self.most:.2f} of it"
        than = {"loop": "", "ideal": " UDF time / cores", "waits": " waits / calls at once"}
        return f"≤ {self.most:.3g}x{than[self.of]}"


@dataclass
class Outcome:
    """The timings of one case, in seconds; every run is kept, the best one counts."""

    name: str
    title: str
    runs: list[float] = field(default_factory=list)
    loop_runs: list[float] = field(default_factory=list)
    ideal_runs: list[float] = field(default_factory=list)
    """Seconds of UDF time / cores, or of waits / calls at once: what no engine can beat."""
    target: Target | None = None
    metrics: dict = field(default_factory=dict)
    """Of the best run, as the job history keeps them."""

    @property
    def seconds(self) -> float:
        return min(self.runs)

    @property
    def loop_seconds(self) -> float | None:
        return min(self.loop_runs) if self.loop_runs else None

    @property
    def ratio_to_loop(self) -> float | None:
        return self.seconds / min(self.loop_runs) if self.loop_runs else None

    @property
    def ratio_to_ideal(self) -> float | None:
        if not self.ideal_runs:
            return None
        return min(run / ideal for run, ideal in zip(self.runs, self.ideal_runs, strict=True))

    @property
    def reached(self) -> bool | None:
        """Whether the target was met; None where there is none."""
        if self.target is None:
            return None
        measured = {
            "seconds": self.seconds,
            "loop": self.ratio_to_loop,
            "alone": self.ratio_to_loop,
            "ideal": self.ratio_to_ideal,
            "waits": self.ratio_to_ideal,
        }[self.target.of]
        return measured is not None and measured <= self.target.most


@dataclass
class Bench:
    """A database in a folder that is thrown away, and how big and how often."""

    folder: Path
    scale: float
    repeat: int
    is_quick: bool = False
    """Whether nothing is to take long: what says nothing of a target is left out."""

    def runs(self) -> Iterator[int]:
        """Numbers of runs. Of a quick round short ones are made again: the best one counts."""
        started = time.perf_counter()
        for run in range(3 if self.is_quick else self.repeat):
            if run < self.repeat or time.perf_counter() - started < SHORT_SECONDS:
                yield run

    def __post_init__(self) -> None:
        self.db = geneva.connect(self.folder / "db", settings=Settings(progress=False))

    def table(self, name: str, data: pa.Table, fragments: int) -> geneva.Table:
        rows = -(-data.num_rows // fragments)
        uri = str(self.folder / "db" / f"{name}.lance")
        lance.write_dataset(data, uri, max_rows_per_file=rows, max_rows_per_group=rows)
        return self.db.open_table(name)

    def rows(self, count: int, least: int = 16) -> int:
        return max(least, int(count * self.scale))

    def warm_up(self) -> None:
        """Start Spark, and let every worker import what it needs."""
        table = self.table("warm_up", numbers(64), 8)
        for column in ("a", "b"):
            table.add_columns({column: functions.arrow})
            table.backfill(column, task_size=8)

    def backfill(self, table: geneva.Table, udf: geneva.UDF, outcome: Outcome) -> None:
        for run in self.runs():
            column = f"geneva_{run}"
            table.add_columns({column: udf})
            started = time.perf_counter()
            result = table.backfill(column)
            seconds = time.perf_counter() - started
            if not outcome.runs or seconds < outcome.seconds:
                outcome.metrics = result.progress.metrics()
            outcome.runs.append(seconds)
            if outcome.target is not None and outcome.target.of == "ideal":
                outcome.ideal_runs.append(result.progress.timings.udf / available_cores())

    def loop(self, table: geneva.Table, function: Callable, kind, outcome: Outcome) -> None:
        """The same column by `LanceDataset.add_columns`: one process, one batch after another."""
        if self.is_quick and outcome.target is not None and outcome.target.of != "loop":
            return
        column = next(name for name in table.schema.names if not name.startswith("geneva_"))
        for run in self.runs():
            output = pa.schema([(f"loop_{run}", kind)])

            @lance.batch_udf(output_schema=output)
            def one_batch(batch, output=output):
                return pa.record_batch([function(batch[column])], schema=output)

            dataset = lance.dataset(str(table.uri))
            started = time.perf_counter()
            dataset.add_columns(one_batch, read_columns=[column])
            outcome.loop_runs.append(time.perf_counter() - started)


def numbers(rows: int) -> pa.Table:
    return pa.table({"x": np.arange(rows, dtype=np.float64)})


def vectors(rows: int, width: int) -> pa.Table:
    values = np.random.default_rng(0).random(rows * width, dtype=np.float32)
    return pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(values), width)})


# --------------------------------------------------------------------------- the cases, in order


def arrow_1m(bench: Bench) -> Outcome:
    outcome = Outcome(
        "arrow_1m", "1M rows, Arrow UDF, 16 fragments", target=Target(0.25, "seconds")
    )
    return _arrow(bench, outcome, bench.rows(1_000_000), 16)


def arrow_10m(bench: Bench) -> Outcome:
    outcome = Outcome("arrow_10m", "10M rows, Arrow UDF, 16 fragments", target=Target(0.4, "loop"))
    return _arrow(bench, outcome, bench.rows(10_000_000), 16)


def fragments_500(bench: Bench) -> Outcome:
    outcome = Outcome(
        "fragments_500", "100k rows, Arrow UDF, 500 fragments", target=Target(2.0, "seconds")
    )
    rows = bench.rows(100_000)
    return _arrow(bench, outcome, rows, min(500, rows))


def _arrow(bench: Bench, outcome: Outcome, rows: int, fragments: int) -> Outcome:
    table = bench.table(outcome.name, numbers(rows), fragments)
    bench.backfill(table, functions.arrow, outcome)
    bench.loop(table, functions.arrow, pa.float64(), outcome)
    return outcome


def scalar_200k(bench: Bench) -> Outcome:
    outcome = Outcome(
        "scalar_200k", "200k rows, scalar UDF, 4 fragments", target=Target(0.2, "seconds")
    )
    table = bench.table(outcome.name, numbers(bench.rows(200_000)), 4)
    bench.backfill(table, functions.scalar, outcome)
    loop = functions.over_rows(functions.scalar.func)
    bench.loop(table, loop, pa.float64(), outcome)
    return outcome


def vectors_100k(bench: Bench) -> Outcome:
    outcome = Outcome(
        "vectors_100k",
        "100k x 384-d vectors, Arrow UDF, 4 fragments",
        target=Target(0.8, "loop"),
    )
    table = bench.table(outcome.name, vectors(bench.rows(100_000), 384), 4)
    bench.backfill(table, functions.norm, outcome)
    bench.loop(table, functions.norm, pa.float32(), outcome)
    return outcome


def slow_2000(bench: Bench) -> Outcome:
    outcome = Outcome(
        "slow_2000", "2,000 rows, scalar UDF of 5 ms, 8 fragments", target=Target(1.03, "ideal")
    )
    table = bench.table(outcome.name, numbers(bench.rows(2_000)), 8)
    bench.backfill(table, functions.slow, outcome)
    bench.loop(table, functions.over_rows(functions.slow.func), pa.float64(), outcome)
    return outcome


def small(bench: Bench) -> Outcome:
    outcome = Outcome(
        "small", "100 rows, 1 fragment: the fixed cost of a job", target=Target(0.11, "seconds")
    )
    table = bench.table(outcome.name, numbers(100), 1)
    bench.backfill(table, functions.arrow, outcome)
    return outcome


def nothing(bench: Bench) -> Outcome:
    outcome = Outcome(
        "nothing", "100k rows, nothing to do, no Spark started", target=Target(0.1, "seconds")
    )
    table = bench.table(outcome.name, numbers(bench.rows(100_000)), 16)
    table.add_columns({"y": functions.arrow})
    table.backfill("y")
    for _ in range(bench.repeat):
        outcome.runs.append(processes.time_nothing(bench.folder / "db", outcome.name, "y"))
    return outcome


def look(bench: Bench) -> Outcome:
    outcome = Outcome(
        "look", "geneva describe, a process of its own", target=Target(0.7, "seconds")
    )
    table = bench.table(outcome.name, numbers(100), 1)
    table.add_columns({"y": functions.arrow})
    for _ in range(bench.repeat + 1):  # the first one writes bytecode, where there is none
        outcome.runs.append(processes.time_command("describe", bench.folder / "db", outcome.name))
    return outcome


def cold(bench: Bench) -> Outcome | None:
    outcome = Outcome("cold", "cold start: Spark and a first job, no class archive")
    return _cold(bench, outcome, processes.without_archive)


def cold_archive(bench: Bench) -> Outcome | None:
    outcome = Outcome("cold_archive", "cold start with the class archive")
    return _cold(bench, outcome, lambda: processes.with_archive(bench.folder))


def _cold(
    bench: Bench, outcome: Outcome, environment: Callable[[], dict[str, str]]
) -> Outcome | None:
    if bench.is_quick:
        return None
    table, variables = bench.table(outcome.name, numbers(100), 1), environment()
    for run in range(bench.repeat):
        column = f"y_{run}"
        table.add_columns({column: functions.arrow})
        outcome.runs.append(
            processes.time_cold(bench.folder / "db", outcome.name, column, variables)
        )
    return outcome


WARM = (arrow_1m, arrow_10m, scalar_200k, vectors_100k, slow_2000, fragments_500, small)
"""Cases that run on this process's own warm session."""
SEPARATE = (nothing, look, cold, cold_archive)
"""Cases that are timed in processes of their own."""

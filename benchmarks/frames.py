"""What is timed of data frames over tables, against pylance alone and against Parquet in Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa

from benchmarks.cases import Bench, Outcome, Target
from benchmarks.views import timed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from geneva.table import Table


def spark_read(bench: Bench) -> Outcome:
    """Read a number, a float and a string column in Spark; the reference reads them to Arrow."""
    outcome = Outcome(
        "spark_read",
        "5M rows x 3 columns through a data frame; against pylance's to_table",
        target=Target(2.0, "loop"),
    )
    table, uri = _rows_to_read(bench, outcome.name)
    for _ in range(bench.repeat):
        outcome.runs.append(timed(lambda: _read_all(table.to_spark())))
        outcome.loop_runs.append(timed(lance.dataset(uri).to_table))
    return outcome


def spark_read_parquet(bench: Bench) -> Outcome:
    """The same; the reference is Spark's own reader of Parquet: most of it is Spark's rows."""
    outcome = Outcome(
        "spark_read_parquet",
        "the same rows; against Spark's own reader of Parquet",
        target=Target(1.25, "loop"),
    )
    table, _ = _rows_to_read(bench, "spark_read")
    parquet = str(bench.folder / f"{outcome.name}.parquet")
    table.to_spark().write.parquet(parquet)
    spark = table.to_spark().sparkSession
    for _ in range(bench.repeat):
        outcome.runs.append(timed(lambda: _read_all(table.to_spark())))
        outcome.loop_runs.append(timed(lambda: _read_all(spark.read.parquet(parquet))))
    return outcome


def _rows_to_read(bench: Bench, name: str) -> tuple[Table, str]:
    """A table of three columns that a worker has read from, and where it is."""
    uri = str(bench.folder / "db" / f"{name}.lance")
    if name in bench.db.table_names():
        return bench.db.open_table(name), uri
    ids = np.arange(bench.rows(5_000_000))
    words = pa.array([f"row {i}" for i in range(1_000)])
    text = words.take(pa.array(ids % 1_000))
    lance.write_dataset(pa.table({"id": ids, "x": ids * 0.5, "text": text}), uri)
    table = bench.db.open_table(name)
    table.to_spark().count()
    return table, uri


def _read_all(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


WARM = (spark_read, spark_read_parquet)

"""What is timed of data frames over tables, against pylance alone on the same rows."""

from __future__ import annotations

import lance
import numpy as np
import pyarrow as pa

from benchmarks.cases import Bench, Outcome, Target
from benchmarks.views import timed


def spark_read(bench: Bench) -> Outcome:
    """Read a number, a float and a string column in Spark; the reference reads them to Arrow."""
    rows = bench.rows(5_000_000)
    outcome = Outcome(
        "spark_read",
        "5M rows x 3 columns through a data frame; against pylance's to_table",
        target=Target(2.0, "loop"),
    )
    uri = str(bench.folder / "db" / f"{outcome.name}.lance")
    ids = np.arange(rows)
    words = pa.array([f"row {i}" for i in range(1_000)])
    text = words.take(pa.array(ids % 1_000))
    lance.write_dataset(pa.table({"id": ids, "x": ids * 0.5, "text": text}), uri)
    table = bench.db.open_table(outcome.name)
    table.to_spark().count()
    for _ in range(bench.repeat):
        frame = table.to_spark()
        outcome.runs.append(timed(frame.write.format("noop").mode("overwrite").save))
        outcome.loop_runs.append(timed(lance.dataset(uri).to_table))
    return outcome


WARM = (spark_read,)

"""What is timed of loads, each against the same join in the memory of one process."""

from __future__ import annotations

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cases import Bench, Outcome, Target
from benchmarks.views import timed


def joined_in_memory(uri: str, source: str) -> None:
    """Read both sides, join them, and write the column: what fits into memory can be done so."""
    dataset = lance.dataset(uri)
    ids = dataset.to_table(columns=["id"])
    ids = ids.append_column("row", pa.array(np.arange(len(ids))))
    found = ids.join(pq.read_table(source), "id").sort_by("row").select(["v"])
    dataset.add_columns(found.to_reader(max_chunksize=65_536))


def load_10m(bench: Bench) -> Outcome:
    """10M keys, in another order than the table's, into 10M rows."""
    rows = bench.rows(10_000_000)
    outcome = Outcome(
        "load_10m",
        "load a column by key, 10M keys in random order into 10M rows; against a pyarrow join",
        target=Target(3.0, "loop"),
    )
    keys = np.random.default_rng(0).permutation(rows)
    source = str(bench.folder / "load_10m.parquet")
    pq.write_table(pa.table({"id": keys, "v": keys * 0.5}), source)
    for run in range(bench.repeat):
        name = f"{outcome.name}_{run}"
        uri = str(bench.folder / "db" / f"{name}.lance")
        ids = pa.table({"id": np.arange(rows)})
        lance.write_dataset(ids, uri, max_rows_per_file=-(-rows // 16))
        reference = str(bench.folder / f"{name}_reference.lance")
        lance.write_dataset(ids, reference, max_rows_per_file=-(-rows // 16))
        table = bench.db.open_table(name)
        outcome.runs.append(timed(lambda table=table: table.load_columns(source, "id", ["v"])))
        outcome.loop_runs.append(timed(lambda uri=reference: joined_in_memory(uri, source)))
    return outcome


WARM = (load_10m,)

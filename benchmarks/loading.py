"""What is timed of loads, each against the same join in the memory of one process."""

from __future__ import annotations

import time

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cases import Bench, Outcome, Target
from benchmarks.views import timed

FRAGMENTS = 16


def looked_up_in_memory(uri: str, source: str) -> None:
    """Read both sides, find each key, write the column: what fits into memory can be done so."""
    dataset = lance.dataset(uri)
    ids = dataset.to_table(columns=["id"])["id"].to_numpy()
    rows = pq.read_table(source).combine_chunks()
    keys = rows["id"].to_numpy()
    order = np.argsort(keys)
    found = rows.select(["v"]).take(order[np.searchsorted(keys, ids, sorter=order)])
    dataset.add_columns(found.to_reader(max_chunksize=65_536))


def loaded(bench: Bench, outcome: Outcome, values: pa.Array, keys: np.ndarray) -> Outcome:
    source = str(bench.folder / f"{outcome.name}.parquet")
    pq.write_table(pa.table({"id": keys, "v": values}), source, row_group_size=1 << 18)
    ids, each = pa.table({"id": np.arange(len(keys))}), -(-len(keys) // FRAGMENTS)
    for run in range(bench.repeat):
        name = f"{outcome.name}_{run}"
        reference = str(bench.folder / f"{name}.lance")
        for uri in (str(bench.folder / "db" / f"{name}.lance"), reference):
            lance.write_dataset(ids, uri, max_rows_per_file=each)
        started = time.perf_counter()
        result = bench.db.open_table(name).load_columns(source, "id", ["v"])
        outcome.runs.append(time.perf_counter() - started)
        if outcome.runs[-1] == outcome.seconds:
            outcome.metrics = result.progress.metrics()
        outcome.loop_runs.append(timed(lambda uri=reference: looked_up_in_memory(uri, source)))
    return outcome


def load_10m(bench: Bench) -> Outcome:
    """Keys in another order than the table's, into as many rows."""
    millions = 2 if bench.is_quick else 10
    rows = bench.rows(millions * 1_000_000)
    outcome = Outcome(
        "load_10m",
        f"load a column by key, {millions}M keys in random order into {millions}M rows; "
        "against a join in memory",
        target=Target(3.0, "loop"),
    )
    keys = np.random.default_rng(0).permutation(rows)
    return loaded(bench, outcome, pa.array(keys * 0.5), keys)


def load_vectors(bench: Bench) -> Outcome:
    """Vectors, more than are kept in memory, in another order than the table's."""
    rows, width = bench.rows(400_000), 256
    outcome = Outcome(
        "load_vectors",
        "load 400k vectors of 256 floats by key, in random order; against a join in memory",
        target=Target(3.0, "loop"),
    )
    rng = np.random.default_rng(0)
    items = pa.array(rng.random(rows * width, dtype=np.float32))
    values = pa.FixedSizeListArray.from_arrays(items, width)
    return loaded(bench, outcome, values, rng.permutation(rows))


WARM = (load_10m, load_vectors)

"""What is timed of a device: functions that wait for one, and how much memory running ahead takes.

A GPU's shape without a GPU: one slot, batches of a fixed size, short waits, wide output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import lance
import numpy as np
import pyarrow as pa

from benchmarks.cases import Bench, Outcome, Target
from geneva import udf

WAIT_SECONDS = 0.002
BATCH = 64
TOKENS, WIDTH = 64, 384


class Device:
    """Waits for the device, and gives a vector of 1.5 KB for each row."""

    def setup(self) -> None:
        self.values = np.random.default_rng(0).random(BATCH * WIDTH, dtype=np.float32)

    def __call__(self, tokens: pa.Array) -> pa.Array:
        time.sleep(WAIT_SECONDS)
        values = pa.array(self.values[: len(tokens) * WIDTH])
        return pa.FixedSizeListArray.from_arrays(values, WIDTH)


VECTOR = pa.list_(pa.float32(), WIDTH)


def token_table(rows: int) -> pa.Table:
    tokens = np.random.default_rng(0).integers(0, 30_000, rows * TOKENS, dtype=np.int32)
    return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens), TOKENS)})


def time_alone(function, column: pa.Array, batch: int) -> float:
    """The function on the same batches, in memory: what an engine adds nothing to."""
    batches = [column[at : at + batch] for at in range(0, len(column), batch)]
    batches = [pa.concat_arrays([some, some[:0]]) for some in batches]
    started = time.perf_counter()
    for some in batches:
        function(some)
    return time.perf_counter() - started


def device_wait(bench: Bench) -> Outcome:
    outcome = Outcome(
        "device_wait",
        f"{WAIT_SECONDS * 1e3:g} ms per batch of {BATCH} on a device, 1 slot; the function alone",
        target=Target(1 / 0.93, "alone"),
    )
    data = token_table(bench.rows(128_000, least=2 * BATCH))
    table = bench.table(outcome.name, data, 4)
    function = udf(data_type=VECTOR, batch_size=BATCH, num_gpus=1)(Device)
    warm = bench.table("device_warm", data.slice(0, BATCH), 1)
    warm.add_columns({"y": function()})
    warm.backfill("y")  # starts the slot's own Python process
    alone = Device()
    alone.setup()
    column = data["tokens"].combine_chunks()
    for run in range(bench.repeat):
        table.add_columns({f"geneva_{run}": function()})
        started = time.perf_counter()
        result = table.backfill(f"geneva_{run}")
        outcome.runs.append(time.perf_counter() - started)
        outcome.metrics = result.progress.metrics()
        outcome.loop_runs.append(time_alone(alone, column, BATCH))
    return outcome


# ------------------------------------------------------------------------------------- memory

_MEASURED = """
import json, sys
import numpy as np, pyarrow as pa
import geneva

@geneva.udf(data_type=pa.list_(pa.float32(), 256), input_columns=["x"])
def widen(x: pa.Array) -> pa.Array:
    values = np.repeat(x.to_numpy().astype(np.float32), 256)
    return pa.FixedSizeListArray.from_arrays(pa.array(values), 256)

db = geneva.connect(sys.argv[1])
peaks = []
for name in ("small", "small", "big"):
    table = db.open_table(name)
    column = f"y{len(peaks)}"
    table.add_columns({column: widen})
    peaks.append(table.backfill(column).progress.worker_memory_bytes)
print(json.dumps(peaks))
"""


def memory_1gb(bench: Bench) -> Outcome:
    """The peak of a worker that writes 1 GB for one fragment, over one that writes 10 KB."""
    outcome = Outcome(
        "memory_1gb",
        "a worker's memory over idle: 1 GB of output for one fragment, queues full",
        target=Target(700, "seconds", "MiB"),
    )
    folder = bench.folder / "memory"
    rows = bench.rows(1_000_000)
    for name, count in (("small", 10), ("big", rows)):
        numbers = pa.table({"x": np.arange(count, dtype=np.int64)})
        lance.write_dataset(numbers, str(folder / f"{name}.lance"), max_rows_per_file=count)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(folder)],
        env={**os.environ, "GENEVA_LOCAL_SLOTS": "1", "GENEVA_PROGRESS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a measured process failed:\n{done.stderr}")
    _, idle, peak = json.loads(done.stdout.splitlines()[-1])
    outcome.runs.append((peak - idle) / 2**20)
    return outcome


WARM = (device_wait,)
SEPARATE = (memory_1gb,)

"""Memory is bounded by the size of a batch, not by that of a fragment.

Peaks are read from /proc, from outside, at the end of the job: the kernel keeps them (VmHWM), so
none is missed, be it in the UDF, in a checkpoint, or when a fragment is put together.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from conftest import connect
from geneva import UDF, Table, skip_on_error, udf
from geneva.execution.runner import InProcessRunner
from processes import kill, nothing_left_in, start_script, workers_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

note = logging.getLogger(__name__).info  # measured numbers: pytest --log-cli-level=INFO

MIB = 1024 * 1024
LIMIT = 1024 * MIB
CHUNK = 100_000


def numbers(rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, CHUNK):
        stop = min(start + CHUNK, rows)
        yield pa.record_batch({"x": pa.array(np.arange(start, stop, dtype=np.int64))})


def random_strings(width: int) -> Callable[[int], Iterator[pa.RecordBatch]]:
    """Strings that can't be compressed: as wide on disk as in memory."""

    def make(rows: int) -> Iterator[pa.RecordBatch]:
        rng = np.random.default_rng(0)
        step = max(1, 8 * MIB // width)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            letters = rng.integers(32, 127, size=count * width, dtype=np.uint8).tobytes()
            yield pa.record_batch({"x": strings(letters, count, width)})

    return make


def repeated_strings(width: int) -> Callable[[int], Iterator[pa.RecordBatch]]:
    """Strings that are next to nothing on disk, and wide in memory."""

    def make(rows: int) -> Iterator[pa.RecordBatch]:
        step = max(1, 8 * MIB // width)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            yield pa.record_batch({"x": strings(b"a" * (count * width), count, width)})

    return make


def strings(letters: bytes, count: int, width: int) -> pa.Array:
    offsets = pa.py_buffer(np.arange(0, (count + 1) * width, width, dtype=np.int32))
    return pa.StringArray.from_buffers(count, offsets, pa.py_buffer(letters))


@udf(data_type=pa.float64(), input_columns=["x"])
def half(x: pa.Array) -> pa.Array:
    return pc.divide(pc.cast(x, pa.float64()), 2.0)


@udf(data_type=pa.string(), input_columns=["x"])
def upper(x: pa.Array) -> pa.Array:
    return pc.ascii_upper(x)


@udf(data_type=pa.string(), input_columns=["x"])
def widen(x: pa.Array) -> pa.Array:
    return pc.binary_repeat("0123456789" * 1_000, pc.add(pc.multiply(x, 0), 1))


@udf(data_type=pa.binary())
def wide_row(x: int) -> bytes:
    return b"%d" % (x % 10) * 10_000


@udf(data_type=pa.list_(pa.float32(), 2_500), input_columns=["x"], on_error=skip_on_error())
def failing_row(x: pa.Array) -> np.ndarray:
    if 5_000 in x.to_pylist():
        raise ValueError("skipped, so that the file is staged twice")
    return np.ones((len(x), 2_500), np.float32)


Source = Callable[[int], Iterator[pa.RecordBatch]]


def one_fragment(folder: Path, name: str, source: Source, rows: int, function: UDF) -> Table:
    batches = source(rows)
    first = next(batches)
    reader = pa.RecordBatchReader.from_batches(first.schema, chain(first, batches))
    uri = str(folder / "db" / f"{name}.lance")
    dataset = lance.write_dataset(reader, uri, max_rows_per_file=rows, max_bytes_per_file=2**40)
    assert len(dataset.get_fragments()) == 1
    table = connect(folder / "db", InProcessRunner).open_table(name)
    table.add_columns({"y": function})
    return table


def chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def status_of(pid: int, field: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def computing_processes(folder: Path, driver: int, *, on_spark: bool) -> list[int]:
    """Return the processes that run the UDF: Spark's Python workers, or the driver itself."""
    return workers_in(folder) if on_spark else [driver]


def peak_over_idle(folder: Path, *, on_spark: bool, **options: object) -> int:
    """Backfill a small table twice, then the big one; return by how much memory rose over idle."""
    runner = "None" if on_spark else "lambda: InProcessRunner(1)"
    go = folder / "go"
    os.mkfifo(go)
    code = f"""
        import geneva
        from geneva.execution.runner import InProcessRunner
        db = geneva.connect({str(folder / "db")!r}, runner={runner})
        for name, options in (("small", {{}}), ("small", {{}}), ("big", {options!r})):
            print(db.open_table(name).backfill("y", where="true", **options).status, flush=True)
            open({str(go)!r}).read()
        """
    machine = folder / "machine"
    with nothing_left_in(machine):
        process = start_script(machine, code)

        def sizes_after_backfill(field: str) -> list[int]:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "DONE\n", kill(process)
            pids = computing_processes(machine, process.pid, on_spark=on_spark)
            sizes = [status_of(pid, field) for pid in pids]
            go.write_text("")
            return sizes

        sizes_after_backfill("VmRSS")
        idle = max(sizes_after_backfill("VmRSS"))
        peak = max(sizes_after_backfill("VmHWM"))
        assert process.wait(30) == 0
        process.communicate()
    note("idle %d MiB, peak %d MiB over it", idle // MIB, (peak - idle) // MIB)
    return peak - idle


def fill(folder: Path, source: Source, rows: int, function: UDF) -> Table:
    one_fragment(folder, "small", source, 10, function)
    return one_fragment(folder, "big", source, rows, function)


# ----------------------------------------------------------------------------- quick, in a process


@pytest.mark.parametrize(
    ("source", "rows", "function"),
    [
        pytest.param(numbers, 3_000_000, half, id="numbers", marks=pytest.mark.slow),
        pytest.param(
            repeated_strings(50_000), 8_000, upper, id="compressed_strings", marks=pytest.mark.slow
        ),
        pytest.param(random_strings(1_000), 100_000, upper, id="strings", marks=pytest.mark.slow),
        pytest.param(numbers, 30_000, widen, id="wide_output", marks=pytest.mark.slow),
        pytest.param(numbers, 100_000, wide_row, id="wide_rows", marks=pytest.mark.slow),
        pytest.param(numbers, 100_000, failing_row, id="failing_row", marks=pytest.mark.slow),
    ],
)
def test_task_stays_small(tmp_path: Path, source: Source, rows: int, function: UDF) -> None:
    fill(tmp_path, source, rows, function)
    assert peak_over_idle(tmp_path, on_spark=False) < 768 * MIB


# --------------------------------------------------------------------------------------- on Spark


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("source", "rows", "function", "options"),
    [
        pytest.param(numbers, 10_000_000, half, {}, id="numbers"),
        pytest.param(numbers, 10_000_000, half, {"task_size": 10_000_000}, id="one_task"),
        pytest.param(random_strings(1_000), 1_000_000, upper, {}, id="strings"),
    ],
)
def test_worker_stays_small(
    tmp_path: Path, source: Source, rows: int, function: UDF, options: dict[str, object]
) -> None:
    table = fill(tmp_path, source, rows, function)
    assert peak_over_idle(tmp_path, on_spark=True, **options) < LIMIT
    dataset = lance.dataset(table.ref.uri)
    dataset.validate()
    assert dataset.count_rows("y IS NULL") == 0
    last = dataset.to_table(columns=["x", "y"], offset=rows - 1_000, limit=1_000)
    assert last.column("y").to_pylist() == function(last.column("x").combine_chunks()).to_pylist()

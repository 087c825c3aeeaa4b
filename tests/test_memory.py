"""Memory is bounded by the size of a batch, not by that of a fragment.

Peaks are read from /proc, from outside, at the end of the job: the kernel keeps them (VmHWM), so
none is missed, be it in the UDF, in a checkpoint, or when a fragment is put together.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from conftest import connect
from geneva import UDF, Table, udf
from geneva.execution.runner import InProcessRunner
from processes import kill, nothing_left_in, processes_in, start_script

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
    if not on_spark:
        return [driver]
    daemons = {pid for pid, text in processes_in(folder).items() if "pyspark.daemon" in text}
    return [pid for pid in daemons if parent_of(pid) in daemons]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def peak_over_idle(folder: Path, *, on_spark: bool, **options: object) -> int:
    """Backfill a small table, then the big one; return by how much memory peaked over the first."""
    runner = "None" if on_spark else "lambda: InProcessRunner(1)"
    code = f"""
        import sys, geneva
        from geneva.execution.runner import InProcessRunner
        db = geneva.connect({str(folder / "db")!r}, runner={runner})
        small, big = db.open_table("small"), db.open_table("big")
        for table in (small, small, big):
            print(table.backfill("y", where="true", **{options!r} if table is big else {{}}).status,
                  flush=True)
            if table is not small or small.version % 2:
                pass
            open({str(folder / "go")!r}).read()
        """
    import os

    os.mkfifo(folder / "go")
    machine = folder / "machine"
    with nothing_left_in(machine):
        process = start_script(machine, code)
        try:
            for _ in range(2):  # the second time every worker has what it needs
                done(process)
                idle = peaks(machine, process, "VmRSS", on_spark=on_spark)
                (folder / "go").write_text("")
            done(process)
            top = peaks(machine, process, "VmHWM", on_spark=on_spark)
            (folder / "go").write_text("")
            assert process.wait(30) == 0
            driver = 0
        finally:
            kill(process)
    base = max(idle.values())
    over = max(top.values()) - base
    note("idle %d MiB, peak %d MiB over it", base // MIB, over // MIB)
    return over + driver


def done(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "DONE\n", line or kill(process)


def peaks(
    folder: Path, process: subprocess.Popen[str], field: str, *, on_spark: bool
) -> dict[int, int]:
    pids = computing_processes(folder, process.pid, on_spark=on_spark)
    assert pids
    return {pid: status_of(pid, field) for pid in pids}

"""Copies of a worker that a function forks: they end where they come back, and call nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import finish, nothing_left_in, start_script

ROWS = 12
SCRIPT = """
import os, signal, time, warnings
signal.alarm(40)
os.register_at_fork(after_in_child=lambda: signal.alarm(20))  # no copy outlives a test
warnings.simplefilter("ignore")  # of forks in processes that have threads
import pyarrow as pa
from geneva import udf
from geneva.execution.apply import forks
from geneva.execution.apply.batch import Applier
from geneva.udf.policy import retry_all

copies = []

def fork():
    copy = os.fork()
    copies.append(copy)
    return copy == 0

def note(*calls):
    for call in calls:
        os.write(1, f"{call}\\n".encode())  # copies write too, if they call

class Stateful:
    def __call__(self, id: pa.Array) -> pa.Array:
        note(*id.to_pylist())
        return id

class Forks(Stateful):
    def setup(self): WHERE == "setup" and fork()
    def close(self): WHERE == "close" and fork()

class Prepares(Stateful):
    def prepare(self, id: pa.Array): fork(); return id

class SetsUpAsync:
    async def setup(self): fork()
    async def __call__(self, id: int) -> int: note(id); return id

def by_row(id: int) -> int:
    note(id)
    if id % 3 == 0 and fork() and WHERE == "raise":
        raise ValueError
    return id

seen = set()

def again(id: int) -> int:
    if id % 3 == 0 and id not in seen:
        seen.add(id)
        raise ValueError
    note(id)
    if id % 3 == 0: fork()
    return id

def wrong(id: int) -> int:
    if id in seen: note(id); fork(); return id
    seen.add(id)
    return "no number"

async def in_loop(id: int) -> int:
    note(id)
    if id == 3: fork()
    return id

def by_batch(id: pa.Array) -> pa.Array:
    note(*id.to_pylist())
    fork()
    return id

options = {"data_type": pa.int64()}
function, threads = {
    "row": (by_row, None), "raise": (by_row, None), "again": (again, None), "wrong": (wrong, None),
    "threads": (by_row, 3), "slices": (by_batch, 3), "batch": (by_batch, None),
    "async": (in_loop, None), "setup": (Forks, None), "close": (Forks, None),
    "prepare": (Prepares, None), "async setup": (SetsUpAsync, None),
}[WHERE]
if WHERE in ("again", "wrong"):
    options["on_error"] = retry_all(max_attempts=2)
if WHERE == "prepare":
    options["cpu_workers"] = 2
own = udf(**options)(function)
if isinstance(function, type):
    own = own()

forks.note_worker()
rows = pa.record_batch({"id": pa.array(range(ROWS))})
applier = Applier(own, pa.field("x", pa.int64()), threads)
applier.warm(rows)
prepared = applier.prepare(rows)
values = applier.run(rows, None, prepared).arrays[0]
forks.end_copy()  # as a worker does after every batch
assert values.to_pylist() == list(range(ROWS)), values
applier.close()
assert copies
for copy in copies:
    end = time.monotonic() + 20
    while not (ended := os.waitpid(copy, os.WNOHANG)[0]) and time.monotonic() < end:
        time.sleep(0.01)
    assert ended, "a copy goes on"
"""
PLACES = ["row", "raise", "again", "wrong", "threads", "slices", "batch", "async"]
PLACES += ["setup", "close", "prepare", "async setup"]


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_a_copy_ends_and_makes_no_calls_of_its_own(tmp_path: Path, where: str) -> None:
    with nothing_left_in(tmp_path):
        process = start_script(tmp_path, f"WHERE, ROWS = {where!r}, {ROWS}\n{SCRIPT}")
        calls = [int(call) for call in finish(process, 60).split()]
    assert sorted(calls) == list(range(ROWS))

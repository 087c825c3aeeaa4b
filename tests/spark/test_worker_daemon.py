"""The process that workers are forked from: what it imports, they need not."""

from __future__ import annotations

import os
import subprocess
import sys

from geneva.spark.worker_daemon import SLOT_VARIABLE

_MODULES_AT_FORK = """
import sys
import pyspark.daemon
from geneva.spark import worker_daemon

pyspark.daemon.manager = lambda: print(*sys.modules)
worker_daemon.main()
"""


def test_workers_find_all_that_a_task_needs_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MODULES_AT_FORK], capture_output=True, text=True, check=True
    )
    needed = {"pyspark.worker", "geneva.execution.runner", "geneva.execution.worker.run", "lance"}
    assert needed <= set(done.stdout.split())


def test_for_a_slot_of_a_gpu_the_worker_imports_as_spark_starts_the_slots_one_by_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MODULES_AT_FORK],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, SLOT_VARIABLE: "0.0"},
    )
    imported = set(done.stdout.split())
    assert "pyspark.worker" in imported
    assert not imported & {"geneva.execution.worker.run", "lance"}


_DRAWN_IN_TWO_COPIES = """
import os
import pyspark.daemon
from geneva.spark import worker_daemon

def fork_twice():
    import numpy
    for _ in range(2):
        if os.fork() == 0:
            print(numpy.random.rand(), numpy.random.randint(2**31), flush=True)
            os._exit(0)
        os.wait()

pyspark.daemon.manager = fork_twice
worker_daemon.main()
"""


_SEEDED_IN_A_WORKER = """
import os
import pyspark.daemon
from geneva.spark import worker_daemon

def fork_worker():
    import numpy
    if os.fork() == 0:
        numpy.random.seed(7)
        if os.fork() == 0:  # as a function does it
            print(numpy.random.randint(2**31), flush=True)
            os._exit(0)
        os.wait()
        os._exit(0)
    os.wait()

pyspark.daemon.manager = fork_worker
worker_daemon.main()
"""


def test_a_process_that_a_function_forks_keeps_the_seed_that_it_set() -> None:
    drawn = {
        subprocess.run(
            [sys.executable, "-c", _SEEDED_IN_A_WORKER], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(drawn) == 1


def test_each_worker_draws_its_own_random_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DRAWN_IN_TWO_COPIES], capture_output=True, text=True, check=True
    )
    drawn = done.stdout.split()
    assert len(drawn) == len(set(drawn)) == 4

"""The process that workers are forked from: what it imports, they need not."""

from __future__ import annotations

import subprocess
import sys

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


def test_each_worker_draws_its_own_random_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DRAWN_IN_TWO_COPIES], capture_output=True, text=True, check=True
    )
    drawn = done.stdout.split()
    assert len(drawn) == len(set(drawn)) == 4

"""The process that Spark forks its Python workers from, on this machine.

Each worker needs Lance, pyarrow and this package: most of a second of imports, and 140 MB. Here
they are imported once, before the first fork, and all workers share them. Nothing is called: Lance
starts its threads with its first call, and threads don't survive a fork.

A slot of a GPU has a process of this kind for itself, and one worker. Spark starts these processes
one after the other, and the next one when this one has forked: so there the worker imports.
"""

from __future__ import annotations

import gc
import os
import warnings

SLOT_VARIABLE = "GENEVA_GPU_SLOT"
"""Spark keeps Python processes with different variables apart: a slot has one of its own."""


def main() -> None:
    """Import what every task needs, then do what pyspark's own daemon does."""
    import pyspark.worker  # noqa: F401
    from pyspark.daemon import manager

    if SLOT_VARIABLE not in os.environ:
        _import_for_all()
    # Said at every fork: it is meant for processes that have used Lance.
    warnings.filterwarnings("ignore", message=".*(fork-safe|fork)")
    manager()


def _import_for_all() -> None:
    import numpy

    import geneva.execution.runner
    import geneva.execution.worker.run  # noqa: F401

    daemon = os.getpid()

    def seed() -> None:
        if os.getppid() == daemon:  # a worker, and not a process that a function forks
            numpy.random.seed()

    # Seeded when it is imported: without this all workers would draw the same numbers.
    os.register_at_fork(after_in_child=seed)
    # Workers share these pages as long as nobody writes to them, and a collector does.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()

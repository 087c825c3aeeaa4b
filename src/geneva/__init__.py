"""Geneva on Spark: feature columns for Lance tables, computed by Python functions on Spark."""

import os as _os

# Lance warns on stderr that DataReplacement is young, at every commit. Whoever set a level keeps it.
_os.environ.setdefault("LANCE_LOG", "error")

from geneva.connection import Connection, connect  # noqa: E402
from geneva.jobs import JobFuture, JobResult  # noqa: E402
from geneva.model import JobStatus  # noqa: E402
from geneva.table import Table  # noqa: E402
from geneva.udf import UDF, udf  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "UDF",
    "Connection",
    "JobFuture",
    "JobResult",
    "JobStatus",
    "Table",
    "__version__",
    "connect",
    "udf",
]

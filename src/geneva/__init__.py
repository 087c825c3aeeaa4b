"""Geneva on Spark: feature columns for Lance tables, computed by Python functions on Spark."""

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from geneva import _distribution  # noqa: F401  (checks, before all else, whose files these are)

# Lance warns on stderr that DataReplacement is young, at every commit. Whoever set a level keeps
# it.
_os.environ.setdefault("LANCE_LOG", "error")

# Not lazy like the rest: these modules have the names of their decorators, and must not win.
from geneva.udf.chunker import Chunker, chunker
from geneva.udf.declare import UDF, udf
from geneva.udf.policy import (
    Fail,
    Retry,
    Skip,
    fail_fast,
    retry_all,
    retry_transient,
    skip_on_error,
)

if TYPE_CHECKING:
    from geneva.connection import Connection, connect
    from geneva.jobs import JobFuture, JobHandle, JobResult
    from geneva.model.jobs import JobStatus
    from geneva.query import Query
    from geneva.spark.source.frames import register
    from geneva.table import Table
    from geneva.view import MaterializedView

__version__ = "0.1.0"

__all__ = [
    "UDF",
    "Chunker",
    "Connection",
    "Fail",
    "JobFuture",
    "JobHandle",
    "JobResult",
    "JobStatus",
    "MaterializedView",
    "Query",
    "Retry",
    "Skip",
    "Table",
    "__version__",
    "chunker",
    "connect",
    "fail_fast",
    "register",
    "retry_all",
    "retry_transient",
    "skip_on_error",
    "udf",
]

_HOMES = {
    "Connection": "geneva.connection",
    "JobFuture": "geneva.jobs",
    "JobHandle": "geneva.jobs",
    "JobResult": "geneva.jobs",
    "JobStatus": "geneva.model.jobs",
    "MaterializedView": "geneva.view",
    "Query": "geneva.query",
    "Table": "geneva.table",
    "connect": "geneva.connection",
    "register": "geneva.spark.source.frames",
}


def __getattr__(name: str) -> _Any:
    """Load a public name at first use: workers need few, and LanceDB is slow to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)

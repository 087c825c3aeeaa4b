"""Geneva on Spark: feature columns for Lance tables, computed by Python functions on Spark."""

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from geneva import _distribution  # noqa: F401  (checks, before all else, whose files these are)

# Lance warns on stderr that DataReplacement is young, at every commit, and LanceDB that a table to
# be overwritten is not there. Whoever set a level keeps it.
_os.environ.setdefault("LANCE_LOG", "error")
_os.environ.setdefault("LANCEDB_LOG", "error")

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
from geneva.udf.records import Columns, UnpackedUDF
from geneva.udf.table_function import UDTF, batch_udtf, scalar_udtf, udtf
from geneva.udf.usage import RateLimit, report_usage

if TYPE_CHECKING:
    from geneva.asynchronous import AsyncConnection, AsyncTable, connect_async
    from geneva.connection import Connection, connect
    from geneva.jobs import JobFuture, JobHandle, JobResult
    from geneva.model.jobs import JobStatus
    from geneva.query import GenevaQueryBuilder, Query
    from geneva.spark.source.frames import register
    from geneva.table import Table
    from geneva.view import MaterializedView

__version__ = "0.1.0"

__all__ = [
    "UDF",
    "UDTF",
    "AsyncConnection",
    "AsyncTable",
    "Chunker",
    "Columns",
    "Connection",
    "Fail",
    "GenevaQueryBuilder",
    "JobFuture",
    "JobHandle",
    "JobResult",
    "JobStatus",
    "MaterializedView",
    "Query",
    "RateLimit",
    "Retry",
    "Skip",
    "Table",
    "UnpackedUDF",
    "__version__",
    "batch_udtf",
    "chunker",
    "connect",
    "connect_async",
    "fail_fast",
    "register",
    "report_usage",
    "retry_all",
    "retry_transient",
    "scalar_udtf",
    "skip_on_error",
    "udf",
    "udtf",
]

_HOMES = {
    "AsyncConnection": "geneva.asynchronous",
    "AsyncTable": "geneva.asynchronous",
    "connect_async": "geneva.asynchronous",
    "Connection": "geneva.connection",
    "GenevaQueryBuilder": "geneva.query",
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


_MODULES = frozenset(
    ("cluster", "config", "db", "debug", "errors", "manifest", "query", "table", "transformer")
)
"""Modules that can be named without importing them: `geneva.db.Connection`."""


def __getattr__(name: str) -> _Any:
    """Load a public name at first use: workers need few, and LanceDB is slow to import."""
    if name in _MODULES:
        return _import_module(f"geneva.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)

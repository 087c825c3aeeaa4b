"""A failure of the user's function, in words: which row, why, and what it was given."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from geneva.errors import UDFError, UDFExecutionError, UDFOutputError, UDFTimeoutError, WorkerDied
from geneva.udf.declare import UDF

_GENEVA_FILES = str(Path(__file__).resolve().parent.parent)
_MOST_VALUE = 60
_MOST_PREVIEW = 300
_MOST_MESSAGE = 2_000
_MOST_TRACEBACK = 4_000


@dataclass(frozen=True, slots=True)
class CellFailure:
    """What went wrong in the user's function, without the table's coordinates."""

    row: int | None  # index in the batch; None where it concerns the batch as a whole
    kind: str  # "exception": the function raised; "output": it returned what doesn't fit
    exception_type: str
    message: str
    traceback: str  # the user's frames only; empty for "output"
    value_type: str | None  # the type of the offending value, for "output"
    attempt: int = 1
    preview: str = ""  # the row's inputs, in short


def raise_failed(
    udf: UDF,
    output: pa.Field,
    error: BaseException,
    row: int | None,
    batch: pa.RecordBatch,
    doing: str = "failed",
) -> NoReturn:
    """Raise what a user reads about an exception in their function."""
    if isinstance(error, UDFError) and hasattr(error, "failure"):
        raise error
    name = type(error).__name__
    where = "" if row is None else f" on row {row} of the batch"
    if isinstance(error, TypeError):
        message = (
            f"UDF '{udf.name}' {doing} with type error: {error}\n"
            f"Input batch schema: {', '.join(f'{f.name}: {f.type}' for f in batch.schema)}\n"
            f"UDF expects input_columns: {list(udf.input_columns or ())}\n"
            f"UDF output type: {output.type}"
        )
    else:
        message = f"UDF '{udf.name}' {doing}{where}: {name}: {error}"
    told = CellFailure(row, "exception", name, str(error), user_traceback(error), None)
    kind = next((k for k in (UDFTimeoutError, WorkerDied) if isinstance(error, k)), None)
    raise with_failure((kind or UDFExecutionError)(message), told) from error


def refusal(udf: UDF, output: pa.Field, row: int | None, value: Any, problem: str) -> UDFError:
    """What a user reads about a value that doesn't fit."""
    message = f"UDF '{udf.name}' {problem} (declared type: {output.type})."
    kind = type(value).__name__
    told = CellFailure(row, "output", UDFOutputError.__name__, message, "", kind)
    return with_failure(UDFOutputError(message), told)


def described(
    error: BaseException,
    row: int,
    attempt: int,
    batch: pa.RecordBatch | None,
    *,
    in_full: bool = True,
) -> CellFailure:
    """A failed row for the record: cut to what is worth keeping, `in_full` with its traceback."""
    is_output = isinstance(error, UDFOutputError)
    name = type(error).__name__
    if isinstance(error, UDFTimeoutError):
        name = "TimeoutError"
    return CellFailure(
        row,
        "output" if is_output else "exception",
        name,
        str(error)[:_MOST_MESSAGE],
        "" if is_output or not in_full else user_traceback(error)[-_MOST_TRACEBACK:],
        None,
        attempt,
        preview(batch, row) if batch is not None else "",
    )


def preview(batch: pa.RecordBatch, row: int) -> str:
    """The inputs of a row, in short."""
    parts = [f"{name}={_shown(batch.column(i)[row])}" for i, name in enumerate(batch.schema.names)]
    return ", ".join(parts)[:_MOST_PREVIEW]


def _shown(value: pa.Scalar) -> str:
    kind = value.type
    if not value.is_valid:
        return "None"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return f"<{len(value.as_buffer()):,} bytes>"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text = value.as_buffer().to_pybytes()[: 4 * _MOST_VALUE].decode(errors="ignore")
        return _cut(repr(text))
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = value.values
        more = f", ... {len(items)} items" if len(items) > 4 else ""
        return _cut(f"[{', '.join(_shown(item) for item in items[:4])}{more}]")
    return _cut(repr(value.as_py()))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_VALUE else text[: _MOST_VALUE - 3] + "..."


def with_failure(error: UDFError, failure: CellFailure) -> UDFError:
    """Attach the facts to an error, for the caller to add table, column and fragment."""
    error.failure = failure  # type: ignore[attr-defined]
    return error


def user_traceback(error: BaseException) -> str:
    """Format an exception without the frames of Geneva itself."""
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        kept = [f for f in part.stack if not f.filename.startswith(_GENEVA_FILES)]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(told.format())


MOST_TRACEBACKS = 100
"""Failed rows of a part that are told with their traceback."""

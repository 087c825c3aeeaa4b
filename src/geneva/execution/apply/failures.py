"""Describing a failure of the user's function: which row, why, and its inputs."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from geneva.errors import UDFError, UDFExecutionError, UDFOutputError, UDFTimeoutError, WorkerDied
from geneva.render.text import shorten
from geneva.render.values import error_text, scalar_text, writable
from geneva.udf.declare import UDF, UDFArgType

_PACKAGE = Path(__file__).resolve().parents[2]
_GENEVA_FILES = tuple(f"{_PACKAGE / room}{os.sep}" for room in ("execution", "udf"))
"""What calls functions, and stands around them; those of `geneva.udfs` are functions, too."""
_MAX_PREVIEW_CHARS = 300
_MAX_MESSAGE_CHARS = 2_000
_MAX_SHOWN_CHARS = 20_000
"""Of a message that ends a job: some errors quote what they were about, however large that is."""
_MAX_TRACEBACK_CHARS = 4_000
_TYPE_ERRORS = (TypeError, pa.ArrowInvalid, pa.ArrowNotImplementedError)
"""What a function raises that was given, or has made, values of another type than it expects."""
MAX_TRACEBACKS = 100
"""Failed rows of a part that keep their traceback."""


@dataclass(frozen=True, slots=True)
class CellFailure:
    """What went wrong in the user's function, without the table's coordinates."""

    row: int | None
    """Index in the batch; None where it concerns the batch as a whole."""
    exception_type: str
    message: str
    traceback: str = ""
    """The user's frames only; empty where the function returned what doesn't fit."""
    attempt: int = 1
    preview: str = ""
    """The row's inputs, in short."""
    is_unpaid: bool = False
    """Whether the row was not given up: the budget has no more for another call."""

    def without_secrets(self, hide: Callable[[str], str]) -> CellFailure:
        """The same with its texts as they may be shown and kept."""
        return replace(self, **texts_without_secrets(self, hide))


def texts_without_secrets(failure: Any, hide: Callable[[str], str]) -> dict[str, Any]:
    """All texts of a failure, of a cell or of a row of the table, as they may be shown and kept."""
    texts = ("exception_type", "message", "traceback", "preview")
    return {name: hide(getattr(failure, name)) for name in texts}


def raise_failed(
    udf: UDF,
    output: pa.Field,
    error: BaseException,
    row: int | None,
    batch: pa.RecordBatch,
    doing: str = "failed",
    attempt: int = 1,
) -> NoReturn:
    """Raise the error that a user reads about an exception in their function."""
    if isinstance(error, UDFError) and hasattr(error, "failure"):
        raise error
    name, text = _type_name(error), shorten(error_text(error), _MAX_SHOWN_CHARS)
    where = "" if row is None else f" on {_place(udf, batch, row)}"
    in_table = None
    if isinstance(error, _TYPE_ERRORS) and udf.arg_type is not UDFArgType.QUERY:
        message = (
            f"UDF '{udf.name}' {doing} with type error: {text}\n"
            f"Input batch schema: {', '.join(f'{f.name}: {f.type}' for f in batch.schema)}\n"
            f"UDF expects input_columns: {list(udf.input_columns or ())}\n"
            f"UDF output type: {output.type}"
        )
    else:
        message = f"UDF '{udf.name}' {doing}{where}: {name}: {text}"
        if udf.arg_type is not UDFArgType.QUERY:
            in_table = f"UDF '{udf.name}' {doing}: {name}: {text}"
    frames = user_traceback(error)[-_MAX_SHOWN_CHARS:]
    failure = CellFailure(row, name, text, frames, attempt, kept_preview(udf, batch, row))
    kind = next((k for k in (UDFTimeoutError, WorkerDied) if isinstance(error, k)), None)
    raise with_failure((kind or UDFExecutionError)(message), failure, in_table) from error


def _place(udf: UDF, batch: pa.RecordBatch, row: int) -> str:
    if udf.arg_type is UDFArgType.QUERY:
        return f"the partition {batch.column(0)[row].as_py()}"
    return f"row {row} of the batch"


def refusal(
    udf: UDF, output: pa.Field, row: int | None, batch: pa.RecordBatch, problem: str
) -> UDFError:
    """The error that a user reads about a value that doesn't fit."""
    message = f"UDF '{udf.name}' {problem} (declared type: {output.type})."
    shown = kept_preview(udf, batch, row)
    failure = CellFailure(row, UDFOutputError.__name__, message, preview=shown)
    return with_failure(UDFOutputError(message), failure)


def describe_failure(
    error: BaseException,
    row: int,
    attempt: int,
    shown: str,
    *,
    in_full: bool = True,
) -> CellFailure:
    """Describe a failed row, cut to what is worth keeping; `in_full`: with its traceback.

    `shown` are its inputs, in short.
    """
    is_output = isinstance(error, UDFOutputError)
    has_traceback = in_full and not is_output
    return CellFailure(
        row=row,
        exception_type=_type_name(error),
        message=error_text(error)[:_MAX_MESSAGE_CHARS],
        traceback=user_traceback(error)[-_MAX_TRACEBACK_CHARS:] if has_traceback else "",
        attempt=attempt,
        preview=shown,
    )


def _type_name(error: BaseException) -> str:
    """What users know an exception as: a call that was stopped is a plain TimeoutError."""
    return "TimeoutError" if isinstance(error, UDFTimeoutError) else type(error).__name__


def preview(batch: pa.RecordBatch, row: int) -> str:
    """The inputs of a row, in short."""
    values = (scalar_text(column[row]) for column in batch.columns)
    parts = [f"{name}={value}" for name, value in zip(batch.schema.names, values, strict=True)]
    return ", ".join(parts)[:_MAX_PREVIEW_CHARS]


def kept_preview(udf: UDF, batch: pa.RecordBatch, row: int | None) -> str:
    """The inputs of a failed row as they are kept: not at all, where the UDF says so."""
    if row is None or not udf.on_error.store_inputs:
        return ""
    # What describes a partition: its key comes first, the rest is for us.
    return preview(batch.select([0]) if udf.arg_type is UDFArgType.QUERY else batch, row)


def with_failure(error: UDFError, failure: CellFailure, in_table: str | None = None) -> UDFError:
    """Attach the facts to an error, for the caller to add table, column and fragment.

    `in_table` is its message behind the row's place in the table; None: the same.
    """
    error.failure = failure  # type: ignore[attr-defined]
    error.in_table = in_table or str(error)  # type: ignore[attr-defined]
    return error


def user_traceback(error: BaseException) -> str:
    """Format an exception without the frames of Geneva itself."""
    formatted = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = formatted
    while part is not None:
        kept = [f for f in part.stack if not f.filename.startswith(_GENEVA_FILES)]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return writable("".join(formatted.format()))

"""What failed: records of rows for the error table, and the error that ends a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from geneva.errors import (
    BudgetExceededError,
    GenevaError,
    InvalidUDFError,
    SQLExecutionError,
    StorageFullError,
    TooManyFailedRowsError,
    UDFExecutionError,
    UDFIntegrityError,
    UDFOutputError,
    UDFTimeoutError,
    UnmatchedKeyError,
    UnreadableFragmentsError,
    UntrustedFunctionError,
    WorkerDied,
    WorkerLostError,
)
from geneva.execution.worker.task import PartFailure, RowFailure
from geneva.model.addresses import row_address
from geneva.model.computation import Computation
from geneva.planning.backfill import BackfillPlan
from geneva.render.plain import plain
from geneva.render.text import count
from geneva.storage.jobs.failures import ErrorRecord

_ERRORS: dict[str, type[GenevaError]] = {
    BudgetExceededError.__name__: BudgetExceededError,
    UDFOutputError.__name__: UDFOutputError,
    SQLExecutionError.__name__: SQLExecutionError,
    UDFIntegrityError.__name__: UDFIntegrityError,
    UntrustedFunctionError.__name__: UntrustedFunctionError,
    InvalidUDFError.__name__: InvalidUDFError,
    StorageFullError.__name__: StorageFullError,
    UDFTimeoutError.__name__: UDFTimeoutError,
    TooManyFailedRowsError.__name__: TooManyFailedRowsError,
    UnmatchedKeyError.__name__: UnmatchedKeyError,
    WorkerDied.__name__: WorkerLostError,
}
"""The error to raise, by the name that a worker reports."""


_OF_ROWS = (UDFExecutionError, UDFOutputError, UDFTimeoutError)
_HOW_TO_GO_ON = (
    "What was computed is kept: the same call goes on from there. A UDF with "
    "on_error=skip_on_error() leaves such rows NULL and goes on; alter_columns gives the column "
    "another UDF (docs/failures.md)."
)


def error_of(failure: PartFailure) -> GenevaError:
    """The error that a job ends with when a part failed."""
    error = _ERRORS.get(failure.kind, UDFExecutionError)(failure.message)
    if failure.traceback:
        error.add_note(plain(f"In the UDF:\n{failure.traceback}", lines=True))
    if failure.failures and isinstance(error, _OF_ROWS):
        error.add_note(_HOW_TO_GO_ON)
    return error


def budget_spent(plan: BackfillPlan, max_cost: float) -> BudgetExceededError:
    """The error that a job ends with when its calls have cost what they may."""
    return BudgetExceededError(
        f"The budget of max_cost={max_cost:g} is spent: calls for {plan.shown} have cost so much. "
        "What is computed is committed; the same again, with a budget of its own, does what is "
        "left."
    )


def too_many_failed(plan: BackfillPlan, *, failed: int, total: int, limit: int) -> GenevaError:
    """The error that a job ends with when more rows failed than the UDF's limits allow."""
    return TooManyFailedRowsError(
        f"{failed:,} of {count(total, 'row')} failed in {plan.shown}, and the UDF's limits "
        f"(max_failed_rows, max_failed_fraction) allow {limit:,}. See table.get_errors(); raise "
        "the limits, or fix the function, and run again: what is computed is kept."
    )


def unreadable_fragments(
    plan: BackfillPlan, fragments: Mapping[int, str]
) -> UnreadableFragmentsError:
    """The error that a job ends with when all is done but fragments that can't be read."""
    named = "; ".join(f"fragment {fragment}: {why}" for fragment, why in [*fragments.items()][:5])
    more = f"; and {len(fragments) - 5} more" if len(fragments) > 5 else ""
    return UnreadableFragmentsError(
        f"{count(len(fragments), 'fragment')} of table {plan.table!r} can't be read, so that "
        f"{plan.shown} could not be computed there ({named}{more}). All other fragments are "
        "done and committed. Restore the files, or delete the rows, and run again.",
        tuple(fragments),
        plan.table,
    )


def all_unreadable(errors: Sequence[UnreadableFragmentsError]) -> UnreadableFragmentsError:
    """One error for several columns, which names all of their fragments."""
    if len(errors) == 1:
        return errors[0]
    fragments = {fragment: None for error in errors for fragment in error.fragments}
    messages = dict.fromkeys(str(error) for error in errors)
    return UnreadableFragmentsError(" ".join(messages), tuple(fragments), errors[0].table)


def error_records(
    job_id: str,
    uri: str,
    computation: Computation,
    plan: BackfillPlan,
    failed: Iterable[tuple[int, RowFailure]],
) -> list[ErrorRecord]:
    """What the error table keeps of failed rows of the table at `uri`, each with its fragment.

    Versions and columns are those that users know: of the source that inputs were read from, and
    not of hidden tables in between.
    """
    now = datetime.now(UTC)
    rows = computation.partition_rows
    source = rows.source if rows is not None else computation.source
    inputs = [name for name, _ in rows.source.expressions] if rows is not None else plan.inputs
    return [
        ErrorRecord(
            job_id=job_id,
            table_name=plan.table,
            column_name=plan.column,
            fragment_id=fragment_id,
            row_address=row_address(fragment_id, row.offset),
            row_id=row.row_id,
            exception_type=row.exception_type,
            message=row.message,
            traceback=row.traceback,
            attempt=row.attempt,
            input_preview=row.preview,
            at=now,
            table_uri=uri,
            table_version=source.version if source is not None else plan.version,
            udf_name=plan.udf_name,
            udf_version=plan.udf_version,
            input_columns=list(inputs),
            output_columns=_filled(computation, plan),
        )
        for fragment_id, row in failed
    ]


def _filled(computation: Computation, plan: BackfillPlan) -> list[str]:
    """The columns that a call was to fill: of a function that makes rows, those of its rows."""
    if plan.shown.makes_rows:
        return [field.name for field in computation.outputs[0].type.value_type]
    return list(plan.columns) or [plan.column]

"""Every error Geneva raises on purpose, grouped by what the reader should do about it.

::

    GenevaError
    ├── UserInputError(ValueError)       fix the call and run it again; no job was started
    │   ├── ColumnNotFoundError          a column that was named is not there
    │   ├── ColumnExistsError            a column that would be added is there already
    │   ├── InvalidUDFError              the function or its declaration can't be used
    │   ├── TypeMismatchError            the table's types and the UDF's don't agree
    │   ├── InvalidFilterError           the where clause doesn't parse or doesn't fit the table
    │   │   └── UnknownFilterColumnError it names a column that is not there
    │   ├── UnknownOptionError           an option that a job or a UDF doesn't have
    │   ├── StaleInputError              a computed input is not up to date, and upstream="refuse"
    │   └── TableNotFoundError           no such table in the database
    ├── UDFError                         fix the function, then run again: finished work is kept
    │   ├── UDFExecutionError            the function raised
    │   ├── UDFOutputError               the function returned something the column can't hold
    │   ├── SQLExecutionError            an SQL column can't be computed for a row
    │   ├── UDFTimeoutError              a call took longer than the UDF's timeout
    │   ├── WorkerDied                   the row killed the process that computed it, repeatedly
    │   └── TooManyFailedRowsError       more rows were skipped than the UDF's limits allow
    ├── SourceDataError(ValueError)      fix what load_columns loads from; nothing was written
    │   ├── NullKeyError                 a row of the source has no key
    │   ├── DuplicateKeyError            several rows of the source have the same key
    │   ├── UnmatchedKeyError            on_missing="error", and the source lacks a row's key
    │   └── UnreadableSourceError        a file of the source can't be read
    ├── TableChangedError                the table changed under the job; look, then run again
    │   └── ColumnChangedError           the column was dropped, replaced or re-typed
    ├── JobError                         the job could not go on; finished work is kept
    │   ├── JobNotFoundError             no job of that id in this database
    │   ├── JobCancelledError            somebody asked the job to stop
    │   ├── JobTimeoutError              the time given to the job or to the wait ran out
    │   ├── BudgetExceededError          the job's max_cost is spent; run again to go on
    │   ├── WorkerLostError              workers died again and again (out of memory, segfault)
    │   ├── UnreadableFragmentsError     data files can't be read; all other fragments are done
    │   ├── IncompleteRefreshError       parts of a database can't be refreshed; the rest is done
    │   └── StorageFullError             no space is left to write to: make room, then run again
    ├── QueryTimeoutError                the time given to a query ran out
    ├── StorageUnavailableError          the store can't be reached; look at it, then run again
    ├── UDFIntegrityError                the stored function is not what was written: don't run it
    ├── UntrustedFunctionError           a stored function that nobody here trusts: look at it first
    └── MissingDependencyError           this machine or cluster lacks something
        ├── JavaNotFoundError
        └── SparkUnavailableError

    CompatibilityWarning(UserWarning)    a word of Geneva on Ray that means something else here
    ClassTwiceWarning(UserWarning)       a class of the user's that workers would have twice
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

from geneva.render.plain import plain
from geneva.render.tracebacks import own_lines


class GenevaError(Exception):
    """Base of every error that Geneva raises on purpose."""

    job_id: str | None = None
    """The job that failed, where one had been started: for `get_job`, `get_errors` and logs."""

    def __str__(self) -> str:
        """Return the message, safe to show: it may quote names and values that others wrote."""
        return plain(super().__str__(), lines=True)

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the user's own lines. `traceback.print_exception` has all."""
        return own_lines(self)


class UserInputError(GenevaError, ValueError):
    """The request can't be carried out as given. No job was started."""


class ColumnNotFoundError(UserInputError):
    """A column that the request names is not in the table."""


class ColumnExistsError(UserInputError):
    """A column that the request would add is in the table already."""


class InvalidUDFError(UserInputError):
    """The function, or how it was declared, can't be used as a UDF."""


class TypeMismatchError(UserInputError, TypeError):
    """A column's type and the UDF's declared type don't agree."""


class InvalidFilterError(UserInputError):
    """The where clause doesn't parse, or names what the table doesn't have."""


class UnknownFilterColumnError(InvalidFilterError, ColumnNotFoundError):
    """The where clause names a column that the table doesn't have."""


class UnknownOptionError(UserInputError, TypeError):
    """A backfill, a refresh, a load or a UDF was given an option that it doesn't have."""


class TableNotFoundError(UserInputError):
    """The database has no table of that name."""


class UDFError(GenevaError):
    """The user's function failed. Work that finished before is kept."""

    internals: TracebackType | None = None
    """Where in Geneva it was raised, which is of no help against it: not in its traceback."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without `internals`: frames stay in their process."""
        state = {name: value for name, value in vars(self).items() if name != "internals"}
        return (type(self), self.args, state)


class UDFExecutionError(UDFError):
    """The user's function raised an exception."""


class UDFOutputError(UDFError, TypeError):
    """The user's function returned a wrong count, type, width or NULL."""


class SQLExecutionError(UDFError):
    """An SQL column, or a condition, can't be computed for a row (a cast, a division by zero).

    Nor a carried one, where the source's column was given a type that the view's can't hold.
    """

    sql = ""
    """The expression, as it was written."""
    column: str | None = None
    """The column of the view or query."""
    row_id: int | None = None
    """The id of the row, in the table that the expression is over."""


class UDFTimeoutError(UDFError, TimeoutError):
    """A call of the user's function took longer than its timeout, and was stopped."""


class WorkerDied(UDFError):
    """The process that computed the row died (segfault, out of memory, exit), repeatedly."""


FatalWorkerOOMError = FatalWorkerCrashError = FatalWorkerExitError = WorkerDied
"""Geneva's names for it on Ray: what killed a worker is not known here, so all are one."""


class TooManyFailedRowsError(UDFError):
    """More rows failed than `max_failed_rows` or `max_failed_fraction` allow."""


class StaleInputError(UserInputError):
    """What is read is to be computed first: a computed input (`upstream="refuse"`), or a view."""


class SourceDataError(GenevaError, ValueError):
    """What columns are loaded from can't be joined with the table. Nothing was written."""


class NullKeyError(SourceDataError):
    """A row of the source has no key."""


class DuplicateKeyError(SourceDataError):
    """Several rows of the source have the same key."""


class UnmatchedKeyError(SourceDataError):
    """The key of a row is not in the source, and `on_missing="error"` was asked for.

    Rows that came while others were loaded are met last: those that were done are kept.
    """


class UnreadableSourceError(SourceDataError):
    """A file that columns are loaded from can't be read: it is damaged, or its store failed."""


class TableChangedError(GenevaError):
    """The table changed in a way that the running job can't absorb."""


class ColumnChangedError(TableChangedError):
    """The column was dropped, replaced or re-typed while a job computed it."""


class JobError(GenevaError):
    """The job could not go on. Work that finished before is kept."""


class JobNotFoundError(JobError, KeyError, ValueError):
    """No job of that id is known to this database."""

    def __str__(self) -> str:
        """Return the message as it is (KeyError would quote it)."""
        return plain(self.args[0], lines=True) if self.args else ""


class JobCancelledError(JobError):
    """The job was cancelled. Finished fragments were committed."""


class JobTimeoutError(JobError, TimeoutError):
    """The time given to a job, or to a wait for it, ran out."""


class BudgetExceededError(JobError):
    """The cost that was allowed for a job is spent. What was computed is committed."""


class WorkerLostError(JobError):
    """Worker processes died repeatedly (out of memory, segfault, kill)."""

    tries: int | None = None
    """How often Spark has tried the task; None: it doesn't say."""


FatalWorkerTransientError = WorkerLostError
"""Geneva's name for it on Ray."""


class UnreadableFragmentsError(JobError):
    """Fragments of the table can't be read. A job has computed and committed all others."""

    def __init__(self, message: str, fragments: tuple[int, ...] = (), table: str = "") -> None:
        """Keep which fragments they are, and of which table: of a view's source, perhaps."""
        super().__init__(message)
        self.fragments, self.table = fragments, table


class IncompleteRefreshError(JobError):
    """Parts of a database could not be brought up to date. All that they do not feed has been."""

    def __init__(
        self,
        message: str,
        failed: Mapping[str, BaseException] = MappingProxyType({}),
        left_out: Sequence[str] = (),
        results: Sequence[Any] = (),
    ) -> None:
        """Keep what failed and why, what was left out for that, and what the other jobs did."""
        super().__init__(message)
        self.failed = dict(failed)
        self.left_out, self.results = tuple(left_out), tuple(results)


class StorageFullError(JobError, OSError):
    """No space is left to write to. What was saved before is kept."""


class QueryTimeoutError(GenevaError, TimeoutError):
    """The time that was given to a query ran out before all of its rows were there."""


class StorageUnavailableError(GenevaError, ConnectionError):
    """The store of the database can't be reached, or doesn't let us in, or not write."""


class UDFIntegrityError(GenevaError):
    """A stored UDF's bytes don't match the digest recorded for them: it is not run."""


class UntrustedFunctionError(GenevaError):
    """A stored function is not one that this connection lets run: nothing of it was loaded."""


class MissingDependencyError(GenevaError):
    """This machine or cluster lacks something that Geneva needs."""


class JavaNotFoundError(MissingDependencyError):
    """No Java runtime of version 17 or later could be found."""


class SparkUnavailableError(MissingDependencyError):
    """A Spark session could not be started or reached."""


class ClassTwiceWarning(UserWarning):
    """A class travels with a function, and so does its module: on workers these are two classes."""


class CompatibilityWarning(UserWarning):
    """A program written for Geneva on Ray asks for what means something else, or nothing, here."""

"""Refreshing a whole database: each computed column and view, sources before what they feed.

Each step is a job of its own, such as `Table.backfill` and `MaterializedView.refresh` run. One that
fails holds back what is made from it, and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from geneva.errors import (
    GenevaError,
    IncompleteRefreshError,
    JobCancelledError,
    MissingDependencyError,
    StaleInputError,
    StorageFullError,
    StorageUnavailableError,
    UnreadableFragmentsError,
)
from geneva.jobs import JobFuture, JobResult
from geneva.model.uris import TableName
from geneva.options import read_work_options
from geneva.planning.backfill import BackfillPlan
from geneva.planning.database import DatabasePlan, NoPlan, planned_steps
from geneva.planning.graph import Key, Node, Step, steps_of
from geneva.planning.refresh import RefreshPlan
from geneva.render.plain import plain
from geneva.render.text import count, one_line, raise_if_stopping
from geneva.view import MaterializedView

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.table import Table

_LOG = logging.getLogger("geneva")
_ENDS_ALL = (
    JobCancelledError,
    MissingDependencyError,
    StorageFullError,
    StorageUnavailableError,
)
"""What would befall the next step as well, or was meant to stop all of them."""

_SAID = 10
"""What a message names of a kind; the error itself has all."""

Heard = Callable[[Step, JobResult], None]


class Stop:
    """How another thread ends a refresh: its job is asked to stop, and none begins."""

    def __init__(self) -> None:
        """Nothing is stopped yet."""
        self._lock = threading.Lock()
        self._is_set = False
        self._running: JobFuture | None = None

    def set(self) -> None:
        """Ask it to stop."""
        with self._lock:
            self._is_set = True
            if self._running is not None:
                self._running.cancel()

    def check(self) -> None:
        """Raise, where that was asked."""
        if self._is_set:
            raise JobCancelledError("The refresh was cancelled. What was finished is kept.")

    def result_of(self, start: Callable[[], JobFuture]) -> JobResult:
        """Start a job and wait for it."""
        with self._lock:
            self.check()
            self._running = running = start()
        return running.result()


def refresh_database(
    connection: Connection,
    options: Mapping[str, Any],
    heard: Heard | None = None,
    stop: Stop | None = None,
) -> tuple[JobResult, ...]:
    """Bring everything up to date; return what was done, by the jobs that had something to do.

    `heard` is called as each of them ends.
    """
    read_work_options(options)  # wrong ones are refused before anything begins
    tables, unreadable = _open_tables(connection)
    steps = _steps(tables, unreadable)
    failed: dict[str, BaseException] = {f"table {name!r}": e for name, e in unreadable.items()}
    held_back: set[Key] = set()
    left_out: list[Step] = []
    planner = _Planner(tables)
    results: list[JobResult] = []
    for step in steps:
        if step.table in unreadable:
            held_back.add(step.key)
            continue
        if not held_back.isdisjoint(step.inputs):
            held_back.add(step.key)
            left_out.append(step)
            continue
        try:
            if stop is not None:
                stop.check()
            if planner.plan(step).is_empty:
                continue
            planner.forget()
            result = _run(tables[step.table], step, options, stop)
        except _ENDS_ALL:
            raise
        except BaseException as error:  # noqa: BLE001  raised when all else is done
            short = one_line(error)
            why = str(error) if isinstance(error, GenevaError) else short
            _LOG.warning("%s: %s", plain(str(step)), why)
            failed[str(step)] = error
            # A column that can't be read in places is done in all others. Of a view there would be
            # rows without values yet, for functions to fail on.
            if not (step.columns and isinstance(error, UnreadableFragmentsError)):
                held_back.add(step.key)
            continue
        results.append(result)
        if heard is not None:
            heard(step, result)
    if failed:
        raise _incomplete(failed, left_out, results)
    return tuple(results)


def plan_database(connection: Connection) -> DatabasePlan:
    """What `refresh_database` would do. Changes nothing, runs nothing."""
    tables, unreadable = _open_tables(connection)
    steps = _steps(tables, unreadable)
    reasons = {name: one_line(error) for name, error in unreadable.items()}
    found: list[tuple[Step, BackfillPlan | RefreshPlan | NoPlan]] = []
    planner = _Planner(tables)
    for step in steps:
        if step.table in reasons:
            found.append((step, NoPlan(reasons[step.table])))
            continue
        try:
            found.append((step, planner.plan(step)))
        except BaseException as error:  # noqa: BLE001  said in the plan
            found.append((step, NoPlan(one_line(error), isinstance(error, StaleInputError))))
    planned = (each for each in planned_steps(found) if each.step.table not in reasons)
    return DatabasePlan(connection.uri, tuple(planned), tuple(reasons.items()))


def _open_tables(connection: Connection) -> tuple[dict[str, Table], dict[str, BaseException]]:
    """All tables and views but branches, by name; and why others can't be opened."""
    tables: dict[str, Table] = {}
    unreadable: dict[str, BaseException] = {}
    for name in connection.all_table_names():
        if TableName.parse(name).branch is not None:
            continue
        try:
            tables[name] = connection.open_table(name)
        except BaseException as error:  # noqa: BLE001  it is no reason to leave the others alone
            raise_if_stopping(error)
            unreadable[name] = error
    return tables, unreadable


def _steps(tables: Mapping[str, Table], unreadable: dict[str, BaseException]) -> tuple[Step, ...]:
    """All steps in their order. Adds to `unreadable` the tables whose definitions can't be read.

    Such a table has one step, which is not taken: what is made from it waits for that.
    """
    by_uri = {table.ref.uri: name for name, table in tables.items()}
    nodes = []
    for name, table in tables.items():
        try:
            nodes.append(_node(name, table, by_uri))
        except BaseException as error:  # noqa: BLE001  nor is this
            raise_if_stopping(error)
            unreadable[name] = error
            nodes.append(Node(table=name, is_view=True))
    return steps_of(nodes)


def _node(name: str, table: Table, by_uri: Mapping[str, str]) -> Node:
    own = table.computed_columns()
    if not isinstance(table, MaterializedView):
        return Node(
            table=name,
            reads={column: found.inputs for column, found in own.items()},
            filled_by={column: found.computation_id for column, found in own.items()},
        )
    query = table.definition
    of_query = table._query_columns()
    added = {column: found for column, found in own.items() if column not in of_query}
    paths = [*query.where_inputs, *(path for column in query.columns for path in column.inputs)]
    return Node(
        table=name,
        reads={column: found.inputs for column, found in added.items()},
        filled_by={column: found.computation_id for column, found in added.items()},
        is_view=True,
        source=by_uri.get(table._source().uri),
        source_paths=tuple(dict.fromkeys(paths)),
    )


class _Planner:
    """Plans one step after the other: columns of a table on one version, which is read once.

    So hundreds of columns that are up to date take little. A table is read anew after each job.
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
        """Read nothing yet."""
        self._tables = tables
        self._of_columns: dict[str, Callable[[str], BackfillPlan]] = {}

    def plan(self, step: Step) -> BackfillPlan | RefreshPlan:
        """What a step has to do."""
        table = self._tables[step.table]
        if not step.columns:
            assert isinstance(table, MaterializedView)
            return table.plan_refresh()
        if step.table not in self._of_columns:
            self._of_columns = {step.table: table._planner()}
        return self._of_columns[step.table](step.columns[0])

    def forget(self) -> None:
        """Read tables anew: a job is about to change one."""
        self._of_columns = {}


def _run(table: Table, step: Step, options: Mapping[str, Any], stop: Stop | None) -> JobResult:
    """Do a step."""
    run: Callable[[], JobResult]
    start: Callable[[], JobFuture]
    if step.columns:
        run = partial(table.backfill, step.columns[0], **options)
        start = partial(table.backfill_async, step.columns[0], **options)
    else:
        assert isinstance(table, MaterializedView)
        run, start = partial(table.refresh, **options), partial(table.refresh_async, **options)
    return run() if stop is None else stop.result_of(start)


def _incomplete(
    failed: Mapping[str, BaseException], left_out: list[Step], results: list[JobResult]
) -> IncompleteRefreshError:
    causes = _some([f"{what} ({one_line(error)})" for what, error in failed.items()], "; ")
    names = _some(list(map(str, left_out)), ", ")
    held = f" Left out, as they are made from these: {names}." if left_out else ""
    done = f"{count(len(results), 'job')} did what could be done" if results else "Nothing else had"
    error = IncompleteRefreshError(
        f"{count(len(failed), 'part')} of the database could not be brought up to date: {causes}."
        f"{held} {done}{'' if results else ' to be done'}. The same again does what is left.",
        failed,
        tuple(map(str, left_out)),
        tuple(results),
    )
    error.__cause__ = next(iter(failed.values()))
    return error


def _some(texts: list[str], between: str) -> str:
    """The first of some texts, and how many others there are: a message is to be read."""
    more = [f"and {count(len(texts) - _SAID, 'other')}"] if len(texts) > _SAID else []
    return between.join(texts[:_SAID] + more)

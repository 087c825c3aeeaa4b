"""What is known of a table or view, as plain records: the JSON of `tables` and `describe`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.model.tables import ColumnDefinition
    from geneva.planning.refresh import RefreshPlan
    from geneva.table import Table
    from geneva.view import MaterializedView


def list_tables(connection: Connection) -> list[dict[str, Any]]:
    """Every table in a line. One that can't be read says why, and hides no other."""
    return [_listed(connection, name) for name in connection.all_table_names()]


def _listed(connection: Connection, name: str) -> dict[str, Any]:
    try:
        return table_summary(connection.open_table(name))
    except BaseException as error:  # noqa: BLE001
        return {**dict.fromkeys(_SUMMARY), "name": name, "error": what_is_wrong(error)}


_SUMMARY = (
    "name",
    "kind",
    "is_view",
    "rows",
    "version",
    "fragments",
    "stable_row_ids",
    "computed_columns",
)
"""What is said of a table in a line; None where it can't be read."""


def what_is_wrong(error: BaseException) -> str:
    """Why one thing of many can't be shown, in a line without secrets."""
    from geneva.cli.terminal import redact
    from geneva.render.text import one_line

    return redact(one_line(error))


def table_summary(table: Table) -> dict[str, Any]:
    """A table in a line."""
    from geneva.storage.lance.dataset import open_dataset
    from geneva.view import MaterializedView

    dataset = open_dataset(table.ref)
    kind = "table"
    if isinstance(table, MaterializedView):
        kind = "view" if table.definition.udtf is None else "udtf"
    return {
        "name": table.ref.name,
        "kind": kind,
        "is_view": isinstance(table, MaterializedView),
        "rows": int(dataset.count_rows()),
        "version": int(dataset.version),
        "fragments": len(dataset.get_fragments()),
        "stable_row_ids": bool(dataset.has_stable_row_ids),
        "computed_columns": sorted(table.computed_columns()),
        "error": None,
    }


def table_description(table: Table) -> dict[str, Any]:
    """All that is known of a table. Runs no user code.

    What can't be planned says why: the source of a view may be gone.
    """
    from geneva.view import MaterializedView

    view = table if isinstance(table, MaterializedView) else None
    refresh = None if view is None else planned_refresh(view)
    computed = table.computed_columns()
    states = _States(table, computed, refresh)
    return {
        **table_summary(table),
        "columns": [
            {
                "name": field.name,
                "type": str(field.type),
                "nullable": field.nullable,
                "computed": field.name in computed,
            }
            for field in table.schema
        ],
        "computed_columns": [states.of(column) for column in computed.values()],
        "view": None if view is None or refresh is None else view_description(view, refresh),
    }


def planned_refresh(view: MaterializedView) -> RefreshPlan | str:
    """What a refresh would do, or why that can't be said."""
    try:
        return view.plan_refresh()
    except BaseException as error:  # noqa: BLE001
        return what_is_wrong(error)


class _States:
    """The states of a table's computed columns. The table is read once for all of them."""

    def __init__(
        self,
        table: Table,
        computed: Mapping[str, ColumnDefinition],
        refresh: RefreshPlan | str | None,
    ) -> None:
        from geneva.storage.views.explode import query_columns
        from geneva.view import MaterializedView

        self._computed, self._refresh = computed, refresh
        self._of_query: set[str] = set()
        if isinstance(table, MaterializedView):
            self._of_query = query_columns(table.ref, table.definition)
        self._plan, self._plan_again = table._planner(), table._planner(retry_failed=True)

    def of(self, column: ColumnDefinition) -> dict[str, Any]:
        """What is known of a column."""
        summary = {
            "name": column.name,
            "udf": column.udf_name,
            "udf_version": column.udf_version,
            "inputs": list(column.inputs),
            "filled_with": [
                other.name
                for other in self._computed.values()
                if other.computation_id == column.computation_id and other.name != column.name
            ],
        }
        if column.name in self._of_query:
            assert self._refresh is not None
            return {**summary, **_refreshed(column.name, self._refresh)}
        return {**summary, **self._backfilled(column.name)}

    def _backfilled(self, column: str) -> dict[str, Any]:
        """The state of a column that a backfill computes."""
        try:
            plan, failed = self._plan(column), self._plan_again(column)
        except BaseException as error:  # noqa: BLE001
            return {**_UNKNOWN, "notes": [], "error": what_is_wrong(error)}
        return {
            "stale_rows": plan.rows_to_compute,
            "failed_rows": failed.rows_to_compute,
            "reasons": {reason.value: rows for reason, rows in plan.reasons().items()},
            "notes": list(plan.notes),
            "error": None,
        }


def _refreshed(column: str, refresh: RefreshPlan | str) -> dict[str, Any]:
    """The state of a column that a view's query computes."""
    from geneva.model.computation import is_named

    notes = ["computed by a refresh of the view"]
    if isinstance(refresh, str):
        return {**_UNKNOWN, "notes": notes, "error": refresh}
    stale = sum(c.rows for c in refresh.columns if is_named(c.name, column))
    why = "not refreshed yet" if refresh.from_version is None else "source changed"
    return {
        "stale_rows": stale,
        "failed_rows": 0,
        "reasons": {why: stale} if stale else {},
        "notes": notes,
        "error": None,
    }


_UNKNOWN: dict[str, Any] = {"stale_rows": None, "failed_rows": None, "reasons": {}}
"""The state of a column that can't be planned."""


def view_description(view: MaterializedView, refresh: RefreshPlan | str) -> dict[str, Any]:
    """What a view is the result of, and whether it still is, or why that can't be said."""
    query = view.definition
    plan, error = (None, refresh) if isinstance(refresh, str) else (refresh, None)
    counts = None if plan is None else plan.partitions
    return {
        "source": query.base_table,
        "source_version": view.source_version,
        "latest_source_version": None if plan is None else plan.to_version,
        "up_to_date": None if plan is None else plan.is_empty,
        "rows_entering": None if plan is None else plan.rows_entering,
        "rows_leaving": None if plan is None else plan.rows_leaving,
        "partitions": None if counts is None else asdict(counts),
        "error": error,
        "where": query.where,
        "columns": [
            {
                "name": column.name,
                "kind": column.kind.value,
                "expression": column.expression or None,
                "inputs": list(column.inputs),
                "udf": column.udf_name or None,
                "udf_version": column.udf_version or None,
            }
            for column in query.columns
        ],
        "shuffle_seed": query.seed,
        "limit": query.limit,
        "offset": query.offset,
    }

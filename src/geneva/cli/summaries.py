"""What is known of a table or view, as plain records: the JSON of `tables` and `describe`."""

from __future__ import annotations

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
    from geneva.cli.terminal import redact
    from geneva.render.text import one_line

    try:
        return table_summary(connection.open_table(name))
    except BaseException as error:  # noqa: BLE001
        return {"name": name, "is_view": False, "error": redact(one_line(error))}


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
    }


def table_description(table: Table) -> dict[str, Any]:
    """All that is known of a table. Runs no user code."""
    from geneva.view import MaterializedView

    refresh = table.plan_refresh() if isinstance(table, MaterializedView) else None
    computed = table.computed_columns()
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
        "computed_columns": [_column(table, c, refresh) for c in computed.values()],
        "view": view_description(table, refresh)
        if isinstance(table, MaterializedView) and refresh is not None
        else None,
    }


def _column(table: Table, column: ColumnDefinition, refresh: RefreshPlan | None) -> dict[str, Any]:
    from geneva.model.computation import is_named

    summary = {
        "name": column.name,
        "udf": column.udf_name,
        "udf_version": column.udf_version,
        "inputs": list(column.inputs),
        "filled_with": [
            other.name
            for other in table.computed_columns().values()
            if other.computation_id == column.computation_id and other.name != column.name
        ],
    }
    own = [c.rows for c in refresh.columns if is_named(c.name, column.name)] if refresh else []
    if refresh is not None and (own or _of_query(table, column.name)):
        stale = sum(own)
        why = "not refreshed yet" if refresh.from_version is None else "source changed"
        return {
            **summary,
            "stale_rows": stale,
            "failed_rows": 0,
            "reasons": {why: stale} if stale else {},
            "notes": ["computed by a refresh of the view"],
        }
    plan = table.plan_backfill(column.name)
    return {
        **summary,
        "stale_rows": plan.rows_to_compute,
        "failed_rows": table.plan_backfill(column.name, retry_failed=True).rows_to_compute,
        "reasons": {reason.value: rows for reason, rows in plan.reasons().items()},
        "notes": list(plan.notes),
    }


def _of_query(table: Any, name: str) -> bool:
    return name in {c.name for c in table.definition.columns}


def view_description(view: MaterializedView, refresh: RefreshPlan) -> dict[str, Any]:
    """What a view is the result of, and whether it still is."""
    query = view.definition
    return {
        "source": query.base_table,
        "source_version": view.source_version,
        "latest_source_version": refresh.to_version,
        "up_to_date": refresh.is_empty,
        "rows_entering": refresh.rows_entering,
        "rows_leaving": refresh.rows_leaving,
        "partitions": None if refresh.partitions is None else asdict(refresh.partitions),
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

"""What a table function yielded for a partition, as rows of exactly the declared columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from geneva.execution.apply.convert import array_of, single
from geneva.execution.apply.output import Refuse, cast_array, reason_of
from geneva.udf.types import holds


def rows_of_tables(
    yielded: Sequence[Any] | None, struct: pa.StructType, refuse: Refuse, row: int
) -> pa.StructArray | None:
    """The rows of tables, batches, data frames, dicts and tuples; refuse what doesn't fit."""
    if yielded is None:
        return None
    parts: list[pa.Array] = []
    rows: list[Any] = []
    try:
        for item in yielded:
            table = _table_of(item)
            if table is None:
                rows.extend(item if isinstance(item, list) else (item,))
                continue
            if rows:
                parts.append(array_of(rows, struct))
                rows = []
            parts += [_structs(batch, struct) for batch in table.to_batches()]
        if rows or not parts:
            parts.append(array_of(rows, struct))
        return pa.concat_arrays(parts)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  values are the user's objects
        problem = error
    return refuse(row, f"yielded rows that don't fit its output_schema: {reason_of(problem)}")


def _table_of(item: Any) -> pa.Table | None:
    if isinstance(item, pa.Table):
        return item
    if isinstance(item, pa.RecordBatch):
        return pa.Table.from_batches([item])
    if hasattr(item, "iloc") and hasattr(item, "columns"):
        return pa.Table.from_pandas(item, preserve_index=False)
    return None


def _structs(batch: pa.RecordBatch, struct: pa.StructType) -> pa.StructArray:
    names = [field.name for field in struct]
    lacking = [name for name in names if name not in batch.schema.names]
    unknown = [name for name in batch.schema.names if name not in names]
    if lacking or unknown or batch.num_columns != len(names):
        raise ValueError(f"a table has the columns {batch.schema.names}, and not {names}")
    columns = [_column(batch.column(field.name), field) for field in struct]
    return pa.StructArray.from_arrays(columns, fields=list(struct))


def _column(values: pa.Array, field: pa.Field) -> pa.Array:
    array = single(values)
    array.validate(full=True)
    if not holds(field.type, array.type):
        raise TypeError(
            f"column {field.name!r} is {array.type}, which {field.type} can't hold without loss; "
            "cast it"
        )
    if not field.nullable and array.null_count:
        raise ValueError(f"column {field.name!r} has a NULL, and is declared not null")
    return cast_array(array, field.type)

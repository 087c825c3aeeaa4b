"""What a table function yielded for a partition, as rows of exactly the declared columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from geneva.execution.apply.convert import array_of, single
from geneva.execution.apply.output import Refuse, cast_array, reason_of
from geneva.udf.types import holds


def rows_of_tables(
    partitions: Sequence[Sequence[Any] | None],
    struct: pa.StructType,
    refuse: Refuse,
    first_row: int,
) -> list[Any]:
    """What was yielded for each partition, as a list or an array of rows.

    It may be tables, batches, data frames, dicts and tuples. Refuse tables that don't fit.
    """
    rows = [None if yielded is None else _flat(yielded) for yielded in partitions]
    for place, made in enumerate(rows):
        if any(item is None for item in made or ()):
            refuse(first_row + place, "yielded None, which is no row: yield nothing instead")
    if not any(_is_table(item) for yielded in partitions for item in yielded or ()):
        return rows
    return [
        None if yielded is None else _rows(yielded, struct, refuse, first_row + row)
        for row, yielded in enumerate(partitions)
    ]


def _rows(
    yielded: Sequence[Any], struct: pa.StructType, refuse: Refuse, row: int
) -> pa.StructArray:
    parts: list[pa.Array] = [pa.array([], struct)]
    try:
        for are_tables, items in itertools.groupby(yielded, _is_table):
            if are_tables:
                tables = map(_table_of, items)
                parts += [_structs(b, struct) for table in tables for b in table.to_batches()]
            else:
                parts.append(array_of(_flat(items), struct))
        return pa.concat_arrays(parts)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  values are the user's objects
        problem = error
    return refuse(row, f"yielded rows that don't fit its output_schema: {reason_of(problem)}")


def _flat(items: Iterable[Any]) -> list[Any]:
    """Rows, and lists of rows, as one list."""
    return [row for item in items for row in (item if isinstance(item, list) else (item,))]


def _is_table(item: Any) -> bool:
    return isinstance(item, pa.Table | pa.RecordBatch) or _is_data_frame(item)


def _is_data_frame(item: Any) -> bool:
    return hasattr(item, "iloc") and hasattr(item, "columns")


def _table_of(item: Any) -> pa.Table:
    if isinstance(item, pa.RecordBatch):
        return pa.Table.from_batches([item])
    return pa.Table.from_pandas(item, preserve_index=False) if _is_data_frame(item) else item


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

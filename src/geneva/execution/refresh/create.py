"""Making a view: metadata and placeholder rows. No UDF runs before the first refresh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

import pyarrow as pa

from geneva.errors import InvalidUDFError
from geneva.model.tables import ColumnDefinition, TableRef
from geneva.model.view_query import ColumnKind, ViewColumn, ViewQuery
from geneva.planning.membership import choose_rows
from geneva.storage.columns.definitions import FunctionSource, declared_fields
from geneva.storage.columns.functions import stage_udf
from geneva.storage.lance.dataset import Dataset, open_dataset
from geneva.storage.lance.fragments import is_blob
from geneva.storage.lance.row_ids import read_row_ids
from geneva.storage.lance.trial import why_not_storable
from geneva.storage.views.definition import (
    ROW_ADDRESSES,
    STABLE_ROW_IDS,
    append_placeholders,
    check_hidden,
    create_view_table,
    remove_hidden,
    source_udf_fields,
)
from geneva.storage.views.explode import CHUNKS, inner_ref
from geneva.storage.views.partitions import (
    KEYED_SCHEMA,
    PARTITIONS_ADDRESS,
    create_partitions,
    partitions_ref,
    rows_ref,
)
from geneva.udf.declare import UDF
from geneva.udf.table_function import PARTITION_INPUTS

Declare: TypeAlias = Callable[[ColumnDefinition], ColumnDefinition]


def create_view(
    ref: TableRef,
    source: Dataset,
    query: ViewQuery,
    schema: pa.Schema,
    udfs: Mapping[str, UDF],
    declare: Declare,
) -> str:
    """Make the table of a view, with a placeholder for every row that its query selects.

    Returns its identity.
    """
    computed = [column.name for column in query.columns if column.kind is ColumnKind.UDF]
    _refuse_unstorable(ref, [schema.field(name) for name in computed])
    if query.chunker is not None:
        _refuse_unstorable(ref, udfs[query.chunker.name].data_type.value_type)
        return _create_chunked(ref, source, query, schema, udfs, declare)
    schema = declared_fields(schema, declare)
    # First of all: a filter that can't be computed for a row leaves nothing behind.
    rows = choose_rows(
        read_row_ids(source, query.where),
        shuffle_seed=query.seed,
        offset=query.offset,
        limit=query.limit,
    )
    for udf in udfs.values():
        stage_udf(ref, udf)
    version = STABLE_ROW_IDS if source.has_stable_row_ids else ROW_ADDRESSES
    identity = create_view_table(ref, schema, query, source.version, version)
    append_placeholders(ref, open_dataset(ref), rows, selected_from=source)
    return identity


def _refuse_unstorable(ref: TableRef, fields: Iterable[pa.Field]) -> None:
    """Refuse columns of functions that Lance can't write, before anything is."""
    for field in fields:
        problem = why_not_storable("stable", field.type) if not is_blob(field) else None
        if problem is not None:
            raise InvalidUDFError(
                f"Column {field.name!r} of view {ref.name!r} can't be of type {field.type}: "
                f"{problem}. Compute a column of another type."
            )


def create_partitioned_view(
    ref: TableRef,
    source: Dataset,
    query: ViewQuery,
    rows: ViewQuery,
    udf: UDF,
    declare: Declare,
) -> None:
    """Make the tables of a view of a table function: of rows, of partitions, of lists, and its own.

    `rows` is the query of the hidden view that says which partition each row of the source is in.
    """
    _refuse_unstorable(ref, udf.data_type.value_type)
    inner = inner_ref(ref)
    remove_hidden(ref, [rows_ref(ref), partitions_ref(ref), inner])
    made = {rows_ref(ref): create_view(rows_ref(ref), source, rows, KEYED_SCHEMA, {}, declare)}
    check_hidden(ref, made)
    partitions = create_partitions(partitions_ref(ref))
    digest = stage_udf(inner, udf)
    lists = ViewColumn(
        name=CHUNKS,
        kind=ColumnKind.UDF,
        expression="",
        inputs=PARTITION_INPUTS,
        udf_name=udf.name,
        udf_version=udf.version,
        udf_digest=digest,
    )
    of_partitions = ViewQuery(
        base_table=partitions_ref(ref).name,
        base_db_uri="",
        where=None,
        where_inputs=(),
        columns=(lists,),
        base_address=PARTITIONS_ADDRESS,
    )
    function = FunctionSource(PARTITION_INPUTS, digest)
    fields = source_udf_fields(partitions, {CHUNKS: ""}, udf, function)
    schema = pa.schema(list(fields.values()))
    made[inner] = create_view(inner, partitions, of_partitions, schema, {CHUNKS: udf}, declare)
    # Last, so that a view that is there has its hidden ones.
    check_hidden(ref, made)
    version = STABLE_ROW_IDS if source.has_stable_row_ids else ROW_ADDRESSES
    schema = pa.schema(list(udf.data_type.value_type))
    create_view_table(ref, schema, query, source.version, version, with_receipts=False)


def _create_chunked(
    ref: TableRef,
    source: Dataset,
    query: ViewQuery,
    schema: pa.Schema,
    udfs: Mapping[str, UDF],
    declare: Declare,
) -> str:
    """A chunked view is empty at first: how many rows it has is known after its first refresh."""
    chunker = query.chunker
    assert chunker is not None
    udf = udfs[chunker.name]
    inner = inner_ref(ref)
    remove_hidden(ref, [inner])
    digest = stage_udf(inner, udf)
    lists = ViewColumn(
        name=CHUNKS,
        kind=ColumnKind.UDF,
        expression="",
        inputs=chunker.inputs,
        udf_name=chunker.udf_name,
        udf_version=chunker.udf_version,
        udf_digest=digest,
    )
    carried = tuple(c for c in query.columns if c.kind is not ColumnKind.CHUNKER)
    names = {column.name for column in carried}
    fields = [field for field in schema if field.name in names]
    function = FunctionSource(chunker.inputs, digest)
    lists_field = source_udf_fields(source, {CHUNKS: ""}, udf, function)[CHUNKS]
    identity = create_view(
        inner,
        source,
        replace(query, columns=(*carried, lists)),
        pa.schema([*fields, lists_field]),
        {CHUNKS: udf, **{name: udfs[name] for name in udfs if name in names}},
        declare,
    )
    # Last, so that a view that is there has its hidden one.
    check_hidden(ref, {inner: identity})
    version = STABLE_ROW_IDS if source.has_stable_row_ids else ROW_ADDRESSES
    return create_view_table(ref, schema, query, source.version, version, with_receipts=False)

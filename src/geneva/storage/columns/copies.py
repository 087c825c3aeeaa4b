"""Copies of tables: how one that was made without stable row ids gets them."""

from __future__ import annotations

from collections.abc import Mapping

import lance
import pyarrow as pa

from geneva.errors import UserInputError
from geneva.model.tables import ColumnDefinition, TableRef
from geneva.storage.columns.definitions import (
    by_names,
    commit_rebound,
    defined_field,
    read_definitions,
    unsure_input,
)
from geneva.storage.columns.functions import copy_udf
from geneva.storage.lance.dataset import FieldsNow, open_dataset
from geneva.storage.lance.fragments import holds_blob


def how_to_get_stable_ids(table: str) -> str:
    """What to do about a table without stable row ids."""
    return (
        "Row IDs can't be added to a table that is there. Copy it, computed columns and all, with "
        f"db.copy_table({table!r}, 'another name'), and make the view of the copy. Tables that are "
        "created with geneva.connect(...).create_table have them."
    )


def copy_table(source: TableRef, target: TableRef) -> None:
    """Write the latest version of a table as a new one with stable row ids.

    Values and receipts are copied as they are. Fields have other ids in the copy, and commits other
    names: so its computed columns go by the names of their inputs, until ids are written down anew.
    """
    dataset = open_dataset(source)
    blobs = [field.name for field in dataset.schema if holds_blob(field)]
    if blobs:
        raise UserInputError(
            f"Table {source.name!r} can't be copied: its columns {blobs} hold blobs. Create a "
            "table of its schema with create_table, and add the rows to it."
        )
    known = _by_names(source, dataset)
    schema = _with_definitions(dataset.schema, known)
    for definition in known.values():
        copy_udf(source, target, definition.udf_digest)
    batches = (pa.RecordBatch.from_arrays(b.columns, schema=schema) for b in dataset.to_batches())
    copy = lance.write_dataset(
        pa.RecordBatchReader.from_batches(schema, batches),
        target.uri,
        schema=schema,
        mode="create",
        data_storage_version=dataset.data_storage_version,
        enable_stable_row_ids=True,
        storage_options=target.storage_options.plain(),
    )
    try:
        commit_rebound(copy, {name: found.inputs for name, found in known.items()})
    except BaseException:
        lance.LanceDataset.drop(target.uri, target.storage_options.plain())
        raise


def _by_names(source: TableRef, dataset: lance.LanceDataset) -> dict[str, ColumnDefinition]:
    """The definitions of computed columns, without ids; refused while nobody knows their inputs."""
    fields = FieldsNow.of(dataset)
    known = {n: by_names(found, fields) for n, found in read_definitions(dataset.schema).items()}
    for definition in known.values():
        if definition.doubt is not None:
            raise unsure_input(source.name, definition, definition.doubt)
    return known


def _with_definitions(schema: pa.Schema, known: Mapping[str, ColumnDefinition]) -> pa.Schema:
    fields = [defined_field(known[f.name]) if f.name in known else f for f in schema]
    return pa.schema(fields, metadata=schema.metadata)

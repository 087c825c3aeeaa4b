"""Copies of tables: how one that was made without stable row ids gets them."""

from __future__ import annotations

import lance

from geneva.errors import UserInputError
from geneva.model.tables import TableRef
from geneva.storage.columns.definitions import read_definitions
from geneva.storage.columns.functions import copy_udf
from geneva.storage.lance.dataset import open_dataset
from geneva.storage.lance.fragments import holds_blob


def how_to_get_stable_ids(table: str) -> str:
    """What to do about a table without stable row ids."""
    return (
        "Row IDs can't be added to a table that is there. Copy it, computed columns and all, with "
        f"db.copy_table({table!r}, 'another name'), and make the view of the copy. Tables that are "
        "created with geneva.connect(...).create_table have them."
    )


def copy_table(source: TableRef, target: TableRef) -> None:
    """Write the latest version of a table as a new one with stable row ids, in one commit.

    Values, receipts and the columns' definitions are copied as they are. In a copy, computed
    columns know their inputs by name.
    """
    dataset = open_dataset(source)
    blobs = [field.name for field in dataset.schema if holds_blob(field)]
    if blobs:
        raise UserInputError(
            f"Table {source.name!r} can't be copied: its columns {blobs} hold blobs. Create a "
            "table of its schema with create_table, and add the rows to it."
        )
    for definition in read_definitions(dataset.schema).values():
        copy_udf(source, target, definition.udf_digest)
    lance.write_dataset(
        dataset.scanner().to_reader(),
        target.uri,
        schema=dataset.schema,
        mode="create",
        data_storage_version=dataset.data_storage_version,
        enable_stable_row_ids=True,
        storage_options=target.storage_options.plain(),
    )

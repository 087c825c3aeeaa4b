"""New rows of a table as fragments that no version has yet: staged, or thrown away again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import lance
import pyarrow as pa
from lance.fragment import write_fragments

from geneva.model.tables import TableRef
from geneva.model.uris import local_path
from geneva.storage.columns.dictionaries import has_narrow_dictionary
from geneva.storage.columns.staged_files import drop_staged, storable
from geneva.storage.lance.fragments import is_blob
from geneva.storage.lance.pieces import concat_batches

_MAX_FRAGMENT_BYTES = 1 << 30


def stage_rows(
    ref: TableRef,
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    max_rows_per_fragment: int,
    *,
    create: bool = False,
) -> str:
    """Write rows as fragments that no version has yet; return what they are as text.

    `schema` may leave out columns of the table, which are NULL in new rows. `create`: there is no
    table yet, or it will be replaced by one of these columns.
    """
    if has_narrow_dictionary(schema.types) and (held := list(batches)):
        batches = iter([concat_batches(held)])  # as `ColumnFileWriter` does, and why
    first = next(batches, None)
    if first is None:
        return "[]"
    fragments = write_fragments(
        pa.RecordBatchReader.from_batches(schema, map(_aligned, chain([first], batches))),
        ref.uri,
        schema=schema,
        mode="overwrite" if create else "append",
        max_rows_per_file=max_rows_per_fragment,
        max_bytes_per_file=_MAX_FRAGMENT_BYTES,
        storage_options=ref.storage_options.plain(),
    )
    return json.dumps([fragment.to_json() for fragment in fragments])


def _aligned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch in memory that Lance reads streams from.

    It panics where a buffer begins at no multiple of its values' width. Those that come from
    another process, as Spark's do, begin at multiples of 8, and decimals have 16 bytes.
    """
    columns = [column if _is_aligned(column) else pa.concat_arrays([column]) for column in batch]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _is_aligned(array: pa.Array) -> bool:
    return all(b is None or b.address % _WIDEST == 0 for b in array.buffers())


_WIDEST = 16


def given_schema(schema: pa.Schema) -> pa.Schema:
    """The types that batches for `stage_rows` have: blobs are given as bytes."""
    return pa.schema(
        [f.with_type(pa.large_binary()) if is_blob(f) else f for f in schema],
        metadata=schema.metadata,
    )


def stored_batch(
    batch: pa.RecordBatch, schema: pa.Schema, table: lance.LanceDataset | None
) -> pa.RecordBatch:
    """A batch of `given_schema(schema)`, as `schema` has it and the table's format stores it."""
    arrays = [
        _blobs(batch.column(field.name), field.type)
        if is_blob(field) and isinstance(field.type, pa.BaseExtensionType)
        else batch.column(field.name)
        for field in schema
    ]
    if table is not None:
        arrays = [storable(table, array) for array in arrays]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _blobs(values: pa.Array, kind: pa.BaseExtensionType) -> pa.Array:
    """Bytes as blobs of exactly a column's type: tables differ in what is kept beside the bytes."""
    storage = lance.blob_array(values.to_pylist()).storage
    fields = list(kind.storage_type)
    children = [storage.field(field.name) for field in fields]
    made = pa.StructArray.from_arrays(children, fields=fields, mask=storage.is_null())
    return pa.ExtensionArray.from_storage(kind, made)


def fragments_of(texts: Sequence[str]) -> list[Any]:
    """The fragments that `stage_rows` told of."""
    return [
        lance.FragmentMetadata.from_json(json.dumps(item))
        for text in texts
        for item in json.loads(text)
    ]


def discard_rows(ref: TableRef, texts: Sequence[str]) -> None:
    """Delete fragments that nobody will commit. Those that can't be, the next clean-up takes."""
    fragments = [fragment for text in texts for fragment in json.loads(text)]
    drop_staged(ref, *(file["path"] for fragment in fragments for file in fragment["files"]))


def remove_if_empty(ref: TableRef) -> None:
    """Delete the folder of a table that was to be created, where nothing is in it.

    Files that are there may be those of another write, which will still commit them.
    """
    folder = local_path(ref.uri)
    if folder is not None:
        with suppress(OSError):
            (folder / "data").rmdir()
            folder.rmdir()

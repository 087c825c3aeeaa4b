"""Staging a column file for a fragment: written and complete, and not yet published."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileReader, LanceFileSession

from geneva.model.computation import RECEIPT_PREFIX
from geneva.model.rows import RowRange
from geneva.model.tables import TableRef
from geneva.storage.columns.dictionaries import has_dictionary, has_narrow_dictionary
from geneva.storage.columns.provenance import PROVENANCE_METADATA, Provenance, nulls_file_name
from geneva.storage.lance.blobs import (
    BlobWriter,
    delete_blobs_beside,
    has_descriptors,
)
from geneva.storage.lance.damage import Damaged, is_damage, reading
from geneva.storage.lance.dataset import (
    field_ids_of,
    file_version,
)
from geneva.storage.lance.fragments import BLOB_KEY, MAX_WINDOW_ROWS, is_blob
from geneva.storage.lance.pieces import concat_batches, null_rows, writable
from geneva.udf.types import value_type

_NAME_METADATA = "geneva.file"
"""A staged file carries its own name: one that was put in the place of another is not it."""

_AS_IT_IS = {b"lance-encoding:compression": b"none"}
"""How receipts are written: nothing makes digests shorter, and Lance would take its time trying."""

_LOG = logging.getLogger("geneva")


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A column file that is written but not yet part of the table."""

    fragment_id: int
    path: str
    physical_rows: int
    column_uuid: str
    field_ids: tuple[int, ...]
    inputs: tuple[str, ...]
    """The input signature that it was computed from."""
    base: str | None
    """The file that holds the values it replaces, or is about; None when there was none."""
    size_bytes: int | None = field(default=None, compare=False)
    """For the manifest. None: a commit asks the store for it, file by file."""


def written_schema(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """The columns of a data file, in the dataset's exact types.

    A commit checks none of it, and a wrong type reads as garbage.
    """
    fields = [schema.field(column) for column in columns]
    return pa.schema([_written(field) for field in fields])


def _written(field: pa.Field) -> pa.Field:
    how = {BLOB_KEY: b"true"} if is_blob(field) else None
    if field.name.startswith(RECEIPT_PREFIX):
        how = _AS_IT_IS
    return pa.field(field.name, value_type(field.type), nullable=field.nullable, metadata=how)


class _DataFile:
    """A data file in a table's folder that is being written, with the blobs beside it."""

    def __init__(
        self, ref: TableRef, dataset: lance.LanceDataset, path: str, schema: pa.Schema
    ) -> None:
        options = ref.storage_options.plain()
        session = LanceFileSession(f"{ref.uri}/data", storage_options=options)
        self._blobs = BlobWriter(session, path)
        self._described = [has_descriptors(dataset, field) for field in schema]
        fields = [
            self._blobs.write(field.name, pa.array([], field.type))[0] if described else field
            for field, described in zip(schema, self._described, strict=True)
        ]
        self._schema = pa.schema(fields)
        # Never `with`: leaving the block by an exception would publish a truncated file.
        self.writer = session.open_writer(
            path, schema=self._schema, version=dataset.data_storage_version
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows; of blobs their bytes."""
        columns = [
            self._blobs.write(name, column)[1] if described else column
            for name, column, described in zip(
                batch.schema.names, batch.columns, self._described, strict=True
            )
        ]
        self.writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> int:
        """Finish the file; return how many rows it has."""
        self._blobs.close()
        return int(self.writer.close() or 0)


class ColumnFileWriter:
    """Writes the data file of a fragment next to the table's own, batch by batch.

    The file appears when it is closed; nobody sees it before it is committed.
    """

    def __init__(
        self,
        ref: TableRef,
        dataset: lance.LanceDataset,
        schema: pa.Schema,
        provenance: Provenance,
        *,
        complete: bool,
    ) -> None:
        """Open it. `complete`: no live row of the fragment is left to compute."""
        self.path = provenance.file_name(complete=complete)
        self._dataset, self._schema = dataset, schema
        self._provenance = provenance
        self._file = _DataFile(ref, dataset, self.path, schema)
        # Lance joins the dictionaries of batches without finding all equal values, so that two
        # batches with the same 100 values have too many for int8. Such rows are written at once.
        self._at_once = has_narrow_dictionary(schema.types)
        self._held: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows."""
        columns = [storable(self._dataset, column) for column in batch.columns]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        if self._at_once:
            self._held.append(rows)
        else:
            self._file.write(rows)

    def close(self, provenance: Provenance | None = None) -> int:
        """Finish the file; return how many rows it has. `provenance`: what is known by now."""
        if self._held:
            self._file.write(concat_batches(self._held))
            self._held.clear()
        made = provenance or self._provenance
        self._file.writer.add_schema_metadata(PROVENANCE_METADATA, made.to_text())
        self._file.writer.add_schema_metadata(_NAME_METADATA, self.path)
        return self._file.close()

    @property
    def size_bytes(self) -> int:
        """The size of the finished file."""
        return int(self._file.writer.size_bytes or 0)


def stage_columns(
    ref: TableRef,
    dataset: lance.LanceDataset,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    provenance: Provenance,
    *,
    complete: bool,
) -> tuple[str, int]:
    """Write a fragment's data file next to the table's own; return its name and row count."""
    writer = ColumnFileWriter(ref, dataset, schema, provenance, complete=complete)
    for batch in batches:
        writer.write(batch)
    return writer.path, writer.close()


def stage_nulls(
    ref: TableRef, dataset: lance.LanceDataset, field_ids: Sequence[int], rows: int
) -> str:
    """Write a data file of NULLs for the top-level columns with these ids; return its name."""
    wanted = frozenset(field_ids)
    names = [name for name, ids in field_ids_of(dataset).items() if wanted.intersection(ids)]
    top = [name for name in names if name in dataset.schema.names]
    schema = written_schema(dataset.schema, top)
    name = nulls_file_name()
    file = _DataFile(ref, dataset, name, schema)
    for start in range(0, rows, MAX_WINDOW_ROWS):
        file.write(null_rows(schema, min(MAX_WINDOW_ROWS, rows - start)))
    file.close()
    return name


def storable(dataset: lance.LanceDataset, array: pa.Array) -> pa.Array:
    """Values as the table's format can store them."""
    return writable(array if file_version(dataset) >= (2, 1) else _nulls_inside(array))


def _nulls_inside(array: pa.Array) -> pa.Array:
    """A NULL struct as a struct of NULLs: the 2.0 format can't store the former."""
    if not pa.types.is_struct(array.type) or not array.type.num_fields:
        return array
    children = [_nulls_inside(child) for child in array.flatten()]
    return pa.StructArray.from_arrays(children, fields=list(array.type))


def staged_file_is_whole(ref: TableRef, staged: StagedFile) -> bool:
    """Whether a staged file found from an earlier run is there, ours, complete and readable."""
    try:
        reader = _reader(ref, staged.path)
        schema = reader.metadata().schema
        name = (schema.metadata or {}).get(_NAME_METADATA.encode(), b"").decode()
        if name != staged.path:
            _LOG.warning(
                "Table %r: staged file %s holds %s. It is not used: its rows are computed again.",
                ref.name,
                staged.path,
                f"what was staged as {name}" if name else "what nobody has staged",
            )
            return False
        if int(reader.num_rows()) != staged.physical_rows:
            return False
        return unreadable(ref, staged.path, schema) is None
    except BaseException as error:
        if not is_damage(error):
            raise
        return False


def unreadable(ref: TableRef, path: str, schema: pa.Schema) -> str | None:
    """Why a staged file can't be read back; None when it can.

    Dictionaries are what Lance writes without noticing that it can't be read. Files without one
    are not read: their rows were counted when they were closed.
    """
    if not has_dictionary(schema.types):
        return None
    try:
        for _ in reading(read_columns(ref, path)):
            pass
    except Damaged as damage:
        return str(damage)
    return None


def read_columns(
    ref: TableRef,
    path: str,
    columns: Sequence[str] | None = None,
    batch_size: int = MAX_WINDOW_ROWS,
) -> Iterator[pa.RecordBatch]:
    """What is in a data file of a table's folder, in order; None: all of its columns."""
    reader = _reader(ref, path)
    if columns is not None:
        there = reader.metadata().schema.names
        reader = _reader(ref, path, [name for name in columns if name in there])
    yield from reader.read_all(batch_size=batch_size).to_batches()


def read_ranges(ref: TableRef, path: str, rows: int) -> Iterator[pa.RecordBatch]:
    """What is in a data file, so many rows at a time.

    Each range by itself: of a whole file Lance reads as much ahead as it can get.
    """
    reader = _reader(ref, path)
    physical_rows = int(reader.num_rows())
    for start in range(0, physical_rows, rows):
        some = min(rows, physical_rows - start)
        yield from reader.read_range(start, some, batch_size=some).to_batches()


def read_range(ref: TableRef, path: str, rows: RowRange) -> pa.RecordBatch:
    """Some rows of a data file."""
    found = _reader(ref, path).read_range(rows.start, len(rows), batch_size=len(rows))
    return concat_batches([*found.to_batches()])


def _reader(ref: TableRef, path: str, columns: list[str] | None = None) -> LanceFileReader:
    options = ref.storage_options.plain()
    return LanceFileReader(f"{ref.uri}/data/{path}", storage_options=options, columns=columns)


class _ManifestEntry(lance.fragment.DataFile):  # type: ignore[misc]
    """A data file whose path is asked for often: pylance 14 makes a class for each answer."""

    @property
    def path(self) -> str:
        return str(self._path)


def data_file(
    dataset: lance.LanceDataset,
    path: str,
    field_ids: Sequence[int],
    size_bytes: int | None = None,
) -> Any:
    """The manifest entry of a staged file."""
    major, minor = file_version(dataset)
    places = list(range(len(field_ids)))
    return _ManifestEntry(path, list(field_ids), places, major, minor, size_bytes)


def drop_staged(ref: TableRef, *paths: str) -> list[str]:
    """Delete files of a table's folder that nothing refers to; return those that were there."""
    session = LanceFileSession(f"{ref.uri}/data", storage_options=ref.storage_options.plain())
    return [path for path in paths if _is_deleted(session, path)]


def _is_deleted(session: LanceFileSession, path: str) -> bool:
    blobs = delete_blobs_beside(session, path)
    with suppress(OSError):
        session.delete_file(path)
        return True
    return blobs > 0

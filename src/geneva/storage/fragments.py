"""Reading rows of one fragment, and staging a column file for it. Nothing here publishes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileWriter

from geneva.digests import Digests
from geneva.model import TableRef
from geneva.rows import Offsets, RowRange
from geneva.storage.dataset import (
    FragmentFacts,
    field_ids_of,
    file_version,
    is_damage,
    quote_path,
    row_addresses,
)
from geneva.storage.provenance import PROVENANCE_METADATA, Provenance

_MAX_WINDOW_ROWS = 65_536
_WINDOW_BYTES = 32 * 1024 * 1024
_VARIABLE_WIDTH_GUESS = 64
_BLOB_WINDOW_ROWS = 64
_PROBE_ROWS = 32
_LEAST_PROBED_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Computed values of some rows of a fragment, ascending: a column for each one written."""

    offsets: Offsets
    values: pa.RecordBatch
    digests: Digests | None = None
    """The digests of the rows' inputs, 0 where they are not known; None: of none they are."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows follow each other without a gap."""
        return len(self.offsets) == 0 or bool(
            self.offsets[-1] - self.offsets[0] + 1 == len(self.offsets)
        )


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


def window_rows(
    schema: pa.Schema, paths: Sequence[str], files: Iterable[int | None], physical_rows: int
) -> int:
    """How many rows of these columns to read at once, so that a window stays small in memory."""
    widths = [_fixed_width(field_at(schema, path).type) for path in paths]
    if any(is_blob(field_at(schema, path)) for path in paths):
        # Their bytes are in files of their own, of any size.
        return _BLOB_WINDOW_ROWS
    row_bytes = sum(width for width in widths if width is not None)
    if any(width is None for width in widths):
        on_disk = sum(size or 0 for size in files)
        row_bytes += max(_VARIABLE_WIDTH_GUESS, on_disk // max(physical_rows, 1))
    return max(1, min(_MAX_WINDOW_ROWS, _WINDOW_BYTES // max(row_bytes, 1)))


def rows_for(nbytes: int, rows: int, most: int) -> int:
    """How many rows to read at once, after `rows` of them took `nbytes`."""
    return max(1, min(most, _WINDOW_BYTES * rows // max(nbytes, 1)))


def fitting_window(
    dataset: lance.LanceDataset,
    fragment_id: int,
    paths: Sequence[str],
    rows: RowRange,
    window: int,
) -> int:
    """Return `window`, or fewer rows where a look at some shows that they are wider in memory.

    Files are compressed, so that their size says little about the width of strings and lists.
    """
    schema = dataset.schema
    varies = any(_fixed_width(field_at(schema, path).type) is None for path in paths)
    if not varies or rows.end < _LEAST_PROBED_ROWS:
        return window
    probe = dataset.scanner(
        columns=_projection(schema, paths),
        fragments=[dataset.get_fragment(fragment_id)],
        offset=rows.start,
        limit=_PROBE_ROWS,
        batch_size=_PROBE_ROWS,
        **_blob_options(schema, paths),
    ).to_table()
    row_bytes = probe.nbytes // max(probe.num_rows, 1)
    return max(1, min(window, _WINDOW_BYTES // max(row_bytes, 1)))


def field_at(schema: pa.Schema, path: str) -> pa.Field:
    """The field at a column path."""
    if path in schema.names:
        return schema.field(path)
    head, *rest = path.split(".")
    found = schema.field(head)
    for name in rest:
        found = found.type.field(found.type.get_field_index(name))
    return found


def _fixed_width(kind: pa.DataType) -> int | None:
    if pa.types.is_fixed_size_list(kind):
        item = _fixed_width(kind.value_type)
        return None if item is None else item * kind.list_size
    if pa.types.is_struct(kind):
        widths = [_fixed_width(kind.field(i).type) for i in range(kind.num_fields)]
        return None if None in widths else sum(w for w in widths if w is not None)
    try:
        return max(1, kind.bit_width // 8)
    except ValueError:
        return None


def read_windows(
    dataset: lance.LanceDataset,
    fragment_id: int,
    paths: Sequence[str],
    rows: RowRange,
    batch_rows: int,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Read a range densely, deleted rows included, as (first offset, batch) in order."""
    fragment = dataset.get_fragment(fragment_id)
    # With deleted rows in the count, Lance decodes everything before the range to get there.
    deleted = fragment.metadata.deletion_file is not None
    physical = {"include_deleted_rows": True, "with_row_id": True} if deleted else {}
    scanner = dataset.scanner(
        columns=_projection(dataset.schema, paths),
        fragments=[fragment],
        offset=rows.start,
        limit=len(rows),
        batch_size=batch_rows,
        **physical,
        **_blob_options(dataset.schema, paths),
    )
    at = rows.start
    for batch in scanner.to_batches():
        yield at, _renamed(batch, paths)
        at += batch.num_rows
    if at != rows.end:
        raise OSError(
            f"fragment {fragment_id} of {dataset.uri} gave {at - rows.start} rows for "
            f"[{rows.start}, {rows.end}): its data files don't agree with its manifest"
        )


class RowTaker:
    """Reads scattered rows of one fragment by offset."""

    def __init__(self, dataset: lance.LanceDataset, fragment_id: int, paths: Sequence[str]) -> None:
        """Prepare; with stable row ids this reads the fragment's ids once."""
        self._dataset, self._fragment_id, self._paths = dataset, fragment_id, paths
        self._ids: np.ndarray[Any, Any] | None = None
        if dataset.has_stable_row_ids:
            self._ids = self._read_row_ids()

    def take(self, offsets: Offsets) -> pa.RecordBatch:
        """The rows at `offsets`, ascending. They must be live."""
        ids = row_addresses(self._fragment_id, offsets)
        projection = _projection(self._dataset.schema, self._paths)
        blobs = _blob_options(self._dataset.schema, self._paths)
        if blobs:
            # Taking rows knows no blob handling: it would give descriptors instead of bytes.
            table = self._dataset.scanner(
                columns=projection,
                filter=f"_rowaddr IN ({', '.join(map(str, ids.tolist()))})",
                fragments=[self._dataset.get_fragment(self._fragment_id)],
                scan_in_order=True,
                **blobs,
            ).to_table()
        else:
            rows = ids if self._ids is None else self._ids[offsets]
            table = self._dataset._take_rows(rows.tolist(), projection)
        if table.num_rows != len(offsets):
            raise OSError(
                f"fragment {self._fragment_id} of {self._dataset.uri} gave {table.num_rows} of "
                f"{len(offsets)} rows asked for by id"
            )
        return _renamed(table.combine_chunks().to_batches()[0], self._paths)

    def _read_row_ids(self) -> np.ndarray[Any, Any]:
        fragment = self._dataset.get_fragment(self._fragment_id)
        table = self._dataset.scanner(
            columns=[], with_row_id=True, with_row_address=True, fragments=[fragment]
        ).to_table()
        ids = np.zeros(fragment.physical_rows, dtype=np.uint64)
        offsets = table.column("_rowaddr").to_numpy() & np.uint64(0xFFFFFFFF)
        ids[offsets.astype(np.int64)] = table.column("_rowid").to_numpy()
        return ids


def _projection(schema: pa.Schema, paths: Sequence[str]) -> dict[str, str]:
    return {f"c{i}": quote_path(path, schema) for i, path in enumerate(dict.fromkeys(paths))}


def _renamed(batch: pa.RecordBatch, paths: Sequence[str]) -> pa.RecordBatch:
    place = {path: f"c{i}" for i, path in enumerate(dict.fromkeys(paths))}
    return pa.RecordBatch.from_arrays(
        [_from_zero(batch.column(place[path])) for path in paths], names=list(paths)
    )


def _from_zero(array: pa.Array) -> pa.Array:
    """Strings whose offsets count from zero, as Arrow's own kernels take for granted.

    Lance hands out a part of a page as it is: `ascii_upper` and its kin make garbage of that.
    """
    kind = array.type
    if not len(array) or array.offset or not _has_offsets(kind):
        return array
    width = 8 if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) else 4
    if not any(array.buffers()[1][:width].to_pybytes()):
        return array
    return pa.concat_arrays([array, array[:0]])


def _has_offsets(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def is_blob(arrow_field: pa.Field) -> bool:
    """Whether Lance keeps the field's bytes out of line."""
    marked = (arrow_field.metadata or {}).get(b"lance-encoding:blob") == b"true"
    return marked or getattr(arrow_field.type, "extension_name", "") == "lance.blob.v2"


def _blob_options(schema: pa.Schema, paths: Sequence[str]) -> Mapping[str, Any]:
    blobs = any(is_blob(field_at(schema, path)) for path in paths)
    return {"blob_handling": "all_binary"} if blobs else {}


def scatter(
    pieces: Iterable[Piece],
    schema: pa.Schema,
    rows: RowRange,
    step: int,
    old: Iterator[pa.RecordBatch] | None,
) -> Iterator[pa.RecordBatch]:
    """Lay pieces out densely over `rows`: the old value, or NULL, where nothing was computed.

    `old` yields batches that cover `rows` in order, in any lengths; without it the gaps are NULL.
    """
    at = rows.start
    old_values = _Buffered(old) if old is not None else None
    for piece in pieces:
        if not len(piece.offsets):
            continue
        first, last = int(piece.offsets[0]), int(piece.offsets[-1])
        yield from _gap(schema, at, first, step, old_values)
        width = last + 1 - first
        base = old_values.next(width) if old_values is not None else None
        yield piece.values if piece.is_contiguous else _spread(piece, first, width, base)
        at = last + 1
    yield from _gap(schema, at, rows.end, step, old_values)


def _gap(
    schema: pa.Schema, start: int, end: int, step: int, old_values: _Buffered | None
) -> Iterator[pa.RecordBatch]:
    for at in range(start, end, step):
        width = min(step, end - at)
        yield old_values.next(width) if old_values is not None else _null_rows(schema, width)


def _null_rows(schema: pa.Schema, rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(rows, f.type) for f in schema], schema=schema)


def _spread(piece: Piece, first: int, width: int, base: pa.RecordBatch | None) -> pa.RecordBatch:
    """Lay a piece with gaps out densely, over what was there or over NULLs."""
    places = piece.offsets - first
    if base is None:
        base = _null_rows(piece.values.schema, 1)
        indices = np.zeros(width, dtype=np.int64)
    else:
        indices = np.arange(width, dtype=np.int64)
    indices[places] = base.num_rows + np.arange(len(places), dtype=np.int64)
    return concat_batches([base, piece.values]).take(pa.array(indices))


def merged(pieces: Sequence[Piece]) -> Piece:
    """Several pieces as one, ascending."""
    if len(pieces) == 1:
        return pieces[0]
    offsets = np.concatenate([piece.offsets for piece in pieces])
    order = np.argsort(offsets, kind="stable")
    values = concat_batches([piece.values for piece in pieces]).take(pa.array(order))
    return Piece(offsets[order], values, digests_of(pieces)[order])


def digests_of(pieces: Sequence[Piece]) -> Digests:
    """The digests of the inputs of several pieces' rows, 0 where they are not known."""
    return np.concatenate(
        [
            np.zeros(len(piece.offsets), dtype=np.uint64)
            if piece.digests is None
            else piece.digests
            for piece in pieces
        ]
    )


def concat_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of many of the same columns; dictionaries are unified."""
    if len(batches) == 1:
        return batches[0]
    columns = [
        concat([batch.column(i) for batch in batches]) for i in range(batches[0].num_columns)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def concat(arrays: Sequence[pa.Array]) -> pa.Array:
    """One array of many; dictionaries are unified."""
    if len(arrays) == 1:
        return arrays[0]
    kind = arrays[0].type
    if pa.types.is_dictionary(kind):
        # Not by unify_dictionaries: Lance 2.0 reads NULLs as members of the dictionary.
        plain = pa.concat_arrays([array.dictionary_decode() for array in arrays])
        encoded = plain.dictionary_encode()
        return encoded if encoded.type == kind else encoded.cast(kind)
    return pa.concat_arrays(arrays)


class _Buffered:
    """Hands out exact lengths of a stream of batches."""

    def __init__(self, stream: Iterator[pa.RecordBatch]) -> None:
        self._stream = stream
        self._rest: pa.RecordBatch = None
        self._used = 0

    def next(self, rows: int) -> pa.RecordBatch:
        parts: list[pa.RecordBatch] = []
        while rows:
            if self._rest is None or self._used == self._rest.num_rows:
                self._rest, self._used = next(self._stream), 0
            part = self._rest.slice(self._used, rows)
            self._used += part.num_rows
            rows -= part.num_rows
            # Lance's writer panics on sliced nested structs: take makes a compact copy.
            whole = part.num_rows == self._rest.num_rows
            parts.append(part if whole else part.take(pa.array(np.arange(part.num_rows))))
        return concat_batches(parts)


def written_schema(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """The columns of a data file, in the dataset's exact types.

    A commit checks none of it, and a wrong type reads as garbage.
    """
    fields = [schema.field(column) for column in columns]
    return pa.schema([pa.field(f.name, f.type, nullable=f.nullable) for f in fields])


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
    name = provenance.file_name(complete=complete)
    writer = LanceFileWriter(
        f"{ref.uri}/data/{name}",
        schema,
        version=dataset.data_storage_version,
        storage_options=ref.storage_options.plain(),
    )
    # Never `with`: leaving the block by an exception would publish a truncated file.
    writer.add_schema_metadata(PROVENANCE_METADATA, provenance.to_text())
    for batch in batches:
        columns = [storable(dataset, column) for column in batch.columns]
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return name, int(writer.close() or 0)


def stage_nulls(
    ref: TableRef, dataset: lance.LanceDataset, field_ids: Sequence[int], rows: int
) -> str:
    """Write a data file of NULLs for the top-level columns with these ids; return its name."""
    wanted = frozenset(field_ids)
    names = [name for name, ids in field_ids_of(dataset).items() if wanted.intersection(ids)]
    top = [name for name in names if name in dataset.schema.names]
    schema = written_schema(dataset.schema, top)
    name = f"geneva-nulls-{uuid.uuid4().hex}.lance"
    writer = LanceFileWriter(
        f"{ref.uri}/data/{name}",
        schema,
        version=dataset.data_storage_version,
        storage_options=ref.storage_options.plain(),
    )
    for start in range(0, rows, _MAX_WINDOW_ROWS):
        writer.write_batch(_null_rows(schema, min(_MAX_WINDOW_ROWS, rows - start)))
    writer.close()
    return name


def storable(dataset: lance.LanceDataset, array: pa.Array) -> pa.Array:
    """Values as the table's format can store them."""
    return array if file_version(dataset) >= (2, 1) else _nulls_inside(array)


def _nulls_inside(array: pa.Array) -> pa.Array:
    """A NULL struct as a struct of NULLs: the 2.0 format can't store the former."""
    if not pa.types.is_struct(array.type) or not array.type.num_fields:
        return array
    children = [_nulls_inside(child) for child in array.flatten()]
    return pa.StructArray.from_arrays(children, fields=list(array.type))


def staged_file_is_whole(ref: TableRef, staged: StagedFile) -> bool:
    """Whether a staged file found from an earlier run is there, ours, and complete."""
    from lance.file import LanceFileReader

    try:
        reader = LanceFileReader(
            f"{ref.uri}/data/{staged.path}", storage_options=ref.storage_options.plain()
        )
        return int(reader.num_rows()) == staged.physical_rows
    except BaseException as error:
        if not is_damage(error):
            raise
        return False


def data_file(dataset: lance.LanceDataset, path: str, field_ids: Sequence[int]) -> Any:
    """The manifest entry of a staged file."""
    major, minor = file_version(dataset)
    return lance.fragment.DataFile(
        path, list(field_ids), list(range(len(field_ids))), major, minor, None
    )


def size_of_inputs(fragment: FragmentFacts, field_ids: Iterable[int]) -> list[int | None]:
    """The sizes on disk of the files that hold the fields."""
    return [file.size_bytes for file in fragment.files_of(field_ids)]

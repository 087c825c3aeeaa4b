"""Reading rows of one fragment: dense ranges in windows, or scattered rows by offset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geneva.background import in_background
from geneva.model.addresses import offsets_of, row_addresses
from geneva.model.rows import Offsets, RowRange
from geneva.model.tables import is_remote
from geneva.storage.lance.dataset import FragmentFacts, file_version, quote_path
from geneva.udf.paths import field_by, steps_to
from geneva.udf.types import BLOB_MARK, is_blob_type

MAX_WINDOW_ROWS = 65_536
_WINDOW_BYTES = 32 * 1024 * 1024
_QUARTER = 4
"""Wide rows are read a quarter of a window at a time: that is in a processor's cache when it is
digested and computed."""
_FEW_ROWS = 16
"""So few are read at once, however wide they are, if they make a window."""
_PIECE_BYTES = _WINDOW_BYTES // _QUARTER
_MAX_WINDOWS = 8
_REMOTE_PIECE_BYTES = 64 * 1024 * 1024
"""Asked of an object store at once: many requests that are answered at the same time."""
_VARIABLE_WIDTH_GUESS = 64
_BLOB_WINDOW_ROWS = 64
_PROBE_ROWS = 32
_MIN_PROBED_ROWS = 1024


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
    return max(1, min(MAX_WINDOW_ROWS, _WINDOW_BYTES // max(row_bytes, 1)))


def rows_of_types(kinds: Iterable[pa.DataType], max_rows: int) -> int | None:
    """How many rows of values of these types to read at once; None: their width varies."""
    width = width_of(kinds)
    return rows_for(width, 1, max_rows) if width is not None else None


def width_of(kinds: Iterable[pa.DataType]) -> int | None:
    """The bytes of a row of values of these types; None: that varies."""
    widths = [_fixed_width(kind) for kind in kinds]
    known = [width for width in widths if width is not None]
    return sum(known) if len(known) == len(widths) else None


def rows_for(nbytes: int, rows: int, max_rows: int) -> int:
    """How many rows to read at once, after `rows` of them took `nbytes`."""
    return max(1, min(max_rows, _WINDOW_BYTES * rows // max(nbytes, 1)))


def read_at_once(window: int) -> int:
    """How many rows to read at once where up to a window of them may go into a call."""
    if window >= MAX_WINDOW_ROWS:
        return window
    return max(window // _QUARTER, min(window, _FEW_ROWS))


def fitting_window(
    dataset: lance.LanceDataset,
    fragment_id: int,
    paths: Sequence[str],
    rows: RowRange,
    window: int,
) -> int:
    """Return `window`, or fewer rows where reading some shows that they are wider in memory.

    Files are compressed, so that their size says little about the width of strings and lists.
    """
    schema = dataset.schema
    blobs = [path for path in paths if is_blob(field_at(schema, path))]
    if blobs:
        largest = _largest_blobs(dataset, fragment_id, blobs)
        return max(1, min(window, _WINDOW_BYTES // max(largest, 1)))
    varies = any(_fixed_width(field_at(schema, path).type) is None for path in paths)
    if not varies or rows.end < _MIN_PROBED_ROWS:
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


def _largest_blobs(dataset: lance.LanceDataset, fragment_id: int, paths: Sequence[str]) -> int:
    """The most bytes that blobs of one row of a fragment have, by their descriptors."""
    described = dataset.scanner(
        columns=_projection(dataset.schema, paths),
        fragments=[dataset.get_fragment(fragment_id)],
        blob_handling="blobs_descriptions",
    ).to_table()
    sizes = [pc.max(pc.struct_field(column, "size")).as_py() or 0 for column in described.columns]
    return sum(sizes)


def field_at(schema: pa.Schema, path: str) -> pa.Field:
    """The field at a column path."""
    return field_by(schema, steps_to(schema, path) or (path,))


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
    """Read a range densely, deleted rows included, as (first offset, batch) in order.

    Piece by piece, each while the one before is worked on: a scan of a whole range gives its first
    batch when nearly all of it is in memory.
    """
    fragment = dataset.get_fragment(fragment_id)
    # With deleted rows in the count, Lance decodes everything before the range to get there.
    deleted = fragment.metadata.deletion_file is not None
    physical = {"include_deleted_rows": True, "with_row_id": True} if deleted else {}
    blobs = _blob_options(dataset.schema, paths)

    def scan(piece: RowRange) -> Iterator[pa.RecordBatch]:
        batches: Iterator[pa.RecordBatch] = dataset.scanner(
            columns=_projection(dataset.schema, paths),
            fragments=[fragment],
            offset=piece.start,
            limit=len(piece),
            batch_size=batch_rows,
            **physical,
            **blobs,
        ).to_batches()
        return batches

    at = rows.start
    piece_bytes, first = _PIECE_BYTES, batch_rows
    if is_remote(dataset.uri):
        piece_bytes = _REMOTE_PIECE_BYTES
    elif width := width_of(field_at(dataset.schema, path).type for path in paths):
        first *= max(1, piece_bytes // (width * first))
    if blobs:
        piece_bytes = 0  # a window each: the next rows may be as wide as they like
    # In files of its first format Lance counts through what is before a range, too.
    at_once = deleted or file_version(dataset) < (2, 0) or len(rows) <= first
    batches = scan(rows) if at_once else _in_pieces(scan, rows, batch_rows, piece_bytes, first)
    for batch in batches:
        yield at, _renamed(batch, paths)
        at += batch.num_rows
    if at != rows.end:
        raise OSError(
            f"fragment {fragment_id} of {dataset.uri} gave {at - rows.start} rows for "
            f"[{rows.start}, {rows.end}): its data files don't agree with its manifest"
        )


def _in_pieces(
    scan: Callable[[RowRange], Iterator[pa.RecordBatch]],
    rows: RowRange,
    window: int,
    piece_bytes: int,
    first: int,
) -> Iterator[pa.RecordBatch]:
    """Scan a range piece by piece; what is read of the `first` rows tells how wide rows are.

    A piece has at most twice the rows of the one before, and of eight windows: rows further on may
    be wider. It may have as many as the first one.
    """
    at, size, ahead = rows.start, first, _begin(scan, rows, first)
    max_rows = max(first, _MAX_WINDOWS * window)
    while at < rows.end:
        batches, error = ahead.result()
        found = sum(batch.num_rows for batch in batches)
        at += found
        if error is None and found and at < rows.end:
            fitting = piece_bytes * found // max(1, sum(batch.nbytes for batch in batches))
            size = window * max(1, min(2 * size, max_rows, fitting) // window)
            ahead = _begin(scan, RowRange(at, rows.end), size)
        yield from batches
        if error is not None:
            raise error
        if not found:
            return  # whoever counts the rows says so


_Read: TypeAlias = tuple[list[pa.RecordBatch], BaseException | None]
"""What a scan gave, and what ended it."""


def _begin(
    scan: Callable[[RowRange], Iterator[pa.RecordBatch]], rows: RowRange, size: int
) -> Future[_Read]:
    """Begin to read the first rows of a range; where no thread can be had, do so now."""
    piece = RowRange(rows.start, min(rows.start + size, rows.end))

    def read() -> _Read:
        batches: list[pa.RecordBatch] = []
        try:
            batches.extend(scan(piece))
        except BaseException as error:  # noqa: BLE001  raised behind what was read before it
            return batches, error
        return batches, None

    try:
        return in_background("geneva-scan", read)
    except RuntimeError:
        done: Future[_Read] = Future()
        done.set_result(read())
        return done


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
        ids[offsets_of(table.column("_rowaddr").to_numpy())] = table.column("_rowid").to_numpy()
        return ids


def _projection(schema: pa.Schema, paths: Sequence[str]) -> dict[str, str]:
    return {f"c{i}": quote_path(path, schema) for i, path in enumerate(dict.fromkeys(paths))}


def _renamed(batch: pa.RecordBatch, paths: Sequence[str]) -> pa.RecordBatch:
    place = {path: f"c{i}" for i, path in enumerate(dict.fromkeys(paths))}
    return pa.RecordBatch.from_arrays(
        [batch.column(place[path]) for path in paths], names=list(paths)
    )


BLOB_KEY = BLOB_MARK.encode()
"""Field metadata of a column whose bytes Lance keeps out of line."""


def is_blob(arrow_field: pa.Field) -> bool:
    """Whether Lance keeps the field's bytes out of line."""
    marked = (arrow_field.metadata or {}).get(BLOB_KEY) == b"true"
    return marked or is_blob_type(arrow_field.type)


def holds_blob(arrow_field: pa.Field) -> bool:
    """Whether the field, or one below it, is a blob."""
    kind = arrow_field.type
    below = (kind.field(i) for i in range(kind.num_fields)) if pa.types.is_nested(kind) else ()
    return is_blob(arrow_field) or any(holds_blob(child) for child in below)


def _blob_options(schema: pa.Schema, paths: Sequence[str]) -> Mapping[str, Any]:
    blobs = any(is_blob(field_at(schema, path)) for path in paths)
    return {"blob_handling": "all_binary"} if blobs else {}


def size_of_inputs(fragment: FragmentFacts, field_ids: Iterable[int]) -> list[int | None]:
    """The sizes on disk of the files that hold the fields."""
    return [file.size_bytes for file in fragment.files_of(field_ids)]

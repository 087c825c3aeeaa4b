"""Files to load columns from: which they are, what is in them, and reading them part by part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from geneva.errors import ColumnNotFoundError, UnreadableSourceError, UserInputError
from geneva.model.tables import Secrets
from geneva.model.uris import local_path, without_credentials
from geneva.render.text import a_type, did_you_mean, listed, shorten, shown_columns
from geneva.storage.lance.damage import Damaged, reading
from geneva.storage.lance.dataset import nodes_of
from geneva.storage.lance.fragments import rows_of_types
from geneva.storage.loads.stores import file_system

_PART_ROWS = 1 << 20
"""Rows that one task reads, about."""
_MAX_FOOTERS = 256
"""More files than this are read one by one, without looking into each of them before."""
_BATCH_ROWS = 65_536
_WIDE_BATCH_ROWS = 4_096
"""Rows of a width that is not known before they are read."""
_IPC_MAGIC = b"ARROW1"
_STORE_TIME_NS = 1_000_000_000
"""How far two times of one file in a store may be apart.

A folder is looked at by listing it, and a file that was read by a HEAD request. MinIO lists
milliseconds and answers HEAD in whole seconds; others round seconds up, or to the nearest.
"""


class SourceFormat(StrEnum):
    """What a source is stored as."""

    PARQUET = "parquet"
    LANCE = "lance"
    IPC = "ipc"


_FORMATS = ", ".join(repr(kind.value) for kind in SourceFormat)
_OTHERWISE = "What is of another format can be given as an Arrow table."

_SUFFIXES = {
    ".parquet": SourceFormat.PARQUET,
    ".pq": SourceFormat.PARQUET,
    ".lance": SourceFormat.LANCE,
    ".arrow": SourceFormat.IPC,
    ".arrows": SourceFormat.IPC,
    ".ipc": SourceFormat.IPC,
    ".feather": SourceFormat.IPC,
}


@dataclass(frozen=True, slots=True)
class FileSeen:
    """What tells a file from another in its place."""

    size: int
    modified: int | None
    """In nanoseconds; None: the store doesn't say."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of the files, as one task reads it."""

    format: SourceFormat
    uri: str
    storage_options: Secrets
    identity: FileSeen | str
    """The file as it was, or a digest of the fragments: others may be in the place by now."""
    version: int | None = None
    """Of a Lance table."""
    pieces: tuple[int, ...] | None = None
    """Row groups, or fragments; None: all of the file."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files of one format, and what was found in them."""

    name: str
    """What messages call them."""
    format: SourceFormat
    schema: pa.Schema
    """Of the first file; others are held to the same columns when they are read."""
    parts: tuple[FilePart, ...]
    rows: int | None
    """How many rows there are; None: that is not known before they are read."""
    fingerprint: str
    """Another one when a file was added, removed or replaced."""


def open_files(
    source: str | Path | Sequence[str | Path],
    source_format: str | None,
    storage_options: Secrets,
) -> Files:
    """Look at a file, a folder, or a list of files; nothing but schemas and footers is read."""
    if isinstance(source, str | Path):
        given: list[Any] = [source]
    elif isinstance(source, Sequence):
        given = list(source)
    else:
        raise UserInputError(
            f"source must be a path or URI of files, a list of them, a Spark data frame, or Arrow "
            f"data, not {a_type(source)}. Of a table give its URI, table.uri. {_OTHERWISE}"
        )
    if not given:
        raise UserInputError("The source is an empty list of files: there is nothing to load.")
    uris = [_address(place) for place in given]
    format_ = _given_format(source_format) or _format_of(uris[0], storage_options)
    if format_ is SourceFormat.LANCE:
        return _lance_tables(uris, storage_options)
    return _plain_files(uris, format_, storage_options)


def _address(place: Any) -> str:
    if not isinstance(place, str | Path) or not str(place).strip():
        raise UserInputError(
            f"A source is a path or a URI, not {shorten(repr(place), 80)}. {_OTHERWISE}"
        )
    path = local_path(place)
    return str(place).rstrip("/") if path is None else str(path)


def _given_format(given: str | None) -> SourceFormat | None:
    if given is None:
        return None
    try:
        return SourceFormat(given)
    except ValueError:
        known = [kind.value for kind in SourceFormat]
        raise UserInputError(
            f"source_format must be one of {_FORMATS}, not {given!r}."
            f"{did_you_mean(str(given), known)} {_OTHERWISE}"
        ) from None


def _suffix_format(path: str) -> SourceFormat | None:
    return _SUFFIXES.get(PurePosixPath(path).suffix.lower())


def _format_of(uri: str, options: Secrets) -> SourceFormat:
    """By the suffix of the address, or of the files in a folder; Parquet where nothing says it."""
    known = _suffix_format(uri)
    if known is not None:
        return known
    system, path = file_system(uri, options)
    if system.get_file_info(f"{path}/_versions").type is fs.FileType.Directory:
        return SourceFormat.LANCE
    found = (_suffix_format(file.path) for file in _listed(uri, options))
    return next((kind for kind in found if kind is not None), SourceFormat.PARQUET)


def _listed(uri: str, options: Secrets) -> list[fs.FileInfo]:
    """The files at an address: itself, or those in the folder and below, in order."""
    system, path = file_system(uri, options)
    info = system.get_file_info(path)
    if info.type is fs.FileType.File:
        return [info]
    if info.type is fs.FileType.NotFound:
        raise UserInputError(f"There is nothing to load at {without_credentials(uri)}.")
    every = system.get_file_info(fs.FileSelector(path, recursive=True))
    inside = len(path) + 1
    return sorted(
        (
            file
            for file in every
            if file.type is fs.FileType.File
            # As Spark leaves them: _SUCCESS, .crc, _temporary/...
            and not any(name.startswith(("_", ".")) for name in file.path[inside:].split("/"))
        ),
        key=lambda file: str(file.path),
    )


# ------------------------------------------------------------------------- Parquet and Arrow IPC


def _plain_files(uris: Sequence[str], format_: SourceFormat, options: Secrets) -> Files:
    name = _name(uris)
    files: list[tuple[str, fs.FileInfo]] = []
    for uri in uris:
        root = file_system(uri, options)[1]
        listed = _listed(uri, options)
        of_format = [f for f in listed if _suffix_format(f.path) is format_]
        files += [(uri + str(f.path)[len(root) :], f) for f in of_format or listed]
    if not files:
        raise UserInputError(f"There are no files in {name}: there is nothing to load.")
    addresses = [uri for uri, _ in files]
    # To the nanosecond: listings are compared with listings. Others just cost a load.
    facts = [(uri, info.size, info.mtime_ns) for uri, info in files]
    whole = [FilePart(format_, uri, options, _seen(info)) for uri, info in files]
    if format_ is SourceFormat.IPC:
        with _opened_ipc(addresses[0], options) as reader:
            schema = reader.schema
        return Files(name, format_, schema, tuple(whole), None, _digest(facts))
    schema = _readable(pq.read_schema, addresses[0], options)
    if len(addresses) > _MAX_FOOTERS:
        return Files(name, format_, schema, tuple(whole), None, _digest(facts))
    with ThreadPoolExecutor(16, thread_name_prefix="geneva-footers") as threads:
        footers = list(
            threads.map(lambda uri: _readable(pq.read_metadata, uri, options), addresses)
        )
    parts = [
        replace(file, pieces=groups)
        for file, footer in zip(whole, footers, strict=True)
        for groups in _groups(footer.row_group(i).num_rows for i in range(footer.num_row_groups))
    ]
    rows = sum(footer.num_rows for footer in footers)
    return Files(name, format_, schema, tuple(parts), rows, _digest(facts))


def _seen(info: fs.FileInfo) -> FileSeen:
    return FileSeen(info.size, info.mtime_ns)


def _readable(read: Any, uri: str, options: Secrets) -> Any:
    """Read something of a Parquet file; say which file it is that can't be read."""
    system, path = file_system(uri, options)
    try:
        with system.open_input_file(path) as file:
            return read(file)
    except pa.ArrowInvalid as error:
        raise UserInputError(_unreadable(uri, SourceFormat.PARQUET, str(error))) from None


def _unreadable(uri: str, format_: SourceFormat, reason: str) -> str:
    return (
        f"{without_credentials(uri)} can't be read as {format_.value}: {reason.rstrip('.')}. Say "
        f"what it is by source_format ({_FORMATS}), write it anew, or leave it out. {_OTHERWISE}"
    )


def _groups(rows: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Neighbouring pieces, put together up to the rows of one part."""
    group: list[int] = []
    total = 0
    for piece, count in enumerate(rows):
        if group and total + count > _PART_ROWS:
            yield tuple(group)
            group, total = [], 0
        group.append(piece)
        total += count
    if group:
        yield tuple(group)


class _opened_ipc:
    """An Arrow file, or a stream: its batches one after the other."""

    def __init__(self, uri: str, options: Secrets) -> None:
        self._uri, self._options = uri, options

    def __enter__(self) -> Any:
        system, path = file_system(self._uri, self._options)
        self._file = system.open_input_file(path)
        try:
            is_file = self._file.read(len(_IPC_MAGIC)) == _IPC_MAGIC
            self._file.seek(0)
            return pa.ipc.open_file(self._file) if is_file else pa.ipc.open_stream(self._file)
        except (pa.ArrowInvalid, OSError) as error:
            self._file.close()
            raise UserInputError(_unreadable(self._uri, SourceFormat.IPC, str(error))) from None

    def __exit__(self, *_: object) -> None:
        self._file.close()


# ------------------------------------------------------------------------------------------ Lance


def _lance_tables(uris: Sequence[str], options: Secrets) -> Files:
    parts: list[FilePart] = []
    facts: list[Any] = []
    rows, schema = 0, None
    for uri in uris:
        try:
            table = lance.dataset(uri, storage_options=options.plain())
        except (ValueError, OSError) as error:
            raise UserInputError(
                f"There is no Lance table at {without_credentials(uri)}: {error}"
            ) from None
        schema = table.schema if schema is None else schema
        fragments = table.get_fragments()
        counts = [fragment.count_rows() for fragment in fragments]
        rows += sum(counts)
        fields = sorted(nodes_of(table.lance_schema).items())  # a name may be another field's now
        metadata = [_metadata(fragment) for fragment in fragments]
        facts.append((uri, fields, metadata))
        for group in _groups(counts):
            ids = tuple(fragments[i].fragment_id for i in group)
            identity = _digest([metadata[i] for i in group])
            version = int(table.version)
            parts.append(FilePart(SourceFormat.LANCE, uri, options, identity, version, ids))
    assert schema is not None
    return Files(_name(uris), SourceFormat.LANCE, schema, tuple(parts), rows, _digest(facts))


def _metadata(fragment: lance.LanceFragment) -> str:
    """What is known of a fragment: its files have names that no others have."""
    return json.dumps(fragment.metadata.to_json(), sort_keys=True)


def _name(uris: Sequence[str]) -> str:
    first = without_credentials(uris[0])
    return first if len(uris) == 1 else f"{first} and {len(uris) - 1} more"


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


# ---------------------------------------------------------------------------------------- reading


def read_part(part: FilePart, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The columns of a part, some rows at a time; UnreadableSourceError names its file."""
    try:
        yield from reading(_READERS[part.format](part, columns))
    except Damaged as error:
        raise UnreadableSourceError(_unreadable(part.uri, part.format, str(error))) from error


def check_columns(schema: pa.Schema, columns: Sequence[str], where: str) -> None:
    """Refuse a source that lacks a column, or has two of the name."""
    for name in columns:
        if schema.names.count(name) > 1:
            raise UserInputError(f"There are several columns {name!r} in {where}.")
        if name not in schema.names:
            known = shown_columns(schema.names)
            raise ColumnNotFoundError(
                f"There is no column {name!r} in {where}.{did_you_mean(name, known)} It has "
                f"{listed(known)}."
            )


def _read_parquet(part: FilePart, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    system, path = file_system(part.uri, part.storage_options)
    with system.open_input_file(path) as opened, pq.ParquetFile(opened) as file:
        schema = file.schema_arrow
        check_columns(schema, columns, without_credentials(part.uri))
        size = _batch_rows(schema, columns)
        yield from file.iter_batches(size, row_groups=part.pieces, columns=list(columns))
    _check_same_file(part, system, path)


def _read_ipc(part: FilePart, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with _opened_ipc(part.uri, part.storage_options) as reader:
        check_columns(reader.schema, columns, without_credentials(part.uri))
        is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield batch.select(list(columns))
    _check_same_file(part, *file_system(part.uri, part.storage_options))


def _read_lance(part: FilePart, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    options = part.storage_options.plain()
    table = lance.dataset(part.uri, version=part.version, storage_options=options)
    pieces = frozenset(part.pieces or ())
    fragments = [f for f in table.get_fragments() if f.fragment_id in pieces]
    if part.identity != _digest([_metadata(fragment) for fragment in fragments]):
        raise _replaced(part)
    scanner = table.scanner(
        columns=list(columns),
        fragments=fragments,
        batch_size=_batch_rows(table.schema, columns),
    )
    yield from scanner.to_batches()


def _check_same_file(part: FilePart, system: fs.FileSystem, path: str) -> None:
    """Refuse a file that is not the one that was looked at: some of its rows may be loaded.

    On a local disk both times are of the file's own record, and are the same. In a store one may
    be of a listing: they are compared as far as a listing and a HEAD request both tell them.
    """
    was, now = part.identity, _seen(system.get_file_info(path))
    assert isinstance(was, FileSeen)
    if isinstance(system, fs.LocalFileSystem):
        is_same = was == now
    elif was.modified is None or now.modified is None:
        is_same = was.size == now.size
    else:
        is_same = was.size == now.size and abs(was.modified - now.modified) <= _STORE_TIME_NS
    if not is_same:
        raise _replaced(part)


def _replaced(part: FilePart) -> UnreadableSourceError:
    return UnreadableSourceError(
        f"{without_credentials(part.uri)} was replaced while it was read. No value was loaded: "
        "load it again."
    )


_READERS = {
    SourceFormat.PARQUET: _read_parquet,
    SourceFormat.IPC: _read_ipc,
    SourceFormat.LANCE: _read_lance,
}


def _batch_rows(schema: pa.Schema, columns: Sequence[str]) -> int:
    kinds = [schema.field(name).type for name in columns]
    return rows_of_types(kinds, _BATCH_ROWS) or _WIDE_BATCH_ROWS

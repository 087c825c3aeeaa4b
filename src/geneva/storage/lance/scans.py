"""Reading the rows of one version of a table in parts, for engines that read it side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lance
import lance.arrow  # makes bfloat16 a type that Arrow knows
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.model.rows import RowRange
from geneva.storage.lance.damage import reading
from geneva.storage.lance.dataset import FragmentFacts, fragment_facts, nodes_of, quote_path
from geneva.storage.lance.expressions import Condition, read_condition, single
from geneva.storage.lance.fragments import (
    MAX_WINDOW_ROWS,
    field_at,
    fitting_window,
    holds_blob,
    window_rows,
)
from geneva.storage.lance.matching_rows import condition_batches, condition_mask
from geneva.storage.lance.pieces import check_all_taken, in_parts, noticing_full_dictionaries
from geneva.udf.picking import filtered

ROW_ID, ROW_ADDRESS = "_rowid", "_rowaddr"
_ROWS = MAX_WINDOW_ROWS
"""Rows of a condition to read and compute at once."""
_SPARSE = 0.2
"""Below this share of wanted rows they are read one by one instead of scanning past the others."""


@dataclass(frozen=True, slots=True)
class ScanColumn:
    """A column that is read: its name in the result, and the path of what it is."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Scan:
    """What is read of a version of a table."""

    columns: tuple[ScanColumn, ...]
    where: str | None = None
    row_id: bool = False
    row_address: bool = False
    blob_bytes: bool = False
    """Blobs as bytes; otherwise as Lance's descriptors of where the bytes are."""


@dataclass(frozen=True, slots=True)
class ScanPart:
    """A part of a table: whole fragments, or a range of the live rows of a single one."""

    fragment_ids: tuple[int, ...]
    rows: RowRange | None = None


@dataclass(frozen=True, slots=True)
class FragmentSize:
    """How much there is to read of a fragment."""

    id: int
    live_rows: int
    size_bytes: int
    """On disk, of the columns that are read."""


def scan_schema(dataset: lance.LanceDataset, scan: Scan) -> pa.Schema:
    """The schema of what a scan gives."""
    return dataset.scanner(**_how(scan, dataset.schema)).projected_schema


def read_sizes(dataset: lance.LanceDataset, scan: Scan) -> list[FragmentSize]:
    """How much of each fragment a scan reads, in the order of the table."""
    nodes = nodes_of(dataset.lance_schema)
    roots = {nodes[column.path.split(".")[0]] for column in scan.columns if column.path in nodes}
    facts = (fragment_facts(f.metadata) for f in dataset.get_fragments())
    wanted = _below(dataset.lance_schema, roots)
    return [FragmentSize(f.id, f.live_rows, _size(f, wanted)) for f in facts if f.live_rows]


def _below(schema: Any, roots: set[int]) -> set[int]:
    """The ids of fields, and of all that is inside them."""
    found: set[int] = set()

    def walk(node: Any, *, inside: bool) -> None:
        inside = inside or node.id() in roots
        if inside:
            found.add(node.id())
        for child in node.children():
            walk(child, inside=inside)

    for top in schema.fields():
        walk(top, inside=False)
    return found


def _size(fragment: FragmentFacts, wanted: set[int]) -> int:
    """The bytes of the wanted fields, each of which counts as an equal share of its file."""
    return sum(
        (file.size_bytes or 0) * len(wanted.intersection(file.fields)) // max(1, len(file.fields))
        for file in fragment.files
    )


def scan_part(dataset: lance.LanceDataset, scan: Scan, part: ScanPart) -> Iterator[pa.RecordBatch]:
    """The rows of a part that satisfy the condition, in the order of the table."""
    if scan.where is None:
        yield from reading(_scanned(dataset, scan, part))
        return
    condition = read_condition(dataset, scan.where)
    matches = _matches(dataset, condition, part)
    found = int(np.count_nonzero(matches.mask))
    if not found:
        return
    if found < _SPARSE * len(matches.mask) or _reads_blobs(dataset.schema, scan):
        yield from _taken(dataset, scan, part, matches)
        return
    at = 0
    for batch in reading(_scanned(dataset, scan, part)):
        chosen = matches.mask[at : at + batch.num_rows]
        at += batch.num_rows
        yield batch if chosen.all() else filtered(batch, chosen)


# -- scanning


def _how(scan: Scan, schema: pa.Schema) -> dict[str, Any]:
    return {
        "columns": {column.name: quote_path(column.path, schema) for column in scan.columns},
        "with_row_id": scan.row_id,
        "with_row_address": scan.row_address,
        "blob_handling": "all_binary" if scan.blob_bytes else None,
    }


def _place(dataset: lance.LanceDataset, part: ScanPart) -> dict[str, Any]:
    """Where to scan. Offsets count live rows."""
    place: dict[str, Any] = {"fragments": [dataset.get_fragment(i) for i in part.fragment_ids]}
    if part.rows is not None:
        place |= {"offset": part.rows.start, "limit": len(part.rows)}
    return place


def _scanned(dataset: lance.LanceDataset, scan: Scan, part: ScanPart) -> Iterator[pa.RecordBatch]:
    scanner = dataset.scanner(
        **_how(scan, dataset.schema),
        **_place(dataset, part),
        batch_size=_batch_rows(dataset, scan, part),
        scan_in_order=True,
    )
    yield from scanner.to_batches()


def _batch_rows(dataset: lance.LanceDataset, scan: Scan, part: ScanPart) -> int:
    """Rows to read at once, in bounded memory."""
    fragment = fragment_facts(dataset.get_fragment(part.fragment_ids[0]).metadata)
    paths = [column.path for column in scan.columns]
    files = [file.size_bytes for file in fragment.files]
    window = window_rows(dataset.schema, paths, files, fragment.physical_rows)
    rows = part.rows or RowRange(0, fragment.live_rows)
    return fitting_window(dataset, fragment.id, paths, rows, window)


def _reads_blobs(schema: pa.Schema, scan: Scan) -> bool:
    return scan.blob_bytes and any(holds_blob(field_at(schema, c.path)) for c in scan.columns)


# -- conditions


@dataclass(frozen=True, slots=True, eq=False)
class _Matches:
    """Of each live row of a part, in order, whether it satisfies a condition, and where it is."""

    mask: npt.NDArray[np.bool_]
    addresses: npt.NDArray[np.uint64]
    ids: npt.NDArray[np.uint64]


def _matches(dataset: lance.LanceDataset, condition: Condition, part: ScanPart) -> _Matches:
    masks, addresses, ids = [np.empty(0, np.bool_)], [_NONE], [_NONE]
    place = _place(dataset, part)
    for batch in reading(condition_batches(dataset, condition, batch_size=_ROWS, **place)):
        masks.append(condition_mask(condition, batch))
        addresses.append(batch.column(ROW_ADDRESS).to_numpy())
        ids.append(batch.column(ROW_ID).to_numpy())
    return _Matches(np.concatenate(masks), np.concatenate(addresses), np.concatenate(ids))


_NONE = np.empty(0, np.uint64)


def _taken(
    dataset: lance.LanceDataset, scan: Scan, part: ScanPart, matches: _Matches
) -> Iterator[pa.RecordBatch]:
    """The rows that match, read by their ids."""
    matching = np.flatnonzero(matches.mask)
    window = _batch_rows(dataset, scan, part)
    for start in range(0, len(matching), window):
        chosen = matching[start : start + window]
        take = partial(_take, dataset, scan, part, matches.ids)
        for places, batch in in_parts(take, chosen):
            if scan.row_id:
                batch = batch.append_column(ROW_ID, pa.array(matches.ids[places]))
            if scan.row_address:
                batch = batch.append_column(ROW_ADDRESS, pa.array(matches.addresses[places]))
            yield batch.select([*(column.name for column in scan.columns), *_meta(scan)])


def _meta(scan: Scan) -> list[str]:
    """What a scan gives beside columns."""
    asked = {ROW_ID: scan.row_id, ROW_ADDRESS: scan.row_address}
    return [name for name, wanted in asked.items() if wanted]


def _take(
    dataset: lance.LanceDataset,
    scan: Scan,
    part: ScanPart,
    every: npt.NDArray[np.uint64],
    places: npt.NDArray[np.int64],
) -> pa.RecordBatch:
    """The rows whose ids are at these places."""
    ids = every[places]
    # With one of our own: Lance takes no rows of no columns.
    columns = {**_how(scan, dataset.schema)["columns"], _PLACE: "_rowaddr"}
    if not _reads_blobs(dataset.schema, scan):
        with noticing_full_dictionaries(len(ids)):
            table = dataset._take_rows(ids.tolist(), columns)
    else:
        # Taking rows knows no blob handling: it would give descriptors instead of bytes.
        table = dataset.scanner(
            columns=columns,
            filter=f"_rowid IN ({', '.join(map(str, ids.tolist()))})",
            fragments=[dataset.get_fragment(i) for i in part.fragment_ids],
            blob_handling="all_binary",
            scan_in_order=True,
        ).to_table()
    check_all_taken(dataset, table, len(ids))
    return pa.RecordBatch.from_arrays(
        [single(column) for column in table.columns], names=table.column_names
    )


_PLACE = "__place"


def columns_of(schema: pa.Schema, names: Sequence[str]) -> tuple[ScanColumn, ...]:
    """Columns by their paths, under their last names."""
    return tuple(
        ScanColumn(path if path in schema.names else path.rpartition(".")[2], path)
        for path in names
    )

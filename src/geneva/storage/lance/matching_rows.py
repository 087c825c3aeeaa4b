"""Which rows of a table satisfy a condition: asked of the whole table, or of rows that were read.

DataFusion decides in both cases. Over the whole table Lance reads the columns; over some fragments,
or some rows by id, the columns of the condition are read here, and it is computed in memory. That
is also how it is found out who is to blame for an error: rows that can be read, but not computed,
are the condition's fault. Indices are never asked: behind a BTREE Lance 14 may miss rows that an
update of another column moved, where row ids are stable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.errors import InvalidFilterError, SQLExecutionError, UnreadableFragmentsError
from geneva.model.rows import RowIds, RowSet
from geneva.model.sql import ROW_META, shown
from geneva.storage.lance.damage import Damaged, is_damage, reading
from geneva.storage.lance.dataset import FragmentFacts, rows_at
from geneva.storage.lance.expressions import (
    Condition,
    RowReader,
    computed,
    filter_message,
    projected,
    read_condition,
    single,
)
from geneva.storage.lance.fragments import is_blob
from geneva.storage.lance.pieces import in_parts

_ROWS_BY_ID = 2_048
"""Rows to read at once, by id."""
_QUERYABLE = ("_rowid", "_rowaddr")
"""What DataFusion can ask of a row beside its columns."""

_Rows = npt.NDArray[np.uint64]


def read_matching_rows(
    dataset: lance.LanceDataset, fragments: Sequence[FragmentFacts], condition: str
) -> dict[int, RowSet]:
    """Which live rows of each fragment satisfy a SQL condition (NULL counts as no)."""
    found = read_condition(dataset, condition)
    whole_table = len(fragments) == len(dataset.get_fragments())
    some = None if whole_table else [f.id for f in fragments]
    return rows_at(select_rows(dataset, found, "_rowaddr", some), fragments)


def select_rows(
    dataset: lance.LanceDataset,
    condition: Condition,
    what: str,
    fragments: Sequence[int] | None = None,
) -> Iterator[_Rows]:
    """The `_rowid` or `_rowaddr` of live rows that satisfy a condition, in some order."""
    meta = {path[0] for path in condition.paths if path[0] in ROW_META}
    if fragments is None and meta.issubset(_QUERYABLE) and not _has_blobs(dataset, condition):
        try:
            yield from [_ask(dataset, condition, what)]
            return
        except BaseException as error:
            if not is_damage(error):
                raise
            # Whose fault it is shows when the rows are read and computed one after the other.
    yield from _scan(dataset, condition, what, fragments)


def select_by_id(dataset: lance.LanceDataset, condition: Condition, ids: RowIds) -> list[RowIds]:
    """Those of `ids`, which all are there, that satisfy a condition."""
    reader = RowReader(dataset, [], [condition])
    found = []
    for start in range(0, len(ids), _ROWS_BY_ID):
        try:
            for some, (mask,) in in_parts(reader.take, ids[start : start + _ROWS_BY_ID]):
                found.append(some[np.asarray(mask)])
        except SQLExecutionError as error:
            raise _blamed(condition, error) from None
    return found


def _ask(dataset: lance.LanceDataset, condition: Condition, what: str) -> _Rows:
    # "IS TRUE" keeps Lance from answering out of an index.
    query = dataset.sql(f"SELECT {what} FROM dataset WHERE ({condition.in_table}\n) IS TRUE")
    batches = query.with_row_id(True).with_row_addr(True).build().to_batch_records()
    return np.concatenate([_NONE, *(batch.column(what).to_numpy() for batch in batches)])


_NONE: _Rows = np.empty(0, dtype=np.uint64)


def _scan(
    dataset: lance.LanceDataset,
    condition: Condition,
    what: str,
    fragments: Sequence[int] | None,
) -> Iterator[_Rows]:
    """Read the columns of a condition, and compute it batch by batch."""
    chosen = [f for f in dataset.get_fragments() if fragments is None or f.fragment_id in fragments]
    if not chosen:
        return
    batches = reading(condition_batches(dataset, condition, chosen))
    while True:
        try:
            batch = next(batches, None)
        except Damaged as damage:
            raise _unreadable(dataset, condition, chosen, damage) from damage
        if batch is None:
            return
        yield batch.column(what).to_numpy()[condition_mask(condition, batch)]


def condition_mask(condition: Condition, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Which rows of a batch that `condition_batches` gave satisfy the condition."""
    columns = [single(batch.column(f"c{i}")) for i in range(len(condition.paths))]
    addresses = batch.column("_rowaddr").to_numpy()
    try:
        return np.asarray(computed(condition, columns, addresses, "address"))
    except SQLExecutionError as error:
        raise _blamed(condition, error) from None


def condition_batches(
    dataset: lance.LanceDataset, condition: Condition, fragments: Sequence[Any], **place: Any
) -> Iterator[pa.RecordBatch]:
    """What a condition is about, of the live rows of fragments, with ids and addresses.

    `place`: `offset` and `limit`, to read only some of the rows.
    """
    projection = {"row": "_rowid"}
    for i, path in enumerate(condition.paths):
        projection[f"c{i}"] = path[0] if path[0] in ROW_META else projected(path)
    scanner = dataset.scanner(
        columns=projection,
        fragments=list(fragments),
        with_row_id=True,
        with_row_address=True,
        blob_handling="all_binary" if _has_blobs(dataset, condition) else None,
        scan_in_order=True,
        **place,
    )
    yield from scanner.to_batches()


def _has_blobs(dataset: lance.LanceDataset, condition: Condition) -> bool:
    """Whether a condition is about blobs, of which a query sees descriptors, not bytes."""
    schema = dataset.schema
    return any(p[0] in schema.names and is_blob(schema.field(p[0])) for p in condition.paths)


def _blamed(condition: Condition, error: SQLExecutionError) -> InvalidFilterError:
    reason = str(error).partition(" can't be computed ")[2]
    return InvalidFilterError(filter_message(condition.sql, f"it can't be computed {reason}"))


def _unreadable(
    dataset: lance.LanceDataset,
    condition: Condition,
    fragments: Sequence[Any],
    damage: Damaged,
) -> UnreadableFragmentsError:
    """The error that names the fragments whose files can't be read."""
    bad = []
    for fragment in fragments:
        try:
            for _ in reading(condition_batches(dataset, condition, [fragment])):
                pass
        except Damaged as found:
            bad.append(int(fragment.fragment_id))
            damage = found
    columns = ", ".join(".".join(path) for path in condition.paths)
    return UnreadableFragmentsError(
        f"Data of column {columns} can't be read in fragments {bad} of {dataset.uri} at version "
        f"{dataset.version}, so that it is not known which rows satisfy {shown(condition.sql)}: "
        f"{damage}. The clause is not at fault. Restore the files, or delete the "
        "fragments' rows.",
        tuple(bad),
    )

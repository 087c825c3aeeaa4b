"""Ids of rows: those that satisfy a condition, and arithmetic on sets of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.errors import InvalidFilterError
from geneva.model.addresses import fragments_of, offsets_of
from geneva.model.rows import Mask, RowIds
from geneva.storage.lance.dataset import filter_message

_MAX_IN_LIST = 4_096
"""Row ids in one SQL list: the parser takes longer than the search."""
_SPARSE = 64
"""A fragment is scanned when one in this many of its rows is asked for, else searched by id."""
_DENSE = 4
"""The whole table is scanned when one in this many of its rows is asked for."""
NO_IDS: RowIds = np.empty(0, dtype=np.uint64)
NO_IDS.flags.writeable = False


def read_row_ids(dataset: lance.LanceDataset, where: str | None) -> RowIds:
    """The ids of live rows that satisfy `where`; row addresses if the table has no stable ids."""
    if where is None:
        return scan_ids(dataset)
    return _filtered(
        where,
        lambda condition: scan_ids(dataset, condition),
        lambda condition: _query_ids(dataset, condition),
    )


def read_matching_ids(dataset: lance.LanceDataset, ids: RowIds, where: str | None) -> RowIds:
    """Those of `ids` that are live and satisfy `where`; reads few other rows."""
    if where is None:
        is_dense = len(ids) * _DENSE >= dataset.count_rows()
        return common_ids(ids, scan_ids(dataset)) if is_dense else _locate(dataset, ids)[0]
    return _filtered(
        where,
        lambda condition: _search(dataset, ids, condition),
        lambda condition: _query_some(dataset, ids, condition),
    )


def scan_ids(
    dataset: lance.LanceDataset,
    condition: str | None = None,
    fragment_ids: Sequence[int] | None = None,
) -> RowIds:
    """Ids of live rows, ascending; of some fragments, or of all."""
    if fragment_ids is not None and not fragment_ids:
        return NO_IDS
    scanner = dataset.scanner(
        columns=[],
        filter=condition,
        with_row_id=True,
        fragments=_handles(dataset, fragment_ids) if fragment_ids is not None else None,
    )
    return sorted_ids([batch.column("_rowid").to_numpy() for batch in scanner.to_batches()])


def _handles(dataset: lance.LanceDataset, fragment_ids: Sequence[int]) -> list[Any] | None:
    wanted = frozenset(fragment_ids)
    every = dataset.get_fragments()
    chosen = [fragment for fragment in every if fragment.fragment_id in wanted]
    return None if len(chosen) == len(every) else chosen


def _query_ids(dataset: lance.LanceDataset, condition: str) -> RowIds:
    query = dataset.sql(f"SELECT _rowid FROM dataset WHERE {condition}").with_row_id(True)
    return sorted_ids([b.column("_rowid").to_numpy() for b in query.build().to_batch_records()])


def _filtered(where: str, scan: Callable[[str], RowIds], query: Callable[[str], RowIds]) -> RowIds:
    """Rows by Lance's own planner, or by its DataFusion front end, which knows more SQL."""
    condition = f"({where}\n)"  # In parentheses: Lance ignores what follows what it can parse.
    try:
        return scan(condition)
    except (ValueError, OSError) as error:
        refusal = error
    try:
        return query(condition)
    except (ValueError, OSError) as error:
        reason = error if "not supported SQL in lance" in str(refusal) else refusal
        raise InvalidFilterError(filter_message(where, reason)) from error


def _locate(dataset: lance.LanceDataset, ids: RowIds) -> tuple[RowIds, npt.NDArray[np.int64]]:
    """Those of `ids` that are live, and the fragments they are in."""
    if not len(ids):
        return NO_IDS, np.empty(0, dtype=np.int64)
    table = dataset._take_rows(pa.array(ids), ["_rowid", "_rowaddr"])
    owners = fragments_of(table.column("_rowaddr").to_numpy())
    return table.column("_rowid").to_numpy(), owners


def _search(dataset: lance.LanceDataset, ids: RowIds, condition: str) -> RowIds:
    if len(ids) * _DENSE >= dataset.count_rows():
        return common_ids(ids, scan_ids(dataset, condition))
    # A wrong condition is wrong whatever the rows, and its message should name no ids.
    dataset.scanner(columns=[], filter=condition, with_row_id=True).explain_plan()
    live, owners = _locate(dataset, ids)
    fragments, counts = np.unique(owners, return_counts=True)
    rows = [dataset.get_fragment(i).physical_rows for i in fragments.tolist()]
    dense = fragments[counts * _SPARSE >= np.array(rows, dtype=np.int64)]
    parts = [scan_ids(dataset, condition, dense.tolist())]
    for some in sql_lists(live[~np.isin(owners, dense)]):
        parts.append(scan_ids(dataset, f"({some}) AND {condition}"))
    return common_ids(ids, sorted_ids(parts))


def _query_some(dataset: lance.LanceDataset, ids: RowIds, condition: str) -> RowIds:
    _query_ids(dataset, f"{condition} LIMIT 0")
    if len(ids) * _SPARSE >= dataset.count_rows():
        return common_ids(ids, _query_ids(dataset, condition))
    found = [_query_ids(dataset, f"({some}) AND {condition}") for some in sql_lists(ids)]
    return common_ids(ids, sorted_ids(found))


def sql_lists(ids: RowIds) -> Iterator[str]:
    """Conditions that name the ids, a bounded number each."""
    for at in range(0, len(ids), _MAX_IN_LIST):
        yield f"_rowid IN ({', '.join(map(str, ids[at : at + _MAX_IN_LIST].tolist()))})"


def sorted_ids(parts: Sequence[RowIds]) -> RowIds:
    """The ids of all parts, ascending, each once."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return NO_IDS
    ids = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if bool((ids[1:] > ids[:-1]).all()):
        return ids
    # Not np.unique, which hashes. The stable sort takes no time for a few ascending runs.
    ids = np.sort(ids, kind="stable")
    return ids[np.append(True, ids[1:] != ids[:-1])]


def among(ids: RowIds, others: RowIds) -> Mask:
    """Which of `ids` are in `others`."""
    if not len(ids) or not len(others):
        return np.zeros(len(ids), dtype=np.bool_)
    first, last = min(ids[0], others[0]), max(ids[-1], others[-1])
    if last - first < 8 * (len(ids) + len(others)):
        # Ids mostly are numbers without gaps, and then a table of flags beats every search.
        flags = np.zeros(int(last - first) + 1, dtype=np.bool_)
        flags[others - first] = True
        return flags[ids - first]
    places = np.searchsorted(others, ids)
    places[places == len(others)] = 0
    return others[places] == ids


def ids_minus(ids: RowIds, others: RowIds) -> RowIds:
    """The ids that are not among the others."""
    return NO_IDS if np.array_equal(ids, others) else ids[~among(ids, others)]


def common_ids(ids: RowIds, others: RowIds) -> RowIds:
    """The ids that are among the others too."""
    return ids if np.array_equal(ids, others) else ids[among(ids, others)]


def row_ids_at(dataset: lance.LanceDataset, fragment_id: int) -> dict[int, int]:
    """The stable ids of a fragment's live rows, by physical offset."""
    fragment = dataset.get_fragment(fragment_id)
    if fragment is None:
        return {}
    scanner = dataset.scanner(
        columns=[], fragments=[fragment], with_row_id=True, with_row_address=True
    )
    table = scanner.to_table()
    offsets = offsets_of(table["_rowaddr"].to_numpy()).tolist()
    return dict(zip(offsets, table["_rowid"].to_pylist(), strict=True))

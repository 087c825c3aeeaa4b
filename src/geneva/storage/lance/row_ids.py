"""Ids of rows: those that satisfy a condition, and arithmetic on sets of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from geneva.model.addresses import offsets_of
from geneva.model.rows import Mask, RowIds
from geneva.storage.lance.expressions import read_condition
from geneva.storage.lance.matching_rows import select_by_id, select_rows

_MAX_IN_LIST = 4_096
"""Row ids in one SQL list: the parser takes longer than the search."""
_DENSE = 4
"""The whole table is scanned when one in this many of its rows is asked for."""
NO_IDS: RowIds = np.empty(0, dtype=np.uint64)
NO_IDS.flags.writeable = False


def read_row_ids(
    dataset: lance.LanceDataset, where: str | None, *, without: Collection[int] = ()
) -> RowIds:
    """The ids of live rows that satisfy `where`; row addresses if the table has no stable ids.

    `without`: fragments that are not looked at.
    """
    some = None
    if without:
        some = [i for f in dataset.get_fragments() if (i := f.fragment_id) not in without]
    if where is None:
        return scan_ids(dataset, None, some)
    return sorted_ids(list(select_rows(dataset, read_condition(dataset, where), "_rowid", some)))


def read_matching_ids(dataset: lance.LanceDataset, ids: RowIds, where: str | None) -> RowIds:
    """Those of `ids` that are live and satisfy `where`; reads few other rows."""
    is_dense = len(ids) * _DENSE >= dataset.count_rows()
    if where is None:
        return common_ids(ids, scan_ids(dataset)) if is_dense else _locate(dataset, ids)
    condition = read_condition(dataset, where)
    if is_dense:
        found = list(select_rows(dataset, condition, "_rowid"))
        return common_ids(ids, sorted_ids(found))
    return common_ids(ids, sorted_ids(select_by_id(dataset, condition, _locate(dataset, ids))))


def scan_ids(
    dataset: lance.LanceDataset,
    condition: str | None = None,
    fragment_ids: Sequence[int] | None = None,
) -> RowIds:
    """Ids of live rows, ascending; of some fragments, or of all.

    The condition is for Lance's own planner: none that a user wrote.
    """
    if fragment_ids is not None and not fragment_ids:
        return NO_IDS
    scanner = dataset.scanner(
        columns=[],
        filter=condition,
        with_row_id=True,
        fragments=_handles(dataset, fragment_ids) if fragment_ids is not None else None,
        use_scalar_index=False,  # Lance 14 may miss rows that an update moved.
    )
    return sorted_ids([batch.column("_rowid").to_numpy() for batch in scanner.to_batches()])


def _handles(dataset: lance.LanceDataset, fragment_ids: Sequence[int]) -> list[Any] | None:
    wanted = frozenset(fragment_ids)
    every = dataset.get_fragments()
    chosen = [fragment for fragment in every if fragment.fragment_id in wanted]
    return None if len(chosen) == len(every) else chosen


def _locate(dataset: lance.LanceDataset, ids: RowIds) -> RowIds:
    """Those of `ids` that are live."""
    if not len(ids):
        return NO_IDS
    table = dataset._take_rows(pa.array(ids), ["_rowid"])
    found: RowIds = table.column("_rowid").to_numpy()
    return found


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

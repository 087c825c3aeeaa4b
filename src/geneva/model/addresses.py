"""The codec of row addresses: a fragment id in the high 32 bits, a physical offset in the low.

Lance calls the column of them `_rowaddr`. An address names a row at one version of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from geneva.model.rows import Offsets

Addresses: TypeAlias = npt.NDArray[np.uint64]

_OFFSET_BITS = 32
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


def row_address(fragment_id: int, offset: int) -> int:
    """The address of one row."""
    return (fragment_id << _OFFSET_BITS) | offset


def fragment_of(address: int) -> int:
    """The id of the fragment that the row at an address is in."""
    return address >> _OFFSET_BITS


def offset_of(address: int) -> int:
    """The physical offset of the row at an address, in its fragment."""
    return address & _OFFSET_MASK


def row_addresses(fragment_id: int, offsets: Offsets) -> Addresses:
    """The addresses of rows of one fragment."""
    return offsets.astype(np.uint64) | np.uint64(row_address(fragment_id, 0))


def fragments_of(addresses: Addresses) -> npt.NDArray[np.int64]:
    """The ids of the fragments that the rows are in."""
    return (addresses >> np.uint64(_OFFSET_BITS)).astype(np.int64)


def offsets_of(addresses: Addresses) -> Offsets:
    """The physical offsets of the rows, each in its fragment."""
    return (addresses & np.uint64(_OFFSET_MASK)).astype(np.int64)


def split_by_fragment(addresses: Addresses) -> Iterator[tuple[int, Offsets]]:
    """Cut addresses into runs of one fragment each: its id and the offsets."""
    owners, offsets = fragments_of(addresses), offsets_of(addresses)
    cuts = np.flatnonzero(np.diff(owners)) + 1
    for run in np.split(np.arange(len(addresses)), cuts):
        if len(run):
            yield int(owners[run[0]]), offsets[run]

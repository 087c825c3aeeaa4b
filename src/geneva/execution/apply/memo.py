"""Results by the digest of their inputs, for functions that say `memoize=True`.

One memo per process and computation: tasks that run in the same worker share it. It forgets the
oldest results when it has grown too large; then they are computed again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.model.digests import Digests
from geneva.storage.lance.pieces import concat_batches

_MAX_BYTES = 128 * 1024 * 1024
_KEPT = 4


class Memo:
    """Results of one computation."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        """Know nothing yet."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._places: dict[int, tuple[int, int]] = {}
        self._batches: dict[int, pa.RecordBatch] = {}
        self._bytes = 0
        self._next = 0

    def split(
        self, digests: Digests
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], pa.RecordBatch | None]:
        """Which rows are to be computed (each input once), and what is known of all of them.

        Returns the rows to compute; for every row its place in what is known, followed by what
        will be computed; and what is known, None when that is nothing.
        """
        with self._lock:
            unique, first, back = np.unique(digests, return_index=True, return_inverse=True)
            places = [self._places.get(int(digest)) for digest in unique]
            found = [place for place in places if place is not None]
            taken = [self._batches[batch].slice(row, 1) for batch, row in found]
        is_known = np.array([place is not None for place in places], dtype=np.bool_)
        known, to_compute = np.flatnonzero(is_known), np.flatnonzero(~is_known)
        # In the order of the rows, as everything that is computed.
        to_compute = to_compute[np.argsort(first[to_compute], kind="stable")]
        place_of = np.empty(len(unique), dtype=np.int64)
        place_of[known] = np.arange(len(known))
        place_of[to_compute] = len(known) + np.arange(len(to_compute))
        return first[to_compute], place_of[back], concat_batches(taken) if taken else None

    def add(self, digests: Digests, results: pa.RecordBatch) -> None:
        """Remember results."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._batches[number] = results
            self._bytes += results.nbytes
            for row, digest in enumerate(digests.tolist()):
                self._places[digest] = (number, row)
            while self._bytes > self._max_bytes and len(self._batches) > 1:
                oldest = next(iter(self._batches))
                self._bytes -= self._batches.pop(oldest).nbytes
                self._places = {d: p for d, p in self._places.items() if p[0] != oldest}


_MEMOS: OrderedDict[tuple[str, str], Memo] = OrderedDict()
_LOCK = threading.Lock()


def shared_memo(job_id: str, computation_id: str) -> Memo:
    """The memo of a computation in this process, for one job."""
    with _LOCK:
        memo = _MEMOS.setdefault((job_id, computation_id), Memo())
        _MEMOS.move_to_end((job_id, computation_id))
        while len(_MEMOS) > _KEPT:
            _MEMOS.popitem(last=False)
    return memo

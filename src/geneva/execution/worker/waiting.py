"""Rows that were read and not computed yet: batches are cut out of them, over window borders."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from geneva.execution.worker.records import Window
from geneva.model.rows import Offsets, RowRange
from geneva.storage.lance.pieces import Piece, concat_inputs, merged


class WaitingRows:
    """Takes windows that follow each other, and gives the same rows in windows of other sizes."""

    def __init__(self) -> None:
        """Start empty."""
        self._windows: deque[Window] = deque()
        self._taken = 0
        """Rows of the first window that are gone."""
        self._rows = 0

    def __len__(self) -> int:
        """How many rows wait."""
        return self._rows

    def add(self, window: Window) -> None:
        """Take a window that begins where the last one ended."""
        self._windows.append(window)
        self._rows += len(window.offsets)

    def first(self, rows: int) -> Offsets:
        """The first rows that wait."""
        offsets = self._windows[0].offsets[self._taken : self._taken + rows]
        if len(offsets) == min(rows, self._rows):
            return offsets
        others = [window.offsets for window in self._windows]
        return np.concatenate(others)[self._taken : self._taken + rows]

    def all(self) -> Window:
        """All rows that wait, as one window. They wait on."""
        rest = self.take(self._rows)
        self.add(rest)
        return rest

    def take(self, rows: int) -> Window:
        """The first rows that wait, as one window; the arrays are copied only to be joined."""
        self._rows -= rows
        taken: list[Window] = []
        while rows:
            window = self._windows[0]
            end = min(self._taken + rows, len(window.offsets))
            taken.append(_cut(window, self._taken, end))
            rows -= end - self._taken
            self._taken = end
            if end == len(window.offsets):
                self._windows.popleft()
                self._taken = 0
        return taken[0] if len(taken) == 1 else _joined(taken)


def _cut(window: Window, first: int, last: int) -> Window:
    """Some rows of a window. Reading is the work of its first ones."""
    if first == 0 and last == len(window.offsets):
        return window
    start = int(window.offsets[first - 1]) + 1 if first else window.rows.start
    is_end = last == len(window.offsets)
    rows = RowRange(start, window.rows.end if is_end else int(window.offsets[last - 1]) + 1)
    return Window(
        rows=rows,
        offsets=window.offsets[first:last],
        inputs=window.inputs.slice(first, last - first),
        known=cut_piece(window.known, rows),
        seconds=0.0 if first else window.seconds,
        digests=window.digests[first:last] if window.digests is not None else None,
    )


def cut_piece(piece: Piece | None, rows: RowRange) -> Piece | None:
    """A piece between two offsets; None where nothing is."""
    if piece is None:
        return None
    first, last = np.searchsorted(piece.offsets, (rows.start, rows.end)).tolist()
    if first == last:
        return None
    return Piece(
        piece.offsets[first:last],
        piece.values.slice(first, last - first),
        piece.digests[first:last] if piece.digests is not None else None,
    )


def _joined(windows: list[Window]) -> Window:
    known = [window.known for window in windows if window.known is not None]
    digests = [window.digests for window in windows if window.digests is not None]
    return replace(
        windows[0],
        rows=RowRange(windows[0].rows.start, windows[-1].rows.end),
        offsets=np.concatenate([window.offsets for window in windows]),
        inputs=concat_inputs([window.inputs for window in windows]),
        known=merged(known) if known else None,
        seconds=sum(window.seconds for window in windows),
        digests=np.concatenate(digests) if digests else None,
    )

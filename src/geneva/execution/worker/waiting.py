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
        if rows <= len(self._windows[0].offsets):
            return self._windows[0].offsets[:rows]
        return np.concatenate([window.offsets for window in self._windows])[:rows]

    def all(self) -> Window:
        """All rows that wait, as one window. They wait on."""
        if len(self._windows) > 1:
            self._windows = deque([_joined([*self._windows])])
        return self._windows[0]

    def take(self, rows: int) -> Window:
        """The first rows that wait, as one window; the arrays are copied only to be joined."""
        self._rows -= rows
        taken: list[Window] = []
        while rows:
            window = self._windows.popleft()
            if len(window.offsets) > rows:
                window, rest = _cut(window, rows)
                self._windows.appendleft(rest)
            taken.append(window)
            rows -= len(window.offsets)
        return taken[0] if len(taken) == 1 else _joined(taken)


def _cut(window: Window, rows: int) -> tuple[Window, Window]:
    """The first rows of a window, and the others. Reading is the work of the first ones."""
    end = int(window.offsets[rows - 1]) + 1
    before, behind = _cut_piece(window.known, end)
    digests = window.digests
    first = Window(
        rows=RowRange(window.rows.start, end),
        offsets=window.offsets[:rows],
        inputs=window.inputs.slice(0, rows),
        known=before,
        seconds=window.seconds,
        digests=digests[:rows] if digests is not None else None,
    )
    rest = Window(
        rows=RowRange(end, window.rows.end),
        offsets=window.offsets[rows:],
        inputs=window.inputs.slice(rows),
        known=behind,
        digests=digests[rows:] if digests is not None else None,
    )
    return first, rest


def _cut_piece(piece: Piece | None, end: int) -> tuple[Piece | None, Piece | None]:
    """A piece before an offset, and from there on; None where nothing is."""
    if piece is None:
        return None, None
    at = int(np.searchsorted(piece.offsets, end))
    if at == 0 or at == len(piece.offsets):
        return (piece, None) if at else (None, piece)
    digests = piece.digests
    return (
        Piece(
            piece.offsets[:at],
            piece.values.slice(0, at),
            digests[:at] if digests is not None else None,
        ),
        Piece(
            piece.offsets[at:],
            piece.values.slice(at),
            digests[at:] if digests is not None else None,
        ),
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

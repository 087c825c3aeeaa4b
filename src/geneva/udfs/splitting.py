"""Cutting texts into pieces of a size that models take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SEPARATORS = ("\n\n", "\n", ". ", " ")
"""Where a text is cut first: paragraphs, lines, sentences, words."""


def split_text(
    text: str, size: int = 2048, overlap: int = 200, separators: Sequence[str] = SEPARATORS
) -> list[str]:
    """Cut a text into pieces of at most `size` characters, the next beginning `overlap` before.

    A cut is made after the last separator of a piece's second half, the coarsest that is there. All
    of the text is in the pieces.
    """
    if not 0 <= overlap < size:
        raise ValueError(f"overlap={overlap} must be less than size={size}, and not negative.")
    return list(_pieces(text, size, overlap, separators))


def _pieces(text: str, size: int, overlap: int, separators: Sequence[str]) -> Iterator[str]:
    start = 0
    while len(text) - start > size:
        end = _cut(text, start, start + size, separators)
        yield text[start:end]
        start = max(end - overlap, start + 1)
    if text[start:].strip():
        yield text[start:]


def _cut(text: str, start: int, end: int, separators: Sequence[str]) -> int:
    middle = start + (end - start) // 2
    for separator in separators:
        found = text.rfind(separator, middle, end)
        if found >= 0:
            return found + len(separator)
    return end

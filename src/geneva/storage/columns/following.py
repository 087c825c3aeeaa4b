"""Where columns have gone since their field ids were written down, by the schemas since then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from geneva.storage.lance.dataset import nodes_of
from geneva.storage.lance.history import SchemaSeen

Place: TypeAlias = tuple[str, int | None]
"""What a column is called, and its field id; None: there is no such column."""


def followed(places: Iterable[Place], schemas: Sequence[SchemaSeen]) -> tuple[str, ...]:
    """What columns are called in the last of the schemas, which follow one another.

    From one to the next, a column is the field with the same id, under whatever name. Where that
    is gone, and a new field stands in its place, it was cast. Where none does, it was dropped: then
    it is the next one that gets its name. Where the table was overwritten, ids begin anew: it is
    the one that has its name then.
    """
    now = list(places)
    for before, seen in zip((None, *schemas), schemas, strict=False):
        nodes = nodes_of(seen.schema)
        names: dict[int | None, str] = {node: path for path, node in nodes.items()}
        if seen.overwrote:
            names = {}
        elif before is not None:
            names |= {old: names[new] for old, new in _cast(before.schema, seen.schema).items()}
        now = [(name := names.get(node, path), nodes.get(name)) for path, node in now]
    return tuple(path for path, _ in now)


def _cast(before: Any, after: Any) -> dict[int, int]:
    """The ids of fields that one commit has cast, and those that they have got."""
    known = {*nodes_of(before).values()}
    left = {*nodes_of(after).values()}
    pairs = _pairs(before.fields(), after.fields())
    return {old: new for old, new in pairs if old not in left and new not in known}


def _pairs(before: Sequence[Any], after: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The ids of fields that stand in the same places, as long as there are as many."""
    if len(before) != len(after):
        return
    for old, new in zip(before, after, strict=True):
        yield old.id(), new.id()
        yield from _pairs(old.children(), new.children())

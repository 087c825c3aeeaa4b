"""The computed columns of a table as a graph: what each reads, and so in which order they go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

Reads: TypeAlias = Mapping[str, Iterable[str]]
"""Per computed column: the column paths that it reads."""


def computed_inputs(column: str, reads: Reads) -> tuple[str, ...]:
    """The computed columns that a column reads itself, each once."""
    tops = (path if path in reads else path.split(".")[0] for path in reads[column])
    return tuple(dict.fromkeys(top for top in tops if top in reads))


def upstream_of(column: str, reads: Reads) -> tuple[str, ...]:
    """The computed columns that a column depends on, near and far, inputs before what reads them.

    There must be no cycle among them.
    """
    needed: dict[str, tuple[str, ...]] = {}
    waiting = [column]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed[name] = computed_inputs(name, reads)
            waiting.extend(needed[name])
    order = TopologicalSorter(needed).static_order()
    return tuple(name for name in order if name != column)


def find_cycle(reads: Reads) -> tuple[str, ...] | None:
    """Columns that depend on each other, the first one again at the end; None: there are none."""
    graph = {name: computed_inputs(name, reads) for name in reads}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # Named by who is read; a reader of the message follows who reads.
        return tuple(reversed(error.args[1]))
    return None

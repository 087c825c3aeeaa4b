"""What is computed as a graph: what each column and view reads, and so in which order they go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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


# ------------------------------------------------------------------ all tables of a database


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A table or view of a database, and what of it is computed."""

    table: str
    reads: Reads = field(default_factory=dict)
    """Per computed column, but for those of a view's query: the column paths that it reads."""
    filled_by: Mapping[str, str] = field(default_factory=dict)
    """Per computed column what fills it: columns that one call fills have the same."""
    is_view: bool = False
    source: str | None = None
    """The table that the rows of a view are made from."""
    source_paths: tuple[str, ...] = ()
    """The columns of that table that the view reads."""


Key: TypeAlias = tuple[str, str | None]
"""What names a step: its table, and the first of its columns; None: the rows of a view."""


@dataclass(frozen=True, slots=True)
class Step:
    """One job of many: it fills columns of a table that go together, or the rows of a view."""

    table: str
    columns: tuple[str, ...] = ()
    """Empty: it is the refresh of a view."""
    inputs: tuple[Key, ...] = ()
    """The steps whose results it reads."""
    source: str | None = None
    """Of a view: the table that its rows are made from. It notes every new version of that."""

    @property
    def key(self) -> Key:
        """What names it."""
        return self.table, self.columns[0] if self.columns else None

    def __str__(self) -> str:
        """Say what it fills."""
        if not self.columns:
            return f"view {self.table!r}"
        names = ", ".join(map(repr, self.columns))
        return f"{'columns' if len(self.columns) > 1 else 'column'} {names} of {self.table!r}"


def steps_of(nodes: Iterable[Node]) -> tuple[Step, ...]:
    """All that brings tables and views up to date: sources before what is made from them.

    The steps of views that are made from each other read nothing: they can't be refreshed.
    """
    every = {node.table: node for node in nodes}
    before = {
        name: every[node.source]
        for name, node in every.items()
        if node.source is not None and node.source in every and not _is_in_a_circle(name, every)
    }
    sources = {name: [before[name].table] if name in before else [] for name in every}
    order = TopologicalSorter(sources).static_order()
    return tuple(s for table in order for s in _own_steps(every[table], before.get(table)))


def _is_in_a_circle(view: str, every: Mapping[str, Node]) -> bool:
    """Whether the sources of a view lead back to it."""
    seen: set[str] = set()
    table: str | None = view
    while table is not None and table in every and table not in seen:
        seen.add(table)
        table = every[table].source
    return table == view


def _own_steps(node: Node, source: Node | None) -> Iterator[Step]:
    """The steps of one table: first its rows, which are made from the source, then its columns."""
    rows: tuple[Key, ...] = ()
    if node.is_view:
        yield Step(node.table, inputs=_read_of_source(node, source), source=node.source)
        rows = ((node.table, None),)
    leads = _leads(node)
    done: set[str] = set()
    own = {column: computed_inputs(column, node.reads) for column in node.reads}
    for column in TopologicalSorter(own).static_order():
        lead = leads[column]
        if lead in done:
            continue
        done.add(lead)
        together = tuple(name for name in node.reads if leads[name] == lead)
        read = dict.fromkeys((node.table, leads[name]) for name in own[column])
        yield Step(node.table, together, (*rows, *read))


def _leads(node: Node) -> dict[str, str]:
    """Per computed column the first of those that are filled with it."""
    first: dict[str, str] = {}
    for column in node.reads:
        first.setdefault(node.filled_by[column], column)
    return {column: first[node.filled_by[column]] for column in node.reads}


def _read_of_source(view: Node, source: Node | None) -> tuple[Key, ...]:
    """The steps of a view's source whose results its rows are made from."""
    if source is None:
        return ()
    rows: tuple[Key, ...] = ((source.table, None),) if source.is_view else ()
    read = computed_inputs("", {**source.reads, "": view.source_paths})
    leads = _leads(source)
    return (*rows, *dict.fromkeys((source.table, leads[name]) for name in read))

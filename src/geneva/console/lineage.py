"""The lineage graph: tables, their columns and the views made of them, laid out and drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from geneva.console.layout import cut, path
from geneva.console.queries import TableInfo
from geneva.model.view_query import MAKES_ROWS, ColumnKind
from geneva.render.html import Child, Html, tag
from geneva.render.text import count

_BOX, _ROW, _GAP, _PAD, _HEAD = 172, 30, 64, 14, 36
_LETTERS = 20
_LANE = 6
_FITS = 1_700
"""A picture of up to this width is drawn smaller where it doesn't fit; else it is scrolled."""
_BETWEEN = 24
_LAYER_GAP = 84


@dataclass(frozen=True, slots=True)
class Column:
    """A column that something is made of, or that is made of something."""

    name: str
    how: str
    """The UDF's name, `sql` or `copy`; empty for a column that users write."""
    inputs: tuple[tuple[str, str], ...] = ()
    """Table and column of each input."""


@dataclass(frozen=True, slots=True)
class Group:
    """A table or view with the columns of the graph."""

    name: str
    kind: str
    sources: tuple[str, ...]
    columns: tuple[Column, ...]
    others: int
    """Columns that nothing is made of, and that are made of nothing."""
    linked: bool = True


@dataclass(frozen=True, slots=True)
class _Placed:
    group: Group
    x: float
    y: float
    width: float
    height: float
    columns: Mapping[str, tuple[float, float]]
    lanes: Mapping[str, float]
    """Height at which a column's edges pass under the columns that stand behind it."""


def lineage(tables: Iterable[TableInfo]) -> list[Group]:
    """The graph of a database's tables: those that are used or computed, and views."""
    every = {table.name: table for table in tables if table.trouble is None}
    made = {name: _made_columns(table) for name, table in every.items()}
    used = {pair for columns in made.values() for c in columns for pair in c.inputs}
    groups = [_group(table, made[name], used) for name, table in every.items()]
    missing = {source for group in groups for source in group.sources} - set(every)
    for name in sorted(missing):
        own = sorted(column for table, column in used if table == name)
        columns = tuple(Column(column, "") for column in own)
        groups.append(Group(name, "elsewhere", (), columns, 0, linked=False))
    return groups


def _made_columns(table: TableInfo) -> tuple[Column, ...]:
    own = {
        name: Column(name, d.udf_name, tuple((table.name, _top(i)) for i in d.inputs))
        for name, d in table.computed.items()
    }
    if table.view is not None:
        source = table.view.base_table if table.source_is_here else f"{table.view.base_table} ↗"
        for c in table.view.columns:
            inputs = tuple(dict.fromkeys((source, _top(path)) for path in c.inputs))
            how = {ColumnKind.COLUMN: "copy", ColumnKind.SQL: "sql"}.get(c.kind, c.udf_name)
            # A function that makes rows is no column: one may have its name.
            name = f"{c.name}()" if c.kind in MAKES_ROWS else c.name
            own[name] = Column(name, how, inputs)
    return tuple(own.values())


def _group(table: TableInfo, made: tuple[Column, ...], used: set[tuple[str, str]]) -> Group:
    names = {column.name for column in made}
    plain = [n for n in table.columns if n not in names and (table.name, n) in used]
    columns = (*(Column(n, "") for n in plain), *made)
    sources: tuple[str, ...] = ()
    if table.view is not None:
        here = table.source_is_here
        sources = (table.view.base_table if here else f"{table.view.base_table} ↗",)
    others = len(set(table.columns) - {column.name for column in columns})
    return Group(table.name, "view" if table.view else "table", sources, columns, others)


def _top(column: str) -> str:
    return column.split(".")[0]


# ------------------------------------------------------------------------------------- picture


def draw(groups: list[Group]) -> Html:
    """The graph as an SVG picture with links; its text stands beside it (`as_text`)."""
    placed = _place(groups)
    at = {(p.group.name, c): (p, spot) for p in placed for c, spot in p.columns.items()}
    width = max((p.x + p.width for p in placed), default=0) + _PAD
    height = max((p.y + p.height for p in placed), default=0) + _PAD
    edges = [
        _edge(*at[source], source[1], p.columns[column.name])
        for p in placed
        for column in p.group.columns
        for source in column.inputs
        if source in at
    ]
    return tag(
        "svg",
        [_draw_box(p) for p in placed],
        tag("g", edges, aria_hidden="true"),
        [_draw_columns(p) for p in placed],
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role="group",
        aria_label="Lineage graph; the same stands as a list below",
        class_="lineage fits" if width <= _FITS else "lineage",
    )


def _place(groups: list[Group]) -> list[_Placed]:
    layers: dict[int, list[Group]] = {}
    by_name = {group.name: group for group in groups}
    for group in groups:
        layers.setdefault(_layer(group, by_name), []).append(group)
    far = _reaching_far(groups)
    placed: list[_Placed] = []
    heights: dict[str, float] = {}
    x = float(_PAD)
    for number in sorted(layers):
        y, widest = float(_PAD), 0.0
        # Beside what it is made of, so that edges cross as little as an easy rule can manage.
        ordered = sorted(
            layers[number], key=lambda g: min((heights.get(s, 0.0) for s in g.sources), default=0.0)
        )
        for group in ordered:
            box = _place_group(group, x, y, far)
            placed.append(box)
            heights[group.name] = y
            y += box.height + _BETWEEN
            widest = max(widest, box.width)
        x += widest + _LAYER_GAP
    return placed


def _layer(group: Group, by_name: Mapping[str, Group], seen: frozenset[str] = frozenset()) -> int:
    if group.name in seen:
        return 0
    above = [by_name[s] for s in group.sources if s in by_name]
    return max((1 + _layer(g, by_name, seen | {group.name}) for g in above), default=0)


def _place_group(group: Group, x: float, y: float, far: set[tuple[str, str]]) -> _Placed:
    depths = _depths(group)
    filled: dict[int, int] = {}
    spots = {}
    for column in group.columns:
        depth = depths[column.name]
        spots[column.name] = (
            x + _PAD + depth * (_BOX + _GAP),
            y + _HEAD + filled.get(depth, 0) * (_ROW + 8),
        )
        filled[depth] = filled.get(depth, 0) + 1
    steps = max(depths.values(), default=0) + 1
    width = 2 * _PAD + steps * _BOX + (steps - 1) * _GAP
    rows = max(filled.values(), default=0)
    under = y + _HEAD + rows * (_ROW + 8)
    early = [
        c.name for c in group.columns if depths[c.name] < steps - 1 and (group.name, c.name) in far
    ]
    lanes = {name: under + 4 + number * _LANE for number, name in enumerate(early)}
    note = 20 if group.others else 0
    height = under - y + len(early) * _LANE + note + 8
    return _Placed(group, x, y, width, height, spots, lanes)


def _reaching_far(groups: list[Group]) -> set[tuple[str, str]]:
    """Columns of which something is made that does not stand right behind them."""
    far = set()
    for group in groups:
        depths = _depths(group)
        for column in group.columns:
            for table, name in column.inputs:
                if table != group.name or depths[column.name] > depths.get(name, 0) + 1:
                    far.add((table, name))
    return far


def _depths(group: Group) -> dict[str, int]:
    """How many columns of the same table stand before each one."""
    by_name = {column.name: column for column in group.columns}
    known: dict[str, int] = {}

    def depth(name: str, seen: frozenset[str]) -> int:
        if name not in known:
            own = [c for t, c in by_name[name].inputs if t == group.name and c in by_name]
            known[name] = max(
                (1 + depth(c, seen | {name}) for c in own if c not in seen), default=0
            )
        return known[name]

    return {column.name: depth(column.name, frozenset({column.name})) for column in group.columns}


def _edge(placed: _Placed, start: tuple[float, float], name: str, end: tuple[float, float]) -> Html:
    """A curve from a column to what is made of it; past other columns it goes in a lane below."""
    x1, y1 = start[0] + _BOX, start[1] + _ROW / 2
    x2, y2 = end[0], end[1] + _ROW / 2
    way = f"M{x1:.0f},{y1:.0f} "
    lane = placed.lanes.get(name)
    if lane is not None and x2 > x1 + _GAP:
        inside = x2 <= placed.x + placed.width
        turn = x1 + _GAP - 8
        leave = x2 - _GAP + 8 if inside else placed.x + placed.width
        way += f"C{x1 + 30:.0f},{y1:.0f} {turn - 30:.0f},{lane:.0f} {turn:.0f},{lane:.0f} "
        way += f"L{leave:.0f},{lane:.0f} "
        x1, y1 = leave, lane
    bend = max(26.0, (x2 - x1) / 2)
    way += f"C{x1 + bend:.0f},{y1:.0f} {x2 - bend:.0f},{y2:.0f} {x2:.0f},{y2:.0f}"
    dot = tag("circle", cx=x2, cy=y2, r=2.5, class_="end")
    return tag("g", tag("path", d=way, class_="edge"), dot)


def _draw_box(placed: _Placed) -> Html:
    group = placed.group
    parts: list[Child] = [
        tag(
            "rect",
            x=placed.x,
            y=placed.y,
            width=placed.width,
            height=placed.height,
            rx=10,
            class_=f"box {group.kind}",
        ),
    ]
    title = tag(
        "text",
        cut(group.name, 8 + int(placed.width / 11)),
        tag("tspan", f"  {group.kind}", class_="kind"),
        x=placed.x + _PAD,
        y=placed.y + 23,
        class_="title",
    )
    where = path("tables", group.name)
    label = f"{group.kind} {group.name}"
    parts.append(tag("a", title, href=where, aria_label=label) if group.linked else title)
    if group.others:
        note = f"+ {count(group.others, 'other column')}"
        parts.append(
            tag("text", note, x=placed.x + _PAD, y=placed.y + placed.height - 11, class_="note")
        )
    return tag("g", parts)


def _draw_columns(placed: _Placed) -> Html:
    return tag("g", [_draw_column(placed, column) for column in placed.group.columns])


def _draw_column(placed: _Placed, column: Column) -> Html:
    x, y = placed.columns[column.name]
    kind = "plain" if column.how in ("", "copy") else "computed"
    room = _LETTERS - (2 if column.how == column.name else len(cut(column.how, 10)))
    parts = [
        tag("title", f"{column.name}: {_origin(column)}"),
        tag("rect", x=x, y=y, width=_BOX, height=_ROW, rx=6, class_=f"column {kind}"),
        tag("text", cut(column.name, max(8, room)), x=x + 10, y=y + 19),
    ]
    if column.how:
        how = "ƒ" if column.how == column.name else cut(column.how, 10)
        parts.append(tag("text", how, x=x + _BOX - 9, y=y + 19, text_anchor="end", class_="how"))
    if not placed.group.linked:
        return tag("g", parts)
    where = path("tables", placed.group.name) + "#columns"
    label = f"column {column.name} of {placed.group.name}: {_origin(column)}"
    return tag("a", parts, href=where, aria_label=label)


def _origin(column: Column) -> str:
    if not column.how:
        return "written by users"
    sources = ", ".join(f"{table}.{name}" for table, name in column.inputs) or "nothing"
    how = {"copy": "copied", "sql": "computed by SQL"}.get(column.how, f"computed by {column.how}")
    return f"{how} from {sources}"


def as_text(groups: list[Group]) -> Html:
    """The same graph as a list, for those who can't see the picture."""
    return tag("ul", [_group_text(group) for group in groups], class_="lineage-text")


def _group_text(group: Group) -> Html:
    name: Child = tag("a", group.name, href=path("tables", group.name))
    source = f" of {', '.join(group.sources)}" if group.sources else ""
    made = [
        tag("li", tag("code", column.name), ": ", _origin(column))
        for column in group.columns
        if column.how
    ]
    listed = tag("ul", made) if made else None
    return tag(
        "li", group.kind.capitalize(), " ", name if group.linked else group.name, source, listed
    )

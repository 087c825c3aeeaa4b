"""Pages of tables: all of them with their freshness, and one with its columns and first rows."""

from __future__ import annotations

import pyarrow as pa

from geneva.console.cells import cell, picture_address
from geneva.console.layout import card, cut, facts, grid, heading, lines, nothing, path, pill, row
from geneva.console.queries import ColumnFreshness, Freshness, TableInfo
from geneva.model.view_query import ViewColumn
from geneva.planning.refresh import RefreshPlan
from geneva.render.html import Child, Html, tag
from geneva.render.text import count
from geneva.storage.lance.preview import Preview
from geneva.storage.views.definition import visible_schema

PREVIEW_ROWS = 10
_SHORT_VERSION = 12


def tables_page(tables: list[TableInfo]) -> list[Child]:
    """All tables; how fresh each is comes later, by itself."""
    views = sum(table.view is not None for table in tables)
    under = f"{count(len(tables) - views, 'table')} and {count(views, 'view')}, and what is stale."
    title = heading("Tables", under)
    if not tables:
        hint = [
            "Make one with ",
            tag("code", "geneva demo"),
            " or ",
            tag("code", "db.create_table"),
            ".",
        ]
        return [title, nothing("There is no table in this database yet.", *hint)]
    names = ("Rows", "Version", "Computed columns", "Freshness")
    rows = [_table_row(table, names) for table in tables]
    return [title, grid("Tables and views", ("Name", *names), rows)]


def _table_row(table: TableInfo, labels: tuple[str, ...]) -> Html:
    if table.trouble is not None:
        trouble = tag("span", table.trouble, class_="trouble")
        return row(tag("span", table.name, class_="name"), "-", "-", "-", trouble, labels=labels)
    kind = _kind(table)
    name = [tag("a", table.name, href=path("tables", table.name), class_="name"), " ", kind]
    computed = [tag("code", column, class_="chip") for column in table.computed]
    return row(
        name,
        tag("span", f"{table.rows:,}", class_="number"),
        tag("span", table.version, class_="number"),
        computed or tag("span", "none", class_="dim"),
        lazy_freshness(table),
        labels=labels,
    )


def _kind(table: TableInfo) -> Html | None:
    if table.view is None:
        return None
    return pill("view" if table.view.udtf is None else "udtf", "view")


def lazy_freshness(table: TableInfo) -> Html:
    """Where a table's freshness will stand; without scripts, a link to it."""
    if not table.computed and table.view is None:
        return tag("span", "nothing to compute", class_="dim")
    where = path("tables", table.name, "freshness")
    return tag(
        "div",
        tag("a", "work out", href=where),
        data_load=where,
        class_="freshness",
        aria_live="polite",
    )


def freshness_part(found: Freshness) -> Html:
    """How fresh a table is, as a part of a page."""
    parts: list[Child] = [_column_freshness(column) for column in found.columns]
    if found.refresh is not None:
        parts.append(_refresh_freshness(found.refresh))
    if found.trouble is not None:
        parts.append(tag("div", tag("span", found.trouble, class_="trouble")))
    return tag("div", parts, class_="freshness-list")


def _column_freshness(column: ColumnFreshness) -> Html:
    name = tag("code", column.column)
    if column.trouble is not None:
        return tag("div", name, " ", tag("span", column.trouble, class_="trouble"))
    notes = [tag("div", note, class_="dim small") for note in column.notes]
    if not column.stale:
        return tag("div", pill("fresh", "done"), " ", name, notes)
    why = ", ".join(f"{rows:,} {reason}" for reason, rows in column.reasons)
    stale = f"{column.stale:,} of {count(column.total, 'row')} stale"
    return tag(
        "div",
        pill("stale", "stale"),
        " ",
        name,
        " ",
        tag("span", stale, class_="nowrap"),
        tag("span", f" · {why}", class_="dim"),
        _meter(column),
        notes,
    )


def _meter(column: ColumnFreshness) -> Html:
    """The share of rows that are right, as a thin bar; the words beside it say the same."""
    share = 100 * (column.total - column.stale) / max(1, column.total)
    bar = [
        tag("rect", width="100%", height=4, rx=2, class_="rest"),
        tag("rect", width=f"{share:.1f}%", height=4, rx=2, class_="right"),
    ]
    return tag("svg", bar, width="100%", height=4, aria_hidden="true", class_="meter")


def _refresh_freshness(plan: RefreshPlan) -> Html:
    if plan.is_empty:
        state = f" equals {plan.source} at version {plan.to_version}"
        return tag("div", pill("fresh", "done"), tag("span", state))
    behind = "never refreshed" if plan.from_version is None else f"at version {plan.from_version}"
    why = [
        f"{plan.rows_entering:,} to enter" if plan.rows_entering else "",
        f"{plan.rows_leaving:,} to leave"
        if plan.rows_leaving and plan.from_version is not None
        else "",
        f"{plan.rows_to_compute:,} values to fill" if plan.rows_to_compute else "",
    ]
    if plan.partitions is not None:
        why = [f"partitions: {plan.partitions}"]
    changes = ", ".join(part for part in why if part)
    return tag(
        "div",
        pill("stale", "stale"),
        f" {behind} of {plan.source}, which is at {plan.to_version}",
        tag("span", f" · {changes}" if changes else "", class_="dim"),
    )


def table_page(table: TableInfo, schema: pa.Schema, preview: Preview | str) -> list[Child]:
    """One table: where it stands, its columns, its first rows."""
    kind = _kind(table)
    under = f"{count(table.rows, 'row')} at version {table.version}"
    parts: list[Child] = [
        heading([table.name, " ", kind], under, crumbs=(("Tables", "/"),)),
    ]
    if table.computed or table.view is not None:
        parts.append(card("Freshness", lazy_freshness(table)))
    if table.view is not None:
        parts.append(card("Definition", definition(table)))
    parts.append(card("Columns", _columns(table, visible_schema(schema)), id="columns"))
    if isinstance(preview, str):
        parts.append(card("Rows", tag("p", preview, class_="trouble")))
    else:
        parts.append(card("Rows", _preview(table, preview), _pages(table, preview), id="rows"))
    return parts


def _source_of(column: ViewColumn) -> str:
    if column.udf_name:
        return f"{column.udf_name}({', '.join(column.inputs)})"
    return column.expression


def definition(table: TableInfo) -> Html:
    """What a view is made of."""
    query = table.view
    assert query is not None
    source: Child = tag("span", query.base_table, " (in another database)")
    if table.source_is_here:
        source = tag("a", query.base_table, href=path("tables", query.base_table))
    pairs: list[tuple[str, Child]] = [
        ("Source", source),
        ("Source version", table.source_version),
        (
            "Where",
            tag("code", query.where) if query.where else tag("span", "all rows", class_="dim"),
        ),
    ]
    if query.shuffle:
        pairs.append(("Shuffle", f"seed {query.seed}"))
    if query.limit is not None or query.offset:
        pairs.append(("Rows", f"limit {query.limit}, offset {query.offset or 0}"))
    if query.udtf is not None:
        pairs.append(("Partitions", tag("code", query.udtf.expression or "all rows are one")))
    columns = [
        [
            tag("code", c.name),
            tag("span", " = ", class_="dim"),
            tag("code", _source_of(c)),
        ]
        for c in query.columns
    ]
    return facts([*pairs, ("Columns", lines(columns))])


def _columns(table: TableInfo, schema: pa.Schema) -> Html:
    labels = ("Type", "Made by", "Inputs", "UDF version")
    rows = []
    for field in schema:
        made = table.computed.get(field.name)
        kind = tag("code", cut(str(field.type), 80), class_="type")
        name = tag("code", field.name, class_="name")
        if made is None:
            rows.append(row(name, kind, _dim(_origin(table, field.name)), "", "", labels=labels))
            continue
        version = tag("code", cut(made.udf_version, _SHORT_VERSION + 1), title=made.udf_version)
        inputs = [tag("code", path_, class_="chip") for path_ in made.inputs]
        udf = ["ƒ ", tag("code", made.udf_name)]
        if made.group:
            others = [c.name for c in table.computed.values() if c.group == made.group]
            shared = ", ".join(name for name in others if name != field.name)
            udf += [tag("code", f".{made.output}"), _dim(f" with {shared}" if shared else "")]
        rows.append(row(name, kind, udf, inputs, version, labels=labels))
    return grid(f"Columns of {table.name}", ("Column", *labels), rows)


def _origin(table: TableInfo, column: str) -> str:
    known = {c.name: c.kind.value for c in table.view.columns} if table.view is not None else {}
    origins = {"column": "copied from the source", "sql": "SQL over the source"}
    return origins.get(known.get(column, ""), "")


def _dim(text: str) -> Html:
    return tag("span", text, class_="dim")


def _preview(table: TableInfo, preview: Preview) -> Html:
    if not preview.rows:
        return nothing("There are no rows here.")
    names = [field.name for field in preview.fields]
    rows = [
        row(
            tag("span", preview.start + i, class_="number"),
            *[
                cell(value, field.type, picture_address(table.name, preview, field.name, i))
                for value, field in zip(values, preview.fields, strict=True)
            ],
            labels=names,
        )
        for i, values in enumerate(preview.rows)
    ]
    heads = [tag("code", name) for name in names]
    return grid(f"Rows of {table.name}", ("Row", *heads), rows)


def _pages(table: TableInfo, preview: Preview) -> Html | None:
    if preview.total_rows <= PREVIEW_ROWS:
        return None
    first, last = preview.start, preview.start + len(preview.rows)
    here = f"Rows {first:,} to {max(first, last - 1):,} of {preview.total_rows:,}"

    def link(text: str, start: int, *, there: bool) -> Html:
        if not there:
            return tag("span", text, class_="dim")
        return tag("a", text, href=path("tables", table.name, row=start) + "#rows")

    before = link("← Earlier", max(0, first - PREVIEW_ROWS), there=first > 0)
    after = link("Later →", first + PREVIEW_ROWS, there=last < preview.total_rows)
    return tag(
        "nav", before, tag("span", here, class_="dim"), after, class_="pages", aria_label="Rows"
    )

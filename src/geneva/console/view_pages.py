"""The page of views: their definitions, and the lineage graph."""

from __future__ import annotations

from geneva.console.layout import card, heading, nothing, path
from geneva.console.lineage import as_text, draw, lineage
from geneva.console.queries import TableInfo
from geneva.console.table_pages import definition, lazy_freshness
from geneva.render.html import Child, tag
from geneva.render.text import count


def views_page(tables: list[TableInfo]) -> list[Child]:
    """Views, and how everything comes from everything else."""
    views = [table for table in tables if table.view is not None]
    groups = lineage(tables)
    under = "From tables through columns to views: what is made of what."
    parts: list[Child] = [heading("Views & lineage", under)]
    if groups:
        picture = tag(
            "div",
            draw(groups),
            class_="scroll graph",
            tabindex="0",
            role="region",
            aria_label="Lineage",
        )
        text = tag("details", tag("summary", "The same as text"), as_text(groups))
        parts.append(card("Lineage", picture, text))
    if not views:
        hint = ["Make one with ", tag("code", "db.create_materialized_view(name, query)"), "."]
        return [*parts, nothing("There are no views in this database yet.", *hint)]
    for view in views:
        link = tag("a", count(view.rows, "row"), href=path("tables", view.name))
        parts.append(
            card(
                view.name, definition(view), lazy_freshness(view), id=f"view-{view.name}", note=link
            )
        )
    return parts

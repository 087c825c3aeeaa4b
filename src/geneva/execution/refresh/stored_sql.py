"""The SQL that is stored with a view: whether it means what it meant when it was stored.

This release stores every column under its exact name, in backticks. The first one stored what the
user wrote, and had two ways to read it.
"""

from __future__ import annotations

import pyarrow as pa

from geneva.errors import UserInputError
from geneva.model.sql import ambiguous_name, parse_sql, shown
from geneva.model.view_query import ColumnKind, ViewQuery


def check_stored_sql(view: str, query: ViewQuery, source: pa.Schema) -> None:
    """Refuse stored SQL that could mean something else today, or tomorrow."""
    texts = {f"column {c.name!r}": c.expression for c in query.columns if c.kind is ColumnKind.SQL}
    if query.where is not None:
        texts["filter"] = query.where
    for what, sql in texts.items():
        problem = _problem(sql, source)
        if problem is not None:
            raise UserInputError(
                f"View {view!r} can't be refreshed: its {what} is stored as {shown(sql)}, and "
                f"{problem}. Create the view again."
            )


def _problem(sql: str, source: pa.Schema) -> str | None:
    try:
        parsed = parse_sql(sql)
    except UserInputError as error:
        return str(error).partition(" can't be used: ")[2].rstrip(".")
    name, part = ambiguous_name(parsed, source), parsed.volatile_part()
    if name is not None:
        return (
            f"the release of Geneva that made it read {name} in two ways: put the column's exact "
            "name in `backticks`, or a string in 'single quotes'"
        )
    return f"{part!r} has another value each time: put the value itself" if part else None

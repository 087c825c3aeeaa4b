"""Views that are made from each other: a refresh of one would never be done."""

from __future__ import annotations

from collections.abc import Callable

from geneva.errors import UserInputError
from geneva.model.tables import TableRef
from geneva.model.view_query import ViewQuery
from geneva.render.text import raise_if_stopping
from geneva.storage.lance.dataset import Dataset, open_dataset
from geneva.storage.views.definition import read_view

SourceOf = Callable[[TableRef, ViewQuery], TableRef | None]
"""The source of a view, by its query; None: nobody knows where that is."""


def refuse_circle(view: TableRef, source: TableRef, opened: Dataset, source_of: SourceOf) -> None:
    """Refuse a view whose sources lead back to it. `opened` is its source.

    That takes no request where the source is a plain table, and one for each view on the way.
    """
    way = _circle(view, source, opened, source_of)
    if not way:
        return
    others = ", ".join(map(repr, way[1:]))
    what = f"it and {others} are made from each other" if others else "it is its own source"
    raise UserInputError(
        f"View {view.name!r} can't be refreshed: {what}. Drop one of them, or make it anew of "
        "another source."
    )


def _circle(
    view: TableRef, source: TableRef, opened: Dataset, source_of: SourceOf
) -> tuple[str, ...]:
    """A view and its sources, where they lead back to it; empty: they don't, or can't be read."""
    way = {view.uri: view.name}
    place: TableRef | None = source
    while place is not None and place.uri not in way:
        way[place.uri] = place.name
        try:
            dataset = opened if place is source else open_dataset(place)
            info = read_view(dataset.schema)
        except BaseException as error:  # noqa: BLE001  the plan of that view says what it is
            raise_if_stopping(error)
            return ()
        place = source_of(place, info.query) if info is not None else None
    return tuple(way.values()) if place is not None and place.uri == view.uri else ()

"""`table.search()`: LanceDB's query of a table's rows, which can become a query of Geneva's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from geneva.query import Query
from geneva.udf.chunker import Chunker
from geneva.udf.declare import UDF

if TYPE_CHECKING:
    from geneva.table import Table


class Search:
    """A query of LanceDB's, evaluated by LanceDB, and what was asked of it.

    With `where`, `select`, `limit` and `offset` it can be the definition of a view, too. What only
    Geneva's queries know (UDFs in `select`, `shuffle`, `add_column`, `create_materialized_view`)
    makes one of it; everything else is LanceDB's.
    """

    is_geneva_query: ClassVar = True

    def __init__(self, table: Table, builder: Any) -> None:
        """Use `Table.search`."""
        self._table, self._builder = table, builder
        self._asked: list[Callable[[Query], Query]] = []

    def query(self) -> Query:
        """The same as a query of Geneva's, to make a view of."""
        query = self._table.query()
        for ask in self._asked:
            query = ask(query)
        return query

    def where(self, where: Any, *args: Any, **kwargs: Any) -> Search:
        """Only the rows that satisfy an SQL condition, and those of earlier calls."""
        self._builder.where(where, *args, **kwargs)
        return self._noted(lambda query: query.where(where))

    def select(self, columns: Any) -> Any:
        """Only these columns: names, or `{name: SQL | UDF}`."""
        if isinstance(columns, Mapping) and any(map(_is_computed, columns.values())):
            return self.query().select(columns)
        self._builder.select(columns)
        return self._noted(lambda query: query.select(columns))

    def limit(self, limit: int | None) -> Search:
        """At most so many rows."""
        self._builder.limit(limit)
        return self._noted(lambda query: query.limit(limit))

    def offset(self, offset: int) -> Search:
        """Without the first so many rows."""
        self._builder.offset(offset)
        return self._noted(lambda query: query.offset(offset))

    # These two LanceDB takes as well, and does nothing about them on tables of a folder or store.

    def with_fragments(self, fragments: int | Sequence[int]) -> Query:
        """Only the rows of some fragments; a query of Geneva's."""
        return self.query().with_fragments(fragments)

    def with_row_address(self, with_row_address: bool = True) -> Query:  # noqa: FBT001, FBT002
        """With where the rows are, in a column `_rowaddr`; a query of Geneva's."""
        return self.query().with_row_address(with_row_address)

    def _noted(self, ask: Callable[[Query], Query]) -> Search:
        self._asked.append(ask)
        return self

    def __getattr__(self, name: str) -> Any:
        """Ask LanceDB's query, or one of Geneva's for what that doesn't know."""
        if name.startswith("_"):
            raise AttributeError(name)
        if hasattr(self._builder, name):
            return getattr(self._builder, name)
        if hasattr(Query, name):
            return getattr(self.query(), name)
        raise AttributeError(f"A search has no {name!r}.", name=name, obj=self)

    def __dir__(self) -> list[str]:
        """What LanceDB's and Geneva's queries can do."""
        public = (name for name in (*dir(self._builder), *dir(Query)) if not name.startswith("_"))
        return sorted({*object.__dir__(self), *public})

    def __repr__(self) -> str:
        """Show the table."""
        return f"Search({self._table.ref.name!r})"


def _is_computed(source: Any) -> bool:
    first = source[0] if isinstance(source, tuple | list) and source else source
    return isinstance(first, UDF | Chunker)

"""What a search adds by itself to the columns that it was asked for; Lance wants it said.

LanceDB plans the schema of a search of words as if nothing were searched: where it was asked for
the score of the words, it finds no such column. It asks for the schema before it makes a data
frame.
"""

from __future__ import annotations

from typing import Any

_WORDS = "_score"
_SCORES = {
    "LanceVectorQueryBuilder": "_distance",
    "LanceFtsQueryBuilder": _WORDS,
    "AsyncVectorQuery": "_distance",
    "AsyncFTSQuery": _WORDS,
}
"""By LanceDB's class of the search."""


def score_of(query: Any) -> list[str]:
    """The score of a LanceDB query, if it has one."""
    return [score for kind, score in _SCORES.items() if type(query).__name__ == kind]


def is_of_words(query: Any) -> bool:
    """Whether a LanceDB query is a search of words, and of nothing else."""
    return score_of(query) == [_WORDS]


def without_score(columns: Any) -> Any:
    """The columns that a search of words was asked for, but for the score; LanceDB's forms."""
    if isinstance(columns, dict):
        return {name: sql for name, sql in columns.items() if str(sql).strip("`") != _WORDS}
    return None if columns is None else [name for name in columns if name != _WORDS]


def with_schema(query: Any) -> Any:
    """A query of LanceDB's whose `output_schema` is known, also where it asks for a score."""
    if not is_of_words(query):
        return query

    def output_schema() -> Any:
        asked = query.to_query_object()
        asked.columns = without_score(asked.columns)
        return query._table._output_schema(asked)

    query.output_schema = output_schema
    return query

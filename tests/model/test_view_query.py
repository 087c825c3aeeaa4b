"""The records of a view's definition, and their text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.errors import UserInputError
from geneva.model.view_query import ColumnKind, Shown, ViewColumn, ViewQuery

TEXT = st.text(max_size=12)
PATHS = st.lists(TEXT, max_size=3).map(tuple)
COLUMNS = st.one_of(
    st.builds(ViewColumn, TEXT, st.just(ColumnKind.COLUMN), TEXT, PATHS),
    st.builds(ViewColumn, TEXT, st.just(ColumnKind.SQL), TEXT, PATHS),
    st.builds(
        ViewColumn,
        TEXT,
        st.sampled_from([ColumnKind.UDF, ColumnKind.CHUNKER]),
        st.just(""),
        PATHS,
        TEXT,
        TEXT,
        st.text("0123456789abcdef", max_size=8),
    ),
)
COUNTS = st.none() | st.integers(0)
QUERIES = st.builds(
    ViewQuery,
    TEXT,
    TEXT,
    st.none() | TEXT,
    PATHS,
    st.lists(COLUMNS, unique_by=lambda c: c.name, max_size=5).map(tuple),
    st.booleans(),
    st.integers(),
    COUNTS,
    COUNTS,
)
AGE = ViewColumn("age", ColumnKind.COLUMN, "age", ("age",))
QUERY = ViewQuery(
    base_table="users",
    base_db_uri="/db",
    where="age > 21 AND s.u = 1",
    where_inputs=("age", "s.u"),
    columns=(
        AGE,
        ViewColumn("next", ColumnKind.SQL, "age + 1", ("age",)),
        ViewColumn("mood", ColumnKind.UDF, "", ("text", "s.u"), "sentiment", "v1", "abc"),
    ),
    shuffle=True,
    shuffle_seed=42,
)


@given(QUERIES)
def test_a_query_survives_as_text(query: ViewQuery) -> None:
    text = query.to_json()
    assert ViewQuery.from_json(text) == query
    assert ViewQuery.from_json(text).to_json() == text
    assert ViewQuery.from_json(text).digest() == query.digest()


def test_the_text_has_the_documented_keys() -> None:
    stored = json.loads(QUERY.to_json())
    assert stored["table"] == "users"
    assert stored["columns"] == ["age", "next", "mood"]
    assert stored["where"] == "age > 21 AND s.u = 1"
    assert (stored["shuffle"], stored["shuffle_seed"]) == (True, 42)
    (udf,) = stored["column_udfs"]
    assert (udf["name"], udf["udf_name"], udf["udf"]) == ("mood", "sentiment", "_udfs/abc")


def test_a_shuffle_has_a_seed() -> None:
    assert QUERY.seed == 42
    assert ViewQuery("t", "/", None, (), (AGE,), shuffle=False, shuffle_seed=42).seed is None
    with pytest.raises(ValueError, match="seed"):
        ViewQuery("t", "/", None, (), (AGE,), shuffle=True)


def test_the_chunker_is_found() -> None:
    clips = ViewColumn("clips", ColumnKind.CHUNKER, "", ("video",), "clips", "v", "d")
    assert QUERY.chunker is None
    assert ViewQuery("t", "/", None, (), (AGE, clips)).chunker == clips


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', "null"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserInputError, match="create"):
        ViewQuery.from_json(text)


def test_the_digest_tells_queries_apart() -> None:
    other = ViewQuery.from_json(QUERY.to_json().replace("age > 21", "age > 22"))
    assert other.digest() != QUERY.digest()


@pytest.mark.parametrize(
    ("column", "shown", "place"),
    [
        (("t", "c", "f"), "column 'c' of table 't'", "Table 't', column 'c'"),
        (("v (chunks)", "__chunks", "f"), "the rows of 'f' of view 'v'", "View 'v', rows of 'f'"),
        (("v (chunks)", "c", "f"), "column 'c' of view 'v'", "View 'v', column 'c'"),
    ],
)
def test_what_is_hidden_is_shown_by_other_names(
    column: tuple[str, str, str], shown: str, place: str
) -> None:
    found = Shown.of(*column)
    assert (str(found), found.place) == (shown, place)

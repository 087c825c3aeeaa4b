"""SQL columns and filters of views: what can be made can be refreshed, what fails says where."""

from __future__ import annotations

import json
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva import Connection, Table
from geneva.errors import InvalidFilterError, SQLExecutionError, UserInputError
from geneva.model.view_query import ViewQuery
from geneva.storage.views.definition import QUERY_KEY
from view_support import STABLE


@pytest.fixture
def source(local_db: Connection) -> Table:
    data = pa.table(
        {
            "id": [0, 1, 2],
            "Cap": ["One", "Two", "Tri"],
            "a": [1, 1, 1],
            "A": [5, 0, -5],
            "__row": [70, 80, 90],
            "blob": [b"x", None, b"z"],
        }
    )
    return local_db.create_table("src", data, storage_options=STABLE)


def refreshed(db: Connection, source: Table, sql: str) -> list[Any]:
    view = db.create_materialized_view("v", source.query().select({"id": "id", "out": sql}))
    view.refresh()
    stored: list[Any] = view.to_arrow().sort_by("id")["out"].to_pylist()
    return stored


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("substr(`Cap`, 1, 2)", ["On", "Tw", "Tr"]),
        ("A::text", ["5", "0", "-5"]),
        ("cast(A as varchar)", ["5", "0", "-5"]),
        ("make_array(substr(Cap, 1, 1), 'x')", [["O", "x"], ["T", "x"], ["T", "x"]]),
        ("named_struct('k', left(Cap, 1))", [{"k": "O"}, {"k": "T"}, {"k": "T"}]),
        ("arrow_cast(blob, 'BinaryView')", [b"x", None, b"z"]),
        ('lower("Cap")', ["one", "two", "tri"]),
        ('CASE WHEN true THEN lower("Cap") END', ["one", "two", "tri"]),
        ("A + 0", [5, 0, -5]),
        ("CASE WHEN A > 0 THEN A + 0 END", [5, None, None]),
        ("__row + 0", [70, 80, 90]),
        ("CASE WHEN true THEN __row END", [70, 80, 90]),
    ],
)
def test_what_can_be_made_can_be_refreshed(
    local_db: Connection, source: Table, sql: str, expected: list[Any]
) -> None:
    assert refreshed(local_db, source, sql) == expected


@pytest.mark.parametrize("sql", ["random/**/()", '"now"()', "id + `random`()", "_rowaddr"])
def test_another_value_each_time_is_no_view(local_db: Connection, source: Table, sql: str) -> None:
    with pytest.raises(UserInputError, match="another value each time"):
        local_db.create_materialized_view("v", source.query().select({"out": sql}))
    assert "v" not in local_db.table_names()


def test_what_a_table_can_not_hold_is_no_view(local_db: Connection, source: Table) -> None:
    with pytest.raises(UserInputError, match="which a table can't hold"):
        local_db.create_materialized_view("v", source.query().select({"out": "interval '1 day'"}))


@pytest.mark.parametrize("sql", ["sum(a)", "count(*) OVER ()", "median(a) + 1", "unnest([1, 2])"])
def test_more_than_one_row_is_refused_in_a_sentence(source: Table, sql: str) -> None:
    with pytest.raises(UserInputError, match="row") as caught:
        source.query().select({"out": sql})
    message = str(caught.value)
    assert message.startswith("Column 'out': The SQL expression ")
    assert len(message) < 200
    assert ".rs" not in message


def test_sql_that_fails_names_view_column_and_row(local_db: Connection, source: Table) -> None:
    for sql in ("10 / A", "CASE WHEN id >= 1 THEN cast(`Cap` as int) END"):
        query = source.query().select({"id": "id", "out": sql})
        with pytest.raises(SQLExecutionError, match=r"'out'.*row of id 1 "):
            query.to_arrow()
        view = local_db.create_materialized_view("v", query)
        with pytest.raises(SQLExecutionError, match=r"'v', column 'out'.*row of id 1 ") as caught:
            view.refresh()
        assert ".rs" not in str(caught.value)
        local_db.drop_table("v")


def test_a_filter_that_fails_names_the_row(local_db: Connection, source: Table) -> None:
    with pytest.raises(InvalidFilterError, match="row of address 1 "):
        source.query().where("10 / A > 1").to_list()
    query = source.query().where("10 / A > 1").select(["id"])
    with pytest.raises(InvalidFilterError, match="row of address 1 "):
        local_db.create_materialized_view("v", query)
    assert "v" not in local_db.table_names()


def test_a_column_that_comes_later_changes_nothing(local_db: Connection, source: Table) -> None:
    query = source.query().where("CAP <> 'Tri'").select({"id": "ID", "out": "upper(CAP)"})
    view = local_db.create_materialized_view("v", query)
    view.refresh()
    source.add_columns({"CAP": "'no'"})
    source.add([{"id": 3, "Cap": "Four", "a": 1, "A": 1, "__row": 1, "blob": b"", "CAP": "no"}])
    view.refresh()
    assert view.to_arrow().sort_by("id")["out"].to_pylist() == ["ONE", "TWO", "FOUR"]


@pytest.mark.parametrize(
    ("where", "sql", "refused"),
    [
        ("id >= 0", 'lower("Cap")', '"Cap"'),
        ('"id" IS NOT NULL', "lower(`Cap`)", '"id"'),
        ("id >= 0", "CASE WHEN A > 0 THEN 1 END", "A in two ways"),
        ("id >= 0", 'upper("now"()::text)', "another value"),
        (" OR ".join(["id >= 0"] * 1_000), "id", "nested more than"),
        ("ID >= 0", "lower(CAP)", None),
        ("id >= 0", "a + `A`", None),
    ],
)
def test_what_the_first_release_stored(
    local_db: Connection, source: Table, where: str, sql: str, refused: str | None
) -> None:
    query = source.query().where("id >= 0").select({"id": "id", "out": "lower(Cap)"})
    view = local_db.create_materialized_view("v", query)
    dataset = lance.dataset(view.ref.uri)
    stored = json.loads(dataset.schema.metadata[QUERY_KEY.encode()])
    stored["where"] = where
    for column in stored["column_sources"]:
        if column["name"] == "out":
            column["expression"] = sql
    assert ViewQuery.from_json(json.dumps(stored)).where == where
    dataset.update_schema_metadata({QUERY_KEY: json.dumps(stored, sort_keys=True)}, replace=False)
    view = local_db.open_table("v")  # type: ignore[assignment]
    if refused is None:
        view.refresh()
        return
    with pytest.raises(UserInputError, match=refused) as caught:
        view.refresh()
    assert "View 'v' can't be refreshed" in str(caught.value)
    assert "Create the view again" in str(caught.value)
